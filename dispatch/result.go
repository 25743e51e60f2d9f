package dispatch

import (
	"math"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Result is memory of the caller for what a dispatch has left on this rank: the views of Handle by these names. A view that is empty is not
// wanted.
type Result struct {
	// Length is how many rows Rows, Scales, Indices, Weights and Sources have room for, which are that long. If more came, the first are
	// copied; if fewer, Indices have -1 and Weights 0 behind the last, and the others are undefined there. In layouts with gaps between
	// groups, the rows are those up to the last group's end.
	Length int
	// Scales of Options.ScaleColumns are [words, Length], but for Padded and Slab, which are copied whole: Length is MaxRows.
	Rows, Scales, Indices, Weights, Sources memory.View
	Counts, Offsets, RankCounts             memory.View
	// Routing is for the routing, as Handle.Keep has it.
	Routing memory.View
	// From is other memory of the heap's device, which the same launch copies to To, of that size: the choices of the tokens for example, so
	// that their owner may change them when the copy is complete.
	From, To memory.View
}

// CopyTo copies what a dispatch has left to memory of the heap's device, with one launch, and returns the routing if that is wanted. The
// dispatch is complete, and no other rank takes part. The copy is enqueued on s, the stream of the dispatch, and a graph can capture it:
// every replay has its own number of rows. Without a stream it is complete on return. The handle may be released then. After a
// dispatch on a GPU that failed, known yet or not, there are no rows, the routing says that no token went anywhere, and the next call
// tells the error.
func (h *Handle) CopyTo(s device.Stream, to Result) (*Routing, error) {
	d := h.d
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.copyable(h); err != nil {
		return nil, err
	}
	if err := to.sized(); err != nil {
		return nil, err
	}
	taken := h.taken
	l := d.op(kernels.OpResults, h)
	routing, err := d.results(&l.results, h, &to, false)
	if err != nil {
		d.recycle(l)
		return nil, err
	}
	l.results.Taken = taken
	if err := d.launch(s, l, kernels.Both); err != nil {
		return nil, err
	}
	return routing, nil
}

// sized refuses a length that is none.
func (r *Result) sized() error {
	if r.Length < 0 || r.Length > 1<<31-1 {
		return invalid("a result of %d rows", r.Length)
	}
	return nil
}

// copyable refuses a handle that cannot be copied. That ranks disagreed in its dispatch is no reason: ranks hear of it at different times, and
// all of them hear of it in their next call that others take part in.
func (d *Dispatcher) copyable(h *Handle) error {
	if err := d.c.Whole(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.held(h, false)
}

// results describes the copy, of a dispatch that has been made or of one that is about to be.
func (d *Dispatcher) results(r *kernels.Results, h *Handle, to *Result, before bool) (*Routing, error) {
	m, v, routed, rows := d.bounds, h.ofDispatch(), h.routed(), int64(to.Length)
	*r = kernels.Results{
		Launched: kernels.Launched{Note: kernels.Note{Payload: -1, Alone: true}}, Handle: h.memory, Failed: h.err != nil,
		Rows: d.own(routed.offsets.Slice(routed.offsets.Len()-4, 4)), Blocks: d.options.MaxSMs, Tokens: h.tokens,
	}
	words := int64(m.ScaleWords())
	scales := kernels.ResultPart{Row: 4 * words}
	if m.Scales.Columns {
		scales.Row, scales.Columns = 4, int(words)
	}
	if m.Scales.Columns && (m.Layout == kernels.PaddedRows || m.Layout == kernels.SlabRows) {
		scales.Row, scales.Columns = 0, 0 // each expert has columns of its own
		if to.Scales.Len() > 0 && rows != m.Rows {
			return nil, invalid("scales in columns of a %v layout for %d rows, want MaxRows, which is %d", m.Layout, rows, m.Rows)
		}
	}
	kind := kernels.Float32
	if m.Scales.Format == UE8M0Scales {
		kind = kernels.Int32
	}
	k, w := 8*int64(m.TopK), 4*int64(m.WeightsPerRow())
	for _, p := range []struct {
		name     string
		to, from memory.View
		want     int64
		kind     kernels.DType
		part     kernels.ResultPart
		turn     uint64
	}{
		{"rows", to.Rows, h.views().rows, rows * m.RowBytes(), m.RowType, kernels.ResultPart{Row: m.RowBytes(), Rows: true}, h.rowsTurn},
		{"scales", to.Scales, v.scales, rows * 4 * words, kind, scales, h.rowsTurn},
		{"sources", to.Sources, v.sources, rows * 8, kernels.Int32, kernels.ResultPart{Row: 8}, h.turn},
		{"indices", to.Indices, v.indices, rows * k, kernels.Int64, kernels.ResultPart{Row: k, Fills: true, Behind: math.MaxUint32}, h.turn},
		{"weights", to.Weights, v.weights, rows * w, kernels.Float32, kernels.ResultPart{Row: w, Fills: true}, h.turn},
		{"counts", to.Counts, routed.counts, routed.counts.Len(), kernels.Int32, kernels.ResultPart{Fills: true}, h.turn},
		{"offsets", to.Offsets, routed.offsets, routed.offsets.Len(), kernels.Int32, kernels.ResultPart{Fills: true}, h.turn},
		{"rank counts", to.RankCounts, routed.rankCounts, routed.rankCounts.Len(), kernels.Int32, kernels.ResultPart{Fills: true}, h.turn},
	} {
		if p.to.Len() == 0 {
			continue
		}
		if p.from.Len() == 0 {
			return nil, invalid("the handle has no %s", p.name)
		}
		if err := d.check(p.name, p.to, p.want, p.kind); err != nil {
			return nil, err
		}
		if err := d.mine(p.name, p.from, p.turn); err != nil && !before {
			return nil, err
		}
		p.part.From, p.part.To = d.own(p.from), d.shown(p.to)
		r.Add(p.part)
	}
	if to.From.Len() > 0 || to.To.Len() > 0 {
		if !to.From.Alike(to.To) {
			return nil, invalid("from has elements of %s, to of %s", to.From.Element(), to.To.Element())
		}
		if err := d.check("from", memory.As[uint8](to.From), -1, kernels.Uint8); err != nil {
			return nil, err
		}
		if err := d.check("to", memory.As[uint8](to.To), to.From.Len(), kernels.Uint8); err != nil {
			return nil, err
		}
		r.Add(kernels.ResultPart{From: d.own(to.From), To: d.own(to.To)})
	}
	if to.Routing.Len() == 0 {
		return nil, nil
	}
	return d.keep(r, h, routed, to.Routing)
}

// keep appends the copy of a routing.
func (d *Dispatcher) keep(r *kernels.Results, h *Handle, from routingViews, into memory.View) (*Routing, error) {
	if err := d.check("routing", into, d.RoutingBytes(), kernels.Uint8); err != nil {
		return nil, err
	}
	if into.Ptr()%kernels.LineBytes != 0 {
		return nil, invalid("routing begins at %#x, which is no multiple of %d", into.Ptr(), kernels.LineBytes)
	}
	routing := &Routing{d: d, tokens: h.tokens, local: h.local, memory: into}
	to, at := routing.views.parts(), int64(0)
	for i, v := range from.parts() {
		*to[i] = into.Slice(at, v.Len())
		if e := v.Element(); e == "int32" {
			*to[i] = memory.As[int32](*to[i])
		}
		at += kernels.AlignUp(v.Len(), kernels.LineBytes)
		r.Add(kernels.ResultPart{From: d.own(*v), To: d.own(*to[i]), Fills: i > 0, State: i == 0})
	}
	return routing, nil
}
