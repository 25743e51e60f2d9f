package allreduce

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Reducer carries the reductions of one group over one symmetric heap. Its methods may be called from several
// goroutines, but all ranks must make the same calls in the same order.
//
// A call is enqueued on its stream; with a nil stream it is complete on return. Its buffers belong to it until then. A call on
// another stream than the last call waits for that; a program that replays a CUDA graph orders the calls in it.
//
// The elements of a buffer that are known, as those of memory.Wrap, are of the call's data type; for a minimum or maximum of integers they have
// its sign. Gathers and all-to-alls as uint8 move bytes of any, from and to elements of one type.
//
// Bad arguments return an error (ErrInvalid, ErrUnsupported, ErrClosed, memory.ErrFreed) before anything is enqueued: the
// call has not happened and may be repeated, and the other ranks wait for it. If the ranks' calls differ in collective,
// data type, operator or length, every rank gets a *kernels.CallMismatchError (comm.ErrMismatch), no buffer has been
// written, and later calls work. After any other error the Reducer can only be closed. These name the peer: comm.ErrPeerLost if it is
// lost, comm.ErrTimeout if it does not come within Options.Timeout, and comm.ErrOutOfStep if it waits in a call that this rank has
// not made. On a host stream all but bad arguments are errors of the stream; on a CUDA stream Fault and the next call return them.
// Calls can be captured into a CUDA graph.
type Reducer struct {
	c        *communicator.Communicator // its lock is held during calls
	bounds   kernels.ReduceBounds
	options  Options
	selector selector
	launches communicator.Launches[kernels.Reduction, *kernels.Reduction]
}

// New makes a Reducer. It is collective: every rank of the heap's group calls it, in the same order as its other
// allocations, with equal options. The heap grows if it has no room. A failure on one rank is an error on all. The caller
// closes the Reducer before the heap.
//
// A ctx that ends while ranks wait for each other may leave the group out of step, as in memory.NewHeap.
func New(ctx context.Context, h *memory.Heap, o Options) (*Reducer, error) {
	return newReducer(ctx, h, o, owner{})
}

// owner is the user of a Reducer of its own, such as Buckets: the values it compares, its memory behind the Reducer's, and its error.
type owner struct {
	must  string
	bytes int64
	err   error
}

func newReducer(ctx context.Context, h *memory.Heap, o Options, own owner) (*Reducer, error) {
	if h == nil {
		return nil, invalid("the heap is nil")
	}
	x := &Reducer{}
	gpu := !h.Serves(memory.Host(make([]byte, 1)))
	c, err := o.validate(h.Group().Size(), h.Engine(), gpu)
	reaches, whyNot := h.Multicast()
	if err == nil && o.Multicast != "" && !reaches && whyNot == "" {
		err = invalid("Options.Multicast is %q on a heap without memory.Options.Multicast", o.Multicast)
	}
	if err == nil && len(o.Plans) > 0 && h.Hosts() != nil {
		err = fmt.Errorf("allreduce: %d plans on several hosts: %w", len(o.Plans), ErrUnsupported)
	}
	if own.err != nil {
		err = own.err
	}
	blocks, err := fewest(ctx, h.Group(), o.MaxSMs, c.Blocks, err)
	if err != nil {
		return nil, err
	}
	if o.MaxSMs = blocks; blocks > 0 {
		c, err = o.validate(h.Group().Size(), h.Engine(), gpu)
	}
	c.Multicast = c.Multicast && reaches
	c.Hosts = h.Hosts()
	x.bounds, x.options = c, o
	x.selector = selector{forced: o.Algorithm, plans: o.Plans, gpu: gpu, bounds: &x.bounds, table: o.Table.forWorld(c.Size, c.Blocks), byMulticast: byMulticast{o.Multicast, whyNot}}
	x.c, err = communicator.Open(ctx, h, communicator.Config{
		Name: "allreduce", Must: []string{own.must + o.fingerprint(&c)}, Family: &x.bounds, ExtraBytes: own.bytes, ZeroExtra: own.bytes, Timeout: o.Timeout,
		Hosts: true, Rest: c.Hosts != nil,
	}, err)
	if err != nil {
		return nil, err
	}
	x.launches.C, x.launches.Reset = x.c, func(a *kernels.Reduction) {
		if *a = (kernels.Reduction{Family: &x.bounds, Bounds: a.Bounds}); a.Bounds == nil {
			a.Bounds = make([]int64, c.Size+1)
		}
	}
	return x, nil
}

