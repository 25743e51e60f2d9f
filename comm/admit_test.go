package comm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A group loses a rank, shrinks, and grows again; then once more by two at a time.
func TestF2_AdmitReplacesALostRank(t *testing.T) {
	onOneHost(t, 4, func(t *testing.T, gs []*Group) {
		cfg := Config{Addr: freeName(t), Secret: []byte("sesame"), Name: "workers"}
		gs[1].Kill()
		rest := requireSurvivors(t, []*Group{gs[0], gs[2], gs[3]}, 0, 2, 3)
		late := cfg
		late.Late = true
		var wg sync.WaitGroup
		fresh := make([]*Group, 3)
		join := func(i int) {
			wg.Go(func() {
				var err error
				fresh[i], err = Join(testContext(t), late)
				require.NoError(t, err)
			})
		}
		admit := func(gs []*Group, n int) []*Group {
			t.Helper()
			out := make([]*Group, len(gs))
			requireAll(t, onEach(gs, func(g *Group) (err error) {
				out[g.Rank()], err = g.Admit(testContext(t), n, cfg)
				return err
			}))
			return out
		}
		join(0) // before the others are there
		time.Sleep(20 * time.Millisecond)
		all := admit(rest, 1)
		wg.Wait()
		all = append(all, fresh[0])
		for r, g := range all {
			require.Equal(t, "workers", g.Name())
			require.Equal(t, r, g.Rank())
			require.Equal(t, 4, g.Size())
		}
		requireAll(t, onEach(all, func(g *Group) error { return g.Barrier(testContext(t)) }))
		requireAll(t, onEach(rest, func(g *Group) error { return g.Barrier(testContext(t)) })) // that lives too
		for _, g := range rest {
			g.Close()
		}
		join(1)
		join(2)
		six := admit(all, 2)
		wg.Wait()
		six = append(six, fresh[1], fresh[2])
		requireAll(t, onEach(six, func(g *Group) error {
			if g.Size() != 6 {
				return fmt.Errorf("%s", g)
			}
			return g.Barrier(testContext(t))
		}))
		for _, g := range append(all, six...) {
			g.Close()
		}
	})
}

func TestF2_AdmitWithoutNewcomers(t *testing.T) {
	t.Parallel() // it mostly waits
	onOneHost(t, 3, func(t *testing.T, gs []*Group) {
		t.Parallel()
		cfg := Config{Addr: freeAddr(t), JoinTimeout: 2 * time.Second}
		ctx, cancel := context.WithCancel(testContext(t))
		defer cancel()
		for range 2 {
			for _, err := range onEach(gs, func(g *Group) error {
				_, err := g.Admit(ctx, 1, cfg)
				return err
			}) {
				requirePeer(t, err, 3, ErrTimeout)
				require.ErrorContains(t, err, "comm: admit: ")
			}
			// It was only looked for: the group is as it was.
			requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		}
		cfg.JoinTimeout = time.Minute
		late := cfg
		late.Late = true
		done := make(chan error)
		go func() {
			g, err := Join(testContext(t), late)
			if err == nil {
				err = errors.Join(g.Barrier(testContext(t)), g.Close())
			}
			done <- err
		}()
		requireAll(t, onEach(gs, func(g *Group) error {
			next, err := g.Admit(ctx, 1, cfg)
			if err != nil {
				return err
			}
			return errors.Join(next.Barrier(testContext(t)), next.Close())
		}))
		require.NoError(t, <-done)
	})
}

