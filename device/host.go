package device

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// HostDevice is the memory and the processors of this machine.
type HostDevice struct{ _ byte }

var hostDevice HostDevice

// Host returns the host device. There is one.
func Host() *HostDevice { return &hostDevice }

// Kind is HostKind.
func (*HostDevice) Kind() Kind { return HostKind }

// Index is 0.
func (*HostDevice) Index() int { return 0 }

// String is "host".
func (*HostDevice) String() string { return "host" }

// NewStream starts a stream with a worker of its own.
func (*HostDevice) NewStream() (Stream, error) { return NewHostStream(), nil }

// Task is a piece of work on a host stream. Run is called once, on the stream's worker, after all earlier work.
type Task interface{ Run() error }

// HostStream is a first-in first-out queue with one worker goroutine. Enqueue allocates nothing once the queue is deep
// enough for its user.
type HostStream struct {
	number uint64

	mu      sync.Mutex
	more    sync.Cond // work arrived or the stream closes: the worker waits here
	less    sync.Cond // work was finished: Synchronize and event waits wait here
	queue   []Task    // ring
	head, n int
	// put and ran count tasks since the stream was made: event k is complete when ran >= k.
	put, ran uint64
	err      error
	closed   bool
	stopped  chan struct{}
}

// made counts the host streams of this process.
var made atomic.Uint64

// NewHostStream starts a host stream. Close stops its worker.
func NewHostStream() *HostStream {
	s := &HostStream{number: made.Add(1), queue: make([]Task, 16), stopped: make(chan struct{})}
	s.more.L, s.less.L = &s.mu, &s.mu
	go s.work()
	return s
}

func (s *HostStream) work() {
	defer close(s.stopped)
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		for s.n == 0 {
			if s.closed {
				return
			}
			s.more.Wait()
		}
		t := s.queue[s.head]
		s.queue[s.head] = nil
		s.head = (s.head + 1) % len(s.queue)
		s.n--
		s.mu.Unlock()
		err := t.Run()
		s.mu.Lock()
		if err != nil && s.err == nil {
			s.err = err
		}
		s.ran++
		s.less.Broadcast()
	}
}

// Enqueue adds a task. The stream keeps it until it has run.
func (s *HostStream) Enqueue(t Task) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	if s.n == len(s.queue) {
		grown := make([]Task, 2*len(s.queue))
		k := copy(grown, s.queue[s.head:])
		copy(grown[k:], s.queue[:s.head])
		s.queue, s.head = grown, 0
	}
	s.queue[(s.head+s.n)%len(s.queue)] = t
	s.n++
	s.put++
	s.more.Signal()
	return nil
}

// Device is the host.
func (s *HostStream) Device() Device { return Host() }

// Handle is 0.
func (s *HostStream) Handle() uintptr { return 0 }

// Number tells the stream from others of this process, which have numbers in the order in which they were made, from 1.
func (s *HostStream) Number() uint64 { return s.number }

type hostMark struct {
	s  *HostStream
	at uint64
}

func (m *hostMark) Done() bool {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	return m.s.ran >= m.at
}

func (m *hostMark) Wait() error {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	for m.s.ran < m.at {
		m.s.less.Wait()
	}
	return nil
}

// Run makes a mark a task, in which the stream that waits for it blocks.
func (m *hostMark) Run() error { return m.Wait() }

// Record marks the end of the enqueued work.
func (s *HostStream) Record() (Event, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return NewEvent(&hostMark{s, s.put}), nil
}

// Wait makes later work wait for e.
func (s *HostStream) Wait(e Event) error {
	switch m := e.Native().(type) {
	case nil:
		return nil
	case *hostMark:
		if m.s == s || m.Done() {
			return nil
		}
		return s.Enqueue(m)
	default:
		return fmt.Errorf("device: a host stream cannot wait for an event of %T", m)
	}
}

// Synchronize blocks until the queue is empty and returns the first error since the last Synchronize.
func (s *HostStream) Synchronize() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for at := s.put; s.ran < at; {
		s.less.Wait()
	}
	err := s.err
	s.err = nil
	return err
}

// Close runs the enqueued work, stops the worker and returns an error that no Synchronize has returned.
func (s *HostStream) Close() error {
	s.mu.Lock()
	s.closed = true
	s.more.Signal()
	s.mu.Unlock()
	<-s.stopped
	return s.Synchronize()
}
