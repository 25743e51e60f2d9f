package comm

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
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

func TestTopology(t *testing.T) {
	top := newTopology([]int{7, 3, 7, 3, 3}, 3)
	require.Equal(t, []int{2, 0, 1, 1}, []int{top.Hosts, top.PerHost, top.Host, top.Local})
	for r, want := range [][2]int{{0, 0}, {1, 0}, {0, 1}, {1, 1}, {1, 2}} {
		require.Equal(t, want, [2]int{top.HostOf(r), top.LocalOf(r)})
		require.Equal(t, r, top.RankOf(want[0], want[1]))
	}
	require.Equal(t, []int{-1, -1, -1, -1}, []int{top.RankOf(0, 2), top.RankOf(2, 0), top.RankOf(-1, 0), top.RankOf(0, -1)})
	one := newTopology([]int{4, 4, 4}, 2)
	require.Equal(t, []int{1, 3, 0, 2}, []int{one.Hosts, one.PerHost, one.Host, one.Local})
	require.Equal(t, []int{0, 2, 2, -1}, []int{one.HostOf(2), one.LocalOf(2), one.RankOf(0, 2), one.RankOf(0, 3)})
}

// Rank 0 of a group on several hosts without a secret warns once, whoever has asked for a log.
func TestAGroupOnSeveralHostsWithoutASecretWarns(t *testing.T) {
	const text = "ranks on several hosts have no secret"
	for _, c := range []struct {
		secret  string
		perHost int
		warns   int
	}{{"", 1, 1}, {"sesame", 1, 0}, {"", 2, 0}} {
		var log lockedBuffer
		for _, g := range startHosts(t, 2, c.perHost, Config{Secret: []byte(c.secret), Logger: newTestLogger(&log)}) {
			require.NoError(t, g.Close())
		}
		require.Equal(t, c.warns, strings.Count(log.String(), text), "%+v: %s", c, log.String())
	}
	read, write, err := os.Pipe()
	require.NoError(t, err)
	old := os.Stderr
	os.Stderr = write
	gs := startHosts(t, 2, 1, Config{})
	os.Stderr = old
	require.NoError(t, write.Close())
	said, err := io.ReadAll(read)
	require.NoError(t, err)
	require.Regexp(t, `^switchyard: group world: `+text+`.*SWITCHYARD_SECRET.*\n$`, string(said))
	for _, g := range gs {
		require.NoError(t, g.Close())
	}
}

// Home and Rail are of the right ranks, work, and are closed with their group.
func TestHomeAndRail(t *testing.T) {
	for _, c := range []struct{ n, perHost int }{{2, 1}, {4, 2}, {6, 2}, {5, 2}, {3, 3}} {
		t.Run(fmt.Sprintf("%d ranks, %d a host", c.n, c.perHost), func(t *testing.T) {
			requireNoGoroutines(t)
			gs := startHosts(t, c.n, c.perHost, Config{Secret: []byte("sesame")})
			requireAll(t, onEach(gs, func(g *Group) error {
				top := g.Topology()
				// All ranks take them in the same order: each gather waits for the others of its group.
				for _, c := range []struct {
					name        string
					of          func() (*Group, error)
					host, local int
				}{{"home", g.Home, top.Host, -1}, {"rail", g.Rail, -1, top.Local}} {
					sub, err := c.of()
					if err != nil {
						return err
					}
					var ranks []string
					for r := range g.Size() {
						if top.HostOf(r) == c.host || top.LocalOf(r) == c.local {
							ranks = append(ranks, strconv.Itoa(r))
						}
					}
					all, err := sub.AllGather(testContext(t), []byte(strconv.Itoa(g.Rank())))
					var got []string
					for _, b := range all {
						got = append(got, string(b))
					}
					if err != nil || fmt.Sprint(got) != fmt.Sprint(ranks) {
						return fmt.Errorf("%s of rank %d: %v, want %v: %w", c.name, g.Rank(), got, ranks, err)
					}
					again, err := c.of()
					if again != sub || err != nil {
						return fmt.Errorf("another %s: %w", c.name, err)
					}
				}
				return nil
			}))
			requireAll(t, onEach(gs, (*Group).Close))
			requireNoGoroutines(t)
		})
	}
}

