package comm

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

func TestJoinAlone(t *testing.T) {
	g, err := Join(context.Background(), Config{})
	require.NoError(t, err)
	require.Equal(t, 1, g.Size())
	require.True(t, g.InProcess())
	require.NoError(t, g.Barrier(testContext(t)))
	all, err := g.Share(testContext(t), 7)
	require.NoError(t, err)
	require.Equal(t, []any{7}, all)
	fds, err := g.ExchangeFDs(testContext(t), []int{0})
	require.NoError(t, err)
	closeFDs(fds[0])
	require.NoError(t, g.Close())
}

func TestJoinLeavesNothingBehind(t *testing.T) {
	for _, kind := range worldKinds {
		t.Run(kind.name, func(t *testing.T) {
			requireNoGoroutines(t)
			before := countFDs(t)
			for range 3 {
				gs := kind.start(t, 4)
				subs := make([]*Group, 4)
				requireAll(t, onEach(gs, func(g *Group) (err error) {
					subs[g.Rank()], err = g.Split(testContext(t), 0, 0)
					return err
				}))
				for _, g := range append(gs, subs...) {
					require.NoError(t, g.Close())
				}
				// One that fails, too.
				gs = kind.start(t, 3)
				gs[2].Kill()
				for _, g := range gs {
					waitDone(t, g)
					require.NoError(t, g.Close())
				}
			}
			requireNoGoroutines(t)
			requireFDs(t, before)
		})
	}
}

func TestJoinArguments(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{Size: -1}, "size -1, want 1 to 4096"},
		{Config{Size: 5000}, "size 5000"},
		{Config{Rank: 2, Size: 2}, "rank 2 of 2, want 0 to 1"},
		{Config{Rank: -1, Size: 2}, "rank -1 of 2"},
		{Config{Size: 2, LocalSize: 3}, "local size 3 of 2 ranks"},
		{Config{Size: 2, LocalRank: 2}, "local rank 2 of 2"},
		{Config{PeerTimeout: time.Millisecond}, "peer timeout 1ms, want at least 100ms"},
		{Config{JoinTimeout: -1}, "join timeout -1ns is negative"},
		{Config{Size: 2}, `addr "", want the host:port of rank 0`},
		{Config{Size: 2, Addr: "here"}, `addr "here"`},
		{Config{Size: 2, Addr: "@"}, `addr "@"`},
		{Config{Size: 2, Addr: "@" + strings.Repeat("x", 107)}, `addr "@` + strings.Repeat("x", 107) + `", want the host:port of rank 0, a name of 1 to 106 bytes behind @, an ID, or file:///path`},
	} {
		_, err := Join(context.Background(), c.cfg)
		require.ErrorContains(t, err, "comm: join: "+c.want)
	}
	_, err := Listen(Config{Rank: 1})
	require.ErrorContains(t, err, "comm: listen: rank 1 of 1")
	l, err := Listen(Config{Size: 2})
	require.NoError(t, err)
	_, err = l.Join(context.Background(), []string{"a", "b"})
	require.ErrorIs(t, err, ErrMismatch)
	require.ErrorContains(t, err, l.Addr())
	l, err = Listen(Config{Size: 2})
	require.NoError(t, err)
	_, err = l.Join(context.Background(), nil)
	require.ErrorContains(t, err, "0 addresses for 2 ranks")
	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
}

func TestJoinNamesMissingRanks(t *testing.T) {
	requireNoGoroutines(t)
	addr := freeAddr(t)
	var wg sync.WaitGroup
	errs := make([]error, 2)
	ctx, cancel := context.WithCancel(testContext(t))
	for r := range 2 {
		wg.Go(func() {
			_, errs[r] = Join(ctx, Config{Rank: r, Size: 4, Addr: addr, JoinTimeout: time.Duration(1000+3000*r) * time.Millisecond})
		})
	}
	wg.Wait()
	cancel()
	for _, err := range errs { // rank 1 is told by rank 0
		requirePeer(t, err, 2, ErrTimeout)
		require.ErrorContains(t, err, "ranks [2 3] have not come")
		require.ErrorContains(t, err, "timed out after 1s")
	}
	// Without rank 0.
	addr = freeAddr(t)
	_, err := Join(testContext(t), Config{Rank: 1, Size: 2, Addr: addr, JoinTimeout: 200 * time.Millisecond})
	require.ErrorIs(t, err, ErrTimeout)
	require.ErrorContains(t, err, "rank 0 was not found at "+addr)
	require.ErrorContains(t, err, "connection refused")
	requireNoGoroutines(t)
}

