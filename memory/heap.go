package memory

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/kernels"
)

// version of what ranks say to one another here.
const version = 1

// Heap is one rank's end of a symmetric heap.
//
// Alloc and Free, of the heap and its buffers, are local and may be called by several goroutines,
// but all ranks make the same calls in the same order. NewHeap, Grow, Verify, Register, Deregister
// and Close are collective: every rank of the group calls them, in the same order as all its other
// calls. Arguments that differ between ranks, and a rank that cannot do its part, are an error on
// every rank, and change nothing. After a collective call that its context or a lost rank has cut
// off, the heap can only be closed.
type Heap struct {
	group   *comm.Group
	dev     device.Device
	log     *slog.Logger
	back    backing
	gpu     *cudaBacking // back on a GPU, nil on the host
	multi   *multicast   // nil on a heap without multicast addresses
	space   kernels.Space
	engine  kernels.Engine
	limit   int64 // of the pool, and where the window for registrations begins
	granule int64
	// noMulticast is the reason for a nil multi though Options asked for multicast.
	noMulticast string

	// together serialises this rank's collective calls.
	together sync.Mutex
	unhook   func()
	closed   atomic.Bool
	// registered is what lookups by identity go through, newest last.
	registered atomic.Pointer[[]*Registration]

	mu      sync.Mutex
	broken  error
	mapped  bool // the range may be touched
	pool    pool
	fences  fences
	journal journal
	extents []extent // placements in every rank's segment, in order
	window  pool     // addresses for registrations
	rows    []bool   // of the alias table, on GPUs: which are in use
	peak    int64
	waits   int64
}

// extent is a piece of a segment that was committed at once.
type extent struct{ off, n int64 }

// NewHeap makes a symmetric heap over the ranks of g with memory of d. It is collective.
//
// Every rank reserves one range of addresses and maps the segments of all ranks in it at equal
// distances; ranks that share a process share the range. The memory is zero. The error on every rank
// is comm.ErrMismatch when options, devices or versions differ, ErrInvalid for options out of range
// and ErrUnsupported for a device that has no heap, GPUs of which one cannot reach the other, or ranks of one
// process that share a GPU without Options.ShareGPUs.
//
// The heap does not own d, which is closed after it.
func NewHeap(ctx context.Context, g *comm.Group, d device.Device, o Options) (*Heap, error) {
	return newHeap(ctx, g, d, o, newBacking)
}

func newHeap(
	ctx context.Context, g *comm.Group, d device.Device, o Options, back func(device.Device) (backing, error),
) (*Heap, error) {
	if g == nil {
		return nil, fmt.Errorf("memory: new heap: %w: no group", ErrInvalid)
	}
	h := &Heap{group: g, dev: d, log: o.Logger}
	if h.log == nil {
		h.log = g.Logger()
	}
	if err := h.open(ctx, o, back); err != nil {
		h.release()
		return nil, fmt.Errorf("memory: new heap: %w", err)
	}
	h.log.Info("memory: heap created", "group", g.Name(), "rank", g.Rank(), "device", d.String(),
		"segment", h.extents[0].n, "limit", h.limit)
	return h, nil
}

