package host

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Engine runs the kernels of one rank on one symmetric heap, in Go. Launches on different streams run side by side; a
// communicator orders its own. It is a kernels.Engine.
type Engine struct {
	space    kernels.Space
	bells    []*Bell // wake the ranks' goroutines where all ranks live in this process, nil elsewhere
	abort    *atomic.Uint64
	doorbell *atomic.Uint32
	sleepers *atomic.Uint32
	peers    []near
	crowded  bool // ranks outnumber cores
	cores    []int
	waits    atomic.Uint32 // for peers on this rank's core
	// cacheBytes is how much a rank may send before source and destination together leave its share of a core's cache.
	cacheBytes int64
	why        func() error
	step       func(p point, peer int) error // nil but in tests
	pullFrom   int64                         // the least message that is read in its sender's memory,
	pullBytes  int64                         // and how much of it at once
	tellEvery  time.Duration                 // between words about a wait
	began      time.Time                     // from which patience counts
	patience   shm.Patience                  // of all waits of this rank

	waited []atomic.Pointer[[]waitedFor] // by opcode and peer
	pauses pauses

	mu    sync.Mutex
	tasks []*task
	ports []*port // open ones

	ringing sync.Mutex
	ringAll bool // bytes of other hosts concern all ranks of this one
	landed  map[any]func()
}

// coreCacheBytes is the working set up to which a core copies fast: 2 MiB of L2 and what a line or two of L3 adds, on the
// machines this was measured on (1.5 MiB sent still gains from the caches, 2 MiB does not).
const coreCacheBytes = 3 << 20

// New makes the engine of space.Rank. The heap outlives it. Where all ranks live in this process, their engines share bells, one for each rank;
// elsewhere there are none. why says for which reason the abort word was set.
func New(space kernels.Space, bells []*Bell, why func() error) *Engine {
	cores := runtime.GOMAXPROCS(0)
	e := &Engine{space: space, bells: bells, why: why, crowded: space.Size > cores, cores: shm.Cores(), cacheBytes: coreCacheBytes / 2, pullFrom: pullFromBytes, pullBytes: pullBytes, tellEvery: tellEvery, began: time.Now(), pauses: pauses{ring: make([]pause, keptPauses)}}
	if e.crowded {
		e.cacheBytes = e.cacheBytes * int64(cores) / int64(space.Size)
	}
	own := space.Segment(space.Rank)
	e.abort = shm.Word(own, kernels.AbortOffset)
	e.waited = make([]atomic.Pointer[[]waitedFor], len(families())<<numberBits)
	e.peers = make([]near, space.Size)
	if bells != nil {
		e.pullFrom = 0
	}
	for p := range e.peers {
		seg := space.Segment(p)
		w := e.near(p)
		w.e, w.who = e, who{space.Name(p), space.Host, p}
		w.doorbell, w.sleepers, w.core = shm.Word32(seg, doorbellOffset), shm.Word32(seg, sleepersOffset), shm.Word32(seg, coreOffset)
		w.waiting, w.awaited = shm.Word(seg, waitingOffset), shm.Word32(seg, awaitedOffset)
		w.passes = shm.Word32(seg, passesOffset)
	}
	mine := e.near(space.Rank)
	e.doorbell, e.sleepers = mine.doorbell, mine.sleepers
	e.abort.Store(0) // a process in whose place this one has come may have left these
	e.sleepers.Store(0)
	mine.waiting.Store(0)
	mine.awaited.Store(0)
	return e
}

// Interrupt sets the abort word and wakes who waits.
func (e *Engine) Interrupt() {
	e.abort.Store(1)
	e.ring(e.space.Rank)
}

// Ring wakes this rank if it sleeps, and the others of this host where they read what comes. It comes after bytes that another goroutine of this process has written in its segment.
func (e *Engine) Ring() {
	e.order(e.space.Rank)
	e.ring(e.space.Rank)
	e.ringing.Lock()
	defer e.ringing.Unlock()
	for i := 1; e.ringAll && i < e.space.Size; i++ {
		e.ring(e.peer(i))
	}
	for _, f := range e.landed {
		f()
	}
}

// landing has Ring call f, which does not wait, for key from now on; nil for none.
func (e *Engine) landing(key any, f func()) {
	e.ringing.Lock()
	defer e.ringing.Unlock()
	if f == nil {
		delete(e.landed, key)
		return
	}
	if e.landed == nil {
		e.landed = make(map[any]func())
	}
	e.landed[key] = f
}

// ringMates has Ring wake all ranks of this host from now on, until Leave.
func (e *Engine) ringMates() {
	e.ringing.Lock()
	defer e.ringing.Unlock()
	e.ringAll = true
}

// Leave comes before the memory of other ranks of this host goes. Ring does not touch it any more.
func (e *Engine) Leave() {
	e.ringing.Lock()
	defer e.ringing.Unlock()
	e.ringAll = false
}

// word is a 64-bit word of rank p's segment.
func (e *Engine) word(p int, off int64) *atomic.Uint64 {
	return shm.Word(e.space.Mem, int64(p)*e.space.Stride+off)
}

// task carries a launch through a stream.
type task struct {
	p  *port
	op kernels.Operation
}

// Run implements device.Task.
func (t *task) Run() error {
	op, p := t.op, t.p
	t.op, t.p = nil, nil
	p.e.mu.Lock()
	p.e.tasks = append(p.e.tasks, t)
	p.e.mu.Unlock()
	op.Noted().Started()
	return p.run(op)
}

// task is one that is free, or a new one.
func (e *Engine) task(p *port, op kernels.Operation) *task {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := len(e.tasks)
	if n == 0 {
		return &task{p, op}
	}
	t := e.tasks[n-1]
	e.tasks = e.tasks[:n-1]
	t.p, t.op = p, op
	return t
}
