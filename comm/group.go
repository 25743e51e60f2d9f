package comm

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Group is one rank's end of a group of ranks that have met. Its methods may
// be called from several goroutines.
//
// AllGather, Barrier, Share, ExchangeFDs, Split, Admit and Shrink are collective:
// every rank of the group calls them, in the same order. Ranks that call
// different things at the same place get [ErrMismatch]; ranks are matched by
// call number, so calls from several goroutines of one rank need an order of
// their own.
//
// A collective call ends early when its context does. The rank has then still
// taken part (the others may complete the call, and later calls match as if
// nothing had happened), only it does not know the outcome. Split is the
// exception: a rank that gives up on it aborts the group, because half a
// subgroup is of no use to anybody.
//
// A group fails as a whole and for good: when a rank dies or is cut off
// ([ErrPeerLost]), when one calls Abort ([ErrAborted]), when ranks call
// different things ([ErrMismatch]), or when a rank has closed its end while
// others still wait for it ([ErrPeerLost]). Every rank learns it at once, and
// every call, running or to come, returns a [*PeerError] with the reason.
type Group struct {
	n      *node
	log    *slog.Logger
	id     uint64
	name   string
	parent uint64

	// Set by activate, before any caller has the group.
	rank    int
	members []int       // world rank of every rank
	rankOf  map[int]int // its inverse

	done chan struct{} // closed when the group has failed or is closed

	// Guarded by n.mu.
	active  bool
	early   []inbound
	seq     uint64 // number of the next collective call, from 1; 0 is the join
	pending map[uint64]*pending
	left    map[int]bool // world ranks that have closed their end
	out     map[int]bool // world ranks that died or aborted, as far as told
	err     error        // why the group failed
	closed  bool
	ended   bool // done is closed
	cbs     map[*callback]struct{}
	shrink  shrinking

	inquiries   map[uint64]*inquiry // that wait for answers
	lastInquiry uint64
	gaveUp      struct { // the last call that this rank gave up
		seq     uint64
		missing []int
	}
}

type inbound struct {
	from int
	m    message
}

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

// Rank is this rank's number in the group, from 0 to Size-1.
func (g *Group) Rank() int { return g.rank }

// Size is the number of ranks of the group, the failed ones included.
func (g *Group) Size() int { return len(g.members) }

// Name is for logs and error messages: "world" or the name given at the start,
// and for subgroups their parent's name and how they were made of it.
func (g *Group) Name() string { return g.name }

// Logger is where what is worth knowing about the group goes, and what stands on it and was given no logger of its own.
func (g *Group) Logger() *slog.Logger { return g.log }

// Mute ends what the group itself logs. It comes before the first call on the group.
func (g *Group) Mute() { g.log = slog.New(slog.DiscardHandler) }

// AwaitedBy is the earliest call of the group in which a peer waits for this rank, which has not made it: the call in words, and its
// number, which is never 0. It is "" and 0 where there is none. Nobody is asked.
func (g *Group) AwaitedBy(peer int) (call string, seq uint64) {
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	op := opNone
	for at, p := range g.pending {
		if at > 0 && p.op == opNone && peer < len(p.parts) && p.parts[peer] != nil && (seq == 0 || at < seq) {
			op, seq = p.parts[peer].op, at
		}
	}
	if seq == 0 {
		return "", 0
	}
	return fmt.Sprintf("%v, call %d of group %s", op, seq, g.name), seq
}

// String returns the name with the rank and the size.
func (g *Group) String() string {
	return fmt.Sprintf("%s[%d/%d]", g.name, g.rank, len(g.members))
}

// InProcess reports whether all ranks of the group are known to live in this
// process, so that [Group.Share] works. It is the same on every rank.
func (g *Group) InProcess() bool {
	if len(g.members) == 1 {
		return true
	}
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	for _, m := range g.members {
		if m == g.n.id {
			continue
		}
		if _, ok := g.n.links[m].(*localLink); !ok {
			return false
		}
	}
	return true
}

// AllGather hands every rank's bytes to every rank: entry i of the result is
// what rank i passed, of whatever length, up to 1 GiB. The result belongs to
// the caller; data is copied before AllGather returns.
func (g *Group) AllGather(ctx context.Context, data []byte) ([][]byte, error) {
	parts, err := g.exchange(ctx, opAllGather, message{data: data})
	if err != nil {
		return nil, err
	}
	out := make([][]byte, len(parts))
	for r, m := range parts {
		if out[r] = m.data; out[r] == nil {
			out[r] = []byte{}
		}
	}
	return out, nil
}

// Barrier returns once every rank has called it.
func (g *Group) Barrier(ctx context.Context) error {
	_, err := g.exchange(ctx, opBarrier, message{})
	return err
}