func (h *Heap) open(ctx context.Context, o Options, back func(device.Device) (backing, error)) error {
	g := h.group
	lay, err := h.choose(o, back)
	what := agree.Claim{Op: "new heap", Must: []agree.Value{
		agree.Named("version", version),
		agree.Named("device", kindOf(h.dev)),
		agree.Named("segment bytes", o.SegmentBytes),
		agree.Named("reserve bytes", o.ReserveBytes),
		agree.Named("legacy IPC", o.LegacyIPC),
		agree.Named("share GPUs", o.ShareGPUs),
		agree.Named("multicast", o.Multicast),
		agree.Named("granule", h.granule),
	}}
	if err == nil {
		what.Info = h.back.who()
		if h.gpu != nil {
			what.Info = append(what.Info, int64(h.hurdle(o.Multicast)))
		}
	}
	claims, err := agree.On(ctx, g, what, err)
	if err != nil {
		return err
	}
	devices := claims.Infos()
	if err = h.back.reach(devices); err == nil && h.gpu != nil && !o.ShareGPUs && g.InProcess() {
		err = apart(devices)
	}
	if err == nil {
		if err = h.teamUp(o.Multicast, devices); err == nil {
			lay, err = o.validate(g.Size(), h.granule)
		}
	}

	// The range. By default take what the process with the least addresses can have.
	if err == nil && (!g.InProcess() || g.Rank() == 0) {
		for {
			err = h.back.reserve(lay.stride() * int64(g.Size()))
			if err == nil || lay.limit/2 < lay.atLeast {
				break
			}
			lay.limit = roundUp(lay.limit/2, h.granule)
		}
	}
	limits, err := agree.On(ctx, g, agree.Claim{Op: "reserve", Must: []agree.Value{agree.Named("granule with multicast", h.granule)}, Info: []int64{lay.limit}}, err)
	if err != nil {
		return err
	}
	for _, l := range limits {
		lay.limit = min(lay.limit, l.Info[0])
	}
	h.limit = lay.limit
	h.space = kernels.Space{Stride: lay.stride(), Rank: g.Rank(), Size: g.Size(), Log: h.log, AwaitedBy: g.AwaitedBy}
	if g.InProcess() {
		if err := h.adopt(ctx); err != nil {
			return err
		}
	}
	h.space.Mem, h.space.Base = h.back.mem(), h.back.base()
	h.window.add(h.limit, h.limit)
	if h.gpu != nil {
		h.space.Aliases, h.rows = new(kernels.Aliases), make([]bool, kernels.AliasRows(g.Size()))
	}

	if h.multi != nil {
		if _, err = agree.On(ctx, g, agree.Claim{Op: "reserve multicast addresses"}, h.multi.reserve(h.limit)); err != nil {
			return err
		}
		h.space.Multicast = h.multi.base
	}

	e := extent{0, lay.first}
	if h.gpu != nil && h.gpu.scattered {
		err = h.scatter(ctx, e.n)
	} else {
		err = h.commit(ctx, "commit", e)
	}
	if err != nil {
		return err
	}
	h.extents = append(h.extents, e)
	h.pool.add(kernels.HeaderBytes, lay.first-kernels.HeaderBytes)
	h.mapped = true
	h.engine, err = h.back.engine(h.space, g.Err)
	if _, err = agree.On(ctx, g, agree.Claim{Op: "make the engine"}, err); err != nil {
		return err
	}
	h.unhook = g.OnFailure(func(error) { h.abort() })
	return nil
}

// choose checks the caller's arguments.
func (h *Heap) choose(o Options, back func(device.Device) (backing, error)) (layout, error) {
	if h.dev == nil {
		return layout{}, fmt.Errorf("%w: no device", ErrInvalid)
	}
	b, err := back(h.dev)
	if err != nil {
		return layout{}, err
	}
	h.back, h.granule = b, b.granule()
	if h.gpu, _ = b.(*cudaBacking); h.gpu != nil {
		h.gpu.scattered = h.gpu.scattered || o.LegacyIPC
	} else if o.LegacyIPC {
		return layout{}, fmt.Errorf("%w: CUDA IPC on a heap of the host", ErrInvalid)
	}
	switch {
	case o.Multicast > MulticastByFabric:
		return layout{}, fmt.Errorf("%w: %v", ErrInvalid, o.Multicast)
	case o.Multicast != NoMulticast && (h.gpu == nil || o.LegacyIPC):
		return layout{}, fmt.Errorf("%w: multicast on a heap of the host or of CUDA IPC memory", ErrInvalid)
	}
	return o.validate(h.group.Size(), h.granule)
}

func kindOf(d device.Device) string {
	if d == nil {
		return "none"
	}
	return d.Kind().String()
}

