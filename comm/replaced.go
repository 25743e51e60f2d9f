package comm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// arrival is a process on its way into a lost rank's place.
type arrival struct {
	pasts map[uint64]*past // by group
	ends  chan arrived     // the last word of each rank
}

// end takes the last word of a rank.
func (a *arrival) end(text []byte) {
	var end arrived
	if json.Unmarshal(text, &end) == nil {
		select {
		case a.ends <- end:
		default: // more than one of a rank
		}
	}
}

// learnPast takes a part of a call of the past: those of each call come in the order of ranks.
func (n *node) learnPast(m message) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.arrival == nil {
		m.drop()
		return
	}
	p := n.arrival.pasts[m.gid]
	if p == nil {
		p = newPast()
		n.arrival.pasts[m.gid] = p
	}
	p.calls[m.seq] = append(p.calls[m.seq], m)
}

// takePlace is a join with Config.Replaces.
func takePlace(caller context.Context, cfg Config) (g *Group, err error) {
	if cfg.Late || cfg.Size == 1 {
		return nil, fmt.Errorf("%w: rank %d of %d with Replaces, late: %v", ErrInvalid, cfg.Rank, cfg.Size, cfg.Late)
	}
	l, err := listen(cfg)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	whole, stop := withJoinTimeout(caller, &cfg)
	defer stop()
	ctx, cancel := context.WithCancelCause(whole)
	defer cancel(nil)
	m := newMeeting(&cfg, l.addr, cancel)
	m.me.purpose, m.me.gid = toReplace, 0
	s, r, err := m.ask(ctx)
	if err != nil {
		return nil, err
	}
	defer s.conn.Close()
	defer cutOff(ctx, s.conn.SetDeadline)()
	return l.takePlace(whole, ctx, cancel, s, r)
}

// ask asks the rank that has called Replace for the place, as long as it is not there.
func (m *meeting) ask(ctx context.Context) (*session, *replacement, error) {
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		s, err := m.greetHost(ctx, m.me)
		var text []byte
		if err == nil {
			if _, err = s.examine(m.cfg.version, m.me); err == nil {
				text, err = s.verdict()
			}
			if err != nil {
				s.conn.Close()
			}
		}
		if err == nil {
			r := new(replacement)
			if err = json.Unmarshal(text, r); err == nil && r.fits(m.cfg) {
				s.conn.SetDeadline(time.Time{})
				return s, r, nil
			}
			s.conn.Close()
			return nil, nil, fmt.Errorf("%w answer of %d bytes about the place of rank %d of %d", errMalformed, len(text), m.cfg.Rank, m.cfg.Size)
		}
		if errors.Is(err, ErrMismatch) {
			return nil, nil, err
		}
		if !sleep(ctx, wait) {
			return nil, nil, m.absent(ctx, nil, fmt.Sprintf("no rank of the group was found at %s, where one calls Replace (last try: %v)", m.cfg.Addr, err))
		}
	}
}

// fits reports whether what the group says of the place can be.
func (r *replacement) fits(cfg *Config) bool {
	return len(r.Members) == cfg.Size && (len(r.Seats) == 0 || len(r.Seats) == r.World) && cfg.Rank < len(r.Members) && r.Members[cfg.Rank] == r.Rank && r.World <= MaxSize && len(r.Key) == replaceKey &&
		!slices.ContainsFunc(append(r.Living, r.Members...), func(m int) bool { return m < 0 || m >= r.World })
}

// takePlace has all ranks connect, and makes the group.
func (l *Listener) takePlace(whole, ctx context.Context, cancel context.CancelCauseFunc, s *session, r *replacement) (g *Group, err error) {
	cfg, began := &l.cfg, time.Now()
	n := newNode(r.Rank, r.World, cfg.Logger)
	n.delay, n.keeps, n.majority, n.flight.Job, n.flight.Seats, n.flight.PeerTimeout, n.epoch = cfg.delay, cfg.Replaceable, cfg.Majority, r.Group, r.Seats, r.Timeout, r.Epoch
	n.replaced = true
	n.arrival = &arrival{pasts: make(map[uint64]*past), ends: make(chan arrived, r.World)}
	for m := range r.World {
		if m != r.Rank && !slices.Contains(r.Living, m) {
			n.peers[m].move(peerGone)
			n.peers[m].how = &failure{code: failLost, culprit: m, detail: "it was lost before this process came", ended: true, before: true}
		}
	}
	if g, err = n.register(r.Group, r.Name, 0); err != nil {
		return nil, err
	}
	n.activate(g, r.Members)
	defer func() {
		if err != nil {
			n.arrival.drop()
			g.Close()
			g = nil
		}
	}()
	keyed := *cfg
	keyed.Secret, keyed.Size, keyed.Rank = r.Key, r.World, r.Rank
	m := &meshing{
		l: &Listener{cfg: keyed}, n: n, addrs: make([]string, r.World), ctx: ctx, replaces: true,
		me: identity{
			purpose: toMesh, rank: r.Rank, size: r.World, peerTimeout: int64(cfg.PeerTimeout), majority: cfg.Majority, gid: r.Group, host: cfg.host, release: cfg.release,
		},
		linked: make(chan struct{}, r.World), fatal: make(chan error, 1),
	}
	m.wg.Go(func() { m.accept(&door{ln: l.ln, unproven: newUnproven(&keyed)}) })
	m.wg.Go(func() { // what the rank that listens has to say: an error, or nothing
		if kind, body, err := s.recv(); err == nil && kind == frameFail {
			if f, err := decodeFail(body); err == nil {
				cancel(joinFailed(f))
			}
		}
	})
	var groups []uint64
	for heard := 0; err == nil && heard < len(r.Living); heard++ {
		select {
		case end := <-n.arrival.ends:
			groups = append(groups, end.Groups...)
		case <-g.done:
			err = g.Err()
		case <-ctx.Done():
			if len(n.arrival.ends) > 0 { // one has come just now
				heard--
				continue
			}
			missing := slices.DeleteFunc(m.missing(), func(m int) bool { return !slices.Contains(r.Living, m) })
			if err = absent(ctx, cfg, began, missing, fmt.Sprintf("ranks %v have not connected", missing)); whole.Err() == nil {
				err = context.Cause(ctx)
			}
		}
	}
	l.Close()
	s.conn.Close()
	m.wg.Wait()
	if err != nil {
		return g, err
	}
	n.remember(groups)
	cfg.Logger.Info("joined in the place of a lost rank", "group", g.name, "rank", g.rank, "size", len(g.members))
	return g, nil
}

// remember has the groups that work know their past. The caller has made one, and makes the others.
func (n *node) remember(groups []uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pasts = make(map[uint64]*past, len(groups))
	for _, id := range groups {
		n.pasts[id] = n.arrival.pasts[id]
		if n.pasts[id] == nil {
			n.pasts[id] = newPast()
		}
		delete(n.arrival.pasts, id)
	}
	n.arrival.drop()
	n.arrival = nil
	for _, g := range n.groups {
		g.replay = n.pasts[g.id]
	}
}

// recall gives a subgroup its past that the lost rank was a member of. Where there is none it has ended.
func (n *node) recall(sub *Group) {
	n.mu.Lock()
	p, works := n.pasts[sub.id]
	sub.replay = p
	n.mu.Unlock()
	if !works {
		sub.failed(&failure{code: failAborted, culprit: n.id, cause: errors.New("it has ended before this process came in the place of a lost rank")}, false)
	}
}

func (a *arrival) drop() {
	for _, p := range a.pasts {
		p.drop()
	}
}
