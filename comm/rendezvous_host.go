package comm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"
)

// host is rank 0's side of the rendezvous. It accepts connections, gives each
// rank its slot, asks all whether they are still there once no slot is free, and
// sends the addresses of all to all. A failure, its own or one that a rank
// reports, goes to every rank that has a slot, and to those that come later.
//
// One goroutine accepts. Each connection has one that serves it to its end. The
// caller of Join waits in addrs, and in end for ranks that have not been told.
type host struct {
	*meeting
	ln       net.Listener
	unproven unproven
	wg       sync.WaitGroup
	changed  chan struct{} // the slots have changed, or the phase
	yielded  chan struct{} // another rank 0 wants the port

	// spreading is held from when a failure is visible here until all that have a
	// slot have been told.
	spreading sync.Mutex

	// Guarded by meeting.mu.
	slots      []memberSlot
	toldOthers int // connections that were told of a failure and hold no slot of their own
	conns      map[net.Conn]struct{}
	refused    []string // why, of those who were turned away
}

// maxRefused is how many of those turned away are named in an error.
const maxRefused = 3

func newHost(ctx, caller context.Context, m *meeting) (*host, error) {
	ln, err := m.takePort(ctx)
	if err != nil {
		return nil, err
	}
	h := &host{
		meeting:  m,
		ln:       ln,
		unproven: newUnproven(m.cfg),
		changed:  make(chan struct{}, 1),
		yielded:  make(chan struct{}, 1),
		slots:    make([]memberSlot, m.cfg.Size),
		conns:    make(map[net.Conn]struct{}),
	}
	h.slots[0] = memberSlot{phase: slotPresent, told: true, addr: m.me.addr}
	m.mu.Lock()
	m.lacks = h.missing
	m.mu.Unlock()
	h.wg.Go(func() { h.accept(caller) })
	return h, nil
}

// takePort waits a little for the port: a rank 0 that joins again may find it
// still held by its former self, whom it asks to yield it. Those who look on learn
// of others that hold it.
func (m *meeting) takePort(ctx context.Context) (net.Listener, error) {
	for deadline := time.Now().Add(portGrace); ; {
		ln, err := m.listen(ctx)
		if err == nil {
			return ln, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) || !sleep(ctx, 20*time.Millisecond) {
			return nil, fmt.Errorf("rank 0 cannot listen at %s, which Config.Addr or SWITCHYARD_PORT chooses: %w", m.cfg.Addr, lacksFiles(0, err))
		}
		m.mu.Lock()
		m.lacks = func() ([]int, string) { return []int{0}, fmt.Sprintf("rank 0 cannot listen there: %v", err) }
		m.mu.Unlock()
		successor := m.me
		successor.purpose = toYieldPort
		short, stop := context.WithTimeout(ctx, yieldGrace)
		if s, err := m.greetHost(short, successor); err == nil {
			s.conn.Close()
		}
		stop()
	}
}

func (h *host) accept(ctx context.Context) {
	var lack shortage
	for {
		conn, err := h.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err := lack.lasts(0, err); err != nil {
			h.spread(failureOf(err, 0))
			lack = shortage{}
		}
		if err != nil { // out of descriptors, say
			h.cfg.Logger.Warn("accept", "err", err)
			h.unproven.closeOldest()
			if !sleep(ctx, time.Millisecond) {
				return
			}
			continue
		}
		if err := checkUser(conn); err != nil { // and takes no place of a rank's
			h.cfg.Logger.Warn("connection refused", "from", peerName(conn), "err", err)
			conn.Close()
			continue
		}
		from := peerName(conn)
		conn = h.cfg.slow(conn)
		h.mu.Lock()
		over := h.phase == closed
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
			h.serve(ctx, conn, from)
			h.unproven.remove(conn)
			h.mu.Lock()
			delete(h.conns, conn)
			h.mu.Unlock()
			conn.Close()
		})
	}
}

// serve deals with one connection, from hello to end.
func (h *host) serve(ctx context.Context, conn net.Conn, from string) {
	conn.SetDeadline(time.Now().Add(h.cfg.handshakeTimeout))
	s, rank, err := h.admit(ctx, conn)
	if err != nil {
		h.turnAway(from, rank, err)
		return
	}
	conn.SetDeadline(time.Time{})
	h.signal()
	h.listenTo(s, rank)
}

// yieldPort gives the port up to another rank 0, if the join has failed.
func (h *host) yieldPort() {
	if h.failure() == nil {
		return
	}
	select {
	case h.yielded <- struct{}{}:
	default:
	}
}

