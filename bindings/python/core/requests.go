package core

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/internal/shm"
)

// Request is an operation between two ranks that was submitted and may have to wait for its peer. Requests run next to each other and to the
// queue of their Comm. Messages to one peer are sent in the order of their requests, and so are receives of one tag from one peer.
type Request struct {
	of            *requests
	number        uint64
	run           func(begun func()) error
	turns         []turn // that it has not had
	begins        bool   // it has its turns
	peers         []int  // that it waits for
	from          []int  // by message, the rank that it was received from
	over, waiting atomic.Uint32
	err           error // once it is over
}

// turn is what requests take one after the other: to begin sends to a peer, or receives from it.
type turn struct {
	receive bool
	peer    int
}

// requests are those of one Comm that are not over.
type requests struct {
	mu     sync.Mutex
	last   uint64
	closed bool
	lines  map[turn][]*Request // that have not begun, the first being about to
	under  map[*Request]struct{}
	empty  chan struct{} // closed once they are closed and none is left
	watch  func(w *atomic.Uint32, val uint32) bool
}

func (r *requests) start(watch func(w *atomic.Uint32, val uint32) bool) {
	r.lines, r.under, r.empty = make(map[turn][]*Request), make(map[*Request]struct{}), make(chan struct{})
	r.watch = watch
}

// submit has a request run once it has its turns.
func (r *requests) submit(q *Request) error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return ErrClosed
	}
	r.last++
	q.of, q.number = r, r.last
	r.under[q] = struct{}{}
	for _, t := range q.turns {
		r.lines[t] = append(r.lines[t], q)
	}
	r.begin(q)
	r.mu.Unlock()
	return nil
}

// begin runs a request if it is the first in all its lines. r is locked.
func (r *requests) begin(q *Request) {
	for _, t := range q.turns {
		if r.lines[t][0] != q {
			return
		}
	}
	if !q.begins {
		q.begins = true
		go q.serve()
	}
}

func (q *Request) serve() {
	var once sync.Once
	begun := func() { once.Do(q.begun) }
	err := q.guarded(begun)
	begun()
	q.end(err)
}

func (q *Request) guarded(begun func()) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("core: %w: %v", ErrPanic, p)
		}
	}()
	return q.run(begun)
}

// begun lets those begin that come behind q.
func (q *Request) begun() {
	r := q.of
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range q.turns {
		r.lines[t] = r.lines[t][1:]
	}
	for _, t := range q.turns {
		if line := r.lines[t]; len(line) > 0 {
			r.begin(line[0])
		} else {
			delete(r.lines, t)
		}
	}
	q.turns = nil
}

// end tells those who wait for q.
func (q *Request) end(err error) {
	q.err, q.run = err, nil
	q.of.mu.Lock()
	delete(q.of.under, q)
	if q.of.closed && len(q.of.under) == 0 {
		close(q.of.empty)
	}
	q.of.mu.Unlock()
	q.over.Store(1)
	if q.waiting.Load() != 0 {
		shm.FutexWake(&q.over)
	}
}

// Wait waits until the request is over, for at most d, and reports whether it is, from which rank each of its messages came, and its error. It
// may return sooner without it. It may be called again.
func (q *Request) Wait(d time.Duration) (over bool, from []int, err error) {
	if q.over.Load() == 0 && d > 0 && !q.of.watch(&q.over, 0) {
		q.waiting.Add(1)
		if q.over.Load() == 0 {
			shm.FutexWait(&q.over, 0, d)
		}
		q.waiting.Add(^uint32(0))
	}
	if q.over.Load() == 0 {
		return false, nil, nil
	}
	return true, q.from, q.err
}

// close refuses further requests.
func (r *requests) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.closed = true
		if len(r.under) == 0 {
			close(r.empty)
		}
	}
}

// settle waits until all requests are over. They are closed.
func (r *requests) settle(d time.Duration) bool {
	select {
	case <-r.empty:
		return true
	case <-time.After(d):
		return false
	}
}

// oldest is the number of the first request that is under way and may wait for a peer, 0 if there is none.
func (r *requests) oldest(peer int) (number uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for q := range r.under {
		if slices.Contains(q.peers, peer) && (number == 0 || q.number < number) {
			number = q.number
		}
	}
	return number
}
