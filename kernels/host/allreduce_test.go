package host_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
	"github.com/switchyard-moe/switchyard/test/explore"
)

// reduceCall is one call of a reduction, in which rank r's slice has counts[r] bytes.
type reduceCall struct {
	coll   kernels.Collective
	alg    kernels.ReduceAlgorithm
	counts []int64
	// places says by rank where the source and the destination are: 's' symmetric or 'f' foreign, twice, or "in" for one
	// symmetric buffer and "fn" for one foreign buffer.
	places []string
	// odd, where set, is the rank that has one element more than the others think.
	odd int
}

// reduceRig runs the reduction kernel under schedules of its own choice, on a heap that is a piece of Go memory.
type reduceRig struct {
	*segments
	c       host.ReduceBlock
	calls   []reduceCall
	foreign [][]byte // of each rank, two areas as in the segment
	// point, when set, runs at every point of a rank. It is where tests put bugs in.
	point func(rank int, what string)
}

const area = 64 // bytes of a rank's source, and of its destination

func newReduceRig(n int, calls ...reduceCall) *reduceRig {
	g := &reduceRig{calls: calls, c: host.ReduceBlock{Offset: kernels.HeaderBytes,
		ReduceBounds: &kernels.ReduceBounds{Size: n, OneShotBytes: area, Slots: 2, SlotBytes: 4}}}
	g.segments = newSegments(n, g.area(2), g.c.ReduceBounds)
	for range n {
		g.foreign = append(g.foreign, make([]byte, 2*area))
	}
	return g
}

// area is where area k of a segment begins.
func (g *reduceRig) area(k int64) int64 {
	return (g.c.Offset+g.c.Bytes()+kernels.LineBytes-1)/kernels.LineBytes*kernels.LineBytes + k*area
}

// buffer is n bytes of an area of a rank, and its place in the segment or -1.
func (g *reduceRig) buffer(rank int, k int64, symmetric bool, n int64) kernels.Buffer {
	if !symmetric {
		return buffer(g.foreign[rank][k*area:][:n], -1)
	}
	return buffer(g.at(rank, g.area(k), n), g.area(k))
}

// poison fills the buffers of a rank outside of its calls.
func (g *reduceRig) poison(rank int) {
	fill(g.at(rank, g.area(0), 2*area), poisoned)
	fill(g.foreign[rank], poisoned)
}

func (g *reduceRig) untouched(rank int) error {
	for _, b := range [][]byte{g.at(rank, g.area(0), 2*area), g.foreign[rank]} {
		for i, v := range b {
			if v != poisoned {
				return fmt.Errorf("%w: byte %d of rank %d is %d", explore.ErrLate, i, rank, v)
			}
		}
	}
	return nil
}

// input is what a rank has at element i.
func input(call, rank int, i int64) byte { return byte(1 + (int64(call*5+rank*11)+i*3)%40) }

// one is a call of a rank, numbered from 1.
func (g *reduceRig) one(rank, call int, turn explore.Turn) error {
	n, number, c := g.c.Size, call-1, &g.calls[call-1]
	if err := g.untouched(rank); err != nil {
		return err
	}
	a := kernels.Reduction{Family: g.c.ReduceBounds, Call: kernels.ReduceCall{Collective: c.coll, DType: kernels.Uint8}, Algorithm: c.alg,
		Bounds: []int64{0}, Launched: kernels.Launched{Timeout: time.Minute}}
	for p, k := range c.counts {
		if p == rank && c.odd == rank {
			k++
		}
		a.Bounds = append(a.Bounds, a.Bounds[p]+k)
	}
	a.Call.Count = a.Bounds[n]
	at, mine := a.Slice(rank)
	whole := a.Call.Count
	var want []byte
	reduced := func(i int64) (v byte) {
		for p := range n {
			v += input(number, p, i)
		}
		return v
	}
	in, out := whole, whole
	switch c.coll {
	case kernels.ReduceScatter:
		out = mine
		for i := range mine {
			want = append(want, reduced(at+i))
		}
	case kernels.AllGather:
		in = mine
		for p := range n {
			for i := a.Bounds[p]; i < a.Bounds[p+1]; i++ {
				want = append(want, input(number, p, i))
			}
		}
	default:
		for i := range whole {
			want = append(want, reduced(i))
		}
	}
	switch place := c.places[rank]; place {
	case "in", "fn":
		a.Src = g.buffer(rank, 0, place == "in", whole)
		a.Dst = a.Src
		if c.coll != kernels.AllReduce {
			part := buffer(a.Src.Mem[at:at+mine], -1)
			if a.Src.Reach {
				part = buffer(part.Mem, a.Src.Place+at)
			}
			if c.coll == kernels.AllGather {
				a.Src = part
			} else {
				a.Dst = part
			}
		}
	default:
		a.Src = g.buffer(rank, 0, place[0] == 's', in)
		a.Dst = g.buffer(rank, 1, place[1] == 's', out)
	}
	first := int64(0)
	if c.coll == kernels.AllGather {
		first = at
	}
	for i := range in {
		a.Src.Mem[i] = input(number, rank, first+i)
	}
	err := g.ports[rank].Launch(nil, &a)
	if c.odd >= 0 {
		var m *kernels.CallMismatchError
		if !errors.As(err, &m) || (m.Peer == c.odd) == (rank == c.odd) {
			return fmt.Errorf("the disagreement became: %w", err)
		}
		g.poison(rank)
		return nil
	}
	if err != nil {
		return err
	}
	if places := c.places[rank]; places != "in" && places != "fn" {
		fill(a.Src.Mem, spoiled)
	}
	if err := turn(fmt.Sprintf("looks at the output of call %d", call), false); err != nil {
		return err
	}
	if !slices.Equal(a.Dst.Mem, want) {
		return fmt.Errorf("%w: %d, want %d", explore.ErrData, a.Dst.Mem, want)
	}
	g.poison(rank)
	return nil
}