// adopt has all ranks of this process use the range of rank 0.
func (h *Heap) adopt(ctx context.Context) error {
	all, err := h.group.Share(ctx, h.back)
	if err == nil && h.group.Rank() != 0 {
		err = h.back.adopt(all[0].(backing))
	}
	_, err = agree.On(ctx, h.group, agree.Claim{Op: "adopt"}, err)
	return err
}

// commit gives every rank memory for e of its segment, maps it everywhere and binds it to multicast objects if the heap has them. On an
// error this rank keeps none of it.
func (h *Heap) commit(ctx context.Context, op string, e extent) error {
	fd, err := h.back.create(e.n)
	if err != nil {
		fd = -1
	} else {
		defer closeFD(fd)
	}
	parts := h.everyone(e)
	if err = h.placeAll(ctx, op, fd, parts, err); err != nil || h.multi == nil {
		return err
	}
	if err = h.bindAll(ctx, op, fd, e); err != nil {
		if !h.group.InProcess() {
			h.displaceAll(h.peers(), parts)
		}
		h.displaceAll([]int{h.space.Rank}, parts)
	}
	return err
}

// everyone is e in every rank's segment.
func (h *Heap) everyone(e extent) []part {
	parts := make([]part, h.group.Size())
	for r := range parts {
		parts[r] = part{place: e.off, n: e.n}
	}
	return parts
}

// part is the memory that one rank shows to all others: n bytes from off on behind its descriptor, at place of
// its segment.
type part struct{ place, off, n int64 }

// placeAll maps every rank's part everywhere, this rank's from fd. err is this rank's reason not to, if
// it has one already. On an error this rank has mapped nothing.
func (h *Heap) placeAll(ctx context.Context, op string, fd int, parts []part, err error) error {
	me := h.group.Rank()
	var placed []int
	place := func(r, fd int) error {
		p := parts[r]
		if p.n == 0 {
			return nil
		}
		err := h.back.place(h.at(r, p.place), fd, p.off, p.n)
		if err == nil {
			placed = append(placed, r)
		}
		return err
	}
	if err == nil {
		err = place(me, fd)
	}
	if !h.group.InProcess() {
		// ranks pass descriptors only if all can, and if there are any
		some := slices.ContainsFunc(parts, func(p part) bool { return p.n > 0 })
		if _, err = agree.On(ctx, h.group, agree.Claim{Op: op + ": export"}, err); err == nil && some {
			err = h.importAll(ctx, fd, parts, place)
		}
		var cut *agree.CutError
		if errors.As(err, &cut) {
			h.displaceAll(placed, parts)
			return err
		}
	}
	if _, err = agree.On(ctx, h.group, agree.Claim{Op: op}, err); err != nil {
		h.displaceAll(placed, parts)
	}
	return err
}

// importAll maps the parts of the other ranks.
func (h *Heap) importAll(ctx context.Context, fd int, parts []part, place func(r, fd int) error) error {
	me := h.group.Rank()
	var mine []int
	if parts[me].n > 0 {
		mine = []int{fd}
	}
	fds, err := h.group.ExchangeFDs(ctx, mine)
	for r := range fds {
		for i, fd := range fds[r] {
			if r != me && i == 0 && err == nil {
				err = place(r, fd)
			}
			err = errors.Join(err, closeFD(fd))
		}
	}
	for r, p := range parts {
		if err == nil && p.n > 0 && len(fds[r]) != 1 {
			err = fmt.Errorf("rank %d passed %d descriptors instead of one", r, len(fds[r]))
		}
	}
	return err
}

func (h *Heap) displaceAll(ranks []int, parts []part) {
	for _, r := range ranks {
		if parts[r].n == 0 {
			continue
		}
		if err := h.back.displace(h.at(r, parts[r].place), parts[r].n); err != nil {
			h.log.Warn("memory: displace", "rank", h.group.Rank(), "of", r, "error", err)
		}
	}
}

// at is where an offset of rank r's segment lies in the range.
func (h *Heap) at(r int, off int64) int64 { return int64(r)*h.space.Stride + off }

// Group is the group the heap was made over.
func (h *Heap) Group() *comm.Group { return h.group }

