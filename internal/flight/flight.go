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
	"sync/atomic"
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
	// Seats are the numbers of ranks in the group that met first, by their numbers in the one that met: nil where it is that one, and no ranks
	// were admitted. Hosts is the number of hosts.
	Seats []int
	Hosts int
	// PeerTimeout is the silence after which a rank is lost, 0 where no connection tells it.
	PeerTimeout time.Duration
	// Group is that group's name, and Job an identity that its ranks share and those of other jobs do not.
	Group string
	Job   uint64

	began time.Time
	clock *clock
	rests atomic.Bool

	mu     sync.Mutex
	passed bool    // to the rank that Succeeds it
	calls  []entry // a ring
	made   uint64  // calls
	kinds  []*Kind
	peers  []Traffic
	last   *Failure
	failed *Call // the last one that did
	parts  []*Part
	waited map[Wait]time.Duration // of heaps that are gone
	layers []Layer                // of dispatchers that are gone
	gpu    string

	past      history
	fallbacks map[Fallback]uint64
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
	// Stream is that on which the call was enqueued, NoStream where it ran at once, and Device its communicator's, such as cuda:0.
	Stream Stream
	Device string
	// Enqueued, Started and Finished count from the rank's beginning. Started and Finished are 0 until then, and on GPUs, where the host does
	// not see them.
	Enqueued, Started, Finished time.Duration
	// Err is what it came to.
	Err error
	// Absent are ranks of its host that have not begun it, as ranks of the group that met: now, for a call that waits; when a wait failed, for one
	// that has ended.
	Absent []int
	// Waits are the last long waits of a call that all ranks make, on the host.
	Waits []Waiting
}

// Stream is a stream of a device: the number of a host stream, the handle of one on a GPU. Those of a GPU may be 0, so what is kept is one more.
type Stream uint64

// NoStream is the caller itself.
const NoStream Stream = 0

// OnStream is a stream by its number or handle.
func OnStream(n uint64) Stream { return Stream(n + 1) }

// Number is the number or handle of a stream.
func (s Stream) Number() uint64 { return uint64(s - 1) }

// entry is a call in the ring, without what its recorder and kind say of all calls: a note writes one line of memory so, which is in no cache.
type entry struct {
	number                      uint64
	u                           *use
	payload                     int64
	stream                      Stream
	enqueued, started, finished moment
	err                         *failed // nil for a call that has not failed
}

// use is a kind of calls of one communicator.
type use struct {
	c *Recorder
	k *Kind
}

// failed is the error of a call, and the ranks of its communicator that had not begun it.
type failed struct {
	error
	absent []int
}

// whole is the call with a number.
func (e *entry) whole(seq uint64, d dial) Call {
	c := Call{
		Seq: seq, Group: e.u.c.group, ID: e.u.c.id, Number: e.number, Members: e.u.c.members, Operation: e.u.k.Operation, Algorithm: e.u.k.Algorithm, Device: e.u.c.device,
		Payload: e.payload, Stream: e.stream, Enqueued: d.since(e.enqueued), Started: d.since(e.started), Finished: d.since(e.finished),
	}
	if e.err != nil {
		c.Err = e.err.error
		for _, p := range e.err.absent {
			c.Absent = append(c.Absent, c.Members[p])
		}
	}
	return c
}

// Kind is the calls of one operation by one algorithm.
type Kind struct {
	Operation, Algorithm string
	// Begun calls were launched, Ended ones have run, Failed ones of these with an error. The end of Unseen ones is on a GPU.
	Begun, Ended, Failed, Unseen uint64
	Payload                      uint64
	staged                       [stagings]uint64
	// Timed calls took Seconds together. Where calls run on a GPU none is timed.
	Timed   uint64
	Took    time.Duration
	Buckets [Buckets]uint64
}

// Traffic is the bytes of exchanges with a rank, as their splits say, and of the rows and scales of dispatches.
type Traffic struct{ Sent, Received uint64 }