// Those who look on learn that the port is taken while rank 0 waits for it.
func TestATakenPortIsTold(t *testing.T) {
	cfg := Config{Size: 2, Addr: "127.0.0.1:29431"}
	require.NoError(t, cfg.validate())
	m := newMeeting(&cfg, "", func(error) {})
	m.dial = func(context.Context) (net.Conn, error) { return nil, syscall.ECONNREFUSED }
	tries := 0
	m.listen = func(context.Context) (net.Listener, error) {
		if tries++; tries == 1 {
			return nil, syscall.EADDRINUSE
		}
		ranks, what := m.lacks()
		require.Equal(t, []int{0}, ranks)
		require.Equal(t, "rank 0 cannot listen there: address already in use", what)
		return nil, net.ErrClosed
	}
	_, err := m.takePort(t.Context())
	require.ErrorIs(t, err, net.ErrClosed)
	require.Equal(t, 2, tries)
}

// Ranks that have all come are not said to be missing while they connect to each other.
func TestNobodyIsMissingWhenAllHaveCome(t *testing.T) {
	h := &host{slots: []memberSlot{{phase: slotPresent}, {phase: slotPresent}}}
	ranks, what := h.missing()
	require.Empty(t, ranks)
	require.Equal(t, "all ranks have come, and not all have connected to each other", what)
}

func TestListenNamesMissingRanks(t *testing.T) {
	var ls []*Listener
	var addrs []string
	for r := range 3 {
		l, err := Listen(Config{Rank: r, Size: 3, JoinTimeout: 100 * time.Millisecond})
		require.NoError(t, err)
		ls, addrs = append(ls, l), append(addrs, l.Addr())
	}
	// Rank 2 has an address and never joins.
	var wg sync.WaitGroup
	for _, l := range ls[:2] {
		wg.Go(func() {
			_, err := l.Join(context.Background(), addrs)
			require.ErrorIs(t, err, ErrTimeout)
		})
	}
	wg.Wait()
	// Now the others are gone, which is no reason to wait.
	start := time.Now()
	ls[2].cfg.JoinTimeout = time.Minute
	_, err := ls[2].Join(context.Background(), addrs)
	require.ErrorIs(t, err, ErrPeerLost)
	require.Less(t, time.Since(start), soon)
}

func TestJoinCancelled(t *testing.T) {
	requireNoGoroutines(t)
	addr := freeAddr(t)
	ctx, cancel := context.WithCancel(context.Background())
	others, stop := context.WithCancel(testContext(t))
	defer func(d time.Duration) { sayEvery = d }(sayEvery)
	sayEvery = 10 * time.Millisecond
	var log lockedBuffer
	var wg sync.WaitGroup
	errs := make([]error, 3)
	for r := range 3 {
		c := others
		if r == 1 {
			c = ctx
		}
		wg.Go(func() { _, errs[r] = Join(c, Config{Rank: r, Size: 4, Addr: addr, Logger: newTestLogger(&log)}) })
	}
	require.Eventually(t, func() bool { // rank 1 knows that it has been accepted, or rank 0 would wait for it to come back
		said := log.String()
		return strings.Contains(said, "ranks [3] have not come") && strings.Contains(said, `rank=1 "to join"="not all 4 ranks have come`)
	}, soon, time.Millisecond)
	cancel()
	wg.Wait()
	stop()
	for _, err := range errs { // one gives up, all know
		require.ErrorIs(t, err, context.Canceled)
	}
	requirePeer(t, errs[2], 1, ErrAborted)
	requireNoGoroutines(t)
}

// A rank whose join is cancelled when rank 0 has taken it in, and before it knows, tells that too: rank 0 would wait for it to come back.
func TestJoinCancelledBeforeItIsAnswered(t *testing.T) {
	for _, addr := range []string{freeAddr(t), freeName(t)} {
		requireNoGoroutines(t)
		accepts, knows := make(chan struct{}), make(chan struct{})
		var writes atomic.Int32
		host := Config{Size: 3, Addr: addr, delay: func() {
			if writes.Add(1) == 2 { // the first is its hello
				close(accepts)
				<-knows
			}
		}}
		errs := make(chan error, 1)
		whole, stop := context.WithCancel(testContext(t))
		go func() {
			_, err := Join(whole, host)
			errs <- err
		}()
		cfg := Config{Rank: 1, Size: 3, Addr: addr}
		require.NoError(t, cfg.validate())
		ctx, cancel := context.WithCancel(testContext(t))
		m := newMeeting(&cfg, "@cancelled", func(error) {})
		m.dial = func(ctx context.Context) (net.Conn, error) {
			var d net.Dialer
			conn, err := d.DialContext(ctx, cfg.network(), addr)
			return &ending{Conn: conn, waits: func() { <-accepts; cancel() }, ends: sync.OnceFunc(func() { close(knows) })}, err
		}
		_, err := newGuest(ctx, m)
		require.ErrorIs(t, err, context.Canceled)
		err = <-errs
		requirePeer(t, err, 1, ErrAborted)
		require.ErrorIs(t, err, context.Canceled)
		stop() // rank 0 waits for rank 2, which has not heard of it
		requireNoGoroutines(t)
	}
}

// ending is a connection of a guest that tells when it waits for a frame, and when it ends: with the failure of a join, or none.
type ending struct {
	net.Conn
	waits, ends func()
	reads       int
}

