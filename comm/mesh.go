package comm

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// meshing is a mesh under construction.
type meshing struct {
	l      *Listener
	n      *node
	me     identity
	addrs  []string
	ctx    context.Context
	linked chan struct{} // one for every link
	fatal  chan error
	key    []byte // what connections between hosts prove
	// replaces says that this process takes a lost rank's place, and all connect to it.
	replaces bool
	wg       sync.WaitGroup

	refused atomic.Int64 // connections that were turned away
}

// door is where ranks connect to this one.
type door struct {
	ln       net.Listener
	unproven unproven
	abroad   bool // for other hosts
}

// join builds the mesh. report, which may be nil, tells others why it cannot be
// and knows better perhaps; it is called before this rank is out of reach.
func (l *Listener) join(ctx context.Context, addrs []string, report func(error) error) (*Group, error) {
	defer l.Close()
	began := time.Now()
	cfg := &l.cfg
	if len(addrs) != cfg.Size {
		return nil, mismatched("%d addresses for %d ranks", len(addrs), cfg.Size)
	}
	if addrs[cfg.Rank] != l.addr {
		return nil, mismatched("rank %d has the address %q, the list says %q", cfg.Rank, l.addr, addrs[cfg.Rank])
	}
	gid := meshID(addrs)
	n := newNode(cfg.Rank, cfg.Size, cfg.Logger)
	n.delay, n.keeps, n.majority = cfg.delay, cfg.Replaceable, cfg.Majority
	n.flight.Job, n.flight.Seats, n.flight.PeerTimeout, n.epoch = gid, cfg.seats, cfg.PeerTimeout, cfg.epoch
	if l.tcp != nil {
		n.door = l.tcp.Addr().String()
	}
	var err error
	if n.hosts, err = hostsOf(addrs, cfg); err != nil {
		return nil, err
	}
	g, err := n.register(gid, cfg.Name, 0)
	if err != nil {
		return nil, err
	}
	members := make([]int, cfg.Size)
	for r := range members {
		members[r] = r
	}
	g.seq = 0 // nobody else has it yet
	n.activate(g, members)

	ctx, cancel := context.WithCancel(ctx)
	m := &meshing{
		l: l, n: n, addrs: addrs, ctx: ctx,
		me:     identity{purpose: toMesh, rank: cfg.Rank, size: cfg.Size, peerTimeout: int64(cfg.PeerTimeout), majority: cfg.Majority, gid: gid, host: cfg.host, release: cfg.release, spans: n.hosts != nil},
		linked: make(chan struct{}, cfg.Size),
		fatal:  make(chan error, 1),
		key:    meshKey(cfg.Secret, addrs),
	}
	m.wg.Go(func() { m.accept(&door{ln: l.ln, unproven: newUnproven(cfg)}) })
	if n.hosts != nil && n.hosts.leads(cfg.Rank) {
		m.wg.Go(func() { m.accept(&door{ln: l.tcp, unproven: newUnproven(cfg), abroad: true}) })
	}
	for r := range cfg.Rank {
		if m.direct(r) {
			m.wg.Go(func() { m.dial(r) })
		}
	}
	err = m.wait(g, began)
	if err == nil {
		l.Close()
		n.addRelays()
		_, err = g.exchange(ctx, opJoin, message{})
		var why *PeerError
		if err != nil && errors.As(context.Cause(ctx), &why) {
			err = why // the join has failed elsewhere; who was waited for just then is not to blame
		}
	}
	if err != nil {
		g.failed(failureOf(err, cfg.Rank), true)
		if report != nil {
			err = report(err)
		}
	}
	l.Close()
	cancel()
	m.wg.Wait()
	if err != nil {
		g.Close()
		return nil, err
	}
	g.warnOfStrangers(cfg)
	cfg.Logger.Info("joined", "group", g.name, "rank", cfg.Rank, "size", cfg.Size)
	return g, nil
}

// wait returns when every peer is linked, or none of them will be.
func (m *meshing) wait(g *Group, began time.Time) error {
	fatal := m.fatal
	var refused error
	var grace <-chan time.Time
	say := time.NewTicker(sayEvery)
	defer say.Stop()
	for links := 0; links < m.directs(); {
		select {
		case <-m.linked:
			links++
		case refused = <-fatal:
			if !errors.Is(refused, ErrPeerLost) {
				return refused
			}
			fatal, grace = nil, time.After(refusalGrace)
		case <-grace:
			return refused
		case <-g.Done():
			return g.Err()
		case <-say.C:
			m.n.log.Info("waiting", "rank", m.me.rank, "to join", fmt.Sprintf("ranks %v have not connected", m.missing()), "waited", time.Since(began).Round(time.Second))
		case <-m.ctx.Done():
			missing := m.missing()
			switch {
			case g.Err() != nil:
				return g.Err()
			case len(missing) == 0: // the last one came just now
				return nil
			}
			return absent(m.ctx, &m.l.cfg, began, missing,
				fmt.Sprintf("ranks %v%s have not connected (not started, stopped, or ended early)", missing, m.n.hosts.where(missing)))
		}
	}
	return nil
}

func (m *meshing) missing() []int {
	m.n.mu.Lock()
	defer m.n.mu.Unlock()
	var out []int
	for r, l := range m.n.links {
		if l == nil && r != m.me.rank && m.direct(r) {
			out = append(out, r)
		}
	}
	return out
}

// direct says that this rank and another have a connection.
func (m *meshing) direct(rank int) bool {
	return m.n.hosts == nil || m.n.hosts.direct(m.me.rank, rank)
}

// directs is to how many ranks this one has a connection.
func (m *meshing) directs() (n int) {
	for r := range m.addrs {
		if r != m.me.rank && m.direct(r) {
			n++
		}
	}
	return n
}

