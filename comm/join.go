package comm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Join meets the other ranks, one process each, and returns when all are
// connected. Rank 0 listens at Config.Addr until then; the others find it there,
// in whatever order they start, learn each other's unix sockets, and connect
// all to all.
//
// Config.JoinTimeout and ctx bound the whole; the error then names the ranks
// that are missing. Ranks that were configured differently make the join fail
// for all with [ErrMismatch] and both values. So does, with [ErrPeerLost], a
// rank that dies once all have met; before, it may come back. Strangers that
// connect are turned away and change nothing.
func Join(ctx context.Context, cfg Config) (*Group, error) {
	g, err := join(ctx, cfg)
	if err != nil {
		return nil, joinError(err)
	}
	return g, nil
}

func join(whole context.Context, cfg Config) (*Group, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if err := cfg.validateAddr(); err != nil {
		return nil, err
	}
	l, err := Listen(cfg)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	if cfg.Size == 1 {
		return l.join(whole, []string{l.addr})
	}
	whole, stop := withJoinTimeout(whole, &cfg)
	defer stop()
	ctx, cancel := context.WithCancelCause(whole) // ends when the join fails elsewhere
	defer cancel(nil)

	m := meeting{
		cfg:    &cfg,
		me:     card{purpose: toRendezvous, rank: cfg.Rank, size: cfg.Size, peerTimeout: int64(cfg.PeerTimeout), host: hostID(), addr: l.addr},
		cancel: cancel,
	}
	var meet interface {
		addrs(ctx context.Context) ([]string, error)
		fail(f *failure)
		linger(ctx context.Context)
		done()
	}
	if cfg.Rank == 0 {
		var h *host
		h, err = newHost(ctx, whole, &m)
		meet = h
	} else {
		meet, err = newGuest(ctx, &m)
	}
	if err != nil {
		return nil, err
	}
	addrs, err := meet.addrs(ctx)
	var g *Group
	if err == nil {
		g, err = l.join(ctx, addrs)
	}
	if err == nil {
		meet.done()
		return g, nil
	}
	if why := m.failure(); why != nil {
		err = why // the reason, not what followed from it
	} else {
		meet.fail(failureOf(err, cfg.Rank))
	}
	meet.linger(whole)
	meet.done()
	return nil, err
}

// meeting is what the two sides of a rendezvous have in common.
type meeting struct {
	cfg    *Config
	me     card
	cancel context.CancelCauseFunc

	mu  sync.Mutex
	why error // the join has failed, as others say
}

func (m *meeting) failure() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.why
}

// failed ends the join of this rank. It reports whether this is news.
func (m *meeting) failed(f *failure) bool {
	m.mu.Lock()
	first := m.why == nil
	if first {
		m.why = failureError(f)
	}
	m.mu.Unlock()
	m.cancel(m.why)
	return first
}

// failureOf puts an error of a join into words for the others.
func failureOf(err error, rank int) *failure {
	var pe *PeerError
	if errors.As(err, &pe) && pe.Rank >= 0 && errors.Is(err, ErrPeerLost) {
		return &failure{code: failLost, culprit: pe.Rank, detail: detailOf(pe.Err, ErrPeerLost)}
	}
	if errors.Is(err, ErrMismatch) {
		return &failure{code: failMismatch, culprit: rank, detail: detailOf(err, ErrMismatch)}
	}
	return &failure{code: failAborted, culprit: rank, cause: err}
}

// detailOf is the text of an error without the condition it begins with.
func detailOf(err, condition error) string {
	return strings.TrimPrefix(err.Error(), condition.Error()+": ")
}

func failureError(f *failure) error {
	var err error
	switch f.code {
	case failMismatch:
		return wrapDetail(ErrMismatch, f.detail) // it names the ranks
	case failAborted:
		err = fmt.Errorf("%w: %w", ErrAborted, f.cause)
	default:
		err = wrapDetail(ErrPeerLost, f.detail)
	}
	return &PeerError{Rank: f.culprit, Err: err}
}

// host is rank 0's side of the rendezvous.
type host struct {
	*meeting
	ln      net.Listener
	wg      sync.WaitGroup
	changed chan struct{}

	spreading sync.Mutex // held from when a failure is visible here until the others have been told

	// Guarded by meeting.mu.
	told    int // ranks that came and know how it ended, after a failure
	seats   []*seat
	met     bool // all have come, and know of each other
	over    bool
	conns   map[net.Conn]struct{}
	refused []string // why, of those who were turned away
}