func (e *ending) Read(b []byte) (int, error) {
	if e.reads++; e.reads == 4 { // behind the three parts of a hello
		e.waits()
	}
	return e.Conn.Read(b)
}

func (e *ending) Write(b []byte) (int, error) {
	n, err := e.Conn.Write(b)
	if frameType(b[0]) == frameFail {
		e.ends()
	}
	return n, err
}

func (e *ending) Close() error {
	e.ends()
	return e.Conn.Close()
}

// A rank that leaves before all have come, because it crashed, may come back; also when its end is seen only after all have come.
func TestJoinAgainBeforeAllHaveCome(t *testing.T) {
	for _, seenLate := range []bool{false, true} {
		t.Run(fmt.Sprintf("seen late=%v", seenLate), func(t *testing.T) {
			addr := freeAddr(t)
			var wg sync.WaitGroup
			gs := make([]*Group, 3)
			join := func(r int) {
				wg.Go(func() {
					var err error
					gs[r], err = Join(testContext(t), Config{Rank: r, Size: 3, Addr: addr})
					assert.NoError(t, err)
				})
			}
			join(0)
			cfg := Config{Rank: 1, Size: 3, Addr: addr}
			require.NoError(t, cfg.validate())
			m := newMeeting(&cfg, "@crashed", func(error) {})
			crashed, err := newGuest(testContext(t), m)
			require.NoError(t, err)
			if seenLate {
				join(2)
				kind, _, err := crashed.s.recv()
				require.NoError(t, err)
				require.Equal(t, framePresent, kind)
			}
			crashed.s.conn.Close()
			join(1)
			if !seenLate {
				join(2)
			}
			wg.Wait()
			if t.Failed() {
				return
			}
			requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
			for _, g := range gs {
				g.Close()
			}
		})
	}
}

// A rank that is stopped while it waits for the others is named, by all.
func TestF2_JoinNamesWhoDoesNotAnswer(t *testing.T) {
	t.Parallel() // it mostly waits
	addr := freeAddr(t)
	cfg := Config{Rank: 1, Size: 3, Addr: addr}
	require.NoError(t, cfg.validate())
	errs := make([]error, 3)
	var wg sync.WaitGroup
	for _, r := range []int{0, 2} {
		wg.Go(func() {
			_, errs[r] = Join(testContext(t), Config{Rank: r, Size: 3, Addr: addr, JoinTimeout: 5 * time.Second})
		})
	}
	m := newMeeting(&cfg, "@stopped", func(error) {})
	stopped, err := newGuest(testContext(t), m)
	require.NoError(t, err)
	defer stopped.s.conn.Close()
	wg.Wait()
	for _, r := range []int{0, 2} {
		requirePeer(t, errs[r], 1, ErrTimeout)
		require.ErrorContains(t, errs[r], "ranks [1] have come and do not answer")
	}
}

func TestF3_ConfigurationsDiffer(t *testing.T) {
	for _, c := range []struct {
		name string
		odd  Config // of the process that is started as rank 1
		want []string
	}{
		{"size", Config{Rank: 1, Size: 4}, []string{"size: rank 0 has 3, rank 1 has 4"}},
		{"duplicate", Config{Rank: 2, Size: 3}, []string{"rank: two processes say they are rank 2, at @switchyard-"}},
		{"peer timeout", Config{Rank: 1, Size: 3, PeerTimeout: time.Second}, []string{"peer timeout: rank 0 has 10s, rank 1 has 1s"}},
		{"majority", Config{Rank: 1, Size: 3, Majority: true}, []string{"majority: rank 0 has false, rank 1 has true"}},
		{"release", Config{Rank: 1, Size: 3, release: "9.9.9 (build 0123456789ab)"}, []string{
			fmt.Sprintf("version: the rank that connects has Switchyard 9.9.9 (build 0123456789ab), the rank it connects to %s: a group has one build of one release", build())}},
		{"build", Config{Rank: 1, Size: 3, release: switchyard.Version + " (build 0123456789ab)"}, []string{fmt.Sprintf(
			"version: the rank that connects has Switchyard %s (build 0123456789ab), the rank it connects to %s: a group has one build of one release", switchyard.Version, build())}},
		{"version", Config{Rank: 1, Size: 3, version: 7}, []string{fmt.Sprintf("version: the rank that connects speaks protocol 7, the rank it connects to %d", protocolVersion)}},
		{"secret", Config{Rank: 1, Size: 3, Secret: []byte("sesame")}, []string{"secret: the rank that connects has one, the rank it connects to has none"}},
	} {
		for _, secret := range []string{"", "a secret of all ranks"} {
			if secret != "" && c.odd.Secret != nil {
				continue
			}
			t.Run(fmt.Sprintf("%s/secret=%v", c.name, secret != ""), func(t *testing.T) {
				_, errs := startJoin(t, 3, func(r int) Config {
					cfg := Config{Rank: r, Size: 3}
					if r == 1 {
						cfg = c.odd
					}
					if cfg.Secret == nil && secret != "" {
						cfg.Secret = []byte(secret)
					}
					return cfg
				})
				for i, err := range errs {
					require.ErrorIs(t, err, ErrMismatch)
					for _, want := range c.want {
						require.ErrorContains(t, err, want, "rank %d", i)
					}
				}
			})
		}
	}
}

