//go:build cgo && linux

package ucx

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/rails"
)

// UCX parses what comes to its port as if it were a rank's: bytes of a stranger end the process. So it listens at one port, on the interface of
// the control plane alone, and the kernel brings to it only what comes from an address of another host of the group.

// portTries is how often another port is tried.
const portTries = 8

// freePort is a port at which nobody listens now, of UCX_TCP_PORT_RANGE where that is set.
func freePort() (int, error) {
	first, last := 0, 0
	if r := os.Getenv("UCX_TCP_PORT_RANGE"); r != "" && r != "0" {
		from, to, ok := strings.Cut(r, "-")
		if !ok {
			to = from
		}
		var err error
		if first, err = strconv.Atoi(from); err == nil {
			last, err = strconv.Atoi(to)
		}
		if err != nil || first < 1 || last < first || last > 65535 {
			return 0, fmt.Errorf("ucx: %w: UCX_TCP_PORT_RANGE is %q, want a range such as 20000-20100", ErrUnavailable, r)
		}
	}
	var ln net.Listener
	err := error(nil)
	for _, i := range rand.Perm(last - first + 1) {
		if ln, err = net.Listen("tcp", fmt.Sprintf(":%d", first+i)); err == nil {
			port := ln.Addr().(*net.TCPAddr).Port
			return port, ln.Close()
		}
	}
	return 0, fmt.Errorf("ucx: %w: no free port: %w", ErrUnavailable, err)
}

// devicesOf are UCX's devices on which it reaches other hosts and is not reached by others: the interface of an address, and all of RDMA, which
// have no port. They are not limited where the address is not valid, or by UCX_NET_DEVICES.
func devicesOf(at netip.Addr) (string, error) {
	if !at.IsValid() || os.Getenv("UCX_NET_DEVICES") != "" {
		return "", nil
	}
	all, err := net.Interfaces()
	if err != nil {
		return "", fmt.Errorf("ucx: %w: interfaces: %w", ErrUnavailable, err)
	}
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil || !slices.ContainsFunc(addrs, func(a net.Addr) bool { return addressOf(a) == at.WithZone("") }) {
			continue
		}
		names := []string{i.Name}
		ports, _ := filepath.Glob("/sys/class/infiniband/*/ports/*")
		for _, p := range ports {
			names = append(names, filepath.Base(filepath.Dir(filepath.Dir(p)))+":"+filepath.Base(p))
		}
		return strings.Join(names, ","), nil
	}
	return "", fmt.Errorf("ucx: %w: no interface has the address %v", ErrUnavailable, at)
}

func addressOf(a net.Addr) netip.Addr {
	prefix, err := netip.ParsePrefix(a.String())
	if err != nil {
		return netip.Addr{}
	}
	return prefix.Addr().Unmap()
}

// sockets calls f for each TCP socket of this process with its own port and the other end's, 0 without one.
func sockets(f func(fd, port, other int)) error {
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("ucx: open files: %w", err)
	}
	portOf := func(a unix.Sockaddr) int {
		switch a := a.(type) {
		case *unix.SockaddrInet4:
			return a.Port
		case *unix.SockaddrInet6:
			return a.Port
		}
		return 0
	}
	for _, n := range names {
		fd, err := strconv.Atoi(n.Name())
		if err != nil {
			continue
		}
		if kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || kind != unix.SOCK_STREAM {
			continue
		}
		own, err := unix.Getsockname(fd)
		if err != nil || portOf(own) == 0 {
			continue
		}
		other, _ := unix.Getpeername(fd)
		f(fd, portOf(own), portOf(other))
	}
	return nil
}

// guard has a listener of this process at the address of each of UCX's. Nobody accepts what connects with it.
type guard []int

