package memory

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/double"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// gpusOnHosts runs f on every rank of a group on hosts of perHost ranks, with an emulated GPU; afterwards the driver holds what it held before.
func gpusOnHosts(t *testing.T, n, perHost int, f func(g *comm.Group, d device.Device) error) {
	t.Helper()
	a := newAccounts(t)
	onHosts(t, n, perHost, func(g *comm.Group) (err error) {
		d, err := device.CUDA(g.Rank() % emulated.Devices)
		if err != nil {
			return err
		}
		return errors.Join(f(g, d), d.Close())
	})
	a.nothingIsLeft(n, perHost)
}

var sharing = Options{SegmentBytes: 4 << 20, RailBytes: 1 << 20, ShareGPUs: true}

// Places of the rail segment are the same on all hosts, whatever else is allocated and given back; what is put there lands, and is counted anew
// where a place is taken again. The heap grows as on one host.
func TestM1_PlacesOfTheRailSegmentAreTheSameOnAllHosts(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	for _, c := range []struct{ n, perHost int }{{2, 1}, {4, 2}, {6, 2}} {
		net := double.New(uint64(c.n), time.Millisecond)
		var mu sync.Mutex
		places := map[string]bool{}
		gpusOnHosts(t, c.n, c.perHost, func(g *comm.Group, d device.Device) error {
			h, err := newHeap(t.Context(), g, d, sharing, newBacking, net.Open)
			if err != nil {
				return err
			}
			var at []int64
			for range 3 { // the last two at the same place
				first, err := h.AllocRail(1000)
				if err != nil {
					return err
				}
				second, err := h.AllocRail(300 << 10)
				if err != nil {
					return err
				}
				if err := g.Barrier(t.Context()); err != nil {
					return err
				}
				if err := putRail(h, second); err != nil {
					return err
				}
				if err := g.Barrier(t.Context()); err != nil {
					return err
				}
				at = append(at, first.Offset(), second.Offset())
				if err := errors.Join(first.Free(), second.Free()); err != nil {
					return err
				}
				if len(at) == 2 {
					if err := h.Grow(t.Context(), 1<<20); err != nil {
						return err
					}
				}
			}
			mu.Lock()
			places[fmt.Sprint(at)] = true
			mu.Unlock()
			return errors.Join(h.Verify(t.Context()), h.Close(t.Context()))
		})
		require.Len(t, places, 1, "%v", places)
	}
}

// putRail has each rank put bytes to those of its local rank, who await and check them. Words begin at 0.
func putRail(h *Heap, b *RailBuffer) error {
	const n, words = 60 << 10, 512
	top, me := h.group.Topology(), h.group.Rank()
	seg := h.across.segment.Bytes()
	at := func(host int) int64 { return b.Offset() + words + int64(host)*n }
	mine := bytes.Repeat([]byte{byte(me + 1)}, n)
	copy(seg[at(top.Host):], mine)
	for host := range top.Hosts {
		if peer := top.RankOf(host, top.Local); peer != me {
			if err := h.Rail().Put(peer, at(top.Host), seg[at(top.Host):][:n], b.Offset()+int64(top.Host)*8); err != nil {
				return err
			}
		}
	}
	for host := range top.Hosts {
		peer := top.RankOf(host, top.Local)
		if peer == me {
			continue
		}
		word := shm.Word(seg, b.Offset()+int64(host)*8)
		for end := time.Now().Add(time.Minute); word.Load() < 1; time.Sleep(50 * time.Microsecond) {
			if time.Now().After(end) {
				return fmt.Errorf("rank %d: no put of rank %d has landed", me, peer)
			}
		}
		if word.Load() != 1 || !bytes.Equal(seg[at(host):][:n], bytes.Repeat([]byte{byte(peer + 1)}, n)) {
			return fmt.Errorf("rank %d has %d puts of rank %d, or other bytes", me, word.Load(), peer)
		}
	}
	return nil
}

// A rank whose allocations of the rail segment differ is named.
func TestM3_RailSegmentsThatDivergeAreNamed(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	net := double.New(1, 0)
	gpusOnHosts(t, 4, 2, func(g *comm.Group, d device.Device) error {
		h, err := newHeap(t.Context(), g, d, sharing, newBacking, net.Open)
		if err != nil {
			return err
		}
		if _, err := h.AllocRail(int64(1000 + 4096*(g.Rank()/3))); err != nil {
			return err
		}
		var div *DivergenceError
		if err := h.Verify(t.Context()); !errors.As(err, &div) || fmt.Sprint(div.Ranks) != "[3]" || div.Calls[3].Kind != "alloc on the rail" {
			return fmt.Errorf("verify: %w", err)
		}
		return h.Close(t.Context())
	})
}