// seat is a rank that has come.
type seat struct {
	s    *session
	addr string
}

// errLate means that a rank came when the join had failed already.
var errLate = errors.New("the join has failed")

// lingerFor is how long rank 0 stays after ranks were found to differ, to tell
// those that are still to come.
const lingerFor = 2 * time.Second

// maxRefused is how many of those turned away are named in an error.
const maxRefused = 3

func newHost(ctx, whole context.Context, m *meeting) (*host, error) {
	ln, err := listenRendezvous(ctx, m.cfg.Addr)
	if err != nil {
		return nil, err
	}
	h := &host{
		meeting: m,
		ln:      ln,
		changed: make(chan struct{}, 1),
		seats:   make([]*seat, m.cfg.Size),
		conns:   make(map[net.Conn]struct{}),
	}
	h.seats[0] = &seat{addr: m.me.addr}
	h.wg.Go(func() { h.accept(whole) })
	return h, nil
}

// listenRendezvous waits a little for the port: a rank 0 that is being started
// again may find it still held by its former self.
func listenRendezvous(ctx context.Context, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	for deadline := time.Now().Add(3 * time.Second); ; {
		ln, err := lc.Listen(ctx, "tcp", addr)
		if err == nil {
			return ln, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) || !sleep(ctx, 50*time.Millisecond) {
			return nil, fmt.Errorf("rank 0 cannot listen: %w", err)
		}
	}
}

func (h *host) accept(ctx context.Context) {
	for {
		conn, err := h.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			h.cfg.Logger.Warn("accept", "err", err)
			if !sleep(ctx, 10*time.Millisecond) {
				return
			}
			continue
		}
		h.mu.Lock()
		over := h.over
		if !over {
			h.conns[conn] = struct{}{}
		}
		h.mu.Unlock()
		if over {
			conn.Close()
			return
		}
		h.wg.Go(func() {
			h.serve(ctx, conn)
			h.mu.Lock()
			delete(h.conns, conn)
			h.mu.Unlock()
			conn.Close()
		})
	}
}

// serve deals with one connection, from hello to end.
func (h *host) serve(ctx context.Context, conn net.Conn) {
	conn.SetDeadline(time.Now().Add(h.cfg.handshakeTimeout))
	s, c, err := h.admit(ctx, conn)
	if err != nil {
		h.turnedAway(conn, err)
		return
	}
	conn.SetDeadline(time.Time{})
	h.signal()
	h.attend(s, c.rank)
}

// admit gives a rank its seat.
func (h *host) admit(ctx context.Context, conn net.Conn) (*session, card, error) {
	s, err := greet(conn, true, h.cfg.version, h.cfg.Secret, h.me)
	if err != nil {
		return nil, card{}, err
	}
	c, err := s.examine(h.cfg.version, h.me)
	if err == nil {
		err = h.sit(ctx, s, c)
	}
	if why := h.failure(); why != nil && err != nil {
		_ = s.send(noteFail, encodeFail(failureOf(why, 0))) // it is late, but shall know
		h.mu.Lock()
		h.told++
		h.mu.Unlock()
		return nil, c, errLate
	}
	if err != nil {
		var refused *errRefused
		if errors.As(err, &refused) {
			s.reject(refused.text)
		}
		return nil, c, err
	}
	if err := s.send(noteAccept, nil); err != nil {
		h.leave(c.rank)
		return nil, c, err
	}
	return s, c, nil
}

func (h *host) sit(ctx context.Context, s *session, c card) error {
	// A rank that was started again may be here before its end was noticed.
	for deadline := time.Now().Add(200 * time.Millisecond); ; {
		h.mu.Lock()
		if h.why != nil {
			h.mu.Unlock()
			return errLate
		}
		other := h.seats[c.rank]
		if other == nil {
			h.seats[c.rank] = &seat{s: s, addr: c.addr}
			h.mu.Unlock()
			return nil
		}
		met := h.met
		h.mu.Unlock()
		if c.rank == 0 || met || time.Now().After(deadline) || !sleep(ctx, 10*time.Millisecond) {
			return &errRefused{proven: !met, text: fmt.Sprintf(
				"rank: two processes say they are rank %d, at %s and %s", c.rank, other.addr, c.addr)}
		}
	}
}

func (h *host) leave(rank int) {
	h.mu.Lock()
	h.seats[rank] = nil
	h.mu.Unlock()
}

