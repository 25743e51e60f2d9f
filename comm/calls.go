package comm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"
)

// Ranks of a group match their collective calls by number. A call is pending from
// its first part, which may be a peer's, until every rank's has come, this rank has
// given it up, or the group has ended.

// pending is a collective call whose parts are still arriving. It comes into
// being with the first part, which may be a peer's.
type pending struct {
	op      opcode // opNone until this rank calls
	waiting bool   // this rank is waiting for it
	parts   []*message
	missing int
	ready   chan struct{}
}

// take empties the call and returns its parts.
func (p *pending) take() []message {
	var out []message
	for i, m := range p.parts {
		if m != nil {
			out = append(out, *m)
			p.parts[i] = nil
		}
	}
	return out
}

// absent returns the ranks whose part has not arrived.
func (p *pending) absent() []int {
	var out []int
	for r, m := range p.parts {
		if m == nil {
			out = append(out, r)
		}
	}
	return out
}

// call is a collective call of this rank under way.
type call struct {
	op  opcode
	seq uint64
	p   *pending

	past []message // of a lost rank, whose place this process has taken; then p is nil
}

// exchange is a whole collective call: m is this rank's part, the result
// everybody's, by rank.
func (g *Group) exchange(ctx context.Context, op opcode, m message) ([]message, error) {
	c, err := g.startCall(op)
	if err != nil {
		return nil, err
	}
	return g.finishCall(ctx, c, m)
}

// startCall takes the next call number.
func (g *Group) startCall(op opcode) (*call, error) {
	n := g.n
	g.awaitEnd()
	n.mu.Lock()
	if err := g.usable(op, g.seq); err != nil {
		n.mu.Unlock()
		return nil, err
	}
	if g.replays() {
		defer n.mu.Unlock()
		return g.replayed(op)
	}
	c := &call{op: op, seq: g.seq}
	g.seq++
	c.p = g.pendingAt(c.seq)
	c.p.op = op
	c.p.waiting = true
	var bad *failure
	for r, m := range c.p.parts {
		if m != nil && m.op != op {
			bad = g.mismatch(r, m.op, c)
		}
	}
	for r := range c.p.parts {
		if bad == nil && c.p.parts[r] == nil && g.left[g.members[r]] {
			if bad = g.lost[g.members[r]]; bad == nil {
				bad = &failure{code: failLeft, culprit: g.members[r]}
			}
		}
	}
	n.mu.Unlock()
	if bad != nil {
		g.failed(bad, true)
		g.giveUp(c)
		return nil, g.opError(op, c.seq)
	}
	return c, nil
}

