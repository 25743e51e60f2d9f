package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// What is checked beside the times on GPUs holds for the host device, which knows nothing of the model, and notices a single byte.
func TestMoEModel(t *testing.T) {
	for i, layout := range []dispatch.Layout{dispatch.RankPadded, dispatch.TokenMajor, dispatch.Flat, dispatch.Slab} {
		for j, types := range rowTypes {
			t.Run(fmt.Sprintf("%v/%s", layout, types.name), func(t *testing.T) {
				k := &moeCase{moeShape: moeShape{Tokens: 37, Hidden: 304, Experts: 7, TopK: 3, Zipf: true}, o: types.o}
				if (i+j)%2 == 0 {
					k.Zipf, k.MaxVio, k.Spares = false, 2, 2
				}
				k.o.Experts, k.o.TopK, k.o.Hidden, k.o.MaxTokens = k.Experts, k.TopK, k.Hidden, k.Tokens
				k.o.Layout, k.o.CombineDType, k.o.Handles, k.o.LowLatency = layout, kernels.BFloat16, 2, layout == dispatch.Slab
				groups, err := comm.Local(3)
				require.NoError(t, err)
				var eg errgroup.Group
				for _, g := range groups {
					eg.Go(func() (err error) {
						defer g.Close()
						defer func() {
							if err != nil {
								g.Abort(err)
							}
						}()
						h, err := memory.NewHeap(t.Context(), g, device.Host(), memory.Options{SegmentBytes: 64 << 20})
						if err != nil {
							return err
						}
						defer h.Close(t.Context())
						x, err := (&moeRig{g: g, h: h}).open(t.Context(), k)
						if err != nil {
							return err
						}
						if err := x.warm(true); err != nil {
							return err
						}
						hd, err := x.calls("pair", 1, nil)
						if err != nil {
							return err
						}
						x.y.Bytes()[len(x.y.Bytes())-1] ^= 1
						if err := x.check("combine", hd); err == nil {
							return fmt.Errorf("a wrong sum was not noticed")
						}
						last := x.m.rows[g.Rank()][len(x.m.rows[g.Rank()])-1]
						size := len(hd.Rows().Bytes()) / x.d.MaxRows()
						hd.Rows().Bytes()[(int(last.row)+1)*size-1] ^= 1
						if err := x.check("dispatch", hd); err == nil {
							return fmt.Errorf("a wrong row was not noticed")
						}
						return x.close(t.Context())
					})
				}
				require.NoError(t, eg.Wait())
			})
		}
	}
}

// The bytes of the table's largest case are those that the floor in the design is made of.
func TestMoEBytesOverTheLink(t *testing.T) {
	c := moeCases(false)[0]
	m, err := newMoEModel(c.moeShape, 2, c.o)
	require.NoError(t, err)
	link, all := m.busiest()
	require.InDelta(t, 4080, link, 20) // of 4096 tokens nearly each goes to the other rank
	require.InDelta(t, 2*4080, all, 40)
}

// Popularities are as skewed as was asked for, and copies of busy experts make ranks equally busy.
func TestMoESkew(t *testing.T) {
	for _, maxVio := range []float64{.2, 1, 4} {
		p := lognormal(rand.New(rand.NewPCG(1, 2)), 64, maxVio)
		sum := 0.0
		for _, v := range p {
			sum += v
		}
		require.InDelta(t, 1+maxVio, slices.Max(p)*64/sum, 1e-6)
	}
	rows := func(spares int) (most, all int) {
		m, err := newMoEModel(moeShape{Tokens: 500, Hidden: 16, Experts: 16, TopK: 2, MaxVio: 4, Spares: spares}, 4,
			dispatch.Options{DType: kernels.BFloat16, Layout: dispatch.Flat})
		require.NoError(t, err)
		for _, r := range m.rows {
			most, all = max(most, len(r)), all+len(r)
		}
		return most, all
	}
	for _, spares := range []int{0, 2} {
		most, all := rows(spares)
		require.Equal(t, 4*500*2, all)
		require.Equal(t, spares > 0, most < all/4*11/10, "the busiest rank of 4 has %d of %d rows, with %d copies", most, all, spares)
	}
}

// A list of multiprocessors takes the place of each case's own, and no case runs twice.
func TestCasesWithEachNumberOfMultiprocessors(t *testing.T) {
	names := func(c config) (names []string) {
		cases, err := casesOf(c)
		require.NoError(t, err)
		for _, k := range cases {
			names = append(names, k.name())
		}
		return names
	}
	const flat = "throughput, bf16, flat, 4096 tokens, hidden 7168, top-8 of 256 uniform, "
	require.Equal(t, []string{flat + "default SMs", flat + "all SMs"}, names(config{Only: "bf16, flat"}))
	require.Equal(t, []string{flat + "4 SMs", flat + "default SMs"}, names(config{Only: "bf16, flat", EachSMs: []int{4, 0}}))
	_, err := casesOf(config{Only: "("})
	require.Error(t, err)
}
