package kernels

import (
	"context"
	"errors"
	"time"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/flight"
)

// Engine launches the kernels of one rank of one symmetric heap. The heap makes it, for the device its memory is on, and
// closes it. Methods may be called from several goroutines.
//
// A communicator allocates a control block at one offset of every rank's segment, clears what Layout tells, and calls
// Open; when all ranks have, it calls Ready on its [Port] and launches from then on.
type Engine interface {
	// Defaults puts this engine's defaults in the place of zeros in f, and zeros in the place of negative numbers, which ask
	// for nothing of a kind. The other methods take what a family says as it is.
	Defaults(f Family)
	// Layout is the control block of a communicator. The error says what of f the engine cannot do.
	Layout(f Family) (Layout, error)
	// Open makes this rank's end of the communicator whose block is at offset, clear as Layout wants it. It can wait for
	// running kernels. f must not change any more.
	Open(f Family, offset int64) (Port, error)
	// Interrupt makes every wait of this rank's kernels return, at once and for good, whatever the device's driver is busy with.
	Interrupt()
	// Close releases the engine. All of its ports are closed. It is idempotent.
	Close() error
}

// Port is one communicator's end of an Engine: the launches of one rank over one control block.
type Port interface {
	// Ready comes when all ranks have opened, before the first launch.
	Ready() Traits
	// Launch enqueues an operation of the port's family on s, and runs it to its end when s is nil. Every rank launches its part;
	// the caller orders the launches of a port. After an error nothing was enqueued, except that with a nil stream it may be
	// the operation's own.
	//
	// The engine uses op, on a stream, until it calls its Done, which it does once when nothing was wrong with the launch,
	// perhaps before Launch returns.
	Launch(s device.Stream, op Operation) error
	// Fault is what operations that were done before they had run have come to; nil while all is well. It costs a load, and
	// says nothing of what still runs. Fault tells a Recoverable error once: it then forgets it, and waits until later launches
	// see that.
	Fault() error
	// Drain returns when everything that was launched has run; the last of it was on the stream last, nil if on none. Nothing is launched
	// after it. When ctx ends first, launches that wait for peers give up, and so do those behind them; the error is that of ctx, and
	// ErrRunning where they cannot.
	Drain(ctx context.Context, last device.Stream) error
	// Close releases the port. Nothing of it runs any more. It is idempotent.
	Close() error
}

// Family is the operations that share a control block, and the bounds within which they are launched. All ranks have the same. Each is a
// pointer to a struct of bounds.
type Family interface {
	// Family is the name in messages.
	Family() string
}

// Operation is what a Port launches, a pointer to a struct that embeds [Launched].
type Operation interface {
	// Operation is the name in messages. No operation of another family has it.
	Operation() string
	// Within bounds every wait for a peer.
	Within() time.Duration
	// Finish calls Done, if it is set. Engines call it.
	Finish(error)
	// Noted is what the rank notes of the call.
	Noted() *Note
}

// Layout is the size of a control block, and what follows from the bounds besides.
type Layout struct {
	// Bytes is the whole of it, and Zero how many at its start must be zero before the first launch.
	Bytes, Zero int64
	// State and Staging are the bytes of the buffers of these names in each of a dispatcher's handles.
	State, Staging int64
	// Rail is what a communicator takes of the rail segment, on GPUs of several hosts.
	Rail int64
	// Common are the bytes of DispatchShared.Words.
	Common int64
	// Routing is where in State the routing of a dispatch lies, and RoutingBytes how long it is, see DispatchRouting.
	Routing, RoutingBytes int64
	// LowLatency says that a dispatcher's tokens cross by the protocol for few of DispatchBounds.LowLatency.
	LowLatency bool
}

// Traits is what plans may want to know of how a port moves bytes. It is this rank's: peers may have others.
type Traits struct {
	// Pulls says that this rank reads large messages in their senders' memory where peers cannot write its output. Launches
	// then want the place of their source, where it has one.
	Pulls bool
	// Multiprocessors says that kernels run on as many multiprocessors as Schedule wants, CopyEngines that whole messages can
	// be moved without them.
	Multiprocessors, CopyEngines bool
	// Shared says that other ranks run on this rank's device and that their kernels must fit next to its own.
	Shared bool
	// Slow says what works, but not as well as it could. nil when there is nothing.
	Slow error
}

