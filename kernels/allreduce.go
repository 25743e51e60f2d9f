package kernels

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// Collective says which halves of an all-reduce a call is.
type Collective uint8

// The collectives. Every rank owns one slice of the elements.
const (
	ReduceScatter Collective                  = 1 << iota // every rank reduces its slice of all ranks' input
	AllGather                                             // every rank's slice goes to all ranks
	AllReduce     = ReduceScatter | AllGather             // both
	Broadcast     = AllGather | 1<<2                      // an all-gather where one rank's slice is everything
	AllToAll      = Collective(1 << 3)                    // slice d of rank s goes to slice s of rank d: only plans do that
)

// Reduces reports whether the call combines elements of several ranks.
func (c Collective) Reduces() bool { return c&ReduceScatter != 0 }

// Gathers reports whether every rank ends with all slices.
func (c Collective) Gathers() bool { return c&AllGather != 0 }

// String is the name as it stands in messages.
func (c Collective) String() string {
	switch c {
	case ReduceScatter:
		return "reduce-scatter"
	case AllGather:
		return "all-gather"
	case AllReduce:
		return "all-reduce"
	case Broadcast:
		return "broadcast"
	case AllToAll:
		return string(plan.AllToAll)
	}
	return fmt.Sprintf("Collective(%d)", uint8(c))
}

// ReduceAlgorithm is how a reduction travels. All ranks of a call use the same one.
type ReduceAlgorithm uint8

// The algorithms.
const (
	// OneShot: every rank pushes all that a peer needs into the peer's staging; each reduces for itself.
	OneShot ReduceAlgorithm = iota
	// TwoShot: every rank reduces its slice and hands the result to all.
	TwoShot
	// Ring: partial results travel once around to reduce and once around to gather.
	Ring
	// Planned: the call does what Reduction.Plan says.
	Planned
	reduceAlgorithms
)

// ReduceAlgorithms lists the algorithms that an engine has without a plan.
func ReduceAlgorithms() []ReduceAlgorithm { return []ReduceAlgorithm{OneShot, TwoShot, Ring} }

// String is the name that options use.
func (a ReduceAlgorithm) String() string {
	if a >= reduceAlgorithms {
		return fmt.Sprintf("ReduceAlgorithm(%d)", uint8(a))
	}
	return [...]string{"one-shot", "two-shot", "ring", "plan"}[a]
}

// Pipeline is how a reduction by multicast shares its work out: its steps are to stage input, to reduce and to take results. An all-gather
// stages nothing, and a reduce-scatter takes nothing.
type Pipeline uint8

// The pipelines.
const (
	NoMulticast      Pipeline = iota // the call does not go by multicast
	WarpPipeline                     // every block does all steps, each with some of its warps
	BlockPipeline                    // every block does one step
	MulticastPackets                 // no pipeline: one store of a packet reaches all ranks
	pipelines
)

// String is the pipeline's name in messages.
func (p Pipeline) String() string {
	if p >= pipelines {
		return fmt.Sprintf("Pipeline(%d)", uint8(p))
	}
	return [...]string{"no multicast", "warp pipeline", "block pipeline", "packets"}[p]
}

// Multicastable reports whether a pipeline of multicast can do the call: it moves any type, adds, also what becomes an average, and cannot
// round once an average of floats of 16 bits (R1, R2).
func (c *ReduceCall) Multicastable() bool {
	if !c.Collective.Reduces() {
		return c.Collective.Gathers()
	}
	switch c.DType {
	case Float32, Float64:
		return c.Op == Sum || c.Op == Avg
	case Float16, BFloat16, Int32, Int64:
		return c.Op == Sum
	}
	return false
}

// PartialSize is the size of one element of type d while it is being reduced: floats of 16 and 8 bits are widened to
// float32.
func (d DType) PartialSize() int64 {
	switch d {
	case Float16, BFloat16, Float8E4M3, Float8E5M2:
		return 4
	}
	return d.Size()
}

// Reducible reports whether an engine can combine elements of type d with o. It cannot average integers, because the
// average of integers is none.
func (o ReduceOp) Reducible(d DType) bool {
	switch d {
	case Uint8, Int32, Int64:
		return o.Valid() && o != Avg
	}
	return o.Valid() && d.Valid()
}

