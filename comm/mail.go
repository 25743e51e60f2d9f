package comm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
)

// Mail carries words between two ranks of a group, in which the others take no part. A word is some bytes, or file descriptors. Those of one
// rank and topic come in the order in which they were sent, and wait until they are received. Its methods may be called from several
// goroutines, and none of them is collective.
type Mail struct {
	g      *Group
	number uint32

	// Guarded by g.n.mu.
	boxes  map[box][]message
	news   chan struct{} // closed when a word has come, or none may come any more
	closed bool
}

// box is where words wait.
type box struct {
	from  int // rank of the group
	topic uint32
}

// Word is what one rank has sent to another.
type Word struct {
	Data []byte
	// FDs are the receiver's to close, and close on exec.
	FDs []int
}

// MaxWord is the most bytes that a word has.
const MaxWord = 4 << 10

// Mail begins an exchange of words. Every rank calls it, in the same order as for other Mails of the group, and sends once it knows that the
// receiver has: words for a Mail that a rank does not have, or has closed, are dropped there. It waits for nobody.
func (g *Group) Mail() *Mail {
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	g.lastMail++
	m := &Mail{g: g, number: g.lastMail, boxes: make(map[box][]message), news: make(chan struct{})}
	if m.closed = g.closed; !m.closed {
		g.mails[m.number] = m
	}
	return m
}

// Send sends a word to rank peer and waits for nobody; it copies data and duplicates fds. A word has at most [MaxWord] bytes, or at most
// [MaxFDs] descriptors in their place, which do not cross hosts ([ErrUnsupported]). A rank that is lost or has closed the group is an
// [ErrPeerLost]. The failure of the group because of another rank does not matter.
func (m *Mail) Send(peer int, topic uint32, data []byte, fds ...int) error {
	g := m.g
	if err := m.checks("send a word", peer); err != nil {
		return err
	}
	switch {
	case len(data) > MaxWord || len(fds) > MaxFDs || (len(data) == 0) == (len(fds) == 0):
		return Invalid("comm", "a word of %d bytes and %d descriptors, want 1 to %d bytes or 1 to %d descriptors", len(data), len(fds), MaxWord, MaxFDs)
	case len(fds) > 0 && g.topology.HostOf(peer) != g.topology.Host:
		return fmt.Errorf("comm: send a word: descriptors to rank %d on host %d: %w", peer, g.topology.HostOf(peer), ErrUnsupported)
	}
	dups, err := dupFDs(fds)
	if err != nil {
		return fmt.Errorf("comm: send a word: %w", err)
	}
	w := message{kind: kindWord, gid: g.id, seq: uint64(m.number)<<32 | uint64(topic), data: bytes.Clone(data), fds: dups}
	g.n.mu.Lock()
	err = m.unreachable(peer)
	l := g.n.links[g.members[peer]]
	g.n.mu.Unlock()
	if err != nil {
		w.drop()
		return withOp(err, "send a word", 0)
	}
	l.send(w)
	return nil
}

// Receive takes the next word of rank peer, and waits for it. When ctx ends first the error is a *PeerError with the rank, [ErrTimeout] at a
// deadline, and no word is lost. The failure of the group ends it, as does the loss of the rank ([ErrPeerLost]), once all its words are taken.
func (m *Mail) Receive(ctx context.Context, peer int, topic uint32) (Word, error) {
	return m.receive(ctx, peer, topic, false)
}

// ReceiveLast is Receive, which the failure of the group does not end as long as the peer itself lives. Where it does not, or has closed the
// group, the error is an [ErrPeerLost].
func (m *Mail) ReceiveLast(ctx context.Context, peer int, topic uint32) (Word, error) {
	return m.receive(ctx, peer, topic, true)
}

func (m *Mail) receive(ctx context.Context, peer int, topic uint32, last bool) (Word, error) {
	const op = "receive a word"
	if err := m.checks(op, peer); err != nil {
		return Word{}, err
	}
	from := box{peer, topic}
	for over := false; ; {
		w, news, err := m.look(from, last)
		switch {
		case err != nil:
			return Word{}, withOp(err, op, 0)
		case w != nil && w.poison != "":
			return Word{}, &PeerError{Rank: m.g.rank, Op: op, Err: errors.New(w.poison)}
		case w != nil:
			return Word{w.data, w.fds}, nil
		case over:
			err = ctxErr(ctx)
			if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrTimeout) {
				err = fmt.Errorf("%w: %w", ErrTimeout, err)
			}
			return Word{}, &PeerError{Rank: peer, Op: op, Err: fmt.Errorf("%w: it has sent none", err)}
		}
		select {
		case <-news:
		case <-ctx.Done():
			over = true // after one more look
		}
	}
}

// look takes a word that is there. Without one and without an error, news tells when to look again.
func (m *Mail) look(from box, last bool) (w *message, news <-chan struct{}, err error) {
	g := m.g
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	if words := m.boxes[from]; len(words) > 0 {
		w = &words[0]
		if m.boxes[from] = words[1:]; len(words) == 1 {
			delete(m.boxes, from)
		}
		return w, nil, nil
	}
	switch {
	case last || g.closed || g.n.phase != nodeOpen || g.left[g.members[from.from]]:
		err = m.unreachable(from.from)
	case g.err != nil && g.ended: // the others have been told
		err = g.err
	}
	return nil, m.news, err
}

// checks refuses what is no other rank.
func (m *Mail) checks(op string, peer int) error {
	if peer < 0 || peer >= len(m.g.members) || peer == m.g.rank {
		return Invalid("comm", "%s: rank %d, want another of the %d ranks than %d", op, peer, len(m.g.members), m.g.rank)
	}
	return nil
}

// unreachable is why a rank neither gets nor sends words any more. The caller holds n.mu.
func (m *Mail) unreachable(peer int) error {
	g := m.g
	w := g.members[peer]
	switch {
	case m.closed || g.closed:
		return ErrClosed
	case g.n.phase != nodeOpen:
		return g.errorOf(g.n.killed())
	case g.left[w] || !g.n.reaches(w):
		f := g.lost[w]
		if f == nil {
			f = g.n.peers[w].how
		}
		if f == nil {
			f = &failure{code: failLeft, culprit: w}
		}
		return g.errorOf(f)
	}
	return nil
}

// tell has those look who wait for words. The caller holds n.mu.
func (m *Mail) tell() {
	close(m.news)
	m.news = make(chan struct{})
}

// tellMails is tell for all Mails of the group. The caller holds n.mu.
func (g *Group) tellMails() {
	for _, m := range g.mails {
		m.tell()
	}
}

// post takes a word of a rank in. The caller holds n.mu.
func (g *Group) post(from int, w message) {
	m := g.mails[uint32(w.seq>>32)]
	if m == nil {
		w.drop()
		return
	}
	b := box{from, uint32(w.seq)}
	m.boxes[b] = append(m.boxes[b], w)
	m.tell()
}

// Close drops the words that have come and those yet to come, and ends calls that wait ([ErrClosed]). It is idempotent.
func (m *Mail) Close() {
	m.g.n.mu.Lock()
	defer m.g.n.mu.Unlock()
	m.end()
}

// end is Close where the caller holds n.mu.
func (m *Mail) end() {
	if m.closed {
		return
	}
	m.closed = true
	delete(m.g.mails, m.number)
	for _, words := range m.boxes {
		for i := range words {
			words[i].drop()
		}
	}
	clear(m.boxes)
	m.tell()
}