// Device is where the heap's memory lives.
func (h *Heap) Device() device.Device { return h.dev }

// Space is the heap as kernels see it: every rank's segment by arithmetic, or by a table. Only the header and allocated
// memory may be touched, and none after Close.
func (h *Heap) Space() kernels.Space { return h.space }

// Engine runs kernels on the heap's memory, on its device. It belongs to the heap, which closes it.
func (h *Heap) Engine() kernels.Engine { return h.engine }

// Serves reports whether kernels of this rank can read and write v: whether it is memory of the heap's device.
func (h *Heap) Serves(v View) bool { return v.n == 0 || v.OnHost() == (h.space.Mem != nil) }

// Operand is v for an operation of the heap's engine, without a place.
func (h *Heap) Operand(v View) kernels.Buffer {
	return kernels.Buffer{Mem: v.mem, Ptr: v.Ptr(), Bytes: v.n}
}

// SymmetricOperand is v for an operation, with the place by which peers reach it, if they do.
func (h *Heap) SymmetricOperand(v View) kernels.Buffer {
	b := h.Operand(v)
	b.Place, b.Reach = v.Symmetric(h)
	return b
}

// Pinned is memory of the host that kernels of this rank read and write too, such as words in which they report their progress to the
// host. It lies outside the heap, and peers do not reach it.
type Pinned struct {
	p pinned
	n int64
}

// Pin makes n zero bytes of such memory, a multiple of 8. It can wait for running kernels. The caller closes it, before the heap.
func (h *Heap) Pin(n int64) (*Pinned, error) {
	if n <= 0 || n%8 != 0 {
		return nil, fmt.Errorf("memory: pin %d bytes, want a multiple of 8: %w", n, ErrInvalid)
	}
	p, err := h.back.pin(n)
	if err != nil {
		return nil, fmt.Errorf("memory: pin %d bytes: %w", n, err)
	}
	return &Pinned{p: p, n: n}, nil
}

// Bytes is the memory, nil after Close.
func (p *Pinned) Bytes() []byte { return p.p.Bytes() }

// Operand is n bytes from off on, for an operation of the heap's engine.
func (p *Pinned) Operand(off, n int64) kernels.Buffer {
	return kernels.Buffer{Mem: p.p.Bytes()[off : off+n : off+n], Ptr: p.p.Addr() + uintptr(off), Bytes: n}
}

// Close gives the memory back; no kernel uses it any more. It is idempotent, and works on a nil Pinned.
func (p *Pinned) Close() error {
	if p == nil {
		return nil
	}
	if err := p.p.Close(); err != nil {
		return fmt.Errorf("memory: unpin %d bytes: %w", p.n, err)
	}
	return nil
}

// Stats is the state of a rank's pool. All sizes are bytes.
type Stats struct {
	Committed     int64 // memory of the pool
	InUse         int64 // of that, in live buffers, each rounded up to 256 bytes
	Peak          int64 // the largest InUse so far
	LargestFree   int64 // the largest buffer that Alloc can give now
	Buffers       int   // live buffers
	Segments      int   // 1, and 1 more for every Grow
	Registrations int
	Calls         int64 // as DivergenceError counts them
	StreamWaits   int64 // waits of one stream, or the host, for another that had freed the memory
}

// Stats returns the state of this rank's pool.
func (h *Heap) Stats() Stats {
	h.mu.Lock()
	defer h.mu.Unlock()
	return Stats{
		Committed:     h.pool.total,
		InUse:         h.pool.used,
		Peak:          h.peak,
		LargestFree:   h.pool.largest(),
		Buffers:       h.pool.live,
		Segments:      int(h.pool.segs),
		Registrations: h.window.live,
		Calls:         h.journal.count,
		StreamWaits:   h.waits,
	}
}

// usable returns the reason why the heap cannot be used. The caller holds mu.
func (h *Heap) usable() error {
	if h.closed.Load() {
		return errClosed
	}
	return h.broken
}

