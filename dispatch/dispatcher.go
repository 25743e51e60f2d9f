package dispatch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Dispatcher carries tokens to their experts and back, for one group over one symmetric heap. Its methods may be called
// from several goroutines, but all ranks must make the same calls in the same order, with handles of the same dispatch.
//
// A call is enqueued on its stream; with a nil stream it is complete on return. Views belong to the call until then. They are
// memory of the heap's device, in the heap or outside. Errors are of three kinds:
//
//   - Bad arguments (ErrInvalid, ErrReleased, ErrNoHandle, ErrHalf, memory.ErrFreed, ErrClosed) are refused before anything is
//     enqueued. The call has not happened and may be repeated; the other ranks wait for it.
//   - A disagreement of ranks is the same error on every rank, and the Dispatcher can be used further: *OverflowError, *IndexError,
//     *kernels.OrderError (ranks in different calls), *kernels.ShortError (a buffer too small for the rows of its dispatch). On
//     the host nothing has moved then; on a GPU the outputs of the call are undefined.
//   - A lost peer is comm.ErrPeerLost, a peer that does not come within Options.Timeout is comm.ErrTimeout, and a peer that waits
//     in a call of another kind, which this rank has not made, is comm.ErrOutOfStep. All name the peer. The Dispatcher can then
//     only be closed.
//
// On a host stream the errors of the last two kinds are errors of the stream. On a CUDA stream Fault and the next call return them.
type Dispatcher struct {
	c       *communicator.Communicator // its lock is held throughout a call, so that launches have one order
	options Options
	bounds  *kernels.DispatchBounds
	// The placement as the engine reads it, and the words in which it counts.
	table, counters memory.View
	views           []handleViews
	ops             communicator.Pool[op]
	opened          time.Time
	countsPatience  shm.Patience // of waits in Handle.HostCounts

	// mu guards the fields that launches on streams change too: the placement, and the lives of handles. It is not held during a wait
	// for a stream.
	mu        sync.Mutex
	placement *Placement
	local     []int          // this rank's experts
	mapped    *memory.Pinned // counts for the host, by handle; nil without Options.HostCounts and after Close
	holders   []*Handle      // the last handle that had each piece of memory
	next      int            // the piece of memory that take looks at first
	idle      []*Handle      // released, longest ago first
	ticket    uint64         // of the last dispatch
}

// op is one launch, and keeps its arguments alive until it has run.
type op struct {
	dispatch kernels.Dispatch
	combine  kernels.Combine
	backward kernels.CombineBackward
	results  kernels.Results
	kind     kernels.DispatchOp
	handle   *Handle
	done     func(error) // for launches on a stream
}

// New makes a Dispatcher. It is collective: every rank of the heap's group calls it, in the same order as its other
// allocations, with equal options. It takes all its memory from the heap, which grows if it has no room. A failure on one rank is
// an error on all. The caller closes the Dispatcher before the heap.
func New(ctx context.Context, h *memory.Heap, o Options) (*Dispatcher, error) {
	g := h.Group()
	d := &Dispatcher{opened: time.Now()}
	m, err := o.validate(g.Rank(), g.Size())
	own := communicator.Config{Name: "dispatch", Timeout: o.Timeout}
	if err == nil {
		d.options, d.bounds, d.placement, d.local = o, m, o.Placement, o.Placement.Local(g.Rank())
		err = d.plan(h, &own)
	}
	if d.c, err = communicator.Open(ctx, h, own, err); err != nil {
		return nil, errors.Join(err, d.mapped.Close())
	}
	d.holders = make([]*Handle, o.Handles)
	for range o.Handles {
		d.idle = append(d.idle, &Handle{d: d})
	}
	return d, nil
}

// plan sets how much memory the dispatcher takes, and how it is divided.
func (d *Dispatcher) plan(h *memory.Heap, own *communicator.Config) error {
	layout, err := h.Engine().Layout(d.bounds)
	if err != nil {
		return invalid("%v", err)
	}
	var sizes cutter
	own.Must, own.Family = d.options.fields(), d.bounds
	own.ZeroExtra = d.layOut(&sizes, layout)
	own.ExtraBytes = sizes.used
	own.Settle = func(extra memory.View) error {
		if d.options.HostCounts {
			if d.mapped, err = h.Pin(d.mappedBytes() * int64(d.options.Handles)); err != nil {
				return err
			}
		}
		d.layOut(&cutter{heap: h, block: extra}, layout)
		return transfer(h, d.table, memory.Host(shm.Bytes(d.placement.table(d.bounds.First))))
	}
	return nil
}