// fewest is the number of blocks that every rank can have. blocks is this rank's; ranks that share a GPU have fewer. limit is Options.MaxSMs.
// refused is the reason why this rank cannot take part.
func fewest(ctx context.Context, g *comm.Group, limit, blocks int, refused error) (int, error) {
	claims, err := agree.On(ctx, g, agree.Claim{Must: agree.Same(fmt.Sprintf("MaxSMs %d", limit)), Own: strconv.Itoa(blocks)}, refused)
	for i := 0; i < len(claims) && err == nil; i++ {
		var n int
		n, err = strconv.Atoi(claims[i].Own)
		blocks = min(blocks, n)
	}
	if err != nil && refused == nil {
		err = fmt.Errorf("allreduce: compare options: %w", err)
	}
	return blocks, err
}

// AllReduce combines the ranks' src element by element and leaves the result in every rank's dst, the same bits
// everywhere. The buffers have the same length on every rank, and are the same memory or do not overlap.
func (x *Reducer) AllReduce(s device.Stream, dst, src memory.View, dt kernels.DType, o kernels.ReduceOp) error {
	return x.call(s, dst, src, kernels.ReduceCall{Collective: kernels.AllReduce, DType: dt, Op: o}, nil)
}

// ReduceScatter combines the ranks' src element by element and leaves slice r of the result in rank r's dst. src has as
// many elements for every rank, dst is one of these slices. dst may be this rank's slice of src; they do not overlap
// otherwise.
func (x *Reducer) ReduceScatter(s device.Stream, dst, src memory.View, dt kernels.DType, o kernels.ReduceOp) error {
	return x.call(s, dst, src, kernels.ReduceCall{Collective: kernels.ReduceScatter, DType: dt, Op: o}, nil)
}

// ReduceScatterV is ReduceScatter with slices of counts[r] elements, which all ranks pass alike. counts is read during
// the call only.
func (x *Reducer) ReduceScatterV(s device.Stream, dst, src memory.View, counts []int64, dt kernels.DType, o kernels.ReduceOp) error {
	if counts == nil {
		counts = []int64{}
	}
	return x.call(s, dst, src, kernels.ReduceCall{Collective: kernels.ReduceScatter, DType: dt, Op: o}, counts)
}

// AllGather puts rank r's src in slice r of every rank's dst. src has the same length on every rank. src may be this
// rank's slice of dst; they do not overlap otherwise.
func (x *Reducer) AllGather(s device.Stream, dst, src memory.View, dt kernels.DType) error {
	return x.call(s, dst, src, kernels.ReduceCall{Collective: kernels.AllGather, DType: dt}, nil)
}

// AllGatherV is AllGather of counts[r] elements from rank r; all ranks pass counts alike. It is read during the call
// only.
func (x *Reducer) AllGatherV(s device.Stream, dst, src memory.View, counts []int64, dt kernels.DType) error {
	if counts == nil {
		counts = []int64{}
	}
	return x.call(s, dst, src, kernels.ReduceCall{Collective: kernels.AllGather, DType: dt}, counts)
}

// AllToAll puts slice d of rank s's src in slice s of rank d's dst. The buffers have the same length on every rank, a multiple of the number of
// ranks, and are the same memory or do not overlap. Only a plan of Options.Plans does that: without one the error is ErrUnsupported, and an
// alltoallv.Exchanger is the way.
func (x *Reducer) AllToAll(s device.Stream, dst, src memory.View, dt kernels.DType) error {
	return x.call(s, dst, src, kernels.ReduceCall{Collective: kernels.AllToAll, DType: dt}, nil)
}

// Broadcast copies buf of rank root to buf of every rank. buf has the same length on all ranks, and bytes of any type. On
// the host ranks that know their elements have the same; GPUs compare lengths alone.
func (x *Reducer) Broadcast(s device.Stream, buf memory.View, root int) error {
	src := buf
	if root != x.c.Group.Rank() {
		src = memory.View{}
	}
	return x.call(s, buf, src, kernels.ReduceCall{Collective: kernels.Broadcast, Shape: uint64(root) + 1}, nil)
}

