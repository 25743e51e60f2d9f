package device

import "errors"

// Kind tells devices apart.
type Kind uint8

// The kinds of device.
const (
	HostKind Kind = iota // memory of this machine, kernels in Go
	CUDAKind             // memory of an NVIDIA GPU, kernels in CUDA C++
)

// String returns "host" or "cuda".
func (k Kind) String() string {
	if k == CUDAKind {
		return "cuda"
	}
	return "host"
}

// ErrClosed is returned for new work on a closed stream.
var ErrClosed = errors.New("device: stream is closed")

// Device is where memory and streams live.
type Device interface {
	Kind() Kind
	// Index is the device's ordinal among its kind; 0 for the host.
	Index() int
	// String is like "host" or "cuda:3".
	String() string
	// NewStream makes a stream, which the caller closes.
	NewStream() (Stream, error)
}

// Stream is an order of execution on one device. Its methods may be called from several goroutines; work runs in the
// order of the calls.
type Stream interface {
	Device() Device
	// Handle is the native stream (a CUstream), 0 on the host.
	Handle() uintptr
	// Record marks the end of the work enqueued so far. On a closed stream all work has run.
	Record() (Event, error)
	// Wait makes work enqueued later wait for the event. The caller does not block. The zero Event is complete.
	Wait(Event) error
	// Synchronize blocks until all enqueued work has run. It returns the first error of the work since the last
	// Synchronize and forgets it.
	Synchronize() error
	// Close waits for enqueued work and releases the stream. It is idempotent.
	Close() error
}

// Waitable is a mark in a stream of some device.
type Waitable interface {
	// Done reports whether the work before the mark has run.
	Done() bool
	// Wait blocks until it has.
	Wait() error
}

// Event is a mark in a stream. The zero Event is always complete. Events are values and need no release.
type Event struct{ at Waitable }

// NewEvent wraps a device's own mark. Only devices need it.
func NewEvent(w Waitable) Event { return Event{w} }

// Done reports whether the work before the event has run.
func (e Event) Done() bool { return e.at == nil || e.at.Done() }

// Wait blocks until the work before the event has run.
func (e Event) Wait() error {
	if e.at == nil {
		return nil
	}
	return e.at.Wait()
}

// Native returns the device's own mark, nil for the zero Event.
func (e Event) Native() Waitable { return e.at }
