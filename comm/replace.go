package comm

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// A process takes the place of a lost rank while the others go on:
//
//	process   ── who it is, its socket ──►  a rank in Replace
//	process   ◄── the group, a key ────────  that rank ── its socket, the key ──► every other rank
//	process   ◄══ a connection of each rank, proven by the key
//	process   ◄── what the group's calls have returned (past.go)
//
// A rank connects only when all that outlives losses knows of the last one (Group.OnLoss), so what that does comes before all that the
// process does.

const (
	maxReplacement = 16 << 10
	replaceKey     = 32
)

// replacement is what the process in a lost rank's place and the other ranks need to connect, in JSON.
type replacement struct {
	Group   uint64
	Name    string
	Epoch   int
	Seats   []int // of Config
	World   int   // ranks of the group that met
	Members []int // the group's, as ranks of the group that met
	Living  []int // of these, those that connect
	Rank    int   // the lost rank, of the group that met
	Addr    string
	Key     []byte
	Timeout time.Duration // of silence
	Within  time.Duration
}

// arrived is what each rank tells the process last.
type arrived struct {
	Groups []uint64 // that work, of which it has told the past
}

// Replace lets a process take the place of a rank that was lost, while the other ranks go on: they call nothing, and make no call of the group
// until Replace has returned. One of them calls it, any that has Config.Replaceable; a group survives the loss only where OnLoss is used. The
// process calls [Join] with Config.Replaces, before or after, and then makes the collective calls that the lost rank has made, with the same
// arguments: each returns what it returned then. So it opens heaps and communicators in memory that all ranks have mapped already, which is as
// the lost rank left it. The group is then what it was before the loss. A dispatcher with dispatch.Options.Masks goes on with it;
// communicators that cannot do without a rank do not.
//
// Of cfg, Addr says where this rank listens meanwhile, and Secret, JoinTimeout, PeerTimeout, Name and Logger are as for Join.
//
// The group is on one host, its ranks are processes, and the lost one has ended: one that is only silent is to be ended first. When no process
// has come within JoinTimeout or until ctx ends, the error is [ErrTimeout], and the group is as before. A process that fails on its way is lost
// as any rank is. If a rank is lost before the process has called OnLoss, its own end of the group fails, and it comes again.
func (g *Group) Replace(ctx context.Context, rank int, cfg Config) error {
	if err := g.replaceRank(ctx, rank, cfg); err != nil {
		return fmt.Errorf("comm: replace rank %d of %s: %w", rank, g.name, err)
	}
	return nil
}

func (g *Group) replaceRank(ctx context.Context, rank int, cfg Config) error {
	cfg.Rank, cfg.Size, cfg.LocalRank, cfg.LocalSize, cfg.Late = g.rank, len(g.members), 0, 0, false
	if err := cfg.validate(); err != nil {
		return err
	}
	if cfg.Size == 1 || rank < 0 || rank >= cfg.Size || rank == g.rank {
		return fmt.Errorf("%w: this is rank %d of %d", ErrInvalid, g.rank, cfg.Size)
	}
	at := cfg
	at.Rank, at.Replaces = 0, false // which leaves an ID in a file
	done, err := at.findPlace()
	if err != nil {
		return err
	}
	defer done()
	cfg.Addr, cfg.Secret = at.Addr, at.Secret
	if err := cfg.validateAddr(); err != nil {
		return err
	}
	peer, acks := g.members[rank], make(chan answer, 2*len(g.members))
	if err := g.n.expect(g, peer, acks); err != nil {
		return err
	}
	defer g.n.expectNone(peer)
	ctx, cancel := withJoinTimeout(ctx, &cfg)
	defer cancel()
	s, addr, err := g.await(ctx, rank, &cfg)
	if err != nil {
		return err
	}
	defer s.conn.Close()
	if until, ok := ctx.Deadline(); ok {
		s.conn.SetDeadline(until)
	}
	if err = g.seat(ctx, s, peer, addr, &cfg, acks); err != nil {
		_ = s.send(frameFail, encodeFail(failureOf(err, cfg.Rank))) // the process may have ended
		return err
	}
	g.log.Info("rank replaced", "group", g.name, "rank", g.rank, "replaced", rank)
	return nil
}