// abroad says that a rank is on another host.
func (m *meshing) abroad(rank int) bool {
	return m.n.hosts != nil && m.n.hosts.of[rank] != m.n.hosts.Host
}

func (m *meshing) fail(err error) {
	select {
	case m.fatal <- err:
	default:
	}
}

// accept takes the connections of higher ranks, and of whoever else finds the
// door: each is looked at by a goroutine of its own, so that a silent one
// holds up nobody.
func (m *meshing) accept(d *door) {
	var lack shortage
	for {
		conn, err := d.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err := lack.lasts(m.me.rank, err); err != nil {
			m.fail(err)
			return
		}
		if err != nil { // out of descriptors, say
			m.n.log.Warn("accept", "rank", m.me.rank, "err", err)
			d.unproven.closeOldest()
			if !sleep(m.ctx, time.Millisecond) {
				return
			}
			continue
		}
		if err := checkUser(conn); err != nil { // and takes no place of a rank's
			m.refuse(conn, err)
			continue
		}
		d.unproven.add(conn)
		m.wg.Go(func() {
			err := m.admit(d, conn)
			d.unproven.remove(conn)
			if err != nil {
				m.refuse(conn, err)
			}
		})
	}
}

func (m *meshing) refuse(conn net.Conn, err error) {
	conn.Close()
	m.n.log.Warn("connection refused", "rank", m.me.rank, "err", err, "refused", m.refused.Add(1))
}

func (m *meshing) admit(d *door, conn net.Conn) error {
	conn.SetDeadline(time.Now().Add(m.l.cfg.handshakeTimeout))
	stop := context.AfterFunc(m.ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	s, c, err := m.examine(conn, true, d.abroad, m.me)
	if err != nil {
		var refused *errRefused
		if errors.As(err, &refused) && refused.proven {
			m.fail(refused)
		}
		return err
	}
	m.n.mu.Lock()
	known := m.n.links[c.rank] != nil
	m.n.mu.Unlock()
	if c.to != m.me.rank || c.rank <= m.me.rank && !m.replaces || known || !m.direct(c.rank) || m.abroad(c.rank) != d.abroad {
		err := fmt.Errorf("rank %d connects to rank %d, which is %d and has its connection: %v", c.rank, c.to, m.me.rank, known)
		s.reject(err.Error())
		return err
	}
	if !d.unproven.remove(conn) {
		return errCrowded // and tries again: it has not been accepted
	}
	if err := s.send(frameAccept, nil); err != nil {
		return err
	}
	return m.start(c.rank, s, conn, stop)
}

// examine greets the other side and compares the cards.
func (m *meshing) examine(conn net.Conn, server, abroad bool, me identity) (*session, identity, error) {
	cfg := &m.l.cfg
	secret := cfg.Secret
	if abroad {
		secret = m.key
	}
	s, err := greet(cfg.slow(conn), server, cfg.version, secret, me)
	if err != nil {
		return nil, identity{}, err
	}
	c, err := s.examine(cfg.version, me)
	if err != nil {
		var refused *errRefused
		if server && errors.As(err, &refused) {
			s.reject(refused.text)
		}
		return nil, identity{}, err
	}
	return s, c, nil
}

// start makes a link of a connection, which the end of m.ctx must not touch
// any more.
func (m *meshing) start(rank int, s *session, conn net.Conn, stop func() bool) error {
	if !stop() {
		return ctxErr(m.ctx)
	}
	if m.abroad(rank) {
		conn = newSealedConn(conn, s)
	}
	if !startLink(m.n, rank, conn, m.l.cfg.PeerTimeout) {
		return fmt.Errorf("rank %d is connected already, or the join is over", rank)
	}
	m.linked <- struct{}{}
	return nil
}

// dial connects to a lower rank. All sockets are open before their addresses
// are known, so nobody has to be waited for.
func (m *meshing) dial(rank int) {
	var lack shortage
	for {
		err := m.dialOnce(rank)
		if err := lack.lasts(m.me.rank, err); err != nil {
			m.fail(err)
			return
		}
		switch {
		case err == nil || m.ctx.Err() != nil:
			return
		case errors.Is(err, ErrMismatch):
			m.fail(err)
			return
		case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT):
			m.fail(joinFailed(&failure{code: failLost, culprit: rank, detail: "its socket is closed: " + err.Error()}))
			return
		}
		m.n.log.Info("connect again", "rank", m.me.rank, "peer", rank, "err", err)
		if !sleep(m.ctx, 5*time.Millisecond) {
			return
		}
	}
}

func (m *meshing) dialOnce(rank int) (err error) {
	var d net.Dialer
	to, err := parseAddress(m.addrs[rank])
	if err != nil {
		return err
	}
	network, where := "unix", to.socket
	if m.abroad(rank) {
		network, where = "tcp", to.tcp
	}
	conn, err := d.DialContext(m.ctx, network, where)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	stop := context.AfterFunc(m.ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := checkUser(conn); err != nil {
		return mismatched("rank %d: %v", rank, err)
	}
	me := m.me
	me.to = rank
	s, _, err := m.examine(conn, false, m.abroad(rank), me)
	if err != nil {
		return err
	}
	if _, err := s.verdict(); err != nil {
		return err
	}
	return m.start(rank, s, conn, stop)
}

// meshID is the number of the group that meets at these addresses.
func meshID(addrs []string) uint64 {
	var b []byte
	for _, a := range addrs {
		b = appendString(b, a)
	}
	sum := sha256.Sum256(b)
	return binary.LittleEndian.Uint64(sum[:])
}

// ended reports whether ctx is over. A call with its deadline may end a moment before it.
func ended(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// sleep reports whether ctx lasted.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
