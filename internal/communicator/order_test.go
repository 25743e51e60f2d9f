package communicator

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// port notes what is launched.
type port struct {
	kernels.Port
	streams []device.Stream
	err     error
	fault   error // of earlier launches, which is told once
}

func (p *port) Fault() (err error) {
	err, p.fault = p.fault, nil
	return err
}

func (p *port) Launch(s device.Stream, _ kernels.Operation) error {
	p.streams = append(p.streams, s)
	return p.err
}

// stream is one that may be captured, and notes what it waits for.
type stream struct {
	device.Stream
	captured bool
	waits    int
}

func (s *stream) Capturing() (bool, error)    { return s.captured, nil }
func (s *stream) Wait(device.Event) error     { s.waits++; return nil }
func (s *stream) Device() device.Device       { return device.Host() }
func (*stream) Handle() uintptr               { return 0 }
func (*stream) Record() (device.Event, error) { return device.Event{}, nil }

func TestALaunchWaitsForTheOneBefore(t *testing.T) {
	c, a, b := &Communicator{Turn: &Turn{}, notes: notes(), port: &port{}}, &stream{}, &stream{}
	for _, s := range []*stream{a, a, b, b, a} {
		require.NoError(t, c.Launch(s, &kernels.AllToAllV{}))
	}
	require.Equal(t, [2]int{1, 1}, [2]int{a.waits, b.waits})
}

// A graph has no past: what is captured waits for nobody, and nobody waits for it.
func TestACapturedLaunchHasNoPlaceInTheOrder(t *testing.T) {
	p := &port{}
	c, a, b, graph := &Communicator{Turn: &Turn{}, notes: notes(), port: p}, &stream{}, &stream{}, &stream{captured: true}
	for _, s := range []*stream{a, graph, graph, a} {
		require.NoError(t, c.Launch(s, &kernels.AllToAllV{}))
	}
	require.Zero(t, a.waits+graph.waits)
	require.Len(t, p.streams, 4)
	require.NoError(t, c.Launch(b, &kernels.AllToAllV{}))
	require.Equal(t, 1, b.waits, "for a, which was not captured")
	graph.captured = false
	require.NoError(t, c.Launch(graph, &kernels.AllToAllV{}))
	require.Equal(t, 1, graph.waits, "for b")
}

// A call of one rank alone leaves what ranks have disagreed on to the next one that others take part in.
func TestACallAloneDoesNotHearOfADisagreement(t *testing.T) {
	groups, err := comm.Local(1, comm.LocalOptions{})
	require.NoError(t, err)
	h, err := memory.NewHeap(t.Context(), groups[0], device.Host(), memory.Options{SegmentBytes: 1 << 20})
	require.NoError(t, err)
	p, s := &port{fault: &kernels.IndexError{}}, &stream{}
	c := &Communicator{Turn: &Turn{}, Group: groups[0], Heap: h, notes: notes(), port: p}
	alone := &kernels.Expand{Launched: kernels.Launched{Note: kernels.Note{Alone: true}}}
	require.NoError(t, c.LaunchApart(s, alone))
	require.ErrorIs(t, c.LaunchApart(s, &kernels.AllToAllV{}), ErrEarlier)
	require.NoError(t, c.LaunchApart(s, &kernels.AllToAllV{}))
	require.Len(t, p.streams, 2)
	require.NoError(t, errors.Join(h.Close(t.Context()), groups[0].Close()))
}

func TestOnlyWhatFailsHalfWayBreaks(t *testing.T) {
	p := &port{err: errors.New("no room in the stream")}
	c, s := &Communicator{Turn: &Turn{}, notes: notes(), port: p}, &stream{}
	require.Error(t, c.Launch(s, &kernels.AllToAllV{}))
	require.Nil(t, c.broken.Load(), "it was not enqueued")
	c.Done(nil)
	c.Done(&kernels.CountMismatchError{})
	require.Nil(t, c.broken.Load(), "ranks have merely disagreed")
	for _, p.err = range []error{&kernels.CallMismatchError{}, &kernels.SplitsError{}} {
		require.Error(t, c.Launch(nil, &kernels.AllToAllV{}))
		require.Nil(t, c.broken.Load())
	}
	p.err = errors.New("half-way")
	require.Error(t, c.Launch(nil, &kernels.AllToAllV{}))
	require.ErrorIs(t, c.broken.Load().err, p.err)
	c.Done(errors.New("later"))
	require.ErrorIs(t, c.broken.Load().err, p.err, "the first stays")
}

func notes() *flight.Recorder { return flight.New(0, 1).Recorder("world", 0, []int{0}, "host") }
