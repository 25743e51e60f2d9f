package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
)

const (
	tunedRounds = 5    // in each of which all numbers of multiprocessors have their turn
	mostFew     = 1024 // tokens that the kernels for few take
)

// The tokens a rank that are measured where nothing is said: of calls with low latency and of the others. The most go first, so that
// dispatchers of fewer find memory that is there.
var fewTokens, manyTokens = []int{512, 256, 128, 64, 32, 16, 8}, []int{8192, 4096, 1024, 256}

// tunedCases are the kinds of calls with curves, each with its numbers of tokens.
func tunedCases(c config) (cases []moeCase) {
	for _, layout := range []dispatch.Layout{dispatch.RankPadded, dispatch.Slab, dispatch.TokenMajor} {
		low, tokens := layout != dispatch.TokenMajor, manyTokens
		if low {
			tokens = fewTokens
		}
		if len(c.EachTokens) > 0 {
			tokens = slices.Clone(c.EachTokens)
			slices.SortFunc(tokens, func(a, b int) int { return cmp.Compare(b, a) })
			tokens = slices.Compact(tokens)
		}
		for _, n := range tokens {
			if !low || n <= mostFew {
				cases = append(cases, newMoECase(moeShape{Tokens: n, Hidden: 7168, Experts: 256, TopK: 8}, layout, low, bf16))
			}
		}
	}
	return cases
}

// table leaves nothing to choose but one number of multiprocessors.
func (c *moeCase) table(ranks, sms int) *dispatch.Table {
	return &dispatch.Table{Device: "cuda", Curves: []dispatch.Curve{{
		LowLatency: c.o.LowLatency, ByExpert: !c.o.Layout.ByToken(), Ranks: ranks, SMs: sms, Tokens: []int64{int64(c.Tokens)}, Microseconds: []float64{1},
	}}}
}

// tuneDispatches times pairs of a dispatch and a combine in graphs, on each number of multiprocessors.
func tuneDispatches(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	r, err := newMoERig(ctx, g)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	sms := slices.DeleteFunc(slices.Compact(slices.Sorted(slices.Values(c.EachSMs))), func(n int) bool { return n > r.all })
	if len(sms) == 0 {
		return nil, fmt.Errorf("-sms: the GPU has %d multiprocessors", r.all)
	}
	for _, k := range tunedCases(c) {
		got, err := r.tune(ctx, c, &k, sms)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", k.name(), err)
		}
		rows = append(rows, got...)
	}
	if g.Rank() != 0 {
		return nil, nil
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(a.MoE.Tokens, b.MoE.Tokens) })
	return rows, nil
}

// tunedRun is a case with one number of multiprocessors.
type tunedRun struct {
	*moeRun
	graph *device.Graph
	last  *dispatch.Handle // of the graph's last pair
	times timer
}

// tune times a case with each number of multiprocessors, in alternation.
func (r *moeRig) tune(ctx context.Context, c config, k *moeCase, sms []int) (rows []row, err error) {
	var runs []*tunedRun
	defer func() {
		for _, x := range slices.Backward(runs) { // the first has the input of all
			err = errors.Join(err, x.close(ctx))
		}
	}()
	for _, n := range sms {
		var x *moeRun
		if table := k.table(r.g.Size(), n); len(runs) == 0 {
			first := *k
			first.o.Table = table
			x, err = r.open(ctx, &first)
		} else {
			x, err = runs[0].again(ctx, table)
		}
		if err != nil {
			return nil, err
		}
		own := *k
		own.sms, x.k = n, &own
		runs = append(runs, &tunedRun{moeRun: x})
		if err := x.warm(false); err != nil {
			return nil, err
		}
	}
	samples, calls := 5, k.callsPerGraph()
	if c.Iters > 0 {
		samples = c.Iters
	}
	for _, x := range runs {
		if x.graph, err = r.s.Capture(func() error { x.last, err = x.calls("pair", calls, nil); return err }); err != nil {
			return nil, err
		}
	}
	for range tunedRounds {
		for _, x := range runs {
			t, err := timeOnGPU(ctx, r.g, r.dev, r.s, samples, calls, x.launch)
			if err != nil {
				return nil, err
			}
			x.times.us = append(x.times.us, t.us...)
		}
	}
	for _, x := range runs {
		if err := errors.Join(x.poison(ctx), x.launch(), x.check("pair", x.last)); err != nil {
			return nil, fmt.Errorf("%d multiprocessors: %w", x.k.sms, err)
		}
		us, err := x.times.merge(ctx, r.g)
		if err != nil {
			return nil, err
		}
		line := x.row(c, "pair", "graph", us)
		line.SMs = x.k.sms
		rows = append(rows, line)
	}
	return rows, nil
}

func (x *tunedRun) launch() error { return x.graph.Launch(x.s) }

func (x *tunedRun) close(ctx context.Context) (err error) {
	if x.graph != nil {
		err = x.graph.Close()
	}
	return errors.Join(err, x.moeRun.close(ctx))
}

// dispatchTable makes curves of rows.
func dispatchTable(rows []row, origin string) *dispatch.Table {
	t := &dispatch.Table{Origin: origin, Device: rows[0].Device}
	for _, r := range rows {
		low, byExpert := r.MoE.LowLatency, r.MoE.Layout == dispatch.Slab.String()
		i := slices.IndexFunc(t.Curves, func(c dispatch.Curve) bool {
			return c.LowLatency == low && c.ByExpert == byExpert && c.Ranks == r.Ranks && c.SMs == r.SMs
		})
		if i < 0 {
			i = len(t.Curves)
			t.Curves = append(t.Curves, dispatch.Curve{LowLatency: low, ByExpert: byExpert, Ranks: r.Ranks, SMs: r.SMs})
		}
		t.Curves[i].Tokens = append(t.Curves[i].Tokens, int64(r.MoE.Tokens))
		t.Curves[i].Microseconds = append(t.Curves[i].Microseconds, hundredths(r.US))
	}
	return t
}
