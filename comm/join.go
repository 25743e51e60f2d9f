package comm

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/observe"
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
// With Config.Late the process joins a group that runs already, see [Group.Admit],
// with Config.Replaces it takes a lost rank's place there, see [Group.Replace].
func Join(ctx context.Context, cfg Config) (g *Group, err error) {
	defer cfg.span(ctx)(&g, &err)
	if g, err = join(ctx, cfg); err != nil {
		return nil, joinError(err)
	}
	return g, nil
}

// span is a join with cfg. A process that is late has no number yet.
func (cfg *Config) span(ctx context.Context) (end func(made **Group, err *error)) {
	if cfg.Late {
		return span(ctx, opJoin.String(), cfg.Name, -1, 0)
	}
	return span(ctx, opJoin.String(), cfg.Name, cfg.Rank, cfg.Size)
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
	if cfg.Replaces {
		return takePlace(caller, cfg)
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

	m := newMeeting(&cfg, l.addr, cancel)
	defer m.tell()()
	meet, err := newRendezvous(ctx, caller, m)
	if err != nil {
		return nil, err
	}
	addrs, err := meet.addrs(ctx)
	l.cfg = cfg // one that is late knows its rank now, and the epoch
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
	// lacks says who is missing, on rank 0; what says what this rank waits for, on the others. Both are for those who look on.
	lacks func() (ranks []int, what string)
	what  string
}

// tell has those who look on see that this rank joins, until over is called.
func (m *meeting) tell() (over func()) {
	if m.cfg.Late { // it may wait for long, and that is no trouble
		return func() {}
	}
	observe.Listen(m.cfg.Logger)
	j := flight.Join{Rank: m.cfg.Rank, Size: m.cfg.Size, Group: m.cfg.Name, At: m.cfg.Addr, Since: m.began}
	return flight.Joining(func() flight.Join {
		m.mu.Lock()
		defer m.mu.Unlock()
		k := j
		if k.What = m.what; m.lacks != nil {
			k.Missing, k.What = m.lacks()
		}
		return k
	})
}

// waitsFor notes what this rank waits for.
func (m *meeting) waitsFor(what string) {
	m.mu.Lock()
	m.what = what
	m.mu.Unlock()
}

// newMeeting is for a rank that can be reached at addr.
func newMeeting(cfg *Config, addr string, cancel context.CancelCauseFunc) *meeting {
	me := identity{purpose: toRendezvous, rank: cfg.Rank, size: cfg.Size, late: cfg.Late, peerTimeout: int64(cfg.PeerTimeout), majority: cfg.Majority,
		gid: cfg.gid, host: cfg.host, addr: addr, name: cfg.Name, release: cfg.release}
	if cfg.Late {
		me.rank, me.size = cfg.LocalRank, cfg.LocalSize
	}
	return &meeting{
		cfg:    cfg,
		me:     me,
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
	stop := cutOff(ctx, conn.SetDeadline)
	if s, err = greet(conn, false, m.cfg.version, m.cfg.Secret, me); err != nil {
		conn.Close()
	}
	stop()
	return s, err
}

// cutOff has a deadline that has passed set when ctx ends. After stop, which reports whether that has happened, it is not set any more.
func cutOff(ctx context.Context, setDeadline func(time.Time) error) (stop func() bool) {
	cut := make(chan struct{})
	undo := context.AfterFunc(ctx, func() {
		_ = setDeadline(time.Unix(1, 0))
		close(cut)
	})
	return func() bool {
		if undo() {
			return false
		}
		<-cut
		return true
	}
}
