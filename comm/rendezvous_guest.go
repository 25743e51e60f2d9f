package comm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// guest is another rank's side of the rendezvous: a connection to rank 0, over
// which come the question whether this rank is still there, the addresses of all,
// and the news of a failure. Until the addresses have come the caller of Join
// reads it, then a goroutine does.
type guest struct {
	*meeting
	s     *session
	heard chan struct{} // closed when listenToHost has ended; nil before it begins
}

func newGuest(ctx context.Context, m *meeting) (*guest, error) {
	var last error
	var lack shortage
	said := time.Now()
	m.waitsFor("rank 0 has not answered there")
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		s, err := m.visit(ctx)
		if err == nil {
			m.waitsFor(fmt.Sprintf("not all %d ranks have come to rank 0", m.cfg.Size))
			return &guest{meeting: m, s: s}, nil
		}
		if err := lack.lasts(m.cfg.Rank, err); err != nil {
			return nil, err
		}
		var refused *errRefused
		// Rank 0 of another start of the job, or its former self, of an Admit before: it goes.
		before := (m.cfg.members > 0 || m.cfg.Job != "") && errors.As(err, &refused) && refused.group
		if before && m.cfg.members == 0 {
			err = fmt.Errorf("another job, or another start of this one, meets there: %w", err)
		}
		m.waitsFor(fmt.Sprintf("rank 0 was not found there: %v", err))
		var final *finalError
		if errors.As(err, &final) {
			return nil, final.err
		}
		if errors.Is(err, ErrMismatch) && !before {
			return nil, err
		}
		if !ended(ctx) { // else the try ended with the join
			last = err
		}
		if time.Since(said) >= sayEvery {
			said = time.Now()
			m.logWaiting(fmt.Sprintf("rank 0 is not at %s: %v", m.cfg.Addr, err))
		}
		if !sleep(ctx, wait) {
			if last == nil {
				last = err
			}
			return nil, m.absent(ctx, []int{0}, fmt.Sprintf("rank 0 was not found at %s (%slast try: %v)", m.cfg.Addr, m.cfg.hint(), last))
		}
	}
}

// visit tries once to get a slot. Where ctx ends once rank 0 may have given this rank one, it is told: it would wait for one that comes back.
func (m *meeting) visit(ctx context.Context) (*session, error) {
	s, err := m.greetHost(ctx, m.me)
	switch {
	case errors.Is(err, errNotHello):
		return nil, fmt.Errorf("another program listens there: %w", err)
	case errors.Is(err, errNoHello):
		return nil, fmt.Errorf("another program may listen there, or rank 0 is stopped: %w", err)
	case err != nil:
		return nil, err
	}
	if _, err := s.examine(m.cfg.version, m.me); err != nil {
		s.conn.Close()
		return nil, err
	}
	stop := cutOff(ctx, s.conn.SetDeadline)
	place, err := s.verdict()
	if err == nil && m.cfg.Late {
		if m.me.rank, m.me.size, err = decodePlace(place); err == nil {
			m.cfg.Rank, m.cfg.Size = m.me.rank, m.me.size
		}
	}
	over := stop()
	if over && errors.Is(err, os.ErrDeadlineExceeded) && !m.cfg.Late {
		s.conn.SetDeadline(time.Now().Add(lastWordGrace))
		_ = s.send(frameFail, encodeFail(failureOf(m.absent(ctx, nil, "waiting for the other ranks"), m.cfg.Rank)))
		_, _, _ = s.recv() // its verdict, before which it does not listen
		err = ctxErr(ctx)
	}
	if err != nil {
		s.conn.Close()
		return nil, err
	}
	s.conn.SetDeadline(time.Time{}) // where ctx has ended, the wait for the addresses says so
	return s, nil
}