// What a rank says to one on another host arrives whole and in order, whatever its size.
func TestRelayLarge(t *testing.T) {
	gs := startHosts(t, 4, 2, Config{})
	for _, size := range []int{0, 1, maxSealed - 1, maxFrame, maxFrame + 1, 3*maxFrame + 17} {
		requireAll(t, onEach(gs, func(g *Group) error {
			mine := strings.Repeat(strconv.Itoa(g.Rank()), size)
			all, err := g.AllGather(testContext(t), []byte(mine))
			for r := range all {
				if string(all[r]) != strings.Repeat(strconv.Itoa(r), size) {
					return fmt.Errorf("%d bytes from rank %d are wrong", size, r)
				}
			}
			return err
		}))
	}
	require.Error(t, errors.Join(onEach(gs, func(g *Group) error {
		if g.Rank() == 3 { // the text of a rank that cannot take part
			_, err := g.exchange(testContext(t), opAllGather, message{poison: "no room"})
			return err
		}
		_, err := g.AllGather(testContext(t), nil)
		requirePeer(t, err, 3, err)
		require.ErrorContains(t, err, "no room")
		return err
	})...))
	requireAll(t, onEach(gs, (*Group).Close))
}

func TestDescriptorsDoNotCrossHosts(t *testing.T) {
	gs := startHosts(t, 4, 2, Config{})
	requireAll(t, onEach(gs, func(g *Group) error {
		_, err := g.ExchangeFDs(testContext(t), nil)
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "2 hosts")
		_, err = g.Share(testContext(t), nil)
		require.ErrorIs(t, err, errors.ErrUnsupported)
		home, err := g.Home()
		if err != nil {
			return err
		}
		null, err := os.Open(os.DevNull)
		if err != nil {
			return err
		}
		defer null.Close()
		all, err := home.ExchangeFDs(testContext(t), []int{int(null.Fd())})
		for _, fds := range all {
			closeFDs(fds)
		}
		return err
	}))
	requireAll(t, onEach(gs, (*Group).Close))
}

// Leaders that close before the others still pass on what these say, in a subgroup of theirs.
func TestFirstRanksLeaveFirst(t *testing.T) {
	requireNoGoroutines(t)
	gs := startHosts(t, 6, 3, Config{})
	rails := make([]*Group, 6)
	requireAll(t, onEach(gs, func(g *Group) (err error) {
		rails[g.Rank()], err = g.Split(testContext(t), g.Topology().Local, 0)
		if err == nil {
			err = g.Barrier(testContext(t))
		}
		return errors.Join(err, g.Close())
	}))
	for local := range 3 {
		for range 3 {
			requireAll(t, onEach([]*Group{rails[2], rails[5]}, func(g *Group) error { return g.Barrier(testContext(t)) }))
		}
		rails[local].Close()
		rails[local+3].Close()
	}
	requireNoGoroutines(t)
}

// The loss of a rank is known on all hosts, under its number, and the host that lost it leaves whole.
func TestF2_LossesOnSeveralHosts(t *testing.T) {
	for _, c := range []struct {
		name string
		lost int
		// survivors, and whom the others on the host blame
		survivors []int
	}{{"a rank", 3, []int{0, 1, 4, 5}}, {"the leader of a host", 2, []int{0, 1, 4, 5}}, {"rank 0", 0, []int{2, 3, 4, 5}}} {
		t.Run(c.name, func(t *testing.T) {
			requireNoGoroutines(t)
			gs := startHosts(t, 6, 2, Config{PeerTimeout: time.Minute})
			start := time.Now()
			errs := onEach(gs, func(g *Group) error {
				if g.Rank() == c.lost {
					g.Kill()
					return nil
				}
				return g.Barrier(testContext(t))
			})
			require.Less(t, time.Since(start), soon)
			for r, err := range errs {
				if r != c.lost {
					requirePeer(t, err, c.lost, ErrPeerLost)
				}
			}
			next := make([]*Group, 6)
			for r, err := range onEach(gs, func(g *Group) (err error) {
				if g.Rank() != c.lost {
					next[g.Rank()], err = g.Shrink(testContext(t))
				}
				return err
			}) {
				if r == c.lost^1 {
					requirePeer(t, err, c.lost, ErrPeerLost)
					require.ErrorContains(t, err, fmt.Sprintf("host %d has lost it", r/2))
					continue
				}
				require.NoError(t, err, "rank %d", r)
			}
			var rest []*Group
			for _, r := range c.survivors {
				rest = append(rest, next[r])
			}
			requireAll(t, onEach(rest, func(g *Group) error {
				if top := g.Topology(); g.Size() != 4 || top.Hosts != 2 || top.PerHost != 2 {
					return fmt.Errorf("%d survivors on %d hosts", g.Size(), top.Hosts)
				}
				return g.Barrier(testContext(t))
			}))
			for _, g := range append(gs, rest...) {
				g.Close()
			}
			requireNoGoroutines(t)
		})
	}
}