func (h *host) signal() {
	select {
	case h.changed <- struct{}{}:
	default:
	}
}

// turnedAway notes a connection that came to nothing. Only one that is known
// to be a rank ends the join.
func (h *host) turnedAway(conn net.Conn, err error) {
	var r *errRefused
	if errors.As(err, &r) && r.proven {
		h.mu.Lock()
		h.told++
		h.mu.Unlock()
		h.spread(&failure{code: failMismatch, culprit: 0, detail: r.text})
		return
	}
	h.mu.Lock()
	over := h.over || errors.Is(err, errLate)
	if !over && len(h.refused) < maxRefused {
		h.refused = append(h.refused, fmt.Sprintf("%s (%v)", conn.RemoteAddr(), err))
	}
	h.mu.Unlock()
	if !over {
		h.cfg.Logger.Warn("connection refused", "from", conn.RemoteAddr(), "err", err)
	}
}

// attend listens to a rank that has its seat. Before all have met it may leave
// and come back.
func (h *host) attend(s *session, rank int) {
	kind, body, err := s.recv()
	if err == nil && kind == noteFail {
		if f, ferr := decodeFail(body); ferr == nil {
			h.spread(f)
			return
		}
	}
	done := err == nil && kind == noteDone
	h.mu.Lock()
	quiet := done || h.over || h.why != nil
	if !quiet && !h.met {
		h.seats[rank] = nil
		quiet = true
	}
	h.mu.Unlock()
	if quiet {
		return
	}
	if err == nil {
		err = fmt.Errorf("it sent a %w note: type %q", errMalformed, byte(kind))
	}
	h.spread(&failure{code: failLost, culprit: rank, detail: brokeOff + err.Error()})
}

const brokeOff = "its connection broke off during the join: "

// spread fails the join for everybody.
func (h *host) spread(f *failure) {
	h.spreading.Lock()
	if h.failed(f) {
		h.fail(f)
	}
	h.spreading.Unlock()
	h.signal()
}

func (h *host) fail(f *failure) { h.tell(noteFail, encodeFail(f)) }

func (h *host) tell(kind note, body []byte) {
	h.mu.Lock()
	var to []*session
	for _, st := range h.seats {
		if st != nil && st.s != nil {
			to = append(to, st.s)
		}
	}
	h.mu.Unlock()
	for _, s := range to {
		s.conn.SetWriteDeadline(time.Now().Add(time.Second))
		_ = s.send(kind, body) // a rank that is gone is noticed by attend
	}
}

func (h *host) addrs(ctx context.Context) ([]string, error) {
	for {
		h.mu.Lock()
		var missing []int
		addrs := make([]string, len(h.seats))
		for r, st := range h.seats {
			if st == nil {
				missing = append(missing, r)
			} else {
				addrs[r] = st.addr
			}
		}
		why := h.why
		h.met = why == nil && len(missing) == 0
		met := h.met
		h.mu.Unlock()
		if why != nil {
			return nil, why
		}
		if met {
			h.tell(noteTable, encodeTable(addrs))
			return addrs, nil
		}
		select {
		case <-h.changed:
		case <-ctx.Done():
			h.mu.Lock()
			why := h.why
			refused := strings.Join(h.refused, "; ")
			h.mu.Unlock()
			if why != nil {
				return nil, why
			}
			if refused != "" {
				refused = "; turned away: " + refused
			}
			return nil, fmt.Errorf("ranks %v have not come: %w%s", missing, ctxErr(ctx), refused)
		}
	}
}

// linger waits for ranks that have not heard yet why there will be no group.
func (h *host) linger(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lingerFor)
	defer cancel()
	for {
		h.mu.Lock()
		told := h.told
		for _, st := range h.seats[1:] {
			if st != nil {
				told++
			}
		}
		wait := errors.Is(h.why, ErrMismatch) && told < len(h.seats)-1
		h.mu.Unlock()
		if !wait || !sleep(ctx, 5*time.Millisecond) {
			return
		}
	}
}

func (h *host) done() {
	h.mu.Lock()
	h.over = true
	h.mu.Unlock()
	h.spreading.Lock() // who has to hear of a failure hears of it first
	h.tell(noteDone, nil)
	h.spreading.Unlock()
	h.ln.Close()
	h.mu.Lock()
	for c := range h.conns {
		c.Close()
	}
	h.mu.Unlock()
	h.wg.Wait()
}

// guest is the other ranks' side of the rendezvous.
type guest struct {
	*meeting
	s    *session
	over chan struct{}
	wg   sync.WaitGroup
}

