package dispatch

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Handle is one dispatch: where its tokens went, and the rows that this rank's experts got. Combine and the backward
// calls use it again, in any number and order.
//
// Its views are memory of the heap's device, in the symmetric heap. They have the same place and length for every dispatch that
// uses the handle's memory, so that work on the device does not depend on the host; memory beyond the rows that came is
// undefined. The views are valid when the dispatch is complete, in stream order; Counts, Offsets and RankCounts already after
// DispatchSend. They are dead after Release.
type Handle struct {
	d       *Dispatcher
	memory  int // index of its memory in the dispatcher's
	tokens  int
	local   []int
	routing *Routing // by which its calls go; nil: its own dispatch
	ticket  uint64
	alive   bool
	taken   bool  // the next launch with it is the copy that its dispatch was told of
	users   int   // launches that have not run yet
	half    *op   // the second half of a call that has had its first
	err     error // why the dispatch failed
	lost    bool  // no call can be made with it
	counts  HostCounts
	// Of Options.Shared: the turns in which its dispatch was made, and its rows were written.
	turn, rowsTurn uint64
}

// Rows is the output: [Dispatcher.MaxRows, Options.Hidden] as Options.Layout says. Experts may
// work in place; it is the caller's until Release.
func (h *Handle) Rows() memory.View { return h.views().rows }

// Scales belong to rows of Float8E4M3: [Dispatcher.MaxRows, Hidden/128 rounded up] (or one) of float32, or of bytes in int32
// words, in the order of Options.ScaleColumns.
func (h *Handle) Scales() memory.View { return h.views().scales }

// Counts is the number of choices of each of LocalExperts, in int32. In an expert-major layout that is its number of rows.
func (h *Handle) Counts() memory.View { return h.routed().counts }

// Offsets is the first row of each of LocalExperts (in token-major layouts, from each rank), and one more number, the length of
// the output with its padding. In int32.
func (h *Handle) Offsets() memory.View { return h.routed().offsets }

// RankCounts is how many rows came from each rank, in int32.
func (h *Handle) RankCounts() memory.View { return h.routed().rankCounts }

// Indices belong to rows of token-major layouts: [Dispatcher.MaxRows, TopK] in int64. Entry k is the index in LocalExperts of
// the row's choice k, -1 if that is masked or on another rank, and undefined in the padding of RankPadded. Empty in other layouts.
func (h *Handle) Indices() memory.View { return h.ofDispatch().indices }

// Weights are the weights of the rows' choices, in float32: [Dispatcher.MaxRows], or in token-major layouts
// [Dispatcher.MaxRows, TopK] with 0 where Indices has -1. They are 1 if Tokens.Weights was empty. Expert-major layouts have
// them only with Options.RowWeights.
func (h *Handle) Weights() memory.View { return h.ofDispatch().weights }

// Sources says where each row comes from, if Options.Sources is set: [Dispatcher.MaxRows, 2] in int32, the rank and the token's
// number there. It is -1, -1 in padding that is zero.
func (h *Handle) Sources() memory.View { return h.ofDispatch().sources }

// Landed are 32-bit words, if Options.Landed is set: the number of rows of each of LocalExperts that have arrived so far. Work that
// runs together with DispatchReceive may read all rows of an expert when it has read the expert's word with acquire semantics
// (system scope on a GPU) and found it equal to Counts. A dispatch sets the words to zero in its first half. On a GPU it also sets
// Counts to -1 there, until they are known.
func (h *Handle) Landed() memory.View { return h.views().landed }

func (h *Handle) views() *handleViews { return &h.d.views[h.memory] }

// routed are the views of its routing.
func (h *Handle) routed() routingViews {
	if h.routing != nil {
		return h.routing.views
	}
	return h.d.routingOf(h.memory)
}

// ofDispatch are the views of what its own dispatch has left next to the rows.
func (h *Handle) ofDispatch() *handleViews {
	if h.routing != nil {
		return &handleViews{}
	}
	return h.views()
}

// LocalExperts lists the experts that were on this rank at the time of the dispatch, in ascending order.
func (h *Handle) LocalExperts() []int { return h.local }

// Tokens is the number of this rank's tokens in the dispatch.
func (h *Handle) Tokens() int { return h.tokens }

// HostCounts tells the host how many rows came. The slices belong to the handle: a later HostCounts of the handle writes them again if it
// finds other numbers, for example after a replay of a graph. They are dead after Release.
type HostCounts struct {
	// Rows is the length of the output with its padding.
	Rows int
	// Counts, Offsets and RankCounts are copies of the handle's views with these names.
	Counts, Offsets, RankCounts []int32
}

