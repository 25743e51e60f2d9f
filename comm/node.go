package comm

import (
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/observe"
)

// link carries messages to one peer, in order.
type link interface {
	// send queues m and returns at once. It takes over m.fds.
	send(m message)
	// flush waits until everything sent has left this process, or until the deadline.
	flush(deadline time.Time)
	// close lets go of the peer after what was sent has left, or after grace.
	close(grace time.Duration)
	// cut breaks the connection the way a crash would.
	cut()
}

// node is one rank's end of a world: its links to all peers and the groups
// that use them. Everything mutable, in it and in its groups, is guarded by mu;
// nothing is sent to a peer while mu is held, because a link within the process
// locks the peer's node.
type node struct {
	id     int
	log    *slog.Logger
	wg     sync.WaitGroup // goroutines of the links
	pulse  pulse
	onStop func() // called once, after the last group was closed
	delay  func() // before every frame, in tests

	hosts    *hosts // nil: all ranks are on one host
	keeps    bool   // Config.Replaceable
	majority bool   // Config.Majority
	door     string // where this rank listens for other hosts, as the rank of a process

	replaced bool // this process has taken a lost rank's place

	flight *flight.Rank // what is known of this rank
	noted  map[flight.Fault]bool
	// telling is closed when those who look on know of the last failure, nil where nobody does.
	telling chan struct{}
	dumb    func() // ends what it tells of the links
	epoch   int    // of the group that met

	mu      sync.Mutex
	current *Group            // the group that met, or what it has become by Shrink
	held    map[int][]message // what is passed on to peers that are not linked yet
	links   []link            // by world rank; nil for this rank and for peers not met yet
	groups  map[uint64]*Group
	peers   []peer // by world rank
	phase   nodePhase
	seats   map[int]chan answer // of Replace: where peers say that they are connected with a process, by its rank
	pasts   map[uint64]*past    // of groups that the lost rank was in whose place this process has taken
	arrival *arrival            // of a process that takes a lost rank's place, until it is in
}

func newNode(id, size int, log *slog.Logger) *node {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &node{
		id:     id,
		log:    log,
		links:  make([]link, size),
		groups: make(map[uint64]*Group),
		peers:  make([]peer, size),
		held:   make(map[int][]message),
		flight: flight.New(id, size),
		noted:  make(map[flight.Fault]bool),
		pulse:  pulse{last: time.Now()},
	}
}

// setLink makes a peer reachable by a link with this number of goroutines. It reports
// false when the node is not open or has such a link already.
func (n *node) setLink(peer int, l link, goroutines int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	awaited := n.peers[peer].phase == peerAwaited
	if n.phase != nodeOpen || n.links[peer] != nil && !awaited {
		return false
	}
	n.links[peer] = l
	n.peers[peer].move(peerLinked) // one that is lost by now stays so
	if awaited {
		n.fill(peer)
	}
	n.wg.Add(goroutines)
	for _, m := range n.held[peer] {
		l.send(m)
	}
	delete(n.held, peer)
	return true
}

// linksTo returns the links to the given world ranks, without this rank and
// peers out of reach. A peer that has just been given up may still be tried as
// the last one. The caller holds mu.
func (n *node) linksTo(members []int, last int) []link {
	out := make([]link, 0, len(members))
	for _, m := range n.inTurn(members) {
		if m != n.id && (n.reaches(m) || m == last && n.links[m] != nil) {
			out = append(out, n.links[m])
		}
	}
	return out
}

// inTurn is members in the order in which this rank tells them anything.
func (n *node) inTurn(members []int) []int {
	if n.hosts == nil || !n.hosts.relayed {
		return members
	}
	out := slices.Clone(members)
	slices.SortStableFunc(out, func(a, b int) int { return n.hosts.turn(n.id, a) - n.hosts.turn(n.id, b) })
	return out
}

// listensTo says that a peer which has left has still something to say.
func (n *node) listensTo(peer int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.needed(peer)
}

// alone reports whether no peer has given a sign of life in the time of a few.
func (n *node) alone(timeout time.Duration) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range n.links {
		if s, ok := l.(*sockLink); ok {
			s.mu.Lock()
			alive := !s.ended && time.Since(s.heard) < timeout*3/(2*beatsPerTimeout)
			s.mu.Unlock()
			if alive {
				return false
			}
		}
	}
	return true
}

