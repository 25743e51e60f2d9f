package comm

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// listenSocket opens a unix socket of a random name in the abstract namespace,
// where nothing is left behind by a process that is killed.
func listenSocket() (*net.UnixListener, error) {
	var name [16]byte
	rand.Read(name[:])
	return net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: "@switchyard-" + hex.EncodeToString(name[:])})
}

// checkUser refuses the other end of a connection if another user opened it.
func checkUser(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if cerr != nil {
		return fmt.Errorf("peer credentials: %w", cerr)
	}
	if own := os.Geteuid(); int(cred.Uid) != own {
		return fmt.Errorf("it belongs to user %d, process %d; we are user %d", cred.Uid, cred.Pid, own)
	}
	return nil
}

// hostID names what ranks must share to reach each other's sockets: the boot
// and the network namespace. It is empty if that is not known.
func hostID() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	ns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(boot)) + " " + ns
}
