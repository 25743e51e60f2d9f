package dispatch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
	"github.com/switchyard-moe/switchyard/memory"
)

// Dispatcher carries tokens to their experts and back, for one group over one symmetric heap. Its methods may be called
// from several goroutines, but all ranks must make the same calls in the same order, with handles of the same dispatch.
//
// Every call is enqueued on the stream it is given; with a nil stream it is complete on return. Views belong to the call
// until then. Errors are of three kinds:
//
//   - Bad arguments (ErrInvalid, ErrReleased, ErrNoHandle, memory.ErrFreed, ErrClosed) are refused before anything is
//     enqueued. The call has not happened and may be repeated, which the other ranks wait for.
//   - What shows only when the ranks meet is the same error on every rank, with nothing moved, and the Dispatcher can be
//     used further: *OverflowError, *kernels.OrderError (ranks in different calls), *kernels.ShortError (a buffer too
//     small for the rows of its dispatch).
//   - A lost peer is comm.ErrPeerLost, one that does not come within Options.Timeout comm.ErrTimeout; both name it. The
//     Dispatcher can then only be closed.
//
// On a stream the errors of the last two kinds are errors of the stream.
type Dispatcher struct {
	group   *comm.Group
	heap    *memory.Heap
	engine  *host.Engine
	options Options
	experts *kernels.Experts
	local   []int     // this rank's experts
	copies  [][]int32 // slots of each expert, as its placement lists them
	rankOf  []int32   // of each slot
	lanes   kernels.Lanes
	// block holds the lanes, then the outputs of handles, then staging for the rows that peers read and write.
	block   *memory.Buffer
	outputs int64 // where the first begins in the block
	stride  int64 // of one to the next

	// calls is held throughout a call, so that launches have one order.
	calls sync.Mutex
	last  device.Stream // of the last launch
	// token numbers every token ever routed; seen is the last one that chose an expert.
	token uint64
	seen  []uint64

	// mu guards what launches on streams change too, and the lives of handles. Nobody waits for a stream with it.
	mu     sync.Mutex
	closed bool
	broken error     // a call failed half-way: the lanes are in no known state
	free   []int     // outputs
	idle   []*Handle // released, longest ago first
	ops    []*op     // idle launches
	sent   []int64   // bytes by rank
}

// op is one launch and what must live until it has run.
type op struct {
	dispatch kernels.Dispatch
	combine  kernels.Combine
	backward kernels.CombineBackward
	kind     kernels.MoEOp
	handle   *Handle
	done     func(error) // for launches on a stream
}

// New makes a Dispatcher. It is collective: every rank of the heap's group calls it, in the same order as its other
// allocations, with equal options. All memory that it will ever use comes from the heap here, which grows where it has
// no room. What fails on one rank is an error on all. The caller closes the Dispatcher before the heap.
func New(ctx context.Context, h *memory.Heap, o Options) (*Dispatcher, error) {
	g := h.Group()
	x, err := o.validate(g.Size())
	if k := h.Device().Kind(); err == nil && k != device.HostKind {
		err = invalid("no engine for %v devices", k)
	}
	var claim agree.Claim
	if err == nil {
		claim.Must = o.fields()
	}
	if _, err := agree.On(ctx, g, claim, err); err != nil {
		return nil, fmt.Errorf("dispatch: compare options: %w", err)
	}
	d := &Dispatcher{group: g, heap: h, options: o, experts: x, sent: make([]int64, g.Size()), seen: make([]uint64, o.Experts)}
	d.local = o.Placement.Local(g.Rank())
	most := d.findSlots()
	d.lanes = kernels.Lanes{Size: g.Size(), Slots: len(x.Expert), Twins: o.MaxTokens * max(min(o.TopK, most)-1, 0)}
	d.outputs, d.stride = kernels.AlignUp(d.lanes.Bytes(), kernels.LineBytes), kernels.AlignUp(x.Rows*x.RowBytes(), kernels.LineBytes)
	if d.block, err = allocate(ctx, h, d.outputs+d.stride*int64(o.Handles+2), d.lanes.ControlBytes()); err != nil {
		return nil, fmt.Errorf("dispatch: memory for channels, outputs and staging: %w", err)
	}
	d.lanes.Offset = d.block.Offset()
	d.engine = host.New(h.Space(), g.Err)
	for i := range o.Handles {
		d.free = append(d.free, i)
		d.idle = append(d.idle, d.newHandle())
	}
	return d, nil
}

