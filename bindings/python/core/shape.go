package core

import (
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Place is where operations of a Comm work: on the host, which is the Comm itself, or on one of its GPUs.
type Place interface {
	// Size is the number of ranks.
	Size() int
	// AllToAll submits an exchange. On the host the stream is 0 and the ticket says when it is complete; on a GPU it is enqueued
	// on the stream and the ticket is 0.
	AllToAll(stream, dst, src uintptr, shape Shape) (Ticket, error)
	// AllReduce submits an all-reduce, ReduceScatter a reduce-scatter (src has one slice of dst's size for every rank) and AllGather an
	// all-gather (dst has one slice of src's size for every rank), likewise. dst may be src, or where one of them is a slice of the other,
	// this rank's slice.
	AllReduce(stream uintptr, dst, src Buffer, dt kernels.DType, o kernels.ReduceOp) (Ticket, error)
	ReduceScatter(stream uintptr, dst, src Buffer, dt kernels.DType, o kernels.ReduceOp) (Ticket, error)
	AllGather(stream uintptr, dst, src Buffer) (Ticket, error)
	// Refuse tells the ranks that compare their calls, with Options.Validate, that this one does not make the next one, and why. They get
	// an error that says so, and this one why. On the host the ticket says when they have heard.
	Refuse(why error) (Ticket, error)
	// Explain says how an exchange into dst would be carried.
	Explain(dst uintptr, shape Shape) (string, error)
	// Fault is the error that exchanges which have run by now have come to and that no ticket tells.
	Fault() error
	// Alloc submits an allocation of symmetric memory for work on a stream. Every rank submits the same ones. The heap grows
	// where it has to. put names the block; the name is the ticket's value.
	Alloc(stream uintptr, n int64, put func(*Block) uint64) (Ticket, error)
	// NewDispatcher submits the making of a dispatcher over the place's heap, which every rank submits with equal options. Its timeout is
	// that of all operations. put names it; the name is the ticket's value.
	NewDispatcher(o dispatch.Options, put func(*Dispatcher) uint64) (Ticket, error)
	// Verify submits a comparison of what the ranks have allocated and freed.
	Verify() (Ticket, error)
}

var _, _ Place = (*Comm)(nil), (*GPU)(nil)

// Shape is everything about an exchange that calls have in common, in an array that C callers keep: the bytes of a row, of
// the destination and of the source; the address of splits in memory of the GPU (alltoallv.Splits.Live), or 0; 1 where
// displacements at the peers are given (alltoallv.Splits.PeerDispls), or 0; the multiprocessors that send and those that
// copy out of staging and 1 for none of either (alltoallv.Limits), or 0 for what the GPU was opened with; and then for each
// rank the rows to send, for each the rows to receive and, where they are given, for each the displacement there.
type Shape []int64

// ShapeHead is how many numbers a Shape has before those of the ranks.
const ShapeHead = 8

// Len is how long the Shape with this head is, for so many ranks.
func (s Shape) Len(ranks int) int { return ShapeHead + (2+int(min(s[4], 1)))*ranks }

func (s Shape) dstBytes() int64 { return s[1] }
func (s Shape) srcBytes() int64 { return s[2] }

func (s Shape) send(ranks int) []int64 { return s[ShapeHead : ShapeHead+ranks] }
func (s Shape) recv(ranks int) []int64 { return s[ShapeHead+ranks : ShapeHead+2*ranks] }

// assign makes splits of the shape, whose memory they refer to.
func (s Shape) assign(ranks int, sp *alltoallv.Splits) {
	*sp = alltoallv.Splits{ElemSize: s[0], Send: s.send(ranks), Recv: s.recv(ranks)}
	sp.Limits = alltoallv.Limits{MaxSMs: int(s[5]), CopySMs: int(s[6]), NoSMs: s[7] != 0}
	if live := s[3]; live != 0 {
		sp.Live = memory.Device(uintptr(live), alltoallv.LiveBytes(ranks))
	}
	if s[4] != 0 {
		sp.PeerDispls = s[ShapeHead+2*ranks : s.Len(ranks)]
	}
}
