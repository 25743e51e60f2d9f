package comm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// requireSurvivors shrinks gs and checks that the new groups work and have
// the given members.
func requireSurvivors(t *testing.T, gs []*Group, want ...int) []*Group {
	t.Helper()
	out := make([]*Group, len(gs))
	requireAll(t, onEach(gs, func(g *Group) error {
		s, err := g.Shrink(testContext(t))
		if err != nil {
			return err
		}
		if s.Size() != len(want) || want[s.Rank()] != g.Rank() {
			return fmt.Errorf("%s has become %s", g, s)
		}
		for i, o := range gs {
			if o == g {
				out[i] = s
			}
		}
		for range 3 {
			if err := s.Barrier(testContext(t)); err != nil {
				return err
			}
		}
		return nil
	}))
	t.Cleanup(func() {
		for _, g := range out {
			g.Close()
		}
	})
	return out
}

func TestF2_ShrinkAfterLoss(t *testing.T) {
	onOneHost(t, 4, func(t *testing.T, gs []*Group) {
		gs[1].Kill()
		rest := []*Group{gs[0], gs[2], gs[3]}
		next := requireSurvivors(t, rest, 0, 2, 3)
		require.Equal(t, "world/survivors", next[0].Name())
		_, err := gs[1].Shrink(testContext(t))
		require.Error(t, err)
		_, err = gs[0].Shrink(testContext(t))
		require.ErrorIs(t, err, ErrClosed)
		// And again, after the old one is closed.
		for _, g := range rest {
			g.Close()
		}
		next[2].Kill()
		requireSurvivors(t, next[:2], 0, 1)
	})
}

func TestF2_ShrinkAfterAbort(t *testing.T) {
	onOneHost(t, 4, func(t *testing.T, gs []*Group) {
		gs[0].Abort(errors.New("had enough"))
		gs[3].Abort(errors.New("me too")) // counts only if the first was not known yet
		gs[2].Close()
		_, err := gs[0].Shrink(testContext(t))
		require.ErrorIs(t, err, ErrAborted)
		require.ErrorContains(t, err, "not among the survivors")
		waitDone(t, gs[1])
		waitDone(t, gs[3])
		if pe := gs[3].Err().(*PeerError); pe.Rank == 3 {
			requireSurvivors(t, gs[1:2], 1)
			return
		}
		requireSurvivors(t, []*Group{gs[1], gs[3]}, 1, 3)
	})
}

func TestF2_ShrinkOfHealthyGroup(t *testing.T) {
	onOneHost(t, 3, func(t *testing.T, gs []*Group) {
		requireSurvivors(t, gs, 0, 1, 2)
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
	})
}

func TestF2_ShrinkCancelledAndRepeated(t *testing.T) {
	onOneHost(t, 3, func(t *testing.T, gs []*Group) {
		gs[2].Kill()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		waitDone(t, gs[0])
		_, err := gs[0].Shrink(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "waiting for ranks [1]")
		requireSurvivors(t, gs[:2], 0, 1)
	})
}

// Ranks die at random moments before and during Shrink. Those that live on
// must get the same members, or a group that has failed and shrinks again.
func TestF2_ShrinkWhileRanksDie(t *testing.T) {
	const size = 7
	for _, kind := range worldKinds[:3] { // on one host: of several a host leaves whole
		t.Run(kind.name, func(t *testing.T) {
			for seed := range uint64(15) {
				rng := rand.New(rand.NewPCG(seed, 1))
				gs := kind.start(t, size)
				doomed := map[int]time.Duration{}
				for _, r := range rng.Perm(size)[:1+rng.IntN(size-1)] {
					doomed[r] = time.Duration(rng.IntN(400)) * time.Microsecond
				}
				requireAll(t, onEach(gs, func(g *Group) error {
					if d, ok := doomed[g.Rank()]; ok {
						defer time.AfterFunc(d, g.Kill).Stop()
					}
					rank, old := g.Rank(), []*Group{}
					defer func() {
						for _, g := range old {
							g.Close()
						}
					}()
					for {
						old = append(old, g)
						all, err := g.AllGather(testContext(t), []byte{byte(rank)})
						if err == nil && len(all) == size-len(doomed) {
							for _, b := range all {
								if _, dead := doomed[int(b[0])]; dead {
									return fmt.Errorf("rank %d is dead", b[0])
								}
							}
							return nil
						}
						if err == nil {
							time.Sleep(50 * time.Microsecond)
							continue
						}
						if g, err = g.Shrink(testContext(t)); err != nil {
							if _, ok := doomed[rank]; ok {
								return nil
							}
							return fmt.Errorf("rank %d of seed %d: %w", rank, seed, err)
						}
					}
				}))
				for r := range doomed {
					gs[r].Kill()
				}
			}
		})
	}
}

// One survivor says who is left out, though that rank lives.
func TestF2_ShrinkLeavesOut(t *testing.T) {
	onOneHost(t, 4, func(t *testing.T, gs []*Group) {
		_, err := gs[1].Shrink(testContext(t), 1)
		require.ErrorContains(t, err, "cannot leave out rank 1")
		_, err = gs[1].Shrink(testContext(t), 4)
		require.ErrorContains(t, err, "cannot leave out rank 4")
		rest := []*Group{gs[0], gs[1], gs[3]}
		next := make([]*Group, 3)
		requireAll(t, onEach(rest, func(g *Group) (err error) {
			var leaveOut []int
			if g.Rank() == 1 {
				leaveOut = []int{2}
			}
			s, err := g.Shrink(testContext(t), leaveOut...)
			if err != nil {
				return err
			}
			next[s.Rank()] = s
			return s.Barrier(testContext(t))
		}))
		for _, g := range next {
			require.Equal(t, 3, g.Size())
			defer g.Close()
		}
		waitDone(t, gs[2])
		requirePeer(t, gs[2].Err(), 2, ErrPeerLost)
		_, err = gs[2].Shrink(testContext(t))
		require.ErrorIs(t, err, ErrPeerLost)
		for _, g := range rest {
			requirePeer(t, g.Err(), 2, ErrPeerLost)
		}
	})
}

// One that is left out of a group that has failed already learns that too.
func TestF2_ShrinkLeavesOutAfterALoss(t *testing.T) {
	onOneHost(t, 4, func(t *testing.T, gs []*Group) {
		gs[0].Kill()
		for _, g := range gs[1:] {
			waitDone(t, g)
		}
		next := make([]*Group, 2)
		requireAll(t, onEach(gs[1:3], func(g *Group) (err error) {
			s, err := g.Shrink(testContext(t), 3)
			if err != nil {
				return err
			}
			next[s.Rank()] = s
			return s.Barrier(testContext(t))
		}))
		for _, g := range next {
			require.Equal(t, 2, g.Size())
			defer g.Close()
		}
		_, err := gs[3].Shrink(testContext(t))
		require.ErrorIs(t, err, ErrPeerLost)
		require.ErrorContains(t, err, "not among the survivors")
	})
}

// A rank that is late is waited for: nobody has said that it is to be left out.
func TestF2_ShrinkWaitsForTheLate(t *testing.T) {
	onOneHost(t, 3, func(t *testing.T, gs []*Group) {
		gs[0].Kill()
		go func() {
			time.Sleep(200 * time.Millisecond)
			s, err := gs[2].Shrink(testContext(t))
			if err == nil {
				_ = s.Barrier(testContext(t))
				s.Close()
			}
		}()
		s, err := gs[1].Shrink(testContext(t))
		require.NoError(t, err)
		defer s.Close()
		require.Equal(t, 2, s.Size())
		require.NoError(t, s.Barrier(testContext(t)))
	})
}
