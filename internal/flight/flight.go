// Package flight keeps what each rank of this process does: its last calls, how often and how long it made which, for whom it waited, what
// went wrong. Package comm makes a Rank, communicators and heaps write to it, and package observe reads it.
//
// A call takes the lock of its rank twice, for a few stores each time, and allocates nothing. Whatever can be looked up when somebody asks
// (the heap, running calls, the seconds of waits) is not written at all: a Rank keeps functions that tell it.
package flight

import (
	"math/bits"
	"slices"
	"sync"
	"time"
)

// Kept is the number of calls that a rank keeps.
const Kept = 2048

// Buckets is the number of buckets of a histogram. The one at i has durations below 2^i times Shortest, the last one all others.
const (
	Buckets  = 26
	Shortest = time.Microsecond
)

// Rank is what is known of one rank. Its methods may be called from several goroutines.
type Rank struct {
	// Number is the rank in the group that met, Size that group's, Host its host there, and Local its local rank.
	Number, Size, Host, Local int
	// Group is that group's name, and Job an identity that its ranks share and those of other jobs do not.
	Group string
	Job   uint64

	began time.Time

	mu     sync.Mutex
	calls  []Call // a ring
	made   uint64 // calls
	kinds  []*Kind
	peers  []Traffic
	faults map[Fault]uint64
	last   *Failure
	parts  []*Part
	waited map[Wait]time.Duration // of heaps that are gone
}

// Call is one call of a communicator.
type Call struct {
	// Seq is its number among the calls of this rank, from 1.
	Seq uint64
	// Group is the group of its communicator. ID is the communicator's, the same on all ranks of its group, and Number the call's number there,
	// 0 for a call that not all ranks make.
	Group  string
	ID     int64
	Number uint64
	// Members are the ranks of that group, as ranks of the group that met. They are not to be changed.
	Members []int
	// Operation and Algorithm are names.
	Operation, Algorithm string
	// Payload is the length of this rank's input in bytes, -1 where it is not known before the call runs.
	Payload int64
	// Streamed says that the call was enqueued on a stream.
	Streamed bool
	// Enqueued, Started and Finished count from the rank's beginning. Started and Finished are 0 until then, and on GPUs, where the host does
	// not see them.
	Enqueued, Started, Finished time.Duration
	// Err is what it came to.
	Err error
}

// Kind is the calls of one operation by one algorithm.
type Kind struct {
	Operation, Algorithm string
	// Begun calls were launched, Ended ones have run, Failed ones of these with an error. The end of Unseen ones is on a GPU.
	Begun, Ended, Failed, Unseen uint64
	Payload                      uint64
	// Timed calls took Seconds together. Where calls run on a GPU none is timed.
	Timed   uint64
	Took    time.Duration
	Buckets [Buckets]uint64
}

// Traffic is the bytes of exchanges with a rank, as their splits say.
type Traffic struct{ Sent, Received uint64 }

// Wait is a reason to wait.
type Wait struct {
	Operation string
	Peer      int
}

// Fault is a kind of failure and the rank that is to blame, -1 where none is.
type Fault struct {
	Kind    string
	Culprit int
}

// Failure is a fault that has happened.
type Failure struct {
	Fault
	At  time.Time
	Err error
}

// Running is a call that runs, as far as the host sees.
type Running struct {
	Group     string
	ID        int64
	Operation string
	Number    uint64
	Since     time.Time
	// WaitsFor is the rank that it waits for, -1 if it waits for none or not for long.
	WaitsFor int
	// Absent are the ranks that have not begun this call.
	Absent []int
}

// Heap is the memory of a symmetric heap.
type Heap struct {
	Device                                    string
	Reserved, Used, Peak, LargestFree, Memory int64
	// Awaits says for each rank of the heap for whom it waits, -1 for nobody.
	Awaits []int
}

// Part is something that a rank has, and what it tells. Functions that are nil tell nothing. Ranks that they name are those of the group
// that met.
type Part struct {
	Heap    func() Heap
	Running func() []Running
	Waited  func(add func(operation string, peer int, d time.Duration))
	// Counters are numbers that only grow, by name.
	Counters func(add func(name string, n uint64))
	// Heard is how long ago each rank gave a sign of life, negative where that is not known.
	Heard func() []time.Duration

	mu   sync.Mutex // held while it tells
	gone bool
}

// New is a rank that has met no others yet.
func New(number, size int) *Rank {
	return &Rank{Number: number, Size: size, began: time.Now(), faults: map[Fault]uint64{}, waited: map[Wait]time.Duration{}}
}

// Began is the time from which durations count.
func (r *Rank) Began() time.Time { return r.began }

