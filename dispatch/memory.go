package dispatch

import (
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// settle completes the options, and plans. own gets what a communicator needs to know.
func (d *Dispatcher) settle(h *memory.Heap, o Options, own *communicator.Config) error {
	g := h.Group()
	m, err := o.validate(g.Rank(), g.Size())
	if d.options = o; o.OwnRows && h.Device().Kind() != device.HostKind {
		d.options.Shared = nil // engines of GPUs do not compare the calls of several dispatchers
	}
	if err != nil {
		return err
	}
	if m.Hosts = h.Hosts(); o.Masks && m.Hosts != nil {
		return invalid("Options.Masks is set for ranks on %d hosts, they must be on one", g.Topology().Hosts)
	}
	if err := o.shareable(m.Hosts); err != nil {
		return err
	}
	if o.Shared = d.options.Shared; o.Shared != nil {
		m.Shared = &kernels.DispatchShared{Differ: o.Shared.differ, Making: d.making}
	}
	d.bounds, d.placement, d.local = m, o.Placement, o.Placement.Local(g.Rank())
	return d.plan(h, own)
}

// plan sets how much memory the dispatcher takes, and how it is divided.
func (d *Dispatcher) plan(h *memory.Heap, own *communicator.Config) error {
	layout, err := h.Engine().Layout(d.bounds)
	if err != nil {
		return invalid("%v", err)
	}
	d.layout = layout
	table, err := d.options.table(h.Device().Kind())
	if err != nil {
		return err
	}
	if d.steps = nil; table != nil && d.options.MaxSMs == 0 {
		d.steps = table.steps(pairs{layout.LowLatency, !d.bounds.Layout.ByToken()}, d.bounds.Ranks)
	}
	var sizes cutter
	own.Must, own.Family, own.Rest = d.options.fields(), d.bounds, d.bounds.Hosts != nil
	own.ZeroExtra = d.layOut(&sizes)
	own.ExtraBytes = sizes.used
	if s := d.options.Shared; s != nil {
		own.Turn = &s.turn
	}
	own.Settle = func(extra memory.View) error {
		if d.options.HostCounts {
			if d.mapped, err = h.Pin(d.mappedBytes() * int64(d.options.Handles)); err != nil {
				return err
			}
		}
		d.layOut(&cutter{heap: h, block: extra})
		if h.Group().Replaying() { // experts may have moved since the lost rank has called New
			table := make([]int32, d.table.Len()/4)
			if err = transfer(h, memory.Host(shm.Bytes(table)), d.table); err == nil {
				d.placement = placementOf(table, d.bounds.First)
				d.local = d.placement.Local(d.bounds.Rank)
			}
			return err
		}
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

// rowsBytes is how much memory layOutRows wants.
func (d *Dispatcher) rowsBytes() int64 {
	var sizes cutter
	d.layOutRows(&sizes)
	return sizes.used
}

// layOut divides the dispatcher's own memory. It returns how many of its first bytes must be zero.
func (d *Dispatcher) layOut(c *cutter) (zero int64) {
	m, l := d.bounds, &d.layout
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
	landed := int64(0)
	if m.Landed {
		landed = 4 * local
	}
	for i := range m.Handles {
		h, v := &m.Handles[i], &d.views[i]
		v.counts, h.Counts = c.cut(4 * local)
		v.offsets, h.Offsets = c.cut(4 * (groups + 1))
		v.rankCounts, h.RankCounts = c.cut(4 * int64(m.Ranks))
		v.landed, h.Landed = c.cut(landed)
		for _, of32 := range []*memory.View{&v.counts, &v.offsets, &v.rankCounts, &v.landed} {
			*of32 = memory.As[int32](*of32)
		}
		if c.heap != nil {
			d.trim(h, v)
		}
		if d.mapped != nil {
			h.Mapped = d.mapped.Operand(int64(i)*d.mappedBytes(), 4*int64(m.MappedWords()))
		}
	}
	if !d.options.sharesRows() {
		d.layOutRows(c)
	}
	return zero
}

// layOutRows divides the memory that dispatchers share, or the rest of the dispatcher's own.
func (d *Dispatcher) layOutRows(c *cutter) {
	m := d.bounds
	var indices, weights, sources int64
	if m.Layout.ByToken() || d.options.RowWeights {
		weights = 4 * m.Rows * int64(m.WeightsPerRow())
	}
	if d.options.Sources {
		sources = 8 * m.Rows
	}
	if m.Layout.ByToken() {
		indices = 8 * m.Rows * int64(m.TopK)
	}
	for i := range m.Handles {
		h, v := &m.Handles[i], &d.views[i]
		v.indices, h.Indices = c.cut(indices)
		v.weights, h.Weights = c.cut(weights)
		v.sources, h.Sources = c.cut(sources)
		v.scales, h.Scales = c.cut(4 * m.Rows * int64(m.ScaleWords()))
		v.rows, h.Rows = c.cut(m.Rows * m.RowBytes())
		v.sources, v.indices, v.weights = memory.As[int32](v.sources), memory.As[int64](v.indices), memory.As[float32](v.weights)
		_, h.Staging = c.cut(d.layout.Staging)
	}
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
