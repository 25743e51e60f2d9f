package dispatch

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Routing is where the tokens of one dispatch went, in memory of the caller: Handle.Keep makes it. It needs no output, any number can be
// alive, and a rank drops one by forgetting it, whenever it likes. Dispatcher.Route has calls go by it, in any number and order.
type Routing struct {
	d      *Dispatcher
	tokens int
	local  []int
	memory memory.View
	views  routingViews
}

// routingViews are the parts of a routing, in a handle's memory or in a caller's.
type routingViews struct {
	state, counts, offsets, rankCounts memory.View
}

// parts are in the order in which they lie in a caller's memory.
func (v *routingViews) parts() []*memory.View {
	return []*memory.View{&v.state, &v.counts, &v.offsets, &v.rankCounts}
}

// Tokens is the number of this rank's tokens in the dispatch.
func (r *Routing) Tokens() int { return r.tokens }

// LocalExperts lists the experts that were on this rank at the time of the dispatch, in ascending order.
func (r *Routing) LocalExperts() []int { return r.local }

// Memory is what Handle.Keep was given.
func (r *Routing) Memory() memory.View { return r.memory }

// RoutingBytes is the size of a routing: for MaxTokens tokens and, on a GPU, the rows that all ranks can send to this one.
func (d *Dispatcher) RoutingBytes() (n int64) {
	of := d.routingOf(0)
	for _, v := range of.parts() {
		n += kernels.AlignUp(v.Len(), kernels.LineBytes)
	}
	return n
}

// routingOf are the parts of a routing in a handle's memory.
func (d *Dispatcher) routingOf(handle int) routingViews {
	v := &d.views[handle]
	return routingViews{state: v.routing, counts: v.counts, offsets: v.offsets, rankCounts: v.rankCounts}
}

// Keep copies the routing of a complete dispatch to memory of the heap's device, of RoutingBytes, which begins at a multiple of 128. The
// caller changes and frees it when no call uses it any more. It is this rank's own business: other ranks may keep theirs or not. The copy is
// enqueued on s, the stream of the dispatch; a later call on another stream is ordered behind it by the caller, as one that reads the
// output. Without a stream it is complete on return.
func (h *Handle) Keep(s device.Stream, into memory.View) (*Routing, error) {
	if into.Len() == 0 {
		return nil, invalid("routing has 0 bytes, want %d", h.d.RoutingBytes())
	}
	return h.CopyTo(s, Result{Routing: into})
}

// Route returns a handle that goes by a routing which was kept: Combine, Redispatch and both backward calls work with it, in halves too. A
// Redispatch writes to its own output. It has Counts, Offsets and RankCounts, which are the routing's; Indices, Weights, Sources and
// HostCounts are those of the dispatch only. Every rank calls Route where the others do, as it would Dispatch, and releases the handle.
func (d *Dispatcher) Route(r *Routing) (*Handle, error) {
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	if r == nil || r.d != d {
		return nil, invalid("the routing is of another dispatcher")
	}
	if err := r.memory.Valid(); err != nil {
		return nil, fmt.Errorf("dispatch: routing: %w", err)
	}
	h, err := d.take(r.tokens)
	if err != nil {
		return nil, err
	}
	h.routing, h.local = r, r.local
	d.options.Shared.called(d, h, kernels.OpRedispatch)
	return h, nil
}

// routing is that by which the calls of a handle go, for an engine.
func (d *Dispatcher) routing(h *Handle) (r kernels.DispatchRouting) {
	if h.routing != nil {
		v := &h.routing.views
		r = kernels.DispatchRouting{State: d.own(v.state), Counts: d.own(v.counts), Offsets: d.own(v.offsets), RankCounts: d.own(v.rankCounts)}
	}
	return r
}
