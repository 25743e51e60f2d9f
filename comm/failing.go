package comm

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// Abort fails the group on every rank, at once: their [Group.Err] names this
// rank and gives err as the cause, and so do groups split from this one. It
// returns when the news has left this process, so that the caller may exit. On
// a group that has failed already, or is closed, it does nothing. For
// [Group.Shrink], a rank that aborted counts as lost.
func (g *Group) Abort(err error) { g.AbortFor(g.rank, err) }

// AbortFor is Abort because of a rank of the group that is to blame in place of
// this one, such as one that hangs: the others' [Group.Err] names that rank, and
// for [Group.Shrink] it counts as lost. This rank does not.
func (g *Group) AbortFor(rank int, err error) {
	if err == nil {
		err = errors.New("no reason given")
	}
	if rank < 0 || rank >= len(g.members) {
		rank = g.rank
	}
	g.failed(&failure{code: failAborted, culprit: g.members[rank], cause: err}, true)
	g.awaitEnd()
}

// ReportLeft fails the group on every rank, at once, because rank has closed its
// end of it while this rank waits for it outside of this package, in shared
// memory for example: [Group.Err] names that rank, with [ErrPeerLost]. A rank
// of the group that waits in a call of this package needs no such report.
// ReportLeft does nothing for a rank that is not in the group.
func (g *Group) ReportLeft(rank int) {
	if rank >= 0 && rank < len(g.members) {
		g.failed(&failure{code: failLeft, culprit: g.members[rank]}, true)
	}
}

// Err returns nil while the group works, a [*PeerError] once it has failed,
// and [ErrClosed] after a Close of a group that had not.
func (g *Group) Err() error {
	g.awaitEnd()
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	if g.err == nil && g.closed {
		return fmt.Errorf("comm: %s: %w", g.name, ErrClosed)
	}
	return g.err
}

// awaitEnd waits, where the group is failing, for what is done before callers learn of it.
func (g *Group) awaitEnd() {
	g.n.mu.Lock()
	failing := g.err != nil && !g.ended
	g.n.mu.Unlock()
	if failing {
		<-g.done
	}
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
		go cb.invoke(err)
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

// OnLoss keeps the group when it loses a rank that no call of this package waits for, until stop is called: f is called with that
// rank, and the group fails, with the loss and on every rank, only when one of them next makes a call of this package. So work in
// shared memory that can do without the rank goes on. ended says that the rank's process has ended; otherwise it may only be stopped
// or cut off, and go on later. All ranks call OnLoss: one that has not fails the group. After stop has returned, f is not running and
// will not be; f itself must not call it.
func (g *Group) OnLoss(f func(rank int, ended bool)) (stop func()) {
	o := &outliving{f: f}
	g.n.mu.Lock()
	if g.outlive == nil {
		g.outlive = make(map[*outliving]struct{})
	}
	g.outlive[o] = struct{}{}
	g.n.mu.Unlock()
	return func() {
		g.n.mu.Lock()
		delete(g.outlive, o)
		g.n.mu.Unlock()
		o.mu.Lock()
		o.stopped = true
		o.mu.Unlock()
	}
}

// outliving is a function of OnLoss.
type outliving struct {
	mu      sync.Mutex
	f       func(rank int, ended bool)
	stopped bool
}

func (o *outliving) invoke(rank int, ended bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.stopped {
		o.f(rank, ended)
	}
}

type callback struct {
	mu      sync.Mutex
	f       func(error)
	stopped bool
}

func (cb *callback) invoke(err error) {
	cb.mu.Lock()
	defer cb.mu.Unlock()
	if !cb.stopped {
		cb.stopped = true
		cb.f(err)
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
	g.tellMails()
	if f.code != failLeft && (len(g.outlive) == 0 || f.culprit != peer || g.err != nil) {
		alone := g.n.replaced && len(g.outlive) == 0 // it has yet to call OnLoss, and the others go on
		return func() { g.failed(f, !alone) }
	}
	g.left[peer] = true
	for _, p := range g.pending {
		if p.waiting && p.parts[r] == nil {
			return func() { g.failed(f, true) }
		}
	}
	if f.code == failLeft {
		return nil
	}
	g.lost[peer] = f
	told := slices.Collect(maps.Keys(g.outlive))
	return func() {
		for _, o := range told {
			o.invoke(r, f.ended)
		}
	}
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
		// A second lost rank may only be stopped, and learns it later.
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
	noted := n.note(f, g.err)
	if noted && flight.Listened() {
		n.telling = make(chan struct{})
	}
	telling := n.telling
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
	if telling == nil {
		g.end()
		return
	}
	go func() { // what is to be left of the calls that the failure ends comes first too; messages are read meanwhile
		if noted {
			n.flight.Tell()
			close(telling)
		}
		<-telling
		g.end()
	}()
}

// end lets callers learn that the group has failed.
func (g *Group) end() {
	n := g.n
	n.mu.Lock()
	cbs := g.cbs
	g.cbs = nil
	if !g.ended {
		g.ended = true
		close(g.done)
		g.tellMails()
	}
	n.mu.Unlock()
	for cb := range cbs {
		go cb.invoke(g.err)
	}
}