func TestF3_RankOutOfRange(t *testing.T) {
	addr := freeAddr(t)
	done := make(chan error)
	go func() {
		_, err := Join(testContext(t), Config{Size: 2, Addr: addr})
		done <- err
	}()
	// No Switchyard would connect as such, so by hand.
	cfg := Config{Size: 2, Addr: addr}
	require.NoError(t, cfg.validate())
	m := newMeeting(&cfg, "@odd", func(error) {})
	m.me.rank = 9
	_, err := newGuest(testContext(t), m)
	for _, err := range []error{err, <-done} {
		require.ErrorIs(t, err, ErrMismatch)
		require.ErrorContains(t, err, "rank: a rank that connects says it is 9, want 0 to 1")
	}
}

// With a secret, one who does not know it cannot end the join: it is told, the
// others go on.
func TestF4_WrongSecretIsTurnedAway(t *testing.T) {
	for _, wrong := range [][]byte{nil, []byte("guess")} {
		addr := freeAddr(t)
		secret := []byte("what only ranks know")
		var log lockedBuffer
		var wg sync.WaitGroup
		gs := make([]*Group, 2)
		wg.Go(func() {
			var err error
			gs[0], err = Join(testContext(t), Config{Size: 2, Addr: addr, Secret: secret, Logger: newTestLogger(&log)})
			require.NoError(t, err)
		})
		_, err := Join(testContext(t), Config{Rank: 1, Size: 2, Addr: addr, Secret: wrong})
		require.ErrorIs(t, err, ErrMismatch)
		require.ErrorContains(t, err, "secret: ")
		require.Eventually(t, func() bool { return strings.Contains(log.String(), "secret: ") }, soon, time.Millisecond)
		wg.Go(func() {
			var err error
			gs[1], err = Join(testContext(t), Config{Rank: 1, Size: 2, Addr: addr, Secret: secret})
			require.NoError(t, err)
		})
		wg.Wait()
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		require.NotContains(t, log.String(), string(secret))
		for _, g := range gs {
			g.Close()
		}
	}
}

// If the right one never comes, the error says who was turned away.
func TestF4_TurnedAwayIsNamed(t *testing.T) {
	addr := freeAddr(t)
	done := make(chan error)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	var log lockedBuffer
	go func() {
		_, err := Join(ctx, Config{Size: 2, Addr: addr, Secret: []byte("right"), Logger: newTestLogger(&log)})
		done <- err
	}()
	_, err := Join(testContext(t), Config{Rank: 1, Size: 2, Addr: addr, Secret: []byte("wrong")})
	require.ErrorIs(t, err, ErrMismatch)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "connection refused") }, soon, time.Millisecond)
	cancel()
	err = <-done
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "turned away: 127.0.0.1:")
	require.ErrorContains(t, err, "secret: it is not the same on the two sides")
}

