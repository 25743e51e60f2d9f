package memory_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/memory"
)

// elsewhere is a device that is not the host.
type elsewhere struct{ device.Device }

func (elsewhere) Kind() device.Kind { return device.CUDAKind }

// A process in a lost rank's place has the memory that this one had, on the host and with the options of the others.
func TestAHeapOfAProcessThatReplacesAnother(t *testing.T) {
	ctx := t.Context()
	cfg := comm.Config{Addr: loopback.Addr(), Size: 2, Replaceable: true}
	groups, heaps, lost := make([]*comm.Group, 2), make([]*memory.Heap, 2), make(chan int, 2)
	open := func(r int, c comm.Config) {
		var err error
		c.Rank = r
		groups[r], err = comm.Join(ctx, c)
		require.NoError(t, err)
		groups[r].OnLoss(func(rank int, _ bool) { lost <- rank })
		if c.Replaces {
			_, err = memory.NewHeap(ctx, groups[r], elsewhere{device.Host()}, memory.Options{})
			require.ErrorIs(t, err, memory.ErrUnsupported)
		}
		heaps[r], err = memory.NewHeap(ctx, groups[r], device.Host(), memory.Options{SegmentBytes: 4 << 20})
		require.NoError(t, err)
	}
	var wg sync.WaitGroup
	for r := range 2 {
		wg.Go(func() { open(r, cfg) })
	}
	wg.Wait()
	was, err := heaps[1].Alloc(8)
	require.NoError(t, err)
	was.View().Bytes()[0] = 42

	replaced := func(join func(c comm.Config)) {
		groups[1].Kill()
		require.Equal(t, 1, <-lost)
		c := cfg
		c.Addr, c.Replaces = loopback.Addr(), true
		wg.Go(func() { join(c) })
		require.NoError(t, groups[0].Replace(ctx, 1, c))
		wg.Wait()
	}
	replaced(func(c comm.Config) { open(1, c) })
	again, err := heaps[1].Alloc(8)
	require.NoError(t, err)
	require.Equal(t, was.Offset(), again.Offset())
	require.EqualValues(t, 42, again.View().Bytes()[0])
	again.View().Bytes()[0] = 43
	space := heaps[0].Space()
	require.EqualValues(t, 43, space.Range(1, was.Offset(), 8)[0])

	replaced(func(c comm.Config) {
		c.Rank = 1
		g, err := comm.Join(ctx, c)
		require.NoError(t, err)
		defer g.Close()
		_, err = memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: 8 << 20})
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, "rank 1 has 8388608")
	})
	require.NoError(t, groups[0].Err())
	require.NoError(t, groups[0].Close())
}
