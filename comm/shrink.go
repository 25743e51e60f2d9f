package comm

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// shrinking is the state of the agreement on who survives. It outlives a call
// of Shrink that was cancelled, so that the next one goes on where it stopped.
//
// The agreement goes in rounds. In each, a rank tells all others it believes
// alive whom it believes gone, and waits for theirs until they come or their
// sender is gone too. When all of them said the same as it did, and nothing
// happened meanwhile, that is the decision; otherwise the beliefs are united
// and the next round begins. A rank that decides says so to all before it
// returns, and a rank that hears of a decision adopts it and says so as well.
// So a rank can decide something else only when all who had decided are gone.
//
// One bit more is united in the same way, for what else ranks have to agree on
// though some of them are lost: Admit has each say there whether it failed.
type shrinking struct {
	busy  bool
	next  *Group // registered in the first call
	round uint64 // 0 before the first
	said  rankSet
	heard map[uint64]map[int]rankSet
	extra bool    // this rank is for what the bit after the ranks' says
	dec   rankSet // nil until decided
	made  bool
	wake  chan struct{}
}

// take notes what a rank said, and returns the ranks that it does without. A
// malformed set is ignored: its sender is authenticated, and the deadline of the
// call covers the rest.
func (s *shrinking) take(size, rank int, m message) rankSet {
	set, err := decodeRankSet(m.data, size+1)
	if err != nil {
		return nil
	}
	if m.decided {
		if s.dec == nil {
			s.dec = set
		}
		return set
	}
	if m.seq < s.round {
		return nil
	}
	if s.heard == nil {
		s.heard = make(map[uint64]map[int]rankSet)
	}
	if s.heard[m.seq] == nil {
		s.heard[m.seq] = make(map[int]rankSet)
	}
	s.heard[m.seq][rank] = set
	return set
}

func (g *Group) signalShrink() {
	select {
	case g.shrink.wake <- struct{}{}:
	default:
	}
}

