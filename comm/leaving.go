package comm

import "fmt"

// The leader of a host passes on what other ranks of its host say, also when it has closed its own groups. So a node has a phase:
//
//	open ── its last group is closed, others of its host need it ──► lingering ── the last of these has gone ──► closed
//	open ── its last group is closed ──► closed
//	open ── it ends as a crash would ──► killed
//
// Only an open node delivers anything, has groups, or is linked. One that lingers still passes on, and hears who goes.
type nodePhase uint8

const (
	nodeOpen nodePhase = iota
	lingering
	nodeClosed
	nodeKilled
)

func (p nodePhase) String() string { return [...]string{"open", "lingering", "closed", "killed"}[p] }

// nodeMoves are all moves of a node.
var nodeMoves = [...]struct{ from, to nodePhase }{
	{nodeOpen, lingering},
	{nodeOpen, nodeClosed},
	{nodeOpen, nodeKilled},
	{lingering, nodeClosed},
}

// move has the node go on to a phase. It reports whether it can. The caller holds mu.
func (n *node) move(to nodePhase) bool {
	for _, move := range nodeMoves {
		if move.from == n.phase && move.to == to {
			n.phase = to
			return true
		}
	}
	return false
}

// A peer has a phase, for this rank:
//
//	unmet ── its link is there ──► linked ── it has left, or is lost ──► leaving ── all groups know ──► gone
//	leaving ── all groups know, and it passes on what others say ──► relaying ── nobody needs that any more ──► gone
//	unmet ── it has left, or is lost, before it was met ──► leaving
//	gone ── a process is about to take its place ──► awaited ── its link is there ──► linked
//	awaited ── the process has not come ──► gone
//	unmet ── it was lost before this process took another one's place ──► gone
//
// A rank says something of its own to peers that are linked alone.
type peerPhase uint8

const (
	peerUnmet peerPhase = iota
	peerLinked
	peerLeaving
	peerRelaying
	peerGone
	peerAwaited
)

func (p peerPhase) String() string {
	return [...]string{"unmet", "linked", "leaving", "relaying", "gone", "awaited"}[p]
}

// peerMoves are all moves of a peer.
var peerMoves = [...]struct{ from, to peerPhase }{
	{peerUnmet, peerLinked},
	{peerUnmet, peerLeaving},
	{peerUnmet, peerGone},
	{peerLinked, peerLeaving},
	{peerLeaving, peerRelaying},
	{peerLeaving, peerGone},
	{peerRelaying, peerGone},
	{peerGone, peerAwaited},
	{peerAwaited, peerLinked},
	{peerAwaited, peerGone},
}

// peer is what a node knows of another one. how is nil in the phases unmet and linked, and else how it went.
type peer struct {
	phase peerPhase
	how   *failure
}

// move has the peer go on to a phase. It reports whether it can. The caller holds the node's mu.
func (p *peer) move(to peerPhase) bool {
	for _, move := range peerMoves {
		if move.from == p.phase && move.to == to {
			p.phase = to
			return true
		}
	}
	return false
}

// reaches says that a peer is linked. The caller holds mu.
func (n *node) reaches(peer int) bool {
	return n.links[peer] != nil && n.peers[peer].phase == peerLinked
}

// toTell are the links over which this rank, the leader of its host, tells of a loss: of a rank of its host to all other hosts, of another
// one to its own. The caller holds mu.
func (n *node) toTell(lost int) (out []link) {
	h := n.hosts
	if h == nil || !h.relayed || !h.leads(n.id) {
		return nil
	}
	for r, l := range n.links {
		here := h.of[r] == h.of[n.id]
		if r != lost && n.reaches(r) && h.direct(n.id, r) && here == (h.of[lost] != h.of[n.id]) {
			out = append(out, l)
		}
	}
	return out
}

// hearLoss takes the news that another rank is lost. It comes from the leader of that one's host, or of this one's.
func (n *node) hearLoss(from int, f *failure) {
	h := n.hosts
	if h == nil || !h.relayed || f.culprit >= len(h.of) || h.of[f.culprit] == h.of[n.id] ||
		from != h.next(n.id, f.culprit) && from != h.leader(h.of[f.culprit]) {
		return
	}
	n.lose(f.culprit, f)
}

// unreachable loses the ranks that are reached over peer, which is gone. If it left in order, so have they for this rank.
func (n *node) unreachable(peer int, f *failure) {
	for _, r := range n.hosts.behind(n.id, peer) {
		n.lose(r, &failure{code: f.code, culprit: r, detail: fmt.Sprintf("it is reached over rank %d, which %s", peer, f.gone())})
	}
}

// gone says how a rank has gone.
func (f *failure) gone() string {
	if f.code == failLeft {
		return "has ended"
	}
	return "is lost: " + f.detail
}

// cutOff takes the end of a peer's connection. One that had left in order may still have passed on what others said.
func (n *node) cutOff(peer int, f *failure) {
	n.mu.Lock()
	before := n.peers[peer].how
	n.mu.Unlock()
	if before == nil {
		n.lose(peer, f)
	} else if before.code == failLeft && n.hosts != nil {
		n.unreachable(peer, before)
	}
}

// needed says that peer, which has left, still passes on what others say. The caller holds mu.
func (n *node) needed(peer int) bool {
	if n.hosts == nil {
		return false
	}
	for _, r := range n.hosts.behind(n.id, peer) {
		if n.peers[r].how == nil {
			return true
		}
	}
	return false
}

// passesOn says that this rank is the leader of its host and others of it are still there, in a world of several hosts. The caller holds mu.
func (n *node) passesOn() bool {
	h := n.hosts
	if h == nil || !h.relayed || !h.leads(n.id) {
		return false
	}
	for _, r := range h.ranks[h.Host] {
		if r != n.id && n.peers[r].how == nil {
			return true
		}
	}
	return false
}

// letGo closes the connections that only served to pass on, once nobody needs them.
func (n *node) letGo() {
	if n.hosts == nil || !n.hosts.relayed {
		return
	}
	n.mu.Lock()
	var ls, all []link
	for peer, l := range n.links {
		if l == nil || !n.hosts.direct(n.id, peer) {
			continue
		}
		all = append(all, l)
		if p := &n.peers[peer]; p.phase == peerRelaying && !n.needed(peer) && p.move(peerGone) {
			ls = append(ls, l)
		}
	}
	over := n.phase == lingering && !n.passesOn() && n.move(nodeClosed)
	n.mu.Unlock()
	for _, l := range ls {
		l.close(0)
	}
	if over {
		go n.stop(all, closeGrace)
	}
}
