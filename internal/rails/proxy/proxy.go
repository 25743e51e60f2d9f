// Package proxy puts bytes to other hosts for the kernels of a rank: it reads their queues (kernels/cuda) and drives the rank's rail.
package proxy

import (
	"errors"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/kernels/cuda"
)

// nap is how long the proxy sleeps between two looks at the queues while kernels may ask for something: a GPU can wake no thread. For lull looks
// after a put it sleeps on the rail, and what comes from other hosts meanwhile needs no other thread. That costs more than a plain sleep.
const (
	nap  = 10 * time.Microsecond
	lull = 100
)

// queue is one that is read, and what of it is on its way: how many of its puts, and of the rail's, had begun at some time.
type queue struct {
	*cuda.Queue
	marks []mark
}

type mark struct{ puts, begun uint64 }

// Proxy is that of one rank. It has a goroutine of its own.
type Proxy struct {
	rail    rails.Rail
	segment []byte
	wake    chan struct{} // something has been launched, or the proxy is to end
	ended   chan struct{}

	mu     sync.Mutex // held while queues are read
	queues []*queue
	over   bool
	err    error
}

// New starts the proxy of a rank whose kernels have bytes in segment, that of the rail. It reports a failure by Err only. The caller calls
// Interrupt before the rail is closed.
func New(rail rails.Rail, segment []byte) *Proxy {
	p := &Proxy{rail: rail, segment: segment, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	go p.run()
	return p
}

// Add has the proxy read a queue, until Remove.
func (p *Proxy) Add(q *cuda.Queue) {
	p.mu.Lock()
	p.queues = append(p.queues, &queue{Queue: q})
	p.mu.Unlock()
	p.Wake()
}

// Remove has the proxy leave a queue alone. When it returns the queue's memory may go. No kernel posts to it any more, and what it has
// posted has landed, or the rail is interrupted.
func (p *Proxy) Remove(q *cuda.Queue) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queues = slices.DeleteFunc(p.queues, func(r *queue) bool { return r.Queue == q })
}

// Wake has the proxy look after what is launched. It is called after Launched or Captured of a queue, and costs nothing to speak of.
func (p *Proxy) Wake() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Err is why the proxy has ended before Interrupt: a kernel's descriptor was bad, or the rail failed. nil while all is well. A rank of
// another host that is lost is no such reason: puts to it are dropped, and the group tells of it.
func (p *Proxy) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Interrupt interrupts the rail and ends the proxy. The rank's kernels have been told to give up before. When it returns the proxy touches no
// memory, so queues may be given back, and nothing lands in the segment any more, which goes after the rail's Close. It is idempotent.
func (p *Proxy) Interrupt() {
	p.rail.Interrupt()
	p.mu.Lock()
	p.over = true
	p.mu.Unlock()
	p.Wake()
	<-p.ended
}

func (p *Proxy) run() {
	defer close(p.ended)
	for looks := 0; ; looks++ {
		put, busy, err := p.round()
		switch {
		case err != nil:
			p.end(err)
			return
		case put:
			looks = 0
		case busy && looks < lull:
			exactSleep()
			p.rail.Wait(nap)
			runtime.Gosched() // a goroutine in short system calls else has a processor for 10 ms, whoever waits for one
		case busy:
			if looks == lull {
				p.rail.Resume()
			}
			sleep(nap)
			runtime.Gosched()
		default:
			p.rail.Resume()
			<-p.wake
			looks = 0
		}
	}
}

// end notes why the proxy ends, unless it was told to.
func (p *Proxy) end(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.over && !errors.Is(err, comm.ErrAborted) && !errors.Is(err, comm.ErrClosed) {
		p.err = err
	}
	p.rail.Resume()
}

// round starts all puts that kernels have asked for, and tells them which have left. put says whether there were any, and busy whether kernels
// may ask for more, or some have not left.
func (p *Proxy) round() (put, busy bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return false, false, comm.ErrClosed
	}
	for _, q := range p.queues {
		before := q.Read()
		for {
			d, ok := q.Next()
			if !ok {
				break
			}
			if err := p.put(d); err != nil {
				return true, true, err
			}
		}
		busy = busy || q.Busy()
		if q.Read() == before && len(q.marks) == 0 {
			continue
		}
		begun, left, err := p.rail.Left()
		if err != nil {
			return true, true, err
		}
		if q.Read() != before {
			put = true
			q.marks = append(q.marks, mark{q.Read(), begun})
		}
		q.leave(left)
		busy = busy || len(q.marks) > 0
	}
	return put, busy, nil
}

// leave tells kernels which of the queue's puts have left, when that many of the rail's have.
func (q *queue) leave(left uint64) {
	n := 0
	for n < len(q.marks) && q.marks[n].begun <= left {
		n++
	}
	if n > 0 {
		q.Done(q.marks[n-1].puts)
		q.marks = slices.Delete(q.marks, 0, n)
	}
}

// put starts one put.
func (p *Proxy) put(d cuda.Put) error {
	if n := int64(len(p.segment)); d.Bytes < 0 || d.Source < 0 || d.Source > n || d.Bytes > n-d.Source {
		return comm.Invalid("proxy", "a kernel puts %d bytes at %d of a segment of %d to rank %d", d.Bytes, d.Source, n, d.Peer)
	}
	err := p.rail.Put(d.Peer, d.Place, p.segment[d.Source:d.Source+d.Bytes], d.Signal)
	if errors.Is(err, comm.ErrPeerLost) {
		return nil
	}
	return err
}
