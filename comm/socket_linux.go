package comm

import (
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/platform"
)

// newSocketName is a random name for a unix socket: in a folder, or, where that is
// empty, in the abstract namespace, where nothing is left behind by a process
// that is killed.
func newSocketName(folder string) string {
	if folder != "" {
		return filepath.Join(folder, rand.Text())
	}
	return "@switchyard-" + rand.Text()
}

// listenSocket opens a unix socket of such a name. The file of one in a folder
// goes when it is closed.
func listenSocket(folder string) (*net.UnixListener, error) {
	return net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: newSocketName(folder)})
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
// and the network namespace, or the folder of the sockets, and what the
// environment calls the host. It is empty if that is not known, which is an
// error only where there is a folder.
func hostID(sockets string) (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", nil
	}
	within, err := os.Readlink("/proc/self/ns/net")
	if sockets != "" {
		var stat unix.Stat_t
		if err = unix.Stat(sockets, &stat); err != nil {
			return "", fmt.Errorf("sockets %q: %w", sockets, err)
		}
		within = fmt.Sprintf("folder:[%x:%d]", stat.Dev, stat.Ino)
	}
	if err != nil {
		return "", nil
	}
	id := strings.TrimSpace(string(boot)) + " " + within
	if name := env.HostID(); name != "" {
		id = name + " " + id
	}
	return id, nil
}
