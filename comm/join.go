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

func join(caller context.Context, cfg Config) (*Group, error) {
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
	if cfg.Size == 1 && !cfg.Late {
		return l.join(caller, []string{l.addr}, nil)
	}
	whole, stop := withJoinTimeout(caller, &cfg)
	defer stop()
	ctx, cancel := context.WithCancelCause(whole) // ends when the join fails elsewhere
	defer cancel(nil)

	m := meeting{
		cfg: &cfg,
		me: card{purpose: toRendezvous, rank: cfg.Rank, size: cfg.Size, late: cfg.Late, peerTimeout: int64(cfg.PeerTimeout),
			gid: cfg.gid, host: hostID(), addr: l.addr, name: cfg.Name},
		began:  time.Now(),
		cancel: cancel,
	}
	var meet interface {
		addrs(ctx context.Context) ([]string, error)
		fail(err error) error
		done(caller context.Context)
	}
	if cfg.Rank == 0 && !cfg.Late {
		meet, err = newHost(ctx, caller, &m)
	} else {
		meet, err = newGuest(ctx, &m)
	}
	if err != nil {
		return nil, err
	}
	l.cfg = cfg // one that is late knows its rank now
	addrs, err := meet.addrs(ctx)
	var g *Group
	if err != nil {
		err = meet.fail(err)
	} else {
		g, err = l.join(ctx, addrs, meet.fail)
	}
	meet.done(caller)
	return g, err
}

// meeting is what the two sides of a rendezvous have in common.
type meeting struct {
	cfg    *Config
	me     card
	began  time.Time
	cancel context.CancelCauseFunc

	mu  sync.Mutex
	why *failure // the join has failed
}

func (m *meeting) failure() *failure {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.why
}

// failed ends the join of this rank. It reports whether this is news.
func (m *meeting) failed(f *failure) bool {
	m.mu.Lock()
	first := m.why == nil
	if first {
		m.why = f
	}
	m.mu.Unlock()
	if first {
		m.cancel(failureError(f))
	}
	return first
}

// absent is the error of this rank when ctx ended while it waited for ranks.
func (m *meeting) absent(ctx context.Context, ranks []int, what string) error {
	return newAbsent(ctx, m.cfg, m.began, ranks, what)
}

// absentError means that ranks did not come in time. Other ends of a context
// are no news of anybody.
type absentError struct {
	ranks []int // may be empty: not known
	text  string
	cause error
}

func (e *absentError) Error() string   { return ErrTimeout.Error() + " " + e.text }
func (e *absentError) Unwrap() []error { return []error{ErrTimeout, e.cause} }

func newAbsent(ctx context.Context, cfg *Config, began time.Time, ranks []int, what string) error {
	err := ctxErr(ctx)
	if !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%s: %w", what, err)
	}
	waited := cfg.JoinTimeout
	if !errors.Is(err, ErrTimeout) { // the caller's deadline was earlier
		waited = time.Since(began).Round(time.Millisecond)
	}
	return &absentError{ranks: ranks, text: fmt.Sprintf("after %v: %s", waited, what), cause: err}
}

// failureOf puts an error of a join into words for the others.
func failureOf(err error, rank int) *failure {
	var absent *absentError
	if errors.As(err, &absent) {
		f := &failure{code: failAbsent, culprit: rank, detail: absent.text}
		if len(absent.ranks) > 0 {
			f.culprit = absent.ranks[0]
		}
		return f
	}
	var pe *PeerError
	if errors.As(err, &pe) && pe.Rank >= 0 && errors.Is(err, ErrPeerLost) {
		return &failure{code: failLost, culprit: pe.Rank, detail: detailOf(pe.Err, ErrPeerLost)}
	}
	if errors.As(err, &pe) && pe.Rank >= 0 && errors.Is(err, ErrTimeout) {
		return &failure{code: failAbsent, culprit: pe.Rank, detail: strings.TrimPrefix(pe.Err.Error(), ErrTimeout.Error()+" ")}
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
	case failAbsent:
		err = fmt.Errorf("%w %s", ErrTimeout, f.detail)
	default:
		err = wrapDetail(ErrPeerLost, f.detail)
	}
	return &PeerError{Rank: f.culprit, Err: err}
}

