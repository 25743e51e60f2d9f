package memory

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
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
	group     *comm.Group // whose ranks agree on everything
	home      *comm.Group // those of this host, whose segments are mapped here
	dev       device.Device
	log       *slog.Logger
	back      backing
	gpu       *cudaBacking // back on a GPU, nil on the host
	multi     *multicast   // nil on a heap without multicast addresses
	space     kernels.Space
	engine    kernels.Engine
	rail      rails.Rail // nil on one host
	across    *across    // of GPUs on several hosts, else nil
	limit     int64      // of the pool, and where the window for registrations begins
	railBytes int64      // of the rail segment, on GPUs of several hosts
	granule   int64
	// noMulticast is the reason for a nil multi though Options asked for multicast.
	noMulticast string

	shares shares

	// together serialises this rank's collective calls.
	together sync.Mutex
	unhook   func()
	mute     func() // ends what it tells of itself
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

// NewHeap makes a symmetric heap over the ranks of g with memory of d. It is collective.
//
// Of ranks on several hosts those of each host have a heap of their own: segments of other hosts are not mapped. All ranks make its
// collective calls together, so an offset is the same on all hosts, and Verify compares all ranks. Hosts have equally many ranks. Between
// hosts UCX carries bytes: between GPUs those that kernels have put in a rail segment (Options.RailBytes).
//
// Every rank reserves one range of addresses and maps the segments of all ranks in it at equal
// distances; ranks that share a process share the range. The memory is zero. The error on every rank
// is comm.ErrMismatch when options, devices, versions or kernels differ, ErrInvalid for options out of range
// and ErrUnsupported for hosts with different numbers of ranks, a host without UCX where there are several, a device that has no heap,
// GPUs of which one cannot reach the other on its host, multicast on several hosts, or ranks of one process that share a GPU without
// Options.ShareGPUs.
// Between hosts, versions of UCX differ when their minor versions do.
//
// A ctx that ends while ranks wait for each other may leave the group out of step: some ranks have taken part in an exchange that others have
// not. The next collective call then fails the group with comm.ErrMismatch. All ranks call Group.Shrink, which makes a group of the same
// ranks, and begin anew on that.
//
// The heap does not own d, which is closed after it.
func NewHeap(ctx context.Context, g *comm.Group, d device.Device, o Options) (*Heap, error) {
	return newHeap(ctx, g, d, o, newBacking, ucx.Open)
}

func newHeap(
	ctx context.Context, g *comm.Group, d device.Device, o Options, back func(device.Device) (backing, error), rail openRail,
) (*Heap, error) {
	if g == nil {
		return nil, fmt.Errorf("memory: new heap: %w: no group", ErrInvalid)
	}
	home, err := homeOf(g)
	if err != nil {
		return nil, fmt.Errorf("memory: new heap: %w", err)
	}
	if g.Replaying() && d != nil && d.Kind() != device.HostKind {
		return nil, fmt.Errorf("memory: new heap: %w: a process takes the place of a lost rank on a heap of the host only, not on %v", ErrUnsupported, d)
	}
	h := &Heap{group: g, home: home, dev: d, log: o.Logger}
	h.shares.begin(home)
	if h.log == nil {
		h.log = g.Logger()
	}
	if err := h.open(ctx, o, back, rail); err != nil {
		h.release()
		return nil, fmt.Errorf("memory: new heap: %w", err)
	}
	h.log.Info("memory: heap created", "group", g.Name(), "rank", g.Rank(), "device", d.String(),
		"segment", h.extents[0].n, "limit", h.limit)
	return h, nil
}