// cutter hands out memory of a heap piece by piece. Without a heap it only adds up.
type cutter struct {
	heap  *memory.Heap
	block memory.View
	used  int64
}

func (c *cutter) cut(n int64) (memory.View, kernels.Buffer) {
	at := c.used
	c.used = kernels.AlignUp(at+n, kernels.LineBytes)
	if c.heap == nil {
		return memory.View{}, kernels.Buffer{}
	}
	v := c.block.Slice(at, n)
	return v, c.heap.SymmetricOperand(v)
}

// handleViews are the views of one handle's memory that its user gets.
type handleViews struct {
	rows, scales, counts, offsets, rankCounts, indices, weights, sources, landed memory.View
	routing                                                                      memory.View // its part of DispatchHandle.State
}

// mappedBytes is the length of a handle's piece of Dispatcher.mapped: whole lines.
func (d *Dispatcher) mappedBytes() int64 {
	return kernels.AlignUp(4*int64(d.bounds.MappedWords()), kernels.LineBytes)
}

// layOut divides the dispatcher's memory. It returns how many of its first bytes must be zero.
func (d *Dispatcher) layOut(c *cutter, l kernels.Layout) (zero int64) {
	m := d.bounds
	d.table, m.Placement = c.cut(4 * int64(m.Experts+1+2*m.Slots()))
	d.counters, m.Counters = c.cut(8 * int64(m.CounterWords()))
	m.Handles, d.views = make([]kernels.DispatchHandle, d.options.Handles), make([]handleViews, d.options.Handles)
	for i := range m.Handles {
		var state memory.View
		if state, m.Handles[i].State = c.cut(l.State); c.heap != nil {
			d.views[i].routing = state.Slice(l.Routing, l.RoutingBytes)
		}
	}
	zero = c.used
	// Places are the same on all ranks, so sizes are those of the rank that needs most.
	groups := int64(m.MostLocal())
	local := groups
	if m.Layout.ByToken() {
		groups = int64(m.Ranks)
	}
	var landed, indices, weights, sources int64
	if m.Layout.ByToken() || d.options.RowWeights {
		weights = 4 * m.Rows * int64(m.WeightsPerRow())
	}
	if d.options.Sources {
		sources = 8 * m.Rows
	}
	if m.Landed {
		landed = 4 * local
	}
	if m.Layout.ByToken() {
		indices = 8 * m.Rows * int64(m.TopK)
	}
	for i := range m.Handles {
		h, v := &m.Handles[i], &d.views[i]
		v.counts, h.Counts = c.cut(4 * local)
		v.offsets, h.Offsets = c.cut(4 * (groups + 1))
		v.rankCounts, h.RankCounts = c.cut(4 * int64(m.Ranks))
		v.landed, h.Landed = c.cut(landed)
		v.indices, h.Indices = c.cut(indices)
		v.weights, h.Weights = c.cut(weights)
		v.sources, h.Sources = c.cut(sources)
		v.scales, h.Scales = c.cut(4 * m.Rows * int64(m.ScaleWords()))
		v.rows, h.Rows = c.cut(m.Rows * m.RowBytes())
		for _, of32 := range []*memory.View{&v.counts, &v.offsets, &v.rankCounts, &v.landed, &v.sources} {
			*of32 = memory.As[int32](*of32)
		}
		v.indices, v.weights = memory.As[int64](v.indices), memory.As[float32](v.weights)
		_, h.Staging = c.cut(l.Staging)
		if c.heap != nil {
			d.trim(h, v)
		}
		if d.mapped != nil {
			h.Mapped = d.mapped.Operand(int64(i)*d.mappedBytes(), 4*int64(m.MappedWords()))
		}
	}
	return zero
}

// trim makes the buffers of a handle as long as this rank needs them.
func (d *Dispatcher) trim(h *kernels.DispatchHandle, v *handleViews) {
	m := d.bounds
	for _, b := range []struct {
		v *memory.View
		b *kernels.Buffer
		n int
	}{{&v.counts, &h.Counts, m.Local(m.Rank)}, {&v.offsets, &h.Offsets, m.Groups(m.Rank) + 1}, {&v.landed, &h.Landed, m.Local(m.Rank)}} {
		if b.v.Len() > 0 {
			*b.v = b.v.Slice(0, 4*int64(b.n))
			b.b.Mem, b.b.Bytes = b.v.Bytes(), b.v.Len()
		}
	}
}