// Shrink makes a group of the survivors, in their order, after ranks were
// lost. All survivors call it; ranks that died, were cut off, aborted or closed
// the group do not count as such. The survivors agree on who they are, also
// when more ranks are lost meanwhile: all get a group of the same members. If
// one of them is gone by then, the new group has failed and can be shrunk in
// its turn.
//
// A rank that lives and is only late is a survivor: Shrink waits for it until
// ctx ends, with a [*PeerError] that names it. Ranks of leaveOut, as numbered in
// this group, are left out whether they live or not, and not waited for. It is
// enough that one survivor says so. This group has then failed, and the one left
// out learns it as soon as it runs: from this group, and from its own Shrink.
// Ranks that leave each other out both go on, each without the other.
//
// Where survivors are on several hosts, a host that has lost a rank leaves whole.
// Its other ranks get an error that names that rank, [ErrPeerLost]. Survivors of
// one host all stay. A rank whose host has lost its leader reaches no other
// host, and leaves too.
//
// Hosts that no longer reach each other are lost to each other, and each part goes
// on by itself: nothing tells a host that has stopped from one that is cut off. A
// job that must not become two sets [Config.Majority]: a part that may be the
// smaller one then gets an error here, [ErrPeerLost]. Without it the first survivor
// warns where a host has fallen silent, also on standard error where there is no
// [Config.Logger]; it names that host and its ranks.
//
// A rank that the others gave up, because it was stopped for too long or left
// out, gets an error that says so, [ErrPeerLost] with its own number. The old
// group stays as it is, and is still to be closed. A call that was cancelled can
// be repeated. Shrinking a group that has not failed makes a second one of the
// same ranks. A group shrinks once.
func (g *Group) Shrink(ctx context.Context, leaveOut ...int) (small *Group, err error) {
	defer g.span(ctx, "shrink")(&small, &err)
	n := g.n
	s := &g.shrink
	for _, r := range leaveOut {
		if r < 0 || r >= len(g.members) || r == g.rank {
			return nil, fmt.Errorf("comm: shrink: rank %d of %s cannot leave out rank %d of %d", g.rank, g.name, r, len(g.members))
		}
	}
	n.mu.Lock()
	if err := g.shrinkable(); err != nil {
		n.mu.Unlock()
		return nil, fmt.Errorf("comm: shrink: %w", err)
	}
	s.busy = true
	next := s.next
	n.mu.Unlock()
	for _, r := range leaveOut {
		g.failed(&failure{code: failLost, culprit: g.members[r], detail: fmt.Sprintf("rank %d has left it out", g.rank)}, true)
	}
	defer func() {
		n.mu.Lock()
		s.busy = false
		n.mu.Unlock()
	}()
	if next == nil {
		var err error
		next, err = n.register(groupID(g.id, "shrink", 0, 0), g.name+"/survivors", 0)
		if err != nil {
			return nil, fmt.Errorf("comm: shrink: %w", err)
		}
		n.mu.Lock()
		s.next = next
		n.mu.Unlock()
	}

	dec, err := g.agree(ctx)
	if err != nil {
		return nil, err
	}
	g.sendToRanks(message{kind: kindShrink, gid: g.id, decided: true, data: dec.encode()}, nil)
	n.mu.Lock()
	s.made = true
	s.next = nil
	closed, out := g.closed, g.leftOut()
	n.mu.Unlock()
	if dec.has(g.rank) {
		next.Close()
		return nil, fmt.Errorf("comm: shrink: %w", out)
	}
	if closed {
		next.Close()
		return nil, fmt.Errorf("comm: shrink: %s: %w", g.name, ErrClosed)
	}
	if err := g.minority(dec); err != nil {
		next.Close()
		return nil, fmt.Errorf("comm: shrink: %w", err)
	}
	left := g.withHosts(dec)
	if left.has(g.rank) {
		next.Close()
		return nil, fmt.Errorf("comm: shrink: %w", g.leaves(dec))
	}
	var members []int
	for r, w := range g.members {
		if !left.has(r) {
			members = append(members, w)
		}
	}
	n.activate(next, members)
	n.regroup(g, next)
	g.log.Info("group shrunk", "group", g.name, "rank", g.rank, "size", len(g.members), "survivors", len(members))
	if members[0] == n.id {
		g.warnOfSilence(next)
	}
	return next, nil
}

// leftOut is the error of a rank that the survivors go on without, whether it hears so before it shrinks or from their decision. The caller holds
// n.mu.
func (g *Group) leftOut() error {
	why := fmt.Errorf("%w: the others have given this rank up", ErrPeerLost)
	if pe, ok := g.err.(*PeerError); ok && pe.Rank == g.rank {
		why = pe.Err
	}
	return &PeerError{Rank: g.rank, Err: fmt.Errorf("this rank is not among the survivors: %w", why)}
}

// shrinkable returns why this rank cannot take part. The caller holds n.mu.
func (g *Group) shrinkable() error {
	switch {
	case g.closed || g.n.phase != nodeOpen:
		return fmt.Errorf("%s: %w", g.name, ErrClosed)
	case g.shrink.made:
		return fmt.Errorf("%s was shrunk before: %w", g.name, ErrClosed)
	case g.shrink.busy:
		return fmt.Errorf("%s is being shrunk by another goroutine", g.name)
	case g.out[g.n.id]:
		return g.leftOut()
	}
	return g.stranded()
}