// settle notes the result of a collective call that changes the heap.
func (h *Heap) settle(err error) {
	var cut *agree.CutError
	if errors.As(err, &cut) {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.broken == nil {
			h.broken = fmt.Errorf("a collective call was cut off: %w", cut)
		}
	}
}

// begin opens a collective call, which end closes. A closed heap is closed on every rank. A broken one may be
// broken on this rank only, which then takes part with the error.
func (h *Heap) begin() (closed, broken error) {
	h.together.Lock()
	if h.closed.Load() {
		return errClosed, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return nil, h.broken
}

func (h *Heap) end() { h.together.Unlock() }

// Grow adds n bytes to the pool: after it, Alloc of n bytes finds room once. It is collective. The memory
// is zero, and no buffer extends over it and older memory. The error on every rank is comm.ErrMismatch if
// the ranks pass different n, ErrInvalid if n is not positive, ErrOutOfMemory if the heap would pass
// Options.ReserveBytes and ErrUnsupported on a heap of CUDA IPC memory (Options.LegacyIPC).
//
// On a GPU it can wait for kernels. If ctx ends during that wait, this rank's calls on the heap give up (comm.ErrAborted), and the heap can
// only be closed. The same holds for Register, Deregister and Close.
func (h *Heap) Grow(ctx context.Context, n int64) error {
	err, broken := h.begin()
	defer h.end()
	if err == nil {
		err = h.grow(ctx, n, broken)
	}
	if err != nil {
		return fmt.Errorf("memory: grow by %d bytes: %w", n, err)
	}
	h.log.Info("memory: heap grown", "group", h.group.Name(), "rank", h.group.Rank(), "bytes", n)
	return nil
}

func (h *Heap) grow(ctx context.Context, n int64, broken error) (err error) {
	end := h.bounded(ctx)
	defer func() { err = end(err) }()
	last := h.extents[len(h.extents)-1]
	e := extent{off: last.off + last.n, n: roundUp(n, h.granule)}
	switch {
	case broken != nil:
		err = broken
	case n <= 0:
		err = fmt.Errorf("%w: not a size", ErrInvalid)
	case h.space.Segments != nil:
		err = fmt.Errorf("%w: a heap of CUDA IPC memory has one segment; make it with the SegmentBytes that it needs", ErrUnsupported)
	case e.n < 0 || e.n > h.limit-e.off:
		err = fmt.Errorf("%w: %d of the %d bytes of Options.ReserveBytes are committed", ErrOutOfMemory, e.off, h.limit)
	}
	if _, err = agree.On(ctx, h.group, agree.Claim{Op: "grow", Must: []agree.Value{agree.Named("bytes", n)}}, err); err != nil {
		return err
	}
	if err = h.commit(ctx, "grow: commit", e); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.extents = append(h.extents, e)
	seg := h.pool.add(e.off, e.n)
	h.journal.add(call{kind: callGrow, seg: seg, size: e.n, off: e.off})
	return nil
}

// Verify compares the calls of the ranks on the heap so far. It is collective and the error is the same
// on every rank: a *DivergenceError (ErrDiverged) that names the first call that differs and the call of
// each rank. Without a difference it costs one all-gather of a few bytes.
func (h *Heap) Verify(ctx context.Context) error {
	err, _ := h.begin()
	defer h.end()
	if err == nil {
		err = h.verify(ctx)
	}
	var d *DivergenceError
	if err == nil || errors.As(err, &d) {
		return err
	}
	return fmt.Errorf("memory: verify: %w", err)
}

func (h *Heap) verify(ctx context.Context) error {
	h.mu.Lock()
	count, digest := h.journal.count, h.journal.digest
	mine := h.journal.appendTo(nil)
	h.mu.Unlock()
	all, err := agree.On(ctx, h.group, agree.Claim{Op: "verify", Info: []int64{count, int64(digest)}}, nil)
	if err != nil {
		return err
	}
	same := true
	for _, o := range all.Infos() {
		same = same && o[0] == all[0].Info[0] && o[1] == all[0].Info[1]
	}
	if same {
		return nil
	}
	msgs, err := h.group.AllGather(ctx, mine)
	if err != nil {
		return err
	}
	hs := make([]history, len(msgs))
	for r := range msgs {
		if hs[r], err = parseHistory(msgs[r]); err != nil {
			return fmt.Errorf("rank %d: %w", r, err)
		}
	}
	if d := diverged(hs); d != nil {
		return d
	}
	return nil
}

// boundMoment is how long a collective call may continue after its context has ended.
const boundMoment = 100 * time.Millisecond

// bounded makes a collective call end with its context. A call that continues for boundMoment waits in the driver for a kernel, which may
// wait for a peer: this rank's kernels are then told to give up, and the call is cut off. end notes the result.
func (h *Heap) bounded(ctx context.Context) (end func(error) error) {
	done := make(chan struct{})
	var cut atomic.Bool
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-done:
		case <-time.After(boundMoment):
			cut.Store(true)
			h.log.Warn("memory: a call waits for kernels longer than its context, which ends them", "rank", h.group.Rank())
			h.abort()
		}
	})
	return func(err error) error {
		stop()
		close(done)
		if err == nil && cut.Load() {
			err = &agree.CutError{Err: context.Cause(ctx)}
		}
		h.settle(err)
		return err
	}
}