// Survivors of one host all stay, whether theirs has lost a rank or not.
func TestF2_SurvivorsOfOneHost(t *testing.T) {
	gs := startHosts(t, 4, 2, Config{})
	for _, r := range []int{0, 2, 3} {
		gs[r].Kill()
	}
	waitDone(t, gs[1])
	_, err := gs[1].Shrink(testContext(t)) // it has lost its leader
	requirePeer(t, err, 0, ErrPeerLost)

	gs = startHosts(t, 6, 3, Config{})
	for _, r := range []int{2, 3, 4, 5} {
		gs[r].Kill()
	}
	next := make([]*Group, 2)
	requireAll(t, onEach(gs[:2], func(g *Group) (err error) {
		waitDone(t, g)
		if next[g.Rank()], err = g.Shrink(testContext(t)); err == nil {
			err = next[g.Rank()].Barrier(testContext(t))
		}
		return err
	}))
	for _, g := range append(gs[:2], next...) {
		g.Close()
	}
}

// With Majority more than half of the ranks go on, or half with rank 0. Fewer do not, and an error says so. On one host any number does.
func TestF2_TheMajorityGoesOn(t *testing.T) {
	for _, c := range []struct {
		ranks, perHost int
		lost           []int
		want           string // "" where the others go on
	}{
		{6, 2, []int{4, 5}, ""},
		{6, 2, []int{2, 3, 4, 5}, "ranks [2 3 4 5] are gone, and the 2 that are left are no majority of 6"},
		{4, 2, []int{2, 3}, ""},
		{4, 2, []int{0, 1}, "ranks [0 1] are gone, and the 2 that are left are no majority of 4"},
		{4, 2, []int{3}, ""}, // rank 2 leaves with its host
		{4, 4, []int{0, 1, 2}, ""},
	} {
		t.Run(fmt.Sprint(c.ranks, c.perHost, c.lost), func(t *testing.T) {
			gs := startHosts(t, c.ranks, c.perHost, Config{Majority: true})
			for _, r := range c.lost {
				gs[r].Kill()
			}
			next := make([]*Group, c.ranks)
			errs := onEach(gs, func(g *Group) (err error) {
				if slices.Contains(c.lost, g.Rank()) {
					return nil
				}
				waitDone(t, g)
				if next[g.Rank()], err = g.Shrink(testContext(t)); err != nil {
					return err
				}
				return next[g.Rank()].Barrier(testContext(t))
			})
			for r, err := range errs {
				switch {
				case slices.Contains(c.lost, r):
				case c.want != "":
					requirePeer(t, err, c.lost[0], ErrPeerLost)
					require.ErrorContains(t, err, c.want)
				case len(c.lost) < c.perHost && r/c.perHost == c.lost[0]/c.perHost && c.perHost < c.ranks:
					require.ErrorContains(t, err, "leaves whole")
				default:
					require.NoError(t, err, "rank %d", r)
				}
			}
			for _, g := range append(gs, next...) {
				if g != nil {
					g.Close()
				}
			}
		})
	}
}