// finishCall sends this rank's part and waits for the others'.
func (g *Group) finishCall(ctx context.Context, c *call, m message) ([]message, error) {
	if c.past != nil {
		return g.remembered(c)
	}
	began := time.Now()
	m.kind, m.op, m.gid, m.seq = kindData, c.op, g.id, c.seq
	fds := m.fds
	m.fds = nil
	if len(m.data) > maxMessage {
		m.poison = fmt.Sprintf("%d bytes are more than the %d that fit in one message", len(m.data), maxMessage)
	}
	if len(fds) > MaxFDs {
		m.poison = fmt.Sprintf("%d descriptors are more than the %d that fit in one call", len(fds), MaxFDs)
	}
	if m.poison != "" {
		m.data, fds = nil, nil
	}
	own := m
	own.data = bytes.Clone(m.data)
	own.fds = g.dup(&own, fds)
	if own.poison != "" {
		m = own // what this rank cannot open, it does not send either
		fds = nil
	}
	m.data = bytes.Clone(m.data) // links may hold on to it after the call

	g.n.mu.Lock()
	type receiver struct {
		rank int
		l    link
	}
	var peers []receiver
	for _, w := range g.n.inTurn(g.members) {
		if w != g.n.id && g.n.reaches(w) {
			peers = append(peers, receiver{g.rankOf[w], g.n.links[w]})
		}
	}
	then := g.handle(g.n.id, own)
	g.n.mu.Unlock()
	if then != nil {
		then()
	}
	for _, p := range peers {
		pm := m
		pm.fds = g.dup(&pm, fds)
		p.l.send(pm)
	}

	select {
	case <-c.p.ready:
		return g.collect(c)
	default:
	}
	q := g.newInquiry(ctx)
	defer q.end()
	for waiting := true; waiting; {
		waiting = false
		select {
		case <-c.p.ready:
		case <-g.done:
		case <-q.due:
			q.ask()
			waiting = true
		case <-q.say.C:
			g.n.mu.Lock()
			missing := c.p.absent()
			g.n.mu.Unlock()
			q.logWaiting(c.op.String(), c.seq, missing, time.Since(began))
			waiting = true
		case <-ctx.Done():
			if overslept(ctx) {
				select { // what has happened meanwhile is on its way
				case <-c.p.ready:
				case <-g.done:
				case <-time.After(newsGrace):
				}
			}
		}
	}
	select {
	case <-c.p.ready: // perhaps before the group ended
		return g.collect(c)
	default:
	}
	missing := g.giveUp(c)
	if len(missing) == 0 { // the last part came just now
		return g.collect(c)
	}
	select {
	case <-g.done:
		return nil, g.opError(c.op, c.seq)
	default:
	}
	return nil, q.waitError(ctx, c.op.String(), c.seq, missing, time.Since(began))
}

// overslept reports whether ctx ended when this process did not run.
func overslept(ctx context.Context) bool {
	d, ok := ctx.Deadline()
	return ok && time.Since(d) > lateWake
}

// dup duplicates fds for one receiver. If it cannot, the message is poisoned.
func (g *Group) dup(m *message, fds []int) []int {
	out, err := dupFDs(fds)
	if err != nil {
		m.poison = lacksFiles(g.rank, err).Error()
	}
	return out
}

// collect takes the parts out of a complete call.
func (g *Group) collect(c *call) ([]message, error) {
	g.n.mu.Lock()
	delete(g.pending, c.seq)
	parts := c.p.take()
	if len(parts) == len(g.members) {
		g.past.keep(c.seq, parts)
	}
	g.n.mu.Unlock()
	if len(parts) != len(g.members) { // Close has emptied it meanwhile
		for i := range parts {
			parts[i].drop()
		}
		return nil, g.opError(c.op, c.seq)
	}
	for r := range parts {
		if parts[r].poison != "" {
			return nil, g.poisoned(c, parts, r)
		}
	}
	return parts, nil
}

// poisoned is the error of a call in which a rank could not take part properly: one that could not send its part, or this one, which could
// not take it in.
func (g *Group) poisoned(c *call, parts []message, rank int) error {
	for i := range parts {
		parts[i].drop()
	}
	culprit := rank
	if parts[rank].untaken {
		culprit = g.rank
	}
	return &PeerError{Rank: culprit, Op: c.op.String(), Epoch: c.seq, Err: errors.New(parts[rank].poison)}
}

// giveUp forgets a call that will not be completed and returns the ranks that
// were missing. Parts that come later are dropped. A call of which none is missing
// any more is as it was.
func (g *Group) giveUp(c *call) []int {
	if c.past != nil {
		return nil
	}
	g.n.mu.Lock()
	if c.p.missing == 0 {
		g.n.mu.Unlock()
		return nil
	}
	g.past.lose(fmt.Sprintf("this rank has not waited for the end of call %d, %v", c.seq, c.op))
	delete(g.pending, c.seq)
	missing := c.p.absent()
	g.gaveUp.seq, g.gaveUp.missing = c.seq, missing
	parts := c.p.take()
	g.n.mu.Unlock()
	for i := range parts {
		parts[i].drop()
	}
	return missing
}

