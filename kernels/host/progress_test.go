package host

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// slowly has rank 0 of a world send 12 MiB to rank 1, in place, and call stop after every MiB but the last. call has a rank make such a call.
func slowly(t *testing.T, ranks int, stop func()) (call func(rank int, timeout time.Duration) error) {
	const bytes = 12 * movedBytes
	w := newWorld(t, ranks, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, EagerBytes: 100, PacketBytes: 20}, 2*bytes)
	w.engines[0].step = func(p point, _ int) error {
		switch p {
		case copying:
			stop()
		case idlePass:
			runtime.Gosched()
		}
		return nil
	}
	m := make([][]int64, ranks)
	for r := range m {
		m[r] = make([]int64, ranks)
		for p := range m[r] {
			if p != r {
				m[r][p] = 5
			}
		}
	}
	m[0][1] = bytes
	src, dst := make([]byte, 2*bytes), make([][]byte, ranks)
	for i := range src {
		src[i] = byte(i >> 12)
	}
	for r := range dst {
		dst[r] = w.engines[r].space.Range(r, w.data, 2*bytes)
	}
	return func(rank int, timeout time.Duration) error {
		ro := routes(m, rank)
		var in, out int64
		for p := range m {
			in, out = in+ro.RecvBytes[p], out+ro.SendBytes[p]
		}
		err := w.ports[rank].Launch(nil, &kernels.AllToAllV{Routes: ro, Src: buffer(src[:out], -1), Dst: buffer(dst[rank][:in], w.data),
			Launched: kernels.Launched{Timeout: timeout}})
		if err == nil && rank == 1 {
			assert.Equal(t, src[:bytes], dst[1][:bytes])
		}
		return err
	}
}

// A rank whose peer copies for longer than the deadline, with one signal at the end, goes on waiting; the one that waits for that rank, too.
func TestF1_WhoMovesBytesIsNotSilent(t *testing.T) {
	const pause, timeout = 240 * time.Millisecond, 2 * time.Second
	call := slowly(t, 3, func() { time.Sleep(pause) })
	var others sync.WaitGroup
	others.Go(func() {
		assert.NoError(t, call(0, time.Minute))
		assert.NoError(t, call(0, time.Minute))
	})
	others.Go(func() {
		assert.NoError(t, call(1, timeout))
		assert.NoError(t, call(1, timeout))
	})
	assert.NoError(t, call(2, timeout))
	assert.NoError(t, call(2, timeout), "it waits for rank 1, which waits for rank 0")
	others.Wait()
}

// A rank that has moved bytes and stops is blamed when it has been silent for the length of the deadline.
func TestF1_WhoMovesNoMoreBytesIsBlamed(t *testing.T) {
	const timeout = 100 * time.Millisecond
	moved, blamed := 0, make(chan struct{})
	call := slowly(t, 2, func() {
		if moved++; moved == 3 {
			<-blamed
		}
	})
	var other sync.WaitGroup
	other.Go(func() { _ = call(0, time.Minute) })
	start := time.Now()
	err := call(1, timeout)
	took := time.Since(start)
	close(blamed)
	other.Wait()
	require.ErrorIs(t, err, comm.ErrTimeout)
	var peer *comm.PeerError
	require.ErrorAs(t, err, &peer)
	require.Zero(t, peer.Rank)
	require.GreaterOrEqual(t, took, timeout)
}
