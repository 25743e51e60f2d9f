package device

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// gpu opens GPU 0, or skips the test with the reason.
func gpu(t testing.TB) *CUDADevice {
	t.Helper()
	d, err := CUDA(0)
	if errors.Is(err, ErrUnavailable) {
		t.Skipf("needs a GPU: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

func cudaStream(t testing.TB, d *CUDADevice) *CUDAStream {
	t.Helper()
	s, err := d.NewStream()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s.(*CUDAStream)
}

func cudaMemory(t testing.TB, d *CUDADevice, n int64) uintptr {
	t.Helper()
	p, err := d.Context().MemAlloc(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Context().MemFree(p)) })
	return p
}

// busy keeps a stream at work for some milliseconds.
func busy(t testing.TB, s *CUDAStream, p uintptr, n int64) {
	t.Helper()
	for i := range 64 {
		require.NoError(t, s.dev.ctx.Set(s.h, p, byte(i), n))
	}
}

func read(t testing.TB, s *CUDAStream, p uintptr, n int64) []byte {
	t.Helper()
	b := make([]byte, n)
	require.NoError(t, s.dev.ctx.Read(s.h, b, p))
	return b
}

func TestCUDAWithoutADriverSaysSo(t *testing.T) {
	d, err := CUDA(0)
	if err == nil {
		require.NoError(t, d.Close())
		t.Skip("this machine has a GPU")
	}
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "device: cuda:0: ")
}

func TestCUDADeviceIsOpenedAnyNumberOfTimes(t *testing.T) {
	d := gpu(t)
	require.Equal(t, CUDAKind, d.Kind())
	require.Equal(t, 0, d.Index())
	require.Equal(t, "cuda:0", d.String())
	id, err := d.UUID()
	require.NoError(t, err)
	require.Regexp(t, "^GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$", id)

	again, err := CUDA(0)
	require.NoError(t, err)
	require.Equal(t, d.Context().Handle(), again.Context().Handle(), "one primary context")
	require.NoError(t, again.Close())
	require.NoError(t, again.Close())
	_, err = again.NewStream()
	require.Error(t, err)
	s := cudaStream(t, d)
	require.NoError(t, s.Synchronize(), "the other is untouched")

	_, err = CUDA(4096)
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrUnavailable)
	t.Log(err)
}

func TestCUDAStreamWaitsForAnother(t *testing.T) {
	d := gpu(t)
	const n = 256 << 20
	p, q := cudaMemory(t, d, n), cudaMemory(t, d, n)
	a, b := cudaStream(t, d), cudaStream(t, d)
	busy(t, a, p, n)
	require.NoError(t, a.dev.ctx.Set(a.h, p, 0xa5, n))
	e, err := a.Record()
	require.NoError(t, err)
	require.False(t, e.Done(), "the stream is busy")
	require.NoError(t, b.Wait(e))
	require.NoError(t, b.Wait(Event{}))
	require.NoError(t, b.dev.ctx.Copy(b.h, q, p, n))
	require.NoError(t, b.Synchronize())
	require.Equal(t, bytes.Repeat([]byte{0xa5}, n), read(t, b, q, n))
	require.True(t, e.Done())
	require.NoError(t, e.Wait())

	busy(t, a, p, n)
	e, err = a.Record()
	require.NoError(t, err)
	busy(t, a, p, n)
	require.NoError(t, e.Wait())
	require.True(t, e.Done())
	last, err := a.Record()
	require.NoError(t, err)
	require.False(t, last.Done(), "a wait waits for its mark and no more")
	require.NoError(t, a.Synchronize())
	require.True(t, last.Done())

	h := NewHostStream()
	defer h.Close()
	require.Error(t, h.Wait(e))
	m, err := h.Record()
	require.NoError(t, err)
	require.Error(t, a.Wait(m))
}

