package comm

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/platform"
)

// listenSocket opens a unix socket of a random name in the abstract namespace,
// where nothing is left behind by a process that is killed.
func listenSocket() (*net.UnixListener, error) {
	var name [16]byte
	rand.Read(name[:])
	return net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: "@switchyard-" + hex.EncodeToString(name[:])})
}

// checkUser refuses the other end of a unix socket's connection if another user
// opened it. Of other connections that is not known.
func checkUser(c net.Conn) error {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return nil
	}
	peer, err := platform.Credentials(conn)
	if err != nil {
		return fmt.Errorf("peer credentials: %w", err)
	}
	if own := os.Geteuid(); int(peer.Uid) != own {
		return fmt.Errorf("it belongs to user %d, process %d; we are user %d", peer.Uid, peer.Pid, own)
	}
	return nil
}

// peerName names the other end of a connection in logs.
func peerName(c net.Conn) string {
	if conn, ok := c.(*net.UnixConn); ok {
		if peer, err := platform.Credentials(conn); err == nil {
			return fmt.Sprintf("process %d", peer.Pid)
		}
	}
	return c.RemoteAddr().String()
}

// hostID names what ranks must share to reach each other's sockets: the boot
// and the network namespace, and what the environment calls the host. It is
// empty if that is not known.
func hostID() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	ns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return ""
	}
	id := strings.TrimSpace(string(boot)) + " " + ns
	if name := env.HostID(); name != "" {
		id = name + " " + id
	}
	return id
}
