package host_test

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
	"github.com/switchyard-moe/switchyard/test/explore"
)

// The tests of this file run the real kernel under schedules of their own choice: see package explore. Messages have a
// few bytes, all different, outputs are poisoned and looked at some time after the call, sources are overwritten when it
// returns.

const (
	poisoned = 0xff // outputs outside of calls
	spoiled  = 0xfe // sources outside of calls
)

// element is byte i of a message among n ranks: different for all pairs, for 10 neighbouring bytes, and for neighbouring
// calls (4 of 3 ranks, 2 of 4 ranks).
func element(n, call, src, dst int, i int64) byte {
	pair, pairs := src*(n-1)+dst, n*(n-1)
	if dst > src {
		pair--
	}
	return byte((call*pairs+pair)%24*10 + int(i%10))
}

// rig is a workload on a heap that is a piece of Go memory, so that the race detector sees all of it.
type rig struct {
	*segments
	w       *explore.Workload
	sources [][]byte // by rank
	epoch   uint64   // calls that have been made before
	timeout time.Duration
	// before and point, when set, run before every call and at every point of a rank. It is where tests put bugs in.
	before func(rank, call int) error
	point  func(rank, call int, what string)
	// looks, when set, runs before every idle look of a rank, whose wait its error ends; resumed when a rank goes on from
	// another point, and its error is the rank's.
	looks   func(rank int) error
	resumed func(rank int, what string) error
	// fresh takes the rig back to its first state; returned, when set, runs when a call has.
	fresh    func()
	returned func(rank int)
	// verdict, when set, judges what the kernel returns in a call; false means that the output has no meaning.
	verdict func(rank, call int, err error) (good bool, _ error)
	// splits are tables in memory for some routes.
	splits map[*kernels.Routes][]int64
}

func newRig(w *explore.Workload) *rig {
	g := &rig{w: w, timeout: time.Second} // no clock runs where ranks take turns
	n := w.Block.Size
	end := w.Outputs()
	for r := range n {
		end = max(end, w.Outputs()+w.OutputBytes(r))
	}
	g.segments = newSegments(n, (end+4095)/4096*4096, w.Block.ExchangeBounds)
	for r, e := range g.engines {
		e.SetPull(0, 16)
		var longest int64
		for _, c := range w.Calls {
			longest = max(longest, c.SourceBytes(r))
		}
		g.sources = append(g.sources, make([]byte, longest))
	}
	g.fresh = g.clear
	return g
}

func (g *rig) output(rank int) []byte { return g.at(rank, g.w.Outputs(), g.w.OutputBytes(rank)) }

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// clear takes the heap back to its first state.
func (g *rig) clear() {
	for r := range g.engines {
		clear(g.mem[int64(r)*g.stride+kernels.HeaderBytes : int64(r+1)*g.stride])
		fill(g.output(r), poisoned)
		fill(g.sources[r], spoiled)
		*g.word(r, g.w.Block.Epoch()) = g.epoch
	}
}

// untouched reports a write to an output that its user has back.
func (g *rig) untouched(rank int) error {
	for i, v := range g.output(rank) {
		if v != poisoned {
			return fmt.Errorf("%w: byte %d of rank %d is %d", explore.ErrLate, i, rank, v)
		}
	}
	return nil
}

func (g *rig) exchange(rank int, r *kernels.Routes, c *explore.Call, src, dst []byte) error {
	a := kernels.AllToAllV{Routes: r, Schedule: c.Schedules[rank], Src: buffer(src, -1), Dst: buffer(dst, -1), Launched: kernels.Launched{Timeout: g.timeout}}
	if c.InPlace[rank] {
		a.Dst = buffer(dst, c.Output[rank])
	}
	if table := g.splits[r]; table != nil {
		a.Splits = buffer(shm.Bytes(table), -1)
	}
	return g.ports[rank].Launch(nil, &a)
}

