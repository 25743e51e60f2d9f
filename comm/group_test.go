package comm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/loopback"
)

// eachWorld runs a test on ranks in one process and on ranks that meet over
// sockets, on one host and on several, since all promise the same.
func eachWorld(t *testing.T, n int, test func(t *testing.T, gs []*Group)) {
	inWorlds(t, worldKinds, n, test)
}

// onOneHost is eachWorld without ranks on several hosts.
func onOneHost(t *testing.T, n int, test func(t *testing.T, gs []*Group)) {
	inWorlds(t, worldKinds[:3], n, test)
}

func inWorlds(t *testing.T, kinds []worldKind, n int, test func(t *testing.T, gs []*Group)) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			gs := kind.start(t, n)
			t.Cleanup(func() {
				for _, g := range gs {
					g.Close()
				}
			})
			test(t, gs)
		})
	}
}

type worldKind struct {
	name  string
	start func(t testing.TB, n int) []*Group
}

var worldKinds = []worldKind{
	{"local", func(t testing.TB, n int) []*Group {
		gs, err := Local(n)
		require.NoError(t, err)
		return gs
	}},
	{"listen", func(t testing.TB, n int) []*Group {
		return startListen(t, n, Config{})
	}},
	{"join", func(t testing.TB, n int) []*Group {
		gs, errs := startJoin(t, n, func(int) Config { return Config{Secret: []byte("sesame")} })
		for _, err := range errs {
			require.NoError(t, err)
		}
		return gs
	}},
	{"local hosts", func(t testing.TB, n int) []*Group {
		gs, err := Local(n, LocalOptions{PerHost: 2})
		require.NoError(t, err)
		return gs
	}},
	{"hosts", func(t testing.TB, n int) []*Group { return startHosts(t, n, 2, Config{}) }},
}

// startHosts makes a world on hosts of perHost ranks each, as the ranks believe.
func startHosts(t testing.TB, n, perHost int, cfg Config) []*Group {
	gs, errs := startJoin(t, n, func(rank int) Config {
		c := cfg
		c.Rank, c.Size, c.LocalSize, c.host = rank, n, min(perHost, n-1), fmt.Sprintf("host %d", rank/perHost)
		return c
	})
	require.NoError(t, errors.Join(errs...))
	return gs
}