// The leader of a host that ends before the mesh stands is named, on its host and on the others.
func TestF2_LeaderIsLostInTheJoin(t *testing.T) {
	ls, addrs := make([]*Listener, 4), make([]string, 4)
	for r := range ls {
		l, err := Listen(Config{Rank: r, Size: 4, LocalSize: 2, host: fmt.Sprint("host ", r/2), Addr: freeAddr(t), JoinTimeout: proctest.Scaled(1500 * time.Millisecond)})
		require.NoError(t, err)
		ls[r], addrs[r] = l, l.Addr()
	}
	ls[2].Close()
	errs := make([]error, 4)
	var wg sync.WaitGroup
	for _, r := range []int{0, 1, 3} {
		wg.Go(func() { _, errs[r] = ls[r].Join(testContext(t), addrs) })
	}
	wg.Wait()
	for _, r := range []int{0, 1, 3} {
		var pe *PeerError
		require.ErrorAs(t, errs[r], &pe, "rank %d", r)
		require.Equal(t, 2, pe.Rank, "rank %d: %v", r, errs[r])
	}
	requireNoGoroutines(t)
}

// Ranks of several hosts die at random moments before and during Shrink. Those of hosts that lose none must get the same members, or a group
// that has failed and shrinks again. Those of hosts that lose one may be told so, or be among the last, on one host.
func TestF2_ShrinkOfHostsWhileRanksDie(t *testing.T) {
	const size, perHost = 8, 2
	for seed := range uint64(25) {
		rng := rand.New(rand.NewPCG(seed, 2))
		gs := startHosts(t, size, perHost, Config{})
		doomed, whole := map[int]time.Duration{}, map[int]bool{0: true, 1: true, 2: true, 3: true} // hosts
		for _, r := range rng.Perm(size)[:1+rng.IntN(4)] {
			doomed[r] = time.Duration(rng.IntN(400)) * time.Microsecond
			delete(whole, r/perHost)
		}
		ends := make([]string, size) // who was there in the end
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
				if err == nil {
					there := fmt.Sprintf("%d", all)
					if !slices.ContainsFunc(all, func(b []byte) bool { _, dies := doomed[int(b[0])]; return dies }) {
						ends[rank] = there
						return nil
					}
					time.Sleep(50 * time.Microsecond)
					continue
				}
				if g, err = g.Shrink(testContext(t)); err != nil {
					if _, dies := doomed[rank]; !dies && (whole[rank/perHost] || !errors.Is(err, ErrPeerLost)) {
						return fmt.Errorf("rank %d of seed %d: %w", rank, seed, err)
					}
					return nil
				}
			}
		}))
		for r := range doomed {
			gs[r].Kill()
		}
		for host := range whole {
			for local := range perHost {
				require.NotEmpty(t, ends[host*perHost+local], "seed %d", seed)
			}
		}
		for r, mine := range ends { // all that are in the end of a rank have ended so
			for peer, theirs := range ends {
				if mine != "" && strings.Contains(mine, fmt.Sprintf("[%d]", peer)) {
					require.Equal(t, mine, theirs, "ranks %d and %d of seed %d", r, peer, seed)
				}
			}
		}
	}
}

// 64 ranks on 8 hosts meet, and 20 rounds of losing a host leave nothing.
func TestManyHosts(t *testing.T) {
	start := time.Now()
	gs := startHosts(t, 64, 8, Config{PeerTimeout: time.Minute})
	t.Logf("64 ranks on 8 hosts, in one process: %v", time.Since(start))
	requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
	requireAll(t, onEach(gs, (*Group).Close))

	fds := countFDs(t)
	for range 20 {
		gs := startHosts(t, 6, 2, Config{})
		gs[4].Kill()
		next := make([]*Group, 4)
		requireAll(t, onEach(gs[:4], func(g *Group) (err error) {
			waitDone(t, g)
			if next[g.Rank()], err = g.Shrink(testContext(t)); err == nil {
				err = next[g.Rank()].Barrier(testContext(t))
			}
			return err
		}))
		for _, g := range append(gs, next...) {
			g.Close()
		}
		requireNoGoroutines(t)
	}
	requireFDs(t, fds)
}

// Ranks of which some expect one host say so, on all ranks.
func TestF3_HostsThatAreNotExpected(t *testing.T) {
	_, errs := startJoin(t, 3, func(rank int) Config {
		c := Config{Rank: rank, Size: 3, host: fmt.Sprint("host ", rank), LocalSize: 1}
		if rank == 1 {
			c.LocalSize = 3
		}
		return c
	})
	for _, err := range errs {
		require.ErrorIs(t, err, ErrMismatch)
		require.ErrorContains(t, err, "LOCAL_WORLD_SIZE")
	}
}