func newTestLogger(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// strangers connect to an address and misbehave in all ways until stopped.
func strangers(t *testing.T, network, addr string) (stop func()) {
	var conns []net.Conn
	var garbage [200]byte
	rand.Read(garbage[:])
	huge := (&hello{version: protocolVersion, body: make([]byte, 100)}).encode()
	binary.LittleEndian.PutUint16(huge[12:], 0xffff)
	noCard := (&hello{version: protocolVersion, body: []byte("no card")}).encode()
	wrongPurpose := (&hello{version: protocolVersion, body: (&identity{purpose: 9}).encode()}).encode()
	for _, b := range [][]byte{
		nil, // says nothing, and stays
		garbage[:],
		[]byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
		helloMagic[:], // half a hello, and stays
		huge,
		noCard,
		wrongPurpose,
	} {
		conn, err := net.Dial(network, addr)
		for try := 0; err != nil && try < 200; try++ { // rank 0 may not be there yet
			time.Sleep(5 * time.Millisecond)
			conn, err = net.Dial(network, addr)
		}
		require.NoError(t, err)
		conn.Write(b)
		conns = append(conns, conn)
	}
	// One that comes and goes.
	conn, err := net.Dial(network, addr)
	require.NoError(t, err)
	conn.Close()
	return func() {
		for _, c := range conns {
			c.Close()
		}
	}
}

func TestF4_StrangersDoNotStopTheRendezvous(t *testing.T) {
	for i, secret := range [][]byte{nil, []byte("secret"), nil} {
		requireNoGoroutines(t)
		network, addr := "tcp", freeAddr(t)
		if i == 2 {
			network, addr = "unix", freeName(t)
		}
		var wg sync.WaitGroup
		gs := make([]*Group, 3)
		join := func(r int) {
			wg.Go(func() {
				var err error
				gs[r], err = Join(testContext(t), Config{Rank: r, Size: 3, Addr: addr, Secret: secret})
				require.NoError(t, err)
			})
		}
		join(0)
		stop := strangers(t, network, addr)
		join(1)
		join(2)
		wg.Wait()
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		stop()
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		for _, g := range gs {
			g.Close()
		}
		requireNoGoroutines(t)
	}
}

func TestF4_StrangersDoNotStopTheMesh(t *testing.T) {
	for _, secret := range [][]byte{nil, []byte("secret")} {
		requireNoGoroutines(t)
		const n = 3
		var ls []*Listener
		var addrs []string
		for r := range n {
			l, err := Listen(Config{Rank: r, Size: n, Secret: secret})
			require.NoError(t, err)
			ls, addrs = append(ls, l), append(addrs, l.Addr())
		}
		var stops []func()
		for _, a := range addrs {
			stops = append(stops, strangers(t, "unix", a))
		}
		gs := make([]*Group, n)
		var wg sync.WaitGroup
		for r, l := range ls {
			wg.Go(func() {
				var err error
				gs[r], err = l.Join(testContext(t), addrs)
				require.NoError(t, err)
			})
		}
		wg.Wait()
		// Once joined, nobody can connect any more.
		_, err := net.Dial("unix", addrs[0])
		require.Error(t, err)
		for _, stop := range stops {
			stop()
		}
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		for _, g := range gs {
			g.Close()
		}
		requireNoGoroutines(t)
	}
}

// A silent stranger is let go after a while, not kept for ever.
func TestF4_SilentStrangerIsLetGo(t *testing.T) {
	l, err := Listen(Config{Size: 2, handshakeTimeout: 50 * time.Millisecond})
	require.NoError(t, err)
	conn, err := net.Dial("unix", l.Addr())
	require.NoError(t, err)
	defer conn.Close()
	ctx, cancel := context.WithCancel(testContext(t))
	done := make(chan error)
	go func() {
		_, err := l.Join(ctx, []string{l.Addr(), "@nobody"})
		done <- err
	}()
	conn.SetReadDeadline(time.Now().Add(soon))
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
}

func TestF3_MeshConfigurationsDiffer(t *testing.T) {
	t.Parallel() // it mostly waits
	start := func(cfgs [2]Config, lists func(addrs []string) [2][]string) []error {
		var ls []*Listener
		var addrs []string
		for r := range 2 {
			cfgs[r].Rank, cfgs[r].Size = r, 2
			l, err := Listen(cfgs[r])
			require.NoError(t, err)
			ls, addrs = append(ls, l), append(addrs, l.Addr())
		}
		both := lists(addrs)
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for r, l := range ls {
			wg.Go(func() { _, errs[r] = l.Join(testContext(t), both[r]) })
		}
		wg.Wait()
		return errs
	}
	same := func(a []string) [2][]string { return [2][]string{a, a} }
	for _, err := range start([2]Config{{version: protocolVersion + 1}, {}}, same) {
		require.ErrorIs(t, err, ErrMismatch)
		require.ErrorContains(t, err, fmt.Sprintf("the rank that connects speaks protocol %d, the rank it connects to %d", protocolVersion, protocolVersion+1))
	}
	for _, err := range start([2]Config{{PeerTimeout: time.Second}, {}}, same) {
		require.ErrorIs(t, err, ErrMismatch)
		require.ErrorContains(t, err, "peer timeout: rank 0 has 1s, rank 1 has 10s")
	}
	errs := start([2]Config{{Secret: []byte("a"), JoinTimeout: 2 * time.Second}, {Secret: []byte("b")}}, same)
	require.ErrorIs(t, errs[0], ErrTimeout) // rank 0 cannot tell it from a stranger
	require.ErrorIs(t, errs[1], ErrMismatch)
	require.ErrorContains(t, errs[1], "secret: ")
	l, err := Listen(Config{Size: 2})
	require.NoError(t, err)
	defer l.Close()
	errs = start([2]Config{}, func(a []string) [2][]string {
		return [2][]string{{a[0], l.Addr()}, a}
	})
	for _, err := range errs {
		require.ErrorIs(t, err, ErrMismatch)
		require.ErrorContains(t, err, "addresses: rank 0 has the list ")
	}
}

// pipeGreet runs both sides of the handshake against each other, with what is
// between them, if anything.
func pipeGreet(t *testing.T, serverSecret, clientSecret []byte) (server, client *session, serr, cerr error) {
	a, b := net.Pipe()
	deadline := time.Now().Add(time.Minute)
	a.SetDeadline(deadline)
	b.SetDeadline(deadline)
	var wg sync.WaitGroup
	wg.Go(func() {
		if server, serr = greet(a, true, 1, serverSecret, identity{purpose: toMesh}); serr != nil {
			a.Close()
		}
	})
	if client, cerr = greet(b, false, 1, clientSecret, identity{purpose: toMesh, rank: 1}); cerr != nil {
		b.Close()
	}
	wg.Wait()
	return server, client, serr, cerr
}

func TestF4_Handshake(t *testing.T) {
	key := []byte("0123456789abcdef")
	s, c, serr, cerr := pipeGreet(t, key, key)
	require.NoError(t, serr)
	require.NoError(t, cerr)
	// What follows is signed, in both directions.
	for i := range 3 {
		go s.send(frameTable, []byte{byte(i)})
		kind, body, err := c.recv()
		require.NoError(t, err)
		require.Equal(t, frameTable, kind)
		require.Equal(t, []byte{byte(i)}, body)
		go c.send(frameDone, nil)
		_, _, err = s.recv()
		require.NoError(t, err)
	}
	_, _, serr, cerr = pipeGreet(t, key, []byte("0123456789abcdeF"))
	require.ErrorIs(t, serr, ErrMismatch)
	require.ErrorIs(t, cerr, ErrMismatch)
	_, _, serr, cerr = pipeGreet(t, key, nil)
	require.ErrorIs(t, serr, ErrMismatch)
	require.ErrorIs(t, cerr, ErrMismatch)
	_, _, serr, cerr = pipeGreet(t, nil, key)
	require.ErrorIs(t, serr, ErrMismatch)
	require.ErrorIs(t, cerr, ErrMismatch)
}

// recorder keeps what goes through a connection.
type recorder struct {
	net.Conn
	sent, got bytes.Buffer
}

func (r *recorder) Write(b []byte) (int, error) { r.sent.Write(b); return r.Conn.Write(b) }
func (r *recorder) Read(b []byte) (int, error) {
	n, err := r.Conn.Read(b)
	r.got.Write(b[:n])
	return n, err
}

func TestF4_SecretIsNotSent(t *testing.T) {
	key := []byte("a rather long secret")
	a, b := net.Pipe()
	go greet(a, true, 1, key, identity{purpose: toMesh})
	rec := &recorder{Conn: b}
	_, err := greet(rec, false, 1, key, identity{purpose: toMesh})
	require.NoError(t, err)
	require.NotContains(t, rec.sent.String()+rec.got.String(), string(key))
}

// What a rank once sent is worth nothing on another connection.
func TestF4_ReplayIsRefused(t *testing.T) {
	key := []byte("secret")
	a, b := net.Pipe()
	go greet(a, true, 1, key, identity{purpose: toMesh})
	rec := &recorder{Conn: b}
	_, err := greet(rec, false, 1, key, identity{purpose: toMesh})
	require.NoError(t, err)

	a, b = net.Pipe()
	done := make(chan error)
	go func() {
		_, err := greet(a, true, 1, key, identity{purpose: toMesh})
		a.Close()
		done <- err
	}()
	go io.Copy(io.Discard, b)
	b.Write(rec.sent.Bytes())
	require.ErrorIs(t, <-done, ErrMismatch)

	// The server's words, to a client.
	a, b = net.Pipe()
	go func() {
		_, err := greet(b, false, 1, key, identity{purpose: toMesh})
		b.Close()
		done <- err
	}()
	go io.Copy(io.Discard, a)
	a.Write(rec.got.Bytes())
	require.ErrorIs(t, <-done, ErrMismatch)
}

// A side that gets back its own words is not fooled, and a server's proof
// cannot be had for a client's.
func TestF4_ReflectionIsRefused(t *testing.T) {
	key := []byte("secret")
	a, b := net.Pipe()
	go io.Copy(b, b) // a mirror
	_, err := greet(a, false, 1, key, identity{purpose: toMesh})
	require.ErrorIs(t, err, errMalformed)
	b.Close()

	// Two servers, connected to each other through an attacker: neither says
	// more than a hello.
	a1, b1 := net.Pipe()
	a2, b2 := net.Pipe()
	errs := make(chan error, 2)
	for _, c := range []net.Conn{a1, a2} {
		go func() {
			_, err := greet(c, true, 1, key, identity{purpose: toMesh})
			errs <- err
		}()
	}
	h := (&hello{version: 1, secret: true, body: (&identity{purpose: toMesh}).encode()}).encode()
	b1.Write(h)
	hello1 := make([]byte, len(h))
	io.ReadFull(b1, hello1)
	go b2.Write(hello1)
	hello2 := make([]byte, len(h))
	io.ReadFull(b2, hello2)
	more := make([]byte, 1)
	b2.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	_, err = b2.Read(more)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, errors.Join(b1.Close(), b2.Close()))
	for range 2 {
		require.Error(t, <-errs)
	}
}

