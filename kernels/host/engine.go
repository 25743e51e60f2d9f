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
	peers    []peer
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

	waited []atomic.Pointer[[]atomic.Int64] // nanoseconds, by opcode and peer

	mu    sync.Mutex
	tasks []*task
	ports []*port // open ones
}

// coreCacheBytes is the working set up to which a core copies fast: 2 MiB of L2 and what a line or two of L3 adds, on the
// machines this was measured on (1.5 MiB sent still gains from the caches, 2 MiB does not).
const coreCacheBytes = 3 << 20

type peer struct {
	doorbell, sleepers, core, awaited *atomic.Uint32
	waiting                           *atomic.Uint64
}

// New makes the engine of space.Rank. The heap outlives it. Where all ranks live in this process, their engines share bells, one for each rank;
// elsewhere there are none. why says for which reason the abort word was set.
func New(space kernels.Space, bells []*Bell, why func() error) *Engine {
	cores := runtime.GOMAXPROCS(0)
	e := &Engine{space: space, bells: bells, why: why, crowded: space.Size > cores, cores: shm.Cores(), cacheBytes: coreCacheBytes / 2, pullFrom: pullFromBytes, pullBytes: pullBytes, tellEvery: tellEvery, began: time.Now()}
	if e.crowded {
		e.cacheBytes = e.cacheBytes * int64(cores) / int64(space.Size)
	}
	own := space.Segment(space.Rank)
	e.abort = shm.Word(own, kernels.AbortOffset)
	e.waited = make([]atomic.Pointer[[]atomic.Int64], len(families())<<numberBits)
	e.peers = make([]peer, space.Size)
	if bells != nil {
		e.pullFrom = 0
	}
	for p := range e.peers {
		seg := space.Segment(p)
		w := &e.peers[p]
		w.doorbell, w.sleepers, w.core = shm.Word32(seg, doorbellOffset), shm.Word32(seg, sleepersOffset), shm.Word32(seg, coreOffset)
		w.waiting, w.awaited = shm.Word(seg, waitingOffset), shm.Word32(seg, awaitedOffset)
	}
	e.doorbell, e.sleepers = e.peers[space.Rank].doorbell, e.peers[space.Rank].sleepers
	return e
}

// Interrupt sets the abort word and wakes who waits.
func (e *Engine) Interrupt() {
	e.abort.Store(1)
	e.ring(e.space.Rank)
}

// Ring wakes this rank if it sleeps. It comes after bytes that another goroutine of this process has written in its segment.
func (e *Engine) Ring() {
	e.order(e.space.Rank)
	e.ring(e.space.Rank)
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
