package comm_test

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/loopback"
)

// replaceable joins n ranks that outlive losses, of which lost gets the ranks.
func replaceable(t *testing.T, n int) (groups []*comm.Group, cfg comm.Config, lost chan int) {
	cfg = comm.Config{Addr: loopback.Addr(), Size: n, Replaceable: true, Secret: []byte("0123456789abcdef"), JoinTimeout: 20 * time.Second}
	groups, lost = make([]*comm.Group, n), make(chan int, 10*n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			c := cfg
			c.Rank = r
			g, err := comm.Join(t.Context(), c)
			if err == nil {
				g.OnLoss(func(rank int, _ bool) { lost <- rank })
			}
			groups[r] = g
		})
	}
	wg.Wait()
	for _, g := range groups {
		require.NotNil(t, g)
	}
	t.Cleanup(func() {
		for _, g := range groups {
			g.Close()
		}
	})
	return groups, cfg, lost
}

// all has every rank of the groups do f at once.
func all(t *testing.T, groups []*comm.Group, f func(g *comm.Group) error) {
	t.Helper()
	errs := make([]error, len(groups))
	var wg sync.WaitGroup
	for i, g := range groups {
		wg.Go(func() { errs[i] = f(g) })
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
}

// setUp are the calls by which ranks begin. Everything tells who a rank is, and a descriptor of which file it is.
func setUp(g *comm.Group, ctx context.Context, word string) error {
	said, err := g.AllGather(ctx, []byte(word))
	if err != nil {
		return err
	}
	for r := range said {
		if string(said[r]) != fmt.Sprint("rank ", r) {
			return fmt.Errorf("rank %d said %q", r, said[r])
		}
	}
	f, err := os.CreateTemp("", "")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.WriteString(word); err != nil {
		return err
	}
	fds, err := g.ExchangeFDs(ctx, []int{int(f.Fd())})
	if err != nil {
		return err
	}
	for r := range fds {
		b := make([]byte, 100)
		file := os.NewFile(uintptr(fds[r][0]), "")
		n, err := file.ReadAt(b, 0)
		file.Close()
		if got := string(b[:n]); got != fmt.Sprint("rank ", r) {
			return fmt.Errorf("rank %d has passed %q, %v", r, got, err)
		}
	}
	sub, err := g.Split(ctx, g.Rank()%2, 0)
	if err != nil {
		return err
	}
	sub.OnLoss(func(int, bool) {})
	return sub.Barrier(ctx)
}

// A process takes the place of a lost rank, and of itself when it is lost in turn, and then of another one: each makes the calls of before and
// gets what these returned, and the group works as before. Ranks that do not call Replace notice nothing.
func TestAProcessTakesThePlaceOfALostRank(t *testing.T) {
	const n = 4
	groups, cfg, lost := replaceable(t, n)
	all(t, groups, func(g *comm.Group) error { return setUp(g, t.Context(), fmt.Sprint("rank ", g.Rank())) })
	for turn, victim := range []int{2, 2, 0, 3} {
		sponsor := (victim + 1 + turn) % n
		if sponsor == victim {
			sponsor = (victim + 1) % n
		}
		groups[victim].Kill()
		for range n - 1 {
			require.Equal(t, victim, <-lost)
		}
		c := cfg
		c.Addr, c.Rank, c.Replaces = loopback.Addr(), victim, true
		came := make(chan error, 1)
		go func() {
			g, err := comm.Join(t.Context(), c)
			if err == nil {
				groups[victim] = g
				g.OnLoss(func(rank int, _ bool) { lost <- rank })
			}
			came <- err
		}()
		require.NoError(t, groups[sponsor].Replace(t.Context(), victim, c))
		require.NoError(t, <-came)
		g := groups[victim]
		require.Equal(t, victim, g.Rank())
		require.Equal(t, n, g.Size())
		require.True(t, g.Replaying())
		require.NoError(t, setUp(g, t.Context(), "another process"))
		require.Equal(t, turn > 0, g.Replaying()) // barriers
		require.NoError(t, g.CatchUp())
		require.False(t, g.Replaying())
		all(t, groups, func(g *comm.Group) error { return g.Barrier(t.Context()) })
	}
	require.Empty(t, lost)
}

// A rank that is lost while a process is on its way into another's place ends the way of that process, and not the group.
func TestALossWhileAProcessComes(t *testing.T) {
	groups, cfg, lost := replaceable(t, 4)
	all(t, groups, func(g *comm.Group) error { return g.Barrier(t.Context()) })
	come := func() {
		c := cfg
		c.Addr, c.Rank, c.Replaces = loopback.Addr(), 1, true
		came := make(chan error, 1)
		go func() {
			var err error
			groups[1], err = comm.Join(t.Context(), c)
			came <- err
		}()
		require.NoError(t, groups[0].Replace(t.Context(), 1, c))
		require.NoError(t, <-came)
	}
	kill := func(rank, tells int) {
		groups[rank].Kill()
		for range tells {
			require.Equal(t, rank, <-lost)
		}
	}
	kill(1, 3)
	come()
	kill(3, 2) // the process has not called OnLoss
	<-groups[1].Done()
	require.ErrorIs(t, groups[1].Err(), comm.ErrPeerLost)
	require.NoError(t, groups[1].Close())
	require.NoError(t, groups[0].Err())
	require.NoError(t, groups[2].Err())
	come()
	require.NoError(t, groups[1].Barrier(t.Context())) // of before
	groups[1].OnLoss(func(rank int, _ bool) { lost <- rank })
	kill(2, 2)
	require.NoError(t, groups[0].Err())
	require.NoError(t, groups[1].Err())
}

func TestReplaceIsRefused(t *testing.T) {
	groups, cfg, lost := replaceable(t, 3)
	all(t, groups, func(g *comm.Group) error { return setUp(g, t.Context(), fmt.Sprint("rank ", g.Rank())) })
	c := cfg
	c.Addr, c.JoinTimeout = loopback.Addr(), 300*time.Millisecond
	require.ErrorContains(t, groups[0].Replace(t.Context(), 1, c), "rank 1: it is not lost")
	require.ErrorIs(t, groups[0].Replace(t.Context(), 3, c), comm.ErrInvalid)
	groups[2].Kill()
	<-lost
	<-lost
	require.ErrorIs(t, groups[0].Replace(t.Context(), 2, c), comm.ErrTimeout) // nobody comes
	c.Rank, c.Replaces = 2, true
	_, err := comm.Join(t.Context(), c) // nobody is there
	require.ErrorIs(t, err, comm.ErrTimeout)

	join := func(change func(c *comm.Config)) error {
		c := c
		c.JoinTimeout = 20 * time.Second
		at := c
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- groups[1].Replace(ctx, 2, at) }()
		change(&c)
		g, err := comm.Join(t.Context(), c)
		if err == nil {
			defer g.Close()
			require.NoError(t, <-done)
			require.ErrorIs(t, g.Barrier(t.Context()), comm.ErrMismatch) // the lost rank called all-gather
			_, err := g.AllGather(t.Context(), nil)
			require.NoError(t, err)
			require.ErrorContains(t, g.CatchUp(), "exchange fds")
			return nil
		}
		cancel()
		require.Error(t, <-done)
		return err
	}
	require.ErrorContains(t, join(func(c *comm.Config) { c.Rank = 1 }), "rank 2 of group")
	require.NoError(t, join(func(*comm.Config) {}))

	plain, err := comm.Local(2)
	require.NoError(t, err)
	require.ErrorIs(t, plain[0].Replace(t.Context(), 1, c), comm.ErrUnsupported)
}
