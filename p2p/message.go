package p2p

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Message is one end of a message, for Batch.
type Message struct {
	// Receive says that this rank receives it from Peer, which may be AnyRank; otherwise it sends it there.
	Receive bool
	Peer    int
	Tag     uint64
	// From, when set, gets the rank from which a message was received. It is the call's until that has run. On GPUs a call on a stream has none
	// for a receive from AnyRank, of which the host does not hear: it has Source.
	From *int
	// Source, when it is not empty, is 8 bytes of memory of the heap's device that get the same as an int64, in the order of the stream, also in
	// a graph.
	Source memory.View
	// View is any memory of the heap's device, of the same length on both ranks.
	View memory.View
}

// AnyRank is the peer of a Recv that takes the next message of its tag from whichever other rank has one.
const AnyRank = kernels.AnyRank

// messages is a launch of some.
type messages = communicator.Op[kernels.Messages]

// Send sends src to rank peer, which receives it by a Recv or in a Batch with the same tag and length. The k-th message of a tag to a rank goes
// to its k-th receive of that tag from this rank; on different streams at the same time, k counts in the order in which they come to run.
//
// The send is done when its user may write src again. That does not say that the peer has received it: messages to Options.EagerBytes are
// copied at once, and larger ones when their receiver is late, as far as Options.ParkBytes goes. So ranks that all send first do not lock.
// A message that is not received when the Endpoint is closed is an error of Close on both ranks.
//
// Ranks with different lengths both get a *kernels.MessageMismatchError (comm.ErrMismatch) with both, and the message is gone; a sender that
// was done gets it from its next send to that rank, which has then sent nothing; between hosts from a later one, or from Close. On the host so do
// ranks that both know the elements of their views, and have other ones. On GPUs types of elements are not compared: the bytes of an int32 are
// received as a float32 where ranks disagree.
//
// A message that nobody receives within Options.Timeout is a comm.ErrTimeout that says what the peer waits for instead, and is taken back.
func (x *Endpoint) Send(s device.Stream, peer int, tag uint64, src memory.View) error {
	return x.message(s, Message{Peer: peer, Tag: tag, View: src})
}

// Recv receives a message into dst, from rank peer or from AnyRank. See Send. A receive from any rank takes its turn among those of each rank,
// and ranks take turns with it. If nobody sends, its comm.ErrTimeout names no rank. A Batch with Message.From says which rank it was.
func (x *Endpoint) Recv(s device.Stream, peer int, tag uint64, dst memory.View) error {
	return x.message(s, Message{Receive: true, Peer: peer, Tag: tag, View: dst})
}

func (x *Endpoint) message(s device.Stream, m Message) error {
	o := x.messages.Take()
	return x.launchMessages(s, o, x.add(o, m))
}

// Batch sends and receives several messages at the same time, in any order of the list: none of them waits for another, but those of one peer
// and tag pair up in the order of the list. It is one call, done when all of them are, and its error has those of all.
func (x *Endpoint) Batch(s device.Stream, list ...Message) error {
	return x.batch(s, x.messages.Take(), list)
}

func (x *Endpoint) batch(s device.Stream, o *messages, list []Message) error {
	var err error
	for i := range list {
		if err = x.add(o, list[i]); err != nil {
			err = fmt.Errorf("p2p: message %d of %d: %w", i, len(list), err)
			break
		}
	}
	return x.launchMessages(s, o, err)
}

// Ordered is Batch, complete on return, for a caller that makes several at the same time from goroutines of its own: begun is called once
// messages of calls that begin from then on come behind those of this one. A call that fails may not call it.
func (x *Endpoint) Ordered(begun func(), list ...Message) error {
	o := x.messages.Take()
	o.Args.Begun = begun
	return x.batch(nil, o, list)
}

