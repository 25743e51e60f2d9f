package flight

import (
	"math/bits"
	"slices"
	"sync"
	"time"
)

// Past is the number of failures that a rank keeps.
const Past = 16

// Fault is a kind of failure and the rank that is to blame, -1 where none is.
type Fault struct {
	Kind    string
	Culprit int
}

// Failure is a fault that has happened.
type Failure struct {
	Fault
	// Group and Job are those in whose numbers the culprit is.
	Group string
	Job   uint64
	At    time.Time
	// Silent is the time from the culprit's last sign of life to At, negative where no connection tells it.
	Silent time.Duration
	// Healed is the end of the first call that went well on a communicator that was made afterwards; on a GPU the time when it was enqueued.
	Healed time.Time
	Err    error
}

// SpreadBuckets is the number of buckets of a Spread. The one at i has times below 2^i times SpreadShortest, the last one all others.
const (
	SpreadBuckets  = 18
	SpreadShortest = time.Millisecond
)

// Spread is a histogram of times.
type Spread struct {
	Count   uint64
	Sum     time.Duration
	Buckets [SpreadBuckets]uint64
}

func (s *Spread) add(d time.Duration) {
	d = max(0, d)
	s.Count++
	s.Sum += d
	s.Buckets[min(bits.Len64(uint64(d/SpreadShortest)), SpreadBuckets-1)]++
}

// history is what went wrong with the groups of a rank, and what came of it. The lock of the rank guards it.
type history struct {
	epoch    int
	members  []int // of the group of today, as ranks of the group that met
	failures []Failure
	faults   map[Fault]uint64 // whose culprits are seats
	changes  []Change         // of where experts are
	hurt     bool             // one of these is not healed
	// By kind of fault: from the last sign of life to the report, and from there to the first call that works again.
	detected, healed map[string]Spread
}

// Regroup notes the group that the rank is in now: its epoch, which grows whenever a group shrinks or takes ranks in, and its ranks as those
// of the group that met.
func (r *Rank) Regroup(epoch int, members []int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.past.epoch, r.past.members = epoch, members
}

// Epoch is that of the rank's group.
func (r *Rank) Epoch() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.past.epoch
}

// Succeeds has r, a rank of the group that old's group has become, go on with what went wrong before, and with where experts moved. Old has
// that no more, and is not in metrics any more: r has its labels.
func (r *Rank) Succeeds(old *Rank) {
	old.mu.Lock()
	past := old.past
	old.passed = true
	host, hosts := old.Host, old.Hosts
	old.past = history{epoch: past.epoch, members: past.members}
	old.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	past.epoch, past.members = r.past.epoch, r.past.members
	r.past = past
	if hosts > 1 { // which keep their numbers too
		r.Host = host
	}
}

// LastFault is when the last failure was noted, the zero time where none was.
func (r *Rank) LastFault() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last == nil {
		return time.Time{}
	}
	return r.last.At
}

// Failed notes a failure. Silent is how long the culprit gave no sign of life, negative where that is not known. Tell follows it.
func (r *Rank) Failed(kind string, culprit int, silent time.Duration, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := Failure{Fault: Fault{kind, culprit}, Group: r.Group, Job: r.Job, At: time.Now(), Silent: silent, Err: err}
	r.last = &f
	r.past.add(f)
	if r.past.faults == nil {
		r.past.faults = map[Fault]uint64{}
	}
	r.past.faults[Fault{kind, r.Seat(culprit)}]++
}

// Tell tells those who called OnFailure, and waits for them: whoever learns of the failure next may end the process.
func (r *Rank) Tell() { r.tell(func() []listener { return process.told }) }

// Ends tells those who called OnEnd, and waits for them, that the rank leaves its group, where that has failed and it has not gone on since.
func (r *Rank) Ends() {
	r.mu.Lock()
	over := r.past.hurt && !r.passed
	r.mu.Unlock()
	if over {
		r.tell(func() []listener { return process.ends })
	}
}

func (r *Rank) tell(whom func() []listener) {
	process.Lock()
	listeners := slices.Clone(whom())
	process.Unlock()
	var all sync.WaitGroup
	for _, t := range listeners {
		done := make(chan struct{})
		go func() {
			defer close(done)
			t.tell(r)
		}()
		all.Go(func() {
			select {
			case <-done:
			case <-time.After(t.within):
			}
		})
	}
	all.Wait()
}

// Broke tells those who called OnFailure, and waits for them, that a call has left the communicator broken.
func (c *Recorder) Broke() { c.r.Tell() }

// Erred tells those who called OnError, and waits for them, that a call has failed and left the communicator usable.
func (c *Recorder) Erred() { c.r.tell(func() []listener { return process.erred }) }

func (h *history) add(f Failure) {
	if len(h.failures) == Past {
		h.failures = slices.Delete(h.failures, 0, 1)
	}
	h.failures = append(h.failures, f)
	if h.hurt = true; f.Silent >= 0 {
		note(&h.detected, f.Kind, f.Silent)
	}
}

// heal notes that a call has gone well, of a communicator that was made at a time.
func (h *history) heal(made, now time.Time) {
	h.hurt = false
	for i := range h.failures {
		switch f := &h.failures[i]; {
		case !f.Healed.IsZero():
		case f.At.After(made):
			h.hurt = true
		default:
			f.Healed = now
			note(&h.healed, f.Kind, now.Sub(f.At))
		}
	}
}

func note(spreads *map[string]Spread, kind string, d time.Duration) {
	if *spreads == nil {
		*spreads = map[string]Spread{}
	}
	s := (*spreads)[kind]
	s.add(d)
	(*spreads)[kind] = s
}