// start is a fresh run, for explore.Schedules.
func (g *reduceRig) start() explore.Program {
	c := calls{segments: g.segments, times: len(g.calls), one: g.one, point: g.point}
	p := c.start()
	for r := range g.engines {
		g.poison(r)
	}
	p.End = func() error {
		for r := range g.engines {
			if err := g.untouched(r); err != nil {
				return err
			}
		}
		return nil
	}
	return p
}

func TestExploreReductions(t *testing.T) {
	const all = kernels.AllReduce
	two, three := []int64{9, 9}, []int64{7, 5, 6}
	call := func(coll kernels.Collective, alg kernels.ReduceAlgorithm, counts []int64, places ...string) reduceCall {
		return reduceCall{coll, alg, counts, places, -1}
	}
	thrice := func(c reduceCall) []reduceCall { return []reduceCall{c, c, c} }
	for name, v := range map[string]struct {
		calls []reduceCall
		s     explore.Schedules
	}{
		"2/one-shot":          {thrice(call(all, kernels.OneShot, two, "ff", "ss")), budget(3, 300)},
		"2/two-shot/staged":   {thrice(call(all, kernels.TwoShot, two, "ff", "fn")), budget(2, 300)},
		"2/two-shot/in place": {thrice(call(all, kernels.TwoShot, two, "in", "in")), budget(2, 300)},
		"2/two-shot/mixed":    {thrice(call(all, kernels.TwoShot, two, "sf", "fs")), budget(2, 300)},
		"2/ring":              {thrice(call(all, kernels.Ring, two, "fn", "in")), budget(2, 300)},
		"2/zero":              {thrice(call(all, kernels.TwoShot, []int64{0, 0}, "ff", "in")), budget(3, 300)},
		"2/algorithms": {[]reduceCall{call(all, kernels.TwoShot, two, "ff", "sf"), call(all, kernels.OneShot, []int64{1, 0}, "in", "fn"),
			call(all, kernels.Ring, []int64{6, 5}, "in", "ff"), call(all, kernels.TwoShot, two, "ff", "ss")}, budget(2, 500)},
		"3/one-shot":       {thrice(call(all, kernels.OneShot, three, "ff", "ss", "in")), budget(2, 300)},
		"3/two-shot":       {thrice(call(all, kernels.TwoShot, three, "fn", "sf", "in")), budget(1, 500)},
		"3/ring":           {thrice(call(all, kernels.Ring, three, "fn", "sf", "in")), budget(1, 500)},
		"3/one side empty": {thrice(call(all, kernels.TwoShot, []int64{0, 12, 0}, "ff", "sf", "fs")), budget(1, 500)},
		"3/halves": {[]reduceCall{call(kernels.ReduceScatter, kernels.TwoShot, three, "ff", "ss", "in"),
			call(kernels.AllGather, kernels.TwoShot, three, "sf", "fs", "in"), call(kernels.ReduceScatter, kernels.OneShot, three, "fn", "sf", "in"),
			call(kernels.AllGather, kernels.Ring, three, "in", "ff", "fn"), call(kernels.ReduceScatter, kernels.Ring, three, "in", "ff", "fn"),
			call(kernels.AllGather, kernels.OneShot, three, "in", "ff", "ss")}, budget(1, 500)},
	} {
		t.Run(name, func(t *testing.T) { holds(t, newReduceRig(len(v.calls[0].counts), v.calls...), v.s) })
	}
}