func newGuest(ctx context.Context, m *meeting) (*guest, error) {
	var last error
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		s, err := m.visit(ctx)
		if err == nil {
			return &guest{meeting: m, s: s, over: make(chan struct{})}, nil
		}
		var final *finalError
		if errors.As(err, &final) {
			return nil, final.err
		}
		if errors.Is(err, ErrMismatch) {
			return nil, err
		}
		if ctx.Err() == nil {
			last = err
		}
		if !sleep(ctx, wait) {
			if last == nil {
				last = err
			}
			return nil, fmt.Errorf("rank 0 was not found at %s: %w (last try: %v)", m.cfg.Addr, ctxErr(ctx), last)
		}
	}
}

// visit tries once to get a seat.
func (m *meeting) visit(ctx context.Context) (s *session, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", m.cfg.Addr)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	conn.SetDeadline(time.Now().Add(m.cfg.handshakeTimeout))
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if s, err = greet(conn, false, m.cfg.version, m.cfg.Secret, m.me); err != nil {
		return nil, err
	}
	if _, err = s.examine(m.cfg.version, m.me); err != nil {
		return nil, err
	}
	if err = s.verdict(); err != nil {
		return nil, err
	}
	if !stop() {
		return nil, ctxErr(ctx)
	}
	conn.SetDeadline(time.Time{})
	return s, nil
}

func (g *guest) addrs(ctx context.Context) ([]string, error) {
	stop := context.AfterFunc(ctx, func() { g.s.conn.SetReadDeadline(time.Unix(1, 0)) })
	kind, body, err := g.s.recv()
	if !stop() {
		return nil, fmt.Errorf("waiting for the other ranks: %w", ctxErr(ctx))
	}
	switch {
	case err != nil:
		f := &failure{code: failLost, culprit: 0, detail: brokeOff + err.Error()}
		g.failed(f)
		return nil, g.failure()
	case kind == noteFail:
		f, err := decodeFail(body)
		if err != nil {
			return nil, err
		}
		g.failed(f)
		return nil, g.failure()
	case kind != noteTable:
		return nil, fmt.Errorf("%w note: %q instead of the table", errMalformed, byte(kind))
	}
	addrs, err := decodeTable(body, g.cfg.Size)
	if err != nil {
		return nil, err
	}
	g.wg.Go(g.attend)
	return addrs, nil
}

// attend listens to rank 0 while the mesh is built.
func (g *guest) attend() {
	kind, body, err := g.s.recv()
	select {
	case <-g.over:
		return
	default:
	}
	if err == nil && kind == noteDone {
		return
	}
	f := &failure{code: failLost, culprit: 0}
	switch {
	case err != nil:
		f.detail = brokeOff + err.Error()
	case kind == noteFail:
		if f, err = decodeFail(body); err == nil {
			break
		}
		f = &failure{code: failLost, culprit: 0, detail: "it sent a " + err.Error()}
	default:
		f.detail = fmt.Sprintf("it sent a note of type %q", byte(kind))
	}
	g.failed(f)
}

func (g *guest) linger(context.Context) {}

func (g *guest) fail(f *failure) {
	g.s.conn.SetWriteDeadline(time.Now().Add(time.Second))
	_ = g.s.send(noteFail, encodeFail(f)) // if rank 0 is gone, the others notice
}

func (g *guest) done() {
	close(g.over)
	g.s.conn.SetWriteDeadline(time.Now().Add(time.Second))
	_ = g.s.send(noteDone, nil)
	g.s.conn.Close()
	g.wg.Wait()
}

// A table is the number of ranks (u32) and their addresses.
func encodeTable(addrs []string) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(addrs)))
	for _, a := range addrs {
		b = appendString(b, a)
	}
	return b
}

func decodeTable(b []byte, size int) ([]string, error) {
	if len(b) < 4 || int(binary.LittleEndian.Uint32(b)) != size {
		return nil, fmt.Errorf("%w table: not of %d ranks", errMalformed, size)
	}
	b = b[4:]
	addrs := make([]string, size)
	for i := range addrs {
		var ok bool
		if addrs[i], b, ok = takeString(b); !ok {
			return nil, fmt.Errorf("%w table: it ends at rank %d", errMalformed, i)
		}
	}
	if len(b) != 0 {
		return nil, fmt.Errorf("%w table: %d bytes left", errMalformed, len(b))
	}
	return addrs, nil
}
