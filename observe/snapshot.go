package observe

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/internal/flight"
)

// State is what the ranks of a process, or of several, know at a time.
type State struct {
	Version string    `json:"version"`
	At      time.Time `json:"at"`
	// Verdict says in words who waits for whom; it is empty where no rank has waited for 5 ms.
	Verdict string `json:"verdict,omitempty"`
	Ranks   []Rank `json:"ranks"`
	// Silent are processes that were asked and did not answer: they are stopped, or get no core.
	Silent []Silent `json:"silent,omitempty"`
}

// Silent is a process that did not answer.
type Silent struct {
	Pid   int    `json:"pid"`
	Error string `json:"error"`
}

// Rank is one rank. All counts are since Began.
type Rank struct {
	Rank  int       `json:"rank"`
	Size  int       `json:"size"` // of the group that met
	Host  int       `json:"host"`
	Group string    `json:"group"`
	Job   string    `json:"job"` // the same on all ranks that met, and on no others
	Pid   int       `json:"pid"`
	Began time.Time `json:"began"`

	Operations []Operation       `json:"operations"`
	Peers      []Peer            `json:"peers"`             // by rank
	Waited     []Waited          `json:"waited,omitempty"`  // the longest first
	Waiting    []Waiting         `json:"waiting,omitempty"` // now, on the host
	Heaps      []Heap            `json:"heaps,omitempty"`
	Counters   map[string]uint64 `json:"counters,omitempty"` // plan_cache_hits and plan_cache_misses
	Faults     []Fault           `json:"faults,omitempty"`
	LastFault  *Failure          `json:"last_fault,omitempty"`
}

// Operation is the calls of one kind by one algorithm.
type Operation struct {
	Operation string `json:"operation"`
	Algorithm string `json:"algorithm,omitempty"`
	Calls     uint64 `json:"calls"`
	Failed    uint64 `json:"failed"`
	// InFlight calls have been launched and have not ended. Those on GPUs are not among them.
	InFlight uint64 `json:"in_flight"`
	// PayloadBytes is the length of this rank's inputs, as far as it is known when a call is made.
	PayloadBytes uint64 `json:"payload_bytes"`
	// Timed calls took Seconds together; Buckets counts those that took less than 1 us, 2 us, 4 us and so on, the last one all others.
	Timed   uint64   `json:"timed"`
	Seconds float64  `json:"seconds"`
	Buckets []uint64 `json:"buckets"`
}

// Peer is the traffic with a rank.
type Peer struct {
	// SentBytes and ReceivedBytes are those of exchanges, as their splits say; splits in device memory do not say it.
	SentBytes     uint64 `json:"sent_bytes"`
	ReceivedBytes uint64 `json:"received_bytes"`
	// SilentSeconds is how long ago the rank's process last gave a sign of life; -1 where no connection tells it.
	SilentSeconds float64 `json:"silent_seconds"`
}

// Waited is the time that calls of an operation have waited for a rank, on the host.
type Waited struct {
	Operation string  `json:"operation"`
	Peer      int     `json:"peer"`
	Seconds   float64 `json:"seconds"`
}

// Waiting is a call that waits, longer than 100 us.
type Waiting struct {
	Group     string `json:"group"`
	Operation string `json:"operation"`
	Call      uint64 `json:"call"` // its number among the calls of its communicator, 0 for calls between two ranks
	// For is the rank that the call waits for. Absent ranks have not begun the call.
	For     int     `json:"for"`
	Absent  []int   `json:"absent,omitempty"`
	Seconds float64 `json:"seconds"`
}

// Heap is a symmetric heap.
type Heap struct {
	Device           string `json:"device"`
	ReservedBytes    int64  `json:"reserved_bytes"`
	UsedBytes        int64  `json:"used_bytes"`
	PeakBytes        int64  `json:"peak_bytes"`
	LargestFreeBytes int64  `json:"largest_free_bytes"`
	// Awaits says for each rank for whom it waits, as its own memory tells, -1 for nobody. Only heaps of the host have it.
	Awaits []int `json:"awaits,omitempty"`
}