// expect checks that a peer can be replaced.
func (n *node) expect(g *Group, peer int, acks chan answer) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case g.closed || g.err != nil:
		return g.usable(opJoin, g.seq)
	case n.hosts != nil:
		return fmt.Errorf("%w: the ranks are on several hosts", ErrUnsupported)
	case g.past == nil:
		return fmt.Errorf("%w: this rank has joined without Config.Replaceable", ErrUnsupported)
	case g.past.incomplete != "":
		return fmt.Errorf("%w: the group's calls are not known: %s", ErrUnsupported, g.past.incomplete)
	case n.seats[peer] != nil:
		return fmt.Errorf("%w: another call replaces it already", ErrInvalid)
	}
	for end := time.Now().Add(newsGrace); ; {
		err := n.isVacant(peer)
		if err == nil || errors.Is(err, errUntold) {
			break
		}
		if time.Now().After(end) || !errors.Is(err, errNotLost) {
			return err
		}
		n.mu.Unlock() // who has started the process may know sooner
		time.Sleep(5 * time.Millisecond)
		n.mu.Lock()
	}
	if n.seats == nil {
		n.seats = make(map[int]chan answer)
	}
	n.seats[peer] = acks
	return nil
}

func (n *node) expectNone(peer int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.seats, peer)
}

// Both may be over a moment later.
var (
	errNotLost = errors.New("it is not lost")
	errUntold  = errors.New("it has just been lost")
)

// isVacant is an error where a peer is not known to have ended. The caller holds n.mu.
func (n *node) isVacant(peer int) error {
	l, ok := n.links[peer].(*sockLink)
	f := n.peers[peer].how
	switch {
	case f == nil && n.links[peer] == nil:
		return fmt.Errorf("%w: this rank is not connected with rank %d", ErrInvalid, peer)
	case f == nil:
		return fmt.Errorf("%w: rank %d: %w", ErrInvalid, peer, errNotLost)
	case f.before:
		return nil
	case !ok:
		return fmt.Errorf("%w: rank %d is no process", ErrUnsupported, peer)
	case f.code != failLeft && !f.ended && (l.pid == 0 || !errors.Is(unix.Kill(l.pid, 0), unix.ESRCH)):
		return fmt.Errorf("%w: rank %d was given up and its process, %d, may still run: end it first", ErrInvalid, peer, l.pid)
	case n.peers[peer].phase == peerLeaving:
		return fmt.Errorf("rank %d: %w", peer, errUntold)
	}
	return nil
}

// await waits for the process that takes a rank's place.
func (g *Group) await(ctx context.Context, rank int, cfg *Config) (s *session, addr string, err error) {
	var l net.ListenConfig
	ln, err := l.Listen(ctx, cfg.network(), cfg.Addr)
	if err != nil {
		return nil, "", err
	}
	defer ln.Close()
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	began := time.Now()
	me := identity{purpose: toReplace, rank: cfg.Rank, size: cfg.Size, peerTimeout: int64(cfg.PeerTimeout), majority: g.n.majority, host: cfg.host, name: cfg.Name, release: cfg.release}
	for {
		conn, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil {
				err = absent(ctx, cfg, began, []int{rank}, "no process has come to take its place")
			}
			return nil, "", err
		}
		s, c, err := receive(conn, rank, cfg, me)
		if err == nil {
			return s, c.addr, nil
		}
		conn.Close()
		g.log.Warn("connection refused", "rank", g.rank, "err", err)
	}
}

// receive looks at who has come.
func receive(conn net.Conn, rank int, cfg *Config, me identity) (s *session, c identity, err error) {
	if err = checkUser(conn); err != nil {
		return nil, c, err
	}
	conn.SetDeadline(time.Now().Add(cfg.handshakeTimeout))
	if s, err = greet(cfg.slow(conn), true, cfg.version, cfg.Secret, me); err != nil {
		return nil, c, err
	}
	if c, err = s.examine(cfg.version, me); err == nil && (c.rank != rank || c.name != me.name) {
		err = &errRefused{text: fmt.Sprintf("place: rank %d of group %q can be replaced here, the process wants to be rank %d of %q", rank, me.name, c.rank, c.name)}
	}
	var refused *errRefused
	if errors.As(err, &refused) {
		s.reject(refused.text)
	}
	return s, c, err
}