// findSlots fills in the tables of slots. It returns the most slots that one rank has.
func (d *Dispatcher) findSlots() (most int) {
	x := d.experts
	d.copies, d.rankOf = make([][]int32, d.options.Experts), make([]int32, len(x.Expert))
	for r := range d.group.Size() {
		for s := x.First[r]; s < x.First[r+1]; s++ {
			d.rankOf[s] = int32(r)
		}
		most = max(most, int(x.First[r+1]-x.First[r]))
	}
	for e, at := range d.options.Placement.Ranks {
		for _, r := range at {
			i, _ := slices.BinarySearch(x.Expert[x.First[r]:x.First[r+1]], int32(e))
			d.copies[e] = append(d.copies[e], x.First[r]+int32(i))
		}
	}
	return most
}

// allocate takes n bytes of the heap, after growing it if it has no room. The first zero bytes are zero on all ranks when
// it returns. What fails on one rank is an error on all.
func allocate(ctx context.Context, h *memory.Heap, n, zero int64) (*memory.Buffer, error) {
	b, err := h.Alloc(n)
	full := errors.Is(err, memory.ErrOutOfMemory)
	if full {
		err = nil
	}
	_, err = agree.On(ctx, h.Group(), agree.Claim{Must: []string{fmt.Sprintf("room for %d bytes: %v", n, !full)}}, err)
	if err == nil {
		if full {
			if err = h.Grow(ctx, n); err == nil {
				b, err = h.Alloc(n)
			}
		}
		var claim agree.Claim
		if err == nil {
			clear(b.Bytes()[:zero])
			claim.Must = []string{fmt.Sprintf("its channels at offset %d", b.Offset())}
		}
		_, err = agree.On(ctx, h.Group(), claim, err)
	}
	if err != nil && b != nil {
		err = errors.Join(err, b.Free())
	}
	return b, err
}

// output is the i-th output; the last two are staging.
func (d *Dispatcher) output(i int) memory.View {
	return d.block.View().Slice(d.outputs+int64(i)*d.stride, d.stride)
}

// staging for rows that peers read (0) and write (1), from the start of this rank's segment.
func (d *Dispatcher) staging(i int) int64 {
	return d.block.Offset() + d.outputs + int64(d.options.Handles+i)*d.stride
}

// MaxRows is the most rows that this rank can get in one dispatch, padding included. Buffers of so many rows from the
// heap serve every call without staging.
func (d *Dispatcher) MaxRows() int { return int(d.experts.Rows) }

// Placement is where the experts are. It must not be changed.
func (d *Dispatcher) Placement() *Placement { return d.options.Placement }

// Traffic returns the bytes of rows that this rank has sent to each rank so far, or shown it to read. A token that goes
// to a rank in several rows crosses once in a dispatch. The own entry is what stayed.
func (d *Dispatcher) Traffic() []int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.sent)
}

// Dispatch sends every token's row of x to each of its experts. x is [T, Hidden]. idx and weights are [T, TopK], row by
// row: the experts of each token, each at most once, and what Combine will multiply their rows by. An idx of -1 masks a
// choice; a token may have none. T may be 0 and differ from rank to rank. idx and weights are read before Dispatch
// returns, also on a stream.
//
// Each expert's rows are ordered by the rank they come from and then by token. The caller releases the handle.
func (d *Dispatcher) Dispatch(s device.Stream, x memory.View, idx []int32, weights []float32) (*Handle, error) {
	d.calls.Lock()
	defer d.calls.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	tokens := len(idx) / d.options.TopK
	if len(idx)%d.options.TopK != 0 || len(weights) != len(idx) {
		return nil, invalid("%d expert indices and %d weights with top-%d", len(idx), len(weights), d.options.TopK)
	}
	if tokens > d.options.MaxTokens {
		return nil, invalid("%d tokens, Options.MaxTokens is %d", tokens, d.options.MaxTokens)
	}
	if err := d.tokenRows("x", x, tokens); err != nil {
		return nil, err
	}
	h, err := d.take()
	if err != nil {
		return nil, err
	}
	if err = h.route(idx, weights); err == nil {
		err = d.order(s)
	}
	if err != nil {
		h.Release()
		return nil, err
	}
	o := d.op(kernels.DispatchOp, h)
	o.dispatch = kernels.Dispatch{
		Lanes: &d.lanes, Experts: d.experts, Routing: &h.routing, X: x.Bytes(),
		Out: d.block.Offset() + d.outputs + int64(h.buffer)*d.stride, Timeout: d.options.Timeout,
	}
	if s != nil {
		o.dispatch.Done = o.done
	}
	if err := d.launched(s, o, d.engine.Dispatch(s, &o.dispatch)); err != nil {
		h.Release()
		return nil, err
	}
	return h, nil
}

