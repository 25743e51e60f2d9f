package comm

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// The rank that does not come is named, whoever gives up first and in whatever order the others start.
func TestF2_JoinNamesTheAbsentNotTheMessenger(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, c := range []struct {
		name   string
		order  []int
		absent int
	}{{"rank 0 last", []int{2, 3, 0}, 1}, {"rank 0 first", []int{0, 3, 2}, 1}, {"without rank 0", []int{3, 1, 2}, 0}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			addr := freeAddr(t)
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			errs := make([]error, 4)
			var wg sync.WaitGroup
			for _, r := range c.order {
				wg.Go(func() {
					_, errs[r] = Join(ctx, Config{Rank: r, Size: 4, Addr: addr, JoinTimeout: proctest.Scaled(2500 * time.Millisecond)})
				})
				time.Sleep(100 * time.Millisecond)
			}
			wg.Wait()
			for _, r := range c.order {
				requirePeer(t, errs[r], c.absent, ErrTimeout)
				require.NotContains(t, errs[r].Error(), "aborted")
			}
		})
	}
}

// A store that was reached by all ranks, of which one then does not join.
func TestF2_MeshNamesTheAbsentNotTheMessenger(t *testing.T) {
	t.Parallel()
	const n = 4
	var ls []*Listener
	var addrs []string
	for r := range n {
		l, err := Listen(Config{Rank: r, Size: n, JoinTimeout: 2 * time.Second})
		require.NoError(t, err)
		defer l.Close()
		ls, addrs = append(ls, l), append(addrs, l.Addr())
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	for _, r := range []int{3, 0, 2} {
		wg.Go(func() { _, errs[r] = ls[r].Join(context.Background(), addrs) })
		time.Sleep(50 * time.Millisecond)
	}
	wg.Wait()
	for _, r := range []int{3, 0, 2} {
		requirePeer(t, errs[r], 1, ErrTimeout)
	}
}

// A rank that starts when the join has failed already learns it at once, and may then join again with the others.
func TestF2_LateRanksLearnThatAJoinFailed(t *testing.T) {
	t.Run("port", func(t *testing.T) { lateRanksLearn(t, freeAddr(t)) })
	t.Run("name", func(t *testing.T) { lateRanksLearn(t, freeName(t)) })
}

func lateRanksLearn(t *testing.T, addr string) {
	defer func(d time.Duration) { sayEvery = d }(sayEvery)
	sayEvery = 20 * time.Millisecond
	ctx, cancel := context.WithCancel(testContext(t))
	_, err := Join(ctx, Config{Size: 3, Addr: addr, JoinTimeout: 100 * time.Millisecond})
	require.ErrorIs(t, err, ErrTimeout)
	time.Sleep(50 * time.Millisecond)
	start := time.Now()
	_, err = Join(ctx, Config{Rank: 2, Size: 3, Addr: addr, JoinTimeout: time.Minute})
	require.ErrorContains(t, err, "ranks [1 2] have not come")
	require.Less(t, time.Since(start), soon)

	// The next time all come, rank 2 first: it waits for rank 0's next join instead of hearing of the last one again. Rank 1 comes when that is
	// there, or it would hear of the last one, as rank 2 did.
	var wg sync.WaitGroup
	gs, errs := make([]*Group, 3), make([]error, 3)
	var log lockedBuffer
	come := func(r int) {
		wg.Go(func() { gs[r], errs[r] = Join(ctx, Config{Rank: r, Size: 3, Addr: addr, Logger: newTestLogger(&log)}) })
	}
	come(2)
	time.Sleep(100 * time.Millisecond)
	come(0)
	assert.Eventually(t, func() bool { return strings.Contains(log.String(), "rank=0") }, soon, time.Millisecond)
	come(1)
	wg.Wait()
	requireAll(t, errs)
	requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
	for _, g := range gs {
		g.Close()
	}
	cancel()
	requireNoGoroutines(t)
}

// A rank that waits itself is not blamed by those that wait for it in a later call: rank 2 has reached only rank 1 with its last word.
func TestF2_WhoWaitsItselfIsNotBlamed(t *testing.T) {
	barrier := func(g *Group, timeout time.Duration) error {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return g.Barrier(ctx)
	}
	for _, c := range []struct {
		name         string
		first, after time.Duration // how long rank 0 waits in the first call, rank 1 in the one after
	}{{"it waits", 3 * time.Second, 500 * time.Millisecond}, {"it has given up", 100 * time.Millisecond, 1500 * time.Millisecond}} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				gs, err := Local(3)
				require.NoError(t, err)
				gs[2].n.links[1].send(message{kind: kindData, op: opBarrier, gid: gs[2].id, seq: 1})
				var wg sync.WaitGroup
				wg.Go(func() {
					err := barrier(gs[0], c.first)
					requirePeer(t, err, 2, ErrTimeout)
					assert.ErrorContains(t, err, "rank 2 runs and is in no call")
				})
				require.NoError(t, barrier(gs[1], time.Minute))
				err = barrier(gs[1], c.after)
				requirePeer(t, err, 2, ErrTimeout)
				require.ErrorContains(t, err, "waiting for ranks [0 2]")
				require.ErrorContains(t, err, "rank 0 waits for ranks [2] itself")
				wg.Wait()
				for _, g := range gs {
					g.Kill()
				}
			})
		})
	}
}