// host is rank 0's side of the rendezvous.
type host struct {
	*meeting
	ln       net.Listener
	unproven unproven
	wg       sync.WaitGroup
	changed  chan struct{}
	retired  chan struct{} // another rank 0 wants the port

	spreading sync.Mutex // held from when a failure is visible here until the others have been told

	// Guarded by meeting.mu.
	told    []bool // ranks that have been told of a failure
	odd     int    // others that have: whose rank is not known, or not theirs
	seats   []*seat
	met     bool // all have come, and know of each other
	over    bool
	conns   map[net.Conn]struct{}
	refused []string // why, of those who were turned away
}

// seat is a rank that has come. Nothing is said to it before it has been
// accepted, nor does it count as one that has come. When all seats are taken,
// those who sit there are asked whether they still are: one may have died, and
// been started again, which is seen only later.
type seat struct {
	s        *session
	addr     string
	accepted bool
	asked    bool
	here     bool // it has said so
	over     bool // its connection has ended, after all had met
}

var (
	// errKnows means that a rank came that knows already why there is no join.
	errKnows = errors.New("the join has failed, as it knows")
	// errAgain means that a rank came that has been part of this meeting: it hopes for the next.
	errAgain = errors.New("this meeting is over for it")
	// errNoSeat means that one that is late came when none is admitted.
	errNoSeat = errors.New("no newcomer is admitted now")
)

// maxRefused is how many of those turned away are named in an error.
const maxRefused = 3

func newHost(ctx, caller context.Context, m *meeting) (*host, error) {
	ln, err := m.listen(ctx)
	if err != nil {
		return nil, err
	}
	h := &host{
		meeting:  m,
		ln:       ln,
		unproven: newUnproven(m.cfg),
		changed:  make(chan struct{}, 1),
		retired:  make(chan struct{}, 1),
		told:     make([]bool, m.cfg.Size),
		seats:    make([]*seat, m.cfg.Size),
		conns:    make(map[net.Conn]struct{}),
	}
	h.told[0] = true
	h.seats[0] = &seat{addr: m.me.addr, accepted: true, asked: true, here: true}
	h.wg.Go(func() { h.accept(caller) })
	return h, nil
}

// listen waits a little for the port: a rank 0 that joins again may find it
// still held by its former self, whom it asks to let go.
func (m *meeting) listen(ctx context.Context) (net.Listener, error) {
	var lc net.ListenConfig
	for deadline := time.Now().Add(3 * time.Second); ; {
		ln, err := lc.Listen(ctx, m.cfg.network(), m.cfg.Addr)
		if err == nil {
			return ln, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) || !sleep(ctx, 20*time.Millisecond) {
			return nil, fmt.Errorf("rank 0 cannot listen at %s, which Config.Addr or SWITCHYARD_PORT chooses: %w", m.cfg.Addr, err)
		}
		successor := m.me
		successor.purpose = toRetire
		short, stop := context.WithTimeout(ctx, time.Second)
		if s, err := m.greetHost(short, successor); err == nil {
			s.conn.Close()
		}
		stop()
	}
}