// deliver takes a message from a peer.
func (n *node) deliver(from int, m message) {
	switch m.kind {
	case kindBeat:
		return
	case kindBye:
		n.lose(from, &failure{code: failLeft, culprit: from})
		return
	case kindRelay:
		n.pass(from, m)
		return
	case kindLost:
		n.hearLoss(from, m.fail)
		return
	case kindReplace:
		n.replace(from, m)
		return
	case kindReplaced:
		n.hearReplaced(from, m)
		return
	case kindPast:
		n.learnPast(m)
		return
	}
	n.mu.Lock()
	g := n.groups[m.gid]
	if n.phase != nodeOpen || g == nil {
		n.mu.Unlock()
		m.drop()
		return
	}
	if !g.active {
		g.early = append(g.early, inbound{from, m})
		n.mu.Unlock()
		return
	}
	then := g.handle(from, m)
	n.mu.Unlock()
	if then != nil {
		then()
	}
}

// lose notes that a peer is gone and tells every group that has it as a
// member. A peer that left in order is only news to calls that still need it.
func (n *node) lose(peer int, f *failure) {
	n.mu.Lock()
	p := &n.peers[peer]
	if n.phase == nodeClosed || n.phase == nodeKilled || !p.move(peerLeaving) {
		n.mu.Unlock()
		return
	}
	var then []func()
	for _, g := range n.groups { // none of one that lingers
		if !g.active {
			continue // activation looks at n.peers
		}
		if fn := g.lose(peer, f); fn != nil {
			then = append(then, fn)
		}
	}
	p.how = f
	l := n.links[peer]
	next := peerGone
	if f.code == failLeft && n.needed(peer) {
		next = peerRelaying
	}
	var tell []link
	if f.code != failLeft || f.detail != "" { // that it leaves it says itself
		tell = n.toTell(peer)
	}
	n.mu.Unlock()
	defer n.letGo()

	if f.code != failLeft {
		n.log.Warn("peer lost", "rank", n.id, "peer", peer, "why", f.detail)
	}
	for _, fn := range then {
		fn()
	}
	n.mu.Lock()
	p.move(next)
	n.mu.Unlock()
	for _, t := range tell {
		t.send(message{kind: kindLost, fail: f})
	}
	if f.code != failLeft && n.hosts != nil {
		n.unreachable(peer, f)
	}
	if l != nil && next == peerGone {
		grace := time.Duration(0)
		if f.code != failLeft {
			// The peer may only be stopped. The failed groups have left it a word
			// of that, for when it wakes up and believes that all others are gone.
			grace = closeGrace
		}
		l.close(grace)
	}
}

// register makes a group known before its members are. Messages for it are
// kept until activate.
func (n *node) register(id uint64, name string, parent uint64) (*Group, error) {
	g := n.newGroup(id, name, parent)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.phase != nodeOpen {
		return nil, ErrClosed
	}
	n.groups[id] = g
	if n.hosts != nil {
		g.home, g.rail = n.newGroup(groupID(id, "home", 0, 0), name+"/home", id), n.newGroup(groupID(id, "rail", 0, 0), name+"/rail", id)
		n.groups[g.home.id], n.groups[g.rail.id] = g.home, g.rail
	}
	return g, nil
}

func (n *node) newGroup(id uint64, name string, parent uint64) *Group {
	g := &Group{
		n:       n,
		log:     n.log,
		id:      id,
		name:    name,
		parent:  parent,
		seq:     1,
		pending: make(map[uint64]*pending),
		left:    make(map[int]bool),
		lost:    make(map[int]*failure),
		out:     make(map[int]bool),
		done:    make(chan struct{}),
		cbs:     make(map[*callback]struct{}),

		mails:     make(map[uint32]*Mail),
		inquiries: make(map[uint64]*inquiry),
	}
	if n.keeps {
		g.past = newPast()
	}
	g.shrink.wake = make(chan struct{}, 1)
	return g
}

