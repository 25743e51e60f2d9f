package comm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
)

// A rank that connects to rank 0 gets a slot (see phases.go), and is heard from
// then on.

var (
	// errKnows means that a rank came that knows already why there is no join.
	errKnows = errors.New("the join has failed, as it knows")
	// errAgain means that a rank came that has been part of this meeting: it hopes for the next.
	errAgain = errors.New("this meeting is over for it")
	// errNoSlot means that one that is late came when none is admitted.
	errNoSlot = errors.New("no newcomer is admitted now")
)

// admit gives a rank its slot.
func (h *host) admit(ctx context.Context, conn net.Conn) (*session, int, error) {
	s, err := greet(conn, true, h.cfg.version, h.cfg.Secret, h.me)
	if err != nil {
		return nil, 0, err
	}
	if len(h.cfg.Secret) > 0 {
		h.unproven.remove(conn)
	}
	id, err := s.examine(h.cfg.version, h.me)
	if err == nil && id.purpose == toYieldPort {
		h.yieldPort()
		return nil, 0, errKnows
	}
	rank := id.rank
	if id.late {
		rank = 0 // until it has a slot
	}
	if err == nil {
		rank, err = h.claim(ctx, s, id)
	}
	if err != nil {
		if rank < len(h.slots) && h.tellLate(s, rank) {
			return nil, rank, errKnows
		}
		var refused *errRefused
		if errors.As(err, &refused) {
			s.reject(refused.text)
		}
		return nil, rank, err
	}
	h.unproven.remove(conn)
	if err := s.send(frameAccept, encodePlace(rank, h.me.size)); err != nil {
		h.move(rank, rankRefused)
		return nil, rank, err
	}
	h.move(rank, rankAccepted)
	h.tellLate(s, rank) // of what happened before it could be told
	return s, rank, nil
}

// move has an event happen to a rank's slot.
func (h *host) move(rank int, on slotEvent) {
	h.mu.Lock()
	h.slots[rank].move(on)
	h.mu.Unlock()
}

// claim finds the slot of a rank, and takes it.
func (h *host) claim(ctx context.Context, s *session, id identity) (int, error) {
	// A rank that was started again may be here before its end was noticed.
	for deadline := time.Now().Add(returnGrace); ; {
		h.mu.Lock()
		rank, err := id.rank, error(nil)
		if id.late {
			rank, err = h.newcomer(id)
		}
		if h.why != nil {
			err = errKnows
		}
		if err != nil {
			h.mu.Unlock()
			return max(rank, 0), err
		}
		slot := &h.slots[rank]
		if slot.move(rankClaims) {
			slot.s, slot.addr = s, id.addr
			h.mu.Unlock()
			return rank, nil
		}
		gathering, left, other := h.phase == gathering, slot.phase == slotLeft, slot.addr
		h.mu.Unlock()
		if left {
			return rank, errAgain
		}
		if rank == 0 || time.Now().After(deadline) || !sleep(ctx, 10*time.Millisecond) {
			return rank, &errRefused{proven: gathering, text: fmt.Sprintf(
				"rank: two processes say they are rank %d, at %s and %s", rank, other, id.addr)}
		}
	}
}

// newcomer finds a slot for one that is late: the first that is free, or in a group on several hosts that of its local rank among
// those of its host. The caller holds mu.
func (h *host) newcomer(id identity) (int, error) {
	cfg := h.cfg
	if cfg.members == 0 || h.phase != gathering {
		return 0, errNoSlot
	}
	if !cfg.maySpan() || id.size == 0 && !cfg.onHosts {
		for r := cfg.members; r < len(h.slots); r++ {
			if h.slots[r].phase == slotFree {
				return r, nil
			}
		}
		return 0, errNoSlot
	}
	if id.size != cfg.LocalSize {
		return 0, &errRefused{proven: true, text: fmt.Sprintf(
			"local size: the group has %d ranks a host, a newcomer has %d (its Config.LocalSize)", cfg.LocalSize, id.size)}
	}
	addr, err := parseAddress(id.addr)
	if err != nil || id.rank < 0 || id.rank >= id.size {
		return 0, fmt.Errorf("%w identity: local rank %d of %d at %q", errMalformed, id.rank, id.size, id.addr)
	}
	free := -1
	for first := cfg.members; first < len(h.slots); first += cfg.LocalSize {
		host := ""
		for _, slot := range h.slots[first : first+cfg.LocalSize] {
			if a, err := parseAddress(slot.addr); err == nil && slot.phase != slotFree {
				host = a.host
			}
		}
		switch {
		case host != "" && host == addr.host:
			return first + id.rank, nil
		case host == "" && free < 0:
			free = first
		}
	}
	if free < 0 {
		return 0, errNoSlot
	}
	return free + id.rank, nil
}

