package cuda

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"
)

// Context is a device's primary context, shared with torch and everything else in the process.
type Context struct {
	dev    *Device
	h      uintptr
	closed atomic.Bool
}

// Primary retains the device's primary context. Close gives it back.
func (v *Device) Primary() (*Context, error) {
	a := args{v.handle}
	if err := v.d.call(0, opPrimaryCtxRetain, &a, nil); err != nil {
		return nil, fmt.Errorf("%v: %w", v, err)
	}
	return &Context{dev: v, h: uintptr(a[0])}, nil
}

// Device is the context's device.
func (c *Context) Device() *Device { return c.dev }

// Handle is the CUcontext.
func (c *Context) Handle() uintptr { return c.h }

// Close releases the context. The driver destroys it when nobody else holds it. It is idempotent.
func (c *Context) Close() error {
	if c == nil || c.closed.Swap(true) {
		return nil
	}
	a := args{c.dev.handle}
	return c.dev.d.call(0, opPrimaryCtxRelease, &a, nil)
}

func (c *Context) call(o op, a *args, p unsafe.Pointer) error {
	if c.closed.Load() {
		return ErrClosed
	}
	return c.dev.d.call(c.h, o, a, p)
}

// Synchronize waits for everything on the device that was enqueued through this context. For the control plane only.
func (c *Context) Synchronize() error {
	var a args
	return c.call(opCtxSynchronize, &a, nil)
}

// EnablePeer lets kernels of c reach memory that peer's context allocated with MemAlloc. Mappings of virtual memory
// need SetAccess instead. Enabling twice is no error.
func (c *Context) EnablePeer(peer *Context) error {
	a := args{uint64(peer.h)}
	err := c.call(opCtxEnablePeerAccess, &a, nil)
	if errors.Is(err, PeerAccessEnabled) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%v to %v: %w", c.dev, peer.dev, err)
	}
	return nil
}

// Stream is a CUstream. The zero Stream is the legacy default stream.
type Stream uintptr

// Event is a CUevent.
type Event uintptr

// StreamPriorities is the range of priorities; smaller numbers are more urgent.
func (c *Context) StreamPriorities() (least, greatest int, err error) {
	var a args
	err = c.call(opCtxGetStreamPriorityRange, &a, nil)
	return int(int64(a[0])), int(int64(a[1])), err
}

// NewStream makes a stream that does not wait for the legacy default stream. The caller destroys it.
func (c *Context) NewStream(priority int) (Stream, error) {
	a := args{1, uint64(int64(priority))}
	err := c.call(opStreamCreate, &a, nil)
	return Stream(a[0]), err
}

// DestroyStream releases a stream; work on it still completes.
func (c *Context) DestroyStream(s Stream) error {
	a := args{uint64(s)}
	return c.call(opStreamDestroy, &a, nil)
}

// SynchronizeStream blocks until the stream's work is done.
func (c *Context) SynchronizeStream(s Stream) error {
	a := args{uint64(s)}
	return c.call(opStreamSynchronize, &a, nil)
}

// StreamContext is the CUcontext that a stream belongs to.
func (c *Context) StreamContext(s Stream) (uintptr, error) {
	a := args{uint64(s)}
	err := c.call(opStreamGetCtx, &a, nil)
	return uintptr(a[0]), err
}

// Capturing reports whether the stream is being captured into a graph.
func (c *Context) Capturing(s Stream) (bool, error) {
	a := args{uint64(s)}
	err := c.call(opStreamIsCapturing, &a, nil)
	return err == nil && a[0] != 0, err
}

// NewEvent makes an event; one with timing can be given to Elapsed and costs more. The caller destroys it.
func (c *Context) NewEvent(timing bool) (Event, error) {
	a := args{2} // CU_EVENT_DISABLE_TIMING
	if timing {
		a[0] = 0
	}
	err := c.call(opEventCreate, &a, nil)
	return Event(a[0]), err
}

