// Package double is a rail within one process for tests: puts take a random time, and those with different words land in any order. A rank
// can be lost, after which nothing that it has sent or is sent to it lands.
package double

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// Net joins the ends of one process.
type Net struct {
	latest time.Duration

	mu   sync.Mutex
	rng  *rand.Rand
	ends []*end // by address
	lost map[int]bool
}

// New makes a net whose puts take up to latest, drawn from seed.
func New(seed uint64, latest time.Duration) *Net {
	return &Net{latest: latest, rng: rand.New(rand.NewPCG(seed, 0)), lost: map[int]bool{}}
}

// Lose cuts a rank off. Messages on their way are lost.
func (n *Net) Lose(rank int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lost[rank] = true
}

// stream is the puts of one rank that name one word of another.
type stream struct {
	peer   int
	signal int64
}

type put struct {
	from, to int // ranks, by whom they are sent to
	key      uint64
	dst      *end
	place    int64
	data     []byte
	signal   int64
	seq      uint64
}

// landed is how far the puts of a stream have: all up to seq, which is in the word, and some early ones.
type landed struct {
	seq   uint64
	early []uint64
}

type end struct {
	net  *Net
	cfg  rails.Config
	name int

	refused atomic.Int64

	mu          sync.Mutex // after net.mu
	closed      bool
	interrupted bool
	windows     [][2]int64
	peers       map[int]*end
	sent        map[stream]uint64
	got         map[stream]*landed
	under       int // puts that have not left
	begun       uint64
	first       uint64          // puts that have left with all before them
	gone        map[uint64]bool // and those that have left before an older one
	left        chan struct{}
	came        chan struct{} // a put has landed, or the end is interrupted
}

// Open makes an end.
func (n *Net) Open(cfg rails.Config) (rails.Rail, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := &end{net: n, cfg: cfg, name: len(n.ends), peers: map[int]*end{}, sent: map[stream]uint64{}, got: map[stream]*landed{}, left: make(chan struct{}, 1), gone: map[uint64]bool{},
		came: make(chan struct{}, 1)}
	n.ends = append(n.ends, e)
	return e, nil
}

func (e *end) Address() []byte { return binary.LittleEndian.AppendUint32(nil, uint32(e.name)) }

