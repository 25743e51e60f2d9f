package dispatch_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Random worlds: options, what each rank puts in, and the calls that all ranks make.

func randomFloats(rng *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(rng.NormFloat64())
	}
	return v
}

// randomBatch makes an input. skew sends everything to few experts.
func randomBatch(rng *rand.Rand, o dispatch.Options, n int, skew bool) *batch {
	tokens := make([]int, n)
	for r := range tokens {
		if rng.IntN(4) > 0 {
			tokens[r] = rng.IntN(o.MaxTokens + 1)
		}
	}
	return batchOf(rng, o, tokens, skew, rng.IntN(4) > 0)
}

// batchOf makes an input of that many tokens on each rank.
func batchOf(rng *rand.Rand, o dispatch.Options, counts []int, skew, weighted bool) *batch {
	if o.Layout != dispatch.Slab {
		o.Align = max(o.Align, 1)
	}
	if o.Layout == dispatch.Padded && o.Capacity == 0 {
		o.Capacity = len(counts) * o.MaxTokens
	}
	b := &batch{o: o, n: len(counts)}
	for _, tokens := range counts {
		var idx []int64
		for range tokens {
			choices := make([]int, o.TopK)
			for k, e := range rng.Perm(max(o.Experts, o.TopK))[:o.TopK] {
				choices[k] = e % o.Experts
			}
			if o.TopK > 1 && rng.IntN(6) == 0 && (o.Layout == dispatch.Flat || b.byToken()) {
				choices[rng.IntN(o.TopK)] = choices[0] // twice
			}
			if skew {
				slices.Sort(choices)
				choices[0] = 0
			}
			for k, e := range choices {
				if rng.IntN(5) == 0 || (o.Layout == dispatch.Padded || o.Layout == dispatch.Slab) && slices.Contains(choices[:k], e) {
					e = -1
				}
				idx = append(idx, int64(e))
			}
		}
		b.idx = append(b.idx, idx)
		if weighted {
			b.weights = append(b.weights, randomFloats(rng, len(idx)))
		} else {
			b.weights = append(b.weights, nil)
		}
		x := randomFloats(rng, tokens*o.Hidden)
		for i := range x {
			if i%7 == 0 {
				x[i] *= 100
			}
		}
		var scales []uint32
		if b.dtype() == kernels.Float8E4M3 {
			var all []float32
			for t := range tokens {
				q, words := quantize(x[t*o.Hidden:(t+1)*o.Hidden], b.block(), o.ScaleFormat)
				all, scales = append(all, q...), append(scales, words...)
			}
			x = all
		}
		b.x, b.scales = append(b.x, round(b.dtype(), x)), append(b.scales, scales)
		b.dy = append(b.dy, round(b.sumType(), randomFloats(rng, tokens*o.Hidden)))
		b.given = append(b.given, randomFloats(rng, len(idx)))
		for i := range b.bias {
			b.bias[i] = append(b.bias[i], round(b.sumType(), randomFloats(rng, tokens*o.Hidden)))
		}
	}
	return b
}

var layouts = []dispatch.Layout{dispatch.Flat, dispatch.Padded, dispatch.Slab, dispatch.TokenMajor, dispatch.RankPadded}

// randomOptions draws a dispatcher for n ranks of a device.
func randomOptions(rng *rand.Rand, n int, kind device.Kind) dispatch.Options {
	for {
		if o := anyOptions(rng, n); kind == device.HostKind || forGPUs(rng, &o) {
			return o
		}
	}
}

func anyOptions(rng *rand.Rand, n int) dispatch.Options {
	wideTypes := []kernels.DType{kernels.Float32, kernels.BFloat16, kernels.Float16}
	o := dispatch.Options{
		Experts: 1 + rng.IntN(12), TopK: 1 + rng.IntN(5), Hidden: []int{1, 3, 8, 33, 64, 130, 300}[rng.IntN(7)], MaxTokens: 1 + rng.IntN(24),
		DType: wideTypes[rng.IntN(3)], Layout: layouts[rng.IntN(len(layouts))], Handles: 2, HostCounts: rng.IntN(2) == 0, LowLatency: rng.IntN(4) == 0,
	}
	if rng.IntN(2) == 0 {
		o.IndexType = kernels.Int64
	}
	switch rng.IntN(3) {
	case 0:
		o.DType = kernels.Float8E4M3
		o.CombineDType = wideTypes[rng.IntN(3)]
	case 1:
		o.Quantize = true
	}
	if o.Quantize || o.DType == kernels.Float8E4M3 {
		o.ScalePerToken, o.ScaleColumns = rng.IntN(4) == 0, rng.IntN(2) == 0
		o.ScaleFormat = dispatch.ScaleFormat(rng.IntN(3))
	} else if rng.IntN(4) == 0 {
		o.CombineDType = wideTypes[rng.IntN(3)]
	}
	o.Float8Combine, o.Sources, o.RowWeights = rng.IntN(4) == 0, rng.IntN(2) == 0, rng.IntN(2) == 0
	switch o.Layout {
	case dispatch.Flat:
		o.Align = []int{1, 2, 8, 16}[rng.IntN(4)]
	case dispatch.Slab:
		o.Align = []int{0, 1, 8, 64}[rng.IntN(4)]
	case dispatch.Padded:
		o.Capacity = n * o.MaxTokens
	}
	o.Landed = !o.Layout.ByToken() && rng.IntN(2) == 0
	switch rng.IntN(3) {
	case 0:
		o.Placement = dispatch.Contiguous(o.Experts, n)
	case 1: // anywhere
		o.Placement = &dispatch.Placement{}
		for range o.Experts {
			o.Placement.Ranks = append(o.Placement.Ranks, []int{rng.IntN(n)})
		}
	default: // some experts more than once
		o.Placement = &dispatch.Placement{}
		for range o.Experts {
			o.Placement.Ranks = append(o.Placement.Ranks, rng.Perm(n)[:1+rng.IntN(n)])
		}
	}
	return o
}