// run is what one rank does: all calls, with turns before, within and after each.
func (g *rig) run(rank int, turn explore.Turn) error {
	want := make([]byte, len(g.output(rank)))
	for call := range g.w.Calls {
		c := &g.w.Calls[call]
		r := c.Routes[rank]
		if err := turn(fmt.Sprintf("begins call %d", call+1), false); err != nil {
			return err
		}
		if err := g.untouched(rank); err != nil {
			return fmt.Errorf("before call %d: %w", call+1, err)
		}
		if g.before != nil {
			if err := g.before(rank, call); err != nil {
				return fmt.Errorf("before call %d: %w", call+1, err)
			}
		}
		fill(want, poisoned)
		for p := range r.SendBytes {
			for i := range r.SendBytes[p] {
				g.sources[rank][r.SendOffsets[p]+i] = element(len(g.engines), call, rank, p, i)
			}
			for i := range r.RecvBytes[p] {
				want[r.RecvOffsets[p]+i] = element(len(g.engines), call, p, rank, i)
			}
		}
		err := g.exchange(rank, r, c, g.sources[rank], g.output(rank))
		if g.returned != nil {
			g.returned(rank)
		}
		fill(g.sources[rank], spoiled)
		good := err == nil
		if g.verdict != nil {
			good, err = g.verdict(rank, call, err)
		}
		if err != nil {
			return fmt.Errorf("call %d: %w", call+1, err)
		}
		if err := turn(fmt.Sprintf("looks at the output of call %d", call+1), false); err != nil {
			return err
		}
		if good && !slices.Equal(g.output(rank), want) {
			return fmt.Errorf("call %d: %w: %d, want %d", call+1, explore.ErrData, g.output(rank), want)
		}
		fill(g.output(rank), poisoned)
	}
	return nil
}

// passes is how many passes of a waiting kernel count as one look: enough for its search for count mismatches and for the
// pass after it.
const passes = 33

// start is a fresh run of the workload, for explore.Schedules.
func (g *rig) start() explore.Program {
	g.fresh()
	p := explore.Program{End: func() error {
		for r := range g.engines {
			if err := g.untouched(r); err != nil {
				return err
			}
		}
		return nil
	}}
	wrong := make([]error, len(g.engines))
	for r, e := range g.engines {
		p.Ranks = append(p.Ranks, func(turn explore.Turn) error {
			idle := 0
			e.SetStep(func(what string, waiting bool) error {
				if waiting {
					if idle++; idle < passes {
						return nil
					}
				}
				idle = 0
				if waiting && g.looks != nil {
					if err := g.looks(r); err != nil {
						return err
					}
				}
				if g.point != nil {
					g.point(r, int(*g.word(r, g.w.Block.Epoch())-g.epoch)-1, what)
				}
				err := turn(what, waiting)
				if err == nil && !waiting && g.resumed != nil {
					wrong[r] = cmp.Or(wrong[r], g.resumed(r, what))
				}
				return err
			})
			return cmp.Or(g.run(r, turn), wrong[r])
		})
	}
	return p
}

// rotation is the order of the built-in algorithms.
func rotation(rank, size int) []int {
	order := make([]int, size-1)
	for i := range order {
		order[i] = (rank + 1 + i) % size
	}
	return order
}

var (
	pulled    = explore.Style{Order: rotation} // in one process a receiver reads what its sender has
	staged    = explore.Style{Order: rotation, Staged: true}
	inPlace   = explore.Style{Order: rotation, InPlace: true}
	inChunks  = explore.Style{Order: rotation, InPlace: true, ChunkBytes: 16}
	pipelined = explore.Style{Order: rotation, InPlace: true, Staged: true}
	ring      = explore.Style{Order: rotation, Window: 1, Staged: true}
	pullRing  = explore.Style{Order: rotation, Window: 1}

	// small has all three modes: packets to 8 bytes, eager to 16, and slots of 16.
	small = kernels.ExchangeBounds{Slots: 2, SlotBytes: 16, PacketBytes: 8, EagerBytes: 16}
	// oneSlot has credits alone.
	oneSlot = kernels.ExchangeBounds{Slots: 1, SlotBytes: 16}
	// eager has no packets.
	eager = kernels.ExchangeBounds{Slots: 1, SlotBytes: 16, EagerBytes: 16}
)

func workload(c kernels.ExchangeBounds, times int, bytes [][]int64, styles ...explore.Style) *explore.Workload {
	w := explore.NewWorkload(len(bytes), c)
	for range times {
		w.Add(bytes, styles...)
	}
	return w
}

func two(a, b int64) [][]int64 { return [][]int64{{0, a}, {b, 0}} }