func TestF4_TamperedFrameIsRefused(t *testing.T) {
	key := []byte("secret")
	tamper := func(t *testing.T, change func(b []byte) []byte) error {
		s, c, serr, cerr := pipeGreet(t, key, key)
		require.NoError(t, errors.Join(serr, cerr))
		rec := &recorder{Conn: s.conn}
		s.conn = rec
		go s.send(frameTable, []byte("addresses"))
		_, _, err := c.recv()
		require.NoError(t, err)
		go s.conn.(*recorder).Conn.Write(change(bytes.Clone(rec.sent.Bytes())))
		_, _, err = c.recv()
		return err
	}
	require.ErrorIs(t, tamper(t, func(b []byte) []byte { return b }), errMalformed) // said twice
	require.ErrorIs(t, tamper(t, func(b []byte) []byte { b[7]++; return b }), errMalformed)
	require.ErrorIs(t, tamper(t, func(b []byte) []byte { b[0] = byte(frameFail); return b }), errMalformed)
}

// The unix sockets refuse other users.
func TestF4_OtherUserIsRefused(t *testing.T) {
	var log lockedBuffer
	l, err := Listen(Config{Size: 2, Logger: newTestLogger(&log)})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(testContext(t))
	done := make(chan error)
	go func() {
		_, err := l.Join(ctx, []string{l.Addr(), "@nobody"})
		done <- err
	}()
	cmd := proctest.AsNobody(t, "stranger", l.Addr())
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "closed")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "it belongs to user 65534") }, soon, time.Millisecond)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
}