func (h *host) accept(ctx context.Context) {
	for {
		conn, err := h.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, say
			h.cfg.Logger.Warn("accept", "err", err)
			h.unproven.closeOldest()
			if !sleep(ctx, time.Millisecond) {
				return
			}
			continue
		}
		if err := checkUser(conn); err != nil {
			h.cfg.Logger.Warn("connection refused", "from", peerName(conn), "err", err)
			conn.Close()
			continue
		}
		conn = h.cfg.slow(conn)
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
		h.unproven.add(conn)
		h.wg.Go(func() {
			h.serve(ctx, conn)
			h.unproven.remove(conn)
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
	s, rank, err := h.admit(ctx, conn)
	if err != nil {
		h.turnedAway(conn, rank, err)
		return
	}
	conn.SetDeadline(time.Time{})
	h.signal()
	h.attend(s, rank)
}

// admit gives a rank its seat.
func (h *host) admit(ctx context.Context, conn net.Conn) (*session, int, error) {
	s, err := greet(conn, true, h.cfg.version, h.cfg.Secret, h.me)
	if err != nil {
		return nil, 0, err
	}
	if len(h.cfg.Secret) > 0 {
		h.unproven.remove(conn)
	}
	c, err := s.examine(h.cfg.version, h.me)
	if err == nil && c.purpose == toRetire {
		h.retire()
		return nil, 0, errKnows
	}
	rank := c.rank
	if err == nil {
		rank, err = h.sit(ctx, s, c)
	}
	if err != nil {
		if rank < len(h.told) && h.tellLate(s, rank) {
			return nil, rank, errKnows
		}
		var refused *errRefused
		if errors.As(err, &refused) {
			s.reject(refused.text)
		}
		return nil, rank, err
	}
	h.unproven.remove(conn)
	if err := s.send(noteAccept, encodePlace(rank, h.me.size)); err != nil {
		h.mu.Lock()
		h.seats[rank] = nil
		h.mu.Unlock()
		return nil, rank, err
	}
	h.mu.Lock()
	h.seats[rank].accepted = true
	h.mu.Unlock()
	h.tellLate(s, rank) // of what happened before it could be told
	return s, rank, nil
}

// tellLate tells a rank why there will be no group, if that is so and it has
// not been told before. One that knows and comes again hopes for the next join:
// it gets no answer, and tries until that begins.
func (h *host) tellLate(s *session, rank int) bool {
	h.mu.Lock()
	why := h.why
	tell := why != nil && rank >= 0 && !h.told[rank]
	if tell {
		h.told[rank] = true
	}
	h.mu.Unlock()
	if tell {
		_ = s.send(noteFail, encodeFail(why))
		h.signal()
	}
	return why != nil
}

// retire gives the port up to another rank 0, if the join has failed.
func (h *host) retire() {
	if h.failure() == nil {
		return
	}
	select {
	case h.retired <- struct{}{}:
	default:
	}
}

func (h *host) sit(ctx context.Context, s *session, c card) (int, error) {
	// A rank that was started again may be here before its end was noticed.
	for deadline := time.Now().Add(200 * time.Millisecond); ; {
		h.mu.Lock()
		if h.why != nil {
			h.mu.Unlock()
			return c.rank, errKnows
		}
		rank := c.rank
		if c.late {
			if rank = h.place(); rank < 0 {
				h.mu.Unlock()
				return rank, errNoSeat
			}
		}
		other := h.seats[rank]
		if other == nil {
			h.seats[rank] = &seat{s: s, addr: c.addr}
			h.mu.Unlock()
			return rank, nil
		}
		met, over := h.met, other.over
		h.mu.Unlock()
		if over {
			return c.rank, errAgain
		}
		if c.rank == 0 || time.Now().After(deadline) || !sleep(ctx, 10*time.Millisecond) {
			return c.rank, &errRefused{proven: !met, text: fmt.Sprintf(
				"rank: two processes say they are rank %d, at %s and %s", c.rank, other.addr, c.addr)}
		}
	}
}

// place is the first free seat for one that is late, or -1. The caller holds mu.
func (h *host) place() int {
	if h.cfg.members == 0 || h.met {
		return -1
	}
	for r := h.cfg.members; r < len(h.seats); r++ {
		if h.seats[r] == nil {
			return r
		}
	}
	return -1
}

func (h *host) signal() {
	select {
	case h.changed <- struct{}{}:
	default:
	}
}

// turnedAway notes a connection that came to nothing. Only one that is known
// to be a rank ends the join.
func (h *host) turnedAway(conn net.Conn, rank int, err error) {
	var r *errRefused
	if errors.As(err, &r) && r.proven {
		h.mu.Lock()
		if rank > 0 && rank < len(h.told) && h.seats[rank] == nil && !h.told[rank] {
			h.told[rank] = true
		} else {
			h.odd++
		}
		h.mu.Unlock()
		h.spread(&failure{code: failMismatch, culprit: 0, detail: r.text})
		return
	}
	h.mu.Lock()
	over := h.over || errors.Is(err, errKnows) || errors.Is(err, errAgain) || errors.Is(err, errNoSeat)
	if !over && errors.As(err, &r) && len(h.refused) < maxRefused {
		h.refused = append(h.refused, fmt.Sprintf("%s (%v)", peerName(conn), err))
	}
	h.mu.Unlock()
	if !over {
		h.cfg.Logger.Warn("connection refused", "from", peerName(conn), "err", err)
	}
}

// attend listens to a rank that has its seat. Before all have met it may leave
// and come back.
func (h *host) attend(s *session, rank int) {
	kind, body, err := s.recv()
	for err == nil && kind == noteHere {
		h.mu.Lock()
		h.seats[rank].here = true
		h.mu.Unlock()
		h.signal()
		kind, body, err = s.recv()
	}
	if err == nil && kind == noteFail {
		if f, ferr := decodeFail(body); ferr == nil {
			h.spread(h.judge(rank, f))
			return
		}
	}
	done := err == nil && kind == noteDone
	h.mu.Lock()
	quiet := done || h.over || h.why != nil
	h.seats[rank].over = h.met
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

// hearsayGrace is how long a rank waits, before it blames one that is gone in a
// join, for what else there is to hear: that one may have had a reason to leave.
const hearsayGrace = 300 * time.Millisecond

// judge makes of what a rank says who is to blame: it may have given up
// because of others.
func (h *host) judge(rank int, f *failure) *failure {
	switch {
	case f.code == failLost && f.culprit != rank:
		for deadline := time.Now().Add(hearsayGrace); h.failure() == nil && time.Now().Before(deadline); {
			time.Sleep(5 * time.Millisecond)
		}
	case f.code == failAbsent:
		h.mu.Lock()
		missing, what := h.missing()
		met := h.met
		h.mu.Unlock()
		if !met && len(missing) > 0 {
			waited, _, _ := strings.Cut(f.detail, ":")
			return &failure{code: failAbsent, culprit: missing[0], detail: fmt.Sprintf("%s on rank %d: %s", waited, rank, what)}
		}
	}
	return f
}

// missing is which ranks have not come or, if all have, do not answer any more,
// and that in words. The caller holds mu.
func (h *host) missing() (ranks []int, what string) {
	var silent []int
	for r, st := range h.seats {
		if st == nil || !st.accepted {
			ranks = append(ranks, r)
		} else if !st.here {
			silent = append(silent, r)
		}
	}
	if len(ranks) == 0 {
		return silent, fmt.Sprintf("ranks %v have come and do not answer (stopped?)", silent)
	}
	return ranks, fmt.Sprintf("ranks %v have not come (not started, ended early, or given another address)", ranks)
}

// toAsk returns whom to ask whether they are still there: nobody before all
// seats are taken. The caller holds mu.
func (h *host) toAsk() []*session {
	var out []*session
	for _, st := range h.seats {
		if st == nil || !st.accepted {
			return nil
		}
		if !st.asked {
			out = append(out, st.s)
		}
	}
	for _, st := range h.seats {
		st.asked = true
	}
	return out
}

// spread fails the join for everybody. It reports whether it had not failed before.
func (h *host) spread(f *failure) bool {
	h.spreading.Lock()
	first := h.failed(f)
	if first {
		h.tell(noteFail, encodeFail(f))
	}
	h.spreading.Unlock()
	h.signal()
	return first
}

// fail tells the others that this rank cannot go on. It returns why there will
// be no group, which may be something else.
func (h *host) fail(err error) error {
	if h.spread(failureOf(err, 0)) {
		return err
	}
	return failureError(h.failure())
}

// tell says something to all ranks that have been accepted.
func (h *host) tell(kind note, body []byte) {
	h.mu.Lock()
	var to []*session
	for r, st := range h.seats {
		if st == nil || st.s == nil || !st.accepted || kind == noteFail && h.told[r] {
			continue
		}
		h.told[r] = h.told[r] || kind == noteFail
		to = append(to, st.s)
	}
	h.mu.Unlock()
	sendAll(to, kind, body)
}

func sendAll(to []*session, kind note, body []byte) {
	for _, s := range to {
		s.conn.SetWriteDeadline(time.Now().Add(time.Second))
		_ = s.send(kind, body) // a rank that is gone is noticed by attend
	}
}

func (h *host) addrs(ctx context.Context) ([]string, error) {
	say := time.NewTicker(sayEvery)
	defer say.Stop()
	for {
		h.mu.Lock()
		missing, what := h.missing()
		ask := h.toAsk()
		why := h.why
		h.met = why == nil && len(missing) == 0
		met := h.met
		addrs := make([]string, len(h.seats))
		for r, st := range h.seats {
			if st != nil {
				addrs[r] = st.addr
			}
		}
		h.mu.Unlock()
		if why != nil {
			return nil, failureError(why)
		}
		if met {
			h.tell(noteTable, encodeTable(addrs))
			return addrs, nil
		}
		sendAll(ask, noteHere, nil)
		select {
		case <-h.changed:
		case <-say.C:
			h.cfg.Logger.Info("waiting", "rank", 0, "to join", what, "waited", time.Since(h.began).Round(time.Second))
		case <-ctx.Done():
			if why := h.failure(); why != nil {
				return nil, failureError(why)
			}
			h.mu.Lock()
			refused := strings.Join(h.refused, "; ")
			h.mu.Unlock()
			if refused != "" {
				refused = "; turned away: " + refused
			}
			return nil, h.absent(ctx, missing, what+refused)
		}
	}
}

// mismatchGrace is how long the join of rank 0 lasts after ranks were found to
// differ, for those that are still to come: its process may end with the join.
const mismatchGrace = 2 * time.Second

// lingerLeast is how long rank 0 keeps the port for those that are still to
// come, where JoinTimeout is shorter.
const lingerLeast = 10 * time.Second

// done ends the rendezvous. After a failure its port stays open, see Join.
func (h *host) done(caller context.Context) {
	why := h.failure()
	if why != nil && why.code == failMismatch {
		h.linger(caller, mismatchGrace)
	}
	if why == nil || h.allTold() {
		h.close()
		return
	}
	go func() {
		h.linger(caller, max(h.cfg.JoinTimeout, lingerLeast))
		h.close()
	}()
}

func (h *host) allTold() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	told := h.odd
	for _, knows := range h.told {
		if knows {
			told++
		}
	}
	return told >= len(h.told)
}

// linger waits for ranks that have not heard yet why there is no group.
func (h *host) linger(ctx context.Context, most time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for !h.allTold() {
		select {
		case <-h.changed:
		case <-h.retired:
			return
		case <-ctx.Done():
			return
		}
	}
}

func (h *host) close() {
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
	s     *session
	over  chan struct{}
	heard chan struct{} // closed when attend has ended; nil before it begins
}

func newGuest(ctx context.Context, m *meeting) (*guest, error) {
	var last error
	said := time.Now()
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		s, err := m.visit(ctx)
		if err == nil {
			return &guest{meeting: m, s: s, over: make(chan struct{})}, nil
		}
		var final *finalError
		if errors.As(err, &final) {
			return nil, final.err
		}
		var refused *errRefused
		before := m.cfg.members > 0 && errors.As(err, &refused) && refused.group // rank 0's former self, of an Admit before: it goes
		if errors.Is(err, ErrMismatch) && !before {
			return nil, err
		}
		if !ended(ctx) { // else the try ended with the join
			last = err
		}
		if time.Since(said) >= sayEvery {
			said = time.Now()
			m.cfg.Logger.Info("waiting", "rank", m.me.rank, "to join", fmt.Sprintf("rank 0 is not at %s: %v", m.cfg.Addr, err), "waited", time.Since(m.began).Round(time.Second))
		}
		if !sleep(ctx, wait) {
			if last == nil {
				last = err
			}
			return nil, m.absent(ctx, []int{0}, fmt.Sprintf("rank 0 was not found at %s (%slast try: %v)", m.cfg.Addr, m.cfg.hint(), last))
		}
	}
}

// greetHost connects to rank 0 and greets it with a card.
func (m *meeting) greetHost(ctx context.Context, me card) (s *session, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, m.cfg.network(), m.cfg.Addr)
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

// visit tries once to get a seat.
func (m *meeting) visit(ctx context.Context) (_ *session, err error) {
	s, err := m.greetHost(ctx, m.me)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.conn.Close()
		}
	}()
	stop := context.AfterFunc(ctx, func() { s.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err = s.examine(m.cfg.version, m.me); err != nil {
		return nil, err
	}
	place, err := s.verdict()
	if err != nil {
		return nil, err
	}
	if m.cfg.Late {
		if m.me.rank, m.me.size, err = decodePlace(place); err != nil {
			return nil, err
		}
		m.cfg.Rank, m.cfg.Size = m.me.rank, m.me.size
	}
	if !stop() {
		return nil, ctxErr(ctx)
	}
	s.conn.SetDeadline(time.Time{})
	return s, nil
}

func (g *guest) addrs(ctx context.Context) ([]string, error) {
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		g.s.conn.SetReadDeadline(time.Unix(1, 0))
		close(cut)
	})
	met := make(chan struct{})
	var saying sync.WaitGroup
	saying.Go(func() { g.say(met) })
	kind, body, err := g.s.recv()
	for err == nil && kind == noteHere {
		if err = g.s.send(noteHere, nil); err == nil {
			kind, body, err = g.s.recv()
		}
	}
	close(met)
	saying.Wait()
	if !stop() {
		<-cut // the connection is still to be read
		if err != nil {
			return nil, g.absent(ctx, nil, "waiting for the other ranks")
		}
	}
	switch {
	case err != nil:
		f := &failure{code: failLost, culprit: 0, detail: brokeOff + err.Error()}
		g.failed(f)
		return nil, failureError(g.failure())
	case kind == noteFail:
		f, err := decodeFail(body)
		if err != nil {
			return nil, err
		}
		g.failed(f)
		return nil, failureError(g.failure())
	case kind != noteTable:
		return nil, fmt.Errorf("%w note: %q instead of the table", errMalformed, byte(kind))
	}
	addrs, err := decodeTable(body, g.cfg.Size)
	if err != nil {
		return nil, err
	}
	g.heard = make(chan struct{})
	go g.attend()
	return addrs, nil
}