// Part is something that a rank has, and what it tells. Functions that are nil tell nothing. Ranks that they name are those of the group
// that met.
type Part struct {
	// Memory is the heap that the functions read. A part that tells of a heap takes those that read it along when it is dropped.
	Memory  any
	Heap    func() Heap
	Running func() []Running
	Waited  func(add func(w Wait, d time.Duration))
	Pauses  func() []Pause
	// Layer is what a dispatcher has routed, Traffic the bytes of its rows, by rank.
	Layer   func() Layer
	Traffic func(add func(rank int, t Traffic))
	// Counters are numbers that only grow, by name.
	Counters func(add func(name string, n uint64))
	// Heard is how long ago each rank gave a sign of life, negative where that is not known.
	Heard func() []time.Duration
	// Pids are the processes of the ranks, 0 where that is not known.
	Pids func() []int

	mu   sync.Mutex // held while it tells
	gone bool
}

// New is a rank that has met no others yet.
func New(number, size int) *Rank {
	return &Rank{Number: number, Size: size, began: time.Now(), clock: timepiece(), waited: map[Wait]time.Duration{}}
}

// Seat is the number in the group that met first of a rank of the group that met, whose number may be -1 for none.
func (r *Rank) Seat(rank int) int {
	if rank >= 0 && rank < len(r.Seats) {
		return r.Seats[rank]
	}
	return rank
}

// Place is the rank's index among those of its host, on one host also of those that were there before it.
func (r *Rank) Place() int {
	if r.Hosts == 1 {
		return r.Seat(r.Number)
	}
	return r.Local
}

// Began is the time from which durations count.
func (r *Rank) Began() time.Time { return r.began }

// Rest has the rank note no calls, or note them again: what notes cost is measured so.
func (r *Rank) Rest(rests bool) { r.rests.Store(rests) }

// Add has a rank tell of p, until drop is called: after it has returned, no function of p runs.
func (r *Rank) Add(p *Part) (drop func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.parts) == 0 {
		enlist(r)
	}
	r.parts = append(r.parts, p)
	return func() {
		if p.Heap != nil {
			for _, q := range r.readers(p) {
				r.drop(q)
			}
		}
		r.drop(p)
	}
}

// readers are the parts that read the heap that p tells of.
func (r *Rank) readers(p *Part) []*Part {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(r.parts), func(q *Part) bool { return q == p || q.Memory == nil || q.Memory != p.Memory })
}

// drop keeps what p has told with the rank, and p tells nothing more.
func (r *Rank) drop(p *Part) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return
	}
	kept := map[Wait]time.Duration{}
	if p.gone = true; p.Waited != nil {
		p.Waited(func(w Wait, d time.Duration) { kept[w] += d })
	}
	var routed Layer
	if p.Layer != nil {
		routed = p.Layer()
	}
	bytes := make([]Traffic, r.Size)
	p.traffic(r.Number, bytes)
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.peers {
		r.peers[i].add(bytes[i])
	}
	r.parts = slices.DeleteFunc(r.parts, func(q *Part) bool { return q == p })
	for w, d := range kept {
		r.waited[w] += d
	}
	if p.Layer != nil {
		r.layers = layer(r.layers, &routed)
	}
	if len(r.parts) == 0 {
		delist(r)
	}
}

// Recorder is where one communicator notes its calls.
type Recorder struct {
	r       *Rank
	group   string
	id      int64
	members []int // rank of the group that met, by rank of the communicator's
	device  string
	made    uint64
	uses    []*use // the kinds that it has used
	// heals says that a failure is to be healed by the first call that goes well, and since when the recorder is there.
	heals bool
	since time.Time
}

// Recorder is that of a communicator with an id on a device, over members of a group, which are ranks of the group that met.
func (r *Rank) Recorder(group string, id int64, members []int, device string) *Recorder {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.calls == nil {
		r.calls = make([]entry, Kept)
		r.peers = make([]Traffic, r.Size)
	}
	c := &Recorder{r: r, group: group, id: id, members: members, device: device}
	if r.past.hurt {
		c.heals, c.since = true, time.Now()
	}
	return c
}

// Ticket is a call that has begun. The zero Ticket is one that is not noted.
type Ticket struct {
	u   *use
	seq uint64
}

// healed notes that a call has gone well after a failure. r.mu is held.
func (c *Recorder) healed() {
	c.heals = false
	c.r.past.heal(c.since, time.Now())
}

