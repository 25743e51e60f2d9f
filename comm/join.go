package comm

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"
)

// Join meets the other ranks, one process each, and returns when all are
// connected. Rank 0 listens at Config.Addr until then; the others find it there,
// in whatever order they start, learn each other's unix sockets, and connect
// all to all. Of ranks on several hosts (see Config.LocalSize) those of one host
// are connected so, and the first of each host to the first of all others, by
// TCP connections over which everything is signed.
//
// Config.JoinTimeout and ctx bound the whole; the error is then [ErrTimeout] and
// names the ranks that are missing. Ranks that were configured differently make
// the join fail for all with [ErrMismatch] and both values. So does, with
// [ErrPeerLost], a rank that dies once all have met; before, it may come back.
// Strangers that connect are turned away and change nothing.
//
// A join that has failed can be repeated. Rank 0 keeps its port until every
// rank has been told once why, in the background and for JoinTimeout or 10
// seconds at most: so ranks that start late learn it at once. A repeated Join
// takes the port over, and the end of ctx gives it back.
//
// With Config.Late the process joins a group that runs already, see [Group.Admit].
func Join(ctx context.Context, cfg Config) (*Group, error) {
	g, err := join(ctx, cfg)
	if err != nil {
		return nil, joinError(err)
	}
	return g, nil
}

// join has two steps. In the rendezvous every rank tells rank 0 its address and
// gets everybody's; in the mesh all connect to all. The rendezvous lasts until the
// mesh stands, and carries the news if one of the ranks fails.
func join(caller context.Context, cfg Config) (*Group, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	done, err := cfg.findPlace()
	if err != nil {
		return nil, err
	}
	defer done()
	if err := cfg.validateAddr(); err != nil {
		return nil, err
	}
	l, err := listen(cfg)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	if cfg.Size == 1 && !cfg.Late {
		return l.join(caller, []string{l.addr}, nil)
	}
	whole, stop := withJoinTimeout(caller, &cfg)
	defer stop()
	if err := l.openToHosts(whole); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(whole) // ends when the join fails elsewhere
	defer cancel(nil)

	meet, err := newRendezvous(ctx, caller, newMeeting(&cfg, l.addr, cancel))
	if err != nil {
		return nil, err
	}
	l.cfg = cfg // one that is late knows its rank now
	addrs, err := meet.addrs(ctx)
	var g *Group
	if err != nil {
		err = meet.giveUp(err)
	} else {
		g, err = l.join(ctx, addrs, meet.giveUp)
	}
	meet.end(caller)
	return g, err
}

// rendezvous is one side of it: rank 0's, a host, or another's, a guest.
type rendezvous interface {
	// addrs waits for the addresses of all ranks.
	addrs(ctx context.Context) ([]string, error)
	// giveUp tells the others that this rank cannot go on, because of err. It
	// returns why there will be no group: others may know better.
	giveUp(err error) error
	// end ends the rendezvous, whose outcome this rank knows. After a failure rank
	// 0's port stays open, see Join.
	end(caller context.Context)
}

func newRendezvous(ctx, caller context.Context, m *meeting) (rendezvous, error) {
	if m.me.rank == 0 && !m.me.late {
		return newHost(ctx, caller, m)
	}
	return newGuest(ctx, m)
}

// meeting is what the two sides of a rendezvous have in common.
type meeting struct {
	cfg    *Config
	me     identity
	began  time.Time
	cancel context.CancelCauseFunc

	listen func(ctx context.Context) (net.Listener, error) // at Config.Addr
	dial   func(ctx context.Context) (net.Conn, error)     // Config.Addr

	mu    sync.Mutex
	phase joinPhase
	why   *failure // not nil once the phase has been failed
}

// newMeeting is for a rank that can be reached at addr.
func newMeeting(cfg *Config, addr string, cancel context.CancelCauseFunc) *meeting {
	return &meeting{
		cfg: cfg,
		me: identity{purpose: toRendezvous, rank: cfg.Rank, size: cfg.Size, late: cfg.Late, peerTimeout: int64(cfg.PeerTimeout),
			gid: cfg.gid, host: cfg.host, addr: addr, name: cfg.Name, release: cfg.release},
		began:  time.Now(),
		cancel: cancel,
		listen: func(ctx context.Context) (net.Listener, error) {
			var lc net.ListenConfig
			return lc.Listen(ctx, cfg.network(), cfg.Addr)
		},
		dial: func(ctx context.Context) (net.Conn, error) {
			if err := cfg.readPlace(); err != nil {
				return nil, err
			}
			var d net.Dialer
			return d.DialContext(ctx, cfg.network(), cfg.Addr)
		},
	}
}

// enter has the join go on to another phase, if it may. It reports whether it did.
// The caller holds mu.
func (m *meeting) enter(next joinPhase) bool {
	if !m.phase.may(next) {
		return false
	}
	m.phase = next
	return true
}

func (m *meeting) failure() *failure {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.why
}

// noteFailure ends the join of this rank. It reports whether this is news.
func (m *meeting) noteFailure(f *failure) bool {
	m.mu.Lock()
	first := m.enter(failed)
	if first {
		m.why = f
	}
	m.mu.Unlock()
	if first {
		m.cancel(joinFailed(f))
	}
	return first
}

// absent is the error of this rank when ctx ended while it waited for ranks.
func (m *meeting) absent(ctx context.Context, ranks []int, what string) error {
	return absent(ctx, m.cfg, m.began, ranks, what)
}

// logWaiting says for what this rank waits.
func (m *meeting) logWaiting(what string) {
	m.cfg.Logger.Info("waiting", "rank", m.me.rank, "to join", what, "waited", time.Since(m.began).Round(time.Second))
}

// severed is the failure of a rank whose connection has ended during the join.
func severed(rank int, err error) *failure {
	return &failure{code: failLost, culprit: rank, severed: true, detail: fmt.Sprintf("its connection broke off during the join: %v", err)}
}

// greetHost connects to rank 0 and greets it as me.
func (m *meeting) greetHost(ctx context.Context, me identity) (s *session, err error) {
	conn, err := m.dial(ctx)
	if err != nil {
		return nil, err
	}
	if err := checkUser(conn); err != nil {
		conn.Close()
		return nil, err
	}
	conn = m.cfg.slow(conn)
	conn.SetDeadline(time.Now().Add(m.cfg.handshakeTimeout))
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if s, err = greet(conn, false, m.cfg.version, m.cfg.Secret, me); err != nil {
		conn.Close()
	}
	return s, err
}
