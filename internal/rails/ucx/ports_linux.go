//go:build cgo && linux

package ucx

import (
	"encoding/binary"
	"fmt"
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
// the control plane alone, and the kernel drops what does not come from an address of another host of the group.

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

// shut has the kernel drop what comes to a port of this process from others than the config's. strangers says that somebody has come before.
// Some kernels let only privileged processes do that. There the port stays open, which SECURITY.md says.
func shut(port int, cfg *rails.Config) (strangers bool, err error) {
	if !cfg.Interface.IsValid() {
		return false, nil
	}
	program := filter(cfg.From)
	serr := sockets(func(fd, own, _ int) {
		if own != port || err != nil {
			return
		}
		if listens, lerr := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); lerr != nil || listens == 0 {
			strangers = true
			return
		}
		if err = attach(fd, program); err == unix.EPERM {
			err = nil
		} else if err != nil {
			err = fmt.Errorf("ucx: %w: shut port %d: %w", ErrUnavailable, port, err)
		}
	})
	if err == nil {
		err = serr
	}
	return strangers, err
}

// filter is a program for the kernel that takes packets from these addresses only.
func filter(from []netip.Addr) []unix.SockFilter {
	const network = ^uint32(0x100000) + 1 // where the header of IP begins, SKF_NET_OFF
	const accept, drop = 0xffffffff, 0
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
		program = append(program, end(accept))
	}
	return append(program, end(drop))
}

// admits says who is let in.
func admits(cfg *rails.Config) string {
	if !cfg.Interface.IsValid() {
		return ""
	}
	return fmt.Sprintf(" on the interface of %v, for %v", cfg.Interface, cfg.From)
}

func attach(fd int, program []unix.SockFilter) error {
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog)
}

// seal has the kernel drop all that still comes to a port of this process, and from ports of others.
func seal(port int, others []int) {
	_ = sockets(func(fd, own, other int) {
		if own == port || slices.Contains(others, other) {
			_ = attach(fd, filter(nil))
		}
	})
}

// cut ends the TCP connections of a port of this process, and those with ports of others.
func cut(port int, others []int) {
	_ = sockets(func(fd, own, other int) {
		if own == port || slices.Contains(others, other) {
			_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		}
	})
}
