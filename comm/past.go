package comm

import (
	"bytes"
	"fmt"
)

// past is what the collective calls of a group have returned, with Config.Replaceable. The process that takes the place of a lost rank makes
// the calls which that one has made, and gets what it got. Guarded by n.mu.
type past struct {
	calls      map[uint64][]message // by number, and in these by rank
	size, fds  int
	incomplete string // why there are not all of them
}

// The past has at most this. Heaps and communicators take some hundreds of calls, of some hundred bytes each.
const (
	maxPastCalls = 4096
	maxPastBytes = 16 << 20
	maxPastFDs   = 1024
)

// keep adds a call that has ended, whose parts the caller still owns.
func (p *past) keep(seq uint64, parts []message) {
	if p == nil || seq == 0 || p.incomplete != "" {
		return
	}
	copies := make([]message, len(parts))
	for r := range parts {
		m := &copies[r]
		*m = parts[r]
		m.data = bytes.Clone(m.data)
		fds, err := dupFDs(m.fds)
		if m.fds = fds; err != nil {
			p.lose(fmt.Sprintf("a descriptor of call %d was not kept: %v", seq, err))
		}
		p.size += len(m.data) + len(m.poison)
		p.fds += len(m.fds)
	}
	if p.calls[seq] = copies; len(p.calls) > maxPastCalls || p.size > maxPastBytes || p.fds > maxPastFDs {
		p.lose(fmt.Sprintf("it has made %d calls of %d bytes and %d descriptors, and at most %d of %d and %d are kept",
			len(p.calls), p.size, p.fds, maxPastCalls, maxPastBytes, maxPastFDs))
	}
	if p.incomplete != "" {
		p.drop()
	}
}

// lose notes why the past is not known any more.
func (p *past) lose(why string) {
	if p != nil && p.incomplete == "" {
		p.incomplete = why
	}
}

// drop releases what is kept.
func (p *past) drop() {
	if p == nil {
		return
	}
	for _, parts := range p.calls {
		for r := range parts {
			parts[r].drop()
		}
	}
	clear(p.calls)
}

func newPast() *past { return &past{calls: make(map[uint64][]message)} }

// Replaying reports whether this process has taken a lost rank's place, and its next collective call of the group is one that the lost rank
// has made: then it gets what that one got, and meets nobody.
func (g *Group) Replaying() bool {
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	return g.replays()
}

// replays is Replaying where the caller holds n.mu.
func (g *Group) replays() bool { return g.replay != nil && g.replay.calls[g.seq] != nil }

// CatchUp counts the collective calls as made that the lost rank has made and this process, which has taken its place, has not made again.
// The error is [ErrMismatch] where one of them made a subgroup or passed descriptors, as those do that make or grow a heap.
func (g *Group) CatchUp() error {
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	for ; g.replays(); g.seq++ {
		parts := g.replay.calls[g.seq]
		g.past.keep(g.seq, parts)
		for _, m := range parts {
			if m.op == opSplit || len(m.fds) > 0 {
				return fmt.Errorf("comm: catch up: %w: the lost rank has made call %d of %s, %v, and the process in its place has not", ErrMismatch, g.seq, g.name, m.op)
			}
		}
	}
	return nil
}

// replayed takes the next call out of the past. The caller holds n.mu, and calls only what replays.
func (g *Group) replayed(op opcode) (*call, error) {
	c := &call{op: op, seq: g.seq, past: g.replay.calls[g.seq]}
	if theirs := c.past[0].op; theirs != op {
		return nil, fmt.Errorf("comm: %s: %w: the lost rank has called %v as call %d of %s, and the process in its place calls %v",
			op, ErrMismatch, theirs, c.seq, g.name, op)
	}
	g.past.keep(c.seq, c.past)
	delete(g.replay.calls, g.seq)
	g.seq++
	return c, nil
}

// remembered is what a call of the past has returned.
func (g *Group) remembered(c *call) ([]message, error) {
	for r := range c.past {
		if c.past[r].poison != "" {
			return nil, g.poisoned(c, c.past, r)
		}
	}
	return c.past, nil
}
