package memory

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
)

// taskFunc is a func on a stream.
type taskFunc func() error

func (f taskFunc) Run() error { return f() }

func enqueue(t require.TestingT, s device.Stream, f func()) {
	require.NoError(t, s.(*device.HostStream).Enqueue(taskFunc(func() error { f(); return nil })))
}

// oneRank makes a heap of one rank.
func oneRank(t *testing.T, o Options) *Heap {
	t.Helper()
	g := localRanks(t, 1)[0]
	h, err := NewHeap(t.Context(), g, device.Host(), o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, h.Close(testContext()))
		require.NoError(t, g.Close())
	})
	return h
}

func hostStream(t *testing.T) device.Stream {
	t.Helper()
	s, err := device.Host().NewStream()
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

func TestM2_ReuseByAnotherStreamWaits(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	s1, s2 := hostStream(t), hostStream(t)

	a, err := h.AllocOn(s1, 1000)
	require.NoError(t, err)
	release := make(chan struct{})
	enqueue(t, s1, func() { <-release; copy(a.Bytes(), "first") })
	require.NoError(t, a.FreeOn(s1))
	require.ErrorIs(t, a.View().Valid(), ErrFreed, "a free takes effect where it is called")

	// the memory is handed out at once, though s1 is still at work
	b, err := h.AllocOn(s2, 1000)
	require.NoError(t, err)
	require.Equal(t, a.Offset(), b.Offset())
	require.Equal(t, int64(1), h.Stats().StreamWaits)
	var ran atomic.Bool
	enqueue(t, s2, func() { ran.Store(true); copy(b.Bytes(), "later") })
	time.Sleep(30 * time.Millisecond)
	require.False(t, ran.Load(), "the new user's work overtook the old one's")
	close(release)
	require.NoError(t, s2.Synchronize())
	require.Equal(t, "later", string(b.Bytes()[:5]))
	require.NoError(t, b.Free())
}

func TestM2_TheSameStreamNeedNotWait(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	s := hostStream(t)
	for range 10 {
		b, err := h.AllocOn(s, 5000)
		require.NoError(t, err)
		require.NoError(t, b.FreeOn(s))
	}
	require.Zero(t, h.Stats().StreamWaits)
}

func TestM2_TheHostWaits(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	s := hostStream(t)
	a, err := h.AllocOn(s, 1000)
	require.NoError(t, err)
	release := make(chan struct{})
	var ran atomic.Bool
	enqueue(t, s, func() { <-release; ran.Store(true) })
	require.NoError(t, a.FreeOn(s))
	time.AfterFunc(30*time.Millisecond, func() { close(release) })
	b, err := h.Alloc(1000)
	require.NoError(t, err)
	require.True(t, ran.Load(), "the host got memory that a stream was using")
	require.Equal(t, a.Offset(), b.Offset())

	// freed by the host: nobody waits
	waits := h.Stats().StreamWaits
	require.NoError(t, b.Free())
	_, err = h.AllocOn(s, 1000)
	require.NoError(t, err)
	require.Equal(t, waits, h.Stats().StreamWaits)
}

func TestM2_WaitsSurviveSplitsAndJoins(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	s1, s2, s3 := hostStream(t), hostStream(t), hostStream(t)
	release := make(chan struct{})
	var done [2]atomic.Bool
	a, err := h.AllocOn(s1, 1024)
	require.NoError(t, err)
	b, err := h.AllocOn(s2, 1024)
	require.NoError(t, err)
	enqueue(t, s1, func() { <-release; done[0].Store(true) })
	enqueue(t, s2, func() { <-release; done[1].Store(true) })
	require.NoError(t, a.FreeOn(s1))
	require.NoError(t, b.FreeOn(s2)) // one piece now, with its free neighbour

	// the part of it behind a waits for both, to be safe
	first, err := h.AllocOn(s1, 256)
	require.NoError(t, err)
	rest, err := h.AllocOn(s3, 1536)
	require.NoError(t, err)
	require.Equal(t, a.Offset(), first.Offset())
	require.Equal(t, a.Offset()+256, rest.Offset())
	var ok atomic.Bool
	enqueue(t, s3, func() { ok.Store(done[0].Load() && done[1].Load()) })
	close(release)
	require.NoError(t, s3.Synchronize())
	require.True(t, ok.Load())
}

func TestM2_AnUnusedBufferPassesItsWaitsOn(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	s1, s2, s3 := hostStream(t), hostStream(t), hostStream(t)
	a, err := h.AllocOn(s1, 1000)
	require.NoError(t, err)
	release := make(chan struct{})
	var first atomic.Bool
	enqueue(t, s1, func() { <-release; first.Store(true) })
	require.NoError(t, a.FreeOn(s1))
	// taken on s2, never used, given back by the host: s1 is still writing
	b, err := h.AllocOn(s2, 1000)
	require.NoError(t, err)
	require.NoError(t, b.Free())
	c, err := h.AllocOn(s3, 1000)
	require.NoError(t, err)
	require.Equal(t, a.Offset(), c.Offset())
	var ok atomic.Bool
	enqueue(t, s3, func() { ok.Store(first.Load()) })
	close(release)
	require.NoError(t, s3.Synchronize())
	require.True(t, ok.Load())
}

// blindStream is a stream whose events cannot be polled.
type blindStream struct {
	device.Stream
	waits   int
	records int
	fail    error
	synced  bool
}

type blindMark struct{ s *blindStream }

func (m blindMark) Done() bool  { panic("polled") }
func (m blindMark) Wait() error { m.s.synced = true; return m.s.fail }

func (s *blindStream) Device() device.Device { return device.Host() }
func (s *blindStream) Record() (device.Event, error) {
	s.records++
	return device.NewEvent(blindMark{s}), s.fail
}
func (s *blindStream) Wait(device.Event) error { s.waits++; return s.fail }
func (s *blindStream) Synchronize() error      { s.synced = true; return nil }

func TestM2_NothingIsPolled(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	s1, s2 := new(blindStream), new(blindStream)
	for range 100 {
		b, err := h.AllocOn(s1, 1000)
		require.NoError(t, err)
		require.NoError(t, b.FreeOn(s1))
		b, err = h.AllocOn(s2, 1000)
		require.NoError(t, err)
		require.NoError(t, b.FreeOn(s2))
	}
	require.Equal(t, 99, s1.waits)
	require.Equal(t, 100, s2.waits)
	_, err := h.Alloc(1000)
	require.NoError(t, err)
	require.True(t, s2.synced && s1.records == 100)
}

func TestM2_StreamsComeAndGo(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	for range 500 {
		s := new(blindStream)
		a, err := h.AllocOn(s, 1000)
		require.NoError(t, err)
		b, err := h.AllocOn(s, 1000)
		require.NoError(t, err)
		require.NoError(t, a.FreeOn(s))
		require.NoError(t, b.FreeOn(s))
	}
	for _, set := range h.fences.sets {
		require.LessOrEqual(t, len(set), maxFences)
	}
}

func TestStreamErrors(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	bad := errors.New("the stream is lost")
	s := new(blindStream)
	b, err := h.AllocOn(s, 1000)
	require.NoError(t, err)
	s.fail = bad
	require.ErrorIs(t, b.FreeOn(s), bad)
	require.True(t, s.synced)
	require.Zero(t, h.Stats().InUse, "freed all the same")

	good, lost := new(blindStream), &blindStream{fail: bad}
	b, err = h.AllocOn(good, 1000)
	require.NoError(t, err)
	require.NoError(t, b.FreeOn(good))
	_, err = h.AllocOn(lost, 1000)
	require.ErrorIs(t, err, bad)
	require.Zero(t, h.Stats().Buffers)

	_, err = h.AllocOn(cudaStream{}, 1000)
	require.ErrorIs(t, err, ErrInvalid)
	b, err = h.Alloc(1000)
	require.NoError(t, err)
	require.ErrorIs(t, b.FreeOn(cudaStream{}), ErrInvalid)
	require.NoError(t, b.View().Valid(), "a refused free is no free")
	require.NoError(t, b.Free())
	require.ErrorIs(t, b.Free(), ErrFreed)
}

type cudaStream struct{ device.Stream }

func (cudaStream) Device() device.Device { return cudaDevice{} }