// call checks and launches one call. counts is nil for equal slices.
func (x *Reducer) call(s device.Stream, dst, src memory.View, c kernels.ReduceCall, counts []int64) error {
	x.c.Lock()
	defer x.c.Unlock()
	o := x.launches.Take()
	a := &o.Args
	err := x.prepare(a, dst, src, c, counts)
	if x.options.Validate {
		_, err = x.c.Agree(agree.Claim{Must: agree.Same(a.Call.String())}, err)
	}
	if err != nil {
		x.launches.Give(o)
		return err
	}
	if !c.Collective.Reduces() && c.DType == kernels.Uint8 { // not before: ranks that know their elements agree with others
		a.Call.Elements = max(a.Src.Elements, a.Dst.Elements)
	}
	a.Note.Algorithm, a.Note.Payload, a.Note.Staged = a.Algorithm.String(), src.Len(), staging(a)
	if a.Plan != nil {
		a.Note.Algorithm = a.Plan.Plan.Name
	}
	return x.launches.Launch(s, o)
}

// staging is why a call goes through staging: one shot and packets always do, and are the fastest way of the few bytes that they carry.
func staging(a *kernels.Reduction) flight.Staging {
	switch {
	case a.Packets || a.Algorithm == kernels.OneShot:
		return flight.NotStaged
	case a.Push:
		return flight.StagedAlgorithm
	case a.Src.Bytes > 0 && !a.Src.Reach:
		return flight.StagedInput
	case a.Dst.Bytes > 0 && !a.Dst.Reach:
		return flight.StagedOutput
	}
	return flight.NotStaged
}

// prepare checks the arguments of a call and turns them into a launch.
func (x *Reducer) prepare(a *kernels.Reduction, dst, src memory.View, c kernels.ReduceCall, counts []int64) error {
	a.Call = c
	if err := x.c.Usable(); err != nil {
		return err
	}
	if err := x.c.Serves("source", src); err != nil {
		return err
	}
	if err := x.c.Serves("destination", dst); err != nil {
		return err
	}
	if err := supported(c); err != nil {
		return err
	}
	if err := holds(c, dst, src); err != nil {
		return err
	}
	whole, part := src, dst
	if !c.Collective.Reduces() {
		whole, part = dst, src
	}
	if err := x.slice(a, c, whole.Len(), part.Len(), counts); err != nil {
		return err
	}
	// The slice of the larger buffer that may be the other buffer.
	mine, all, p := whole.Ptr(), whole.Ptr(), part.Ptr()
	if c.Collective != kernels.AllReduce && c.Collective != kernels.AllToAll {
		at, _ := a.Slice(x.c.Group.Rank())
		mine += uintptr(at * c.DType.Size())
	}
	if p != mine && part.Len() > 0 && p < all+uintptr(whole.Len()) && all < p+uintptr(part.Len()) {
		return invalid("source and destination of the %v overlap and are not the same memory", c.Collective)
	}
	if err := x.selector.choose(a); err != nil {
		return err
	}
	a.Timeout = x.c.Timeout()
	a.Src, a.Dst = x.c.Heap.SymmetricOperand(src), x.c.Heap.SymmetricOperand(dst)
	return nil
}

// supported refuses operators that the engines lack for a type. It never replaces an operator by another (R1).
func supported(c kernels.ReduceCall) error {
	switch {
	case !c.DType.Valid():
		return invalid("data type %v", c.DType)
	case !c.Op.Valid():
		return invalid("operator %v", c.Op)
	case c.Collective.Reduces() && !c.Op.Reducible(c.DType):
		return fmt.Errorf("allreduce: %v (%v) of %v: %w", c.Collective, c.Op, c.DType, ErrUnsupported)
	}
	return nil
}

// holds refuses memory that is known to have elements of another type than the call's. Calls that move bytes as uint8 take any.
func holds(c kernels.ReduceCall, dst, src memory.View) error {
	if !c.Collective.Reduces() && c.DType == kernels.Uint8 {
		if !dst.Alike(src) {
			return invalid("the source has elements of %s, the destination of %s", src.Element(), dst.Element())
		}
		return nil
	}
	fits := memory.View.Holds
	if c.Collective.Reduces() && (c.Op == kernels.Min || c.Op == kernels.Max) {
		fits = memory.View.Orders
	}
	name, v := "source", src
	if fits(v, c.DType) {
		name, v = "destination", dst
	}
	if !fits(v, c.DType) {
		return invalid("the %s has elements of %s, the %v is of %v", name, v.Element(), c.Collective, c.DType)
	}
	return nil
}

