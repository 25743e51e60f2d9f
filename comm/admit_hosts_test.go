package comm

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// newcomer is one of two on a host.
type newcomer struct {
	host  string
	local int
}

// admitHosts has the ranks of a group admit n newcomers, and returns what all got: members first, then those that come.
func admitHosts(t *testing.T, gs []*Group, cfg Config, n int, come ...newcomer) ([]*Group, []error) {
	t.Helper()
	all, errs := make([]*Group, len(gs)+len(come)), make([]error, len(gs)+len(come))
	var wg sync.WaitGroup
	for i, c := range come {
		late := cfg
		late.Late, late.LocalRank, late.host = true, c.local, c.host
		if late.LocalSize == 0 {
			late.LocalSize = 2
		}
		wg.Go(func() { all[len(gs)+i], errs[len(gs)+i] = Join(testContext(t), late) })
	}
	for i, g := range gs {
		of := cfg
		of.host = hostNames[g.n]
		wg.Go(func() { all[i], errs[i] = g.Admit(testContext(t), n, of) })
	}
	wg.Wait()
	for _, g := range all {
		if g != nil {
			t.Cleanup(func() { g.Close() })
		}
	}
	return all, errs
}

// hostNames are the hosts that ranks of these tests say they are on.
var hostNames = map[*node]string{}

// nameHosts starts ranks on hosts of two each.
func nameHosts(t *testing.T, n int) []*Group {
	t.Helper()
	gs := startHosts(t, n, 2, Config{})
	for r, g := range gs {
		hostNames[g.n] = fmt.Sprint("host ", r/2)
		t.Cleanup(func() {
			delete(hostNames, g.n)
			g.Close()
		})
	}
	return gs
}

// requireHosts checks that groups have their ranks in order, two on each host, and work, with what is derived from them.
func requireHosts(t *testing.T, gs []*Group) {
	t.Helper()
	byRank := slices.Clone(gs)
	slices.SortFunc(byRank, func(a, b *Group) int { return a.Rank() - b.Rank() })
	requireAll(t, onEach(byRank, func(g *Group) error {
		top := g.Topology()
		if g.Size() != len(gs) || top.Hosts != max(len(gs)/2, 1) || top.PerHost != 2 || top.Host != g.Rank()/2 || top.Local != g.Rank()%2 {
			return fmt.Errorf("%s is on %d hosts of %d, at %d, %d", g, top.Hosts, top.PerHost, top.Host, top.Local)
		}
		home, err := g.Home()
		if err != nil {
			return err
		}
		rail, err := g.Rail()
		if err != nil {
			return err
		}
		return errors.Join(g.Barrier(testContext(t)), home.Barrier(testContext(t)), rail.Barrier(testContext(t)))
	}))
	for r, g := range byRank {
		require.Equal(t, r, g.Rank())
	}
}

// requireHostLeaves has ranks shrink that have lost one. Its mate leaves with it, and the groups of the others are returned.
func requireHostLeaves(t *testing.T, gs []*Group, lost int) []*Group {
	t.Helper()
	errs := make([]error, len(gs))
	out := make([]*Group, len(gs))
	requireAll(t, onEach(gs, func(g *Group) error {
		if r := g.Rank(); r != lost {
			out[r], errs[r] = g.Shrink(testContext(t))
		}
		return nil
	}))
	var rest []*Group
	for r, g := range out {
		switch r {
		case lost:
		case lost ^ 1:
			requirePeer(t, errs[r], lost, ErrPeerLost)
		default:
			require.NoError(t, errs[r], "rank %d", r)
			t.Cleanup(func() { g.Close() })
			rest = append(rest, g)
		}
	}
	return rest
}

// A group on several hosts loses one of them, takes another in, and then two more at once, whose ranks come in any order. So
// does the part of it that is left on one host.
func TestF2_AdmitReplacesALostHost(t *testing.T) {
	requireNoGoroutines(t)
	t.Cleanup(func() { requireNoGoroutines(t) })
	gs := nameHosts(t, 6)
	cfg := Config{Addr: freeAddr(t), Secret: []byte("sesame"), Name: "workers"}
	gs[3].Kill()
	rest := requireHostLeaves(t, gs, 3)

	six, errs := admitHosts(t, rest, cfg, 2, newcomer{"host 1", 1}, newcomer{"host 1", 0})
	requireAll(t, errs)
	requireHosts(t, six)
	require.Equal(t, []int{5, 4}, []int{six[4].Rank(), six[5].Rank()})
	requireAll(t, onEach(rest, func(g *Group) error { return g.Barrier(testContext(t)) })) // that lives too
	for i, name := range []string{"host 0", "host 0", "host 2", "host 2", "host 1", "host 1"} {
		hostNames[six[i].n] = name
	}
	ten, errs := admitHosts(t, six, cfg, 4, newcomer{"host 7", 1}, newcomer{"host 8", 1}, newcomer{"host 8", 0}, newcomer{"host 7", 0})
	requireAll(t, errs)
	requireHosts(t, ten)

	// Eight go: what is left is on one host.
	for _, g := range ten[2:] {
		g.Kill()
	}
	one := requireSurvivors(t, ten[:2], 0, 1)
	for _, g := range one {
		hostNames[g.n] = "host 0"
	}
	cfg.LocalSize = 2
	four, errs := admitHosts(t, one, cfg, 2, newcomer{"host 9", 0}, newcomer{"host 9", 1})
	requireAll(t, errs)
	requireHosts(t, four)
}

