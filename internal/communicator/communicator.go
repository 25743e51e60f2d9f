package communicator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// ErrEarlier is the condition of a call that was not made, because an earlier one is known now to have failed.
var ErrEarlier = errors.New("an earlier call failed")

// DefaultTimeout bounds every wait for a peer where the options of an owner do not.
const DefaultTimeout = 30 * time.Second

// Config has the needs of an owner.
type Config struct {
	// Name begins errors: the owner's package.
	Name string
	// Must are the values that must be equal on all ranks, with their names.
	Must []string
	// Family is the bounds of launches, complete.
	Family kernels.Family
	// ExtraBytes of symmetric memory are the owner's, behind the control block, of which the first ZeroExtra are zero at first.
	ExtraBytes, ZeroExtra int64
	// Settle, when set, gets that memory before the port is opened, to write into it and to finish the family.
	Settle func(extra memory.View) error
	// Timeout bounds Agree.
	Timeout time.Duration
	// Hosts says that launches may span hosts, of ranks in memory of the host.
	Hosts bool
	// GPUs says that they may on GPUs too.
	GPUs bool
	// Counters, when set, tells numbers that only grow, by name. Any goroutine may call it, also while a call runs.
	Counters func(add func(name string, n uint64))
	// Layer, when set, tells what a dispatcher has routed, by ranks of the group. It may be called as Counters may.
	Layer func() flight.Layer
	// Traffic, when set, tells the bytes of its rows, by rank of the group. It may be called as Counters may.
	Traffic func(add func(rank int, t flight.Traffic))
	// Turn, when set, is that of other communicators with which this one has calls in one order, as if they were one's.
	Turn *Turn
	// Rest has Close look for what launches have left behind, when all ranks' launches have ended, and report it. It costs a meeting.
	Rest bool
}

// Turn has the calls of communicators follow each other: one is made at a time, and each launch comes behind the last of any.
type Turn struct {
	calls    sync.Mutex
	last     device.Stream // of the last launch that was not captured; nil before the first, and for the caller itself
	captured bool          // a launch was
}

// Lock begins a call of one of the communicators, or another look at what calls change; Unlock ends it.
func (t *Turn) Lock() { t.calls.Lock() }

// Unlock ends what Lock began.
func (t *Turn) Unlock() { t.calls.Unlock() }

// Wait returns when the launches so far have run, but for captured ones. t is locked.
func (t *Turn) Wait() error { return device.Follow(nil, t.last) }

// Captured reports whether a launch was captured, so that a graph may repeat it. t is locked.
func (t *Turn) Captured() bool { return t.captured }

// breakage is the error that left a communicator broken. told is closed when those who look on know of it: callers learn it then.
type breakage struct {
	err  error
	told chan struct{}
}

// Communicator is one rank's end. Its owner holds Lock throughout a call.
type Communicator struct {
	Heap   *memory.Heap
	Group  *comm.Group
	Traits kernels.Traits
	name   string
	block  *memory.Buffer
	rail   *memory.RailBuffer // nil where a launch needs none
	extra  memory.View
	port   kernels.Port
	within atomic.Int64 // time.Duration
	rest   bool
	trace  *slog.Logger // gets a line for every call; nil without trace level
	notes  *flight.Recorder
	mute   func() // ends what it tells of itself

	*Turn  // of this one, or of several
	closed bool
	apart  sync.WaitGroup // calls of LaunchApart

	broken atomic.Pointer[breakage] // a launch failed half-way: the control block is in no known state
}

// Timeout bounds the waits of the next call.
func (c *Communicator) Timeout() time.Duration { return time.Duration(c.within.Load()) }

// SetTimeout sets it.
func (c *Communicator) SetTimeout(d time.Duration) error {
	if d <= 0 {
		return comm.Invalid(c.name, "timeout is %v, want more than 0", d)
	}
	c.within.Store(int64(d))
	return nil
}

// Open makes a communicator together with all ranks. refused is the reason why this rank cannot take part. A failure on one rank is
// an error on all, with its cause and at once, and nothing is left.
func Open(ctx context.Context, h *memory.Heap, o Config, refused error) (*Communicator, error) {
	c := &Communicator{Heap: h, Group: h.Group(), name: o.Name, rest: o.Rest, Turn: o.Turn}
	c.within.Store(int64(o.Timeout))
	if c.Turn == nil {
		c.Turn = &Turn{}
	}
	if log := c.Group.Logger(); log.Enabled(ctx, env.LevelTrace) {
		c.trace = log
	}
	var layout kernels.Layout
	if n := c.Group.Topology().Hosts; n > 1 && !o.GPUs && h.Device().Kind() != device.HostKind {
		refused = fmt.Errorf("%s: %w", o.Name, memory.NoGPUsOn(n))
	} else if n > 1 && !o.Hosts && refused == nil {
		refused = fmt.Errorf("%s: %w: the ranks of %s are on %d hosts", o.Name, comm.ErrUnsupported, c.Group.Name(), n)
	}
	if refused == nil {
		var err error
		if layout, err = h.Engine().Layout(o.Family); err != nil {
			refused = comm.Invalid(o.Name, "%v", err)
		}
	}
	if _, err := agree.On(ctx, c.Group, agree.Claim{Must: agree.Same(o.Must...)}, refused); err != nil {
		if refused != nil {
			return nil, err // it has the name
		}
		return nil, fmt.Errorf("%s: compare options: %w", o.Name, err)
	}
	control := kernels.AlignUp(layout.Bytes, kernels.LineBytes)
	if err := c.open(ctx, &o, &layout, control); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: memory for control block and staging: %w", o.Name, err), c.release(false))
	}
	c.Traits = c.port.Ready()
	rank, members := c.Group.Flight()
	c.notes = rank.Recorder(c.Group.Name(), c.block.Offset(), members, h.Device().String())
	tells := &flight.Part{Memory: h, Counters: o.Counters}
	if o.Layer != nil {
		tells.Traffic = func(add func(rank int, t flight.Traffic)) {
			o.Traffic(func(rank int, t flight.Traffic) { add(members[rank], t) })
		}
		tells.Layer = func() flight.Layer { return o.Layer().Of(members, rank.Size) }
	}
	c.mute = rank.Add(tells)
	return c, nil
}

