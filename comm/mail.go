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
	boxes    map[box][]message
	recalled map[box]byte  // where words were taken back, the answer, which Recall has not returned
	news     chan struct{} // closed when a word has come, or none may come any more
	closed   bool
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
	m := &Mail{g: g, number: g.lastMail, boxes: make(map[box][]message), recalled: make(map[box]byte), news: make(chan struct{})}
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
	return m.send("send a word", peer, message{kind: kindWord, seq: m.seq(topic), data: bytes.Clone(data), fds: dups})
}

// seq is that of messages of a topic.
func (m *Mail) seq(topic uint32) uint64 { return uint64(m.number)<<32 | uint64(topic) }

// send sends a message to rank peer, or drops it.
func (m *Mail) send(op string, peer int, w message) error {
	g := m.g
	w.gid = g.id
	g.n.mu.Lock()
	err := m.unreachable(peer)
	l := g.n.links[g.members[peer]]
	g.n.mu.Unlock()
	if err != nil {
		w.drop()
		return withOp(err, op, 0)
	}
	l.send(w)
	return nil
}

// The answer to Recall is a byte, answerNone until it comes.
const (
	answerNone byte = iota
	answerTaken
	answerRecalled
)

// Recall takes back the words of a topic that this rank has sent to rank peer and that peer has not received; it closes their descriptors. They
// are recalled, and peer will not receive them, or there were none any more. The process of peer answers by itself, whatever peer does. A rank
// that has closed its Mail receives nothing more, so the words are recalled there.
//
// When ctx ends before the answer has come the error is that of [Mail.Receive], and another Recall waits for the same answer. The failure of
// the group does not end it as long as the peer itself lives; where that does not, or has closed the group, the error is an [ErrPeerLost].
func (m *Mail) Recall(ctx context.Context, peer int, topic uint32) (recalled bool, err error) {
	const op = "take back a word"
	if err := m.checks(op, peer); err != nil {
		return false, err
	}
	of := box{peer, topic}
	m.g.n.mu.Lock()
	answer, asked := m.recalled[of]
	m.recalled[of] = answer
	m.g.n.mu.Unlock()
	if !asked {
		if err := m.send(op, peer, message{kind: kindRecall, seq: m.seq(topic)}); err != nil {
			return false, err
		}
	}
	err = m.await(ctx, op, peer, func() (news <-chan struct{}, err error) {
		m.g.n.mu.Lock()
		defer m.g.n.mu.Unlock()
		if answer = m.recalled[of]; answer != answerNone {
			delete(m.recalled, of)
			return nil, nil
		}
		if err := m.unreachable(peer); err != nil {
			return nil, withOp(err, op, 0)
		}
		return m.news, nil
	})
	return answer == answerRecalled, err
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

// Take is Receive that waits for nobody: ok is false where no word is there, and none of the errors is that of a context.
func (m *Mail) Take(peer int, topic uint32) (w Word, ok bool, err error) {
	if err := m.checks(opReceive, peer); err != nil {
		return Word{}, false, err
	}
	w, news, err := m.look(box{peer, topic}, false)
	return w, err == nil && news == nil, err
}

const opReceive = "receive a word"

func (m *Mail) receive(ctx context.Context, peer int, topic uint32, last bool) (w Word, err error) {
	if err := m.checks(opReceive, peer); err != nil {
		return w, err
	}
	err = m.await(ctx, opReceive, peer, func() (news <-chan struct{}, err error) {
		w, news, err = m.look(box{peer, topic}, last)
		return news, err
	})
	return w, err
}

// await looks until it finds something, an error, or nothing and ctx has ended. The news of look tells when to look again; none is an end.
func (m *Mail) await(ctx context.Context, op string, peer int, look func() (news <-chan struct{}, err error)) error {
	for over := false; ; {
		news, err := look()
		switch {
		case err != nil || news == nil:
			return err
		case over:
			err = ctxErr(ctx)
			if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrTimeout) {
				err = fmt.Errorf("%w: %w", ErrTimeout, err)
			}
			return &PeerError{Rank: peer, Op: op, Err: fmt.Errorf("%w: it has sent none", err)}
		}
		select {
		case <-news:
		case <-ctx.Done():
			over = true // after one more look
		}
	}
}

// look takes a word that is there. Without one and without an error, news tells when to look again; else it is nil.
func (m *Mail) look(from box, last bool) (w Word, news <-chan struct{}, err error) {
	g := m.g
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	if words := m.boxes[from]; len(words) > 0 {
		first := words[0]
		if m.boxes[from] = words[1:]; len(words) == 1 {
			delete(m.boxes, from)
		}
		if first.poison != "" {
			return w, nil, &PeerError{Rank: g.rank, Op: opReceive, Err: errors.New(first.poison)}
		}
		return Word{first.data, first.fds}, nil, nil
	}
	switch {
	case last || g.closed || g.n.phase != nodeOpen || g.left[g.members[from.from]]:
		err = m.unreachable(from.from)
	case g.err != nil && g.ended: // the others have been told
		err = g.err
	}
	if err != nil {
		return w, nil, withOp(err, opReceive, 0)
	}
	return w, m.news, nil
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

// recall drops the words of a rank that it takes back, and returns what answers it. The caller holds n.mu, and calls that afterwards.
func (g *Group) recall(from, rank int, seq uint64) (answer func()) {
	said := answerRecalled
	if m := g.mails[uint32(seq>>32)]; m != nil {
		of := box{rank, uint32(seq)}
		if len(m.boxes[of]) == 0 {
			said = answerTaken
		}
		m.dropFrom(of)
	}
	l := g.n.links[from]
	if l == nil {
		return nil
	}
	return func() { l.send(message{kind: kindRecalled, gid: g.id, seq: seq, data: []byte{said}}) }
}

// recalled takes the answer of a rank in. The caller holds n.mu.
func (g *Group) recalled(rank int, m message) {
	mail := g.mails[uint32(m.seq>>32)]
	if mail == nil || len(m.data) != 1 {
		return
	}
	if of := (box{rank, uint32(m.seq)}); m.data[0] != answerNone {
		if _, asked := mail.recalled[of]; asked {
			mail.recalled[of] = m.data[0]
			mail.tell()
		}
	}
}

// dropFrom drops the words that wait in a box. The caller holds n.mu.
func (m *Mail) dropFrom(b box) {
	words := m.boxes[b]
	for i := range words {
		words[i].drop()
	}
	delete(m.boxes, b)
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
	for b := range m.boxes {
		m.dropFrom(b)
	}
	m.tell()
}
