package comm

import (
	"encoding/binary"
	"fmt"
	"time"
)

// Ranks of different hosts that are not both leaders have no connection. Their messages go over the leaders of their hosts, whole, with the
// ranks they are from and for in front. Each hop checks that the ranks fit whom it comes from.

// relayHead is the ranks (u32 each) and the header of the message.
const relayHead = 8 + frameHeader

// relayLink is the link to a rank that is reached over another.
type relayLink struct {
	from, to int
	via      link
}

func (l *relayLink) send(m message) {
	m.drop() // descriptors do not cross
	l.via.send(relayed(l.from, l.to, m))
}

func (l *relayLink) flush(deadline time.Time) { l.via.flush(deadline) }
func (l *relayLink) close(time.Duration)      {}
func (l *relayLink) cut()                     {}

// relayed is m as it is passed on.
func relayed(from, to int, m message) message {
	h, data := m.frame()
	h.length = min(len(data), maxFrame)
	b := make([]byte, relayHead, relayHead+len(data))
	binary.LittleEndian.PutUint32(b[0:], uint32(from))
	binary.LittleEndian.PutUint32(b[4:], uint32(to))
	h.encode((*[frameHeader]byte)(b[8:]))
	return message{kind: kindRelay, data: append(b, data...)}
}

// unrelayed is what was passed on.
func unrelayed(b []byte) (message, error) {
	h, err := decodeHeader((*[frameHeader]byte)(b[8:]))
	data := b[relayHead:]
	switch {
	case err != nil:
		return message{}, err
	case h.kind == kindRelay || h.kind == kindLost || h.kind == kindBeat || h.fds > 0 || h.flags&flagMore != 0 ||
		len(data) != h.length && (h.length != maxFrame || h.kind != kindData || len(data) < maxFrame):
		return message{}, fmt.Errorf("%w frame: kind %d, flags %#x, %d bytes of %d, passed on", errMalformed, h.kind, h.flags, len(data), h.length)
	}
	m := message{kind: h.kind, op: h.op, gid: h.gid, seq: h.seq, data: data}
	return m, m.unframe(h)
}

// relayEnds are the ranks of a message that is passed on, ok if rank me may get it from peer.
func (h *hosts) relayEnds(me, peer int, b []byte) (from, to int, ok bool) {
	if h == nil || !h.relayed || len(b) < relayHead {
		return 0, 0, false
	}
	from, to = int(binary.LittleEndian.Uint32(b)), int(binary.LittleEndian.Uint32(b[4:]))
	if from >= len(h.of) || to >= len(h.of) || h.of[from] == h.of[to] {
		return 0, 0, false
	}
	return from, to, h.next(me, from) == peer && (to == me || h.leads(me) && (h.of[from] == h.of[me] || h.of[to] == h.of[me]))
}

// pass takes a message that peer passes on, to this rank or to the next.
func (n *node) pass(peer int, m message) {
	from, to, ok := n.hosts.relayEnds(n.id, peer, m.data)
	if !ok {
		n.lose(peer, &failure{code: failLost, culprit: peer, detail: "it passed on a malformed message"})
		return
	}
	if to == n.id {
		inner, err := unrelayed(m.data)
		if err != nil {
			n.lose(from, &failure{code: failLost, culprit: from, detail: "it sent a " + err.Error()})
			return
		}
		n.deliver(from, inner)
		return
	}
	next := n.hosts.next(n.id, to)
	n.mu.Lock()
	l := n.links[next]
	if l == nil && n.peers[next].phase == peerUnmet { // its connection is still being made
		n.held[next] = append(n.held[next], m)
	}
	n.mu.Unlock()
	if l != nil {
		l.send(m)
	}
}

// addRelays makes the ranks reachable to which this one has no connection. All that it has are linked.
func (n *node) addRelays() {
	if n.hosts == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for r := range n.links {
		if r != n.id && !n.hosts.direct(n.id, r) {
			n.links[r] = &relayLink{n.id, r, n.links[n.hosts.next(n.id, r)]}
			n.peers[r].move(peerLinked) // one that is lost by now stays so
		}
	}
}