func TestCUDAStreamsOfTwoGPUsWaitForEachOther(t *testing.T) {
	d := gpu(t)
	if n, err := CUDACount(); err != nil || n < 2 {
		t.Skipf("needs two GPUs: %d, %v", n, err)
	}
	other, err := CUDA(1)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, other.Close()) })
	const n = 256 << 20
	p, q := cudaMemory(t, d, n), cudaMemory(t, other, n)
	a, b := cudaStream(t, d), cudaStream(t, other)
	_, err = other.WrapStream(a.Handle())
	require.ErrorContains(t, err, "another device")
	busy(t, a, p, n)
	require.NoError(t, d.ctx.Set(a.h, p, 0x5a, n))
	e, err := a.Record()
	require.NoError(t, err)
	require.False(t, e.Done(), "the stream is busy")
	require.NoError(t, b.Wait(e))
	require.NoError(t, other.ctx.Copy(b.h, q, p, n))
	back, err := b.Record()
	require.NoError(t, err)
	require.NoError(t, a.Wait(back))
	require.NoError(t, d.ctx.Set(a.h, p, 0, n), "not before the copy")
	require.NoError(t, a.Synchronize())
	require.Equal(t, bytes.Repeat([]byte{0x5a}, n), read(t, b, q, n))
}

func TestCUDAEventsAreUsedAgain(t *testing.T) {
	d := gpu(t)
	p := cudaMemory(t, d, 1<<20)
	s, other := cudaStream(t, d), cudaStream(t, d)
	var marks []Event
	start := time.Now()
	const rounds = 20_000
	for i := range rounds {
		require.NoError(t, d.ctx.Set(s.h, p, 1, 64))
		e, err := s.Record()
		require.NoError(t, err)
		if i%1000 == 0 {
			marks = append(marks, e)
			require.NoError(t, other.Wait(e))
		}
	}
	took := time.Since(start) / rounds
	require.NoError(t, s.Synchronize())
	for _, e := range marks {
		require.True(t, e.Done())
		require.NoError(t, e.Wait())
	}
	s.mu.Lock()
	made := len(s.idle)
	require.Empty(t, s.pending)
	s.mu.Unlock()
	t.Logf("%v for a memset and a mark, %d events for %d marks", took, made, rounds)
	require.Less(t, made, rounds/2)

	require.Zero(t, testing.AllocsPerRun(100, func() { _ = other.Wait(marks[0]) }))
}

func TestCUDAStreamsOfOthersAreWrapped(t *testing.T) {
	d := gpu(t)
	h, err := d.ctx.NewStream(0)
	require.NoError(t, err)
	p := cudaMemory(t, d, 1<<20)
	for _, handle := range []uintptr{uintptr(h), 0} {
		s, err := d.WrapStream(handle)
		require.NoError(t, err)
		require.Equal(t, handle, s.Handle())
		require.Equal(t, Device(d), s.Device())
		require.NoError(t, d.ctx.Set(s.h, p, 7, 1<<20))
		e, err := s.Record()
		require.NoError(t, err)
		require.NoError(t, s.Close())
		require.NoError(t, s.Close())
		require.True(t, e.Done())
		require.NoError(t, e.Wait())
		require.ErrorIs(t, s.Synchronize(), ErrClosed)
	}
	_, err = d.WrapStream(2)
	require.ErrorContains(t, err, "per-thread")
	require.NoError(t, d.ctx.SynchronizeStream(h), "it is its owner's")
	require.NoError(t, d.ctx.DestroyStream(h))
}