// ReduceBounds is the family of reductions, and the bounds of one communicator for them.
type ReduceBounds struct {
	Size int // ranks
	// OneShotBytes bounds what one rank pushes to another in the one-shot algorithm, and in a message of packets.
	OneShotBytes int64
	// Slots is how many chunks from one rank to another may be under way through staging; SlotBytes is a chunk's size. On GPUs
	// every block has slots of its own.
	Slots     int
	SlotBytes int64
	// StagingBytes bounds the slots of one rank together where SlotBytes is left to default.
	StagingBytes int64
	// Blocks bounds how many blocks a launch has on GPUs. Every rank of a call takes equally many, so all ranks have the same
	// bound. The host device has none.
	Blocks int
	// Multicast has the engine be ready for reductions by multicast. Packets that gather then travel so, and in one shot.
	Multicast bool
	// Hosts is for ranks on several hosts; nil on one.
	Hosts *Hosts
	// Plans is the room for plans, all zero without any.
	Plans PlanBounds
}

// PlanBounds is the plans of a communicator, and what they need at most.
type PlanBounds struct {
	List []*plan.Checked
	// Semaphores is how many there are from a rank to another, Chunks how many chunks a rank has of each buffer.
	Semaphores int
	Chunks     [plan.Buffers]int
	// SlotBytes is how much of a chunk moves at once through staging.
	SlotBytes int64
}

// Add makes room for a plan.
func (b *PlanBounds) Add(p *plan.Checked) {
	b.List = append(b.List, p)
	b.Semaphores = max(b.Semaphores, p.Semaphores)
	for i := range plan.Buffers {
		b.Chunks[i] = max(b.Chunks[i], p.Chunks(i))
	}
}

// DefaultSlots fills in SlotBytes where it is 0 and there are plans: a multiple of least, so that chunks together take at most room if that is
// enough for the least.
func (b *PlanBounds) DefaultSlots(room, largest, least int64) {
	chunks := int64(0)
	for _, n := range b.Chunks {
		chunks += int64(n)
	}
	if b.SlotBytes == 0 && chunks > 0 {
		b.SlotBytes = min(max(room/chunks/least*least, least), largest)
	}
}

// MulticastPacketBytes bounds a message of packets by multicast. Of 8 bytes of theirs 4 are data, of 16 bytes of other packets 12.
func (c *ReduceBounds) MulticastPacketBytes() int64 { return c.OneShotBytes / 3 * 2 }

// Family is "allreduce".
func (c *ReduceBounds) Family() string { return "allreduce" }

// DefaultSlots fills in Slots, StagingBytes and SlotBytes where they are 0, as those of ExchangeBounds.
func (c *ReduceBounds) DefaultSlots(slots int, staging, largest int64, sharers int) {
	x := ExchangeBounds{Slots: c.Slots, SlotBytes: c.SlotBytes, StagingBytes: c.StagingBytes}
	x.DefaultSlots(slots, staging, largest, sharers)
	c.Slots, c.SlotBytes, c.StagingBytes = x.Slots, x.SlotBytes, x.StagingBytes
}

// ReduceCall is what all ranks of a reduction must agree on. It travels in the entry lines.
type ReduceCall struct {
	Collective Collective
	DType      DType
	Op         ReduceOp // Sum where nothing is reduced
	// Count is the number of elements of all slices together.
	Count int64
	// Shape tells slices of different lengths apart; 0 for equal ones. Of a broadcast it is 1 + the rank that has the data.
	Shape uint64
	// Elements is what is known of what moves as bytes. Ranks of the host agree on calls whose elements are alike; GPUs do not look at it.
	Elements Elements
}

// Word packs everything but Count and Shape, Elements in its upper half.
func (c *ReduceCall) Word() uint64 {
	return uint64(c.Elements)<<32 | uint64(c.Collective)<<16 | uint64(c.DType)<<8 | uint64(c.Op)
}

// SetWord is the inverse of Word.
func (c *ReduceCall) SetWord(w uint64) {
	c.Elements, c.Collective, c.DType, c.Op = Elements(w>>32), Collective(w>>16), DType(w>>8), ReduceOp(w)
}

// String is like "all-reduce (sum) of 1000 float32".
func (c ReduceCall) String() string {
	how := ""
	if c.Collective.Reduces() {
		how = fmt.Sprintf(" (%v)", c.Op)
	}
	shape := ""
	switch {
	case c.Collective == Broadcast:
		shape = fmt.Sprintf(" from rank %d", int64(c.Shape)-1)
	case c.Shape != 0:
		shape = fmt.Sprintf(" in slices of digest %016x", c.Shape)
	}
	of := c.DType.String()
	if c.DType == Uint8 && !c.Collective.Reduces() { // what moves and is not computed with
		of = "bytes"
		if c.Elements != AnyElements {
			of = fmt.Sprintf("bytes (%v)", c.Elements)
		}
	}
	return fmt.Sprintf("%v%s of %d %s%s", c.Collective, how, c.Count, of, shape)
}