// Share hands every rank's value to every rank, as it is: entry i of the
// result is what rank i passed. It serves groups whose ranks all live in this
// process and returns an error that wraps [errors.ErrUnsupported] in others.
// What the values point to is shared between the ranks, who must agree on who
// may change it.
func (g *Group) Share(ctx context.Context, v any) ([]any, error) {
	if !g.InProcess() {
		return nil, fmt.Errorf("comm: share: ranks of %s live in other processes: %w", g, errors.ErrUnsupported)
	}
	parts, err := g.exchange(ctx, opShare, message{val: v})
	if err != nil {
		return nil, err
	}
	out := make([]any, len(parts))
	for r, m := range parts {
		out[r] = m.val
	}
	return out, nil
}

// MaxFDs is the most file descriptors a rank may pass in one ExchangeFDs.
const MaxFDs = 1024

// ExchangeFDs hands every rank's file descriptors to every rank: entry i of
// the result holds duplicates of what rank i passed, in its order, close on
// exec. The caller owns all of them, its own entry included, and closes them;
// fds remain the caller's too and may be closed as soon as the call returns.
// After an error nothing is left open. A rank may pass none, and at most
// [MaxFDs]. When descriptors of one rank could not be duplicated or received,
// the call fails and the group lives on.
func (g *Group) ExchangeFDs(ctx context.Context, fds []int) ([][]int, error) {
	parts, err := g.exchange(ctx, opExchangeFDs, message{fds: fds})
	if err != nil {
		return nil, err
	}
	out := make([][]int, len(parts))
	for r, m := range parts {
		out[r] = m.fds
	}
	return out, nil
}

// Split divides the group: ranks that pass the same color, 0 or greater, form
// a new group, ordered by key and among equal keys by their rank here. A rank
// with a negative color takes part but belongs to no new group; it gets nil.
//
// The new groups live on the same connections as their parent and independently
// of it: each is closed by its own Close, may be split again, and may outlive
// its parent. The loss of a rank fails only the groups it belongs to; an Abort
// fails the group and all that were split from it.
func (g *Group) Split(ctx context.Context, color, key int) (*Group, error) {
	c, err := g.begin(opSplit)
	if err != nil {
		return nil, err
	}
	// The new group must be known before the others can learn that it exists.
	var sub *Group
	if color >= 0 {
		name := g.name + "/" + strconv.Itoa(color)
		sub, err = g.n.register(groupID(g.id, "split", c.seq, uint64(color)), name, g.id)
		if err != nil {
			g.giveUp(c)
			return nil, fmt.Errorf("comm: split: %w", err)
		}
	}
	fail := func(err error) (*Group, error) {
		if sub != nil {
			sub.Close()
		}
		if g.Err() == nil {
			g.Abort(err)
		}
		return nil, err
	}
	var data [16]byte
	binary.LittleEndian.PutUint64(data[0:], uint64(int64(color)))
	binary.LittleEndian.PutUint64(data[8:], uint64(int64(key)))
	parts, err := g.finish(ctx, c, message{data: data[:]})
	if err != nil {
		return fail(err)
	}
	type place struct{ key, rank int }
	var places []place
	for r, m := range parts {
		pc, pk, err := decodeSplit(m.data)
		if err != nil {
			return fail(&PeerError{Rank: r, Op: opSplit.String(), Epoch: c.seq, Err: err})
		}
		if color >= 0 && pc == color {
			places = append(places, place{pk, r})
		}
	}
	if sub == nil {
		return nil, nil
	}
	slices.SortFunc(places, func(a, b place) int {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.rank, b.rank))
	})
	members := make([]int, len(places))
	for i, p := range places {
		members[i] = g.members[p.rank]
	}
	g.n.activate(sub, members)
	return sub, nil
}

func decodeSplit(b []byte) (color, key int, err error) {
	if len(b) != 16 {
		return 0, 0, fmt.Errorf("%w: a split of %d bytes, not 16", errMalformed, len(b))
	}
	color = int(int64(binary.LittleEndian.Uint64(b[0:])))
	key = int(int64(binary.LittleEndian.Uint64(b[8:])))
	return color, key, nil
}

// Abort fails the group on every rank, at once: their [Group.Err] names this
// rank and gives err as the cause, and so do groups split from this one. It
// returns when the news has left this process, so that the caller may exit. On
// a group that has failed already, or is closed, it does nothing. For
// [Group.Shrink], a rank that aborted counts as lost.
func (g *Group) Abort(err error) {
	if err == nil {
		err = errors.New("no reason given")
	}
	g.failed(&failure{code: failAborted, culprit: g.n.id, cause: err}, true)
}

// Err returns nil while the group works, a [*PeerError] once it has failed,
// and [ErrClosed] after a Close of a group that had not.
func (g *Group) Err() error {
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	if g.err == nil && g.closed {
		return fmt.Errorf("comm: %s: %w", g.name, ErrClosed)
	}
	return g.err
}