// startListen makes a world by Listen and Listener.Join, with the test as the store.
func startListen(t testing.TB, n int, cfg Config) []*Group {
	ls, addrs := make([]*Listener, n), make([]string, n)
	for r := range n {
		c := cfg
		c.Rank, c.Size = r, n
		l, err := Listen(c)
		require.NoError(t, err)
		ls[r], addrs[r] = l, l.Addr()
	}
	gs, errs := make([]*Group, n), make([]error, n)
	var wg sync.WaitGroup
	for r, l := range ls {
		wg.Go(func() { gs[r], errs[r] = l.Join(testContext(t), addrs) })
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	return gs
}

// startJoin makes a world by Join. What each configures is completed with rank,
// size, and a free port.
func startJoin(t testing.TB, n int, configure func(rank int) Config) ([]*Group, []error) {
	addr := freeAddr(t)
	gs, errs := make([]*Group, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		cfg := configure(i)
		if cfg.Size == 0 {
			cfg.Rank, cfg.Size = i, n
		}
		cfg.Addr = addr
		wg.Go(func() { gs[i], errs[i] = Join(testContext(t), cfg) })
	}
	wg.Wait()
	return gs, errs
}

func freeAddr(testing.TB) string {
	return loopback.Addr()
}

// freeName is a name for ranks to meet at that nobody else has.
func freeName(testing.TB) string { return "@switchyard-test-" + rand.Text() }

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// onEach runs f for every group at once and returns the errors by index.
func onEach(gs []*Group, f func(g *Group) error) []error {
	errs := make([]error, len(gs))
	var wg sync.WaitGroup
	for i, g := range gs {
		wg.Go(func() { errs[i] = f(g) })
	}
	wg.Wait()
	return errs
}

func requireAll(t *testing.T, errs []error) {
	t.Helper()
	require.NoError(t, errors.Join(errs...))
}

// requirePeer checks that err blames that rank for that condition.
func requirePeer(t *testing.T, err error, rank int, condition error) {
	t.Helper()
	require.ErrorIs(t, err, condition)
	var pe *PeerError
	require.ErrorAs(t, err, &pe)
	require.Equal(t, rank, pe.Rank, "%v", err)
}

func waitDone(t *testing.T, g *Group) {
	t.Helper()
	select {
	case <-g.Done():
	case <-time.After(30 * time.Second):
		t.Fatalf("%s has not failed", g)
	}
}

func TestAllGather(t *testing.T) {
	for _, n := range []int{1, 2, 3, 8} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			eachWorld(t, n, func(t *testing.T, gs []*Group) {
				ctx := testContext(t)
				requireAll(t, onEach(gs, func(g *Group) error {
					for round := range 20 {
						data := make([]byte, (g.Rank()*7+round)%50)
						for i := range data {
							data[i] = byte(g.Rank()*31 + round + i)
						}
						all, err := g.AllGather(ctx, data)
						if err != nil {
							return err
						}
						clear(data) // the others have copies
						if len(all) != n {
							return fmt.Errorf("%d entries", len(all))
						}
						for r, got := range all {
							if got == nil || len(got) != (r*7+round)%50 {
								return fmt.Errorf("rank %d: %d bytes", r, len(got))
							}
							for i, b := range got {
								if b != byte(r*31+round+i) {
									return fmt.Errorf("rank %d: byte %d is %d", r, i, b)
								}
							}
							clear(got) // so has every caller
						}
					}
					return nil
				}))
			})
		})
	}
}

func TestAllGatherLarge(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		const size = 3<<20 + 17
		requireAll(t, onEach(gs, func(g *Group) error {
			data := make([]byte, size)
			for i := range data {
				data[i] = byte(i>>8 + i + g.Rank())
			}
			all, err := g.AllGather(testContext(t), data)
			if err != nil {
				return err
			}
			for r := range all {
				if len(all[r]) != size {
					return fmt.Errorf("rank %d: %d bytes", r, len(all[r]))
				}
				for i, b := range all[r] {
					if b != byte(i>>8+i+r) {
						return fmt.Errorf("rank %d: byte %d", r, i)
					}
				}
			}
			return nil
		}))
	})
}

func TestBarrier(t *testing.T) {
	eachWorld(t, 4, func(t *testing.T, gs []*Group) {
		ctx := testContext(t)
		var arrived atomic.Int64
		requireAll(t, onEach(gs, func(g *Group) error {
			for round := range int64(50) {
				arrived.Add(1)
				if err := g.Barrier(ctx); err != nil {
					return err
				}
				if got := arrived.Load(); got < 4*(round+1) {
					return fmt.Errorf("round %d: %d arrived", round, got)
				}
			}
			return nil
		}))
	})
}

func TestShare(t *testing.T) {
	gs, err := Local(3)
	require.NoError(t, err)
	values := []*int{new(int), new(int), new(int)}
	requireAll(t, onEach(gs, func(g *Group) error {
		require.True(t, g.InProcess())
		all, err := g.Share(testContext(t), values[g.Rank()])
		if err != nil {
			return err
		}
		for r := range all {
			if all[r] != any(values[r]) {
				return fmt.Errorf("rank %d: another pointer", r)
			}
		}
		return g.Close()
	}))
}

