package kernels

import (
	"sync"
	"sync/atomic"
	"time"
)

// Bell wakes the goroutines of one rank that wait for its peers, where all ranks live in one process. Across processes a
// futex on the segment's doorbell word does that.
type Bell struct {
	sleepers atomic.Int32
	mu       sync.Mutex
	asleep   []*Sleeper
	order    atomic.Uint32
}

// Sleeper is one goroutine's place at a bell. The zero Sleeper works; it must not be copied.
type Sleeper struct {
	wake  chan struct{}
	timer *time.Timer
}

// Ring wakes whoever sleeps. It is cheap when nobody does.
func (b *Bell) Ring() {
	if b.sleepers.Load() == 0 {
		return
	}
	b.mu.Lock()
	for _, s := range b.asleep {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
	b.mu.Unlock()
}

// Order tells the race detector that what was done before the calls so far comes before what is done after this one. It does
// not watch the words in mapped memory that see to it. Elsewhere it does nothing.
func (b *Bell) Order() {
	if raceDetector {
		b.order.Add(1)
	}
}

// Enter announces that s is about to sleep: a Ring from now on ends its next Sleep.
func (b *Bell) Enter(s *Sleeper) {
	if s.wake == nil {
		s.wake = make(chan struct{}, 1)
		s.timer = time.NewTimer(time.Hour)
		s.timer.Stop()
	}
	b.mu.Lock()
	b.asleep = append(b.asleep, s)
	b.mu.Unlock()
	b.sleepers.Add(1)
}

// Sleep blocks until a Ring or for d.
func (b *Bell) Sleep(s *Sleeper, d time.Duration) {
	s.timer.Reset(d)
	select {
	case <-s.wake:
		s.timer.Stop()
	case <-s.timer.C:
	}
}

// Leave takes back Enter.
func (b *Bell) Leave(s *Sleeper) {
	b.sleepers.Add(-1)
	b.mu.Lock()
	for i, t := range b.asleep {
		if t == s {
			last := len(b.asleep) - 1
			b.asleep[i], b.asleep[last] = b.asleep[last], nil
			b.asleep = b.asleep[:last]
			break
		}
	}
	b.mu.Unlock()
	select {
	case <-s.wake:
	default:
	}
}
