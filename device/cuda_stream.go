package device

import (
	"errors"
	"fmt"
	"sync"

	"github.com/switchyard-moe/switchyard/internal/cuda"
)

// CUDAStream is a CUDA stream. Its work can be captured into a graph: the graph then contains Record and Wait, and
// Synchronize is refused with ErrCapturing.
//
// Synchronize reports errors of CUDA. A kernel of this module that gives up is no such error: its communicator reports it.
type CUDAStream struct {
	dev   *CUDADevice
	h     cuda.Stream
	owned bool

	mu     sync.Mutex
	closed bool
	// put counts marks, ran those known to be complete: mark k is when ran >= k.
	put, ran uint64
	pending  []*cudaEvent // of marks that may not be complete, oldest first
	idle     []*cudaEvent
	// Marks of a capture are of the graph, not of the stream: captures tells those of one capture from those of the next.
	captured []*cudaEvent
	captures uint64
}

// cudaEvent is a CUevent and the mark that it represents now.
type cudaEvent struct {
	h     cuda.Event
	at    uint64
	users int  // goroutines that wait for it
	out   bool // of pending: the last user makes it idle
}

// cudaMark is a position in a stream, or in the graph that the stream was being captured into.
type cudaMark struct {
	s       *CUDAStream
	e       *cudaEvent
	at      uint64
	capture uint64 // which of the stream's captures, 0 for none
}

// Device is the stream's GPU.
func (s *CUDAStream) Device() Device { return s.dev }

// Handle is the CUstream.
func (s *CUDAStream) Handle() uintptr { return uintptr(s.h) }

// Capturing reports whether the stream's work is being captured into a graph. Nothing is on a closed stream, unless it was
// a wrapper.
func (s *CUDAStream) Capturing() (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed && s.owned {
		return false, nil
	}
	return s.capturing()
}

// capturing is Capturing of a stream that is open.
func (s *CUDAStream) capturing() (bool, error) { return s.dev.ctx.Capturing(s.h) }

// Record marks the end of the enqueued work. While the stream is captured the mark belongs to the graph: streams may wait
// for it until the capture ends, and join the capture by that. The mark of a closed stream is complete; Record of a closed
// wrapper waits for the stream.
func (s *CUDAStream) Record() (Event, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.record()
	if err != nil {
		return Event{}, fmt.Errorf("device: record on a stream of %v: %w", s.dev, err)
	}
	return e, nil
}

func (s *CUDAStream) record() (Event, error) {
	if s.closed && s.owned {
		return Event{}, nil
	}
	capturing, err := s.capturing()
	switch {
	case err != nil:
		return Event{}, err
	case s.closed && capturing:
		return Event{}, ErrCapturing
	case s.closed:
		return Event{}, s.dev.ctx.SynchronizeStream(s.h)
	}
	if !capturing && len(s.captured) > 0 {
		s.captures++
		s.idle = append(s.idle, s.captured...)
		s.captured = s.captured[:0]
	}
	e, err := s.event(!capturing)
	if err != nil {
		return Event{}, err
	}
	if err := s.dev.ctx.Record(e.h, s.h); err != nil {
		s.idle = append(s.idle, e)
		return Event{}, err
	}
	if capturing {
		s.captured = append(s.captured, e)
		return NewEvent(&cudaMark{s: s, e: e, capture: s.captures + 1}), nil
	}
	s.put++
	e.at, e.out = s.put, false
	s.pending = append(s.pending, e)
	return NewEvent(&cudaMark{s: s, e: e, at: s.put}), nil
}

// manyPending is how many marks a stream has under way before Record asks whether some of them are complete.
const manyPending = 32

// event returns an unused event. mayAsk allows it to ask the driver for the state of others.
func (s *CUDAStream) event(mayAsk bool) (*cudaEvent, error) {
	if len(s.idle) == 0 && mayAsk && len(s.pending) >= manyPending {
		// The stream is in order: when one is complete, so are all before it.
		if e := s.pending[len(s.pending)/2]; s.complete(e) {
			s.reached(e.at)
		}
	}
	if n := len(s.idle); n > 0 {
		e := s.idle[n-1]
		s.idle = s.idle[:n-1]
		return e, nil
	}
	h, err := s.dev.ctx.NewEvent(false)
	return &cudaEvent{h: h}, err
}

// complete reports whether nothing before the event runs any more, because it has run or failed.
func (s *CUDAStream) complete(e *cudaEvent) bool {
	done, err := s.dev.ctx.EventDone(e.h)
	return done || err != nil
}

// reached notes that mark at and all before it are complete.
func (s *CUDAStream) reached(at uint64) {
	s.ran = max(s.ran, at)
	n := 0
	for n < len(s.pending) && s.pending[n].at <= s.ran {
		if e := s.pending[n]; e.users == 0 {
			s.idle = append(s.idle, e)
		} else {
			e.out = true
		}
		n++
	}
	k := copy(s.pending, s.pending[n:])
	clear(s.pending[k:])
	s.pending = s.pending[:k]
}