func TestExchangeFDs(t *testing.T) {
	for _, per := range []int{0, 1, 3, 300} {
		t.Run(fmt.Sprint(per), func(t *testing.T) {
			onOneHost(t, 3, func(t *testing.T, gs []*Group) {
				before := countFDs(t)
				requireAll(t, onEach(gs, func(g *Group) error {
					var files []*os.File
					var fds []int
					for i := range per {
						f, err := os.CreateTemp(t.TempDir(), "fd")
						if err != nil {
							return err
						}
						fmt.Fprintf(f, "rank %d file %d", g.Rank(), i)
						files = append(files, f)
						fds = append(fds, int(f.Fd()))
					}
					all, err := g.ExchangeFDs(testContext(t), fds)
					for _, f := range files {
						f.Close()
					}
					if err != nil {
						return err
					}
					for r := range all {
						if len(all[r]) != per {
							return fmt.Errorf("rank %d: %d fds", r, len(all[r]))
						}
						for i, fd := range all[r] {
							if cloexec, err := isCloexec(fd); err != nil || !cloexec {
								return fmt.Errorf("rank %d: fd %d: close on exec %v, %v", r, fd, cloexec, err)
							}
							f := os.NewFile(uintptr(fd), "received")
							buf := make([]byte, 64)
							n, err := f.ReadAt(buf, 0)
							if n == 0 {
								return err
							}
							f.Close()
							if want := fmt.Sprintf("rank %d file %d", r, i); string(buf[:n]) != want {
								return fmt.Errorf("got %q, want %q", buf[:n], want)
							}
						}
					}
					return nil
				}))
				requireFDs(t, before)
			})
		})
	}
}

func TestExchangeFDsErrors(t *testing.T) {
	onOneHost(t, 3, func(t *testing.T, gs []*Group) {
		before := countFDs(t)
		f, err := os.Open(os.DevNull)
		require.NoError(t, err)
		// One rank passes a descriptor that is not open: everybody learns which.
		for _, err := range onEach(gs, func(g *Group) error {
			fds := []int{int(f.Fd())}
			if g.Rank() == 1 {
				fds = append(fds, 1<<20)
			}
			_, err := g.ExchangeFDs(testContext(t), fds)
			return err
		}) {
			var pe *PeerError
			require.ErrorAs(t, err, &pe)
			require.Equal(t, 1, pe.Rank)
			require.ErrorContains(t, err, "bad file descriptor")
		}
		// One rank does not take part in time.
		for i, err := range onEach(gs, func(g *Group) error {
			if g.Rank() == 2 {
				return nil
			}
			ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
			defer cancel()
			_, err := g.ExchangeFDs(ctx, []int{int(f.Fd()), int(f.Fd())})
			return err
		}) {
			if i != 2 {
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.ErrorContains(t, err, "waiting for ranks [2]")
			}
		}
		// It takes part too late: it gets theirs, its own go nowhere.
		all, err := gs[2].ExchangeFDs(testContext(t), []int{int(f.Fd())})
		require.NoError(t, err)
		for _, fds := range all {
			closeFDs(fds)
		}
		// The group works on.
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		f.Close()
		requireFDs(t, before)
	})
}

func TestCancelledCallsDoNotMix(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		requireAll(t, onEach(gs, func(g *Group) error {
			for round := range 30 {
				ctx := testContext(t)
				if (round+g.Rank())%3 == 0 {
					c, cancel := context.WithCancel(ctx)
					cancel()
					ctx = c
				}
				all, err := g.AllGather(ctx, fmt.Appendf(nil, "%d/%d", g.Rank(), round))
				if errors.Is(err, context.Canceled) && ctx.Err() != nil {
					continue
				}
				if err != nil {
					return err
				}
				for r, got := range all {
					if want := fmt.Sprintf("%d/%d", r, round); string(got) != want {
						return fmt.Errorf("got %s, want %s", got, want)
					}
				}
			}
			return nil
		}))
		for _, g := range gs {
			g.n.mu.Lock()
			require.Empty(t, g.pending)
			g.n.mu.Unlock()
		}
	})
}

func TestContextCause(t *testing.T) {
	gs, err := Local(2)
	require.NoError(t, err)
	why := errors.New("the user pressed Ctrl-C")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(why)
	err = gs[0].Barrier(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, why)
}

