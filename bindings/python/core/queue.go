package core

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Ticket is the place of an operation in its queue, from 1.
type Ticket uint64

// WordBytes is the memory that a queue shares with its user. Its first word counts the operations that have run, so
// ticket t is complete once the word is t or more.
const WordBytes = 64

// Offsets of the words.
const (
	wordRan      = 0  // 64 bits
	wordGate     = 8  // 32 bits: changes when an operation has run
	wordWaiting  = 12 // 32 bits: how many threads wait for the gate
	wordBell     = 16 // 32 bits: changes when there is work
	wordSleeping = 20 // 32 bits: whether the worker waits for the bell
)

// watchFor is how long a thread looks for what it waits for, giving its core to whoever is ready, before it sleeps. To wake
// a sleeper takes tens of microseconds where the core has to be woken too, as in many virtual machines.
const watchFor = 50 * time.Microsecond

// watch reports whether w changes from val within watchFor, or at once where looking does not pay.
func (q *queue) watch(w *atomic.Uint32, val uint32) bool {
	since := time.Now()
	if !q.patience.Looks(since.Sub(q.began)) {
		return w.Load() != val
	}
	for {
		changed := w.Load() != val
		if now := time.Now(); changed || now.Sub(since) > watchFor {
			q.patience.Looked(now.Sub(q.began), now.Sub(since), changed)
			return changed
		}
		shm.Yield()
	}
}

// forever bounds a sleep of the worker; it only goes to sleep again then.
const forever = time.Hour

// keepOutcomes is how many results and errors that nobody has asked for are kept.
const keepOutcomes = 4096

// outcome is what an operation left behind besides being complete.
type outcome struct {
	value int64
	err   error
}

type opKind uint8

const (
	opDo opKind = iota
	opBarrier
	opAllToAll
	opAllReduce
	opReduceScatter
	opAllGather
	opAllToAllByPlan
	opBroadcast
)

// op is one operation in the queue. It is used again, so that the hot ones allocate nothing.
type op struct {
	kind     opKind
	dst, src memory.View
	splits   alltoallv.Splits
	dtype    kernels.DType
	reduce   kernels.ReduceOp
	root     int
	do       func() (int64, error)
}

// queue runs operations one after the other on a thread of its own.
type queue struct {
	ran                               *atomic.Uint64
	gate, waiting, bell, sleepingWord *atomic.Uint32

	began    time.Time
	patience shm.Patience // of the worker and of those who wait for it

	mu      sync.Mutex
	ring    []*op
	idle    []*op
	head, n int
	last    Ticket // handed out
	closed  bool

	results  sync.Mutex
	kept     atomic.Int32
	outcomes map[Ticket]outcome
	stopped  chan struct{}
}

// start begins to serve. words is zeroed memory of WordBytes that lives as long as the process.
func (q *queue) start(words []byte, run func(*op) (int64, error)) {
	q.ran = shm.Word(words, wordRan)
	q.gate, q.waiting = shm.Word32(words, wordGate), shm.Word32(words, wordWaiting)
	q.bell, q.sleepingWord = shm.Word32(words, wordBell), shm.Word32(words, wordSleeping)
	q.ring = make([]*op, 16)
	q.outcomes, q.began = make(map[Ticket]outcome), time.Now()
	q.stopped = make(chan struct{})
	go q.serve(run)
}

// put adds an operation that fill describes.
func (q *queue) put(fill func(*op)) (Ticket, error) {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return 0, ErrClosed
	}
	if q.n == len(q.ring) {
		grown := make([]*op, 2*len(q.ring))
		k := copy(grown, q.ring[q.head:])
		copy(grown[k:], q.ring[:q.head])
		q.ring, q.head = grown, 0
	}
	var o *op
	if n := len(q.idle); n > 0 {
		o, q.idle = q.idle[n-1], q.idle[:n-1]
	} else {
		o = new(op)
	}
	fill(o)
	q.ring[(q.head+q.n)%len(q.ring)] = o
	q.n++
	q.last++
	t := q.last
	q.mu.Unlock()
	q.bell.Add(1)
	if q.sleepingWord.Load() != 0 {
		shm.FutexWake(q.bell)
	}
	return t, nil
}

// end makes the operations that are in the queue the last ones.
func (q *queue) end() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.bell.Add(1)
	shm.FutexWake(q.bell)
}

func (q *queue) serve(run func(*op) (int64, error)) {
	runtime.LockOSThread() // its thread sleeps on a futex, and is woken without the Go scheduler
	defer close(q.stopped)
	for {
		bell := q.bell.Load()
		q.mu.Lock()
		some, closed := q.n > 0, q.closed
		var o *op
		if some {
			o = q.ring[q.head]
		}
		q.mu.Unlock()
		if !some {
			if closed {
				return
			}
			if q.watch(q.bell, bell) {
				continue
			}
			q.sleepingWord.Store(1)
			if q.bell.Load() == bell {
				shm.FutexWait(q.bell, bell, forever)
			}
			q.sleepingWord.Store(0)
			continue
		}
		q.finish(guard(run, o))
	}
}

// guard runs an operation and turns a panic into an error.
func guard(run func(*op) (int64, error), o *op) (value int64, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("core: %w: %v\n%s", ErrPanic, p, debug.Stack())
		}
	}()
	return run(o)
}

// finish takes the first operation out of the queue.
func (q *queue) finish(value int64, err error) {
	t := Ticket(q.ran.Load() + 1)
	if value != 0 || err != nil {
		q.results.Lock()
		q.outcomes[t] = outcome{value, err}
		if len(q.outcomes) > keepOutcomes {
			for old := range q.outcomes {
				if old+keepOutcomes/2 < t {
					delete(q.outcomes, old)
				}
			}
		}
		q.kept.Store(int32(len(q.outcomes)))
		q.results.Unlock()
	}
	q.mu.Lock()
	o := q.ring[q.head]
	q.ring[q.head] = nil
	o.dst, o.src, o.do = memory.View{}, memory.View{}, nil
	q.idle = append(q.idle, o)
	q.head = (q.head + 1) % len(q.ring)
	q.n--
	q.mu.Unlock()
	q.ran.Store(uint64(t))
	q.gate.Add(1)
	if q.waiting.Load() != 0 {
		shm.FutexWake(q.gate)
	}
}

// Wait waits for a ticket, for at most d, and reports whether it is complete, its value and its error. It may return
// sooner without it, for instance because a signal arrived. It may be called again, also for a complete ticket.
func (q *queue) Wait(t Ticket, d time.Duration) (done bool, value int64, err error) {
	if gate := q.gate.Load(); Ticket(q.ran.Load()) < t && d > 0 && !q.watch(q.gate, gate) {
		q.waiting.Add(1)
		if Ticket(q.ran.Load()) < t {
			shm.FutexWait(q.gate, gate, d)
		}
		q.waiting.Add(^uint32(0))
	}
	if Ticket(q.ran.Load()) < t {
		return false, 0, q.known(t)
	}
	if q.kept.Load() == 0 {
		return true, 0, nil
	}
	q.results.Lock()
	defer q.results.Unlock()
	o := q.outcomes[t]
	return true, o.value, o.err
}

// known returns an error for a ticket that was never handed out.
func (q *queue) known(t Ticket) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t > q.last {
		return fmt.Errorf("core: %w: ticket %d, the last one is %d", ErrInvalid, t, q.last)
	}
	return nil
}

// current is the operation that runs, or the next one to.
func (q *queue) current() (t Ticket, busy bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return Ticket(q.ran.Load() + 1), q.n > 0
}
