package rebalance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
)

const (
	hidden = 8
	topK   = 2
	tokens = 64
)

// world is one rank with a dispatcher, and experts with two parameters: expert e multiplies by 1+e, and has a table of another size.
type world struct {
	t     *testing.T
	g     *comm.Group
	h     *memory.Heap
	d     *dispatch.Dispatcher
	scale []float32
	table []int32
}

const tableLen = 1025 // of an expert

// run runs ranks, and the parts of their job one after the other.
func run(t *testing.T, ranks int, p *dispatch.Placement, part func(w *world)) {
	t.Helper()
	runOn(t, ranks, ranks, p, part)
}

// runOn is run with perHost ranks on each host.
func runOn(t *testing.T, ranks, perHost int, p *dispatch.Placement, part func(w *world)) {
	t.Helper()
	if perHost < ranks {
		worldtest.NeedUCX(t)
	}
	groups, err := comm.Local(ranks, comm.LocalOptions{PerHost: perHost})
	require.NoError(t, err)
	var all sync.WaitGroup
	for _, g := range groups {
		all.Go(func() {
			defer g.Close()
			h, err := memory.NewHeap(t.Context(), g, device.Host(), memory.Options{})
			if err != nil {
				t.Error(err)
				return
			}
			d, err := dispatch.New(t.Context(), h, dispatch.Options{Experts: len(p.Ranks), TopK: topK, Hidden: hidden, MaxTokens: tokens, Placement: p, Layer: "busy"})
			if err != nil {
				t.Error(err)
				return
			}
			w := &world{t: t, g: g, h: h, d: d}
			for _, e := range p.Local(g.Rank()) {
				w.scale = append(w.scale, float32(1+e))
				for i := range tableLen {
					w.table = append(w.table, int32(e<<16|i))
				}
			}
			part(w)
			_ = d.Close(context.Background())
			_ = h.Close(context.Background())
		})
	}
	all.Wait()
}

func (w *world) loop(o Options) *Loop {
	l, err := New(w.t.Context(), w.h, w.d, []memory.View{memory.Wrap(w.scale), memory.Wrap(w.table)}, o)
	if err != nil {
		w.t.Error(err)
	}
	return l
}

// holds says whether the tensors are those of the experts that the placement puts here.
func (w *world) holds() error {
	for slot, e := range w.d.Placement().Local(w.g.Rank()) {
		if w.scale[slot] != float32(1+e) {
			return fmt.Errorf("rank %d, expert %d: scale %v", w.g.Rank(), e, w.scale[slot])
		}
		for i, v := range w.table[slot*tableLen : (slot+1)*tableLen] {
			if v != int32(e<<16|i) {
				return fmt.Errorf("rank %d, expert %d: table[%d] is %#x", w.g.Rank(), e, i, v)
			}
		}
	}
	return nil
}

// step dispatches tokens whose choices follow load, and compares the sums.
func (w *world) step(r *rand.Rand, load []float64) error {
	x := memory.NewMatrix[float32](tokens, hidden)
	chosen, weights := memory.NewMatrix[int32](tokens, topK), memory.NewMatrix[float32](tokens, topK)
	y := memory.NewMatrix[float32](tokens, hidden)
	for t := range tokens {
		for i := range x.Row(t) {
			x.Row(t)[i] = float32(r.IntN(100))
		}
		for k := range topK {
			chosen.Row(t)[k], weights.Row(t)[k] = draw(r, load), 0.5
		}
	}
	h, err := w.d.Dispatch(nil, dispatch.Tokens{X: x.View(), Experts: chosen.View(), Weights: weights.View()})
	if err != nil {
		return err
	}
	defer h.Release()
	rows, err := memory.MatrixOf[float32](h.Rows(), hidden)
	if err != nil {
		return err
	}
	first, n := memory.Of[int32](h.Offsets()), memory.Of[int32](h.Counts())
	for slot := range h.LocalExperts() {
		of := rows.Slice(int(first[slot]), int(first[slot]+n[slot])).Data()
		for i := range of {
			of[i] *= w.scale[slot]
		}
	}
	if err := w.d.Combine(nil, y.View(), rows.View(), h, dispatch.CombineOptions{}); err != nil {
		return err
	}
	for t := range tokens {
		want := float32(2+chosen.Row(t)[0]+chosen.Row(t)[1]) / 2
		for i, v := range y.Row(t) {
			if v != want*x.Row(t)[i] {
				return fmt.Errorf("token %d: %v, want %v times %v", t, v, want, x.Row(t)[i])
			}
		}
	}
	return nil
}

