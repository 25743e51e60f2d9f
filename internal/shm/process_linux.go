package shm

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Nonce is a random number in this process's own memory. A read of it there is a read of this process's memory and no
// other's: not that of a process that got the same number later, or has it in another namespace.
type Nonce [16]byte

// NewNonce makes one. It must be kept for as long as peers may read this process's memory.
//
//go:noinline
func NewNonce() *Nonce {
	n := new(Nonce)        // not inlined, so that it is never on a stack, which moves
	_, _ = rand.Read(n[:]) // never fails
	return n
}

// Revoke ends reads of this process's memory by who knows the number: one that has not ended is an error.
func (n *Nonce) Revoke() { _, _ = rand.Read(n[:]) }

// Process is how the memory of another process is found.
type Process struct {
	PID   int
	Space uint32  // the PID's namespace, 0 where that is not known
	At    uintptr // where it keeps its nonce
	Nonce Nonce
}

// CardBytes is the length of a card, which tells other processes of one.
const CardBytes = 32

// Self is this process, with n as its nonce.
func Self(n *Nonce) Process {
	return Process{PID: os.Getpid(), Space: space(), At: uintptr(unsafe.Pointer(n)), Nonce: *n}
}

// space is the number of this process's PID namespace. The kernel keeps it in 32 bits.
func space() uint32 {
	var st unix.Stat_t
	if unix.Stat("/proc/self/ns/pid", &st) != nil {
		return 0
	}
	return uint32(st.Ino)
}

// Write writes p on a card.
func (p *Process) Write(card []byte) {
	words := View[uint64](card[:CardBytes])
	words[0], words[1] = uint64(p.Space)<<32|uint64(uint32(p.PID)), uint64(p.At)
	copy(card[16:], p.Nonce[:])
}

// ReadCard is the process that a card tells of.
func ReadCard(card []byte) Process {
	words := View[uint64](card[:CardBytes])
	return Process{PID: int(uint32(words[0])), Space: uint32(words[0] >> 32), At: uintptr(words[1]), Nonce: Nonce(card[16:CardBytes])}
}

var (
	// errStranger means that the memory was another process's than that meant.
	errStranger = errors.New("another process has its number")
	// errElsewhere means that the number says nothing here.
	errElsewhere = errors.New("it is in another PID namespace than this process: start both in one " +
		"(docker run --pid, shareProcessNamespace of a pod), or allocate messages in the heap")
)

// Read fills dst with what lies at addr of the process's memory, in one copy and without its help. It needs the
// permission to trace the process. After an error dst holds anything. A write of the process meanwhile may or may not
// be seen; memory that it cannot read itself is an error.
func (p *Process) Read(dst []byte, addr uintptr) error {
	var seen Nonce
	local := [...]unix.Iovec{{Base: unsafe.SliceData(dst)}, {Base: &seen[0]}}
	local[0].SetLen(len(dst))
	local[1].SetLen(len(seen))
	// The nonce comes last: whose memory this call reads is settled when it begins.
	remote := [...]unix.RemoteIovec{{Base: addr, Len: len(dst)}, {Base: p.At, Len: len(seen)}}
	n, err := unix.ProcessVMReadv(p.PID, local[:], remote[:], 0)
	switch {
	case err != nil:
	case n != len(dst)+len(seen):
		err = unix.EFAULT
	case seen != p.Nonce:
		err = errStranger
	default:
		return nil
	}
	return fmt.Errorf("shm: read %d bytes of process %d: %w", len(dst), p.PID, err)
}

// Probe reports whether Read works at all: an error says why not.
func (p *Process) Probe() error {
	if own := space(); p.Space != own && p.Space != 0 && own != 0 {
		return fmt.Errorf("shm: process %d: %w", p.PID, errElsewhere)
	}
	return p.Read(nil, 0)
}