// randomWorlds runs dispatchers drawn from the seeds [seed, seed+count) on the ranks of r's group.
func randomWorlds(r *rank, seed uint64, count int) {
	stream := r.stream()
	for i := range uint64(count) {
		rng := rand.New(rand.NewPCG(seed+i, 0))
		o := randomOptions(rng, r.Group.Size(), r.Device.Kind())
		require.NoError(r, r.Group.Barrier(r.Ctx))
		randomWorld(r, o, rng, rand.New(rand.NewPCG(seed+i, uint64(r.Group.Rank())+100)), stream)
	}
	require.NoError(r, stream.Close())
}

// randomWorld runs a dispatcher with random inputs and calls. rng is the same on all ranks, own is this rank's.
func randomWorld(r *rank, o dispatch.Options, rng, own *rand.Rand, stream device.Stream) {
	n := r.Group.Size()
	d, err := dispatch.New(r.Ctx, r.Heap, o)
	require.NoError(r, err, "%+v", o)
	size := int64(d.MaxRows()) * int64(o.Hidden) * (&batch{o: o}).sumType().Size()
	var symmetric [2]*memory.Buffer
	for i := range symmetric {
		symmetric[i], err = r.Heap.Alloc(size)
		if err != nil {
			require.NoError(r, r.Heap.Grow(r.Ctx, size))
			symmetric[i], err = r.Heap.Alloc(size)
		}
		require.NoError(r, err)
	}
	place := func(s *side, which int, rows []float32) memory.View {
		b := narrow(s.b.sumType(), rows)
		v := symmetric[which].View()
		switch own.IntN(3) {
		case 0:
			return s.r.up(b)
		case 1:
			if which == 0 && s.h.Rows().Len() >= int64(len(b)) {
				v = s.h.Rows()
			}
		}
		v = v.Slice(0, int64(len(b)))
		s.r.write(v, b)
		return v
	}
	releases := own // ranks may release in different orders,
	if r.gpu != nil {
		releases = rng // where the device does not mind
	}
	for round := range 3 {
		if r.gpu != nil {
			r.gpu.reuse()
		}
		if round == 2 && o.Placement != nil { // as many experts on each rank, but others
			o.Placement = &dispatch.Placement{Ranks: slices.Clone(o.Placement.Ranks)}
			slices.Reverse(o.Placement.Ranks)
			require.NoError(r, d.SetPlacement(r.Ctx, o.Placement))
		}
		var st device.Stream
		if own.IntN(2) == 0 {
			st = stream
		}
		sides := make([]*side, 2)
		halves := rng.IntN(2) == 0
		for i := range sides {
			sides[i] = &side{r: r, d: d, b: randomBatch(rng, o, n, round == 1), halves: halves}
			sides[i].b.hosts = hostsOf(r)
			sides[i].dispatch(st)
		}
		if rng.IntN(2) == 0 {
			slices.Reverse(sides)
		}
		for _, s := range sides {
			s.checkRows()
			if rng.IntN(3) == 0 {
				next := *s.b
				other := randomBatch(rng, o, n, false)
				for src := range next.x {
					next.x[src] = append(other.x[src], next.x[src]...)[:len(next.x[src])]
					next.scales[src] = append(other.scales[src], next.scales[src]...)[:len(next.scales[src])]
				}
				s.redispatch(st, &next)
				s.checkRows()
			}
			if own.IntN(3) == 0 {
				_, came := s.place(s.b.groups(s.me()))
				s.checkCopy(st, own.IntN(came+3))
			}
			if rng.IntN(3) == 0 {
				s.reroute(st)
			}
			c := combineWith{weighting: dispatch.Weighting(rng.IntN(3)), sums: rng.IntN(3) == 0, ready: rng.IntN(4) == 0, biases: rng.IntN(3)}
			if s.b.byToken() {
				c.weighting = 0
			}
			rows := s.ownMade()
			view := place(s, 0, rows)
			s.combine(st, view, c)
			if !s.b.byToken() && rng.IntN(2) == 0 {
				late := c
				late.weighting = dispatch.TokenWeights
				s.combine(st, view, late)
			}
			dRows := place(s, 1, rows)
			if own.IntN(4) == 0 {
				dRows = view
			}
			s.combineBackward(st, dRows, view, c)
			s.dispatchBackward(st, place(s, 0, s.made(func(q routed) []float32 { return s.b.dMade(s.me(), q) })), rng.IntN(2) == 0)
		}
		if releases.IntN(2) == 0 {
			slices.Reverse(sides)
		}
		for _, s := range sides {
			s.h.Release()
		}
	}
	require.NoError(r, d.Close(r.Ctx))
	for _, b := range symmetric {
		require.NoError(r, b.Free())
	}
}

func TestRandomWorlds(t *testing.T) {
	for n := 1; n <= 9; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			local(t, n, func(r *rank) { randomWorlds(r, uint64(1000*n), 8) })
		})
	}
}

func TestRandomWorldsAcrossProcesses(t *testing.T) {
	processes(t, 3, func(r *rank) { randomWorlds(r, 1, 6) })
}