// activate gives a registered group its members (world ranks, in the order of
// their ranks in the group) and replays what has arrived for it.
func (n *node) activate(g *Group, members []int) {
	n.mu.Lock()
	then := n.activateLocked(g, members)
	n.mu.Unlock()
	for _, fn := range then {
		fn()
	}
	observe.FromEnv(n.log)
}

// activateLocked is activate where the caller holds mu, and calls what it returns afterwards.
func (n *node) activateLocked(g *Group, members []int) (then []func()) {
	g.members = members
	g.rankOf = make(map[int]int, len(members))
	for r, m := range members {
		g.rankOf[m] = r
		if m == n.id {
			g.rank = r
		}
	}
	then = n.divide(g)
	if n.dumb == nil { // g is the group that met
		n.tell(g)
	}
	g.active = true
	early := g.early
	g.early = nil
	for _, in := range early {
		if fn := g.handle(in.from, in.m); fn != nil {
			then = append(then, fn)
		}
	}
	if n.phase != nodeOpen { // killed meanwhile
		then = append(then, func() { g.failed(n.killed(), false) })
	}
	for _, m := range members {
		if f := n.peers[m].how; f != nil && f.before {
			g.left[m] = true
			g.lost[m] = f
		} else if f != nil {
			if fn := g.lose(m, f); fn != nil {
				then = append(then, fn)
			}
		}
	}
	return then
}

// divide finds on which hosts the ranks of a group are, and activates its home and its rail. The caller holds mu.
func (n *node) divide(g *Group) (then []func()) {
	if n.hosts == nil {
		g.topology = Topology{Hosts: 1, PerHost: len(g.members), Local: g.rank}
		return nil
	}
	of := make([]int, len(g.members))
	for r, m := range g.members {
		of[r] = n.hosts.of[m]
	}
	g.topology = newTopology(of, g.rank)
	t := &g.topology
	part := func(d **Group, in func(r int) bool) {
		if *d == nil { // g is one itself
			return
		}
		var members []int
		for r, m := range g.members {
			if in(r) {
				members = append(members, m)
			}
		}
		if len(members) <= 1 || len(members) == len(g.members) {
			delete(n.groups, (*d).id)
			*d = nil
			return
		}
		then = append(then, n.activateLocked(*d, members)...)
	}
	part(&g.home, func(r int) bool { return t.HostOf(r) == t.Host })
	part(&g.rail, func(r int) bool { return t.Hosts > 1 && t.LocalOf(r) == t.Local })
	return then
}

// unregister forgets a group. With the last group the node says goodbye and stops; what went wrong with it may have to be seen first.
func (n *node) unregister(g *Group) {
	n.mu.Lock()
	over := len(n.groups) == 1 && n.groups[g.id] == g && n.phase == nodeOpen
	n.mu.Unlock()
	if over {
		n.flight.Ends()
	}
	n.mu.Lock()
	if n.groups[g.id] != g {
		n.mu.Unlock()
		return
	}
	delete(n.groups, g.id)
	var drop []message
	for _, in := range g.early {
		drop = append(drop, in.m)
	}
	g.early = nil
	for _, p := range g.pending {
		drop = append(drop, p.take()...)
	}
	g.pending = nil
	g.past.drop()
	g.replay.drop()
	g.past, g.replay = nil, nil
	last := len(n.groups) == 0 && n.phase == nodeOpen
	var ls []link
	if last {
		if !n.passesOn() || !n.move(lingering) {
			n.move(nodeClosed)
		}
		all := make([]int, len(n.links))
		for peer := range all {
			all[peer] = peer
		}
		ls = n.linksTo(all, -1)
	}
	lingers, dumb, pasts := n.phase == lingering, n.dumb, n.pasts
	var open []link // also to ranks that have left and passed on what others said
	for _, l := range n.links {
		if l != nil {
			open = append(open, l)
		}
	}
	n.mu.Unlock()

	for i := range drop {
		drop[i].drop()
	}
	if !last {
		return
	}
	for _, p := range pasts {
		p.drop()
	}
	if dumb != nil {
		dumb()
	}
	for _, l := range ls {
		l.send(message{kind: kindBye})
	}
	if lingers { // and the process may end now
		deadline := time.Now().Add(closeGrace)
		for _, l := range ls {
			l.flush(deadline)
		}
		return
	}
	n.stop(open, closeGrace)
}