func three(n int64) [][]int64 { return [][]int64{{0, n, n}, {n, 0, n}, {n, n, 0}} }

// budget is how many deviations to enumerate and how many random schedules to add; short tests do with fewer. The race detector has nothing to
// see in ranks that take turns, and makes every turn ten times as dear.
func budget(deviations, random int) explore.Schedules {
	if proctest.Race {
		deviations, random = deviations-1, random/10
	} else if testing.Short() {
		deviations, random = min(deviations, 2), random/4
	}
	return explore.Schedules{Deviations: deviations, Random: random, Seed: 1}
}

// runs are fresh runs under schedules of the tests' choice.
type runs interface{ start() explore.Program }

func holds(t *testing.T, g runs, s explore.Schedules) {
	t.Helper()
	start := time.Now()
	r := s.Explore(g.start)
	require.Nil(t, r.Violation, "after %d schedules: %v", r.Schedules, r.Violation)
	t.Logf("%d schedules with up to %d deviations, %d of them random, %d turns, %v", r.Schedules, s.Deviations, s.Random, r.Turns, time.Since(start).Round(time.Millisecond))
}

func found(t *testing.T, g runs, s explore.Schedules, way error) {
	t.Helper()
	r := s.Explore(g.start)
	require.NotNil(t, r.Violation, "not found in %d schedules", r.Schedules)
	t.Logf("found in schedule %d: %v", r.Schedules, r.Violation)
	if way != nil {
		require.ErrorIs(t, r.Violation.Err, way)
	}
}

func TestExploreEveryMode(t *testing.T) {
	uneven := [][]int64{{0, 3, 16}, {40, 0, 0}, {0, 17, 0}}
	skewed := [][]int64{{0, 0, 40}, {5, 0, 48}, {9, 0, 0}}
	for _, c := range []struct {
		name string
		w    *explore.Workload
		s    explore.Schedules
	}{
		{"2 ranks/packets", workload(small, 3, two(5, 8), staged), budget(3, 500)},
		{"2 ranks/eager", workload(small, 3, two(16, 9), staged), budget(3, 500)},
		{"2 ranks/one way", workload(eager, 3, two(16, 0), staged), budget(3, 500)},
		{"2 ranks/zero", workload(small, 3, two(0, 0), staged), budget(3, 500)},
		{"2 ranks/in place", workload(small, 3, two(40, 33), inPlace), budget(3, 500)},
		{"2 ranks/in place/chunks", workload(small, 2, two(50, 17), inChunks), budget(2, 500)},
		{"2 ranks/staged", workload(small, 3, two(40, 17), staged), budget(2, 500)},
		{"2 ranks/pulled", workload(small, 3, two(40, 17), pulled), budget(2, 500)},
		{"2 ranks/pulled one way", workload(small, 3, two(40, 0), pulled), budget(3, 500)},
		{"2 ranks/one slot", workload(oneSlot, 2, two(40, 1), staged), budget(2, 500)},
		{"2 ranks/modes change", explore.NewWorkload(2, small).Add(two(0, 40), staged).Add(two(40, 9), inPlace).Add(two(9, 3), staged).
			Add(two(3, 20), pipelined).Add(two(30, 20), pulled), budget(2, 500)},
		{"3 ranks/packets", workload(small, 3, three(5), staged), budget(2, 500)},
		{"3 ranks/eager", workload(small, 3, three(9), staged), budget(2, 500)},
		{"3 ranks/in place", workload(small, 2, three(20), inPlace), budget(2, 500)},
		{"3 ranks/ring", workload(small, 2, three(20), ring), budget(2, 500)},
		{"3 ranks/pulled", workload(small, 2, three(20), pulled), budget(2, 500)},
		{"3 ranks/pulled ring", workload(small, 2, three(20), pullRing), budget(2, 500)},
		{"3 ranks/pipelined", workload(small, 1, [][]int64{{0, 40, 0}, {17, 0, 48}, {40, 0, 0}}, pipelined), budget(2, 500)},
		{"3 ranks/modes change", explore.NewWorkload(3, small).Add(uneven, staged).Add(skewed, ring), budget(2, 500)},
		{"3 ranks/algorithms differ", workload(small, 2, [][]int64{{0, 40, 12}, {5, 0, 33}, {40, 20, 0}}, ring, inPlace, pipelined), budget(2, 500)},
		{"3 ranks/pulled, staged and in place", workload(small, 2, [][]int64{{0, 40, 12}, {5, 0, 33}, {40, 20, 0}}, pulled, inPlace, staged), budget(2, 500)},
	} {
		t.Run(c.name, func(t *testing.T) { holds(t, newRig(c.w), c.s) })
	}
}

