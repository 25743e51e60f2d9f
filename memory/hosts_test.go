package memory

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// onHosts runs f on every rank of a group on hosts of perHost ranks.
func onHosts(t *testing.T, n, perHost int, f func(g *comm.Group) error) {
	t.Helper()
	gs, err := comm.Local(n, comm.LocalOptions{PerHost: perHost})
	require.NoError(t, err)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r, g := range gs {
		wg.Go(func() { errs[r] = f(g) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	for _, g := range gs {
		require.NoError(t, g.Close())
	}
}

// Each host has its segments, at the same offsets on all hosts, also after growing and registering.
func TestM1_OffsetsAreTheSameOnAllHosts(t *testing.T) {
	for _, c := range []struct{ n, perHost int }{{2, 1}, {4, 2}, {6, 2}} {
		onHosts(t, c.n, c.perHost, func(g *comm.Group) error { return useHosts(t.Context(), g) })
	}
}

// The same with a process for every rank, in network namespaces.
func TestHeapOfProcessesOnHosts(t *testing.T) {
	spaces := proctest.Namespaces(t, 2)
	ps := make([]*proctest.Process, 4)
	for r := range ps {
		host, local := r/2, r%2
		ps[r] = proctest.Rank(t, r, len(ps), spaces[0].IP+":29412", proctest.Spec{Part: "scenario", Args: []string{"hosts"}, Via: spaces[host].Via,
			Env: []string{fmt.Sprint("LOCAL_RANK=", local), "LOCAL_WORLD_SIZE=2"}})
	}
	for _, err := range proctest.Failures(ps) {
		require.NoError(t, err)
	}
}

func hostsScenario(t *rankT, g *comm.Group) {
	require.Equal(t, 2, g.Topology().Hosts)
	require.NoError(t, useHosts(t.ctx, g))
}

// useHosts is what one rank does: it grows, allocates and registers, and compares where it did.
func useHosts(ctx context.Context, g *comm.Group) error {
	top := g.Topology()
	h, err := NewHeap(ctx, g, device.Host(), Options{SegmentBytes: 1 << 20, ReserveBytes: 64 << 20})
	if err != nil {
		return err
	}
	if h.Group() != g || h.space.Size != top.PerHost || h.space.Rank != top.Local {
		return fmt.Errorf("rank %d of %d in the space of rank %d", h.space.Rank, h.space.Size, g.Rank())
	}
	if err := h.Grow(ctx, 8<<20); err != nil {
		return err
	}
	b, err := h.Alloc(6 << 20)
	if err != nil {
		return err
	}
	// Every second host registers more than the others.
	n := int64(4096 << (top.Host % 2 * 10))
	fd, err := shm.Create("a test", n)
	if err != nil {
		return err
	}
	defer closeFD(fd)
	m, err := MapFile(fd, 0, n)
	if err != nil {
		return err
	}
	defer m.Close()
	r, err := h.Register(ctx, m.View())
	if err != nil {
		return err
	}
	after, err := h.Register(ctx, m.View())
	if err != nil {
		return err
	}
	mine := fmt.Sprint(b.Offset(), r.Offset(), after.Offset())
	all, err := g.AllGather(ctx, []byte(mine))
	if err != nil {
		return err
	}
	for p := range all {
		if string(all[p]) != mine {
			return fmt.Errorf("rank %d has the offsets %s, rank %d %s", g.Rank(), mine, p, all[p])
		}
	}
	for p := range g.Size() {
		if want := int64(4096 << (top.HostOf(p) % 2 * 10)); r.PeerLen(p) != want {
			return fmt.Errorf("%d bytes of rank %d, want %d", r.PeerLen(p), p, want)
		}
	}
	// Ranks of a host see each other's memory, and nobody else's.
	b.Bytes()[0], m.Bytes()[0] = byte(g.Rank()+1), byte(g.Rank()+100)
	if err := g.Barrier(ctx); err != nil {
		return err
	}
	for local := range top.PerHost {
		rank := top.RankOf(top.Host, local)
		for at, want := range map[int64]byte{b.Offset(): byte(rank + 1), r.Offset(): byte(rank + 100)} {
			if got := h.space.Range(local, at, 1)[0]; got != want {
				return fmt.Errorf("rank %d sees %d of rank %d at %d, want %d", g.Rank(), got, rank, at, want)
			}
		}
	}
	return errors.Join(after.Deregister(ctx), h.Verify(ctx), b.Free(), h.Close(ctx))
}

// A rank that allocates something else than those of another host is named on all.
func TestM3_HostsThatDivergeAreNamed(t *testing.T) {
	onHosts(t, 4, 2, func(g *comm.Group) error {
		h, err := NewHeap(t.Context(), g, device.Host(), Options{SegmentBytes: 1 << 20})
		if err != nil {
			return err
		}
		if _, err := h.Alloc(int64(1000 + 4096*(g.Rank()/3))); err != nil {
			return err
		}
		var d *DivergenceError
		if err := h.Verify(t.Context()); !errors.As(err, &d) || fmt.Sprint(d.Ranks) != "[3]" {
			return fmt.Errorf("verify: %w", err)
		}
		return h.Close(t.Context())
	})
}

func TestF3_HostsWithDifferentNumbersOfRanks(t *testing.T) {
	onHosts(t, 5, 2, func(g *comm.Group) error {
		_, err := NewHeap(t.Context(), g, device.Host(), Options{})
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "[2 2 1]")
		return nil
	})
}
