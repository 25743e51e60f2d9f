package host

import (
	"fmt"
	"math"
	"runtime"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// How a waiting rank spends its time. A peer that runs on another core answers within a microsecond, so spinning comes
// first; a peer that was last seen on our own core answers only once it gets it, and where ranks outnumber cores somebody
// can always use it, so yielding does; and a rank that waits for long sleeps.
const (
	// Giving the core away and getting it back costs about 4 us, a little less than this.
	spinFor  = 5 * time.Microsecond
	yieldFor = 100 * time.Microsecond
	// sleepFor bounds one sleep. Peers and the abort word wake a sleeper, this only bounds a wake-up that got lost with
	// the process that owed it.
	sleepFor = 5 * time.Millisecond
	// tellEvery is the time between two words about one wait, for people who look on.
	tellEvery = 5 * time.Second
	// A wait that ends so much later than its timeout was asleep; it goes on a little.
	lateWake  = 100 * time.Millisecond
	newsGrace = 200 * time.Millisecond
	// lostGrace bounds how long a call whose connection to another host has failed waits to hear why: a rank that was stopped may have been
	// given up by the one at the other end, and finds that out after a quarter of the peer timeout, which is 10 s by default.
	lostGrace = 3 * time.Second
	// spinsPerLook is how many polls pass between two looks at the clock.
	spinsPerLook = 8
	// lastLook is the number of the poll at which a wait has found that it is over. No other wait polls so often.
	lastLook = math.MaxInt / 2
)

// waiter paces one kernel's polling loop. idle is called after every pass that found nothing to do, busy after one
// that did.
type waiter struct {
	e       *Engine
	port    *port
	rank    int // of the group, that it has waited for last
	call    call
	with    teller
	masks   *dispatching // whose masks end its waits, if any
	timeout time.Duration
	since   time.Time     // of the first idle pass after work
	told    time.Duration // how long it had waited when it last told,
	heard   time.Duration // when a rank that it waits for had last moved bytes,
	lookAt  time.Duration // and when it looks for that again
	moves   []uint64      // what the ranks had moved then, none before the first look
	carried int64         // bytes that this rank has moved since it last told
	polls   int
	woken   time.Time // since when the wait is prolonged, if it is
	lostAt  time.Time // when this call saw that the group has failed, zero before,
	lost    bool      // and that this is since a rank is lost,
	// of this number. The call goes on a little for the others.
	lostRank int
	other    uint64    // the call in which the peer waited for is instead,
	seen     time.Time // and since when
	asleep   bool      // it waits for other hosts too, and leaves its core to what brings their bytes
	yields   bool      // the peer waited for needs our core
	looks    bool      // this wait has not slept yet, and looks before it does
	shown    int       // the rank that others were told this wait is for,
	absent   bool      // and whether it had not begun the call then
	// The call of the control plane in which the peer waits for this rank, and how long this rank had waited when that was seen first.
	meets     uint64
	meetsFrom time.Duration
	gone      time.Duration // how long this rank had waited when it saw that the peer has left
	// Of a call that crosses hosts: the ranks there, and when they heard last that bytes move.
	fars []*far
	said time.Time
	from time.Time  // a rank of another host is silent from here on, if set
	rail rails.Rail // what this rank sleeps on, if set

	sleeper  sleeper
	entered  bool
	doorbell uint32
	waiting  []int32 // peers whose line is not there yet
	awaits   uint32  // what this rank's word of whom it waits for says, as far as this wait knows
}

// peer is a rank that a call waits for: a near one, of this host, or a far one. It says how it is heard, and who is to blame.
type peer interface {
	id() who
	// mark is its number in the words by which ranks of this host say for whom they wait.
	mark() int
	// looks reports whether a wait for it looks before it sleeps, and whether that keeps the peer from its core.
	looks(w *waiter) (looks, yields bool)
	// silence is for how long nothing has been heard of it, when w has waited for so long.
	silence(w *waiter, waited time.Duration) time.Duration
	// goesOn reports whether it may still do its part when the group has failed, and begun whether it has begun w's call.
	goesOn() bool
	begun(w *waiter) bool
	// elsewhere is an error where it waits in another call.
	elsewhere(w *waiter) error
	// late is the error of a wait for it at the deadline, and doing what can be seen of it.
	late(w *waiter) error
	doing(w *waiter) string
}

// teller says in words what a call exchanges with a rank of the group, and what that one does. Nothing says that it is not known.
type teller interface {
	sizes(rank int) string
	doing(rank int) string
}

// plain is the doing of most calls.
type plain struct{}

func (plain) doing(int) string { return "" }

// begin is the beginning of a call.
func (w *waiter) begin(p *port, with teller, c call, timeout time.Duration) {
	e := p.e
	w.e, w.port, w.with, w.call, w.timeout, w.polls, w.other, w.meets, w.woken, w.lostAt, w.awaits = e, p, with, c, timeout, 0, 0, 0, time.Time{}, time.Time{}, 0
	if w.fars != nil { // of a call before
		w.fars, w.from, w.rail, w.asleep = nil, time.Time{}, nil, false
	}
	if own := e.near(e.space.Rank); own.awaited.Load() != 0 && own.waiting.Load() == 0 {
		own.awaited.Store(0) // its wait has failed, and it goes on
	}
}

func (w *waiter) busy() {
	w.ended()
	if w.awaits != 0 {
		w.e.peers[w.e.space.Rank].awaited.CompareAndSwap(w.awaits, 0)
		w.awaits = 0
	}
	w.leave()
}

func (w *waiter) leave() {
	w.ended()
	if w.entered {
		w.entered = false
		w.e.leave(&w.sleeper)
		w.e.peers[w.e.space.Rank].waiting.CompareAndSwap(w.call.word(), 0)
	}
}

// idle waits a little for peer, one of those that the kernel waits for. It returns comm.ErrAborted, comm.ErrTimeout or
// comm.ErrOutOfStep when the wait is over without success.
func (w *waiter) idle(peer peer) error {
	w.polls++
	w.rank = peer.id().rank
	if w.e.step != nil {
		return w.e.step(idlePass, peer.mark())
	}
	if w.polls == 1 {
		w.since, w.told, w.heard, w.gone, w.lookAt, w.moves = time.Now(), 0, 0, 0, w.timeout/looksAtMoved, w.moves[:0]
		w.looks, w.yields = peer.looks(w)
		if w.over() && !w.spares(peer) {
			return w.aborted()
		}
		return nil // that took long enough for another look
	}
	if w.looks && !w.yields && w.polls%spinsPerLook != 0 {
		shm.Pause(1)
		return nil
	}
	waited := time.Since(w.since)
	if w.looks {
		switch {
		case !w.yields && waited < spinFor:
			return nil
		case waited < yieldFor:
			w.yields = true // from now on
			w.e.yield()
			return nil
		}
		w.looked(time.Now(), false)
	}
	if w.over() && !w.spares(peer) {
		return w.aborted()
	}
	silent := peer.silence(w, waited)
	if silent > w.timeout && !w.prolonged(silent) {
		if w.again() {
			return nil
		}
		return peer.late(w)
	}
	if waited >= w.told+w.e.tellEvery {
		w.tell(peer, waited)
	}
	w.await(peer)
	if first := w.port.waits.show(w); first || w.shown != w.rank {
		w.shown, w.absent = w.rank, !peer.begun(w)
	}
	if w.rail != nil {
		w.rail.Wait(w.most(silent))
		return nil
	}
	if !w.entered {
		w.entered = true
		w.doorbell = w.e.enter(&w.sleeper)
		w.e.near(w.e.space.Rank).waiting.Store(w.call.word())
		return nil // the caller looks once more, now that peers know
	}
	if err := peer.elsewhere(w); err != nil {
		return err
	}
	w.e.sleep(&w.sleeper, w.doorbell, w.most(silent))
	w.doorbell = w.e.doorbell.Load()
	return nil
}

// looked ends the part of a wait in which this rank looks.
func (w *waiter) looked(now time.Time, answered bool) {
	w.looks = false
	w.e.patience.Looked(now.Sub(w.e.began), now.Sub(w.since), answered)
}

// ended is the end of a wait, if this rank waits.
func (w *waiter) ended() {
	polls := w.polls
	if w.polls = 0; polls <= 1 || w.e.step != nil {
		return
	}
	now := time.Now()
	if w.looks {
		w.looked(now, true)
	}
	took := now.Sub(w.since)
	w.e.note(w.call.op, w.rank, took, w.absent)
	if took >= shownPause && w.call.epoch != 0 {
		w.e.pauses.add(pause{w.port.offset, w.rank, w.since.Sub(w.e.began), took})
	}
	w.absent = false
	w.port.waits.end()
}

// over reports whether waiting has no sense any more, for the heap or for the port.
func (w *waiter) over() bool { return w.e.abort.Load() != 0 || w.port.leaving.Load() }

// again reports whether the caller of a wait that is over looks once more: what it waits for may have come since it looked last, before the
// interruption or the deadline.
func (w *waiter) again() bool {
	if w.polls > lastLook {
		return false
	}
	w.polls = lastLook
	return true
}

// aborted ends a wait that is over once the caller has looked again.
func (w *waiter) aborted() error {
	if w.again() {
		return nil
	}
	return comm.ErrAborted
}

// prolonged reports whether a wait goes on that has been silent for longer than its timeout: this process was stopped, perhaps, and why the
// group has failed is on its way.
func (w *waiter) prolonged(silent time.Duration) bool {
	if w.woken.IsZero() && silent > w.timeout+lateWake {
		w.woken = time.Now()
	}
	return !w.woken.IsZero() && time.Since(w.woken) < newsGrace
}

// most is how long a wait sleeps at most that has been silent for so long.
func (w *waiter) most(silent time.Duration) time.Duration {
	if left := w.timeout - silent; left >= 0 {
		return min(sleepFor, left+time.Microsecond)
	}
	return sleepFor
}

// sizes is what this call exchanges with a rank, in parentheses.
func (w *waiter) sizes(rank int) string {
	if s := w.with.sizes(rank); s != "" {
		return " (" + s + ")"
	}
	return ""
}

// tell logs for whom this rank waits, and what can be seen of that rank.
func (w *waiter) tell(peer peer, waited time.Duration) {
	w.told = waited
	if log := w.e.space.Log; log != nil {
		log.Info("waiting", "rank", w.e.space.Name(w.e.space.Rank), "for", w.rank, "call", fmt.Sprintf("%d, %v%s", w.call.epoch, w.call.op, w.sizes(w.rank)),
			"waited", waited.Round(time.Second), "timeout", w.timeout, "seen", peer.doing(w))
	}
}

func (e *Engine) yield() {
	if e.bells != nil {
		runtime.Gosched()
		return
	}
	shm.Yield()
}

func (e *Engine) enter(s *sleeper) uint32 {
	if e.bells != nil {
		e.bells[e.space.Rank].enter(s)
		return 0
	}
	e.sleepers.Add(1)
	return e.doorbell.Load()
}

func (e *Engine) sleep(s *sleeper, doorbell uint32, d time.Duration) {
	if e.bells != nil {
		e.bells[e.space.Rank].sleep(s, d)
		return
	}
	shm.FutexWait(e.doorbell, doorbell, d)
}

func (e *Engine) leave(s *sleeper) {
	if e.bells != nil {
		e.bells[e.space.Rank].leave(s)
		return
	}
	e.sleepers.Add(^uint32(0))
}

// ring wakes rank p if it sleeps. It comes after the store that p waits for; both sides use sequentially consistent
// operations, so either p sees the store or we see p asleep.
func (e *Engine) ring(p int) {
	if e.bells != nil {
		e.bells[p].ring()
		return
	}
	if e.peers[p].sleepers.Load() != 0 {
		e.peers[p].doorbell.Add(1)
		shm.FutexWake(e.peers[p].doorbell)
	}
}