// TestExploreCountMismatch has two ranks disagree on a message in the first call. The receiver must say so, whatever the
// modes, the sender where it waits for a credit, and the calls after that must be right.
func TestExploreCountMismatch(t *testing.T) {
	for _, sent := range []int64{0, 5, 12, 40} {
		for _, expected := range []int64{0, 5, 12, 17, 40} {
			if sent == expected {
				continue
			}
			for _, style := range []explore.Style{inPlace, ring, pulled} {
				t.Run(fmt.Sprintf("%d for %d/window %d in place %v", sent, expected, style.Window, style.InPlace), func(t *testing.T) {
					w := workload(small, 3, [][]int64{{0, 40, 5}, {20, 0, 12}, {5, 33, 0}}, style)
					w.Calls[0] = workload(small, 1, [][]int64{{0, sent, 5}, {20, 0, 12}, {5, 33, 0}}, style).Calls[0]
					w.Calls[0].Routes[1].RecvBytes[0] = expected
					w.Calls[0].Routes[1].RecvOffsets[2] += expected - sent
					g := newRig(w)
					g.verdict = func(rank, call int, err error) (bool, error) {
						var m *kernels.CountMismatchError
						switch {
						case call > 0 || rank == 2 || err == nil && rank == 0 && w.Block.Mode(sent) != kernels.CreditMode:
							return true, err
						case !errors.As(err, &m) || m.Src != 0 || m.Dst != 1 || int64(m.Sent) != sent || int64(m.Expected) != expected:
							return false, fmt.Errorf("the disagreement became %w", err)
						}
						return false, nil
					}
					holds(t, g, budget(1, 200))
				})
			}
		}
	}
}

// TestF3_RefusedSplitsAreToldToAll has a rank refuse its splits between calls that are right: all have the same error, no
// rank waits for its deadline, and the call after it works.
func TestF3_RefusedSplitsAreToldToAll(t *testing.T) {
	table := func(r *kernels.Routes) []int64 {
		return slices.Concat(r.SendBytes, r.SendOffsets, r.RecvBytes, r.RecvOffsets)
	}
	for name, style := range map[string]explore.Style{"pulled": pulled, "staged": staged, "in place": inPlace, "ring": ring, "pulled ring": pullRing} {
		for _, bytes := range []int64{0, 5, 12, 40} {
			for _, c := range []kernels.ExchangeBounds{small, oneSlot} {
				t.Run(fmt.Sprintf("%s, %d bytes, %d slots", name, bytes, c.Slots), func(t *testing.T) {
					g := newRig(workload(c, 3, three(bytes), style))
					one, other := g.w.Calls[1].Routes[0], g.w.Calls[1].Routes[1]
					bad := table(one)
					bad[3+2] = -7
					g.splits = map[*kernels.Routes][]int64{one: bad, other: table(other)}
					g.verdict = func(rank, call int, err error) (bool, error) {
						var s *kernels.SplitsError
						switch {
						case call != 1:
							return true, err
						case !errors.As(err, &s) || s.Rank != 0 || s.Peer != 2 || !s.Send || s.Bytes != bytes || s.Offset != -7 || s.Limit != int64(len(g.sources[0])) || s.Epoch != 2:
							return false, fmt.Errorf("the refusal became %w", err)
						}
						return false, nil
					}
					holds(t, g, budget(1, 200))
				})
			}
		}
	}
}

// TestX8_RingsFinishWhateverTheirOrders has ranks take their peers in orders that do not fit together: by the rank they send
// to, and as their own algorithms say, each another one. A credit is all that a sender waits for, so nobody is in a circle.
func TestX8_RingsFinishWhateverTheirOrders(t *testing.T) {
	g := newRig(workload(small, 2, three(20), ring))
	for _, c := range g.w.Calls {
		for _, r := range c.Routes {
			r.ReverseOrder = r.Order
		}
	}
	holds(t, g, budget(1, 200))
	butterfly := explore.Style{Order: func(rank, _ int) []int { return []int{rank ^ 1, rank ^ 2, rank ^ 3} }, Window: 1}
	four := [][]int64{{0, 20, 20, 20}, {20, 0, 20, 20}, {20, 20, 0, 20}, {20, 20, 20, 0}}
	holds(t, newRig(workload(small, 2, four, butterfly, ring, butterfly, ring)), budget(1, 200))
}