// slice divides the elements among the ranks. whole is the length in bytes of the buffer with all slices, part that of the
// other.
func (x *Reducer) slice(a *kernels.Reduction, c kernels.ReduceCall, whole, part int64, counts []int64) error {
	size, es := int64(x.bounds.Size), c.DType.Size()
	large, small := "source", "destination"
	if !c.Collective.Reduces() {
		large, small = small, large
	}
	if whole%es != 0 {
		return invalid("the %s has %d bytes, not a multiple of the %d of %v", large, whole, es, c.DType)
	}
	a.Call.Count = whole / es
	b := a.Bounds
	b[0] = 0
	switch {
	case c.Collective == kernels.AllReduce:
		if part != whole {
			return invalid("the source has %d bytes, the destination %d", whole, part)
		}
		grain := max(64/es, 1)
		each := ((a.Call.Count+size-1)/size + grain - 1) / grain * grain
		for p := range size {
			b[p+1] = min(b[p]+each, a.Call.Count)
		}
		return nil
	case c.Collective == kernels.AllToAll:
		if part != whole || a.Call.Count%size != 0 {
			return invalid("the source has %d bytes, the destination %d, want equally many and a multiple of %d elements of %v", part, whole, size, c.DType)
		}
		for p := range size {
			b[p+1] = b[p] + a.Call.Count/size
		}
		return nil
	case c.Collective == kernels.Broadcast:
		root := int64(c.Shape) - 1
		if root < 0 || root >= size {
			return invalid("broadcast from rank %d, want 0 to %d", root, size-1)
		}
		for p := range size {
			b[p+1] = b[p]
			if p == root {
				b[p+1] += whole
			}
		}
		return nil
	case counts == nil:
		if whole != part*size || part%es != 0 {
			return invalid("the %s has %d bytes, want %d times the %d of the %s, in whole %v", large, whole, size, part, small, c.DType)
		}
		for p := range size {
			b[p+1] = b[p] + part/es
		}
		return nil
	}
	if int64(len(counts)) != size {
		return invalid("%d counts for %d ranks", len(counts), size)
	}
	equal := true
	for p, n := range counts {
		if n < 0 || n > (math.MaxInt64/es)-b[p] {
			return invalid("count %d for rank %d is negative or overflows (counts %v)", n, p, counts)
		}
		b[p+1] = b[p] + n
		equal = equal && n == counts[0]
	}
	mine := counts[x.c.Group.Rank()] * es
	if whole != b[size]*es || part != mine {
		return invalid("the %s has %d bytes and the %s %d, the counts %v of %v need %d and %d", large, whole, small, part, counts, c.DType, b[size]*es, mine)
	}
	if !equal {
		a.Call.Shape = xxhash.Sum64(shm.Bytes(counts)) | 1
	}
	return nil
}

// Explain says which algorithm a call would use, and why: a call that reduces count elements of every rank, that gathers count
// elements in all, or that broadcasts count elements. It exchanges no message.
func (x *Reducer) Explain(c kernels.Collective, count int64, dt kernels.DType) (Decision, error) {
	x.c.Lock()
	defer x.c.Unlock()
	if err := x.c.Alive(); err != nil {
		return Decision{}, err
	}
	switch c {
	case kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather, kernels.Broadcast, kernels.AllToAll:
	default:
		return Decision{}, invalid("explain: no collective is %v", c)
	}
	call := kernels.ReduceCall{Collective: c, DType: dt}
	if c == kernels.Broadcast {
		call.Shape = 1
	}
	if err := supported(call); err != nil {
		return Decision{}, err
	}
	size := int64(x.bounds.Size)
	if count < 0 || count > math.MaxInt64/dt.Size() {
		return Decision{}, invalid("%d elements of %v", count, dt)
	}
	part := count * dt.Size()
	if c != kernels.AllReduce && c != kernels.AllToAll {
		part /= size
	}
	o := x.launches.Take()
	defer x.launches.Give(o)
	o.Args.Call = call
	if err := x.slice(&o.Args, call, count*dt.Size(), part, nil); err != nil {
		return Decision{}, err
	}
	if err := x.selector.choose(&o.Args); err != nil {
		return Decision{}, err
	}
	return x.selector.explain(&o.Args), nil
}

// Fault returns the error of calls that have run by now, nil if there is none, on a device whose streams do not report it; the host's
// streams do.
func (x *Reducer) Fault() error { return x.c.Fault() }

// SetTimeout sets [Options.Timeout] for the calls of this rank from now on.
func (x *Reducer) SetTimeout(d time.Duration) error { return x.c.SetTimeout(d) }

// Close waits for the calls on streams and gives the control block back. It is collective and idempotent: no rank frees
// a block that a peer may still signal. After a failure of the group it releases this rank's memory and returns. When ctx
// ends, calls that wait for peers give up.
func (x *Reducer) Close(ctx context.Context) error { return x.c.Close(ctx) }