// A rank with another count is known to all, whatever algorithm its count has made it choose, and the calls after are right.
func TestExploreReductionMismatch(t *testing.T) {
	for _, alg := range kernels.ReduceAlgorithms() {
		for _, then := range kernels.ReduceAlgorithms() {
			t.Run(fmt.Sprintf("%v then %v", alg, then), func(t *testing.T) {
				places := []string{"ff", "in", "sf"}
				ok := reduceCall{kernels.AllReduce, then, []int64{7, 5, 6}, places, -1}
				odd := reduceCall{kernels.AllReduce, alg, []int64{7, 5, 6}, places, 1}
				holds(t, newReduceRig(3, ok, odd, ok, odd, ok), budget(1, 200))
			})
		}
	}
}

// What shows that the exploration sees anything: ranks that say too early that data may be read or written.
func TestExploreFindsEarlyReductionSignals(t *testing.T) {
	taking := func(rank int) string { return fmt.Sprintf("takes data of rank %d", rank) }
	for name, v := range map[string]struct {
		alg   kernels.ReduceAlgorithm
		ranks int
		bug   func(g *reduceRig, rank, next, prev int, what string)
	}{
		"two-shot offers before it pushes": {kernels.TwoShot, 2, func(g *reduceRig, rank, next, _ int, what string) {
			if what == fmt.Sprintf("puts data to rank %d", next) {
				g.early(next, g.c.Entry(g.epoch(rank), rank), g.epoch(rank))
			}
		}},
		"two-shot tells before it reduces": {kernels.TwoShot, 2, func(g *reduceRig, rank, next, _ int, what string) {
			if what == taking(rank) {
				g.early(next, g.c.Progress(rank), g.epoch(rank))
			}
		}},
		"ring sends before it has reduced": {kernels.Ring, 3, func(g *reduceRig, rank, next, _ int, what string) {
			if what == taking(rank) {
				g.early(next, g.c.Entry(g.epoch(rank), rank), g.epoch(rank))
			}
		}},
		"ring empties a slot before it has read it": {kernels.Ring, 3, func(g *reduceRig, rank, _, prev int, what string) {
			if what == taking(rank) {
				g.early(prev, g.c.Progress(rank), g.epoch(rank))
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			c := reduceCall{coll: kernels.AllReduce, alg: v.alg, odd: -1}
			for range v.ranks {
				c.counts, c.places = append(c.counts, 9), append(c.places, "ff")
			}
			g := newReduceRig(v.ranks, c, c)
			g.point = func(rank int, what string) { v.bug(g, rank, (rank+1)%v.ranks, (rank+v.ranks-1)%v.ranks, what) }
			found(t, g, explore.Schedules{Deviations: 2, Random: 500, Seed: 1}, nil)
		})
	}
}

func (g *reduceRig) epoch(rank int) uint64 { return *g.word(rank, g.c.Epoch()) }

// early raises a line at a rank by one, if the line belongs to the call already.
func (g *reduceRig) early(at int, line int64, epoch uint64) {
	w := g.word(at, line)
	*w = max(*w, kernels.Seq(epoch, 0)) + 1
}

// The heap is Go memory here and the slices are shorter than a vector, so the race detector sees every access: a signal
// that did not order the data before it would be a race.
func TestX4_ReductionsReleaseTheirData(t *testing.T) {
	for _, alg := range kernels.ReduceAlgorithms() {
		t.Run(alg.String(), func(t *testing.T) {
			var calls []reduceCall
			for i := range 50 {
				coll := []kernels.Collective{kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather}[i%3]
				calls = append(calls, reduceCall{coll, alg, []int64{7, 5, 6}, []string{"ff", "ss", []string{"in", "sf", "fn"}[i%2]}, -1})
			}
			g := newReduceRig(3, calls...)
			p := g.start()
			errs := make(chan error, len(p.Ranks))
			for r := range p.Ranks {
				go func() {
					var err error
					for call := 1; call <= len(calls) && err == nil; call++ {
						err = g.one(r, call, func(string, bool) error { return nil })
					}
					errs <- err
				}()
			}
			for range p.Ranks {
				require.NoError(t, <-errs)
			}
		})
	}
}