func (h *host) signal() {
	select {
	case h.changed <- struct{}{}:
	default:
	}
}

// turnAway notes a connection that came to nothing. Only one that is known to be
// a rank ends the join.
func (h *host) turnAway(from string, rank int, err error) {
	var r *errRefused
	if errors.As(err, &r) && r.proven {
		h.mu.Lock()
		if rank > 0 && rank < len(h.slots) && h.slots[rank].phase == slotFree && !h.slots[rank].told {
			h.slots[rank].told = true
		} else {
			h.toldOthers++
		}
		h.mu.Unlock()
		h.spread(&failure{code: failMismatch, culprit: 0, detail: r.text})
		return
	}
	h.mu.Lock()
	quiet := h.phase == closed || errors.Is(err, errKnows) || errors.Is(err, errAgain) || errors.Is(err, errNoSlot)
	if !quiet && errors.As(err, &r) && len(h.refused) < maxRefused {
		h.refused = append(h.refused, fmt.Sprintf("%s (%v)", from, err))
	}
	h.mu.Unlock()
	if !quiet {
		h.cfg.Logger.Warn("connection refused", "from", from, "err", err)
	}
}

// spread fails the join for everybody. It reports whether it had not failed before.
func (h *host) spread(f *failure) bool {
	h.spreading.Lock()
	first := h.noteFailure(f)
	if first {
		h.broadcast(frameFail, encodeFail(f))
	}
	h.spreading.Unlock()
	h.signal()
	return first
}

func (h *host) giveUp(err error) error {
	if h.spread(failureOf(err, 0)) {
		return err
	}
	return joinFailed(h.failure())
}

// broadcast sends a frame to all ranks that have been accepted.
func (h *host) broadcast(kind frameType, body []byte) {
	h.mu.Lock()
	var to []*session
	for r := range h.slots {
		slot := &h.slots[r]
		if slot.s == nil || slot.phase < slotAccepted || kind == frameFail && slot.told {
			continue
		}
		slot.told = slot.told || kind == frameFail
		to = append(to, slot.s)
	}
	h.mu.Unlock()
	sendAll(to, kind, body)
}

func sendAll(to []*session, kind frameType, body []byte) {
	for _, s := range to {
		s.conn.SetWriteDeadline(time.Now().Add(lastWordGrace))
		_ = s.send(kind, body) // a rank that is gone is noticed by listenTo
	}
}

func (h *host) addrs(ctx context.Context) ([]string, error) {
	say := time.NewTicker(sayEvery)
	defer say.Stop()
	for over := false; ; {
		h.mu.Lock()
		missing, what := h.missing()
		ask := h.toAsk()
		allMet := len(missing) == 0 && h.enter(met)
		why := h.why
		addrs := make([]string, len(h.slots))
		for r := range h.slots {
			addrs[r] = h.slots[r].addr
		}
		h.mu.Unlock()
		if why != nil {
			return nil, joinFailed(why)
		}
		if allMet {
			h.broadcast(frameTable, (&table{addrs, h.cfg.epoch, h.cfg.seats}).encode())
			return addrs, nil
		}
		if over {
			h.mu.Lock()
			refused := strings.Join(h.refused, "; ")
			h.mu.Unlock()
			if refused != "" {
				refused = "; turned away: " + refused
			}
			return nil, h.absent(ctx, missing, what+refused)
		}
		sendAll(ask, framePresent, nil)
		select {
		case <-h.changed:
		case <-say.C:
			h.logWaiting(what)
		case <-ctx.Done():
			over = true // after one more look
		}
	}
}

func (h *host) end(caller context.Context) {
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
	told := h.toldOthers
	for r := range h.slots {
		if h.slots[r].told {
			told++
		}
	}
	return told >= len(h.slots)
}

// linger waits for ranks that have not heard yet why there is no group.
func (h *host) linger(ctx context.Context, most time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for !h.allTold() {
		select {
		case <-h.changed:
		case <-h.yielded:
			return
		case <-ctx.Done():
			return
		}
	}
}

func (h *host) close() {
	h.mu.Lock()
	h.enter(closed)
	h.mu.Unlock()
	h.spreading.Lock() // a rank that has to hear of a failure hears of it first
	h.broadcast(frameDone, nil)
	h.spreading.Unlock()
	h.ln.Close()
	h.mu.Lock()
	for c := range h.conns {
		c.Close()
	}
	h.mu.Unlock()
	h.wg.Wait()
}
