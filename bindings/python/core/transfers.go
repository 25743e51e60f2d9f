package core

import (
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// MessageCall is one message as C callers describe it; see p2p.Message.
type MessageCall struct {
	Buffer  Buffer
	Receive int64 // not 0: from Peer, which may be p2p.AnyRank
	Peer    int64
	Tag     uint64
}

// Transfer is the kind of a TransferCall.
type Transfer int64

// The kinds. Their numbers are part of the ABI.
const (
	PutTransfer Transfer = iota
	GetTransfer
	SignalTransfer
	WaitTransfer
)

// TransferCall is a put, a get, a signal or a wait as C callers describe it; see p2p.Endpoint.
type TransferCall struct {
	// Mine is memory here. At is symmetric memory here, and the call is about what lies there at Peer.
	Mine, At        Buffer
	Kind            Transfer
	Peer, Semaphore int64
}

// endpoint is the Endpoint on the host once the join has succeeded.
func (c *Comm) endpoint() (*p2p.Endpoint, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.point == nil {
		return nil, fmt.Errorf("core: %w: the ranks have not joined", ErrInvalid)
	}
	return c.point, nil
}

// Messages sends and receives messages at the same time on the host, as p2p.Endpoint.Batch and Place describe.
func (c *Comm) Messages(stream uintptr, calls []MessageCall, _ uintptr) (*Request, error) {
	if stream != 0 {
		return nil, noStream(stream)
	}
	x, err := c.endpoint()
	if err != nil {
		return nil, err
	}
	list, err := messagesOf(calls, c.view)
	if err != nil {
		return nil, err
	}
	q := &Request{from: make([]int, len(calls))}
	for i := range list {
		list[i].From, q.from[i] = &q.from[i], p2p.AnyRank
		if list[i].Peer != p2p.AnyRank || !list[i].Receive {
			q.add(turn{list[i].Receive, list[i].Peer})
			q.peers = append(q.peers, list[i].Peer)
			continue
		}
		for p := range c.Size() {
			q.add(turn{true, p})
		}
	}
	q.run = func(begun func()) error { return x.Ordered(begun, list...) }
	return q, c.requests.submit(q)
}

func noStream(stream uintptr) error {
	return fmt.Errorf("core: %w: stream %#x on the host, which has none", ErrInvalid, stream)
}

// Transfer makes a transfer on the host, as Place describes.
func (c *Comm) Transfer(stream uintptr, call *TransferCall) (*Request, error) {
	if stream != 0 {
		return nil, noStream(stream)
	}
	x, err := c.endpoint()
	if err != nil {
		return nil, err
	}
	if call.Kind == WaitTransfer {
		peer, semaphore := int(call.Peer), int(call.Semaphore)
		q := &Request{peers: []int{peer}, run: func(func()) error { return x.Wait(nil, peer, semaphore) }}
		return q, c.requests.submit(q)
	}
	mine, at, err := c.views(call.Mine, call.At)
	if err != nil {
		return nil, err
	}
	return nil, transfer(x, nil, call, mine, at)
}

// Messages enqueues messages on a CUstream, as Place describes.
func (g *GPU) Messages(stream uintptr, calls []MessageCall, senders uintptr) (*Request, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, ErrClosed
	}
	s, err := g.wrap(stream)
	if err != nil {
		return nil, err
	}
	list, err := messagesOf(calls, g.view)
	if err != nil {
		return nil, err
	}
	for i := range list {
		if list[i].Receive && senders != 0 {
			list[i].Source = memory.Device(senders+uintptr(i*kernels.SourceBytes), kernels.SourceBytes)
		}
	}
	return nil, g.point.Batch(s, list...)
}

// messagesOf are messages as an endpoint takes them, of memory that view finds.
func messagesOf(calls []MessageCall, view func(Buffer) (memory.View, error)) ([]p2p.Message, error) {
	list := make([]p2p.Message, len(calls))
	for i := range calls {
		m := &calls[i]
		v, err := view(m.Buffer)
		if err != nil {
			return nil, err
		}
		list[i] = p2p.Message{Receive: m.Receive != 0, Peer: int(m.Peer), Tag: m.Tag, View: v}
	}
	return list, nil
}

// Transfer enqueues a transfer on a CUstream, as Place describes.
func (g *GPU) Transfer(stream uintptr, call *TransferCall) (*Request, error) {
	_, err := g.enqueue(stream, call.Mine, call.At, func(s device.Stream, mine, at memory.View) error {
		return transfer(g.point, s, call, mine, at)
	})
	return nil, err
}

func transfer(x *p2p.Endpoint, s device.Stream, call *TransferCall, mine, at memory.View) error {
	peer := int(call.Peer)
	switch call.Kind {
	case PutTransfer:
		return x.Put(s, peer, at, mine)
	case GetTransfer:
		return x.Get(s, peer, mine, at)
	case SignalTransfer:
		return x.Signal(s, peer, int(call.Semaphore))
	case WaitTransfer:
		return x.Wait(s, peer, int(call.Semaphore))
	}
	return fmt.Errorf("core: %w: transfer of kind %d", ErrInvalid, call.Kind)
}

// add has a request take a turn, once.
func (q *Request) add(t turn) {
	if !slices.Contains(q.turns, t) {
		q.turns = append(q.turns, t)
	}
}