// Begin notes a call. Staged is the reason why it goes through staging, and alone says that not all ranks make it. Send and recv are the bytes
// from and to the ranks of the communicator's group, nil where splits do not say that.
//
// A note takes its time for two looks at the clock. All else is written field by field: a value that is put together elsewhere and then
// copied makes the processor wait for it.
func (c *Recorder) Begin(operation, algorithm string, payload int64, staged Staging, on Stream, alone bool, send, recv []int64) Ticket {
	r := c.r
	if r.rests.Load() {
		return Ticket{}
	}
	now := r.clock.now()
	r.mu.Lock()
	u := c.use(operation, algorithm)
	u.k.Begun++
	if payload > 0 {
		u.k.Payload += uint64(payload)
	}
	if staged != NotStaged {
		u.k.staged[staged]++
	}
	r.made++
	seq := r.made
	e := &r.calls[seq%Kept]
	if e.number = 0; !alone {
		c.made++
		e.number = c.made
	}
	e.u, e.payload, e.stream, e.enqueued, e.finished = u, payload, on, now, 0
	if e.started = 0; on == NoStream {
		e.started = now
	}
	if e.err != nil {
		e.err = nil
	}
	for p, n := range send {
		if to := c.members[p]; to != r.Number {
			t := &r.peers[to]
			t.Sent += uint64(n)
			t.Received += uint64(recv[p])
		}
	}
	r.mu.Unlock()
	return Ticket{u, seq}
}

// use is the kind of a call. r.mu is held.
func (c *Recorder) use(operation, algorithm string) *use {
	for _, u := range c.uses {
		if u.k.Operation == operation && u.k.Algorithm == algorithm {
			return u
		}
	}
	kinds := &c.r.kinds // those of other communicators too
	at := slices.IndexFunc(*kinds, func(k *Kind) bool { return k.Operation == operation && k.Algorithm == algorithm })
	if at < 0 {
		at, *kinds = len(*kinds), append(*kinds, &Kind{Operation: operation, Algorithm: algorithm})
	}
	u := &use{c, (*kinds)[at]}
	c.uses = append(c.uses, u)
	return u
}

// Started notes that a call of a stream begins to run.
func (t Ticket) Started() {
	if t.u == nil {
		return
	}
	r := t.u.c.r
	now := r.clock.now()
	r.mu.Lock()
	if e := t.call(); e != nil {
		e.started = now
	}
	r.mu.Unlock()
}

// Finished notes that a call has run. Absent are the ranks of its communicator that had not begun it when it failed, as far as is known.
func (t Ticket) Finished(err error, absent ...int) {
	if t.u == nil {
		return
	}
	r, k := t.u.c.r, t.u.k
	now := r.clock.now()
	r.mu.Lock()
	e := t.call()
	if e != nil && e.finished != 0 {
		r.mu.Unlock()
		return // an engine has said so
	}
	k.Ended++
	if e != nil {
		e.finished = now
		if e.started != 0 {
			took := r.clock.lapse(e.started, now)
			k.Timed++
			k.Took += took
			k.Buckets[bucket(took)]++
		}
	}
	if err != nil {
		t.failed(e, err, absent)
	} else if t.u.c.heals {
		t.u.c.healed()
	}
	r.mu.Unlock()
}

// failed notes the error of a call, which e is if it is not too long ago. r.mu is held.
func (t Ticket) failed(e *entry, err error, absent []int) {
	r := t.u.c.r
	t.u.k.Failed++
	if e != nil {
		e.err = &failed{err, absent}
		whole := e.whole(t.seq, r.clock.dial(r.began))
		r.failed = &whole
	}
}

func bucket(took time.Duration) int { return min(bits.Len64(uint64(took/Shortest)), Buckets-1) }

// Unseen notes that a GPU has got the call, which the host does not see end.
func (t Ticket) Unseen() {
	if t.u == nil {
		return
	}
	c := t.u.c
	c.r.mu.Lock()
	t.u.k.Unseen++
	if c.heals {
		c.healed()
	}
	c.r.mu.Unlock()
}

// call is the call in the ring, nil if it is too long ago. The rank's lock is held.
func (t Ticket) call() *entry {
	r := t.u.c.r
	if r.made-t.seq >= Kept {
		return nil
	}
	return &r.calls[t.seq%Kept]
}