func (g *guest) addrs(ctx context.Context) ([]string, error) {
	stop := cutOff(ctx, g.s.conn.SetReadDeadline)
	answered := make(chan struct{})
	var saying sync.WaitGroup
	saying.Go(func() { g.logUntil(answered) })
	kind, body, err := g.s.recv()
	for err == nil && kind == framePresent {
		if err = g.s.send(framePresent, nil); err == nil {
			kind, body, err = g.s.recv()
		}
	}
	close(answered)
	saying.Wait()
	if stop() && err != nil { // the connection is still to be read
		return nil, g.absent(ctx, nil, "waiting for the other ranks")
	}
	switch {
	case err != nil:
		g.noteFailure(severed(0, err))
		return nil, joinFailed(g.failure())
	case kind == frameFail:
		f, err := decodeFail(body)
		if err != nil {
			return nil, err
		}
		g.noteFailure(f)
		return nil, joinFailed(g.failure())
	case kind != frameTable:
		return nil, fmt.Errorf("%w frame: %q instead of the table", errMalformed, byte(kind))
	}
	t, err := decodeTable(body, g.cfg.Size)
	if err != nil {
		return nil, err
	}
	g.cfg.epoch, g.cfg.seats = t.epoch, t.seats
	g.mu.Lock()
	g.enter(met)
	g.mu.Unlock()
	g.heard = make(chan struct{})
	go g.listenToHost()
	return t.addrs, nil
}

// logUntil says again and again that this rank waits, until over.
func (g *guest) logUntil(over <-chan struct{}) {
	tick := time.NewTicker(sayEvery)
	defer tick.Stop()
	for {
		select {
		case <-over:
			return
		case <-tick.C:
			g.logWaiting(fmt.Sprintf("not all %d ranks have come to rank 0 at %s, which says who is missing", g.cfg.Size, g.cfg.Addr))
		}
	}
}

// listenToHost hears rank 0 while the mesh is built. Frames after the end
// change nothing.
func (g *guest) listenToHost() {
	defer close(g.heard)
	kind, body, err := g.s.recv()
	switch {
	case err != nil:
		g.noteFailure(severed(0, err))
	case kind == frameFail:
		f, err := decodeFail(body)
		if err != nil {
			f = &failure{code: failLost, culprit: 0, detail: "it sent a " + err.Error()}
		}
		g.noteFailure(f)
	case kind != frameDone:
		g.noteFailure(&failure{code: failLost, culprit: 0, detail: fmt.Sprintf("it sent a frame of type %q", byte(kind))})
	}
}

// giveUp waits for rank 0's word where this rank may not know who is to blame.
func (g *guest) giveUp(err error) error {
	if why := g.failure(); why != nil {
		return joinFailed(why)
	}
	mine := failureOf(err, g.cfg.Rank)
	if mine.code == failLost && g.heard != nil {
		// A rank that is gone may have left because rank 0 is.
		select {
		case <-g.heard:
		case <-time.After(hearsayGrace):
		}
		if why := g.failure(); why != nil {
			return joinFailed(why)
		}
	}
	g.s.conn.SetWriteDeadline(time.Now().Add(lastWordGrace))
	_ = g.s.send(frameFail, encodeFail(mine)) // rank 0 may have said why, and left
	if mine.code != failAbsent && mine.code != failLost {
		return err
	}
	why := g.verdict()
	if why == nil && mine.code == failAbsent && mine.culprit == g.cfg.Rank {
		return joinFailed(g.mute(mine.waited, err))
	}
	if why == nil || why.severed || why.culprit == mine.culprit && why.code == mine.code {
		return err
	}
	return joinFailed(why)
}

// mute is the failure of a join in which rank 0, which alone knows who is missing, says nothing.
func (g *guest) mute(waited time.Duration, err error) *failure {
	f := &failure{code: failAbsent, culprit: 0, waited: waited, detail: fmt.Sprintf(
		"after %v: rank 0 at %s, which knows who is missing, does not answer (its host or this one is cut off, or it is stopped)", waited, g.cfg.Addr)}
	if why := (reason{}); errors.As(err, &why) {
		f.cause = why.cause
	}
	return f
}

// verdict waits for what rank 0 says of this rank's failure. It is nil if rank 0
// says nothing.
func (g *guest) verdict() *failure {
	g.s.conn.SetReadDeadline(time.Now().Add(verdictGrace))
	if g.heard != nil {
		<-g.heard
		return g.failure()
	}
	kind, body, err := g.s.recv()
	for err == nil && (kind == framePresent || kind == frameTable) { // they were on their way when this rank gave up
		kind, body, err = g.s.recv()
	}
	if err != nil || kind != frameFail {
		return nil
	}
	f, err := decodeFail(body)
	if err != nil {
		return nil
	}
	return f
}

func (g *guest) end(context.Context) {
	g.mu.Lock()
	g.enter(closed)
	g.mu.Unlock()
	g.s.conn.SetWriteDeadline(time.Now().Add(lastWordGrace))
	_ = g.s.send(frameDone, nil)
	g.s.conn.Close()
	if g.heard != nil {
		<-g.heard
	}
}
