package flight

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// State is a copy of what a rank knows.
type State struct {
	Number, Size, Host int
	Seats              []int
	PeerTimeout        time.Duration
	Passed             bool // a rank of a later group Succeeds it
	Group              string
	Job                uint64
	Began, At          time.Time
	Kinds              []Kind
	Calls              []Call // the latest ones, oldest first
	Peers              []Traffic
	Heard              []time.Duration
	Pids               []int
	Layers             []Layer
	GPU                string // such as cuda:0, empty on the host
	Waited             map[Wait]time.Duration
	Running            []Running
	Heaps              []Heap
	Counters           map[string]uint64
	Faults             map[Fault]uint64
	Fallbacks          map[Fallback]uint64
	Last               *Failure
	// Epoch and Members are those of the group of today, and Past the last failures, oldest first, with those of the groups that it came from.
	Epoch            int
	Members          []int
	Past             []Failure
	Changes          []Change // the last ones, oldest first
	Detected, Healed map[string]Spread
	Failed           *Call // the last call that failed
}

// State copies what is known of the rank, with its last calls if they are asked for.
func (r *Rank) State(calls bool) State {
	for {
		if s, whole := r.state(calls); whole {
			s.await()
			return s
		}
	}
}

// await has calls that wait tell of the ranks that have not begun them. A communicator on the host runs one call at a time.
func (s *State) await() {
	for i := range s.Calls {
		c := &s.Calls[i]
		for _, w := range s.Running {
			if c.Started != 0 && c.Finished == 0 && c.Group == w.Group && c.ID == w.ID && c.Operation == w.Operation {
				c.Absent = w.Absent
			}
		}
	}
}

// state is not whole where a part has gone meanwhile: what it told is with the rank by now, and numbers that only grow do not go back.
func (r *Rank) state(calls bool) (s State, whole bool) {
	r.mu.Lock()
	s = State{
		Number: r.Number, Size: r.Size, Host: r.Host, Group: r.Group, Job: r.Job, Began: r.began, At: time.Now(),
		Peers: slices.Clone(r.peers), Waited: maps.Clone(r.waited), Faults: maps.Clone(r.past.faults), Seats: r.Seats, PeerTimeout: r.PeerTimeout, Passed: r.passed, Fallbacks: maps.Clone(r.fallbacks), Last: r.last, Failed: r.failed,
		Counters: map[string]uint64{}, Epoch: r.past.epoch, Members: r.past.members, Past: slices.Clone(r.past.failures), Changes: slices.Clone(r.past.changes),
		GPU:      r.gpu,
		Detected: maps.Clone(r.past.detected), Healed: maps.Clone(r.past.healed),
	}
	for _, k := range r.kinds {
		s.Kinds = append(s.Kinds, *k)
	}
	if calls && r.made > 0 {
		dial := r.clock.dial(r.began)
		first := max(1, int64(r.made)-Kept+1)
		for seq := uint64(first); seq <= r.made; seq++ {
			s.Calls = append(s.Calls, r.calls[seq%Kept].whole(seq, dial))
		}
	}
	for i := range r.layers {
		s.Layers = layer(s.Layers, &r.layers[i])
	}
	parts := slices.Clone(r.parts)
	r.mu.Unlock()
	var pauses []Pause
	for _, p := range parts {
		if !p.tell(&s, &pauses) {
			return s, false
		}
	}
	s.pause(pauses)
	return s, true
}

// tell adds to s what p has to tell, and to pauses those of calls that s has, unless it has gone.
func (p *Part) tell(s *State, pauses *[]Pause) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return false
	}
	if p.Heap != nil {
		s.Heaps = append(s.Heaps, p.Heap())
	}
	if p.Running != nil {
		s.Running = append(s.Running, p.Running()...)
	}
	if p.Waited != nil {
		p.Waited(func(w Wait, d time.Duration) { s.Waited[w] += d })
	}
	if p.Pauses != nil && len(s.Calls) > 0 {
		*pauses = append(*pauses, p.Pauses()...)
	}
	if p.Counters != nil {
		p.Counters(func(name string, n uint64) { s.Counters[name] += n })
	}
	if p.Layer != nil {
		l := p.Layer()
		s.Layers = layer(s.Layers, &l)
	}
	p.traffic(s.Number, s.Peers)
	if p.Heard != nil {
		s.Heard = p.Heard()
	}
	if p.Pids != nil {
		s.Pids = p.Pids()
	}
	return true
}