// Newcomers that are no whole hosts are refused on all ranks, with both numbers, and the group works as before.
func TestF3_AdmitTakesWholeHosts(t *testing.T) {
	gs := nameHosts(t, 4)
	for _, c := range []struct {
		come  []newcomer
		local int
		want  string
	}{
		{[]newcomer{{"host 2", 0}}, 1, "the group has 2 ranks a host, a newcomer has 1"},
		{[]newcomer{{"host 1", 0}, {"host 1", 1}}, 2, "host 0 has 2 ranks, host 1 has 4"},
	} {
		_, errs := admitHosts(t, gs, Config{Addr: freeAddr(t), LocalSize: c.local}, 2, c.come...)
		for _, err := range errs {
			require.ErrorIs(t, err, ErrMismatch)
			require.ErrorContains(t, err, c.want)
		}
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
	}
	for _, c := range []struct {
		n          int
		addr, want string
	}{{3, freeAddr(t), "3 newcomers, and 2 ranks a host"}, {2, "@a-name", `addr "@a-name": ranks of several hosts`}} {
		for _, err := range onEach(gs, func(g *Group) error {
			_, err := g.Admit(testContext(t), c.n, Config{Addr: c.addr})
			return err
		}) {
			require.ErrorIs(t, err, ErrInvalid)
			require.ErrorContains(t, err, c.want)
		}
	}
	odd := startHosts(t, 5, 2, Config{})
	for _, err := range onEach(odd, func(g *Group) error {
		defer g.Close()
		_, err := g.Admit(testContext(t), 2, Config{Addr: freeAddr(t)})
		return err
	}) {
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, "host 0 has 2 ranks, host 2 has 1")
	}
	hosts, err := Local(4, LocalOptions{PerHost: 2}) // which are on one, in truth
	require.NoError(t, err)
	for _, g := range hosts {
		_, err := g.Admit(testContext(t), 2, Config{Addr: freeAddr(t)})
		require.ErrorIs(t, err, ErrUnsupported)
		g.Close()
	}
	_, err = Join(testContext(t), Config{Late: true, LocalRank: 2, LocalSize: 2, Addr: freeAddr(t)})
	require.ErrorContains(t, err, "local rank 2 of 2")
}

// Nobody comes, then half a host, and the rest is missing at the deadline. Then the whole host comes.
func TestF2_AdmitWithoutAHost(t *testing.T) {
	t.Parallel() // it mostly waits
	gs := nameHosts(t, 4)
	cfg := Config{Addr: freeAddr(t), JoinTimeout: 2 * time.Second}
	_, errs := admitHosts(t, gs, cfg, 2)
	for _, err := range errs {
		requirePeer(t, err, 4, ErrTimeout)
	}
	requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
	require.Eventually(t, func() bool { // it may not be there before the others give up
		_, errs = admitHosts(t, gs, cfg, 2, newcomer{"host 2", 0})
		var pe *PeerError
		return errors.As(errs[0], &pe) && pe.Rank == 5
	}, time.Minute, time.Millisecond)
	for _, err := range errs[:4] {
		requirePeer(t, err, 5, ErrTimeout)
	}
	cfg.JoinTimeout = 0
	six, errs := admitHosts(t, gs, cfg, 2, newcomer{"host 2", 1}, newcomer{"host 2", 0})
	requireAll(t, errs)
	requireHosts(t, six)
}

// A rank that dies while a host is awaited is named on all hosts, and the rest can go on without its host.
func TestF2_LossDuringAdmitOfAHost(t *testing.T) {
	for _, lost := range []int{0, 2, 3} {
		t.Run(fmt.Sprint("rank ", lost), func(t *testing.T) {
			gs := nameHosts(t, 6)
			cfg := Config{Addr: freeAddr(t)}
			errs := make([]error, 6)
			var wg sync.WaitGroup
			for r, g := range gs {
				of := cfg
				of.host = hostNames[g.n]
				wg.Go(func() { _, errs[r] = g.Admit(testContext(t), 2, of) })
			}
			require.Eventually(t, func() bool { // rank 0 awaits newcomers
				conn, err := net.Dial("tcp", cfg.Addr)
				if err == nil {
					conn.Close()
				}
				return err == nil
			}, time.Minute, time.Millisecond)
			gs[lost].Kill()
			wg.Wait()
			for r, err := range errs {
				if r != lost {
					requirePeer(t, err, lost, ErrPeerLost)
				}
			}
			four := requireHostLeaves(t, gs, lost)
			cfg.Addr = freeAddr(t)
			six, errs := admitHosts(t, four, cfg, 2, newcomer{"host 7", 0}, newcomer{"host 7", 1})
			requireAll(t, errs)
			requireHosts(t, six)
		})
	}
}