// Strangers at the door for other hosts change nothing, and are counted.
func TestF4_StrangersBetweenHosts(t *testing.T) {
	for _, secret := range [][]byte{nil, []byte("secret")} {
		requireNoGoroutines(t)
		var log lockedBuffer
		ls, addrs := make([]*Listener, 4), make([]string, 4)
		for r := range ls {
			l, err := Listen(Config{Rank: r, Size: 4, LocalSize: 2, host: fmt.Sprint("host ", r/2), Secret: secret, Addr: freeAddr(t), Logger: newTestLogger(&log)})
			require.NoError(t, err)
			ls[r], addrs[r] = l, l.Addr()
			require.Less(t, len(addrs[r]), 150)
		}
		open, err := parseAddress(addrs[0])
		require.NoError(t, err)
		stop := strangers(t, "tcp", open.tcp)
		gs, errs := make([]*Group, 4), make([]error, 4)
		var wg sync.WaitGroup
		join := func(r int) { wg.Go(func() { gs[r], errs[r] = ls[r].Join(testContext(t), addrs) }) }
		join(0)
		// One that knows the protocol and the secret, and not the addresses. The strangers may take its place at the door: it comes again.
		require.EventuallyWithT(t, func(t *assert.CollectT) {
			conn, err := net.Dial("tcp", open.tcp)
			require.NoError(t, err)
			defer conn.Close()
			_, err = greet(conn, false, protocolVersion, meshKey(secret, addrs[1:]), identity{purpose: toMesh, rank: 2, size: 4})
			require.ErrorIs(t, err, ErrMismatch)
		}, time.Minute, time.Millisecond)
		for r := 1; r < len(ls); r++ {
			join(r)
		}
		wg.Wait()
		requireAll(t, errs)
		_, err = net.Dial("tcp", open.tcp)
		require.Error(t, err)
		stop()
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		require.Regexp(t, `connection refused.*rank=0.*refused=[1-9]`, log.String())
		requireAll(t, onEach(gs, (*Group).Close))
		requireNoGoroutines(t)
	}
}

// A frame between hosts that was changed on its way loses the host it came from, and does nothing else.
func TestF4_TamperedStream(t *testing.T) {
	server, client, err, cerr := pipeGreet(t, meshKey(nil, []string{"a"}), meshKey(nil, []string{"a"}))
	require.NoError(t, errors.Join(err, cerr))
	in, out := newSealedConn(server.conn, server), newSealedConn(client.conn, client)
	go out.Write([]byte("good"))
	b := make([]byte, 16)
	n, err := in.Read(b)
	require.NoError(t, err)
	require.Equal(t, "good", string(b[:n]))
	forged := append([]byte{byte(frameStream), 4, 0, 0, 0}, "evil"...)
	go client.conn.Write(append(forged, make([]byte, macSize)...))
	_, err = in.Read(b)
	require.ErrorIs(t, err, errMalformed)
}

// A message that is passed on is only taken from a rank that may pass it on.
func TestF4_RelaysAreChecked(t *testing.T) {
	h := &hosts{Topology: newTopology([]int{0, 0, 1, 1, 2}, 0), relayed: true}
	for _, c := range []struct {
		me, peer, from, to int
		ok                 bool
	}{
		{0, 1, 1, 2, true}, {0, 1, 1, 3, true}, {0, 2, 3, 1, true}, {0, 2, 3, 0, true}, {1, 0, 3, 1, true}, {1, 0, 2, 1, true},
		{0, 1, 0, 2, false}, {0, 1, 3, 0, false}, {0, 2, 1, 3, false}, {0, 2, 4, 1, false}, {0, 2, 3, 4, false}, {0, 1, 1, 0, false},
		{1, 0, 3, 0, false}, {1, 0, 0, 1, false}, {0, 1, 9, 2, false}, {0, 1, 1, 9, false},
	} {
		b := relayed(c.from, c.to, message{kind: kindLeave}).data
		_, _, ok := h.relayEnds(c.me, c.peer, b)
		require.Equal(t, c.ok, ok, "%+v", c)
		_, _, ok = h.relayEnds(c.me, c.peer, b[:len(b)-1])
		require.False(t, ok)
	}
	for _, m := range []message{{kind: kindBeat}, {kind: kindRelay}, {kind: kindLost, fail: &failure{code: failLost}}} {
		_, err := unrelayed(relayed(1, 2, m).data)
		require.ErrorIs(t, err, errMalformed)
	}
}