func TestSplit(t *testing.T) {
	eachWorld(t, 6, func(t *testing.T, gs []*Group) {
		ctx := testContext(t)
		requireAll(t, onEach(gs, func(g *Group) error {
			// Odd and even, each in reverse order; rank 5 belongs to none.
			color := g.Rank() % 2
			if g.Rank() == 5 {
				color = -1
			}
			sub, err := g.Split(ctx, color, -g.Rank())
			if err != nil {
				return err
			}
			if color < 0 {
				if sub != nil {
					return fmt.Errorf("rank 5 is in %s", sub)
				}
				return nil
			}
			defer sub.Close()
			want := []string{"4 2 0", "3 1"}[color]
			all, err := sub.AllGather(ctx, fmt.Append(nil, g.Rank()))
			if err != nil {
				return err
			}
			got := ""
			for i, b := range all {
				if i > 0 {
					got += " "
				}
				got += string(b)
			}
			if got != want {
				return fmt.Errorf("%s: got %s, want %s", sub, got, want)
			}
			// Again, within the subgroup: each alone.
			alone, err := sub.Split(ctx, sub.Rank(), 0)
			if err != nil {
				return err
			}
			defer alone.Close()
			if alone.Size() != 1 || !alone.InProcess() {
				return fmt.Errorf("%s is not alone", alone)
			}
			if name := fmt.Sprintf("world/%d/%d", color, sub.Rank()); alone.Name() != name {
				return fmt.Errorf("name %s, want %s", alone.Name(), name)
			}
			return alone.Barrier(ctx)
		}))
	})
}

func TestSplitOutlivesParent(t *testing.T) {
	eachWorld(t, 4, func(t *testing.T, gs []*Group) {
		ctx := testContext(t)
		requireAll(t, onEach(gs, func(g *Group) error {
			sub, err := g.Split(ctx, g.Rank()/2, 0)
			if err != nil {
				return err
			}
			defer sub.Close()
			if err := g.Close(); err != nil {
				return err
			}
			for range 10 {
				if err := sub.Barrier(ctx); err != nil {
					return err
				}
			}
			return nil
		}))
	})
}

func TestSplitCancelled(t *testing.T) {
	eachWorld(t, 2, func(t *testing.T, gs []*Group) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_, err := gs[0].Split(ctx, 0, 0)
		require.ErrorIs(t, err, context.Canceled)
		_, err = gs[1].Split(testContext(t), 0, 0)
		if err == nil { // the parts were complete before the abort came
			waitDone(t, gs[1])
			err = gs[1].Err()
		}
		requirePeer(t, err, 0, ErrAborted)
		require.ErrorIs(t, err, context.Canceled)
	})
}

func TestF3_DifferentCalls(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		for _, err := range onEach(gs, func(g *Group) error {
			if err := g.Barrier(testContext(t)); err != nil {
				return err
			}
			if g.Rank() == 1 {
				_, err := g.AllGather(testContext(t), nil)
				return err
			}
			return g.Barrier(testContext(t))
		}) {
			require.ErrorIs(t, err, ErrMismatch)
			require.ErrorContains(t, err, "called all-gather")
			require.ErrorContains(t, err, "called barrier")
			require.ErrorContains(t, err, "call 2")
		}
	})
}

func TestClose(t *testing.T) {
	eachWorld(t, 2, func(t *testing.T, gs []*Group) {
		require.NoError(t, gs[0].Err())
		require.NoError(t, gs[0].Close())
		require.NoError(t, gs[0].Close())
		require.ErrorIs(t, gs[0].Err(), ErrClosed)
		waitDone(t, gs[0])
		require.ErrorIs(t, gs[0].Barrier(testContext(t)), ErrClosed)
		_, err := gs[0].Split(testContext(t), 0, 0)
		require.ErrorIs(t, err, ErrClosed)
		_, err = gs[0].Shrink(testContext(t))
		require.ErrorIs(t, err, ErrClosed)
		gs[0].Abort(errors.New("too late"))
		require.ErrorIs(t, gs[0].Err(), ErrClosed)
	})
}

