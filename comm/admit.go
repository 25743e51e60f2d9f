package comm

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"
)

// Admit makes a larger group: the ranks of this one, in their order, and n
// newcomers after them, in the order in which they come. All ranks call it, at
// a place where they have nothing under way, with the same n and cfg: a step
// boundary, say. A newcomer is a process of its own that calls [Join] with
// Config.Late and otherwise the same cfg; it may do so before or after.
//
// A group on several hosts takes whole hosts: n is a multiple of its ranks a
// host, Addr is a port, and newcomers give their LocalRank and LocalSize. Hosts
// come in the order of their first newcomers, and the ranks of each are in the
// order of LocalRank. Hosts then still have equally many ranks: else the error
// on every rank, newcomers included, is [ErrMismatch] with both numbers. A group
// on one host takes others in too, if cfg.LocalSize is its size.
//
// Of cfg, Addr says where this group's rank 0 listens meanwhile, and Secret,
// JoinTimeout, PeerTimeout, Name and Logger are as for Join. Majority is this
// group's, and the newcomers' has to be the same. Name tells the groups apart
// that newcomers may ask for; it is not this group's own, which names how it was
// made.
//
// The new group has connections of its own and is closed by itself. This group
// stays as it is, and is still to be closed. When no newcomer comes within
// JoinTimeout, or until ctx ends, the error on every rank is [ErrTimeout] and
// names the first that is missing; this group then works as before, and Admit
// can be called again.
func (g *Group) Admit(ctx context.Context, n int, cfg Config) (next *Group, err error) {
	defer g.span(ctx, opAdmit.String())(&next, &err)
	if next, err = g.admit(ctx, n, cfg); err != nil {
		if pe, ok := err.(*PeerError); ok {
			return nil, withOp(pe, opAdmit.String(), pe.Epoch)
		}
		return nil, fmt.Errorf("comm: admit: %w", err)
	}
	return next, nil
}

func (g *Group) admit(ctx context.Context, n int, cfg Config) (*Group, error) {
	if g.topology.Hosts > 1 && !g.n.hosts.relayed {
		return nil, fmt.Errorf("%w: the hosts of %s are those of LocalOptions.PerHost", ErrUnsupported, g.name)
	}
	refused := cfg.admitting(g, n)
	data := binary.LittleEndian.AppendUint64(nil, uint64(n))
	data = binary.LittleEndian.AppendUint64(data, uint64(cfg.PeerTimeout))
	perHost := 0
	if cfg.maySpan() {
		perHost = cfg.LocalSize
	}
	data = binary.LittleEndian.AppendUint64(data, uint64(perHost))
	data = appendString(appendString(data, cfg.Addr), cfg.Name)
	m := message{data: data}
	if refused != nil {
		m.poison = refused.Error() // the others get it as this rank's error
	}
	c, err := g.startCall(opAdmit)
	if err != nil {
		return nil, err
	}
	// How it ended is agreed on apart. Others may begin with that before this rank does.
	verdict, err := g.n.register(groupID(g.id, "admitted", c.seq, 0), g.name, 0)
	if err != nil {
		g.giveUp(c)
		return nil, err
	}
	defer verdict.Close()
	g.n.activate(verdict, g.members)
	parts, err := g.finishCall(ctx, c, m)
	switch {
	case refused != nil:
		return nil, refused
	case err != nil:
		return nil, err
	}
	for r, p := range parts {
		if string(p.data) != string(parts[0].data) {
			return nil, fmt.Errorf("%w: %s and %s", ErrMismatch, admission(0, parts[0].data), admission(r, p.data))
		}
	}
	cfg.gid, cfg.epoch, cfg.seats = groupID(g.id, "admit", c.seq, 0), g.n.flight.Epoch()+1, g.seats(n)
	whole, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer g.OnFailure(func(err error) { cancel(err) })()
	next, err := join(whole, cfg)
	if err == nil && ctx.Err() == nil {
		cfg.Logger.Info("newcomers admitted", "group", g.name, "rank", g.rank, "size", next.Size())
	}
	failed, verr := verdict.settle(ctx, err != nil)
	if verr == nil && !failed {
		next.n.flight.Succeeds(g.n.flight)
		return next, nil // which may have lost ranks by now, as all will find
	}
	if next != nil {
		next.Close()
	}
	switch {
	case g.Err() != nil:
		return nil, g.Err()
	case err != nil:
		return nil, joinError(err)
	case verr != nil:
		return nil, verr
	}
	return nil, fmt.Errorf("%w: a rank could not connect to all others", ErrAborted)
}

// admitting makes cfg that of a rank of g in a join with n newcomers.
func (cfg *Config) admitting(g *Group, n int) error {
	size, t := len(g.members), &g.topology
	whole := t.Hosts > 1 || cfg.LocalSize == size && n%size == 0 && cfg.network() == "tcp"
	cfg.Rank, cfg.Size, cfg.LocalRank, cfg.LocalSize = g.rank, size+n, t.Local, 0
	if whole {
		cfg.LocalSize = t.PerHost
	}
	cfg.members, cfg.onHosts, cfg.Majority = size, t.Hosts > 1, g.n.majority
	switch {
	case n < 1 || cfg.Late:
		return fmt.Errorf("%w: %d newcomers, late: %v", ErrInvalid, n, cfg.Late)
	case whole && t.PerHost == 0:
		return fmt.Errorf("%w: %s: a group that admits hosts has equally many on each", ErrInvalid, t.counts())
	case whole && n%t.PerHost != 0:
		return fmt.Errorf("%w: %d newcomers, and %d ranks a host: they come in whole hosts", ErrInvalid, n, t.PerHost)
	case t.Hosts > 1 && cfg.network() != "tcp":
		return fmt.Errorf("%w: addr %q: ranks of several hosts meet on a port", ErrInvalid, cfg.Addr)
	}
	if err := cfg.validate(); err != nil {
		return err
	}
	return cfg.validateAddr()
}

// settle has the ranks that are left agree on whether a joint action has failed:
// it has if one of them says so. All get the same answer, also when ranks are
// lost meanwhile.
func (g *Group) settle(ctx context.Context, failed bool) (bool, error) {
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), settleGrace)
		defer cancel()
	}
	g.n.mu.Lock()
	g.shrink.extra = failed
	g.n.mu.Unlock()
	dec, err := g.agree(ctx)
	if err != nil {
		return true, err
	}
	g.sendToRanks(message{kind: kindShrink, gid: g.id, decided: true, data: dec.encode()}, nil)
	return dec.has(len(g.members)), nil
}

// admission is what a rank has called Admit with, in words.
func admission(rank int, b []byte) string {
	if len(b) < 24 {
		return fmt.Sprintf("rank %d: malformed", rank)
	}
	addr, rest, _ := takeString(b[24:])
	name, _, _ := takeString(rest)
	text := fmt.Sprintf("rank %d admits %d newcomers to %q at %s, peer timeout %v", rank, binary.LittleEndian.Uint64(b), name, addr,
		time.Duration(binary.LittleEndian.Uint64(b[8:])))
	if perHost := binary.LittleEndian.Uint64(b[16:]); perHost > 0 {
		text += fmt.Sprintf(", %d ranks a host", perHost)
	}
	return text
}