// MaxRows is the number of rows that fit Handle.Rows. Heap buffers of that many rows serve every call without staging.
func (d *Dispatcher) MaxRows() int { return int(d.bounds.Rows) }

// Memory is the dispatcher's memory in the heap, which holds the views of its handles. A caller that knows addresses only can slice views
// from it.
func (d *Dispatcher) Memory() memory.View { return d.c.Extra() }

// Placement is where the experts are now. It must not be changed.
func (d *Dispatcher) Placement() *Placement {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.placement
}

// SetPlacement moves the experts, for later dispatches; the caller moves their weights. Handles keep their dispatches. Every rank
// keeps its number of expert slots. It is collective, waits for earlier calls, and returns when all ranks have called it.
func (d *Dispatcher) SetPlacement(ctx context.Context, p *Placement) error {
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.c.Alive(); err != nil {
		return err
	}
	err := d.usable()
	if err == nil {
		err = p.validate(d.options.Experts, d.bounds.Ranks)
	}
	if err == nil {
		if first := p.slots(d.bounds.Ranks); !slices.Equal(first, d.bounds.First) {
			err = invalid("the placement has slots %v, the dispatcher was made with %v: every rank keeps its number", first, d.bounds.First)
		}
	}
	if err == nil {
		err = d.c.Wait()
	}
	var claim agree.Claim
	if err == nil {
		claim.Must = agree.Same("Placement " + p.String())
	}
	if _, err := agree.On(ctx, d.c.Group, claim, err); err != nil {
		return fmt.Errorf("dispatch: set placement: %w", err)
	}
	p = p.clone()
	if err := transfer(d.c.Heap, d.table, memory.Host(shm.Bytes(p.table(d.bounds.First)))); err != nil {
		d.c.Done(fmt.Errorf("set placement: %w", err)) // ranks may have different tables
		return fmt.Errorf("dispatch: set placement: %w", err)
	}
	d.mu.Lock()
	d.placement, d.local = p, p.Local(d.bounds.Rank)
	d.mu.Unlock()
	return nil
}

// transfer copies between the host and a dispatcher's memory, on a stream of its own.
func transfer(h *memory.Heap, dst, src memory.View) error {
	if dst.OnHost() && src.OnHost() {
		return memory.Copy(nil, dst, src)
	}
	s, err := h.Device().NewStream()
	if err != nil {
		return err
	}
	if err = memory.Copy(s, dst, src); err == nil {
		err = s.Synchronize()
	}
	return errors.Join(err, s.Close())
}

// Counters are what a rank has counted so far.
type Counters struct {
	// Choices is the number of choices of this rank's tokens for each expert. Summed over ranks it is the load that Balance takes.
	Choices []int64
	// Bytes counts the rows and scales that were sent to each rank, or that it read. A token that goes to a rank in several rows
	// crosses once in a dispatch. The own entry counts those that stayed.
	Bytes []int64
	// Waited is the time in which this rank could only wait for each rank.
	Waited []time.Duration
}

// Counters reads the counters without a wait for any stream: they contain the calls that have run.
func (d *Dispatcher) Counters() (Counters, error) {
	if d.counters.Valid() != nil {
		return Counters{}, fmt.Errorf("dispatch: counters: %w", ErrClosed)
	}
	words := make([]int64, d.bounds.CounterWords())
	if mem := d.counters.Bytes(); mem != nil {
		for i := range words {
			words[i] = int64(shm.Word(mem, 8*int64(i)).Load())
		}
	} else if err := transfer(d.c.Heap, memory.Host(shm.Bytes(words)), d.counters); err != nil {
		return Counters{}, fmt.Errorf("dispatch: counters: %w", err)
	}
	c := Counters{Choices: words[:d.bounds.Experts:d.bounds.Experts], Waited: make([]time.Duration, d.bounds.Ranks)}
	words = words[d.bounds.Experts:]
	c.Bytes = words[:d.bounds.Ranks:d.bounds.Ranks]
	for p, ns := range words[d.bounds.Ranks:] {
		c.Waited[p] = time.Duration(ns)
	}
	return c, nil
}