// Combine brings the rows back: y[t] is the sum of weight times row over the experts of token t, 0 where it has none. y
// is [T, Hidden], with the T of this rank's dispatch. rows is laid out like Handle.Rows, which it may be; what is not in
// the symmetric heap is copied to staging first. Padding is not read.
//
// Sums are made in float32 and rounded once, over the token's choices on one rank in ascending order, then over the
// ranks in ascending order. So the result has the same bits in every run.
func (d *Dispatcher) Combine(s device.Stream, y, rows memory.View, h *Handle) error {
	return d.gather(s, kernels.CombineOp, "y", y, rows, h)
}

// DispatchBackward computes the gradient of Dispatch: dx[t] is the sum of dRows over the rows of token t, in the order in
// which Combine sums. The views are like those of Combine.
func (d *Dispatcher) DispatchBackward(s device.Stream, dx, dRows memory.View, h *Handle) error {
	return d.gather(s, kernels.DispatchBackwardOp, "dx", dx, dRows, h)
}

func (d *Dispatcher) gather(s device.Stream, kind kernels.MoEOp, name string, y, rows memory.View, h *Handle) error {
	d.calls.Lock()
	defer d.calls.Unlock()
	if err := d.ready(h); err != nil {
		return err
	}
	if err := d.tokenRows(name, y, h.Tokens()); err != nil {
		return err
	}
	at, staged, err := d.expertRows("rows", rows, 0)
	if err != nil {
		return err
	}
	if shm.Overlap(y.Bytes(), rows.Bytes()) {
		return invalid("%s and the rows overlap", name)
	}
	if err := d.order(s); err != nil {
		return err
	}
	o := d.op(kind, h)
	o.combine = kernels.Combine{
		Lanes: &d.lanes, Experts: d.experts, Routing: &h.routing, Op: kind,
		Y: y.Bytes(), Rows: rows.Bytes(), RowsAt: at, Staged: staged, Timeout: d.options.Timeout,
	}
	if s != nil {
		o.combine.Done = o.done
	}
	return d.launched(s, o, d.engine.Combine(s, &o.combine))
}

// CombineBackward computes the gradients of Combine from dy, [T, Hidden], and the rows that Combine had: dRows is weight
// times dy[t] in each row of token t and zero in padding rows; dWeights, [T, TopK] in float32, is the inner product of
// dy[t] and the row of the token's choice, 0 where it is masked.
//
// rows and dRows are laid out like Handle.Rows. They may be the same memory and must not overlap otherwise, nor overlap
// dy. What is not in the symmetric heap goes through staging.
func (d *Dispatcher) CombineBackward(s device.Stream, dRows memory.View, dWeights []float32, dy, rows memory.View, h *Handle) error {
	d.calls.Lock()
	defer d.calls.Unlock()
	if err := d.ready(h); err != nil {
		return err
	}
	if n := h.Tokens() * d.options.TopK; len(dWeights) != n {
		return invalid("%d gradients of weights, the dispatch of %d tokens had %d weights", len(dWeights), h.Tokens(), n)
	}
	if err := d.tokenRows("dy", dy, h.Tokens()); err != nil {
		return err
	}
	rowsAt, rowsStaged, err := d.expertRows("rows", rows, 0)
	if err != nil {
		return err
	}
	dRowsAt, dRowsStaged, err := d.expertRows("dRows", dRows, 1)
	if err != nil {
		return err
	}
	if r, dr := rows.Bytes(), dRows.Bytes(); shm.Overlap(dy.Bytes(), dr) || shm.Overlap(r, dr) && shm.Addr(r) != shm.Addr(dr) {
		return invalid("dRows overlaps dy or lies across rows")
	}
	if err := d.order(s); err != nil {
		return err
	}
	o := d.op(kernels.CombineBackwardOp, h)
	o.backward = kernels.CombineBackward{
		Lanes: &d.lanes, Experts: d.experts, Routing: &h.routing, DY: dy.Bytes(), DWeights: dWeights,
		Rows: rows.Bytes(), RowsAt: rowsAt, RowsStaged: rowsStaged,
		DRows: dRows.Bytes(), DRowsAt: dRowsAt, DRowsStaged: dRowsStaged, Timeout: d.options.Timeout,
	}
	if s != nil {
		o.backward.Done = o.done
	}
	return d.launched(s, o, d.engine.CombineBackward(s, &o.backward))
}

// usable returns why no call can be made. d.calls is held, here and below.
func (d *Dispatcher) usable() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return fmt.Errorf("dispatch: %w", ErrClosed)
	case d.broken != nil:
		return fmt.Errorf("dispatch: an earlier call failed: %w", d.broken)
	}
	if err := d.group.Err(); err != nil {
		return fmt.Errorf("dispatch: %w", err)
	}
	return nil
}

