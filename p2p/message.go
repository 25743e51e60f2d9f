package p2p

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Message is one end of a message, for Batch.
type Message struct {
	// Receive says that this rank receives it from Peer; otherwise it sends it there.
	Receive bool
	Peer    int
	Tag     uint64
	// View is any memory of the heap's device, of the same length on both ranks.
	View memory.View
}

// messages is one launch, and keeps its arguments alive until it has run.
type messages struct {
	args  kernels.Messages
	done  func(error) // for launches on a stream
	views []memory.View
}

// Send sends src to rank peer, which receives it by a Recv or in a Batch with the same tag and length. The k-th message of a tag to a rank goes
// to its k-th receive of that tag from this rank; on different streams at the same time, k counts in the order in which they come to run.
//
// The send is done when its user may write src again. That does not say that the peer has received it: messages to Options.EagerBytes are
// copied at once, and larger ones when their receiver is late, as far as Options.ParkBytes goes. So ranks that all send first do not lock.
// A message that is not received when the Endpoint is closed is an error of Close on both ranks.
//
// Ranks with different lengths both get a *kernels.MessageMismatchError (comm.ErrMismatch) with both, and the message is gone; a sender that
// was done gets it from its next send to that rank, which has then sent nothing. A message that nobody receives within Options.Timeout is a
// comm.ErrTimeout that says what the peer waits for instead, and is taken back.
func (x *Endpoint) Send(s device.Stream, peer int, tag uint64, src memory.View) error {
	return x.message(s, Message{Peer: peer, Tag: tag, View: src})
}

// Recv receives a message into dst. See Send.
func (x *Endpoint) Recv(s device.Stream, peer int, tag uint64, dst memory.View) error {
	return x.message(s, Message{Receive: true, Peer: peer, Tag: tag, View: dst})
}

func (x *Endpoint) message(s device.Stream, m Message) error {
	o := x.takeMessages()
	return x.launchMessages(s, o, x.add(o, m))
}

// Batch sends and receives several messages at the same time, in any order of the list: none of them waits for another, but those of one peer
// and tag pair up in the order of the list. It is one call, done when all of them are, and its error has those of all.
func (x *Endpoint) Batch(s device.Stream, list ...Message) error {
	o := x.takeMessages()
	var err error
	for i := range list {
		if err = x.add(o, list[i]); err != nil {
			err = fmt.Errorf("p2p: message %d of %d: %w", i, len(list), err)
			break
		}
	}
	return x.launchMessages(s, o, err)
}

// add checks a message and puts it on the list.
func (x *Endpoint) add(o *messages, m Message) error {
	kind := "send"
	if m.Receive {
		kind = "recv"
	}
	if err := x.other(kind, m.Peer); err != nil {
		return err
	}
	if err := x.serves(kind, m.View); err != nil {
		return err
	}
	o.args.List = append(o.args.List, kernels.Message{Receive: m.Receive, Peer: m.Peer, Tag: m.Tag, Buffer: x.c.Heap.SymmetricOperand(m.View)})
	o.views = append(o.views, m.View)
	return nil
}

// takeMessages is an idle launch or a new one.
func (x *Endpoint) takeMessages() *messages {
	o := x.quiet.Take()
	if o == nil {
		o = new(messages)
		o.args.Issued, o.args.Timeout = &x.issued, x.options.Timeout
		o.done = func(error) { x.giveMessages(o) }
	}
	return o
}

// giveMessages takes a launch back.
func (x *Endpoint) giveMessages(o *messages) {
	clear(o.args.List)
	clear(o.views)
	o.args.List, o.views = o.args.List[:0], o.views[:0]
	x.quiet.Give(o)
}

// launchMessages launches messages, if nothing is wrong with them.
func (x *Endpoint) launchMessages(s device.Stream, o *messages, err error) error {
	o.args.Done = nil
	if s != nil {
		o.args.Done = o.done
	}
	if err == nil {
		o.args.Number = x.issued.Add(1)
		err = x.c.LaunchApart(s, &o.args)
	}
	if s == nil || err != nil {
		x.giveMessages(o)
	}
	return err
}
