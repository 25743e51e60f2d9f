package host

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
	asleep   []*sleeper
	ordered  atomic.Uint32
	kept     [][]byte // memory of the rank that peers may read for as long as they have the bell
}

// NewBells makes a bell for each of n ranks.
func NewBells(ranks int) []*Bell {
	bells := make([]*Bell, ranks)
	for i := range bells {
		bells[i] = new(Bell)
	}
	return bells
}

// sleeper is one goroutine's place at a bell. The zero sleeper works; it must not be copied.
type sleeper struct {
	wake  chan struct{}
	timer *time.Timer
}

// ring wakes whoever sleeps. It is cheap when nobody does.
func (b *Bell) ring() {
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

// keep is for memory that the rank itself has no use for any more.
func (b *Bell) keep(mem []byte) {
	if mem == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.kept = append(b.kept, mem)
}

// order tells the race detector that what was done before the calls so far comes before what is done after this one. It does
// not watch the words in mapped memory that see to it. Elsewhere it does nothing.
func (b *Bell) order() {
	if raceDetector {
		b.ordered.Add(1)
	}
}

// enter announces that s is about to sleep: a ring from now on ends its next Sleep.
func (b *Bell) enter(s *sleeper) {
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

// sleep blocks until a ring or for d.
func (b *Bell) sleep(s *sleeper, d time.Duration) {
	s.timer.Reset(d)
	select {
	case <-s.wake:
		s.timer.Stop()
	case <-s.timer.C:
	}
}

// leave takes back enter.
func (b *Bell) leave(s *sleeper) {
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
