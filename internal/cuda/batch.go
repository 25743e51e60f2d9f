package cuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"unsafe"
)

// LaunchFlags are the properties of a launch.
type LaunchFlags uint32

// The flags.
const (
	// Cooperative launches all blocks at once or not at all, which is refused with CooperativeTooLarge.
	Cooperative LaunchFlags = 1 << iota
	// Programmatic lets the kernel begin before the one ahead of it in the stream has ended; it waits in its own code.
	Programmatic
	// RemoteDomain puts the kernel's stores in the memory synchronisation domain of communication: its fences do not wait for other kernels'
	// stores.
	RemoteDomain
)

// Launch is one kernel launch.
type Launch struct {
	Function    Function
	Grid, Block [3]uint32
	SharedBytes uint32
	Cluster     uint32 // blocks of a cluster along x, 0 or 1: none
	Flags       LaunchFlags
	// Args is the kernel's one parameter, a struct, as it lies in memory. Its length must be the struct's. A kernel without
	// parameters has none.
	Args []byte
}

// BytesOf is the memory of a struct with a field of type structs.HostLayout, as Args takes it.
func BytesOf[T any](v *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)) }

// StructOf is a struct with a field of type structs.HostLayout that begins at the first byte of b, which is aligned for it.
func StructOf[T any](b []byte) *T {
	var v T
	return (*T)(unsafe.Pointer(unsafe.SliceData(b[:unsafe.Sizeof(v)])))
}

// The commands' kinds and sizes; swcuda.h has the same.
const (
	cmdLaunch = iota + 1
	cmdCopy
	cmdCopies
	cmdSet
	cmdWaitValue
	cmdWriteValue
	cmdRecord
	cmdWaitEvent

	launchBytes = 56
	wordsBytes  = 40
)

// Span is one copy of a list.
type Span struct {
	Dst, Src uintptr
	Bytes    int64
}

// Batch collects work that one call submits. Its zero value is empty and ready. A stream is named by its place in the
// list that Submit gets, so a batch can be kept and submitted again, also to other streams. It is not for concurrent
// building; concurrent submissions of a finished batch are fine.
type Batch struct{ b []byte }

// Reset empties the batch and keeps its memory.
func (b *Batch) Reset() { b.b = b.b[:0] }

func (b *Batch) header(kind, stream, bytes int) {
	if stream < 0 || stream > math.MaxUint16 {
		panic("cuda: stream index of a batch is out of range")
	}
	b.b = binary.LittleEndian.AppendUint16(b.b, uint16(kind))
	b.b = binary.LittleEndian.AppendUint16(b.b, uint16(stream))
	b.b = binary.LittleEndian.AppendUint32(b.b, uint32(bytes))
}

func (b *Batch) words(kind, stream int, w0, w1, w2, w3 uint64) {
	b.header(kind, stream, wordsBytes)
	for _, w := range [4]uint64{w0, w1, w2, w3} {
		b.b = binary.LittleEndian.AppendUint64(b.b, w)
	}
}

// Launch adds a kernel. The arguments are copied.
func (b *Batch) Launch(stream int, l Launch) {
	n := (len(l.Args) + 7) &^ 7
	b.header(cmdLaunch, stream, launchBytes+n)
	b.b = binary.LittleEndian.AppendUint64(b.b, uint64(l.Function))
	for _, v := range [10]uint32{l.Grid[0], l.Grid[1], l.Grid[2], l.Block[0], l.Block[1], l.Block[2], l.SharedBytes,
		uint32(l.Flags), l.Cluster, uint32(len(l.Args))} {
		b.b = binary.LittleEndian.AppendUint32(b.b, v)
	}
	b.b = append(b.b, l.Args...)
	for range n - len(l.Args) {
		b.b = append(b.b, 0)
	}
}

// Copy adds a copy of n bytes.
func (b *Batch) Copy(stream int, dst, src uintptr, n int64) {
	b.words(cmdCopy, stream, uint64(dst), uint64(src), uint64(n), 0)
}

// Copies adds a list of copies. Unordered lets the driver run them in any order and at the same time, by its batch call
// where it has one.
func (b *Batch) Copies(stream int, list []Span, unordered bool) {
	if len(list) == 0 {
		return
	}
	var flags uint64
	if unordered {
		flags = 1
	}
	bytes := 24 + 24*len(list)
	b.header(cmdCopies, stream, bytes)
	b.b = binary.LittleEndian.AppendUint64(b.b, uint64(len(list)))
	b.b = binary.LittleEndian.AppendUint64(b.b, flags)
	for _, c := range list {
		b.b = binary.LittleEndian.AppendUint64(b.b, uint64(c.Dst))
	}
	for _, c := range list {
		b.b = binary.LittleEndian.AppendUint64(b.b, uint64(c.Src))
	}
	for _, c := range list {
		b.b = binary.LittleEndian.AppendUint64(b.b, uint64(c.Bytes))
	}
}

// Set adds setting n bytes to a value.
func (b *Batch) Set(stream int, dst uintptr, value byte, n int64) {
	b.words(cmdSet, stream, uint64(dst), uint64(value), uint64(n), 0)
}

// WaitValue adds Context.WaitValue.
func (b *Batch) WaitValue(stream int, addr uintptr, value uint64) {
	b.words(cmdWaitValue, stream, uint64(addr), value, 0, 0)
}

// WriteValue adds Context.WriteValue.
func (b *Batch) WriteValue(stream int, addr uintptr, value uint64) {
	b.words(cmdWriteValue, stream, uint64(addr), value, 0, 0)
}

// Record adds recording an event.
func (b *Batch) Record(stream int, e Event) { b.words(cmdRecord, stream, uint64(e), 0, 0, 0) }

// WaitEvent adds waiting for an event.
func (b *Batch) WaitEvent(stream int, e Event) { b.words(cmdWaitEvent, stream, uint64(e), 0, 0, 0) }

// Submit runs the batch's commands in order, in one cgo crossing. It allocates nothing. An error means that the commands
// before the one it names are enqueued and those after are not.
func (c *Context) Submit(b *Batch, streams ...uintptr) error {
	if c.closed.Load() || c.dev.d.t == nil {
		return ErrClosed
	}
	if len(b.b) == 0 {
		return nil
	}
	r, at := submit(c.dev.d.t, c.h, streams, b.b)
	runtime.KeepAlive(b)
	if r == 0 {
		return nil
	}
	return c.dev.d.error(fmt.Sprintf("submit: %s at byte %d", commandName(b.b[at]), at), r)
}

func commandName(kind byte) string {
	names := [...]string{"", "cuLaunchKernelEx", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemsetD8Async", "cuStreamWaitValue64",
		"cuStreamWriteValue64", "cuEventRecord", "cuStreamWaitEvent"}
	if int(kind) < len(names) {
		return names[kind]
	}
	return "unknown command"
}