func (e *end) Connect(peer int, address []byte) error {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if len(address) != 4 || int(binary.LittleEndian.Uint32(address)) >= len(e.net.ends) {
		return fmt.Errorf("double: %w: address %x", comm.ErrMismatch, address)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.peers[peer] = e.net.ends[binary.LittleEndian.Uint32(address)]
	return nil
}

// Meet has nobody to wait for but ranks that are lost.
func (e *end) Meet(context.Context) error {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	for peer := range e.peers {
		if e.net.lost[peer] || e.net.lost[e.cfg.Rank] {
			return &comm.PeerError{Rank: peer, Err: fmt.Errorf("double: %w", comm.ErrTimeout)}
		}
	}
	return nil
}

func (e *end) Open(off, n int64) error {
	if off < 0 || n < 0 || off > int64(len(e.cfg.Segment))-n {
		return comm.Invalid("double", "a window of %d bytes at %d of a segment of %d", n, off, len(e.cfg.Segment))
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if last := len(e.windows) - 1; last >= 0 && e.windows[last][1] == off {
		e.windows[last][1] += n
		return nil
	}
	e.windows = append(e.windows, [2]int64{off, off + n})
	return nil
}

// usable returns why there are no more puts. The caller holds mu.
func (e *end) usable() error {
	switch {
	case e.closed:
		return fmt.Errorf("double: %w", comm.ErrClosed)
	case e.interrupted:
		return fmt.Errorf("double: %w", comm.ErrAborted)
	}
	return nil
}

func (e *end) Put(peer int, place int64, src []byte, signal int64) error {
	e.net.mu.Lock()
	takes := time.Duration(e.net.rng.Int64N(int64(e.net.latest) + 1))
	cut := e.net.lost[peer] || e.net.lost[e.cfg.Rank]
	e.net.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	dst := e.peers[peer]
	switch err := e.usable(); {
	case err != nil:
		return err
	case dst == nil || peer == e.cfg.Rank:
		return comm.Invalid("double", "rank %d is not connected to rank %d", e.cfg.Rank, peer)
	case cut:
		return &comm.PeerError{Rank: peer, Err: fmt.Errorf("double: %w", comm.ErrPeerLost)}
	}
	s := stream{peer, signal}
	e.sent[s]++
	p := put{from: e.cfg.Rank, to: peer, key: e.cfg.Key, dst: dst, place: place, signal: signal, seq: e.sent[s]}
	e.under++
	e.begun++
	number := e.begun
	time.AfterFunc(takes, func() {
		e.mu.Lock()
		closed := e.closed // then its memory may be gone
		if !closed {
			p.data = slices.Clone(src) // not before: its memory is the rail's until now
		}
		e.under--
		for e.gone[number] = true; e.gone[e.first+1]; e.first++ {
			delete(e.gone, e.first+1)
		}
		e.mu.Unlock()
		if closed {
			return
		}
		select {
		case e.left <- struct{}{}:
		default:
		}
		e.net.mu.Lock()
		cut := e.net.lost[p.from] || e.net.lost[p.to]
		e.net.mu.Unlock()
		if !cut && dst.land(&p) {
			dst.cfg.Ring()
		}
	})
	return nil
}

// land reports whether a put has changed anything.
func (e *end) land(p *put) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.interrupted {
		return false
	}
	n := int64(len(p.data))
	if p.key != e.cfg.Key || p.from >= e.cfg.Size || p.signal%8 != 0 || !e.isOpen(p.signal, 8) || n > 0 && !e.isOpen(p.place, n) {
		e.refused.Add(1)
		return false
	}
	s := stream{p.from, p.signal}
	word := shm.Word(e.cfg.Segment, p.signal)
	l := e.got[s]
	if l == nil {
		l = &landed{}
		e.got[s] = l
	}
	if p.seq <= l.seq || slices.Contains(l.early, p.seq) {
		e.refused.Add(1)
		return false
	}
	copy(e.cfg.Segment[p.place:], p.data)
	l.early = append(l.early, p.seq)
	slices.Sort(l.early)
	for len(l.early) > 0 && l.early[0] == l.seq+1 {
		l.seq, l.early = l.early[0], l.early[1:]
	}
	word.Store(l.seq)
	e.wake()
	return true
}

func (e *end) Forget(from, to int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	within := func(s stream) bool { return s.signal >= from && s.signal < to }
	maps.DeleteFunc(e.sent, func(s stream, _ uint64) bool { return within(s) })
	maps.DeleteFunc(e.got, func(s stream, _ *landed) bool { return within(s) })
}

func (e *end) isOpen(off, n int64) bool {
	return slices.ContainsFunc(e.windows, func(w [2]int64) bool { return off >= w[0] && off <= w[1] && n <= w[1]-off })
}

func (e *end) Left() (begun, left uint64, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.begun, e.first, e.usable()
}

func (e *end) Flush(ctx context.Context) error {
	for {
		over := ctx.Err() != nil // before the last look
		e.mu.Lock()
		err, under := e.usable(), e.under
		e.mu.Unlock()
		switch {
		case under == 0 && !errors.Is(err, comm.ErrClosed):
			return nil
		case err != nil:
			return err
		case over:
			return context.Cause(ctx)
		}
		select {
		case <-e.left:
		case <-time.After(time.Millisecond): // another Flush has taken the word
		case <-ctx.Done():
		}
	}
}

func (e *end) wake() {
	select {
	case e.came <- struct{}{}:
	default:
	}
}

func (e *end) Wait(d time.Duration) {
	select {
	case <-e.came:
	case <-time.After(d):
	}
}

func (e *end) Progress() bool { return false }
func (e *end) Resume()        {}
func (e *end) Refused() int64 { return e.refused.Load() }

func (e *end) Interrupt() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.interrupted = true
	e.wake()
}

func (e *end) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	return nil
}