// seat has all ranks connect with the process, and tells it what the group's calls have returned.
func (g *Group) seat(ctx context.Context, s *session, peer int, addr string, cfg *Config, acks chan answer) error {
	n := g.n
	n.mu.Lock()
	r := replacement{ // of a group whose ranks all know the same losses
		Group: g.id, Name: g.name, Epoch: n.flight.Epoch(), Seats: n.flight.Seats, World: len(n.links), Members: g.members, Rank: peer, Addr: addr,
		Key: make([]byte, replaceKey), Timeout: cfg.PeerTimeout, Within: cfg.JoinTimeout,
	}
	r.Living = n.living()
	ls := n.linksTo(r.Living, -1)
	n.mu.Unlock()
	rand.Read(r.Key)
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if len(text) > maxReplacement {
		return fmt.Errorf("%w: %d ranks are too many", ErrUnsupported, r.World)
	}
	if err = s.send(frameAccept, text); err != nil {
		return err
	}
	for _, l := range ls {
		l.send(message{kind: kindReplace, data: text})
	}
	if err = n.connect(ctx, &r); err != nil {
		return err
	}
	if err = n.connected(ctx, acks, r.Living); err != nil {
		return err
	}
	return n.tellPast(&r, g)
}

// living are this rank and those that it is connected with, of the group that met. The caller holds n.mu.
func (n *node) living() (ranks []int) {
	for m := range n.links {
		if m == n.id || n.reaches(m) {
			ranks = append(ranks, m)
		}
	}
	return ranks
}

// answer is what a rank says that was to connect with the process: an error, or nothing.
type answer struct {
	from int
	err  []byte
}

// connected waits until all other ranks that live are connected with the process. It is an error that one is lost before: who is lost later has
// done its part.
func (n *node) connected(ctx context.Context, acks chan answer, living []int) error {
	look := time.NewTicker(newsGrace)
	defer look.Stop()
	waits := slices.DeleteFunc(slices.Clone(living), func(m int) bool { return m == n.id })
	for all := len(waits); len(waits) > 0; {
		select {
		case a := <-acks:
			if len(a.err) > 0 {
				return errors.New(string(a.err))
			}
			waits = slices.DeleteFunc(waits, func(m int) bool { return m == a.from })
		case <-look.C:
			n.mu.Lock()
			lost := slices.IndexFunc(waits, func(m int) bool { return n.peers[m].how != nil })
			n.mu.Unlock()
			if lost >= 0 && len(acks) == 0 { // else its answer may have come before
				return fmt.Errorf("%w: rank %d, while it was to connect", ErrPeerLost, waits[lost])
			}
		case <-ctx.Done():
			if len(acks) == 0 { // else one has come just now
				return fmt.Errorf("%w: %d of %d ranks are connected with the process", ErrTimeout, all-len(waits), all)
			}
		}
	}
	return nil
}

// replace connects this rank with a process that takes a lost rank's place, as another rank says, and answers that one.
func (n *node) replace(from int, m message) {
	n.mu.Lock()
	l := n.links[from]
	n.mu.Unlock()
	go func() {
		var r replacement
		err := json.Unmarshal(m.data, &r)
		if err == nil && (r.Rank < 0 || r.Rank >= len(n.links) || r.Rank == n.id || r.Within <= 0) {
			err = fmt.Errorf("%w replacement of rank %d", errMalformed, r.Rank)
		}
		answer := message{kind: kindReplaced, seq: uint64(r.Rank)}
		if err == nil {
			ctx, cancel := context.WithTimeout(context.Background(), r.Within)
			if err = n.connect(ctx, &r); err == nil {
				err = n.tellPast(&r, nil)
			}
			cancel()
		}
		if err != nil {
			answer.data = []byte(clip(fmt.Sprintf("rank %d: %v", n.id, err), maxText))
		}
		l.send(answer)
	}()
}