// hostProcs starts ranks as processes, perHost in each network namespace.
func hostProcs(t *testing.T, spaces []*proctest.Namespace, perHost int, part string, env ...string) []*proc {
	ps, delays := make([]*proc, len(spaces)*perHost), proctest.NoteDelays(t)
	for r := range ps {
		ps[r] = hostProc(t, spaces, perHost, r, part, delays, env...)
	}
	return ps
}

// meetingPort is where ranks of hostProc meet.
const meetingPort = 29411

func hostProc(t *testing.T, spaces []*proctest.Namespace, perHost, r int, part string, delays *proctest.Delays, env ...string) *proc {
	addr := net.JoinHostPort(spaces[0].IP, strconv.Itoa(meetingPort))
	return &proc{proctest.Rank(t, r, len(spaces)*perHost, addr, proctest.Spec{Part: "rank", Args: []string{part}, Via: spaces[r/perHost].Via, Delays: delays,
		Env: append([]string{"LOCAL_RANK=" + strconv.Itoa(r%perHost), "LOCAL_WORLD_SIZE=" + strconv.Itoa(perHost)}, env...)}), t, delays}
}

// A process that is killed during a join, the leader of its host or another, is named on all hosts: by the join's deadline where that had
// not ended, and else as the loss of a rank.
func TestF2_HostLosesARankInTheJoin(t *testing.T) {
	t.Parallel() // it mostly waits
	const timeout = 4 * time.Second
	for seed := range 4 {
		victim := 2 + seed%2
		t.Run(fmt.Sprintf("rank %d/%d", victim, seed/2), func(t *testing.T) {
			t.Parallel()
			ps := hostProcs(t, proctest.Namespaces(t, 3), 2, "survive", "SWITCHYARD_JOIN_TIMEOUT="+timeout.String())
			time.Sleep(time.Duration(seed/2) * 40 * time.Millisecond)
			l, inJoin := newLoss(ps, timeout), 0 // before all have met, a rank may come again until the join's end
			ps[victim].Signal(syscall.SIGKILL)
			for r, p := range ps {
				if r == victim {
					continue
				}
				line, _ := p.Line()
				if strings.HasPrefix(line, "joined") {
					line, _ = p.Line()
				} else {
					inJoin++
				}
				l.inTime(p)
				require.Regexp(t, fmt.Sprintf(`^(lost %d true|error .*ranks? \[?%d\b)`, victim, victim), line, "rank %d", r)
			}
			for _, p := range ps { // the others may still agree on who they are
				p.Signal(syscall.SIGKILL)
				p.Wait()
			}
			t.Logf("%d ranks were told by their join", inJoin)
		})
	}
}

func TestHostsEndInSequence(t *testing.T) {
	spaces := proctest.Namespaces(t, 3)
	for _, p := range hostProcs(t, spaces, 2, "sequence", "SWITCHYARD_SECRET=a secret of the test") {
		p.expect("joined")
		defer p.exit(0)
	}
}

// named is how survivors on several hosts report the loss of one of these ranks, of two a host, and when.
func (l *loss) named(ps []*proc, lost []int) {
	l.t.Helper()
	for _, p := range ps {
		f := p.expect("lost")
		l.inTime(p)
		rank, err := strconv.Atoi(f[0])
		require.NoError(l.t, err)
		require.Contains(l.t, lost, rank, "rank %d: %v", p.Rank, f)
		require.Equal(l.t, "true", f[1], "rank %d: %v", p.Rank, f)
		require.Regexp(l.t, fmt.Sprintf(`rank %d(, epoch \d+)?: peer lost: on host %d: `, rank, rank/2), strings.Join(f, " "), "rank %d", p.Rank)
	}
}

