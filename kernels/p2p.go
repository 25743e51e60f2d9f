package kernels

import (
	"fmt"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/comm"
)

// PointBounds is the family of transfers between two ranks.
type PointBounds struct {
	Size int // ranks
	// Semaphores is how many there are from each rank to each other.
	Semaphores int
	// Boxes is how many messages of a rank can be on their way to another, received or not.
	Boxes int
	// EagerBytes bounds messages that are copied into their box, so that their sender is done with them.
	EagerBytes int64
	// StagingBytes is the size of each of the two buffers from one rank to another for messages that the receiver cannot read at their sender.
	// A GPU has two for each block.
	StagingBytes int64
	// Blocks bounds how many blocks of a GPU copy for a put or a get, or for the messages of one rank and direction, a multiprocessor each. The
	// host has none.
	Blocks int
	// ParkBytes bounds the copies that a rank keeps of messages whose receivers are late.
	ParkBytes int64
	// Hosts is where the ranks are when they are on several hosts; nil on one.
	Hosts *Hosts
}

// The defaults of messages.
const (
	defaultBoxes        = 32
	defaultEager        = 8 << 10
	defaultPointStaging = 64 << 10
)

// DefaultMessages fills in Boxes, EagerBytes and StagingBytes where they are 0.
func (c *PointBounds) DefaultMessages() {
	c.Boxes = int(Default(int64(c.Boxes), defaultBoxes))
	c.EagerBytes, c.StagingBytes = Default(c.EagerBytes, defaultEager), Default(c.StagingBytes, defaultPointStaging)
}

// DefaultSemaphores is what engines take where PointBounds.Semaphores is 0.
const DefaultSemaphores = 8

// Family is "p2p".
func (*PointBounds) Family() string { return "p2p" }

// TransferKind is what a transfer does.
type TransferKind uint8

// The kinds. Their names are those of operations.
const (
	PutTransfer    TransferKind = iota // write the peer's symmetric memory
	GetTransfer                        // read it
	SignalTransfer                     // count a semaphore at the peer up
	WaitTransfer                       // consume one signal of the peer
	transferKinds
)

// TransferKinds are all kinds.
func TransferKinds() (all []TransferKind) {
	for k := range transferKinds {
		all = append(all, k)
	}
	return all
}

// String is the kind's name in messages.
func (k TransferKind) String() string {
	if k < transferKinds {
		return [...]string{"put", "get", "signal", "wait"}[k]
	}
	return fmt.Sprintf("transfer of kind %d", uint8(k))
}

// Turn is the place of a launch among those of its communicator.
type Turn struct {
	// Number is this launch's, Issued the last number so far. When a wait for a peer fails, so does every launch that was issued by then, at
	// once when it would have to wait for that peer (F1). Later launches wait anew.
	Number uint64
	Issued *atomic.Uint64
}

// Transfer is one launch between this rank and Peer.
//
// The number of signals of a semaphore only grows, and so does that of the signals that its rank has consumed. A wait that fails consumes
// none, so a later one can succeed.
type Transfer struct {
	Launched

	Kind TransferKind
	Peer int
	// Buffer is this rank's memory, Place that of the peer, with as many bytes: of puts and gets. Where the peer's memory is one that it has
	// shared with this rank alone, Lent is that, as this process has it mapped, and Place says nothing.
	Buffer Buffer
	Place  int64
	Lent   Buffer
	// Semaphore is that of signals and waits.
	Semaphore int
	Turn
}

// Operation is the name of the kind.
func (t *Transfer) Operation() string { return t.Kind.String() }

// Messages is one launch of messages that go on at the same time: none of them has to wait for another.
//
// The k-th message of a tag from one rank to another is received by the k-th receive of that tag there, in the order in which launches begin,
// and in that of the list. A message that is withdrawn after a failed wait does not count.
type Messages struct {
	Launched
	List []Message
	Turn
	// Begun, when set, is called once: the messages of launches that begin from then on come behind those of this one. Sends that find no
	// room delay it, and a launch that fails before that does not call it.
	Begun func()
}

// AnyRank is the peer of a receive that takes a message of any other rank.
const AnyRank = -1

// Message is one end of a message between this rank and Peer.
type Message struct {
	Receive bool
	Peer    int // of a receive also AnyRank
	Tag     uint64
	Buffer  Buffer
	// From, when set, gets the rank whose message a receive has taken. It is the launch's until that has run. On GPUs launches on a stream have
	// none for receives of any rank.
	From *int
	// Source, when it has bytes, gets the same as an int64, in the order of the stream.
	Source Buffer
}

// FromAny reports whether m is a receive that takes a message of any rank.
func (m *Message) FromAny() bool { return m.Receive && m.Peer == AnyRank }

// SourceBytes is the size of Message.Source.
const SourceBytes = 8

// MessageOperations are the names of launches of messages.
func MessageOperations() []string { return []string{"send", "recv", "batch"} }

// Operation is "send" or "recv" where the list has one message, else "batch".
func (m *Messages) Operation() string {
	switch {
	case len(m.List) != 1:
		return "batch"
	case m.List[0].Receive:
		return "recv"
	}
	return "send"
}

// MessageMismatchError says that two ranks disagree on the size of a message, or on its elements.
type MessageMismatchError struct {
	Src, Dst       int    // ranks
	Tag            uint64 // of the message
	Number         uint64 // among those from Src to Dst
	Sent, Expected uint64 // bytes, as the sender and the receiver have it
	// SentElements and ExpectedElements are what both know of the elements. On GPUs nothing is known.
	SentElements, ExpectedElements Elements
}

// Error states both sizes, and both types of elements where they are not alike.
func (e *MessageMismatchError) Error() string {
	return fmt.Sprintf("kernels: message %d, tag %d: rank %d sends %d bytes to rank %d, which expects %d", e.Number, e.Tag, e.Src, e.Sent, e.Dst, e.Expected) +
		e.SentElements.Unlike(e.ExpectedElements)
}

// Unwrap is comm.ErrMismatch.
func (e *MessageMismatchError) Unwrap() error { return comm.ErrMismatch }

func (*MessageMismatchError) recoverable() {}

// WaitError is a wait for a signal or a message that has failed, where it is told later. The signal is not lost, so a later wait can consume
// it, and neither is the message, unless it stopped on the way.
type WaitError struct {
	// Err is a *comm.PeerError, except of a receive from any rank.
	Err error
}

// Error is that of Err.
func (e *WaitError) Error() string { return e.Err.Error() }

// Unwrap is Err.
func (e *WaitError) Unwrap() error { return e.Err }

func (*WaitError) recoverable() {}