func TestCloseWhileWaiting(t *testing.T) {
	eachWorld(t, 2, func(t *testing.T, gs []*Group) {
		done := make(chan error)
		go func() { done <- gs[0].Barrier(context.Background()) }()
		time.Sleep(5 * time.Millisecond)
		gs[0].Close()
		require.ErrorIs(t, <-done, ErrClosed)
	})
}

// Ranks that finish one after the other are no failure, as long as nobody
// needs the ones that have gone.
func TestF2_EndingInSequenceIsNoFailure(t *testing.T) {
	eachWorld(t, 4, func(t *testing.T, gs []*Group) {
		requireAll(t, onEach(gs, func(g *Group) error {
			if err := g.Barrier(testContext(t)); err != nil {
				return err
			}
			time.Sleep(time.Duration(g.Rank()) * 10 * time.Millisecond)
			if err := g.Err(); err != nil {
				return err
			}
			return g.Close()
		}))
	})
}

func TestF2_CloseWhileOthersWait(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		for i, err := range onEach(gs, func(g *Group) error {
			if g.Rank() == 1 {
				time.Sleep(5 * time.Millisecond)
				return g.Close()
			}
			return g.Barrier(testContext(t))
		}) {
			if i == 1 {
				require.NoError(t, err)
				continue
			}
			requirePeer(t, err, 1, ErrPeerLost)
			require.ErrorContains(t, err, "it has closed its end of group ")
			require.NotErrorIs(t, err, ErrClosed)
		}
		// A call that begins after the fact fails as well.
		requirePeer(t, gs[0].Barrier(testContext(t)), 1, ErrPeerLost)
	})
}

func TestF2_AbortReachesEveryRank(t *testing.T) {
	eachWorld(t, 4, func(t *testing.T, gs []*Group) {
		why := errors.New("expert 3 overflowed")
		var called atomic.Int64
		for _, g := range gs {
			g.OnFailure(func(err error) {
				requirePeer(t, err, 2, ErrAborted)
				called.Add(1)
			})
		}
		stop := gs[0].OnFailure(func(error) { called.Add(100) })
		stop()
		for _, err := range onEach(gs, func(g *Group) error {
			if g.Rank() == 2 {
				g.Abort(why)
			}
			return g.Barrier(testContext(t))
		}) {
			requirePeer(t, err, 2, ErrAborted)
			require.ErrorContains(t, err, why.Error())
		}
		for _, g := range gs {
			requirePeer(t, g.Err(), 2, ErrAborted)
			waitDone(t, g)
		}
		require.ErrorIs(t, gs[2].Err(), why)
		require.Eventually(t, func() bool { return called.Load() == 4 }, soon, time.Millisecond)
		// Too late to register, but not to be told.
		told := make(chan error, 1)
		gs[1].OnFailure(func(err error) { told <- err })
		requirePeer(t, <-told, 2, ErrAborted)
		gs[1].Abort(nil) // nothing
		requirePeer(t, gs[1].Err(), 2, ErrAborted)
	})
}

func TestF2_AbortReachesSubgroups(t *testing.T) {
	eachWorld(t, 4, func(t *testing.T, gs []*Group) {
		subs := make([]*Group, 4)
		requireAll(t, onEach(gs, func(g *Group) (err error) {
			subs[g.Rank()], err = g.Split(testContext(t), g.Rank()/2, 0)
			return err
		}))
		// A subgroup's failure is its own.
		subs[3].Abort(errors.New("only us"))
		waitDone(t, subs[2])
		requirePeer(t, subs[2].Err(), 1, ErrAborted)
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		require.NoError(t, subs[0].Err())
		// A parent's is not.
		gs[3].Abort(errors.New("all of us"))
		waitDone(t, subs[0])
		requirePeer(t, subs[0].Err(), -1, ErrAborted)
		for _, g := range subs {
			g.Close()
		}
	})
}