func TestF2_HostsLoseRanks(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, c := range []struct {
		name    string
		victims []int
		signal  syscall.Signal
	}{
		{"killed", []int{3}, syscall.SIGKILL}, {"leader killed", []int{2}, syscall.SIGKILL},
		{"stopped", []int{5}, syscall.SIGSTOP}, {"leader stopped", []int{4}, syscall.SIGSTOP},
		{"a whole host killed", []int{2, 3}, syscall.SIGKILL}, {"a whole host stopped", []int{2, 3}, syscall.SIGSTOP},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			may, silent := patient, time.Duration(0) // who is killed is known before
			if c.signal == syscall.SIGSTOP {
				silent = proctest.Scaled(2 * time.Second)
				may = "SWITCHYARD_PEER_TIMEOUT=" + silent.String()
			}
			ps := hostProcs(t, proctest.Namespaces(t, 3), 2, "survive", may)
			for _, p := range ps {
				p.expect("joined")
			}
			l := newLoss(ps, silent)
			for _, r := range c.victims {
				ps[r].Signal(c.signal)
			}
			var rest, mates []*proc
			var ranks []string
			for r, p := range ps {
				switch {
				case r/2 != c.victims[0]/2:
					rest, ranks = append(rest, p), append(ranks, strconv.Itoa(r))
				case !slices.Contains(c.victims, r):
					mates = append(mates, p)
				}
			}
			l.named(append(rest, mates...), c.victims)
			for _, p := range mates {
				p.expect("outcast")
			}
			for _, p := range rest {
				require.Equal(t, strings.Join(ranks, ","), p.expect("survivors")[0])
				p.exit(0)
				_, errs := p.Output()
				warned := p == rest[0] && c.signal == syscall.SIGSTOP && slices.Contains(c.victims, c.victims[0]/2*2) // the leader of the host
				require.Equal(t, warned, strings.Contains(errs, "have fallen silent"), "rank %d: %s", p.Rank, errs)
			}
		})
	}
}

// Ranks are lost while others shrink, having lost a rank before: the agreement goes on without them, and those of a host that has lost one now, or
// had before, leave and know which.
func TestF2_HostsLoseRanksWhileTheyShrink(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, c := range []struct {
		name   string
		lost   []int
		how    syscall.Signal // 0: their host is cut off
		stay   string
		leaves map[int]int // whom those that leave name
	}{
		{"a rank is killed", []int{3}, syscall.SIGKILL, "0,1", map[int]int{2: 3, 4: 5}},
		{"a leader is killed", []int{2}, syscall.SIGKILL, "0,1", map[int]int{3: 2, 4: 5}},
		{"rank 0 is killed", []int{0}, syscall.SIGKILL, "2,3", map[int]int{1: 0, 4: 5}},
		{"a host is stopped", []int{2, 3}, syscall.SIGSTOP, "0,1", map[int]int{4: 5}},
		{"a host is cut off", []int{2, 3}, 0, "0,1", map[int]int{4: 5}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			may, silent := patient, time.Duration(0)
			if c.how != syscall.SIGKILL {
				silent = proctest.Scaled(2 * time.Second)
				may = "SWITCHYARD_PEER_TIMEOUT=" + silent.String()
			}
			spaces := proctest.Namespaces(t, 3)
			ps := hostProcs(t, spaces, 2, "shrink when told", may)
			for _, p := range ps {
				p.expect("joined")
			}
			ps[5].Signal(syscall.SIGKILL)
			for _, p := range ps[:5] {
				require.Equal(t, "5", p.expect("lost")[0])
			}
			for _, p := range ps[:5] {
				if !slices.Contains(c.lost, p.Rank) { // it waits for those that are lost next
					p.Tell("")
					p.expect("shrinks")
				}
			}
			l := newLoss(ps, silent)
			for _, r := range c.lost {
				if c.how == 0 {
					spaces[r/2].Cut()
				} else {
					ps[r].Signal(c.how)
				}
			}
			for _, p := range ps[:5] {
				if slices.Contains(c.lost, p.Rank) {
					continue
				}
				if whom, leaves := c.leaves[p.Rank]; leaves {
					f := p.expect("outcast")
					l.inTime(p)
					require.Equal(t, "true", f[0], "rank %d: %v", p.Rank, f)
					require.Regexp(t, fmt.Sprintf(`rank %d: peer lost: host %d has lost it`, whom, whom/2), strings.Join(f, " "), "rank %d", p.Rank)
					continue
				}
				f := p.expect("survivors")
				l.inTime(p)
				require.Equal(t, c.stay, f[0], "rank %d", p.Rank)
				p.exit(0)
			}
			if c.how == 0 { // they have lost all others, but may shrink before they know, with what these had said before the cut
				for _, r := range c.lost {
					ps[r].Tell("again")
				}
				for _, r := range c.lost {
					ps[r].expect("shrinks")
					require.Equal(t, "2,3", ps[r].expect("survivors")[0])
					ps[r].exit(0)
				}
			}
		})
	}
}