// shut has the kernel bring those who connect with a port of this process to the guard, but for the config's. strangers says that somebody has
// come before. A filter of the listener's own would do that too, but newer kernels let only those with CAP_NET_ADMIN filter a socket of TCP (6.18.44
// does so; UDP and Unix sockets take the same program), and every process may say which listener of its port has a connection (Linux 4.6).
func shut(port int, cfg *rails.Config) (g guard, strangers bool, err error) {
	if !cfg.Interface.IsValid() {
		return nil, false, nil
	}
	serr := sockets(func(fd, own, _ int) {
		if own != port || err != nil {
			return
		}
		if listens, lerr := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); lerr != nil || listens == 0 {
			return
		}
		var s int
		if s, err = guarding(fd, cfg.From); err == nil {
			g = append(g, s)
		}
	})
	if err == nil {
		err = serr
	}
	if err == nil {
		strangers, err = connected(port)
	}
	if err != nil {
		g.close()
		return nil, false, fmt.Errorf("ucx: %w: shut port %d: %w", ErrUnavailable, port, err)
	}
	return g, strangers, nil
}

// guarding makes a listener at another's address, and has the other take connections from these addresses only.
func guarding(other int, from []netip.Addr) (fd int, err error) {
	at, err := unix.Getsockname(other)
	if err != nil {
		return -1, err
	}
	family, err := unix.GetsockoptInt(other, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return -1, err
	}
	if fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, err
	}
	err = cmp.Or(
		unix.SetsockoptInt(other, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1), // the kernel takes its least
		unix.Bind(fd, at),
		unix.Listen(fd, 1),
		choose(fd, from),
	)
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// choose has the kernel bring connections from these addresses to the first listener of the port of fd, and all others to the second.
func choose(fd int, from []netip.Addr) error {
	const first, second = 0, 1
	return attach(fd, unix.SO_ATTACH_REUSEPORT_CBPF, filter(from, first, second))
}

// connected says whether there are connections with a port of this process, also some that nobody has accepted yet.
func connected(port int) (bool, error) {
	const timeWait, listen = "06", "0A"
	for _, name := range []string{"tcp", "tcp6"} {
		table, err := os.ReadFile("/proc/self/net/" + name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // without IPv6
		} else if err != nil {
			return false, err
		}
		for line := range strings.Lines(string(table)) {
			f := strings.Fields(line) // number, own address, the other's, state
			if len(f) > 3 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) && f[3] != timeWait && f[3] != listen {
				return true, nil
			}
		}
	}
	return false, nil
}

func (g guard) close() {
	for _, fd := range g {
		_ = unix.Close(fd)
	}
}

// filter is a program for the kernel that says theirs of packets from these addresses, and others of all others.
func filter(from []netip.Addr, theirs, others uint32) []unix.SockFilter {
	const network = ^uint32(0x100000) + 1 // where the header of IP begins, SKF_NET_OFF
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: network + at}
	}
	equal := func(value uint32, otherwise uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value, Jf: otherwise}
	}
	end := func(value uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: value} }
	var program []unix.SockFilter
	for _, a := range from {
		version, source, b := uint32(0x40), uint32(12), a.AsSlice()
		if a.Is6() {
			version, source = 0x60, 8
		}
		words := uint8(len(b) / 4)
		program = append(program, unix.SockFilter{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: network},
			unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0xf0}, equal(version, 2*words+1))
		for i := range words {
			program = append(program, load(source+4*uint32(i)), equal(binary.BigEndian.Uint32(b[4*i:]), 2*(words-i)-1))
		}
		program = append(program, end(theirs))
	}
	return append(program, end(others))
}

// admits says who is let in.
func admits(cfg *rails.Config) string {
	if !cfg.Interface.IsValid() {
		return ""
	}
	return fmt.Sprintf(" on the interface of %v, for %v", cfg.Interface, cfg.From)
}

func attach(fd, option int, program []unix.SockFilter) error {
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, option, &prog)
}

// seal brings all who still connect to the guard, and has the kernel drop what comes over the connections that stand, where it lets this process.
func seal(port int, others []int, g guard) {
	for _, fd := range g {
		_ = choose(fd, nil)
	}
	const drop = 0
	_ = sockets(func(fd, own, other int) {
		if own == port || slices.Contains(others, other) {
			_ = attach(fd, unix.SO_ATTACH_FILTER, filter(nil, drop, drop))
		}
	})
}

// cut ends the TCP connections of a port of this process, and those with ports of others. The listener stays: UCX 1.13.1 closes one that is shut
// down, and still has its number among those that it looks after, so that no more UCX opens in this process once another descriptor has it.
func cut(port int, others []int) {
	_ = sockets(func(fd, own, other int) {
		if own == port && other != 0 || slices.Contains(others, other) {
			_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		}
	})
}