// DestroyEvent releases an event. Waits that were enqueued on it keep their meaning.
func (c *Context) DestroyEvent(e Event) error {
	a := args{uint64(e)}
	return c.call(opEventDestroy, &a, nil)
}

// Record marks the stream's present end with the event.
func (c *Context) Record(e Event, s Stream) error {
	a := args{uint64(e), uint64(s)}
	return c.call(opEventRecord, &a, nil)
}

// WaitEvent makes later work of the stream wait for the event's last record.
func (c *Context) WaitEvent(s Stream, e Event) error {
	a := args{uint64(s), uint64(e)}
	return c.call(opStreamWaitEvent, &a, nil)
}

// EventDone reports whether the work before the event's last record is done.
func (c *Context) EventDone(e Event) (bool, error) {
	a := args{uint64(e)}
	return done(c.call(opEventQuery, &a, nil))
}

// SynchronizeEvent blocks until the work before the event's last record is done.
func (c *Context) SynchronizeEvent(e Event) error {
	a := args{uint64(e)}
	return c.call(opEventSynchronize, &a, nil)
}

// Elapsed is the time between two recorded events with timing.
func (c *Context) Elapsed(from, to Event) (time.Duration, error) {
	a := args{uint64(from), uint64(to)}
	err := c.call(opEventElapsedTime, &a, nil)
	return time.Duration(a[0]), err
}

// WaitValue makes later work of the stream wait until the 64-bit word at addr is at least value. The wait has no
// deadline and sees no abort word: use it only where the word's writer is this process.
func (c *Context) WaitValue(s Stream, addr uintptr, value uint64) error {
	a := args{uint64(s), uint64(addr), value, 0}
	return c.call(opStreamWaitValue64, &a, nil)
}

// WriteValue makes the stream write a 64-bit word after its work so far, at system scope.
func (c *Context) WriteValue(s Stream, addr uintptr, value uint64) error {
	a := args{uint64(s), uint64(addr), value, 0}
	return c.call(opStreamWriteValue64, &a, nil)
}

// CaptureMode is what others may not do while a stream is captured (CUstreamCaptureMode).
type CaptureMode uint64

// The modes: calls that could reach into a capture are forbidden to every thread, to the one that began it, or to none.
// Calls of this package are exempt.
const (
	GlobalCapture CaptureMode = iota
	ThreadLocalCapture
	RelaxedCapture
)

// BeginCapture starts recording the stream's work into a graph instead of running it. Any thread may end a relaxed
// capture, others end on the thread on which they began.
func (c *Context) BeginCapture(s Stream, mode CaptureMode) error {
	a := args{uint64(s), uint64(mode)}
	return c.call(opStreamBeginCapture, &a, nil)
}

// Graph is a CUgraph, GraphExec its executable form.
type (
	Graph     uintptr
	GraphExec uintptr
)

// EndCapture ends the recording. The caller destroys the graph.
func (c *Context) EndCapture(s Stream) (Graph, error) {
	a := args{uint64(s)}
	err := c.call(opStreamEndCapture, &a, nil)
	return Graph(a[0]), err
}

// Instantiate makes a graph executable. The caller destroys the result.
func (c *Context) Instantiate(g Graph) (GraphExec, error) {
	a := args{uint64(g)}
	err := c.call(opGraphInstantiate, &a, nil)
	return GraphExec(a[0]), err
}

// LaunchGraph runs the graph's work in the stream's order.
func (c *Context) LaunchGraph(x GraphExec, s Stream) error {
	a := args{uint64(x), uint64(s)}
	return c.call(opGraphLaunch, &a, nil)
}

// DestroyGraph releases a graph.
func (c *Context) DestroyGraph(g Graph) error {
	a := args{uint64(g)}
	return c.call(opGraphDestroy, &a, nil)
}

// DestroyGraphExec releases an executable graph.
func (c *Context) DestroyGraphExec(x GraphExec) error {
	a := args{uint64(x)}
	return c.call(opGraphExecDestroy, &a, nil)
}

func done(err error) (bool, error) {
	if errors.Is(err, NotReady) {
		return false, nil
	}
	return err == nil, err
}