// agree runs rounds until there is a decision: the set of ranks that are gone.
func (g *Group) agree(ctx context.Context) (rankSet, error) {
	began := time.Now()
	n := g.n
	s := &g.shrink
	q := g.newInquiry(ctx)
	defer q.end()
	awaited := func() (round uint64, missing []int) {
		n.mu.Lock()
		defer n.mu.Unlock()
		return s.round, g.shrinkAbsent()
	}
	for over := false; ; {
		n.mu.Lock()
		var say *message
		if s.dec == nil {
			if s.round == 0 {
				say = g.nextRound(g.goneRanks())
			} else if union, same, complete := g.roundState(); complete && g.stranded() == nil {
				if same {
					s.dec = union
				} else {
					say = g.nextRound(union)
				}
			}
		}
		dec, said := s.dec, s.said
		err := error(nil)
		if dec == nil && (g.closed || n.phase != nodeOpen || g.out[n.id] || g.stranded() != nil) {
			busy := s.busy
			s.busy = false
			err = g.shrinkable()
			s.busy = busy
		}
		n.mu.Unlock()
		switch {
		case dec != nil:
			return dec, nil
		case err != nil:
			return nil, fmt.Errorf("comm: shrink: %w", err)
		case say != nil:
			g.sendToRanks(*say, said)
			continue
		case over:
			round, missing := awaited()
			return nil, q.waitError(ctx, "shrink", round, missing, time.Since(began))
		}
		select {
		case <-s.wake:
		case <-q.due:
			q.ask()
		case <-q.say.C:
			round, missing := awaited()
			q.logWaiting("shrink", round, missing, time.Since(began))
		case <-ctx.Done():
			over = true // after one more look
		}
	}
}

// withHosts adds to the ranks that are gone those that leave with them: all of a host that has lost one, where the others are on several.
func (g *Group) withHosts(gone rankSet) rankSet {
	t := &g.topology
	hurt, alive, hosts := make([]bool, t.Hosts), make([]bool, t.Hosts), 0
	for r := range g.members {
		h := t.HostOf(r)
		hurt[h] = hurt[h] || gone.has(r)
		if !gone.has(r) && !alive[h] {
			alive[h] = true
			hosts++
		}
	}
	left := gone.clone()
	for r := range g.members {
		if hosts > 1 && hurt[t.HostOf(r)] {
			left.set(r)
		}
	}
	return left
}

// leaves is the error of a survivor whose host has lost a rank.
func (g *Group) leaves(gone rankSet) error {
	t := &g.topology
	for r := range g.members {
		if gone.has(r) && t.HostOf(r) == t.Host {
			return &PeerError{Rank: r, Err: fmt.Errorf("%w: host %d has lost it, and leaves whole", ErrPeerLost, t.Host)}
		}
	}
	return nil
}

// minority is the error of survivors that may be the smaller part, where Config.Majority asks for the larger one. All who agreed on gone get it.
// Ranks that leave with their host have agreed too, so that they count. No two parts are both large enough.
func (g *Group) minority(gone rankSet) error {
	var lost []int
	for r := range g.members {
		if gone.has(r) {
			lost = append(lost, r)
		}
	}
	size := len(g.members)
	left := size - len(lost)
	if !g.n.majority || g.topology.Hosts == 1 || 2*left > size || 2*left == size && !gone.has(0) {
		return nil
	}
	return &PeerError{Rank: lost[0], Err: fmt.Errorf("%w: ranks %v are gone, and the %d that are left are no majority of %d: the others may go on without them",
		ErrPeerLost, lost, left, size)}
}

// warnOfSilence tells of hosts that the survivors have lost and that may still run.
func (g *Group) warnOfSilence(next *Group) {
	t := &g.topology
	if t.Hosts == 1 || g.n.majority || !g.n.hosts.relayed {
		return
	}
	var hosts, ranks []int
	g.n.mu.Lock()
	for r, w := range g.members {
		h := t.HostOf(r)
		f := g.n.peers[g.n.hosts.leader(g.n.hosts.of[w])].how
		if _, stays := next.rankOf[w]; stays || f == nil || f.code != failLost || f.ended {
			continue
		}
		ranks = append(ranks, r)
		if !slices.Contains(hosts, h) {
			hosts = append(hosts, h)
		}
	}
	g.n.mu.Unlock()
	if len(hosts) == 0 {
		return
	}
	text := fmt.Sprintf("hosts %v with ranks %v have fallen silent: those that still run, and are only cut off, go on as a group of their own; "+
		"set SWITCHYARD_MAJORITY=1 on all ranks to have one part at most go on", hosts, ranks)
	g.warn(text)
}