// Done returns a channel that is closed when the group has failed or was
// closed by this rank. Err then says which.
func (g *Group) Done() <-chan struct{} { return g.done }

// OnFailure has f called once with the error when the group fails, in a
// goroutine of its own, or at once if it has failed already. It is not called
// when the group is closed. After stop has returned, f is not running and will
// not be; f itself must not call stop.
func (g *Group) OnFailure(f func(error)) (stop func()) {
	cb := &callback{f: f}
	g.n.mu.Lock()
	err := g.err
	if err == nil && !g.closed {
		g.cbs[cb] = struct{}{}
	}
	g.n.mu.Unlock()
	if err != nil {
		go cb.run(err)
	}
	return func() {
		g.n.mu.Lock()
		delete(g.cbs, cb)
		g.n.mu.Unlock()
		cb.mu.Lock()
		cb.stopped = true
		cb.mu.Unlock()
	}
}

type callback struct {
	mu      sync.Mutex
	f       func(error)
	stopped bool
}

func (cb *callback) run(err error) {
	cb.mu.Lock()
	defer cb.mu.Unlock()
	if !cb.stopped {
		cb.stopped = true
		cb.f(err)
	}
}

// Close leaves the group in good order. It waits for nobody: the others go on
// until they need this rank again, and calls of this rank that are running
// return [ErrClosed]. When the last group of a world is closed, the connections
// are too. Close is idempotent and returns nil, also on a group that failed.
func (g *Group) Close() error {
	n := g.n
	n.mu.Lock()
	if g.closed {
		n.mu.Unlock()
		return nil
	}
	g.closed = true
	g.cbs = nil
	if !g.ended {
		g.ended = true
		close(g.done)
	}
	g.signalShrink()
	var ls []link
	if g.active {
		ls = n.linksTo(g.members, -1)
	}
	sub := g.shrink.next
	g.shrink.next = nil
	n.mu.Unlock()
	for _, l := range ls {
		l.send(message{kind: kindLeave, gid: g.id})
	}
	if sub != nil {
		n.unregister(sub)
	}
	n.unregister(g)
	return nil
}

// Kill drops this rank out of its world the way a crash of its process would,
// without a word to anybody: the others lose it and all its groups fail. It is
// there to test how a program deals with failures, with [Local] groups too.
func (g *Group) Kill() { g.n.kill() }

// call is a collective call of this rank under way.
type call struct {
	op  opcode
	seq uint64
	p   *pending
}

// exchange is a whole collective call: m is this rank's part, the result
// everybody's, by rank.
func (g *Group) exchange(ctx context.Context, op opcode, m message) ([]message, error) {
	c, err := g.begin(op)
	if err != nil {
		return nil, err
	}
	return g.finish(ctx, c, m)
}