// Work behind a closed stream finds the work of that stream done, also the work that a closed wrapper has not marked.
func TestCUDAClosedStreamsAreFollowed(t *testing.T) {
	d := gpu(t)
	const n = 256 << 20
	p, q := cudaMemory(t, d, n), cudaMemory(t, d, n)
	b := cudaStream(t, d)
	h, err := d.ctx.NewStream(0)
	require.NoError(t, err)
	own, err := d.NewStream()
	require.NoError(t, err)
	wrapper, err := d.WrapStream(uintptr(h))
	require.NoError(t, err)
	for i, s := range []*CUDAStream{own.(*CUDAStream), wrapper} {
		v := byte(0xa5 + i)
		busy(t, s, p, n)
		require.NoError(t, d.ctx.Set(s.h, p, v, n))
		require.NoError(t, s.Close())
		require.NoError(t, Follow(b, s))
		require.NoError(t, d.ctx.Copy(b.h, q, p, n))
		require.Equal(t, bytes.Repeat([]byte{v}, n), read(t, b, q, n))
		require.NoError(t, Follow(nil, s))
		require.ErrorIs(t, Follow(s, b), ErrClosed, "new work")
	}
	require.NoError(t, d.ctx.DestroyStream(h))
}

// The same where there is no GPU: a closed stream of its own is not asked anything.
func TestCUDAClosedStreamsAreComplete(t *testing.T) {
	s := &CUDAStream{owned: true, closed: true, put: 3, ran: 3}
	e, err := s.Record()
	require.NoError(t, err)
	require.True(t, e.Done())
	h := NewHostStream()
	require.NoError(t, Follow(nil, s))
	require.NoError(t, Follow(h, s))
	require.NoError(t, h.Close())
	require.NoError(t, Follow(nil, h))
}

func TestCUDAStreamsAreCaptured(t *testing.T) {
	d := gpu(t)
	const n = 4 << 20
	p, q := cudaMemory(t, d, n), cudaMemory(t, d, n)
	a, b := cudaStream(t, d), cudaStream(t, d)
	before, err := b.Record()
	require.NoError(t, err)
	require.NoError(t, b.Synchronize())
	var inside Event
	g, err := a.Capture(func() error {
		require.ErrorIs(t, a.Synchronize(), ErrCapturing)
		require.ErrorIs(t, a.Close(), ErrCapturing)
		require.NoError(t, a.Wait(before), "what has happened may be waited for")
		// a forks to b, which copies, and joins
		require.NoError(t, d.ctx.Set(a.h, p, 3, n))
		if inside, err = a.Record(); err != nil {
			return err
		}
		require.ErrorIs(t, inside.Wait(), ErrCapturing)
		require.False(t, inside.Done())
		require.NoError(t, b.Wait(inside))
		on, err := b.Capturing()
		require.NoError(t, err)
		require.True(t, on)
		w, err := d.WrapStream(b.Handle())
		require.NoError(t, err, "a stream may be wrapped while it is captured")
		require.NoError(t, w.Close())
		require.NoError(t, d.ctx.Copy(b.h, q, p, n))
		back, err := b.Record()
		require.NoError(t, err)
		require.NoError(t, a.Wait(back))
		return nil
	})
	require.NoError(t, err)
	require.ErrorIs(t, b.Wait(inside), ErrCapturing, "the capture has ended")
	for range 3 {
		require.NoError(t, d.ctx.Set(a.h, q, 0, n))
		require.NoError(t, g.Launch(a))
		require.Equal(t, bytes.Repeat([]byte{3}, n), read(t, a, q, n))
	}
	e, err := a.Record()
	require.NoError(t, err)
	require.NoError(t, b.Wait(e), "events of a capture are used again")
	require.ErrorIs(t, b.Wait(inside), ErrCapturing)
	require.NoError(t, b.Synchronize())
	require.NoError(t, g.Close())
	require.NoError(t, g.Close())
	require.Error(t, g.Launch(a))

	// a mark that has not happened cannot be in a graph
	big := cudaMemory(t, d, 256<<20)
	busy(t, b, big, 256<<20)
	late, err := b.Record()
	require.NoError(t, err)
	_, err = a.Capture(func() error { return a.Wait(late) })
	require.ErrorIs(t, err, ErrCapturing)
	require.NoError(t, a.Synchronize(), "the stream is as before")
	boom := errors.New("boom")
	_, err = a.Capture(func() error { return boom })
	require.ErrorIs(t, err, boom)
	require.NoError(t, a.Synchronize())
}
