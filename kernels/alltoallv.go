package kernels

import (
	"fmt"

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
	// PeerOffsets[k], where it is known, is where this rank's message goes in rank k's destination: RecvOffsets of this rank
	// there. nil is always good.
	PeerOffsets []int64
}

// AllToAllV is one launch of the kernel. The engine uses it until it calls Done.
type AllToAllV struct {
	Routes   *Routes
	Schedule Schedule
	// Src and Dst are the user's buffers. The place of Src is only looked at with Traits.Pulls.
	Src, Dst Buffer
	// Splits, when it is not empty, takes the place of the bytes and offsets of Routes, which are then only an estimate: four
	// arrays of ExchangeBounds.Size 64-bit integers, send bytes, send offsets, receive bytes and receive offsets, read when the
	// launch runs. They must keep inside Src and Dst, else the rank's launch moves nothing and all ranks' error is a *SplitsError.
	Splits Buffer
	// Barrier names a call in which no rank has anything to send.
	Barrier bool
	Launched
}

// Operation is "alltoallv" or "barrier".
func (a *AllToAllV) Operation() string {
	if a.Barrier {
		return "barrier"
	}
	return "alltoallv"
}

// CountMismatchError says that two ranks disagree on the size of the message between them, or on its elements.
type CountMismatchError struct {
	Src, Dst int    // ranks
	Sent     uint64 // bytes, as the sender has it
	Expected uint64 // bytes, as the receiver has it
	Epoch    uint64
	// SentElements and ExpectedElements are what both know of the elements. On GPUs nothing is known.
	SentElements, ExpectedElements Elements
}

// Error states both sizes, and both types of elements where they are not alike.
func (e *CountMismatchError) Error() string {
	return fmt.Sprintf("kernels: call %d: rank %d sends %d bytes to rank %d, which expects %d", e.Epoch, e.Src, e.Sent, e.Dst, e.Expected) +
		e.SentElements.Unlike(e.ExpectedElements)
}

// Unwrap is comm.ErrMismatch.
func (e *CountMismatchError) Unwrap() error { return comm.ErrMismatch }

func (*CountMismatchError) recoverable() {}

// SplitsError reports splits in device memory that do not fit the buffers of the call that read them. Their rank has sent and received
// nothing and has told all others, so it is an error of that call on every rank, and of no other call.
type SplitsError struct {
	Rank   int    // whose splits they are
	Peer   int    // the rank that it sends to or receives from
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
	return fmt.Sprintf("kernels: call %d: rank %d refuses its splits in device memory: it %s rank %d %d bytes at %d of a buffer of %d", e.Epoch, e.Rank, what, e.Peer, e.Bytes, e.Offset, e.Limit)
}

func (*SplitsError) recoverable() {}
