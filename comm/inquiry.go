package comm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// inquiry finds out who holds up a call, shortly before it times out. A rank
// that is missing may only wait for another, in an earlier call. So all are
// asked whom they wait for: one that waits is not to blame, one that gives no
// answer is.
type inquiry struct {
	g   *Group
	due <-chan time.Time // when to ask; nil if ctx has no deadline
	say *time.Ticker     // when to tell people who look on for whom this rank waits
	id  uint64           // 0: nothing has been asked yet

	// Guarded by n.mu.
	waits   map[int]rankSet // whom a rank waits for, by rank, as it has said
	arrived chan struct{}   // signalled with every answer
}

// inquiryLead is how long before the deadline of a call the others are asked,
// at most. It is half of the call where that is shorter.
const inquiryLead = 2 * time.Second

func (g *Group) newInquiry(ctx context.Context) *inquiry {
	q := &inquiry{g: g, say: time.NewTicker(sayEvery)}
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		q.due = time.After(left - min(left/2, inquiryLead))
	}
	return q
}

// ask asks all ranks within reach.
func (q *inquiry) ask() {
	g := q.g
	g.n.mu.Lock()
	g.lastInquiry++
	q.id = g.lastInquiry
	q.waits = make(map[int]rankSet)
	q.arrived = make(chan struct{}, 1)
	g.inquiries[q.id] = q
	g.n.mu.Unlock()
	g.sendToRanks(message{kind: kindAsk, gid: g.id, seq: q.id}, nil)
}

// sayEvery is the time between two words about one wait. Tests have less patience.
var sayEvery = 5 * time.Second

// logWaiting logs for whom this rank waits.
func (q *inquiry) logWaiting(op string, seq uint64, missing []int, waited time.Duration) {
	q.g.log.Info("waiting", "group", q.g.name, "rank", q.g.rank, "call", fmt.Sprintf("%d, %s", seq, op), "for", missing, "waited", waited.Round(time.Second))
}

// end forgets the answers.
func (q *inquiry) end() {
	q.say.Stop()
	if q.id == 0 {
		return
	}
	q.g.n.mu.Lock()
	delete(q.g.inquiries, q.id)
	q.g.n.mu.Unlock()
}

// answer is what this rank says when it is asked. The caller holds n.mu, and
// calls what it returns afterwards.
func (g *Group) answer(from int, id uint64) (then func()) {
	set := newRankSet(len(g.members))
	for _, r := range g.waitsFor() {
		set.set(r)
	}
	l := g.n.links[from]
	if l == nil {
		return nil
	}
	return func() { l.send(message{kind: kindAnswer, gid: g.id, seq: id, data: set.encode()}) }
}

// waitsFor returns the ranks that this one waits for in the earliest of its
// calls, or has waited for in its last one, which it gave up. The caller holds n.mu.
func (g *Group) waitsFor() []int {
	if g.shrink.busy {
		return g.shrinkAbsent()
	}
	var first *pending
	var at uint64
	for seq, p := range g.pending {
		if p.waiting && p.missing > 0 && (first == nil || seq < at) {
			first, at = p, seq
		}
	}
	switch {
	case first != nil:
		return first.absent()
	case g.gaveUp.seq+1 == g.seq:
		return g.gaveUp.missing
	}
	return nil
}

// answered takes an answer. The caller holds n.mu.
func (g *Group) answered(r int, m message) {
	q := g.inquiries[m.seq]
	set, err := decodeRankSet(m.data, len(g.members))
	if q == nil || err != nil { // too late, or malformed: as good as none
		return
	}
	q.waits[r] = set
	select {
	case q.arrived <- struct{}{}:
	default:
	}
}

// blame returns who holds up a call that misses ranks, at least one, and in words how that
// is known. Several that have not answered may have had too little time to, so
// they get newsGrace.
func (q *inquiry) blame(missing []int) (rank int, how string) {
	if q.id == 0 {
		return missing[0], ""
	}
	grace := time.After(newsGrace)
	for {
		words, silent, idle := q.reach(missing)
		if len(silent) > 1 {
			select {
			case <-q.arrived:
				continue
			case <-grace:
			}
		}
		rank = missing[0]
		switch {
		case len(silent) > 0:
			rank = silent[0]
			how = fmt.Sprintf("; rank %d does not answer", rank)
		case len(idle) > 0:
			rank = idle[0]
			how = fmt.Sprintf("; rank %d runs and is in no call of this group (it computes, or is in an exchange or a reduction)", rank)
		}
		for _, w := range words {
			how += "; " + w
		}
		return rank, how
	}
}

// reach follows who waits for whom, from those that are missing: it says so in
// words, and returns who has given no answer and who waits for nobody.
func (q *inquiry) reach(missing []int) (words []string, silent, idle []int) {
	g := q.g
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	seen := newRankSet(len(g.members))
	seen.set(g.rank)
	next := slices.Clone(missing)
	for len(next) > 0 {
		r := next[0]
		next = next[1:]
		if seen.has(r) {
			continue
		}
		seen.set(r)
		waits, ok := q.waits[r]
		if !ok {
			silent = append(silent, r)
			continue
		}
		var others []int
		for o := range g.members {
			if waits.has(o) {
				others = append(others, o)
			}
		}
		if len(others) == 0 {
			idle = append(idle, r)
			continue
		}
		words = append(words, fmt.Sprintf("rank %d waits for ranks %v itself", r, others))
		next = append(next, others...)
	}
	return words, silent, idle
}

// waitError is the error of a call that waited for ranks when its context ended.
func (q *inquiry) waitError(ctx context.Context, op string, seq uint64, missing []int, waited time.Duration) error {
	err := ctxErr(ctx)
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrTimeout) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	text := fmt.Sprintf("call %d of %s, after %v, waiting for ranks %v", seq, q.g, waited.Round(time.Millisecond), missing)
	if len(missing) == 0 {
		return fmt.Errorf("comm: %s: %s: %w", op, text, err)
	}
	rank, how := q.blame(missing)
	return &PeerError{Rank: rank, Op: op, Epoch: seq, Err: fmt.Errorf("%w: %s (stopped, busy with something else, or not in this call)%s", err, text, how)}
}