// begin takes the next call number.
func (g *Group) begin(op opcode) (*call, error) {
	n := g.n
	n.mu.Lock()
	if err := g.usable(op, g.seq); err != nil {
		n.mu.Unlock()
		return nil, err
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
			bad = &failure{code: failLeft, culprit: g.members[r]}
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

// finish sends this rank's part and waits for the others'.
func (g *Group) finish(ctx context.Context, c *call, m message) ([]message, error) {
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
	type peer struct {
		rank int
		l    link
	}
	var peers []peer
	for r, w := range g.members {
		if w != g.n.id && g.n.links[w] != nil && g.n.gone[w] == nil {
			peers = append(peers, peer{r, g.n.links[w]})
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
			q.tell(c.op.String(), c.seq, missing, time.Since(began))
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
	select {
	case <-g.done:
		return nil, g.opError(c.op, c.seq)
	default:
	}
	return nil, q.waitError(ctx, c.op.String(), c.seq, missing, time.Since(began))
}

// A process that was stopped finds its deadlines passed when it wakes up, and
// what others have sent it unread.
const (
	lateWake  = 50 * time.Millisecond
	newsGrace = 200 * time.Millisecond
)

// overslept reports whether ctx ended when this process did not run.
func overslept(ctx context.Context) bool {
	d, ok := ctx.Deadline()
	return ok && time.Since(d) > lateWake
}

// dup duplicates fds for one receiver. If it cannot, the message is poisoned.
func (g *Group) dup(m *message, fds []int) []int {
	out, err := dupFDs(fds)
	if err != nil {
		m.poison = err.Error()
	}
	return out
}

// collect takes the parts out of a complete call.
func (g *Group) collect(c *call) ([]message, error) {
	g.n.mu.Lock()
	delete(g.pending, c.seq)
	parts := c.p.take()
	g.n.mu.Unlock()
	if len(parts) != len(g.members) { // Close has emptied it meanwhile
		for i := range parts {
			parts[i].drop()
		}
		return nil, g.opError(c.op, c.seq)
	}
	for r := range parts {
		if parts[r].poison == "" {
			continue
		}
		for i := range parts {
			parts[i].drop()
		}
		return nil, &PeerError{Rank: r, Op: c.op.String(), Epoch: c.seq, Err: errors.New(parts[r].poison)}
	}
	return parts, nil
}

// giveUp forgets a call that will not be completed and returns the ranks that
// were missing. Parts that come later are dropped.
func (g *Group) giveUp(c *call) []int {
	g.n.mu.Lock()
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

// handle takes a message for the group. What it returns is to be called after
// n.mu, which the caller holds, is released.
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

// lose notes that a peer is gone. The caller holds n.mu and calls what it
// returns afterwards.
func (g *Group) lose(peer int, f *failure) (then func()) {
	r, ok := g.rankOf[peer]
	if !ok || g.closed || g.left[peer] {
		return nil
	}
	g.signalShrink()
	if f.code != failLeft {
		return func() { g.failed(f, true) }
	}
	g.left[peer] = true
	for _, p := range g.pending {
		if p.waiting && p.parts[r] == nil {
			return func() { g.failed(f, true) }
		}
	}
	return nil
}

// failed fails the group and tells the others if told to. Only the first
// failure counts, but every rank that is said to be gone is remembered.
func (g *Group) failed(f *failure, tell bool) {
	n := g.n
	n.mu.Lock()
	if g.closed {
		n.mu.Unlock()
		return
	}
	own := f.culprit == n.id // an Abort after the fact does not count
	told := g.out[f.culprit]
	if f.code == failLost || f.code == failAborted && (!own || g.err == nil) {
		g.out[f.culprit] = true
		g.signalShrink()
	}
	if g.err != nil {
		// Who is lost beside the first may only be stopped, and learns it later.
		var late link
		if f.code == failLost && tell && !own && !told {
			late = n.links[f.culprit]
		}
		n.mu.Unlock()
		if late != nil {
			late.send(message{kind: kindFail, gid: g.id, fail: f})
		}
		return
	}
	g.err = g.errorOf(f)
	var ls []link
	if tell {
		last := -1
		if f.code == failLost {
			last = f.culprit
		}
		ls = n.linksTo(g.members, last)
	}
	var subs []*Group
	if f.code == failAborted {
		for _, sub := range n.groups {
			if sub.active && sub.parent == g.id {
				subs = append(subs, sub)
			}
		}
	}
	n.mu.Unlock()

	g.log.Info("group failed", "group", g.name, "rank", g.rank, "err", g.err)
	for _, l := range ls {
		l.send(message{kind: kindFail, gid: g.id, fail: f})
	}
	for _, sub := range subs {
		sub.failed(f, true)
	}
	// The news goes first: a caller who learns of the failure may well exit,
	// and would then be taken for the culprit.
	deadline := time.Now().Add(flushGrace)
	for _, l := range ls {
		l.flush(deadline)
	}
	n.mu.Lock()
	cbs := g.cbs
	g.cbs = nil
	if !g.ended {
		g.ended = true
		close(g.done)
	}
	n.mu.Unlock()
	for cb := range cbs {
		go cb.run(g.err)
	}
}

// errorOf puts a failure into the numbers of this group. The caller holds n.mu.
func (g *Group) errorOf(f *failure) error {
	rank, ok := g.rankOf[f.culprit]
	if !ok {
		rank = -1
	}
	var err error
	detail := f.detail
	switch f.code {
	case failLost:
		err = wrapDetail(ErrPeerLost, detail)
	case failLeft:
		err = wrapDetail(ErrPeerLost, cmp.Or(detail, "it has closed its end of "+g.name))
	case failMismatch:
		err = wrapDetail(ErrMismatch, detail)
	case failAbsent:
		err = fmt.Errorf("%w %s", ErrTimeout, detail)
	default:
		err = fmt.Errorf("%w: %w", ErrAborted, f.cause)
	}
	return &PeerError{Rank: rank, Err: err}
}

func wrapDetail(err error, detail string) error {
	if detail == "" {
		return err
	}
	return fmt.Errorf("%w: %s", err, detail)
}

// groupID derives the number of a new group from its parent's, so that all
// members know it without having to ask.
func groupID(parent uint64, how string, a, b uint64) uint64 {
	buf := binary.LittleEndian.AppendUint64(nil, parent)
	buf = binary.LittleEndian.AppendUint64(buf, a)
	buf = binary.LittleEndian.AppendUint64(buf, b)
	buf = append(buf, how...)
	sum := sha256.Sum256(buf)
	return binary.LittleEndian.Uint64(sum[:])
}