// TestX9_PacketFlagsOutlastTheirBits passes the call in which the low half of the epoch is zero, as all memory is at first.
func TestX9_PacketFlagsOutlastTheirBits(t *testing.T) {
	g := newRig(explore.NewWorkload(2, small).Add(two(5, 16), staged).Add(two(8, 5), staged).Add(two(16, 8), staged).Add(two(8, 0), staged))
	for before := range uint64(4) {
		g.epoch = 1<<32 - 1 - before
		holds(t, g, budget(2, 100))
	}
}

// TestExploreFindsKnownBugs puts bugs into what the real kernel is told, or into the memory it works on.
func TestExploreFindsKnownBugs(t *testing.T) {
	t.Run("X1 skipped wait on a zero count", func(t *testing.T) {
		g := newRig(workload(eager, 3, two(16, 0), staged))
		holds(t, g, budget(1, 100))
		for _, c := range g.w.Calls {
			c.Routes[0].ReverseOrder = nil
		}
		found(t, g, budget(1, 100), explore.ErrData)
	})
	t.Run("X9 two-state epochs", func(t *testing.T) {
		g := newRig(workload(eager, 3, two(16, 9), staged))
		holds(t, g, budget(1, 100))
		g.before = func(rank, call int) error {
			*g.word(rank, g.w.Block.Epoch()) = uint64(call & 1)
			return nil
		}
		found(t, g, budget(1, 100), explore.ErrData)
	})
	t.Run("X3 missing credit", func(t *testing.T) {
		g := newRig(workload(small, 2, two(40, 5), inPlace))
		holds(t, g, budget(1, 100))
		g.before = func(rank, call int) error {
			if rank == 0 {
				g.forge(0, 1, call, &g.w.Calls[call])
			}
			return nil
		}
		found(t, g, budget(1, 100), explore.ErrLate)
	})
	t.Run("X2 a cache hit takes the receiver's displacement for granted", func(t *testing.T) {
		moved := inPlace
		moved.Gap = 8
		g := newRig(explore.NewWorkload(2, small).Add(two(40, 5), inPlace).Add(two(40, 5), moved))
		holds(t, g, budget(1, 100))
		g.before = func(rank, call int) error {
			if rank == 0 && call == 1 {
				g.forge(0, 1, call, &g.w.Calls[0])
			}
			return nil
		}
		found(t, g, budget(1, 100), explore.ErrData)
	})
	t.Run("X2 a cache miss takes for granted that all miss", func(t *testing.T) {
		// In call 2 rank 0 sends more to rank 1, which rank 2 has no part in.
		g := newRig(explore.NewWorkload(3, small).Add(three(20), staged).Add([][]int64{{0, 40, 20}, {20, 0, 20}, {20, 20, 0}}, staged))
		meet := workload(small, 1, three(8), staged).Calls[0]
		holds(t, g, budget(1, 100))
		g.before = func(rank, call int) error {
			if call == 1 && rank == 2 {
				return nil
			}
			return g.exchange(rank, meet.Routes[rank], &meet, make([]byte, 16), make([]byte, 16))
		}
		found(t, g, budget(1, 100), nil)
	})
	t.Run("X4 signal before data", func(t *testing.T) {
		g := newRig(workload(eager, 2, two(16, 9), staged))
		holds(t, g, budget(1, 100))
		g.point = func(rank, call int, what string) {
			if what == "puts data to rank 1" {
				line := g.w.Block.Signal(uint64(call+1), rank)
				*g.word(1, line+host.LineTotal), *g.word(1, line+host.LineSeq) = 16, kernels.LastSeq(uint64(call+1))
			}
		}
		found(t, g, budget(1, 100), explore.ErrData)
	})
}