// open takes the memory and opens the port, when the bytes that have to be zero are so.
func (c *Communicator) open(ctx context.Context, o *Config, l *kernels.Layout, control int64) (err error) {
	if c.block, err = Allocate(ctx, c.Heap, control+o.ExtraBytes); err != nil {
		return err
	}
	var claim agree.Claim
	if !c.Group.Replaying() { // else peers use it, and it is as the lost rank has left it
		if err = c.block.Clear(0, l.Zero); err == nil {
			err = c.block.Clear(control, o.ZeroExtra)
		}
	}
	if err == nil && l.Rail > 0 {
		if c.rail, err = c.Heap.AllocRail(l.Rail); err == nil {
			o.Family.(interface{ PlaceRail(at int64) }).PlaceRail(c.rail.Offset())
		}
	}
	if c.extra = c.block.View().Slice(control, o.ExtraBytes); err == nil && o.Settle != nil {
		err = o.Settle(c.extra)
	}
	if err == nil {
		claim.Must = agree.Same(fmt.Sprintf("its control block at offset %d", c.block.Offset()))
		c.port, err = c.Heap.Engine().Open(o.Family, c.block.Offset())
	}
	// No peer may write before our block is zero, so all ranks meet again once it is.
	_, err = agree.On(ctx, c.Group, claim, err)
	return err
}

// Allocate takes n bytes of the heap together with all ranks, and first grows it if no rank has room. A failure on one rank is an error
// on all.
func Allocate(ctx context.Context, h *memory.Heap, n int64) (*memory.Buffer, error) {
	b, err := h.Alloc(n)
	claim := agree.Claim{Must: agree.Same(fmt.Sprintf("%d bytes", n))}
	var full error
	if errors.Is(err, memory.ErrOutOfMemory) {
		full, err = err, nil
		claim.Own = full.Error()
	}
	claims, err := agree.On(ctx, h.Group(), claim, err)
	if err == nil {
		var lacking int
		for r, why := range claims.Owns() {
			if why != "" {
				if lacking++; err == nil {
					err = fmt.Errorf("rank %d: %w", r, full)
					if full == nil {
						err = &agree.RefusedError{Rank: r, Why: why, Cause: memory.ErrOutOfMemory}
					}
				}
			}
		}
		if lacking == len(claims) {
			if err = h.Grow(ctx, n); err != nil {
				return nil, errors.Join(full, err)
			}
			return h.Alloc(n)
		}
	}
	if err != nil && b != nil {
		return nil, errors.Join(err, b.Free())
	}
	return b, err
}

// Port is the engine's end of it.
func (c *Communicator) Port() kernels.Port { return c.port }

// Extra is the owner's memory behind the control block.
func (c *Communicator) Extra() memory.View { return c.extra }

// Alive returns comm.ErrClosed once c or its heap is closed. c is locked.
func (c *Communicator) Alive() error {
	switch {
	case c.closed:
		return fmt.Errorf("%s: %w", c.name, comm.ErrClosed)
	case c.Heap.Closed():
		return fmt.Errorf("%s: its heap is %w", c.name, comm.ErrClosed)
	}
	return nil
}

// Usable returns the error of a call that is not possible. c is locked.
func (c *Communicator) Usable() error {
	if err := c.Whole(); err != nil {
		return err
	}
	return c.LockedFault()
}

// Whole returns the error after which no call is possible. A disagreement of ranks is none, and a later call is told of it. c is locked.
func (c *Communicator) Whole() error {
	if err := c.Alive(); err != nil {
		return err
	}
	if broken := c.broken.Load(); broken != nil {
		<-broken.told
		return fmt.Errorf("%s: %w: %w", c.name, ErrEarlier, broken.err)
	}
	select {
	case <-c.Group.Done():
		return fmt.Errorf("%s: %w", c.name, c.Group.Err())
	default:
		return nil
	}
}