// HostCounts waits until the ranks have told each other how many rows come, and returns these numbers. It needs
// Options.HostCounts, and neither waits for the rows nor synchronizes a stream. It returns the error of a dispatch that failed. A
// dispatch that is being captured into a graph has no counts before the graph has run; then they are those of the latest run that
// has got so far.
func (h *Handle) HostCounts(ctx context.Context) (HostCounts, error) {
	c, err := h.hostCounts(ctx)
	if err != nil {
		return HostCounts{}, fmt.Errorf("dispatch: counts: %w", err)
	}
	return c, nil
}

func (h *Handle) hostCounts(ctx context.Context) (HostCounts, error) {
	d := h.d
	if !d.options.HostCounts {
		return HostCounts{}, fmt.Errorf("%w: Options.HostCounts is not set", ErrInvalid)
	}
	if h.routing != nil {
		return HostCounts{}, fmt.Errorf("%w: the handle goes by a kept routing, its dispatch had another", ErrInvalid)
	}
	tells := d.c.Heap.Device().Kind() == device.HostKind // streams report errors, so no call of Fault is needed
	clock := func() time.Duration { return time.Since(d.opened) }
	for w := waitForCounts(&d.countsPatience, clock()); ; {
		c, ok, err := h.look()
		switch {
		case ok:
			w.done(clock())
			return c, nil
		case err != nil:
			return c, err
		case d.c.Group.Err() != nil:
			return HostCounts{}, d.c.Group.Err()
		case ctx.Err() != nil:
			return HostCounts{}, ctx.Err()
		}
		pause := w.pause(clock())
		if pause == 0 {
			runtime.Gosched()
			continue
		}
		if !tells {
			if err := d.Fault(); err != nil && !kernels.Recoverable(err) {
				return HostCounts{}, err
			}
		}
		shm.Sleep(pause)
	}
}

// look returns the counts once they have come.
func (h *Handle) look() (c HostCounts, ok bool, err error) {
	d := h.d
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case !h.alive:
		return c, false, ErrReleased
	case d.mapped == nil:
		return c, false, ErrClosed
	case h.err != nil:
		return c, false, h.err
	}
	words := d.bounds.Handles[h.memory].Mapped.Mem
	if shm.Word(words, 0).Load() != h.ticket {
		return c, false, nil
	}
	c = h.counts
	from := shm.View[int32](words)[2:]
	for _, to := range [...][]int32{c.Counts, c.Offsets, c.RankCounts} {
		if !slices.Equal(to, from[:len(to)]) { // their reader takes no lock
			copy(to, from)
		}
		from = from[len(to):]
	}
	c.Rows = int(c.Offsets[len(c.Offsets)-1])
	return c, true, nil
}

// Release gives the output back, for a later dispatch to write. Between the halves of a call it cancels the call; all ranks then do
// that. Launches that use the handle may still be in progress on a stream: the dispatcher's next call is ordered behind them. The
// caller finishes other work that reads the output, or orders it before that call. Ranks may release at different times and in
// different orders. A second Release does nothing until the dispatcher returns the same Handle again.
func (h *Handle) Release() {
	h.d.mu.Lock()
	half := h.half
	if h.alive {
		h.alive, h.half = false, nil
		h.d.idle = append(h.d.idle, h)
	}
	h.d.mu.Unlock()
	if half != nil {
		h.d.recycle(half)
	}
}

// take returns an unused handle, for a dispatch of that number of tokens.
func (d *Dispatcher) take(tokens int) (*Handle, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	// Memory is taken in turn, so the choice does not depend on the order of releases.
	free, n := d.next, d.options.Handles
	for ; free < d.next+n; free++ {
		if h := d.holders[free%n]; h == nil || !h.alive || h.memory != free%n {
			break
		}
	}
	if free == d.next+n {
		return nil, fmt.Errorf("dispatch: %w: all %d are alive: Release one or raise Options.Handles", ErrNoHandle, n)
	}
	free %= n
	d.next = (free + 1) % n
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
		h = &Handle{d: d}
	}
	d.ticket++
	h.memory, h.tokens, h.local, h.ticket, h.err, h.alive = free, tokens, d.local, d.ticket, nil, true
	h.lost, h.taken, h.routing, d.holders[h.memory] = false, false, nil, h
	h.turn, h.rowsTurn = 0, 0
	if d.options.HostCounts && h.counts.Offsets == nil {
		local, groups := d.bounds.Local(d.bounds.Rank), d.bounds.Groups(d.bounds.Rank)
		h.counts = HostCounts{Counts: make([]int32, local), Offsets: make([]int32, groups+1), RankCounts: make([]int32, d.bounds.Ranks)}
	}
	return h, nil
}
