package dispatch_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// keep is the routing of the side's dispatch in memory of its own.
func (s *side) keep(st device.Stream) *dispatch.Routing {
	n := s.d.RoutingBytes()
	room := s.r.up(make([]byte, n+kernels.LineBytes))
	from := -int64(room.Ptr()) & (kernels.LineBytes - 1)
	kept, err := s.h.Keep(st, room.Slice(from, n))
	require.NoError(s.r, err)
	require.Equal(s.r, s.h.Tokens(), kept.Tokens())
	require.Equal(s.r, s.h.LocalExperts(), kept.LocalExperts())
	return kept
}

// reroute has the side go on by a routing that it keeps, without its output.
func (s *side) reroute(st device.Stream) {
	kept := s.keep(st)
	s.h.Release()
	var err error
	s.h, err = s.d.Route(kept)
	require.NoError(s.r, err)
}

// Sixty-four routings of a dispatcher with two outputs, in any order, twice, after their rows are gone. One rank
// wipes each when it is done with it.
func TestRoutingsOutliveTheirRows(t *testing.T) {
	const n, alive = 3, 64
	for _, layout := range layouts {
		t.Run(layout.String(), func(t *testing.T) {
			local(t, n, func(r *rank) {
				o := dispatch.Options{Experts: 7, TopK: 3, Hidden: 32, MaxTokens: 9, Layout: layout, Handles: 2, HostCounts: true}
				d := r.dispatcher(o)
				rng := rand.New(rand.NewPCG(5, 5))
				sides, kept := make([]*side, alive), make([]*dispatch.Routing, alive)
				for i := range sides {
					sides[i] = &side{r: r, d: d, b: randomBatch(rng, o, n, i%5 == 0), halves: i%3 == 0}
					sides[i].dispatch(nil)
					sides[i].checkRows()
					kept[i] = sides[i].keep(nil)
					sides[i].h.Release()
				}
				for round := range 2 {
					for _, i := range rng.Perm(alive) {
						s := sides[i]
						var err error
						s.h, err = d.Route(kept[i])
						require.NoError(r, err)
						_, err = s.h.HostCounts(t.Context())
						require.ErrorIs(r, err, dispatch.ErrInvalid)
						require.Zero(r, s.h.Sources().Len()+s.h.Indices().Len()+s.h.Weights().Len())
						s.combine(nil, s.view(s.ownMade()), combineWith{biases: i % 3})
						if i%4 == 0 {
							s.reroute(nil)
						}
						s.dispatchBackward(nil, s.view(s.made(func(q routed) []float32 { return s.b.dMade(s.me(), q) })), false)
						s.h.Release()
						if round == 1 && r.Group.Rank() == 1 {
							clear(kept[i].Memory().Bytes())
						}
					}
				}
				require.NoError(r, d.Close(r.Ctx))
			})
		})
	}
}

// New rows along a kept routing come into an output of their own.
func TestRedispatchByAKeptRouting(t *testing.T) {
	local(t, 2, func(r *rank) {
		o := dispatch.Options{Experts: 4, TopK: 2, Hidden: 8, MaxTokens: 5, Layout: dispatch.Flat, Handles: 2}
		d := r.dispatcher(o)
		rng := rand.New(rand.NewPCG(6, 6))
		s := &side{r: r, d: d, b: randomBatch(rng, o, 2, false)}
		s.dispatch(nil)
		want := append([]byte(nil), s.h.Rows().Bytes()...)
		offsets := memory.Of[int32](s.h.Offsets())
		used := int64(offsets[len(offsets)-1]) * int64(o.Hidden) * 4
		kept, x := s.keep(nil), s.tokens().X
		h, err := d.Route(kept)
		require.NoError(r, err)
		require.NotEqual(r, s.h.Rows().Ptr(), h.Rows().Ptr())
		clear(h.Rows().Bytes())
		require.NoError(r, d.Redispatch(nil, h, x, memory.View{}))
		require.Equal(r, want[:used], h.Rows().Bytes()[:used])
		h.Release()
		s.h.Release()
		require.NoError(r, d.Close(r.Ctx))
	})
}

func TestF3_RoutingsThatAreRefused(t *testing.T) {
	local(t, 1, func(r *rank) {
		o := dispatch.Options{Experts: 2, TopK: 1, Hidden: 4, MaxTokens: 3, Layout: dispatch.Padded, Capacity: 1}
		d, other := r.dispatcher(o), r.dispatcher(o)
		idx := []int32{0, 1}
		h, err := d.Dispatch(nil, r.tokens(numbers(make([]float32, 8)), idx, nil))
		require.NoError(r, err)
		n := d.RoutingBytes()
		_, err = h.Keep(nil, memory.Host(make([]byte, n-1)))
		require.ErrorIs(r, err, dispatch.ErrInvalid)
		require.ErrorContains(r, err, "routing has")
		s := &side{r: r, d: d, h: h}
		kept := s.keep(nil)
		_, err = other.Route(kept)
		require.ErrorContains(r, err, "of another dispatcher")
		_, err = d.Route(nil)
		require.ErrorIs(r, err, dispatch.ErrInvalid)
		h.Release()
		_, err = h.Keep(nil, kept.Memory())
		require.ErrorIs(r, err, dispatch.ErrReleased)

		// Memory that holds no routing is an error of the call, and the next call works.
		clear(kept.Memory().Bytes())
		h, err = d.Route(kept)
		require.NoError(r, err)
		y := numbers(make([]float32, 8))
		require.ErrorContains(r, d.Combine(nil, y, h.Rows(), h, plain), "the memory holds no routing of 2 tokens")
		h.Release()
		h, err = d.Dispatch(nil, r.tokens(numbers(make([]float32, 8)), idx, nil))
		require.NoError(r, err)
		h.Release()
		require.NoError(r, d.Close(r.Ctx))
		require.NoError(r, other.Close(r.Ctx))
	})
}
