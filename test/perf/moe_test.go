package main

import (
	"fmt"
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
	for _, layout := range []dispatch.Layout{dispatch.RankPadded, dispatch.TokenMajor, dispatch.Flat, dispatch.Slab} {
		for _, types := range rowTypes {
			t.Run(fmt.Sprintf("%v/%s", layout, types.name), func(t *testing.T) {
				k := &moeCase{moeShape: moeShape{Tokens: 37, Hidden: 304, Experts: 7, TopK: 3, Zipf: true}, o: types.o}
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
						if err := x.warm(); err != nil {
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
	m := newMoEModel(c.moeShape, 2, c.o)
	link, all := m.busiest()
	require.InDelta(t, 4080, link, 20) // of 4096 tokens nearly each goes to the other rank
	require.InDelta(t, 2*4080, all, 40)
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