// draw chooses an expert by its part of the load.
func draw(r *rand.Rand, load []float64) int32 {
	sum := 0.0
	for _, l := range load {
		sum += l
	}
	u := r.Float64() * sum
	for e, l := range load {
		if u -= l; u < 0 {
			return int32(e)
		}
	}
	return 0
}

// The load of ranks becomes alike, with and without copies, and the layer computes what it did, with weights that have come along.
func TestBusyExpertsMove(t *testing.T) {
	spread, err := dispatch.Balance(make([]float64, 8), dispatch.BalanceOptions{Ranks: 4, Slots: 3})
	require.NoError(t, err)
	for _, c := range []struct {
		name  string
		p     *dispatch.Placement
		load  []float64
		worse float64 // than this the ranks are before
		after float64 // and better than this at the end
		hosts int
	}{
		{"one rank has both busy experts", dispatch.Contiguous(8, 4), []float64{40, 40, 4, 4, 4, 4, 4, 4}, 2.5, 1.8, 1},
		{"copies of the busiest", spread, []float64{100, 1, 1, 1, 50, 1, 1, 1}, 1.8, 1.4, 1},
		{"two ranks", dispatch.Contiguous(4, 2), []float64{3, 3, 1, 1}, 1.4, 1.1, 1},
		{"two hosts", dispatch.Contiguous(8, 4), []float64{40, 40, 4, 4, 4, 4, 4, 4}, 2.5, 1.8, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			ranks := 1 + slices.Max(slices.Concat(c.p.Ranks...))
			perHost := ranks / c.hosts
			o := Options{Window: 5}
			if c.hosts > 1 {
				o.Groups = len(c.p.Ranks) // each expert may go to any host
			}
			runOn(t, ranks, perHost, c.p, func(w *world) {
				l, r := w.loop(o), rand.New(rand.NewPCG(uint64(w.g.Rank()), 1))
				var all []*Change
				for range 20 {
					if err := w.step(r, c.load); err != nil {
						t.Error(err)
						return
					}
					change, err := l.Step(t.Context(), nil)
					if err != nil || w.holds() != nil {
						t.Error(err, w.holds())
						return
					}
					if change != nil {
						all = append(all, change)
					}
				}
				if err := told(w.g.Rank(), all[0]); err != nil {
					t.Error(err)
				}
				if err := l.Close(t.Context()); err != nil || l.Close(t.Context()) != nil {
					t.Error(err)
				}
				if len(all) != 4 || !all[0].Moved() || all[0].Before < c.worse || all[3].After > c.after {
					t.Errorf("before %.2f, after %.2f, at the end %.2f; moves %v", all[0].Before, all[0].After, all[3].After, all[0].Moves)
				}
				if c.hosts > 1 && !slices.ContainsFunc(all[0].Moves, func(m dispatch.Move) bool { return m.From/perHost != m.To/perHost }) {
					t.Errorf("no expert has moved to another host: %v", all[0].Moves)
				}
				if n := slices.IndexFunc(all[1:], (*Change).Moved); n >= 0 {
					t.Errorf("the same load moves experts again: %v", all[1+n].Moves)
				}
				sum := int64(0)
				for _, n := range all[0].Load {
					sum += n
				}
				if sum != int64(5*tokens*topK*ranks) {
					t.Errorf("the load of the window is %v", all[0].Load)
				}
			})
		})
	}
}