// Buffer is memory of the engine's device, as an operation reads or writes it. The zero Buffer is none.
type Buffer struct {
	// Mem is the memory where this process reads it, nil elsewhere.
	Mem []byte
	// Ptr is its address on the device that it belongs to, Bytes its length.
	Ptr   uintptr
	Bytes int64
	// Place is where peers reach it in this rank's segment, as Space.Addr takes it. Reach says that they can.
	Place int64
	Reach bool
	// Elements is what is known of its elements.
	Elements Elements
}

// PlaceOr is the place, or other where peers cannot reach the buffer.
func (b *Buffer) PlaceOr(other int64) int64 {
	if b.Reach {
		return b.Place
	}
	return other
}

// Overlaps reports whether two buffers share a byte.
func (b *Buffer) Overlaps(o *Buffer) bool {
	return b.Bytes > 0 && o.Bytes > 0 && b.Ptr < o.Ptr+uintptr(o.Bytes) && o.Ptr < b.Ptr+uintptr(b.Bytes)
}

// Schedule is how a rank does its part of an exchange. It is local: peers need not agree on any of it. The zero value works,
// and an engine passes over what it does not have.
type Schedule struct {
	// Window is how many peers this rank receives from at the same time: 1 in a ring, 0 for all. It sends to whoever has
	// given it a credit. A GPU knows one peer after the other and all at once.
	Window int
	// ChunkBytes is how much one credit grants when a message is written in place; 0 grants the whole message.
	ChunkBytes int64
	// Staged routes messages to this rank through staging even where they could be written in place.
	Staged bool
	// Blocks is how many blocks send, on a multiprocessor each; 0 means a default. With Copies it is how many copy what stays on
	// the rank; 0 leaves that to a copy engine.
	Blocks int
	// CopyBlocks has as many more blocks as send copy messages out of staging, where there is room for them and not more than
	// this; what a multiprocessor writes to its own memory takes from what it can send. 0 has the senders do it.
	CopyBlocks int
	// Rate spreads the stores of the senders together over time, to this many bytes a nanosecond. Senders that offer a little
	// less than a link carries keep their order around the ring, and the link is then used better than by all they could store.
	// 0 means as fast as they can.
	Rate float64
	// Copies has the copy engines move every message above ExchangeBounds.PacketBytes. Routes.PeerOffsets must be known, Dst
	// writable by peers and at the same place on every rank.
	Copies bool
}

// Launched is the part of an operation that is the same for every family.
type Launched struct {
	// Timeout bounds every wait for a peer.
	Timeout time.Duration
	// Done, when set, is called once after the engine's last use of the operation, with the error that is known by then. An
	// operation that could not be enqueued is not done.
	Done func(error)
	// Note is what the rank notes of the call.
	Note Note
}

// Note is what a rank notes of a call, for those who look on.
type Note struct {
	// Algorithm is a name, and Payload the length of the rank's input, -1 where it is not known.
	Algorithm string
	Payload   int64
	// Staged is why messages go through staging, as far as the call's buffers and algorithm say.
	Staged flight.Staging
	// Alone says that no other rank takes part.
	Alone bool
	// Send and Recv are the bytes to and from each rank, nil where splits do not say that.
	Send, Recv []int64
	// Ticket is the call, once it has begun. Engines that run it on the host say when it starts and ends.
	flight.Ticket
}

// Within is the timeout.
func (l *Launched) Within() time.Duration { return l.Timeout }

// Noted is the note.
func (l *Launched) Noted() *Note { return &l.Note }

// WhenDone sets Done.
func (l *Launched) WhenDone(f func(error)) { l.Done = f }

// Finish calls Done, if it is set.
func (l *Launched) Finish(err error) {
	if l.Done != nil {
		l.Done(err)
	}
}

// Recoverable reports whether err says that ranks disagreed about one operation: all of them know, or will, and the
// communicator can be used further.
func Recoverable(err error) bool {
	var r interface{ recoverable() }
	return errors.As(err, &r)
}