// giveUp has rank 0 give up in its look-th idle look, and the other ranks when it is gone. Whoever succeeds all the same
// must have the right data, and nobody may read a source whose user has it back.
func (g *rig) giveUp(look int) {
	looks, gone := 0, false
	g.fresh = func() {
		g.clear()
		looks, gone = 0, false
	}
	g.returned = func(rank int) { gone = gone || rank == 0 }
	g.looks = func(rank int) error {
		if rank == 0 {
			looks++
		}
		if gone || looks == look {
			return comm.ErrTimeout
		}
		return nil
	}
	g.resumed = func(rank int, what string) error {
		if what == "takes data of rank 0" && gone {
			return fmt.Errorf("%w: rank %d reads the source of rank 0", explore.ErrLate, rank)
		}
		return nil
	}
	g.verdict = func(_, _ int, err error) (bool, error) {
		if errors.Is(err, comm.ErrTimeout) {
			return false, nil
		}
		return true, err
	}
}

// TestF1_WhoGivesUpHasItsBuffersBack has a rank give up while others read what it sends, and write what it receives.
func TestF1_WhoGivesUpHasItsBuffersBack(t *testing.T) {
	for look := 1; look < 4; look++ {
		for name, w := range map[string]*explore.Workload{
			"2 ranks":          workload(small, 1, two(40, 33), pulled),
			"2 ranks, one way": workload(small, 1, two(40, 0), pulled),
			"2 ranks, staged":  workload(small, 1, two(0, 40), staged),
			"3 ranks":          workload(small, 1, three(20), pulled),
			"3 ranks, ring":    workload(small, 1, three(20), pullRing),
		} {
			t.Run(fmt.Sprintf("%s, look %d", name, look), func(t *testing.T) {
				g := newRig(w)
				g.giveUp(look)
				if w.Calls[0].Schedules[0].Staged {
					g.resumed = nil // what is taken is a slot
				}
				holds(t, g, budget(3, 500))
			})
		}
	}
	every := explore.Schedules{Deviations: 3, Random: 500, Seed: 1}
	t.Run("bug: the offer is not taken back", func(t *testing.T) {
		g := newRig(workload(small, 1, two(40, 0), pulled))
		g.giveUp(1)
		returned := g.returned
		g.returned = func(rank int) {
			if returned(rank); rank == 0 {
				*g.word(1, g.w.Block.Signal(1, 0)+host.LineSource) = uint64(shm.Addr(g.sources[0]))
			}
		}
		found(t, g, every, nil)
	})
	t.Run("bug: reading without a claim", func(t *testing.T) {
		g := newRig(workload(small, 1, two(40, 0), pulled))
		g.giveUp(1)
		g.point = func(rank, _ int, what string) {
			if what == "takes its offer to rank 1 back" {
				*g.word(rank, g.w.Block.Reading(1)) = 0
			}
		}
		found(t, g, every, explore.ErrLate)
	})
}

// forge has src grant itself the first chunk of the message to dst, where dst wants it in call c.
func (g *rig) forge(src, dst, call int, c *explore.Call) {
	r, line := c.Routes[dst], g.w.Block.Credit(dst, 1)
	*g.word(src, line+host.LineOffset) = uint64(c.Output[dst] + r.RecvOffsets[src])
	*g.word(src, line+host.LineLen) = uint64(r.RecvBytes[src])
	*g.word(src, line+host.LineTotal) = uint64(r.RecvBytes[src])
	*g.word(src, line+host.LineSeq) = kernels.Seq(uint64(call+1), 1)
}

// TestX4_RaceDetectorSeesEveryAccess runs the ranks side by side on memory that the race detector watches; it does not
// watch the mapped memory of other tests.
func TestX4_RaceDetectorSeesEveryAccess(t *testing.T) {
	w := explore.NewWorkload(3, small)
	for range 50 {
		w.Add([][]int64{{0, 3, 16}, {40, 0, 0}, {0, 17, 0}}, staged).Add(three(40), inPlace).Add(three(40), ring).Add(three(9), pipelined).Add(three(40), pulled)
	}
	g := newRig(w)
	g.timeout = 20 * time.Second
	g.clear()
	var all sync.WaitGroup
	errs := make([]error, len(g.engines))
	for r := range errs {
		all.Go(func() {
			errs[r] = g.run(r, func(string, bool) error { return nil })
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
}