func TestF2_StopWaitsForCallback(t *testing.T) {
	gs, err := Local(1)
	require.NoError(t, err)
	started, finish := make(chan struct{}), make(chan struct{})
	stop := gs[0].OnFailure(func(error) { close(started); <-finish })
	gs[0].Abort(nil)
	<-started
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	select {
	case <-stopped:
		t.Fatal("stop did not wait")
	case <-time.After(10 * time.Millisecond):
	}
	close(finish)
	<-stopped
}

func TestF2_KilledRankIsNamed(t *testing.T) {
	eachWorld(t, 4, func(t *testing.T, gs []*Group) {
		sub := make([]*Group, 4)
		requireAll(t, onEach(gs, func(g *Group) (err error) {
			sub[g.Rank()], err = g.Split(testContext(t), g.Rank()/2, -g.Rank())
			return err
		}))
		for i, err := range onEach(gs, func(g *Group) error {
			if g.Rank() == 1 {
				g.Kill()
			}
			return g.Barrier(testContext(t))
		}) {
			requirePeer(t, err, 1, ErrPeerLost)
			requirePeer(t, gs[i].Err(), 1, ErrPeerLost)
		}
		// The subgroup with the lost rank has failed, in its own numbers; the other works.
		waitDone(t, sub[0])
		requirePeer(t, sub[0].Err(), 0, ErrPeerLost)
		requireAll(t, onEach(sub[2:], func(g *Group) error { return g.Barrier(testContext(t)) }))
		for _, g := range sub {
			g.Close()
		}
	})
}

func TestLocalArguments(t *testing.T) {
	_, err := Local(0)
	require.ErrorContains(t, err, "comm: local: 0 ranks, want 1 to 4096")
	gs, err := Local(2, LocalOptions{Name: "experts"})
	require.NoError(t, err)
	require.Equal(t, "experts", gs[1].Name())
	require.Equal(t, "experts[1/2]", gs[1].String())
	require.Equal(t, 2, gs[1].Size())
}

func TestLocal64(t *testing.T) {
	bubble(t, func(t *testing.T) {
		start := time.Now()
		gs, err := Local(64)
		require.NoError(t, err)
		requireAll(t, onEach(gs, func(g *Group) error {
			for range 3 {
				if err := g.Barrier(testContext(t)); err != nil {
					return err
				}
			}
			return g.Close()
		}))
		require.Zero(t, time.Since(start), "a call has waited for a timer")
	})
}

func TestMessageTooLarge(t *testing.T) {
	gs, err := Local(2)
	require.NoError(t, err)
	for _, err := range onEach(gs, func(g *Group) error {
		_, err := g.ExchangeFDs(testContext(t), make([]int, MaxFDs+g.Rank()))
		return err
	}) {
		var pe *PeerError
		require.ErrorAs(t, err, &pe)
	}
}

// A call whose last part comes at the moment at which this rank gives it up is complete, and nobody is missing.
func TestF1_AGivenUpCallThatIsCompleteIsComplete(t *testing.T) {
	gs, err := Local(2)
	require.NoError(t, err)
	defer func() { requireAll(t, onEach(gs, (*Group).Close)) }()
	c, err := gs[0].startCall(opBarrier)
	require.NoError(t, err)
	for r, g := range gs {
		gs[0].n.mu.Lock()
		then := gs[0].handle(g.n.id, message{kind: kindData, op: opBarrier, gid: gs[0].id, seq: c.seq})
		gs[0].n.mu.Unlock()
		require.Nil(t, then)
		if r == 0 {
			require.NotZero(t, c.p.missing)
		}
	}
	require.Empty(t, gs[0].giveUp(c))
	parts, err := gs[0].collect(c)
	require.NoError(t, err)
	require.Len(t, parts, 2)
}