// playStranger connects, and says whether it is let go without a word.
func playStranger(args []string) int {
	conn, err := net.Dial("unix", args[0])
	if err != nil {
		fmt.Println(err)
		return 1
	}
	conn.SetDeadline(time.Now().Add(time.Minute))
	if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		fmt.Println("got an answer", n, err)
		return 1
	}
	fmt.Println("closed")
	return 0
}

// A member that sends nonsense loses its connection, which is a loss like any
// other; the rest goes on.
func TestF4_MalformedFrameLosesOnlyItsSender(t *testing.T) {
	gs := startListen(t, 3, Config{})
	gs[1].n.mu.Lock()
	l := gs[1].n.links[0].(*sockLink)
	gs[1].n.mu.Unlock()
	_, err := l.conn.Write(bytes.Repeat([]byte("nonsense"), 100))
	require.NoError(t, err)
	waitDone(t, gs[0])
	requirePeer(t, gs[0].Err(), 1, ErrPeerLost)
	require.ErrorContains(t, gs[0].Err(), "malformed frame")
	waitDone(t, gs[1])
	waitDone(t, gs[2])
	requirePeer(t, gs[2].Err(), 1, ErrPeerLost)
	requireSurvivors(t, []*Group{gs[0], gs[2]}, 0, 2)
	_, err = gs[1].Shrink(testContext(t))
	require.Error(t, err)
	for _, g := range gs {
		g.Close()
	}
}

// Descriptors that do not fit in the table of open files are an error of that
// call, and do not leak.
func TestExchangeFDsWithoutRoom(t *testing.T) {
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer f.Close()
	fds := make([]int, 40)
	for i := range fds {
		fds[i] = int(f.Fd())
	}
	limit := func(room int) (restore func()) {
		var old syscall.Rlimit
		require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old))
		tight := old
		tight.Cur = uint64(countFDs(t) + room)
		require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &tight))
		return func() { require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old)) }
	}
	onOneHost(t, 2, func(t *testing.T, gs []*Group) {
		before := countFDs(t)
		restore := limit(60) // one set fits, two do not
		errs := onEach(gs, func(g *Group) error {
			_, err := g.ExchangeFDs(testContext(t), fds)
			return err
		})
		restore()
		for _, err := range errs {
			require.Error(t, err)
		}
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		requireFDs(t, before)
	})
	t.Run("receiver", func(t *testing.T) {
		pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
		require.NoError(t, err)
		var links [2]*sockLink
		for i, fd := range pair {
			f := os.NewFile(uintptr(fd), "pair")
			c, err := net.FileConn(f)
			require.NoError(t, err)
			f.Close()
			defer c.Close()
			links[i] = &sockLink{conn: c.(*net.UnixConn), timeout: 10 * time.Second}
		}
		before := countFDs(t)
		m := message{kind: kindData, op: opExchangeFDs, gid: 1, seq: 5, fds: fds}
		require.NoError(t, links[0].writeMessage(&m))
		require.NoError(t, links[0].writeMessage(&m))
		in := &fdReader{l: links[1], oob: make([]byte, 2000)}
		restore := limit(20)
		got, err := readMessage(in, in.take)
		restore()
		require.NoError(t, err)
		require.Contains(t, got.poison, "of 40 descriptors arrived")
		gs, err := Local(2)
		require.NoError(t, err)
		defer gs[0].Close()
		defer gs[1].Close()
		var pe *PeerError
		require.ErrorAs(t, gs[1].poisoned(&call{op: opExchangeFDs}, []message{got, {}}, 0), &pe)
		require.Equal(t, 1, pe.Rank, "rank 0 has sent them")
		require.Equal(t, before, countFDs(t))
		got, err = readMessage(in, in.take) // the next is not affected
		require.NoError(t, err)
		require.Empty(t, got.poison)
		require.Len(t, got.fds, 40)
		got.drop()
		require.Equal(t, before, countFDs(t))
	})
}