// ready returns why no call can be made with h.
func (d *Dispatcher) ready(h *Handle) error {
	if err := d.usable(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if h == nil || h.d != d || !h.alive {
		return fmt.Errorf("dispatch: %w", ErrReleased)
	}
	return nil
}

// tokenRows checks a buffer of one row a token.
func (d *Dispatcher) tokenRows(name string, v memory.View, tokens int) error {
	if err := v.Valid(); err != nil {
		return fmt.Errorf("dispatch: %s: %w", name, err)
	}
	need := int64(tokens) * d.experts.RowBytes()
	if v.Len() < need {
		return invalid("%s has %d bytes, %d tokens of %d x %v need %d", name, v.Len(), tokens, d.options.Hidden, d.options.DType, need)
	}
	if !v.OnHost() {
		return invalid("%s is not host memory", name)
	}
	return nil
}

// expertRows finds where peers reach a buffer of rows: in place, or in staging.
func (d *Dispatcher) expertRows(name string, v memory.View, stage int) (at int64, staged bool, err error) {
	if err := v.Valid(); err != nil {
		return 0, false, fmt.Errorf("dispatch: %s: %w", name, err)
	}
	if !v.OnHost() {
		return 0, false, invalid("%s is not host memory", name)
	}
	if at, ok := v.Symmetric(d.heap); ok {
		return at, false, nil
	}
	return d.staging(stage), true, nil
}

// order makes s wait for the launch before, when that was on another stream.
func (d *Dispatcher) order(s device.Stream) error {
	if err := device.Follow(s, d.last); err != nil {
		return fmt.Errorf("dispatch: %w", err)
	}
	d.last = s
	return nil
}

// op returns an idle launch.
func (d *Dispatcher) op(kind kernels.MoEOp, h *Handle) *op {
	d.mu.Lock()
	defer d.mu.Unlock()
	var o *op
	if n := len(d.ops); n > 0 {
		o, d.ops = d.ops[n-1], d.ops[:n-1]
	} else {
		o = new(op)
		o.done = func(err error) { d.retire(o, err) }
	}
	o.kind, o.handle = kind, h
	h.users++
	return o
}

// launched deals with what the engine answered to a launch.
func (d *Dispatcher) launched(s device.Stream, o *op, err error) error {
	if s == nil {
		d.retire(o, err)
	} else if err != nil {
		d.recycle(o) // not enqueued
	}
	if err != nil {
		return fmt.Errorf("dispatch: %w", err)
	}
	return nil
}

// retire takes back a launch that has run.
func (d *Dispatcher) retire(o *op, err error) {
	d.mu.Lock()
	if err == nil {
		d.count(o.kind, &o.handle.routing)
	} else if d.broken == nil && !shared(err) {
		d.broken = err
	}
	d.mu.Unlock()
	d.recycle(o)
}

// recycle makes a launch idle.
func (d *Dispatcher) recycle(o *op) {
	d.mu.Lock()
	defer d.mu.Unlock()
	o.handle.users--
	o.handle, o.dispatch, o.combine, o.backward = nil, kernels.Dispatch{}, kernels.Combine{}, kernels.CombineBackward{}
	d.ops = append(d.ops, o)
}

// shared reports whether every rank has this error, so that the lanes are as they should be.
func shared(err error) bool {
	var overflow *kernels.OverflowError
	var order *kernels.OrderError
	var short *kernels.ShortError
	return errors.As(err, &overflow) || errors.As(err, &order) || errors.As(err, &short)
}

// count adds what a call sent. d.mu is held.
func (d *Dispatcher) count(kind kernels.MoEOp, r *kernels.Routing) {
	for p := range d.sent {
		var rows int64
		switch kind {
		case kernels.DispatchOp:
			rows = r.SendTokens[p]
		case kernels.CombineBackwardOp:
			rows = r.SendRows[p] + r.RecvRows[p]
		default:
			rows = r.RecvRows[p]
		}
		d.sent[p] += rows * d.experts.RowBytes()
	}
}

// Close waits for the launches on streams and gives the memory back; handles are dead. It is collective and idempotent:
// no rank frees lanes that a peer may still write. After a failure of the group it releases what is this rank's and
// returns.
func (d *Dispatcher) Close(ctx context.Context) error {
	d.calls.Lock()
	defer d.calls.Unlock()
	d.mu.Lock()
	was := d.closed
	d.closed = true
	d.mu.Unlock()
	if was {
		return nil
	}
	err := device.Follow(nil, d.last)
	if d.group.Err() == nil {
		if berr := d.group.Barrier(ctx); berr != nil {
			err = errors.Join(err, fmt.Errorf("dispatch: close: %w", berr))
		}
	}
	return errors.Join(err, d.block.Free())
}
