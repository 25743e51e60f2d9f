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
	Group              string
	Job                uint64
	Began, At          time.Time
	Kinds              []Kind
	Calls              []Call // the latest ones, oldest first
	Peers              []Traffic
	Heard              []time.Duration
	Waited             map[Wait]time.Duration
	Running            []Running
	Heaps              []Heap
	Counters           map[string]uint64
	Faults             map[Fault]uint64
	Last               *Failure
}

// State copies what is known of the rank, with its last calls if they are asked for.
func (r *Rank) State(calls bool) State {
	r.mu.Lock()
	s := State{
		Number: r.Number, Size: r.Size, Host: r.Host, Group: r.Group, Job: r.Job, Began: r.began, At: time.Now(),
		Peers: slices.Clone(r.peers), Waited: maps.Clone(r.waited), Faults: maps.Clone(r.faults), Last: r.last, Counters: map[string]uint64{},
	}
	for _, k := range r.kinds {
		s.Kinds = append(s.Kinds, *k)
	}
	if calls && r.made > 0 {
		first := max(1, int64(r.made)-Kept+1)
		for seq := uint64(first); seq <= r.made; seq++ {
			s.Calls = append(s.Calls, r.calls[seq%Kept])
		}
	}
	parts := slices.Clone(r.parts)
	r.mu.Unlock()
	for _, p := range parts {
		p.tell(&s)
	}
	return s
}

// tell adds to s what p has to tell.
func (p *Part) tell(s *State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return
	}
	if p.Heap != nil {
		s.Heaps = append(s.Heaps, p.Heap())
	}
	if p.Running != nil {
		s.Running = append(s.Running, p.Running()...)
	}
	if p.Waited != nil {
		p.Waited(func(op string, peer int, d time.Duration) { s.Waited[Wait{op, peer}] += d })
	}
	if p.Counters != nil {
		p.Counters(func(name string, n uint64) { s.Counters[name] += n })
	}
	if p.Heard != nil {
		s.Heard = p.Heard()
	}
}

// process is the list of ranks that have something to tell: metrics are those of a process, whoever made its groups.
var process struct {
	sync.Mutex
	ranks []*Rank
	told  []func(*Rank)
}

// OnFailure has tell called, in a goroutine of its own, with each rank of this process that notes a failure.
func OnFailure(tell func(*Rank)) {
	process.Lock()
	defer process.Unlock()
	process.told = append(process.told, tell)
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