// abort ends every wait of this rank's kernels.
func (h *Heap) abort() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.mapped {
		return
	}
	h.engine.Interrupt()
	if h.gpu == nil {
		return
	}
	if err := h.gpu.raise(h.at(h.space.Rank, kernels.AbortOffset)); err != nil { // for kernels of others that watch it
		h.log.Warn("memory: set the abort word", "rank", h.space.Rank, "error", err)
	}
}

// Close releases the heap: its buffers, views and registrations are dead. It is collective and
// idempotent. Every rank first unmaps its peers' memory and then, after a barrier, releases its own (M4).
// The caller has waited for all work that touches the heap.
//
// If the group has failed, or ctx ends before all ranks have called it, Close still releases everything
// that this rank holds. The latter is an error, because another rank may still use the memory.
func (h *Heap) Close(ctx context.Context) (err error) {
	h.together.Lock()
	defer h.together.Unlock()
	if h.closed.Swap(true) {
		return nil
	}
	end := h.bounded(ctx)
	defer func() { err = end(err) }()
	h.mu.Lock()
	extents := h.extents
	h.mu.Unlock()

	registrations := h.registrations()
	for _, r := range registrations {
		r.own.freed.Store(true)
	}
	switch {
	case h.space.Segments != nil: // nothing is mapped in the range
	case !h.group.InProcess():
		for _, e := range extents {
			h.displaceAll(h.peers(), h.everyone(e))
		}
		for _, r := range registrations {
			h.displaceAll(h.peers(), r.parts)
		}
	}
	if h.gpu != nil {
		if err := h.gpu.detachAll(); err != nil {
			h.log.Warn("memory: close CUDA IPC", "rank", h.group.Rank(), "error", err)
		}
	}
	if h.multi != nil { // peers may still use their own views: binds end when all have come
		err = h.multi.unmap(h.multi.objects...)
	}
	h.registered.Store(nil)
	if _, berr := agree.On(ctx, h.group, agree.Claim{Op: "close heap"}, nil); berr != nil && h.group.Err() == nil {
		err = errors.Join(err, fmt.Errorf("memory: close heap: others may still use it: %w", berr))
	}
	return errors.Join(err, h.release())
}

// release gives back the range and everything in it.
func (h *Heap) release() error {
	if h.back == nil {
		return nil
	}
	var err error
	if h.engine != nil {
		err = h.engine.Close()
	}
	if h.multi != nil {
		err = errors.Join(err, h.multi.close())
	}
	if h.unhook != nil {
		h.unhook()
	}
	h.mu.Lock()
	h.mapped = false
	h.mu.Unlock()
	if err = errors.Join(err, h.back.close()); err != nil {
		return fmt.Errorf("memory: close heap: %w", err)
	}
	return nil
}