// Fault returns the error of launches that have run by now, nil if there is none. It returns a disagreement of ranks once.
func (c *Communicator) Fault() error {
	c.Lock()
	defer c.Unlock()
	if err := c.Alive(); err != nil {
		return err
	}
	return c.LockedFault()
}

// LockedFault is Fault where c is locked and not closed.
func (c *Communicator) LockedFault() error {
	err := c.port.Fault()
	if err == nil {
		return nil
	}
	c.Done(err)
	return fmt.Errorf("%s: %w: %w", c.name, ErrEarlier, err)
}

// Agree compares what the ranks bring to a call on the control plane, with all of them, and returns everybody's Own. refused is
// this rank's own complaint, which every rank hears of and it gets back. A rank that is closed meets nobody. c is locked.
func (c *Communicator) Agree(claim agree.Claim, refused error) ([]string, error) {
	if c.closed || c.Heap.Closed() {
		return nil, refused
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout())
	defer cancel()
	claims, err := agree.On(ctx, c.Group, claim, refused)
	if err != nil && refused == nil {
		err = fmt.Errorf("%s: validate: %w", c.name, err)
	}
	return claims.Owns(), err
}

// Launch enqueues op on s behind the last launch, or runs it if s is nil. After an error op was not enqueued, or, without a
// stream, has failed. On a stream the owner's Done gets the result, and calls c.Done. c is locked.
func (c *Communicator) Launch(s device.Stream, op kernels.Operation) error {
	if err := c.Takes(s); err != nil {
		return err
	}
	defer cuda.StartRange(op.Operation(), op.Noted().Payload).End()
	c.log(s, op)
	t := c.begin(s, op, false)
	err := c.order(s)
	if err == nil {
		if err = c.port.Launch(s, op); err != nil && s == nil {
			c.Done(err)
		}
	}
	return c.launched(t, err)
}

// begin notes a call. apart says that other ranks may make none.
func (c *Communicator) begin(s device.Stream, op kernels.Operation, apart bool) flight.Ticket {
	n := op.Noted()
	n.Ticket = c.notes.Begin(op.Operation(), n.Algorithm, n.Payload, n.Staged, numberOf(s), apart || n.Alone, n.Send, n.Recv)
	return n.Ticket
}

// numberOf is a stream as notes have it.
func numberOf(s device.Stream) flight.Stream {
	switch on := s.(type) {
	case nil:
		return flight.NoStream
	case *device.HostStream:
		return flight.OnStream(on.Number())
	}
	return flight.OnStream(uint64(s.Handle()))
}

// launched is the error of a launch, and notes what the engine does not.
func (c *Communicator) launched(t flight.Ticket, err error) error {
	if err != nil {
		t.Finished(err)
		return fmt.Errorf("%s: %w", c.name, err)
	}
	if c.Traits.Multiprocessors {
		t.Unseen()
	}
	return nil
}

// LaunchApart enqueues op on s, or runs it if s is nil. Unlike Launch it does not order op behind other launches, which may wait for what op
// does, and an error of op leaves c usable. c is not locked.
func (c *Communicator) LaunchApart(s device.Stream, op kernels.Operation) error {
	c.Lock()
	err := c.Whole()
	if err == nil && !op.Noted().Alone { // ranks hear of what they disagreed on in a call of theirs together
		err = c.LockedFault()
	}
	if err == nil {
		err = c.Takes(s)
	}
	if err == nil {
		c.apart.Add(1)
	}
	c.Unlock()
	if err != nil {
		return err
	}
	defer c.apart.Done()
	defer cuda.StartRange(op.Operation(), op.Noted().Payload).End()
	c.log(s, op)
	t := c.begin(s, op, true)
	err = c.port.Launch(s, op)
	if s == nil {
		c.DoneApart(err)
	}
	return c.launched(t, err)
}

// log writes a line of trace.
func (c *Communicator) log(s device.Stream, op kernels.Operation) {
	if c.trace != nil {
		c.trace.Log(context.Background(), env.LevelTrace, "call", "group", c.Group.Name(), "rank", c.Group.Rank(), "operation", op.Operation(), "stream", s != nil)
	}
}

// order makes s wait for the last launch. A captured launch is outside that order: the program that replays it orders it.
func (c *Communicator) order(s device.Stream) error {
	if s == c.last {
		return nil
	}
	if captured, err := device.Capturing(s); err != nil || captured {
		c.captured = c.captured || captured
		return err
	}
	if err := device.Follow(s, c.last); err != nil {
		return err
	}
	c.last = s
	return nil
}

// Done gets the result of a launch. An error leaves c broken, unless ranks have only disagreed (kernels.Recoverable).
func (c *Communicator) Done(err error) {
	if err == nil {
		return
	}
	if kernels.Recoverable(err) {
		c.notes.Erred()
		return
	}
	b := &breakage{err, make(chan struct{})}
	if c.broken.CompareAndSwap(nil, b) {
		c.notes.Broke()
		close(b.told)
	}
}

// DoneApart gets the result of a launch apart, whose error leaves c usable.
func (c *Communicator) DoneApart(err error) {
	if err != nil {
		c.notes.Erred()
	}
}
