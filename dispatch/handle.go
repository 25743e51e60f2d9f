package dispatch

import (
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/kernels/host"
	"github.com/switchyard-moe/switchyard/memory"
)

// Handle is one dispatch: where its tokens went, and the rows that this rank's experts got. Combine and the backward
// calls use it again, in any number and order.
//
// What its methods return is known when the dispatch is complete: on return of a call without a stream, otherwise once
// the stream has been synchronized or in work enqueued behind it. It belongs to the handle and is dead after Release.
type Handle struct {
	d       *Dispatcher
	routing host.Routing
	buffer  int // which of the dispatcher's outputs
	alive   bool
	users   int // launches that have not run yet
}

// Rows is the output, in the symmetric heap: NumRows rows of Options.Hidden elements, expert by expert. Experts may
// work in place; it is the caller's until Release.
func (h *Handle) Rows() memory.View {
	return h.d.output(h.buffer).Slice(0, h.routing.OutRows*h.d.experts.RowBytes())
}

// NumRows is the number of rows in the output, padding included.
func (h *Handle) NumRows() int { return int(h.routing.OutRows) }

// Counts is how many rows each of LocalExperts got, padding not included.
func (h *Handle) Counts() []int64 { return h.routing.SlotRows }

// Offsets is the first row of each of LocalExperts.
func (h *Handle) Offsets() []int64 { return h.routing.SlotFirst }

// LocalExperts lists the experts on this rank in ascending order.
func (h *Handle) LocalExperts() []int { return h.d.local }

// Tokens is the number of this rank's tokens in the dispatch.
func (h *Handle) Tokens() int { return h.routing.Tokens() }

// Release gives the output back, for a later dispatch to write. Launches that use the handle may still be on their way
// on a stream: the dispatcher's next call is ordered behind them. Other work that reads the output has to be finished, or
// ordered before that call, by the caller. Ranks may release at different times and in different orders. A second
// Release does nothing, as long as the dispatcher has not handed the same Handle out again.
func (h *Handle) Release() {
	h.d.mu.Lock()
	defer h.d.mu.Unlock()
	if h.alive {
		h.alive = false
		h.d.free = append(h.d.free, h.buffer)
		h.d.idle = append(h.d.idle, h)
	}
}

// route fills in the handle's routing for these choices. It refuses bad ones. d.calls is held.
func (h *Handle) route(idx []int32, weights []float32) error {
	d, r := h.d, &h.routing
	me, topK := d.group.Rank(), d.options.TopK
	r.First, r.Rows = append(r.First[:0], 0), r.Rows[:0]
	clear(r.Counts)
	clear(r.SendTokens)
	clear(r.SendRows)
	for t := range len(idx) / topK {
		d.token++
		for k, e := range idx[t*topK : (t+1)*topK] {
			if e == -1 {
				continue
			}
			if e < 0 || int(e) >= d.options.Experts {
				return invalid("token %d has expert %d as choice %d, there are %d experts (-1 masks a choice)", t, e, k, d.options.Experts)
			}
			if d.seen[e] == d.token {
				return invalid("token %d has expert %d twice in %v", t, e, idx[t*topK:(t+1)*topK])
			}
			d.seen[e] = d.token
			copies := d.copies[e]
			slot := copies[(me+t)%len(copies)]
			row := host.RoutedRow{Rank: d.rankOf[slot], Slot: slot, Row: r.Counts[slot], Choice: int32(k), Weight: weights[t*topK+k]}
			r.Counts[slot]++
			i := len(r.Rows)
			r.Rows = append(r.Rows, row)
			for ; i > int(r.First[t]) && r.Rows[i-1].Rank > row.Rank; i-- {
				r.Rows[i] = r.Rows[i-1]
			}
			r.Rows[i] = row
		}
		for i := int(r.First[t]); i < len(r.Rows); i++ {
			rank := r.Rows[i].Rank
			r.SendRows[rank]++
			if i == int(r.First[t]) || r.Rows[i-1].Rank != rank {
				r.SendTokens[rank]++
			}
		}
		r.First = append(r.First, int32(len(r.Rows)))
	}
	return nil
}

// newHandle makes a handle with room for the largest routing.
func (d *Dispatcher) newHandle() *Handle {
	x, o, local, ranks := d.experts, &d.options, len(d.local), d.group.Size()
	return &Handle{d: d, routing: host.Routing{
		First:      make([]int32, 1, o.MaxTokens+1),
		Rows:       make([]host.RoutedRow, 0, o.MaxTokens*o.TopK),
		Counts:     make([]int32, len(x.Expert)),
		SendTokens: make([]int64, ranks),
		SendRows:   make([]int64, ranks),
		SlotRows:   make([]int64, local),
		SlotFirst:  make([]int64, local),
		RecvRows:   make([]int64, ranks),
	}}
}

// take returns a handle that nobody uses, with an output.
func (d *Dispatcher) take() (*Handle, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.free) == 0 {
		return nil, fmt.Errorf("dispatch: %w: all %d are alive: Release one or raise Options.Handles", ErrNoHandle, d.options.Handles)
	}
	var h *Handle
	// The handle that has been idle for longest, so that a use after Release is noticed for a while.
	for i, idle := range d.idle {
		if idle.users == 0 {
			h = idle
			d.idle = slices.Delete(d.idle, i, i+1)
			break
		}
	}
	if h == nil {
		h = d.newHandle()
	}
	h.buffer = d.free[0]
	d.free = slices.Delete(d.free, 0, 1)
	h.alive = true
	return h, nil
}
