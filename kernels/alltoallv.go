package kernels

import (
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
)

// Routes is the plan of a variable-size all-to-all for one rank: what goes where, in bytes. Slices are indexed by rank
// and are read only.
type Routes struct {
	SendBytes, SendOffsets []int64 // in the source buffer
	RecvBytes, RecvOffsets []int64 // in the destination buffer
	// Order lists the other ranks as this rank sends to them. It receives in the mirrored order: ReverseOrder[i] is the
	// rank whose Order[i] is this one. On a GPU, where nothing is received in an order, Order may be any.
	Order, ReverseOrder []int32
	// Window is how many peers this rank receives from at the same time: 1 in a ring, len(Order) in a mesh. It sends to
	// whoever has given it a credit.
	Window int
	// ChunkBytes is how much one credit grants when a message is written in place; 0 grants the whole message.
	ChunkBytes int64
	// Staged routes messages through staging even where they could be written in place.
	Staged bool
}

// AllToAllV is one launch of the kernel. The engine uses it until it calls Done.
type AllToAllV struct {
	Channels *Channels
	Routes   *Routes
	// Src and Dst are the user's buffers on the host device, SrcPtr and DstPtr their addresses on others.
	Src, Dst       []byte
	SrcPtr, DstPtr uintptr
	// DstOffset is the place of Dst in this rank's segment, or -1 when peers cannot write it.
	DstOffset int64
	// SrcOffset is the place of Src in this rank's segment, or 0 when it has none. The host engine asks.
	SrcOffset int64
	// Splits, when set, takes the place of the bytes and offsets of Routes, which are then only an estimate: four arrays of
	// Channels.Size 64-bit integers, send bytes, send offsets, receive bytes and receive offsets, read when the launch runs.
	// They must keep inside Src and Dst, else the launch does nothing and its error is a *SplitsError. On the host device.
	Splits []byte
	// Timeout bounds every wait for a peer.
	Timeout time.Duration
	// Done, when set, is called once after the last use of this struct, with the kernel's error. A launch that could not
	// be enqueued is not done.
	Done func(error)
}

// CountMismatchError says that two ranks disagree on the size of the message between them.
type CountMismatchError struct {
	Src, Dst int    // ranks
	Sent     uint64 // bytes, as the sender has it
	Expected uint64 // bytes, as the receiver has it
	Epoch    uint64
}

// Error states both sizes.
func (e *CountMismatchError) Error() string {
	return fmt.Sprintf("kernels: call %d: rank %d sends %d bytes to rank %d, which expects %d", e.Epoch, e.Src, e.Sent, e.Dst, e.Expected)
}

// Unwrap is comm.ErrMismatch.
func (e *CountMismatchError) Unwrap() error { return comm.ErrMismatch }

// SplitsError reports splits in device memory that do not fit the buffers of the call that read them. That rank has moved
// nothing, and the communicator is of no more use.
type SplitsError struct {
	Peer   int    // rank
	Send   bool   // the part for Peer, not the one from it
	Bytes  int64  // its length
	Offset int64  // where it begins in the buffer, in bytes
	Limit  int64  // length of the buffer in bytes
	Epoch  uint64 // number of the call
}

// Error states the part and the buffer.
func (e *SplitsError) Error() string {
	what := "receives from"
	if e.Send {
		what = "sends to"
	}
	return fmt.Sprintf("kernels: call %d: the splits in device memory say that this rank %s rank %d %d bytes at %d of a buffer of %d", e.Epoch, what, e.Peer, e.Bytes, e.Offset, e.Limit)
}
