package dispatch

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/memory"
)

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

// Counters reads the counters without a wait for any stream: they contain the calls that have run. Metrics and status of a dispatcher on a
// GPU have its tokens as the last call of Counters has found them: nothing else copies them from there.
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
	if d.counters.Bytes() == nil {
		d.mu.Lock()
		d.routed.seen, d.routed.sent = c.Choices, c.Bytes
		d.mu.Unlock()
	}
	for p, ns := range words[d.bounds.Ranks:] {
		c.Waited[p] = time.Duration(ns)
	}
	return c, nil
}

// routed is what a dispatcher has routed, for those who look on. The lock of the dispatcher guards it.
type routed struct {
	seen, sent []int64  // Counters.Choices and Bytes of a GPU, when somebody has asked for them
	received   []uint64 // bytes of each rank, as it was told last
	// Until the placement changed last: the choices of experts, and those of the ranks that had them.
	experts []int64
	ranks   []float64
	// overflows counts dispatches that did not fit, by the rank that had no room; nil until the first.
	overflows []uint64
}

// choices are those of each expert so far, nil where nobody has fetched them. d.mu is held.
func (d *Dispatcher) choices() []int64 {
	mem := d.counters.Bytes()
	if mem == nil {
		return d.routed.seen
	}
	words := make([]int64, d.bounds.Experts)
	for e := range words {
		words[e] = int64(shm.Word(mem, 8*int64(e)).Load())
	}
	return words
}

// byRank divides choices among the ranks that have the experts now, behind those of earlier placements. d.mu is held.
func (d *Dispatcher) byRank(choices []int64) []float64 {
	if choices == nil {
		return nil
	}
	ranks := make([]float64, d.bounds.Ranks)
	copy(ranks, d.routed.ranks)
	for e, at := range d.placement.Ranks {
		n := float64(choices[e])
		if d.routed.experts != nil {
			n -= float64(d.routed.experts[e])
		}
		for _, r := range at {
			ranks[r] += n / float64(len(at))
		}
	}
	return ranks
}

// replaced has what was routed so far stay with the ranks that had the experts. d.mu is held.
func (d *Dispatcher) replaced() {
	if now := d.choices(); now != nil {
		d.routed.ranks = d.byRank(now)
		d.routed.experts = now
	}
}

// tellLayer is what the dispatcher has routed.
func (d *Dispatcher) tellLayer() flight.Layer {
	d.mu.Lock()
	defer d.mu.Unlock()
	choices := d.choices()
	l := flight.Layer{Name: d.options.Layer, Routed: d.byRank(choices), Overflows: slices.Clone(d.routed.overflows)}
	if l.Name != "" {
		for _, n := range choices {
			l.Tokens = append(l.Tokens, uint64(n))
		}
		l.Owners = d.placement.Ranks
	}
	return l
}

// tellTraffic is the bytes of rows and scales. A rank has received the bytes that the others have counted as sent, in memory that ranks of one
// host share. After a failure of the group they may use that for something else, and what was read last is told on.
func (d *Dispatcher) tellTraffic(h *memory.Heap, add func(rank int, t flight.Traffic)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	mem := d.counters.Bytes()
	if mem == nil {
		for p, n := range d.routed.sent {
			add(p, flight.Traffic{Sent: uint64(n)})
		}
		return
	}
	sent := func(of []byte, to int) uint64 { return shm.Word(of, 8*int64(d.bounds.Experts+to)).Load() }
	now := make([]uint64, d.bounds.Ranks)
	for p, space := 0, h.Space(); p < space.Size; p++ {
		now[space.Name(p)] = sent(space.Range(p, d.bounds.Counters.Place, int64(len(mem))), d.bounds.Rank)
	}
	if h.Group().Err() == nil {
		d.routed.received = now
	}
	for p := range d.bounds.Ranks {
		t := flight.Traffic{Sent: sent(mem, p)}
		if d.routed.received != nil {
			t.Received = d.routed.received[p]
		}
		add(p, t)
	}
}

// overflowed counts a dispatch that did not fit. d.mu is held.
func (d *Dispatcher) overflowed(err error) {
	var full *OverflowError
	if !errors.As(err, &full) {
		return
	}
	if d.routed.overflows == nil {
		d.routed.overflows = make([]uint64, d.bounds.Ranks)
	}
	d.routed.overflows[full.Rank]++
}