// tellLate tells a rank why there will be no group, if that is so and it has
// not been told before. One that knows and comes again hopes for the next join:
// it gets no answer, and tries until that begins.
func (h *host) tellLate(s *session, rank int) bool {
	h.mu.Lock()
	why := h.why
	news := why != nil && rank >= 0 && !h.slots[rank].told
	if news {
		h.slots[rank].told = true
	}
	h.mu.Unlock()
	if news {
		_ = s.send(frameFail, encodeFail(why))
		h.signal()
	}
	return why != nil
}

// listenTo hears a rank that has its slot, until its connection ends. Before all
// have met the rank may leave and come back.
func (h *host) listenTo(s *session, rank int) {
	kind, body, err := s.recv()
	for err == nil && kind == framePresent {
		h.move(rank, rankAnswers)
		h.signal()
		kind, body, err = s.recv()
	}
	if err == nil && kind == frameFail {
		if f, ferr := decodeFail(body); ferr == nil {
			h.spread(h.judge(rank, f))
			return
		}
	}
	h.mu.Lock()
	phase := h.phase
	switch phase {
	case gathering:
		if err != nil || kind != frameDone {
			h.slots[rank].move(rankGone)
		}
	case met:
		h.slots[rank].move(rankLeaves)
	}
	h.mu.Unlock()
	if phase != met || err == nil && kind == frameDone {
		return
	}
	if err == nil {
		err = fmt.Errorf("it sent a %w frame: type %q", errMalformed, byte(kind))
	}
	h.spread(severed(rank, err))
}

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
		early := h.phase == gathering
		h.mu.Unlock()
		if early && len(missing) > 0 {
			return &failure{code: failAbsent, culprit: missing[0], waited: f.waited, detail: fmt.Sprintf("after %v on rank %d: %s", f.waited, rank, what)}
		}
	}
	return f
}

// missing is which ranks have not come or, if all have, do not answer any more,
// and that in words. The caller holds mu.
func (h *host) missing() (ranks []int, what string) {
	var silent []int
	where := ""
	for r := range h.slots {
		switch phase := h.slots[r].phase; {
		case phase < slotAccepted:
			ranks = append(ranks, r)
		case phase < slotPresent:
			silent = append(silent, r)
			if a, err := parseAddress(h.slots[r].addr); err == nil && a.tcp != "" && where == "" {
				where = fmt.Sprintf(", or the host is cut off that rank %d called from, %s", r, a.tcp)
			}
		}
	}
	switch {
	case len(ranks) == 0 && len(silent) == 0:
		return nil, "all ranks have come, and not all have connected to each other"
	case len(ranks) == 0:
		return silent, fmt.Sprintf("ranks %v have come and do not answer (stopped%s?)", silent, where)
	}
	return ranks, fmt.Sprintf("ranks %v have not come (not started, ended early, or given another address)", ranks)
}

// toAsk returns whom to ask whether they are still there: nobody before all
// slots are taken. The caller holds mu.
func (h *host) toAsk() []*session {
	var out []*session
	for r := range h.slots {
		if h.slots[r].phase < slotAccepted {
			return nil
		}
	}
	for r := range h.slots {
		if h.slots[r].move(rankAsked) {
			out = append(out, h.slots[r].s)
		}
	}
	return out
}
