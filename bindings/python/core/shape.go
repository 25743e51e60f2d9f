package core

import (
	"github.com/switchyard-moe/switchyard/alltoallv"
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
	// all-gather (dst has one slice of src's size for every rank). Stream and ticket are as for AllToAll. dst may be
	// src, or where one of them is a slice of the other,
	// this rank's slice.
	AllReduce(stream uintptr, dst, src Buffer, dt kernels.DType, o kernels.ReduceOp) (Ticket, error)
	ReduceScatter(stream uintptr, dst, src Buffer, dt kernels.DType, o kernels.ReduceOp) (Ticket, error)
	AllGather(stream uintptr, dst, src Buffer) (Ticket, error)
	// AllToAllByPlan submits an all-to-all of equal slices that a plan does: slice k of src goes to rank k, and slice k of dst comes from there.
	// Stream and ticket are as for AllToAll. dst may be src.
	AllToAllByPlan(stream uintptr, dst, src Buffer) (Ticket, error)
	// Broadcast submits the copy of rank root's bytes to all ranks. Stream and ticket are as for AllToAll.
	Broadcast(stream uintptr, bytes Buffer, root int) (Ticket, error)
	// Refuse tells the ranks that compare their calls, with Options.Validate, that this one does not make the next one, and why. They get
	// an error that says so, and this one why. On the host the ticket says when they have heard.
	Refuse(why error) (Ticket, error)
	// Transfer makes a put, a get, a signal or a wait. On the host they are complete on return, but for a wait, which is a Request. On a GPU
	// they are enqueued on the stream.
	Transfer(stream uintptr, call *TransferCall) (*Request, error)
	// Messages sends and receives messages at the same time. On the host the stream is 0, and their memory is the Request's until it is over.
	// On a GPU they are enqueued on the stream, and there is no Request: where senders is the address of an int64 for each, there, those of
	// receives get the rank that sent.
	Messages(stream uintptr, calls []MessageCall, senders uintptr) (*Request, error)
	// Share offers memory to one other rank, as memory.Heap.Share. On the host it is that of a file, which stays the caller's, and lies there
	// at offset; on a GPU fd and offset are not looked at.
	Share(peer int, b Buffer, fd int, offset int64) (*Shared, error)
	// OpenShared opens what a rank has shared, as memory.Heap.Open. It waits as Waits says; nil is no error, and means to ask again.
	OpenShared(peer int, w Waits) (*Opened, error)
	// Explain says how an exchange into dst would be carried.
	Explain(dst uintptr, shape Shape) (string, error)
	// ExplainReduction says how a collective whose larger buffer has n bytes would be carried, of a GPU once that has a reducer.
	ExplainReduction(collective kernels.Collective, n int64, dt kernels.DType) (string, error)
	// Fault is the error that exchanges which have run by now have come to and that no ticket tells.
	Fault() error
	// Alloc submits an allocation of symmetric memory for work on a stream. Every rank submits the same ones. The heap grows
	// where it has to. put names the block; the name is the ticket's value.
	Alloc(stream uintptr, n int64, put func(*Block) uint64) (Ticket, error)
	// NewDispatcher submits the making of a dispatcher over the place's heap, which every rank submits with equal options. Its timeout is
	// that of all operations. put names it; the name is the ticket's value.
	NewDispatcher(o DispatcherOptions, put func(*Dispatcher) uint64) (Ticket, error)
	// Verify submits a comparison of what the ranks have allocated and freed.
	Verify() (Ticket, error)
}

var _, _ Place = (*Comm)(nil), (*GPU)(nil)

// ShapeHead is what an exchange has for all ranks, as C callers describe it.
type ShapeHead struct {
	// Row is the bytes of a row; DstBytes and SrcBytes those of the destination and of the source.
	Row, DstBytes, SrcBytes int64
	// Live is the address of splits in memory of the GPU (alltoallv.Splits.Live), or 0.
	Live int64
	// Placed is 1 where displacements at the peers are given (alltoallv.Splits.PeerDispls), or 0.
	Placed int64
	// MaxSMs send and CopySMs copy out of staging, and NoSMs is 1 for none of either (alltoallv.Limits). 0 is what the GPU was opened with.
	MaxSMs, CopySMs, NoSMs int64
}

// Shape is everything about an exchange that calls have in common, in memory that C callers keep.
type Shape struct {
	*ShapeHead
	// Ranks is for each rank the rows to send, for each the rows to receive and, where they are given, for each the displacement there.
	Ranks []int64
}

// Behind is how many numbers Ranks has in a group of a size.
func (h *ShapeHead) Behind(ranks int) int { return (2 + int(h.Placed)) * ranks }

func (s Shape) send(ranks int) []int64 { return s.Ranks[:ranks] }
func (s Shape) recv(ranks int) []int64 { return s.Ranks[ranks : 2*ranks] }

// assign makes splits of the shape, whose memory they refer to.
func (s Shape) assign(ranks int, sp *alltoallv.Splits) {
	*sp = alltoallv.Splits{ElemSize: s.Row, Send: s.send(ranks), Recv: s.recv(ranks)}
	sp.Limits = alltoallv.Limits{MaxSMs: int(s.MaxSMs), CopySMs: int(s.CopySMs), NoSMs: s.NoSMs != 0}
	if s.Live != 0 {
		sp.Live = memory.Device(uintptr(s.Live), alltoallv.LiveBytes(ranks))
	}
	if s.Placed != 0 {
		sp.PeerDispls = s.Ranks[2*ranks : s.Behind(ranks)]
	}
}