// Rank 0 of an Admit that has failed can still be at the address when the next one begins.
func TestF2_AdmitBehindOneThatLingers(t *testing.T) {
	addr := freeAddr(t)
	config := func(rank int, gid uint64, timeout time.Duration) Config {
		return Config{Rank: rank, Size: 3, Addr: addr, JoinTimeout: timeout, members: 2, gid: gid}
	}
	_, err := join(testContext(t), config(0, 1, 50*time.Millisecond))
	require.ErrorIs(t, err, ErrTimeout) // and it waits for ranks that have not heard of that
	var wg sync.WaitGroup
	errs := make([]error, 3)
	start := func(i int, cfg Config) {
		wg.Go(func() {
			g, err := join(testContext(t), cfg)
			if err == nil {
				err = errors.Join(g.Barrier(testContext(t)), g.Close())
			}
			errs[i] = err
		})
	}
	start(1, config(1, 2, time.Minute))
	time.Sleep(100 * time.Millisecond) // it finds the one that lingers
	start(2, Config{Addr: addr, JoinTimeout: time.Minute, Late: true})
	start(0, config(0, 2, time.Minute))
	wg.Wait()
	requireAll(t, errs)
}

func TestF3_AdmitArguments(t *testing.T) {
	onOneHost(t, 2, func(t *testing.T, gs []*Group) {
		addr := freeAddr(t)
		for _, c := range []struct {
			name string
			n    func(r int) int
			addr string
			want string
		}{
			{"none", func(int) int { return 0 }, addr, "0 newcomers"},
			{"no address", func(int) int { return 1 }, "", `addr ""`},
			{"different", func(r int) int { return 1 + r }, addr, "rank 0 admits 1 newcomers to \"world\" at " + addr + ", peer timeout 10s and rank 1 admits 2 newcomers"},
			{"one refuses", func(r int) int { return 1 - r }, addr, "0 newcomers"},
		} {
			for _, err := range onEach(gs, func(g *Group) error {
				_, err := g.Admit(testContext(t), c.n(g.Rank()), Config{Addr: c.addr})
				return err
			}) {
				require.ErrorContains(t, err, c.want, c.name)
			}
		}
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		_, err := Join(testContext(t), Config{Late: true, Rank: 1, Size: 2, Addr: addr})
		require.ErrorContains(t, err, "rank 1 of 2 with Late, which gives both")
	})
}

// Neither those of another name nor ranks that know theirs are admitted, and they do no harm.
func TestF4_AdmitRefusesOthers(t *testing.T) {
	gs := startListen(t, 2, Config{})
	cfg := Config{Addr: freeAddr(t), Secret: []byte("sesame")}
	var wg sync.WaitGroup
	next := make([]*Group, 3)
	for r, g := range gs {
		wg.Go(func() {
			var err error
			next[r], err = g.Admit(testContext(t), 1, cfg)
			require.NoError(t, err)
		})
	}
	_, err := Join(testContext(t), Config{Late: true, Name: "others", Addr: cfg.Addr, Secret: cfg.Secret})
	require.ErrorIs(t, err, ErrMismatch)
	require.ErrorContains(t, err, `name: the group is "world", a newcomer asks for "others"`)
	_, err = Join(testContext(t), Config{Rank: 2, Size: 3, Addr: cfg.Addr, Secret: cfg.Secret})
	require.ErrorIs(t, err, ErrMismatch)
	require.ErrorContains(t, err, "not a rank of the group that meets here")
	late := cfg
	late.Late = true
	next[2], err = Join(testContext(t), late)
	require.NoError(t, err)
	wg.Wait()
	requireAll(t, onEach(next, func(g *Group) error { return g.Barrier(testContext(t)) }))
	for _, g := range append(gs, next...) {
		g.Close()
	}
}

// A rank that dies while newcomers are awaited is named, and the rest can go on without it.
func TestF2_LossDuringAdmit(t *testing.T) {
	onOneHost(t, 3, func(t *testing.T, gs []*Group) {
		cfg := Config{Addr: freeAddr(t)}
		ctx, cancel := context.WithCancel(testContext(t))
		defer cancel()
		time.AfterFunc(100*time.Millisecond, gs[2].Kill)
		for _, err := range onEach(gs[:2], func(g *Group) error {
			_, err := g.Admit(ctx, 1, cfg)
			return err
		}) {
			requirePeer(t, err, 2, ErrPeerLost)
		}
		requireSurvivors(t, gs[:2], 0, 1)
	})
}