// traffic adds the bytes that p tells of to those by rank, but for those that stay on the rank itself.
func (p *Part) traffic(self int, peers []Traffic) {
	if p.Traffic != nil {
		p.Traffic(func(rank int, t Traffic) {
			if rank != self {
				peers[rank].add(t)
			}
		})
	}
}

func (t *Traffic) add(u Traffic) {
	t.Sent += u.Sent
	t.Received += u.Received
}

// process is the list of ranks that have something to tell: metrics are those of a process, whoever made its groups.
var process struct {
	sync.Mutex
	ranks []*Rank
	told  []listener // of failures
	erred []listener // of calls that failed alone
	ends  []listener // of ranks that a failure ends
	heard []*func(Event)
	joins []*func() Join
	mute  string
}

// listener is one who called OnFailure, OnError or OnEnd.
type listener struct {
	within time.Duration
	tell   func(*Rank)
}

// Listened reports whether anybody has called OnFailure.
func Listened() bool {
	process.Lock()
	defer process.Unlock()
	return len(process.told) > 0
}

// Mute notes why this process serves no metrics, though its environment asks for them.
func Mute(why string) {
	process.Lock()
	defer process.Unlock()
	process.mute = why
}

// Muted is why this process serves no metrics, empty where it does or is not asked to.
func Muted() string {
	process.Lock()
	defer process.Unlock()
	return process.mute
}

// OnFailure has tell called with each rank of this process whose group has failed, or that has a communicator that broke, in a goroutine of its
// own. The news of that waits until tell has returned, for within at most: a folder that it writes to may be on a host that does not answer.
func OnFailure(within time.Duration, tell func(*Rank)) {
	process.Lock()
	defer process.Unlock()
	process.told = append(process.told, listener{within, tell})
}

// OnError has tell called with each rank of this process that has a call that failed and left its communicator usable. The error waits until tell
// has returned, for within at most.
func OnError(within time.Duration, tell func(*Rank)) {
	process.Lock()
	defer process.Unlock()
	process.erred = append(process.erred, listener{within, tell})
}

// OnEnd has tell called with each rank of this process that leaves its group after a failure that it has not gone on from. The rank waits until
// tell has returned, for within at most.
func OnEnd(within time.Duration, tell func(*Rank)) {
	process.Lock()
	defer process.Unlock()
	process.ends = append(process.ends, listener{within, tell})
}

// Join is a rank that waits for others to make a group.
type Join struct {
	Rank, Size int
	Group, At  string // the name of the group to be, and where its ranks meet
	Since      time.Time
	// Missing are the ranks that have not come; they are known on rank 0 only. Others miss rank 0, or have been told nothing.
	Missing []int
	// What says it in words.
	What string
}

// Joining has a rank tell how its join goes, until over is called.
func Joining(tell func() Join) (over func()) {
	process.Lock()
	defer process.Unlock()
	process.joins = append(process.joins, &tell)
	return func() {
		process.Lock()
		defer process.Unlock()
		process.joins = slices.DeleteFunc(process.joins, func(f *func() Join) bool { return f == &tell })
	}
}

// Joins are the joins of this process that have not ended.
func Joins() (all []Join) {
	process.Lock()
	joins := slices.Clone(process.joins)
	process.Unlock()
	for _, tell := range joins {
		all = append(all, (*tell)())
	}
	return all
}

func enlist(r *Rank) {
	process.Lock()
	defer process.Unlock()
	process.ranks = append(process.ranks, r)
}

func delist(r *Rank) {
	process.Lock()
	defer process.Unlock()
	if at := slices.Index(process.ranks, r); at >= 0 {
		process.ranks = slices.Delete(process.ranks, at, at+1)
	}
}

// Ranks are the ranks of this process that have something to tell, in the order of their numbers.
func Ranks() []*Rank {
	process.Lock()
	defer process.Unlock()
	all := slices.Clone(process.ranks)
	slices.SortStableFunc(all, func(a, b *Rank) int { return a.Number - b.Number })
	return all
}