// stranded is the error of a rank that reaches no other host, because the leader of its own is gone. The caller holds n.mu.
func (g *Group) stranded() error {
	h := g.n.hosts
	if h == nil || !h.relayed || g.topology.Hosts == 1 || h.leads(g.n.id) {
		return nil
	}
	leader := h.leader(h.Host)
	if g.n.peers[leader].how == nil {
		return nil
	}
	rank, ok := g.rankOf[leader]
	if !ok {
		rank = -1
	}
	return &PeerError{Rank: rank, Err: fmt.Errorf("%w: host %d has lost it and reaches no other host without it", ErrPeerLost, g.topology.Host)}
}

// nextRound begins a round. The caller holds n.mu.
func (g *Group) nextRound(gone rankSet) *message {
	s := &g.shrink
	delete(s.heard, s.round)
	s.round++
	s.said = gone
	return &message{kind: kindShrink, gid: g.id, seq: s.round, data: gone.encode()}
}

// roundState looks at the current round: whether every rank that is not gone
// has spoken, the union of all beliefs, and whether all said what this rank
// said, with nothing new since. The caller holds n.mu.
func (g *Group) roundState() (union rankSet, same, complete bool) {
	s := &g.shrink
	now := g.goneRanks()
	union = now.clone()
	union.add(s.said)
	same = true
	for r := range g.members {
		if r == g.rank || s.said.has(r) {
			continue
		}
		set, ok := s.heard[s.round][r]
		if !ok {
			if now.has(r) {
				continue
			}
			return nil, false, false
		}
		same = same && set.equal(s.said)
		union.add(set)
	}
	return union, same && union.equal(s.said), true
}

// shrinkAbsent returns the ranks that have not spoken in this round. The caller holds n.mu.
func (g *Group) shrinkAbsent() []int {
	var out []int
	gone := g.goneRanks()
	for r := range g.members {
		if r == g.rank || g.shrink.said.has(r) || gone.has(r) {
			continue
		}
		if _, ok := g.shrink.heard[g.shrink.round][r]; !ok {
			out = append(out, r)
		}
	}
	return out
}

// goneRanks is whom this rank believes gone, and the extra bit. The caller holds n.mu.
func (g *Group) goneRanks() rankSet {
	set := newRankSet(len(g.members) + 1)
	if g.shrink.extra {
		set.set(len(g.members))
	}
	for r, w := range g.members {
		if g.left[w] || g.out[w] || g.n.peers[w].how != nil {
			set.set(r)
		}
	}
	return set
}

// sendToRanks sends a message to all ranks within reach that are not in skip.
func (g *Group) sendToRanks(m message, skip rankSet) {
	g.n.mu.Lock()
	var to []int
	for r, w := range g.members {
		if !skip.has(r) {
			to = append(to, w)
		}
	}
	ls := g.n.linksTo(to, -1)
	g.n.mu.Unlock()
	for _, l := range ls {
		l.send(m)
	}
}

// rankSet is a set of ranks, one bit each.
type rankSet []byte

func newRankSet(size int) rankSet { return make(rankSet, (size+7)/8) }

func (s rankSet) has(r int) bool { return r/8 < len(s) && s[r/8]&(1<<(r%8)) != 0 }
func (s rankSet) set(r int)      { s[r/8] |= 1 << (r % 8) }
func (s rankSet) clone() rankSet { return append(rankSet(nil), s...) }
func (s rankSet) encode() []byte { return s.clone() }

func (s rankSet) add(t rankSet) {
	for i := range t {
		s[i] |= t[i]
	}
}

func (s rankSet) equal(t rankSet) bool { return string(s) == string(t) }

// decodeRankSet checks that a set has the right length and no rank beyond size.
func decodeRankSet(b []byte, size int) (rankSet, error) {
	if len(b) != (size+7)/8 {
		return nil, fmt.Errorf("%w: a set of %d bytes for %d ranks", errMalformed, len(b), size)
	}
	if rest := size % 8; rest != 0 && b[len(b)-1]>>rest != 0 {
		return nil, fmt.Errorf("%w: a set with ranks beyond %d", errMalformed, size)
	}
	return rankSet(b).clone(), nil
}