// With a logger a rank that waits to join says so, on either side.
func TestWaitsAreTold(t *testing.T) {
	defer func(d time.Duration) { sayEvery = d }(sayEvery)
	sayEvery = 20 * time.Millisecond
	var said lockedBuffer
	log := newTestLogger(&said)
	for _, rank := range []int{0, 1} {
		_, err := Join(testContext(t), Config{Rank: rank, Size: 2, Addr: freeAddr(t), Logger: log, JoinTimeout: time.Second})
		require.ErrorIs(t, err, ErrTimeout)
	}
	three := freeAddr(t)
	joining, giveUp := context.WithCancel(testContext(t))
	var joins sync.WaitGroup
	for _, rank := range []int{0, 2} {
		joins.Go(func() {
			_, err := Join(joining, Config{Rank: rank, Size: 3, Addr: three, Logger: log})
			assert.Error(t, err)
		})
	}
	assert.Eventually(t, func() bool {
		return strings.Contains(said.String(), `msg=waiting rank=2 "to join"="not all 3 ranks have come to rank 0 at 127.`)
	}, soon, 5*time.Millisecond)
	giveUp()
	joins.Wait()
	require.Contains(t, said.String(), `msg=waiting rank=0 "to join"="ranks [1] have not come`)
	require.Contains(t, said.String(), `msg=waiting rank=1 "to join"="rank 0 is not at `)
}

// With a logger a rank that waits in a call or in Shrink says so, again and again. A muted rank does not.
func TestWaitsInCallsAreTold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var said lockedBuffer
		log := newTestLogger(&said)
		barrier := func(ctx context.Context, g *Group) error { return g.Barrier(ctx) }
		waits := func(g *Group, f func(context.Context, *Group) error) (lines []string) {
			ctx, cancel := context.WithTimeout(context.Background(), 2*sayEvery+time.Second)
			defer cancel()
			requirePeer(t, f(ctx, g), 1, ErrTimeout)
			for line := range strings.Lines(said.String()) {
				if _, wait, ok := strings.Cut(line, "msg=waiting "); ok {
					lines = append(lines, strings.TrimSpace(wait))
				}
			}
			return lines
		}
		gs, err := Local(2, LocalOptions{Logger: log})
		require.NoError(t, err)
		want := []string{`group=world rank=0 call="1, barrier" for=[1] waited=5s`, `group=world rank=0 call="1, barrier" for=[1] waited=10s`}
		require.Equal(t, want, waits(gs[0], barrier))
		want = append(want, `group=world rank=0 call="1, shrink" for=[1] waited=5s`, `group=world rank=0 call="1, shrink" for=[1] waited=10s`)
		require.Equal(t, want, waits(gs[0], func(ctx context.Context, g *Group) error { _, err := g.Shrink(ctx); return err }))
		silent, err := Local(2, LocalOptions{Logger: log, Name: "silent"})
		require.NoError(t, err)
		silent[0].Mute()
		require.Equal(t, want, waits(silent[0], barrier))
		for _, g := range append(gs, silent...) {
			g.Kill()
		}
	})
}

// What a peer waits for this rank in is known without asking.
func TestAwaitedBy(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		done := make(chan error, 2)
		for _, g := range gs[1:] {
			go func() { done <- g.Barrier(testContext(t)) }()
		}
		var first uint64
		for _, peer := range []int{1, 2} {
			require.Eventually(t, func() bool { _, seq := gs[0].AwaitedBy(peer); return seq > 0 }, soon, time.Millisecond)
			call, seq := gs[0].AwaitedBy(peer)
			require.Equal(t, fmt.Sprintf("barrier, call %d of group %s", seq, gs[0].Name()), call)
			require.Contains(t, []uint64{0, seq}, first)
			first = seq
		}
		_, seq := gs[0].AwaitedBy(0)
		require.Zero(t, seq)
		_, seq = gs[1].AwaitedBy(0) // which has not come
		require.Zero(t, seq)
		_, seq = gs[1].AwaitedBy(2) // which waits, but not for rank 1
		require.Zero(t, seq)
		require.NoError(t, gs[0].Barrier(testContext(t)))
		require.NoError(t, <-done)
		require.NoError(t, <-done)
		_, seq = gs[0].AwaitedBy(1)
		require.Zero(t, seq)
	})
}

