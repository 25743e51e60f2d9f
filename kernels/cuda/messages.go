package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// addMessages appends messages. Those of one rank and direction are a group, which has blocks of its own, so that no group waits for another:
// one block, or several where a message is large. Where a receive takes messages of any rank, all receives are one group.
func (x *points) addMessages(p *port, m *kernels.Messages) error {
	if len(m.List) > mostMessages {
		return comm.Invalid("kernels", "%s of %d messages, want at most %d on GPUs", m.Operation(), len(m.List), mostMessages)
	}
	a := &x.list
	*a = messagesArgs{
		world: p.world(x.block().control, m.Timeout), block: x.messageBlock(),
		eagerBytes: x.EagerBytes, stagingBytes: x.StagingBytes, payloadBytes: x.payload(), boxes: uint32(x.Boxes), blocks: uint32(x.Blocks),
	}
	x.timeout, x.p = m.Timeout, p
	var large [mostMessages]bool // of groups
	group := func(receive, peer uint32, has func(o *kernels.Message) bool) {
		first := a.count
		for i := range m.List {
			o := &m.List[i]
			if o.Receive != (receive == 1) || !has(o) {
				continue
			}
			large[a.groupCount] = large[a.groupCount] || o.Buffer.Bytes > x.EagerBytes
			a.entries[a.count] = x.entry(p, o, i)
			a.count++
		}
		if a.count > first {
			a.groups[a.groupCount] = messageGroup{peer: peer, receive: receive, first: first}
			a.groupCount++
		}
	}
	fromAny := slices.ContainsFunc(m.List, func(o kernels.Message) bool { return o.FromAny() })
	for receive := range uint32(2) {
		if fromAny && receive == 1 {
			group(receive, anyRank, func(*kernels.Message) bool { return true })
			break
		}
		for peer := range x.Size {
			group(receive, uint32(peer), func(o *kernels.Message) bool { return o.Peer == peer })
		}
	}
	if int(a.groupCount) > x.resident {
		return fmt.Errorf("kernels: %s: messages in %d ways, and %d blocks run at the same time", m.Operation(), a.groupCount, x.resident)
	}
	grid, each := uint32(0), uint32(min(x.Blocks, x.resident/max(int(a.groupCount), 1)))
	for g := range a.groupCount {
		a.groups[g].block = grid
		if grid++; large[g] {
			grid += each - 1
		}
	}
	if p.e.sharers == 1 {
		a.interval = p.e.cyclesFor(tileBytes*int64(each*messageThreads/32), messageRate)
	}
	if grid > 0 {
		l := cuda.Launch{Function: x.messages, Grid: [3]uint32{grid, 1, 1}, Block: [3]uint32{messageThreads, 1, 1}, Flags: p.e.flags, Args: cuda.BytesOf(a)}
		if !fromAny && !slices.Contains(large[:a.groupCount], true) {
			l.Function, l.Block[0] = x.few, fewMessageThreads
		}
		p.batch.Launch(0, l)
	}
	if m.Begun != nil {
		m.Begun()
	}
	return nil
}

// entry is message i of a launch.
func (x *points) entry(p *port, o *kernels.Message, i int) messageEntry {
	e := messageEntry{tag: o.Tag, address: addressOf(&o.Buffer), place: nowhere, bytes: o.Buffer.Bytes, peer: uint32(o.Peer)}
	switch {
	case o.FromAny():
		e.peer = anyRank
	case o.From != nil:
		*o.From = p.e.space.Name(o.Peer)
	}
	switch {
	case !o.Receive && o.Buffer.Reach:
		e.place = uint64(o.Buffer.Place)
	case !o.Receive:
	case o.Source.Bytes > 0:
		e.place = uint64(o.Source.Ptr)
	case toTell(*o):
		e.place = uint64(p.fault.Addr()) + senders + uint64(i)*kernels.SourceBytes
	default:
		e.place = 0
	}
	return e
}

// senders is where a launch without a stream leaves the rank that each of its messages came from, behind the record of faults.
const senders = 2048

// tells reports whether a launch without a stream has such words. They are its own until they are handed on.
func (x *points) tells(op kernels.Operation) bool {
	m, ok := op.(*kernels.Messages)
	return ok && slices.ContainsFunc(m.List, toTell)
}

// toTell is for a message whose caller wants to know the rank, which is not known before it comes.
func toTell(o kernels.Message) bool { return o.FromAny() && o.From != nil }

// tell hands on the ranks that a launch has left.
func (x *points) tell(p *port, m *kernels.Messages) (err error) {
	for i := range m.List {
		o := &m.List[i]
		if !toTell(*o) {
			continue
		}
		word := p.fault.Bytes()[senders+i*kernels.SourceBytes:][:kernels.SourceBytes]
		if o.Source.Bytes > 0 {
			err = errors.Join(err, p.e.read(word, o.Source.Ptr))
		}
		*o.From = p.e.space.Name(int(binary.LittleEndian.Uint64(word)))
	}
	return err
}