func (h *Heap) open(ctx context.Context, o Options, back func(device.Device) (backing, error), rail openRail) error {
	g, home := h.group, h.home
	lay, err := h.choose(o, back)
	what := agree.Claim{Op: "new heap", Must: []agree.Value{
		agree.Named("version", version),
		agree.Named("device", kindOf(h.dev)),
		agree.Named("segment bytes", o.SegmentBytes),
		agree.Named("reserve bytes", o.ReserveBytes),
		agree.Named("legacy IPC", o.LegacyIPC),
		agree.Named("share GPUs", o.ShareGPUs),
		agree.Named("multicast", o.Multicast),
		agree.Named("rail bytes", o.RailBytes),
		agree.Named("granule", h.granule),
	}}
	if g.Topology().Hosts > 1 { // else all of them find the same
		what.Must = append(what.Must, agree.Named("ranks of a host in one process", home.InProcess()))
	}
	if err == nil {
		what.Must = append(what.Must, agree.Named("kernels", h.back.build()))
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
	if err = h.back.reach(devices, h.ofHome(devices)); err == nil && h.gpu != nil && !o.ShareGPUs {
		err = apart(devices)
	}
	if err == nil {
		if err = h.teamUp(o.Multicast, devices); err == nil {
			lay, err = o.validate(home.Size(), h.granule)
		}
	}

	// The range. By default take what the process with the least addresses can have.
	if err == nil && (!home.InProcess() || home.Rank() == 0) {
		for {
			err = h.back.reserve(lay.stride() * int64(home.Size()))
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
	has := lay.limit
	lay.limit = limits[0].Info[0] // where this process replaces another, its own is not among them
	for _, l := range limits {
		lay.limit = min(lay.limit, l.Info[0])
	}
	if h.limit = lay.limit; has < h.limit {
		return fmt.Errorf("%w: this process has addresses for segments of %d bytes, the others have mapped %d", ErrOutOfMemory, has, h.limit)
	}
	h.space = kernels.Space{Stride: lay.stride(), Rank: home.Rank(), Size: home.Size(), Host: g.Topology().Host, Log: h.log,
		AwaitedBy:  func(peer int) (string, uint64) { return h.group.AwaitedBy(h.named(peer)) },
		Left:       func(peer int) bool { return h.group.Left(h.named(peer)) },
		ReportLeft: func(peer int) { h.group.ReportLeft(h.named(peer)) },
	}
	if t := g.Topology(); t.Hosts > 1 {
		for local := range home.Size() {
			h.space.Ranks = append(h.space.Ranks, t.RankOf(t.Host, local))
		}
	}
	if home.InProcess() {
		if err := h.adopt(ctx); err != nil {
			return err
		}
	}
	h.space.Mem, h.space.Base = h.back.mem(), h.back.base()
	h.window.add(h.limit, h.limit)
	if h.gpu != nil {
		h.space.Aliases, h.rows = new(kernels.Aliases), make([]bool, kernels.AliasRows(home.Size()))
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
	if err = h.joinRail(ctx, rail); err != nil {
		return err
	}
	h.unhook = g.OnFailure(func(error) { h.abort() })
	h.mute = h.tell()
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
	h.back, h.granule, h.railBytes = b, b.granule(), cmp.Or(o.RailBytes, defaultRail)
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
	case o.Multicast != NoMulticast && h.group.Topology().Hosts > 1:
		return layout{}, fmt.Errorf("%w: multicast on %d hosts", ErrUnsupported, h.group.Topology().Hosts)
	case o.RailBytes < 0 || o.RailBytes > maxAlloc:
		return layout{}, fmt.Errorf("%w: a rail segment of %d bytes", ErrInvalid, o.RailBytes)
	}
	return o.validate(h.home.Size(), h.granule)
}

// homeOf is the group of this rank's host, if heaps on all hosts of g can have the same layout.
func homeOf(g *comm.Group) (*comm.Group, error) {
	if t := g.Topology(); t.PerHost == 0 {
		counts := make([]int, t.Hosts)
		for r := range g.Size() {
			counts[t.HostOf(r)]++
		}
		return nil, fmt.Errorf("%w: a heap on hosts with different numbers of ranks, %v", ErrUnsupported, counts)
	}
	return g.Home()
}

// ofHome are the elements of all, one a rank of the group, that belong to ranks of this host, in their order.
func (h *Heap) ofHome(all [][]int64) [][]int64 {
	t := h.group.Topology()
	home := make([][]int64, h.home.Size())
	for local := range home {
		home[local] = all[t.RankOf(t.Host, local)]
	}
	return home
}

// named is the number in the group of a rank of this host.
func (h *Heap) named(peer int) int {
	t := h.group.Topology()
	return t.RankOf(t.Host, peer)
}

func kindOf(d device.Device) string {
	if d == nil {
		return "none"
	}
	return d.Kind().String()
}

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
	return kernels.Buffer{Mem: v.mem, Ptr: v.Ptr(), Bytes: v.n, Elements: v.elem}
}

// SymmetricOperand is v for an operation, with the place by which peers reach it, if they do.
func (h *Heap) SymmetricOperand(v View) kernels.Buffer {
	b := h.Operand(v)
	b.Place, b.Reach = v.Symmetric(h)
	return b
}

// OperandFor is SymmetricOperand for an operation with rank peer alone, which on GPUs also reaches what this rank has shared with it: as long
// as it has that open.
func (h *Heap) OperandFor(v View, peer int) kernels.Buffer {
	b := h.SymmetricOperand(v)
	if !b.Reach {
		b.Place, b.Reach = h.sharedPlace(v, peer)
	}
	return b
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