// told says whether those who look on see one change of a rank of this process, and that it is c.
func told(rank int, c *Change) error {
	for _, r := range observe.Snapshot().Ranks {
		if r.Rank != rank {
			continue
		}
		if len(r.Changes) != 1 {
			return fmt.Errorf("rank %d tells of %d changes, want 1", rank, len(r.Changes))
		}
		seen := r.Changes[0]
		for i, m := range c.Moves {
			if i >= len(seen.Moves) || seen.Moves[i] != (observe.Move{Expert: m.Expert, From: m.From, To: m.To}) {
				return fmt.Errorf("rank %d tells of moves %v, want %v", rank, seen.Moves, c.Moves)
			}
		}
		if seen.Layer != "busy" || seen.Before != c.Before || seen.After != c.After || seen.At.IsZero() {
			return fmt.Errorf("rank %d tells of %+v, want %+v", rank, seen, c)
		}
		return nil
	}
	return fmt.Errorf("rank %d tells nothing", rank)
}

// Loads that are alike, or none, move nothing.
func TestNothingMovesWithoutNeed(t *testing.T) {
	run(t, 2, dispatch.Contiguous(4, 2), func(w *world) {
		l, r := w.loop(Options{Window: 1, Above: 1.3}), rand.New(rand.NewPCG(3, uint64(w.g.Rank())))
		if c, err := l.Step(t.Context(), nil); c != nil || err != nil {
			t.Error(c, err)
		}
		for range 5 {
			if err := w.step(r, []float64{1, 1, 1, 1}); err != nil {
				t.Error(err)
			}
			if c, err := l.Step(t.Context(), nil); err != nil || c == nil || c.Moved() || c.After != c.Before {
				t.Error(c, err)
			}
		}
		if (*Change)(nil).Moved() {
			t.Error("nil has moved")
		}
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Any placement becomes any other one, in rounds in which a pair of ranks has one expert.
func TestAnyPlacementBecomesAnyOther(t *testing.T) { anyBecomesAnyOther(t, 20, 1) }

func TestAnyPlacementBecomesAnyOtherOnHosts(t *testing.T) { anyBecomesAnyOther(t, 5, 2) }

func anyBecomesAnyOther(t *testing.T, worlds, hosts int) {
	random := rand.New(rand.NewPCG(7, 7))
	for range worlds {
		ranks := 2 + random.IntN(4)
		ranks -= ranks % hosts
		slots := 1 + random.IntN(4)
		experts := max(hosts*slots, 1+random.IntN(ranks*slots))
		experts -= experts % hosts
		some := func() *dispatch.Placement {
			load := make([]float64, experts)
			for e := range load {
				load[e] = random.Float64()
			}
			p, err := dispatch.Balance(load, dispatch.BalanceOptions{Ranks: ranks, Slots: slots})
			require.NoError(t, err)
			return p
		}
		var steps []*dispatch.Placement
		for range 3 {
			steps = append(steps, some())
		}
		runOn(t, ranks, ranks/hosts, steps[0], func(w *world) {
			l := w.loop(Options{})
			for _, next := range steps[1:] {
				var c Change
				if err := l.apply(t.Context(), nil, w.d.Placement(), next, 1, &c); err != nil || w.holds() != nil {
					t.Error(err, w.holds())
				}
				if w.d.Placement().String() != next.String() {
					t.Error(w.d.Placement())
				}
			}
			if err := l.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestTransfersStayOnTheHost(t *testing.T) {
	now := &dispatch.Placement{Ranks: [][]int{{0, 2}, {0}, {1}, {1, 3}, {2}, {3}}}
	next := &dispatch.Placement{Ranks: [][]int{{1, 3}, {0}, {0}, {1, 2}, {3}, {2}}}
	require.Equal(t, []transfer{
		{1, 0, 1, 0, 0}, {2, 1, 0, 0, 1}, {0, 0, 0, 1, 0},
		{3, 3, 0, 2, 0}, {5, 3, 1, 2, 1}, {0, 2, 0, 3, 0}, {4, 2, 1, 3, 1},
	}, transfers(now, next, 4, 2))
	for _, round := range rounds(transfers(now, next, 4, 2)) {
		seen := map[[2]int]bool{}
		for _, x := range round {
			require.False(t, seen[[2]int{x.from, x.to}])
			seen[[2]int{x.from, x.to}] = true
		}
	}
	require.Len(t, rounds(transfers(now, next, 4, 2)), 2)

	// A placement that only names ranks in another way moves nothing.
	swapped := &dispatch.Placement{Ranks: [][]int{{1, 3}, {1}, {0}, {0, 2}, {3}, {2}}}
	require.Equal(t, now.String(), stay(now, swapped, 4, 2).String())
	require.Empty(t, transfers(now, stay(now, swapped, 4, 2), 4, 2))
	// Parts do not leave their host.
	require.Equal(t, swapped.Imbalance([]float64{1, 2, 3, 4, 5, 6}, 4), stay(now, swapped, 4, 2).Imbalance([]float64{1, 2, 3, 4, 5, 6}, 4))
}

// Bad arguments are refused on all ranks, with the values.
func TestRefusals(t *testing.T) {
	refused := func(p *dispatch.Placement, o func(rank int) Options, tensors func(w *world) []memory.View, want string) {
		t.Helper()
		run(t, 2, p, func(w *world) {
			_, err := New(t.Context(), w.h, w.d, tensors(w), o(w.g.Rank()))
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %q", err, want)
			}
		})
	}
	both := func(w *world) []memory.View { return []memory.View{memory.Wrap(w.scale), memory.Wrap(w.table)} }
	all := func(o Options) func(int) Options { return func(int) Options { return o } }
	even := dispatch.Contiguous(4, 2)
	refused(dispatch.Contiguous(3, 2), all(Options{}), both, "every rank needs equally many")
	refused(even, all(Options{Window: -1}), both, "Options.Window is -1")
	refused(even, all(Options{Above: 0.5}), both, "Options.Above is 0.5")
	refused(even, all(Options{Groups: 3}), both, "4 experts in 3 groups")
	refused(even, all(Options{}), func(*world) []memory.View { return nil }, "there are no tensors")
	refused(even, all(Options{}), func(w *world) []memory.View { return []memory.View{memory.Wrap(make([]byte, 3))} }, "tensor 0 has 3 bytes for 2 experts")
	refused(even, all(Options{}), func(*world) []memory.View { return []memory.View{memory.Wrap(make([]float32, 3))} },
		"tensor 0 has 12 bytes for 2 experts, whose parts of 6 bytes cut an element of float32")
	refused(even, func(rank int) Options { return Options{Window: 10 + rank} }, both, "Window:10")
}

// After the loss of a rank every rank's tensors are those of its placement.
func TestLostRankLeavesWeightsWhole(t *testing.T) {
	run(t, 3, dispatch.Contiguous(6, 3), func(w *world) {
		l, r := w.loop(Options{Window: 1}), rand.New(rand.NewPCG(1, 1))
		if err := w.step(r, []float64{30, 30, 1, 1, 1, 1}); err != nil {
			t.Error(err)
		}
		_ = w.g.Barrier(t.Context()) // all have stepped once rank 2 has passed it; its death may overtake the others in it
		if w.g.Rank() == 2 {
			w.g.Kill()
			return
		}
		_, err := l.Step(t.Context(), nil)
		if !errors.Is(err, comm.ErrPeerLost) {
			t.Error(err)
		}
		if err := w.holds(); err != nil {
			t.Error(err)
		}
	})
}