// messageFault says what has become of a message. It is not lost, unless it has stopped on its way, and the communicator stays usable.
func (x *points) messageFault(f *faultWords, me int) error {
	peer := int(f.peer)
	src, dst, op, way := peer, me, "recv", "from"
	if f.sending != 0 {
		src, dst, op, way = me, peer, "send", "to"
	}
	if f.kind == faultMismatch {
		return &kernels.MessageMismatchError{Src: src, Dst: dst, Number: f.epoch, Tag: f.limit, Sent: f.sent, Expected: f.expected}
	}
	if f.peer == anyRank {
		return &kernels.WaitError{Err: fmt.Errorf("kernels: %s: %w after %v (tag %d, %d bytes from any rank): %s", op, comm.ErrTimeout, x.timeout, f.limit, f.sent, x.unreceivedOfAny(me))}
	}
	if f.expected != 0 {
		return late(peer, op, fmt.Errorf("%w after %v (%d bytes %s rank %d): it has begun this message, and not come further", comm.ErrTimeout, x.timeout, f.sent, way, peer))
	}
	return late(peer, op, fmt.Errorf("%w after %v (tag %d, %d bytes %s rank %d): %s", comm.ErrTimeout, x.timeout, f.limit, f.sent, way, peer, x.unreceived(src, dst)))
}

func late(peer int, op string, err error) error {
	return &kernels.WaitError{Err: &comm.PeerError{Rank: peer, Op: op, Err: err}}
}

// unreceivedOfAny says which messages of any rank wait at dst.
func (x *points) unreceivedOfAny(dst int) string {
	var all []string
	for src := range x.Size {
		if src == dst {
			continue
		}
		if list, err := x.left(src, dst); err != nil || len(list) > 0 {
			all = append(all, x.unreceived(src, dst))
		}
	}
	if len(all) == 0 {
		return fmt.Sprintf("no rank has sent a message that rank %d has not received", dst)
	}
	return strings.Join(all[:min(len(all), mostNamed)], "; ")
}

// unreceived says which messages from src wait at dst.
func (x *points) unreceived(src, dst int) string {
	list, err := x.left(src, dst)
	if more := len(list) - mostNamed; more > 0 {
		list = append(list[:mostNamed], fmt.Sprintf("%d more", more))
	}
	switch {
	case err != nil:
		return err.Error()
	case len(list) == 0:
		return fmt.Sprintf("rank %d has sent no message that rank %d has not received", src, dst)
	}
	return fmt.Sprintf("rank %d has sent what rank %d has not received: %s", src, dst, strings.Join(list, "; "))
}

// mostNamed bounds the messages that an error lists.
const mostNamed = 4

// rest is the messages of this rank, and to it, that nobody has received. All launches of all ranks have ended.
func (x *points) rest(p *port) error {
	var errs []error
	me := p.e.space.Rank
	for peer := range x.Size {
		if peer == me || x.p == nil {
			continue
		}
		for _, way := range [2][2]int{{me, peer}, {peer, me}} {
			if list, err := x.left(way[0], way[1]); err != nil || len(list) > 0 {
				errs = append(errs, &comm.PeerError{Rank: peer, Op: "close", Err: fmt.Errorf("%w: %s", comm.ErrMismatch, x.unreceived(way[0], way[1]))})
			}
		}
	}
	return errors.Join(errs...)
}

// left is the messages from src that wait at dst, in words.
func (x *points) left(src, dst int) (list []string, err error) {
	e, b, n := x.p.e, x.messageBlock(), x.Boxes
	headers, ended, states := make([]byte, n*lineBytes), make([]byte, n*8), make([]byte, n*8)
	for _, table := range []struct {
		to []byte
		at int64
	}{{headers, b.headers}, {ended, b.ended}, {states, b.states}} {
		if err := e.read(table.to, e.space.Addr(dst, table.at+int64(src*len(table.to)))); err != nil {
			return nil, fmt.Errorf("kernels: read the messages from rank %d to rank %d: %w", src, dst, err)
		}
	}
	word := binary.LittleEndian
	for box := range n {
		h, state := headers[box*lineBytes:], word.Uint64(states[8*box:])
		number := word.Uint32(h[12:]) // the low half
		if number == 0 || number == uint32(word.Uint64(ended[8*box:])) || number == uint32(state>>answerBits) && state&(1<<answerBits-1) == stateGone {
			continue
		}
		list = append(list, fmt.Sprintf("tag %d, %d bytes", word.Uint64(h), int64(word.Uint32(h[8:]))|int64(word.Uint16(h[24:]))<<32))
	}
	return list, nil
}