func TestJoin64(t *testing.T) {
	start := time.Now()
	gs, errs := startJoin(t, 64, func(int) Config { return Config{PeerTimeout: time.Minute} }) // of 4032 ends of connections one can starve
	requireAll(t, errs)
	t.Logf("64 ranks over sockets, in one process: %v", time.Since(start))
	requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
	requireAll(t, onEach(gs, func(g *Group) error { return g.Close() }))
}

// mutable is one end of a connection. Nothing that it sends arrives while it is mute.
type mutable struct {
	net.Conn
	mute *atomic.Bool
}

func (c mutable) Write(b []byte) (int, error) {
	if c.mute.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// A group of which nobody says anything lives. Its ranks lose one of which nothing is heard, when the peer timeout is over and not before. The
// ranks have the links of sockets, on connections in memory.
func TestHeartbeatsKeepQuietGroupsAlive(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const timeout = 2 * time.Second
		gs, err := Local(3)
		require.NoError(t, err)
		var mute [3]atomic.Bool
		for i, a := range gs {
			for j, b := range gs[:i] {
				a.n.links[j], b.n.links[i] = nil, nil
				mine, other := net.Pipe()
				require.True(t, startLink(a.n, j, mutable{mine, &mute[i]}, timeout))
				require.True(t, startLink(b.n, i, mutable{other, &mute[j]}, timeout))
			}
		}
		barrier := func(g *Group) error { return g.Barrier(testContext(t)) }
		requireAll(t, onEach(gs, barrier))
		time.Sleep(time.Minute)
		requireAll(t, onEach(gs, barrier))

		time.Sleep(time.Minute)
		mute[2].Store(true)
		muted := time.Now()
		for _, err := range onEach(gs[:2], barrier) {
			requirePeer(t, err, 2, ErrPeerLost)
			require.ErrorContains(t, err, "nothing heard of it for 2s")
		}
		silent := time.Since(muted)
		require.LessOrEqual(t, silent, timeout)
		require.GreaterOrEqual(t, silent, timeout-timeout/beatsPerTimeout, "the last beat was at most so long ago")
		for _, g := range gs {
			g.Kill()
		}
		time.Sleep(time.Minute) // the links end
	})
}

func TestFromEnv(t *testing.T) {
	for _, name := range []string{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SWITCHYARD_PORT"} {
		t.Setenv(name, "")
	}
	cfg, err := FromEnv()
	require.NoError(t, err)
	require.NoError(t, cfg.validate())
	require.Equal(t, 1, cfg.Size)
	t.Setenv("RANK", "3")
	t.Setenv("WORLD_SIZE", "8")
	t.Setenv("MASTER_PORT", "29400")
	t.Setenv("SWITCHYARD_PEER_TIMEOUT", "3s")
	cfg, err = FromEnv()
	require.NoError(t, err)
	require.Equal(t, 3, cfg.Rank)
	require.Equal(t, 8, cfg.Size)
	require.Equal(t, 3, cfg.LocalRank)
	require.Regexp(t, "^@switchyard-meet-[0-9]+-29400-", cfg.Addr)
	require.NoError(t, cfg.validateAddr())
	t.Setenv("SWITCHYARD_PORT", "29401")
	cfg, err = FromEnv()
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:29401", cfg.Addr)
	require.Equal(t, 3*time.Second, cfg.PeerTimeout)
	t.Setenv("RANK", "first")
	_, err = FromEnv()
	require.ErrorContains(t, err, `comm: environment: RANK is "first", not a number`)
}

// The last try of a join ends with the join, which is no news of rank 0: the error says how the try before ended.
func TestJoinSaysHowItsTriesEnded(t *testing.T) {
	t.Parallel() // it mostly waits
	errs := make([]error, 30)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			cfg := Config{Rank: 1, Size: 2, Addr: "@nobody", JoinTimeout: 2 * time.Second}
			if err := cfg.validate(); err != nil {
				errs[i] = err
				return
			}
			ctx, cancel := withJoinTimeout(testContext(t), &cfg)
			defer cancel()
			m := newMeeting(&cfg, "@here", func(error) {})
			tries := 0
			m.dial = func(ctx context.Context) (net.Conn, error) {
				if tries++; tries == 1 {
					return nil, syscall.ECONNREFUSED
				}
				deadline, _ := ctx.Deadline()
				time.Sleep(time.Until(deadline)) // as a dialer does, which knows of the deadline before the context is over
				return nil, os.ErrDeadlineExceeded
			}
			_, errs[i] = newGuest(ctx, m)
		})
	}
	wg.Wait()
	for _, err := range errs {
		require.ErrorIs(t, err, ErrTimeout)
		require.ErrorContains(t, err, "last try: connection refused")
	}
}