// usable returns why a call cannot begin. The caller holds n.mu.
func (g *Group) usable(op opcode, epoch uint64) error {
	if g.closed {
		return fmt.Errorf("comm: %s: %s: %w", op, g.name, ErrClosed)
	}
	if g.err != nil {
		return withOp(g.err, op.String(), epoch)
	}
	return nil
}

// opError is why a call ended with the group.
func (g *Group) opError(op opcode, epoch uint64) error {
	g.awaitEnd()
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	if err := g.usable(op, epoch); err != nil {
		return err
	}
	return fmt.Errorf("comm: %s: %s: %w", op, g.name, ErrClosed)
}

func withOp(err error, op string, epoch uint64) error {
	if pe, ok := err.(*PeerError); ok {
		return &PeerError{Rank: pe.Rank, Op: op, Epoch: epoch, Err: pe.Err}
	}
	return fmt.Errorf("comm: %s: %w", op, err)
}

func ctxErr(ctx context.Context) error {
	if cause := context.Cause(ctx); !errors.Is(cause, ctx.Err()) {
		return fmt.Errorf("%w: %w", ctx.Err(), cause)
	}
	return context.Cause(ctx)
}

// pendingAt returns the call of that number. The caller holds n.mu.
func (g *Group) pendingAt(seq uint64) *pending {
	p := g.pending[seq]
	if p == nil {
		p = &pending{
			parts:   make([]*message, len(g.members)),
			missing: len(g.members),
			ready:   make(chan struct{}),
		}
		g.pending[seq] = p
	}
	return p
}

// handle takes a message for the group. The caller holds n.mu, and calls the
// function that handle returns after it has released that.
func (g *Group) handle(from int, m message) (then func()) {
	r, ok := g.rankOf[from]
	if !ok || g.closed {
		m.drop()
		return nil
	}
	switch m.kind {
	case kindData:
		if g.err != nil || g.pending[m.seq] == nil && m.seq < g.seq {
			m.drop() // nobody waits for it any more
			return nil
		}
		p := g.pendingAt(m.seq)
		if p.parts[r] != nil {
			m.drop()
			return nil
		}
		if p.op != opNone && p.op != m.op {
			m.drop()
			f := g.mismatch(r, m.op, &call{op: p.op, seq: m.seq})
			return func() { g.failed(f, true) }
		}
		p.parts[r] = &m
		if p.missing--; p.missing == 0 {
			close(p.ready)
		}
	case kindWord:
		g.post(r, m)
	case kindRecall:
		return g.recall(from, r, m.seq)
	case kindRecalled:
		g.recalled(r, m)
	case kindLeave:
		return g.lose(from, &failure{code: failLeft, culprit: from})
	case kindFail:
		f := m.fail
		if _, ok := g.rankOf[f.culprit]; !ok {
			return nil // members only blame members
		}
		if f.culprit == g.n.id && f.code == failLost {
			mine := *f
			mine.detail = fmt.Sprintf("rank %d has given this rank up: %s", r, f.detail)
			f = &mine
		}
		return func() { g.failed(f, true) }
	case kindShrink:
		out := g.shrink.take(len(g.members), r, m)
		g.signalShrink()
		if out.has(g.rank) && !g.out[g.n.id] {
			return func() {
				g.failed(&failure{code: failLost, culprit: g.n.id, detail: fmt.Sprintf("rank %d goes on without this rank", r)}, false)
			}
		}
	case kindAsk:
		return g.answer(from, m.seq)
	case kindAnswer:
		g.answered(r, m)
	default:
		m.drop()
	}
	return nil
}

func (g *Group) mismatch(r int, theirs opcode, c *call) *failure {
	return &failure{
		code:    failMismatch,
		culprit: g.members[r],
		detail: fmt.Sprintf("rank %d called %s where rank %d called %s (call %d of %s)",
			r, theirs, g.rank, c.op, c.seq, g.name),
	}
}