// connect connects this rank with the process, when all that outlives losses knows of the last one.
func (n *node) connect(ctx context.Context, r *replacement) error {
	for {
		n.mu.Lock()
		err := n.isVacant(r.Rank)
		for _, m := range n.living() {
			if err == nil && !slices.Contains(r.Living, m) {
				err = fmt.Errorf("%w: rank %d has come meanwhile: ranks are replaced one after the other", ErrMismatch, m)
			}
		}
		if err == nil {
			n.peers[r.Rank].move(peerAwaited)
		}
		n.mu.Unlock()
		if err == nil {
			break
		}
		if !sleep(ctx, 5*time.Millisecond) { // it has not heard of the loss, or not told of it
			return err
		}
	}
	defer func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if p := &n.peers[r.Rank]; p.phase == peerAwaited {
			p.move(peerGone)
		}
	}()
	cfg := Config{Rank: n.id, Size: r.World, PeerTimeout: r.Timeout, Secret: r.Key, Logger: n.log, delay: n.delay}
	if err := cfg.validate(); err != nil {
		return err
	}
	addrs := make([]string, r.World)
	addrs[r.Rank] = r.Addr
	m := &meshing{
		l: &Listener{cfg: cfg}, n: n, addrs: addrs, ctx: ctx,
		me:     identity{purpose: toMesh, rank: n.id, size: r.World, peerTimeout: int64(r.Timeout), majority: n.majority, gid: r.Group, release: cfg.release},
		linked: make(chan struct{}, 1),
	}
	return m.dialOnce(r.Rank)
}

// fill notes that a process has come in a lost peer's place. The caller holds n.mu.
func (n *node) fill(peer int) {
	n.peers[peer].how = nil
	for _, g := range n.groups {
		delete(g.left, peer)
		delete(g.lost, peer)
		delete(g.out, peer)
	}
	for fault := range n.noted {
		if fault.Culprit == peer {
			delete(n.noted, fault)
		}
	}
}

// hearReplaced takes the answer of a rank that was to connect with a process, or on that process the word that a rank has told it all.
func (n *node) hearReplaced(from int, m message) {
	n.mu.Lock()
	acks, a := n.seats[int(m.seq)], n.arrival
	n.mu.Unlock()
	switch {
	case a != nil:
		a.end(m.data)
	case acks != nil:
		select {
		case acks <- answer{from, m.data}:
		default: // more answers than ranks
		}
	}
}

// tellPast tells the process what the calls of its groups have returned: of whole, if this rank has called Replace of it, and of every other
// group of which this rank is the first that lives.
func (n *node) tellPast(r *replacement, whole *Group) error {
	n.mu.Lock()
	l := n.links[r.Rank]
	var end arrived
	var say []message
	var err error
	for _, g := range n.groups {
		first := slices.IndexFunc(g.members, func(m int) bool { return m != r.Rank && slices.Contains(r.Living, m) })
		if g.id == r.Group && g != whole || g != whole && (first < 0 || g.members[first] != n.id) {
			continue
		}
		if _, member := g.rankOf[r.Rank]; !member || g.err != nil || g.closed || g.past == nil || g.past.incomplete != "" {
			continue
		}
		end.Groups = append(end.Groups, g.id)
		for seq := uint64(1); seq < g.seq; seq++ {
			for _, m := range g.past.calls[seq] {
				m.kind, m.gid, m.seq, m.val = kindPast, g.id, seq, nil
				fds, derr := dupFDs(m.fds)
				m.fds, err = fds, cmp.Or(err, derr)
				say = append(say, m)
			}
		}
	}
	n.mu.Unlock()
	if err != nil {
		for i := range say {
			say[i].drop()
		}
		return err
	}
	for _, m := range say {
		l.send(m)
	}
	text, err := json.Marshal(end)
	if err == nil {
		l.send(message{kind: kindReplaced, data: text})
	}
	return err
}