// Fault counts failures of a kind: lost, left, aborted, mismatch, absent.
type Fault struct {
	Kind    string `json:"kind"`
	Culprit int    `json:"culprit"` // -1 where no rank is to blame
	Count   uint64 `json:"count"`
}

// Failure is a failure of the group.
type Failure struct {
	Kind    string    `json:"kind"`
	Culprit int       `json:"culprit"`
	At      time.Time `json:"at"`
	Error   string    `json:"error"`
}

// Snapshot is the state of the ranks of this process. It may be called at any time, also while calls hang.
func Snapshot() State {
	var ranks []Rank
	for _, r := range flight.Ranks() {
		s := r.State(false)
		ranks = append(ranks, rankOf(&s))
	}
	return Merge(State{Version: switchyard.Version, At: time.Now(), Ranks: ranks})
}

// Merge is the state of several processes as one: ranks in the order of their numbers, and a verdict about all of them.
func Merge(states ...State) State {
	all := State{Ranks: []Rank{}}
	for _, s := range states {
		if all.Version = s.Version; s.At.After(all.At) {
			all.At = s.At
		}
		all.Ranks = append(all.Ranks, s.Ranks...)
		all.Silent = append(all.Silent, s.Silent...)
	}
	slices.SortStableFunc(all.Ranks, func(a, b Rank) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Job, b.Job), a.Rank-b.Rank)
	})
	all.Verdict = verdict(all.Ranks)
	return all
}

func jobOf(s *flight.State) string { return fmt.Sprintf("%016x", s.Job) }

func rankOf(s *flight.State) Rank {
	r := Rank{Rank: s.Number, Size: s.Size, Host: s.Host, Group: s.Group, Job: jobOf(s), Pid: os.Getpid(), Began: s.Began, Operations: []Operation{}, Peers: []Peer{}, Counters: s.Counters}
	for _, k := range s.Kinds {
		r.Operations = append(r.Operations, Operation{
			Operation: k.Operation, Algorithm: k.Algorithm, Calls: k.Begun, Failed: k.Failed, InFlight: k.Begun - k.Ended - k.Unseen, PayloadBytes: k.Payload,
			Timed: k.Timed, Seconds: k.Took.Seconds(), Buckets: slices.Clone(k.Buckets[:]),
		})
	}
	slices.SortFunc(r.Operations, func(a, b Operation) int {
		return cmp.Or(cmp.Compare(a.Operation, b.Operation), cmp.Compare(a.Algorithm, b.Algorithm))
	})
	for p := range s.Size {
		peer := Peer{SilentSeconds: -1}
		if p < len(s.Peers) {
			peer.SentBytes, peer.ReceivedBytes = s.Peers[p].Sent, s.Peers[p].Received
		}
		if p < len(s.Heard) && s.Heard[p] >= 0 {
			peer.SilentSeconds = s.Heard[p].Seconds()
		}
		r.Peers = append(r.Peers, peer)
	}
	for w, d := range s.Waited {
		r.Waited = append(r.Waited, Waited{w.Operation, w.Peer, d.Seconds()})
	}
	slices.SortFunc(r.Waited, func(a, b Waited) int {
		return cmp.Or(cmp.Compare(b.Seconds, a.Seconds), cmp.Compare(a.Operation, b.Operation), a.Peer-b.Peer)
	})
	for _, c := range s.Running {
		r.Waiting = append(r.Waiting, Waiting{c.Group, c.Operation, c.Number, c.WaitsFor, c.Absent, s.At.Sub(c.Since).Seconds()})
	}
	for _, h := range s.Heaps {
		r.Heaps = append(r.Heaps, Heap{h.Device, h.Reserved, h.Used, h.Peak, h.LargestFree, h.Awaits})
	}
	for f, n := range s.Faults {
		r.Faults = append(r.Faults, Fault{f.Kind, f.Culprit, n})
	}
	slices.SortFunc(r.Faults, func(a, b Fault) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), a.Culprit-b.Culprit) })
	if f := s.Last; f != nil {
		r.LastFault = &Failure{f.Kind, f.Culprit, f.At, fmt.Sprint(f.Err)}
	}
	return r
}