// Who has proven nothing can pin no more than 4 KiB, whatever it announces.
func TestF4_MemoryBeforeTrust(t *testing.T) {
	secret := []byte("what only ranks know")
	h := (&hello{version: protocolVersion, secret: true, body: (&identity{purpose: toRendezvous, rank: 1, size: 2}).encode()}).encode()
	proof := append([]byte{byte(frameProof)}, 0, 0, 0x10, 0) // of 1 MiB
	const conns = 200
	before, after := new(runtime.MemStats), new(runtime.MemStats)
	addr := freeAddr(t)
	ctx, cancel := context.WithCancel(testContext(t))
	done := make(chan error)
	go func() {
		_, err := Join(ctx, Config{Size: 2, Addr: addr, Secret: secret})
		done <- err
	}()
	dial := func() net.Conn {
		for {
			if c, err := net.Dial("tcp", addr); err == nil {
				return c
			}
			time.Sleep(time.Millisecond)
		}
	}
	dial().Close()
	runtime.GC()
	runtime.ReadMemStats(before)
	for range conns {
		c := dial()
		defer c.Close()
		c.Write(append(append([]byte(nil), h...), proof...))
		// It is answered with a hello, and let go: no proof is that long.
		c.SetReadDeadline(time.Now().Add(time.Minute))
		_, err := io.Copy(io.Discard, c)
		require.NoError(t, err)
	}
	runtime.ReadMemStats(after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(conns*32<<10), "bytes allocated for %d connections", conns)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
}

// playFlood opens silent connections until it is killed.
func playFlood(args []string) int {
	network, addr := args[0], args[1]
	n, err := strconv.Atoi(args[2])
	if err != nil {
		fmt.Println(err)
		return 1
	}
	var conns []net.Conn
	for len(conns) < n {
		c, err := net.Dial(network, addr)
		if err != nil {
			time.Sleep(time.Millisecond)
			continue
		}
		conns = append(conns, c)
	}
	fmt.Println("flooded", len(conns))
	io.Copy(io.Discard, os.Stdin)
	return 0
}

// 5,000 silent connections do not keep a group from forming in processes with 1,024 descriptors.
func TestF4_SilentConnectionsLeaveRoomForRanks(t *testing.T) {
	const silent = 5000
	var old syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old))
	if old.Max < silent+500 {
		t.Skipf("a process may have %d descriptors, the flood needs more", old.Max)
	}
	flood := func(t *testing.T, network, addr string) {
		p := proctest.Start(t, proctest.Spec{Part: "flood", Args: []string{network, addr, strconv.Itoa(silent)}})
		line, _ := p.Line()
		require.Equal(t, "flooded "+strconv.Itoa(silent), line)
	}
	limit := func(t *testing.T) {
		tight := old
		tight.Cur = 1024
		require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &tight))
		t.Cleanup(func() { require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old)) })
	}
	// Rank 0 is there when the flood begins, the others come then.
	meet := func(t *testing.T, network, addr string, join func(r int) (*Group, error)) {
		gs := make([]*Group, 3)
		var wg sync.WaitGroup
		for r := range gs {
			wg.Go(func() {
				var err error
				gs[r], err = join(r)
				require.NoError(t, err)
			})
			if r == 0 {
				flood(t, network, addr)
			}
		}
		wg.Wait()
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		for _, g := range gs {
			g.Close()
		}
	}
	t.Run("rendezvous", func(t *testing.T) {
		limit(t)
		addr := freeAddr(t)
		meet(t, "tcp", addr, func(r int) (*Group, error) {
			return Join(testContext(t), Config{Rank: r, Size: 3, Addr: addr, Secret: []byte("sesame")})
		})
	})
	t.Run("mesh", func(t *testing.T) {
		limit(t)
		var ls []*Listener
		var addrs []string
		for r := range 3 {
			l, err := Listen(Config{Rank: r, Size: 3})
			require.NoError(t, err)
			ls, addrs = append(ls, l), append(addrs, l.Addr())
		}
		meet(t, "unix", addrs[0], func(r int) (*Group, error) { return ls[r].Join(testContext(t), addrs) })
	})
}