// Kernels are told to give up, then the rail is interrupted and closed, and then its segment goes: after a failure too, and with puts on
// their way.
func TestM4_TheRailSegmentGoesLast(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	for _, fails := range []bool{false, true} {
		net := double.New(1, 20*time.Millisecond)
		var made, asked sync.WaitGroup
		made.Add(4)
		asked.Add(4)
		gpusOnHosts(t, 4, 2, func(g *comm.Group, d device.Device) error {
			var mu sync.Mutex
			var h *Heap
			var wrong error
			ops := map[string]int{}
			note := func(op string) {
				mu.Lock()
				defer mu.Unlock()
				ops[op]++
				if h != nil && h.across.segment.Bytes() == nil {
					wrong = fmt.Errorf("%s after the segment has gone", op)
				}
			}
			o := sharing
			made1, err := newHeap(t.Context(), g, d, o, newBacking, func(c rails.Config) (rails.Rail, error) {
				r, err := net.Open(c)
				return &noisyRail{watchedRail{r, note}}, err
			})
			mu.Lock()
			h = made1
			mu.Unlock()
			made.Done()
			if err != nil {
				return err
			}
			b, err := h.AllocRail(128 << 10)
			if err != nil {
				return err
			}
			made.Wait()
			if err := g.Barrier(t.Context()); err != nil {
				return err
			}
			seg, top := h.across.segment.Bytes(), g.Topology()
			peer := top.RankOf(1-top.Host, top.Local)
			for range 20 {
				if err := h.Rail().Put(peer, b.Offset()+64, seg[b.Offset()+64:][:100<<10], b.Offset()); err != nil {
					return err
				}
			}
			if asked.Done(); fails {
				asked.Wait() // not by a barrier: an abort takes along who has not left it
				g.Abort(errors.New("a test"))
				<-g.Done()
			}
			if err := h.Close(t.Context()); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			if ops["interrupt"] == 0 || ops["rail close"] != 1 || h.across.segment.Bytes() != nil {
				return fmt.Errorf("the end of a heap is %v", ops)
			}
			return wrong
		})
	}
}

// noisyRail notes interrupts too.
type noisyRail struct{ watchedRail }

func (r *noisyRail) Interrupt() {
	r.note("interrupt")
	r.Rail.Interrupt()
}

// Options and allocations that do not fit are refused on all ranks, with the values.
func TestF3_RailSegmentsThatDoNotFit(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	for _, c := range []struct {
		options func(rank int, o *Options)
		want    error
		words   string
	}{
		{func(_ int, o *Options) { o.RailBytes = -1 }, ErrInvalid, "a rail segment of -1 bytes"},
		{func(rank int, o *Options) { o.RailBytes = int64(1+rank) << 20 }, comm.ErrMismatch, `rail bytes`},
		{func(_ int, o *Options) { o.Multicast = MulticastByFile }, ErrUnsupported, "multicast on 2 hosts"},
	} {
		net := double.New(1, 0)
		gpusOnHosts(t, 4, 2, func(g *comm.Group, d device.Device) error {
			o := sharing
			c.options(g.Rank(), &o)
			_, err := newHeap(t.Context(), g, d, o, newBacking, net.Open)
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.words)
			return nil
		})
	}
	net := double.New(1, 0)
	gpusOnHosts(t, 2, 1, func(g *comm.Group, d device.Device) error {
		h, err := newHeap(t.Context(), g, d, sharing, newBacking, net.Open)
		if err != nil {
			return err
		}
		require.EqualValues(t, 1<<20, h.RailBytes())
		_, err = h.AllocRail(2 << 20)
		require.ErrorIs(t, err, ErrOutOfMemory)
		require.ErrorContains(t, err, "1048576 of 1048576 bytes are free")
		_, err = h.AllocRail(-1)
		require.ErrorIs(t, err, ErrInvalid)
		b, err := h.AllocRail(10)
		require.NoError(t, err)
		require.NoError(t, b.Free())
		require.ErrorIs(t, b.Free(), ErrFreed)
		require.NoError(t, h.Verify(t.Context()))
		require.NoError(t, h.Close(t.Context()))
		require.ErrorIs(t, b.Free(), ErrClosed)
		return nil
	})
	gpusOnHosts(t, 1, 1, func(g *comm.Group, d device.Device) error {
		h, err := newHeap(t.Context(), g, d, sharing, newBacking, nil)
		require.NoError(t, err)
		require.Zero(t, h.RailBytes())
		_, err = h.AllocRail(10)
		require.ErrorIs(t, err, ErrUnsupported)
		return h.Close(t.Context())
	})
}