// add checks a message and puts it on the list.
func (x *Endpoint) add(o *messages, m Message) error {
	kind := "send"
	if m.Receive {
		kind = "recv"
	}
	if !m.Receive || m.Peer != AnyRank || x.bounds.Size == 1 {
		if err := x.other(kind, m.Peer); err != nil {
			return err
		}
	}
	if err := x.c.Serves(kind, m.View); err != nil {
		return err
	}
	made := kernels.Message{Receive: m.Receive, Peer: m.Peer, Tag: m.Tag, From: m.From}
	if m.Receive {
		made.Buffer = x.c.Heap.Operand(m.View)
	} else {
		made.Buffer = x.c.Heap.OperandFor(m.View, m.Peer)
	}
	if m.Source.Len() > 0 {
		if err := x.c.Serves(kind, m.Source); err != nil {
			return err
		}
		made.Source = x.c.Heap.Operand(m.Source)
		if b := &made.Source; !m.Receive || b.Bytes != kernels.SourceBytes || b.Ptr%kernels.SourceBytes != 0 {
			return invalid("%s: Source is %d bytes at %#x, want %d of a receive at a multiple of that", kind, b.Bytes, b.Ptr, kernels.SourceBytes)
		}
	}
	o.Args.List = append(o.Args.List, made)
	return nil
}

// tellsLater refuses messages on a stream of which somebody wants to hear without memory that the device can write.
func (x *Endpoint) tellsLater(list []kernels.Message) error {
	for i := range list {
		if m := &list[i]; m.FromAny() && m.From != nil {
			return fmt.Errorf("p2p: recv: %w: Message.From of a receive from any rank on a stream of %v: want Source", comm.ErrUnsupported, x.c.Heap.Device())
		}
	}
	return nil
}

// launchMessages launches messages, if nothing is wrong with them.
func (x *Endpoint) launchMessages(s device.Stream, o *messages, err error) error {
	if err == nil {
		err = x.c.Takes(s)
	}
	if err == nil && x.last != nil && s != nil {
		err = x.tellsLater(o.Args.List)
	}
	if err != nil {
		x.messages.Give(o)
		return err
	}
	o.Args.Number = x.issued.Add(1)
	if x.last == nil {
		return x.messages.Launch(s, o)
	}
	x.turns.Lock()
	err = x.order(s, o.Args.List)
	switch {
	case err != nil:
		x.messages.Give(o)
	case s != nil:
		err = x.launchBehind(s, o)
	}
	x.turns.Unlock()
	if s != nil || err != nil {
		return err
	}
	return x.messages.Launch(nil, o)
}

// turn is the last launch with messages to one rank, or from one: its stream, and an event behind it.
type turn struct {
	s device.Stream
	e device.Event
}

// ways are the turns of a message: that of its rank and direction, and of a receive from any rank those of all. turns is held.
func (x *Endpoint) ways(m *kernels.Message) []turn {
	at := m.Peer
	switch {
	case m.FromAny():
		return x.last[x.bounds.Size:]
	case m.Receive:
		at += x.bounds.Size
	}
	return x.last[at : at+1]
}

// order makes s wait for the last launches with messages of the same ranks and directions, on a device where those follow each other. It waits
// for nothing that their streams got later, which may wait for what s does. turns is held.
func (x *Endpoint) order(s device.Stream, list []kernels.Message) error {
	captured, err := device.Capturing(s)
	var before device.Event
	for i := 0; i < len(list) && err == nil && !captured; i++ {
		for _, last := range x.ways(&list[i]) {
			switch {
			case err != nil || last.s == nil || last.s == s || last.e == before:
			case s == nil:
				err = last.e.Wait()
			default:
				err = s.Wait(last.e)
			}
			before = last.e
		}
	}
	return err
}

// launchBehind launches messages on s, and marks where they are. turns is held.
func (x *Endpoint) launchBehind(s device.Stream, o *messages) error {
	x.list = append(x.list[:0], o.Args.List...) // o is given back when it is launched
	defer clear(x.list)
	if err := x.messages.Launch(s, o); err != nil {
		return err
	}
	if captured, err := device.Capturing(s); err != nil || captured {
		return err
	}
	e, err := s.Record()
	if err != nil {
		return err
	}
	for i := range x.list {
		for w := range x.ways(&x.list[i]) {
			x.ways(&x.list[i])[w] = turn{s, e}
		}
	}
	return nil
}