// Wait makes later work wait for e, a mark of a CUDA stream of any device. A stream that is captured waits for marks of the
// same capture and for those that are complete; others are an ErrCapturing.
func (s *CUDAStream) Wait(e Event) error {
	switch m := e.Native().(type) {
	case nil:
		return nil
	case *cudaMark:
		if m.s == s {
			return nil
		}
		s.mu.Lock()
		closed := s.closed
		s.mu.Unlock()
		if closed {
			return ErrClosed
		}
		if err := m.hold(s); err != nil {
			return fmt.Errorf("device: wait on a stream of %v for one of %v: %w", s.dev, m.s.dev, err)
		}
		return nil
	default:
		return fmt.Errorf("device: a CUDA stream cannot wait for an event of %T", m)
	}
}

// hold makes stream t wait for m.
func (m *cudaMark) hold(t *CUDAStream) error {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	switch {
	case m.capture != 0:
		if err := m.live(); err != nil {
			return err
		}
	case m.at <= m.s.ran:
		return nil
	case m.s.closed:
		return ErrClosed
	default:
		capturing, err := t.capturing()
		if err != nil {
			return err
		}
		if capturing {
			if m.s.complete(m.e) {
				m.s.reached(m.at)
				return nil
			}
			return fmt.Errorf("%w: the event is not of the graph and has not happened yet; synchronize before the capture", ErrCapturing)
		}
	}
	return t.dev.ctx.WaitEvent(t.h, m.e.h)
}

// live returns an error when the capture that m belongs to has ended.
func (m *cudaMark) live() error {
	if m.capture == m.s.captures+1 && !m.s.closed {
		capturing, err := m.s.capturing()
		if err != nil || capturing {
			return err
		}
	}
	return fmt.Errorf("%w: the event belongs to a capture that has ended", ErrCapturing)
}

// Done reports whether nothing before the mark runs any more: it has run or failed. A mark of a graph is never done.
func (m *cudaMark) Done() bool {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	if m.capture != 0 {
		return false
	}
	if m.at > m.s.ran && !m.s.closed && m.s.complete(m.e) {
		m.s.reached(m.at)
	}
	return m.at <= m.s.ran
}

// Wait blocks until the work before the mark has run.
func (m *cudaMark) Wait() error {
	s := m.s
	s.mu.Lock()
	if m.capture != 0 {
		s.mu.Unlock()
		return fmt.Errorf("device: wait for an event: %w: it belongs to a graph", ErrCapturing)
	}
	if m.at <= s.ran {
		s.mu.Unlock()
		return nil
	}
	if s.closed {
		s.mu.Unlock()
		return fmt.Errorf("device: wait for an event: %w", ErrClosed)
	}
	m.e.users++
	s.mu.Unlock()
	err := s.dev.ctx.SynchronizeEvent(m.e.h)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.reached(m.at)
	}
	if m.e.users--; m.e.users == 0 && m.e.out {
		s.idle = append(s.idle, m.e)
	}
	if err != nil {
		return fmt.Errorf("device: wait for an event of %v: %w", s.dev, err)
	}
	return nil
}

// Synchronize blocks until all enqueued work has run. The error is CUDA's; one of a kernel stays with the context and
// comes again.
func (s *CUDAStream) Synchronize() error {
	if err := s.synchronize(); err != nil {
		return fmt.Errorf("device: synchronize a stream of %v: %w", s.dev, err)
	}
	return nil
}

func (s *CUDAStream) synchronize() error {
	s.mu.Lock()
	at, closed := s.put, s.closed
	s.mu.Unlock()
	if closed {
		return ErrClosed
	}
	capturing, err := s.capturing()
	switch {
	case err != nil:
		return err
	case capturing:
		return ErrCapturing
	}
	if err := s.dev.ctx.SynchronizeStream(s.h); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reached(at)
	return nil
}

// Close waits for enqueued work and releases the stream; of a wrapped stream it waits for what Record has marked and
// releases the wrapper only. No goroutine uses the stream any more. It is idempotent. While a stream of its own is captured
// it is an ErrCapturing and the stream stays.
func (s *CUDAStream) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	c := s.dev.ctx
	var errs []error
	switch {
	case s.owned:
		capturing, err := s.capturing()
		if capturing {
			return fmt.Errorf("device: close a stream of %v: %w", s.dev, ErrCapturing)
		}
		errs = append(errs, err, c.SynchronizeStream(s.h))
	case len(s.pending) > 0:
		errs = append(errs, c.SynchronizeEvent(s.pending[len(s.pending)-1].h))
	}
	s.closed, s.ran = true, s.put
	for _, list := range [][]*cudaEvent{s.pending, s.idle, s.captured} {
		for _, e := range list {
			errs = append(errs, c.DestroyEvent(e.h))
		}
	}
	s.pending, s.idle, s.captured = nil, nil, nil
	if s.owned {
		errs = append(errs, c.DestroyStream(s.h))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("device: close a stream of %v: %w", s.dev, err)
	}
	return nil
}