// A link that is cut is noticed by silence: the leader of the host behind it is named, and the host leaves. It goes on by itself, of which both
// parts are warned on standard error; not so where a majority is needed.
func TestF2_HostIsCutOff(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, majority := range []string{"0", "1"} {
		t.Run("majority "+majority, func(t *testing.T) {
			t.Parallel()
			spaces, silent := proctest.Namespaces(t, 3), proctest.Scaled(2*time.Second)
			ps := hostProcs(t, spaces, 2, "survive", "SWITCHYARD_PEER_TIMEOUT="+silent.String(), "SWITCHYARD_MAJORITY="+majority)
			for _, p := range ps {
				p.expect("joined")
			}
			l := newLoss(ps, silent)
			spaces[2].Cut()
			l.named(ps[:4], []int{4})
			for _, p := range ps[:4] {
				require.Equal(t, "0,1,2,3", p.expect("survivors")[0])
				p.exit(0)
			}
			for _, p := range ps[4:] { // they find that the others are gone
				require.Equal(t, "true", p.expect("lost")[1])
				if majority == "1" {
					outcast := strings.Join(p.expect("outcast"), " ")
					require.Regexp(t, `^true .*ranks \[0 1 2 3\] are gone, and the 2 that are left are no majority of 6`, outcast)
					p.exit(1)
					continue
				}
				require.Equal(t, "4,5", p.expect("survivors")[0])
				p.exit(0)
			}
			for r, p := range ps {
				_, errs := p.Output()
				switch text := "switchyard: group world: hosts %s have fallen silent: those that still run"; {
				case majority == "0" && r == 0:
					require.Contains(t, errs, fmt.Sprintf(text, "[2] with ranks [4 5]"))
				case majority == "0" && r == 4:
					require.Contains(t, errs, fmt.Sprintf(text, "[0 1] with ranks [0 1 2 3]"))
				default:
					require.NotContains(t, errs, "have fallen silent", "rank %d", r)
				}
			}
		})
	}
}

// A host that is cut off while ranks join is named with its ranks to those whom rank 0 reaches. Those whom it does not reach name rank 0 and its
// address.
func TestF2_HostIsCutOffInTheJoin(t *testing.T) {
	t.Parallel() // it mostly waits
	const perHost, last = 2, 5
	const mute = `^error .*rank 0 at 10\.77\.0\.1:\d+, which knows who is missing, does not answer \(its host or this one is cut off, or it is stopped\)`
	const missing = `^error .*ranks \[5\] have not come`
	const silent = `^error .*ranks \[2 3\] have come and do not answer \(stopped, or the host is cut off that rank 2 called from, 10\.77\.0\.2`
	timeout := proctest.Scaled(8 * time.Second)
	for _, c := range []struct {
		name string
		host int    // that is cut off
		all  bool   // the last rank comes then
		says string // of those whom rank 0 reaches
	}{
		{"that of rank 0", 0, false, missing},
		{"another one, and a rank is missing", 1, false, missing},
		{"another one, and then all have come", 1, true, silent},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			spaces := proctest.Namespaces(t, 3)
			start := func(r int) *proc {
				return hostProc(t, spaces, perHost, r, "lack one", nil, "SWITCHYARD_JOIN_TIMEOUT="+timeout.String())
			}
			var ps []*proc
			for r := range last {
				ps = append(ps, start(r))
			}
			line, _ := ps[0].Line()
			require.Equal(t, "lacks [5]", line) // all others have come
			spaces[c.host].Cut()
			if c.all {
				ps = append(ps, start(last))
			}
			for r, p := range ps {
				line, _ := p.Line()
				if reached := r/perHost == 0 || r/perHost != c.host && c.host != 0; reached {
					require.Regexp(t, c.says, line, "rank %d", r)
				} else {
					require.Regexp(t, mute, line, "rank %d", r)
				}
				p.Wait()
			}
		})
	}
}