// ready returns the error of a call with h that is not possible. half says that it is the second half of a call.
func (d *Dispatcher) ready(h *Handle, half bool) error {
	if err := d.usable(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case h == nil || h.d != d || !h.alive:
		return fmt.Errorf("dispatch: %w", ErrReleased)
	case h.lost:
		return fmt.Errorf("dispatch: the handle holds no dispatch: %w", h.err)
	case half && h.half == nil:
		return fmt.Errorf("dispatch: %w: the handle has had no first half", ErrHalf)
	case !half && h.half != nil:
		return fmt.Errorf("dispatch: %w: the handle is in a %v, of which the second half is missing", ErrHalf, h.half.kind)
	}
	return nil
}

// check refuses a view that is not memory of the device, does not have want bytes (a negative number: any), is known to consist of
// other elements than those of t, or is not aligned for them.
func (d *Dispatcher) check(name string, v memory.View, want int64, t kernels.DType) error {
	if err := v.Valid(); err != nil {
		return fmt.Errorf("dispatch: %s: %w", name, err)
	}
	if v.Len() == 0 && want <= 0 {
		return nil
	}
	if !d.c.Heap.Serves(v) {
		return invalid("%s is not %v memory", name, d.c.Heap.Device().Kind())
	}
	if !v.Holds(t) {
		return invalid("%s has elements of %s, want %v", name, v.Element(), t)
	}
	if want >= 0 && v.Len() != want {
		return invalid("%s has %d bytes, want %d", name, v.Len(), want)
	}
	if v.Ptr()%uintptr(t.Size()) != 0 {
		return invalid("%s is not aligned to its elements of %d bytes", name, t.Size())
	}
	return nil
}

// checkTokens is check for a buffer of one row a token, which may be longer.
func (d *Dispatcher) checkTokens(name string, v memory.View, tokens int, t kernels.DType) error {
	need := int64(tokens) * int64(d.bounds.Hidden) * t.Size()
	if v.Len() < need {
		return invalid("%s has %d bytes, %d tokens of %d x %v need %d", name, v.Len(), tokens, d.bounds.Hidden, t, need)
	}
	return d.checkRows(name, v, t)
}

// checkRows is check for a buffer of rows of any number. A GPU moves them by 16 bytes.
func (d *Dispatcher) checkRows(name string, v memory.View, t kernels.DType) error {
	if err := d.check(name, v, -1, t); err != nil {
		return err
	}
	if d.c.Heap.Device().Kind() != device.HostKind && v.Ptr()%16 != 0 {
		return invalid("%s is not aligned to 16 bytes", name)
	}
	return nil
}

// own is v for an engine, for this rank only.
func (d *Dispatcher) own(v memory.View) kernels.Buffer { return d.c.Heap.Operand(v) }

// shown is v for an engine. Peers access it in place if they reach it.
func (d *Dispatcher) shown(v memory.View) kernels.Buffer { return d.c.Heap.SymmetricOperand(v) }

// overlap reports whether two views, both of the heap's device, share a byte.
func overlap(a, b memory.View) bool {
	return a.Len() > 0 && b.Len() > 0 && a.Ptr() < b.Ptr()+uintptr(b.Len()) && b.Ptr() < a.Ptr()+uintptr(a.Len())
}