// Reduction is one launch of the kernel. The engine uses it until it calls Done.
type Reduction struct {
	// Family is what the port was opened with.
	Family    *ReduceBounds
	Call      ReduceCall
	Algorithm ReduceAlgorithm
	// Plan is that of Planned.
	Plan *plan.Checked
	// Packets has every word of the call carry its flag with it. Pull has the ranks of an all-gather read the others' slices where they
	// can, instead of having them written. Push has the input of a reduction written into the others' staging, also where they could
	// read it. Blocks is how many blocks of a GPU run the call, a multiprocessor each. All ranks of a call have the same. The host
	// device looks at none of it.
	Packets, Pull, Push bool
	Blocks              int
	// Rate holds what a rank reads and writes of its peers' memory on a GPU to this many GB/s together; 0 lets it go as fast as it can.
	Rate float64
	// Multicast has a call that is Multicastable go by multicast, in two shots, or a call of one shot whose Packets gather. All ranks of a call
	// have the same. Only GPUs do that, on a heap with Space.Multicast.
	Multicast Pipeline
	// Bounds has one entry more than there are ranks: the slice of rank p is elements Bounds[p] up to Bounds[p+1].
	Bounds []int64
	// Src and Dst are the user's buffers. All slices lie in Src if the call reduces and in Dst if it gathers; otherwise the
	// buffer is this rank's slice. They are the same memory or do not overlap; for a call that does only one half, the smaller
	// one may be this rank's slice of the other.
	Src, Dst Buffer
	Launched
}

// Operation is the collective's name.
func (r *Reduction) Operation() string { return r.Call.Collective.String() }

// Slice is where the elements of rank p's slice begin and how many there are.
func (r *Reduction) Slice(p int) (at, n int64) { return r.Bounds[p], r.Bounds[p+1] - r.Bounds[p] }

// Longest is the number of elements of the longest slice.
func (r *Reduction) Longest() (n int64) {
	for p := range r.Family.Size {
		n = max(n, r.Bounds[p+1]-r.Bounds[p])
	}
	return n
}

// ChunkElements is how many elements a chunk has. A ring carries partial results, which can be wider than the data.
func (r *Reduction) ChunkElements() int64 {
	if r.Algorithm == Ring {
		return r.Family.SlotBytes / r.Call.DType.PartialSize()
	}
	return r.Family.SlotBytes / r.Call.DType.Size()
}

// Chunks is how many chunks n elements make.
func (r *Reduction) Chunks(n int64) int64 { return (n + r.ChunkElements() - 1) / r.ChunkElements() }

// Messages is the largest number of chunks that one rank sends another in this call.
func (r *Reduction) Messages() int64 {
	n := r.Chunks(r.Longest())
	if r.Algorithm == Ring {
		n *= int64(r.RingSteps())
	}
	return n
}

// RingSteps is how many times each chunk is handed to the next rank.
func (r *Reduction) RingSteps() int {
	if r.Call.Collective == AllReduce {
		return 2 * (r.Family.Size - 1)
	}
	return r.Family.Size - 1
}

// PushBytes is the largest message of this call in the one-shot algorithm.
func (r *Reduction) PushBytes() int64 {
	if r.Call.Collective == AllReduce {
		return r.Call.Count * r.Call.DType.Size()
	}
	return r.Longest() * r.Call.DType.Size()
}

// ErrFailed is the error of a launch on a communicator that an earlier launch has left in no known state.
var ErrFailed = errors.New("kernels: an earlier call of this communicator failed")

// CallMismatchError says that two ranks made different calls at the same place. Every rank of the call gets one, nothing
// has been reduced, and later calls work.
type CallMismatchError struct {
	Rank, Peer   int
	Mine, Theirs ReduceCall
	Epoch        uint64
}

// Error states both calls.
func (e *CallMismatchError) Error() string {
	return fmt.Sprintf("kernels: call %d: rank %d has %v, rank %d has %v", e.Epoch, e.Rank, e.Mine, e.Peer, e.Theirs)
}

// Unwrap returns comm.ErrMismatch.
func (e *CallMismatchError) Unwrap() error { return comm.ErrMismatch }

func (*CallMismatchError) recoverable() {}