// say logs that this rank waits, until over.
func (g *guest) say(over <-chan struct{}) {
	tick := time.NewTicker(sayEvery)
	defer tick.Stop()
	for {
		select {
		case <-over:
			return
		case <-tick.C:
			g.cfg.Logger.Info("waiting", "rank", g.me.rank, "to join", fmt.Sprintf("not all %d ranks have come to rank 0 at %s, which says who is missing", g.cfg.Size, g.cfg.Addr),
				"waited", time.Since(g.began).Round(time.Second))
		}
	}
}

// attend listens to rank 0 while the mesh is built.
func (g *guest) attend() {
	defer close(g.heard)
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

// verdictGrace is how long a rank that has given up waits to hear from rank 0
// who is to blame.
const verdictGrace = time.Second

// fail tells rank 0 that this rank cannot go on. It returns why there will be
// no group: rank 0 may know better.
func (g *guest) fail(err error) error {
	if why := g.failure(); why != nil {
		return failureError(why)
	}
	mine := failureOf(err, g.cfg.Rank)
	if mine.code == failLost && g.heard != nil {
		// Who is gone may have left because rank 0 is.
		select {
		case <-g.heard:
		case <-time.After(hearsayGrace):
		}
		if why := g.failure(); why != nil {
			return failureError(why)
		}
	}
	g.s.conn.SetWriteDeadline(time.Now().Add(time.Second))
	_ = g.s.send(noteFail, encodeFail(mine)) // rank 0 may have said why, and left
	if mine.code != failAbsent && mine.code != failLost {
		return err
	}
	g.s.conn.SetReadDeadline(time.Now().Add(verdictGrace))
	why := mine
	if g.heard != nil {
		<-g.heard
		why = g.failure()
	} else {
		kind, body, rerr := g.s.recv()
		for rerr == nil && kind == noteHere { // this rank is not any more
			kind, body, rerr = g.s.recv()
		}
		if f, ferr := decodeFail(body); rerr == nil && kind == noteFail && ferr == nil {
			why = f
		}
	}
	if why == nil || why.culprit == mine.culprit && why.code == mine.code || why.culprit == 0 && strings.HasPrefix(why.detail, brokeOff) {
		return err
	}
	return failureError(why)
}

func (g *guest) done(context.Context) {
	close(g.over)
	g.s.conn.SetWriteDeadline(time.Now().Add(time.Second))
	_ = g.s.send(noteDone, nil)
	g.s.conn.Close()
	if g.heard != nil {
		<-g.heard
	}
}

// A place is the rank (u32) that is given to one who is accepted, and the size
// (u32) of the group to be.
func encodePlace(rank, size int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(rank))
	return binary.LittleEndian.AppendUint32(b, uint32(size))
}

func decodePlace(b []byte) (rank, size int, err error) {
	if len(b) == 8 {
		rank, size = int(binary.LittleEndian.Uint32(b)), int(binary.LittleEndian.Uint32(b[4:]))
	}
	if size < 1 || size > MaxSize || rank >= size {
		return 0, 0, fmt.Errorf("%w place: %x", errMalformed, b)
	}
	return rank, size, nil
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