// op returns an idle launch.
func (d *Dispatcher) op(kind kernels.DispatchOp, h *Handle) *op {
	o := d.ops.Take()
	if o == nil {
		o = new(op)
		o.done = func(err error) {
			d.c.Done(err)
			d.retire(o, err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	o.kind, o.handle = kind, h
	h.users++
	return o
}

// launchOf are the fields that all launches have.
func (d *Dispatcher) launchOf(kind kernels.DispatchOp, h *Handle) kernels.DispatchCall {
	l := kernels.Launched{Timeout: d.options.Timeout, Note: kernels.Note{Algorithm: d.options.Layout.String(), Payload: -1}}
	if d.options.LowLatency {
		l.Note.Algorithm = "low latency"
	}
	return kernels.DispatchCall{Handle: h.memory, Op: kind, Tokens: h.tokens, Routing: d.routing(h), Blocks: d.options.MaxSMs, Launched: l}
}

// launch puts a call, or the half of it in phase, on s. After the first half the handle keeps the second.
func (d *Dispatcher) launch(s device.Stream, o *op, phase kernels.Phase) error {
	h := o.handle
	var second *op
	if phase == kernels.Send {
		second = d.op(o.kind, h)
		second.dispatch, second.combine, second.backward = o.dispatch, o.combine, o.backward
	}
	err := d.late(d.c.Launch(s, o.operation(phase, s != nil)))
	switch {
	case s == nil:
		d.retire(o, err)
	case err != nil:
		d.recycle(o) // not enqueued
	}
	switch {
	case second == nil:
	case err != nil:
		d.recycle(second)
	default:
		d.mu.Lock()
		h.half = second
		d.mu.Unlock()
	}
	return err
}

// operation is the launch for the engine. streamed says that the engine will call Done.
func (o *op) operation(phase kernels.Phase, streamed bool) kernels.Operation {
	var call *kernels.DispatchCall
	var operation kernels.Operation
	switch o.kind {
	case kernels.OpResults:
		if o.results.Done = nil; streamed {
			o.results.Done = o.done
		}
		return &o.results
	case kernels.OpDispatch, kernels.OpRedispatch:
		call, operation = &o.dispatch.DispatchCall, &o.dispatch
	case kernels.OpCombineBackward:
		call, operation = &o.backward.DispatchCall, &o.backward
	default:
		call, operation = &o.combine.DispatchCall, &o.combine
	}
	if call.Phase, call.Done = phase, nil; streamed {
		call.Done = o.done
	}
	return operation
}

// second is the launch of the second half of a call of h.
func (d *Dispatcher) second(s device.Stream, h *Handle, kinds ...kernels.DispatchOp) error {
	if err := d.ready(h, true); err != nil {
		return err
	}
	d.mu.Lock()
	o := h.half
	if !slices.Contains(kinds, o.kind) {
		d.mu.Unlock()
		return fmt.Errorf("dispatch: %w: the handle is in a %v", ErrHalf, o.kind)
	}
	h.half = nil
	d.mu.Unlock()
	return d.launch(s, o, kernels.Receive)
}

// retire takes back a launch that has run.
func (d *Dispatcher) retire(o *op, err error) {
	if err != nil && o.kind == kernels.OpDispatch {
		d.mu.Lock()
		o.handle.err = err
		d.mu.Unlock()
	}
	d.recycle(o)
}

// recycle makes a launch idle.
func (d *Dispatcher) recycle(o *op) {
	d.mu.Lock()
	o.handle.users--
	d.mu.Unlock()
	switch o.handle = nil; o.kind {
	case kernels.OpDispatch, kernels.OpRedispatch:
		o.dispatch = kernels.Dispatch{}
	case kernels.OpCombineBackward:
		o.backward = kernels.CombineBackward{}
	case kernels.OpResults:
		o.results = kernels.Results{}
	default:
		o.combine = kernels.Combine{}
	}
	d.ops.Give(o)
}

// Fault returns the error of calls that have run by now, nil if there is none, on a device whose streams do not report it; the host's
// streams do. Fault or the next call returns a disagreement of ranks once; the handle of the failed call can then only be released.
func (d *Dispatcher) Fault() error {
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.c.Alive(); err != nil {
		return err
	}
	return d.late(d.c.LockedFault())
}

// usable returns the error of a call that is not possible. The communicator is locked.
func (d *Dispatcher) usable() error { return d.late(d.c.Usable()) }

// late marks the handles of the calls whose error err is, which was reported after they were made, and returns err.
func (d *Dispatcher) late(err error) error {
	if err == nil {
		return nil
	}
	var hit *kernels.HandlesError
	if errors.As(err, &hit) {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, i := range hit.Handles {
			if h := d.holders[i]; h != nil {
				h.lost, h.err = true, hit.Err
			}
		}
	}
	return err
}

// Close waits for the launches on streams and gives the memory back; handles are dead. It is collective and idempotent: no rank
// frees memory that a peer may still write. After a failure of the group it releases this rank's memory and returns. When ctx
// ends, launches that wait for peers give up.
func (d *Dispatcher) Close(ctx context.Context) error {
	err := d.c.Close(ctx)
	if errors.Is(err, kernels.ErrRunning) {
		return err // and they write what is mapped
	}
	d.mu.Lock()
	mapped := d.mapped
	d.mapped = nil
	d.mu.Unlock()
	if cerr := mapped.Close(); cerr != nil {
		err = errors.Join(err, fmt.Errorf("dispatch: close: %w", cerr))
	}
	return err
}
