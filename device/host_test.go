package device_test

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
)

type task func() error

func (t task) Run() error { return t() }

func TestHostStreamRunsInOrder(t *testing.T) {
	s := device.NewHostStream()
	var got []int
	for i := range 100 { // more than the queue's first size, so that it grows while the worker drains it
		require.NoError(t, s.Enqueue(task(func() error { got = append(got, i); return nil })))
	}
	require.NoError(t, s.Synchronize())
	require.Len(t, got, 100)
	for i, v := range got {
		require.Equal(t, i, v)
	}
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.ErrorIs(t, s.Enqueue(task(func() error { return nil })), device.ErrClosed)
}

func TestHostStreamIsAsynchronous(t *testing.T) {
	s := device.NewHostStream()
	gate := make(chan struct{})
	require.NoError(t, s.Enqueue(task(func() error { <-gate; return nil })))
	e, err := s.Record()
	require.NoError(t, err)
	require.False(t, e.Done())
	close(gate)
	require.NoError(t, e.Wait())
	require.True(t, e.Done())
	require.NoError(t, s.Close())
}

func TestSynchronizeReturnsTheFirstErrorOnce(t *testing.T) {
	s := device.NewHostStream()
	first := errors.New("first")
	var ran atomic.Bool
	require.NoError(t, s.Enqueue(task(func() error { return first })))
	require.NoError(t, s.Enqueue(task(func() error { return errors.New("second") })))
	require.NoError(t, s.Enqueue(task(func() error { ran.Store(true); return nil })))
	require.ErrorIs(t, s.Synchronize(), first)
	require.True(t, ran.Load())
	require.NoError(t, s.Synchronize())
	require.NoError(t, s.Close())
}

func TestStreamsWaitForEachOthersEvents(t *testing.T) {
	a, b := device.NewHostStream(), device.NewHostStream()
	defer a.Close()
	defer b.Close()
	var order []string
	require.NoError(t, a.Enqueue(task(func() error { time.Sleep(20 * time.Millisecond); order = append(order, "a"); return nil })))
	e, err := a.Record()
	require.NoError(t, err)
	// Work on a behind the event does not hold b up.
	gate := make(chan struct{})
	require.NoError(t, a.Enqueue(task(func() error { <-gate; return nil })))
	require.NoError(t, b.Wait(e))
	require.NoError(t, b.Wait(device.Event{}))
	require.NoError(t, b.Enqueue(task(func() error { order = append(order, "b"); return nil })))
	require.NoError(t, b.Synchronize())
	require.Equal(t, []string{"a", "b"}, order)
	close(gate)
}

func TestFollowOrdersStreamsAndTheCaller(t *testing.T) {
	a, b := device.NewHostStream(), device.NewHostStream()
	defer a.Close()
	defer b.Close()
	var order []string
	require.NoError(t, a.Enqueue(task(func() error { time.Sleep(10 * time.Millisecond); order = append(order, "a"); return nil })))
	require.NoError(t, device.Follow(b, a))
	require.NoError(t, b.Enqueue(task(func() error { order = append(order, "b"); return nil })))
	require.NoError(t, device.Follow(nil, b))
	order = append(order, "caller")
	require.Equal(t, []string{"a", "b", "caller"}, order)
	require.NoError(t, device.Follow(a, nil))
	require.NoError(t, device.Follow(a, a))
}

func TestEnqueueAllocatesNothing(t *testing.T) {
	s := device.NewHostStream()
	defer s.Close()
	nothing := task(func() error { return nil })
	var work device.Task = nothing
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := errors.Join(s.Enqueue(work), s.Synchronize()); err != nil {
			t.Error(err)
		}
	}))
}

func ExampleHostStream() {
	s, err := device.Host().NewStream()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close()
	hs := s.(*device.HostStream)
	_ = hs.Enqueue(task(func() error { fmt.Println("on the stream"); return nil }))
	_ = s.Synchronize()
	fmt.Println("after it")
	// Output:
	// on the stream
	// after it
}