// Add has a rank tell of p, until drop is called: after it has returned, no function of p runs.
func (r *Rank) Add(p *Part) (drop func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.parts) == 0 {
		enlist(r)
	}
	r.parts = append(r.parts, p)
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.gone {
			return
		}
		kept := map[Wait]time.Duration{}
		if p.gone = true; p.Waited != nil {
			p.Waited(func(op string, peer int, d time.Duration) { kept[Wait{op, peer}] += d })
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.parts = slices.DeleteFunc(r.parts, func(q *Part) bool { return q == p })
		for w, d := range kept {
			r.waited[w] += d
		}
		if len(r.parts) == 0 {
			delist(r)
		}
	}
}

// Failed notes a failure, and tells those who called OnFailure.
func (r *Rank) Failed(kind string, culprit int, err error) {
	f := Failure{Fault{kind, culprit}, time.Now(), err}
	r.mu.Lock()
	r.faults[f.Fault]++
	r.last = &f
	r.mu.Unlock()
	process.Lock()
	defer process.Unlock()
	for _, tell := range process.told {
		go tell(r)
	}
}

// Recorder is where one communicator notes its calls.
type Recorder struct {
	r       *Rank
	group   string
	id      int64
	members []int // rank of the group that met, by rank of the communicator's
	made    uint64
	kinds   []*Kind // those it has used
}

// Recorder is that of a communicator with an id over members of a group, which are ranks of the group that met.
func (r *Rank) Recorder(group string, id int64, members []int) *Recorder {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.calls == nil {
		r.calls = make([]Call, Kept)
		r.peers = make([]Traffic, r.Size)
	}
	return &Recorder{r: r, group: group, id: id, members: members}
}

// Ticket is a call that has begun.
type Ticket struct {
	r   *Rank
	k   *Kind
	seq uint64
}

// Begin notes a call. Alone says that not all ranks make it. Send and recv are the bytes from and to the ranks of the communicator's group,
// nil where splits do not say that.
func (c *Recorder) Begin(operation, algorithm string, payload int64, streamed, alone bool, send, recv []int64) Ticket {
	r := c.r
	now := time.Since(r.began)
	r.mu.Lock()
	k := c.kind(operation, algorithm)
	k.Begun++
	if payload > 0 {
		k.Payload += uint64(payload)
	}
	r.made++
	var number uint64
	if !alone {
		c.made++
		number = c.made
	}
	e := &r.calls[r.made%Kept]
	*e = Call{Seq: r.made, Group: c.group, ID: c.id, Number: number, Members: c.members, Operation: operation, Algorithm: algorithm, Payload: payload, Streamed: streamed, Enqueued: now}
	if !streamed {
		e.Started = now
	}
	for p, n := range send {
		if to := c.members[p]; to != r.Number {
			r.peers[to].Sent += uint64(n)
			r.peers[to].Received += uint64(recv[p])
		}
	}
	t := Ticket{r, k, r.made}
	r.mu.Unlock()
	return t
}

// kind is the kind of a call. r.mu is held.
func (c *Recorder) kind(operation, algorithm string) *Kind {
	for _, k := range c.kinds {
		if k.Operation == operation && k.Algorithm == algorithm {
			return k
		}
	}
	for _, k := range c.r.kinds { // of other communicators
		if k.Operation == operation && k.Algorithm == algorithm {
			c.kinds = append(c.kinds, k)
			return k
		}
	}
	k := &Kind{Operation: operation, Algorithm: algorithm}
	c.r.kinds, c.kinds = append(c.r.kinds, k), append(c.kinds, k)
	return k
}

// Started notes that a call of a stream begins to run.
func (t Ticket) Started() {
	if t.r == nil {
		return
	}
	now := time.Since(t.r.began)
	t.r.mu.Lock()
	if e := t.call(); e != nil {
		e.Started = now
	}
	t.r.mu.Unlock()
}

// Finished notes that a call has run.
func (t Ticket) Finished(err error) {
	if t.r == nil {
		return
	}
	now := time.Since(t.r.began)
	t.r.mu.Lock()
	defer t.r.mu.Unlock()
	e := t.call()
	if e != nil && e.Finished != 0 {
		return // an engine has said so
	}
	t.k.Ended++
	if err != nil {
		t.k.Failed++
	}
	if e == nil {
		return
	}
	if e.Finished, e.Err = now, err; e.Started != 0 {
		took := now - e.Started
		t.k.Timed++
		t.k.Took += took
		t.k.Buckets[min(bits.Len64(uint64(took/Shortest)), Buckets-1)]++
	}
}

// Unseen notes that a GPU has got the call, which the host does not see end.
func (t Ticket) Unseen() {
	t.r.mu.Lock()
	t.k.Unseen++
	t.r.mu.Unlock()
}

// call is the call in the ring, nil if it is too long ago. r.mu is held.
func (t Ticket) call() *Call {
	if e := &t.r.calls[t.seq%Kept]; e.Seq == t.seq {
		return e
	}
	return nil
}
