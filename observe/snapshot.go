package observe

import (
	"cmp"
	"fmt"
	"maps"
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
	// Verdicts are those about one job each, where several run.
	Verdicts map[string]string `json:"verdicts,omitempty"`
	Ranks    []Rank            `json:"ranks"`
	// Layers are those of all ranks together, by job.
	Layers []Layer `json:"layers,omitempty"`
	// GPUs are those of this host, where the program that shows the state has asked for them.
	GPUs []GPU `json:"gpus,omitempty"`
	// Joins are ranks that wait for others to make a group.
	Joins []Join `json:"joins,omitempty"`
	// Findings are what else is wrong, by rank; a snapshot of one process finds less.
	Findings []Finding `json:"findings,omitempty"`
	// Lost is the time that calls have waited since an earlier state, the most first. A snapshot has none, and State.Since makes it.
	Lost []Loss `json:"lost,omitempty"`
	// Processes are what the kernel tells of the processes that were asked.
	Processes []Vitals `json:"processes,omitempty"`
	// Silent are processes that were asked and did not answer.
	Silent []Silent `json:"silent,omitempty"`
}

// Join is a rank that waits for others to make a group.
type Join struct {
	Group   string  `json:"group"`
	At      string  `json:"at"` // where the ranks meet
	Rank    int     `json:"rank"`
	Size    int     `json:"size"`
	Pid     int     `json:"pid"`
	Seconds float64 `json:"seconds"`
	// Missing are the ranks that have not come, as rank 0 knows.
	Missing []int  `json:"missing,omitempty"`
	What    string `json:"what"`
}

// Silent is a process that did not answer. Rank is -1 where no rank that answers is connected with it.
type Silent struct {
	Pid   int    `json:"pid"`
	Job   string `json:"job,omitempty"`
	Rank  int    `json:"rank"`
	Error string `json:"error"`
}

// Rank is one rank. All counts are since Began.
type Rank struct {
	Rank  int    `json:"rank"`
	Size  int    `json:"size"` // of the group that met
	Host  int    `json:"host"` // -1 where the ranks have not met
	Group string `json:"group"`
	Job   string `json:"job"` // the same on all ranks that met, and on no others
	Pid   int    `json:"pid"`
	// Program is the name of the process\'s program, of a Python that of its script or module.
	Program string `json:"program,omitempty"`
	// NoMetrics is why the process serves no metrics, though SWITCHYARD_METRICS asks for them.
	NoMetrics string    `json:"no_metrics,omitempty"`
	Began     time.Time `json:"began"`
	// GPU is the one that the rank works on, such as cuda:0; empty on the host.
	GPU string `json:"gpu,omitempty"`
	// Epoch is how often the group has shrunk or taken ranks in since its ranks met first, and Members are its ranks now, by their numbers in
	// the group that met.
	Epoch   int   `json:"epoch"`
	Members []int `json:"members"`
	// Seats are the numbers of all Size ranks in the group that met first, where ranks were admitted since: newcomers have the lowest that were
	// free. Metrics have these numbers as labels, and Faults as culprits. It is missing where the numbers are the same.
	Seats []int `json:"seats,omitempty"`
	// PeerTimeoutSeconds is the silence after which a rank is lost, 0 where no connection tells it.
	PeerTimeoutSeconds float64 `json:"peer_timeout_seconds,omitempty"`
	// Passed says that a later group has taken this one's place, which Admit has made. It has no metrics any more.
	Passed bool `json:"passed,omitempty"`

	Operations []Operation       `json:"operations"`
	Peers      []Peer            `json:"peers"`             // by rank
	Waited     []Waited          `json:"waited,omitempty"`  // the longest first
	Waiting    []Waiting         `json:"waiting,omitempty"` // now: on the host, and for memory that two ranks share on any device
	Heaps      []Heap            `json:"heaps,omitempty"`
	Counters   map[string]uint64 `json:"counters,omitempty"` // plan_cache_hits and plan_cache_misses
	Faults     []Fault           `json:"faults,omitempty"`
	Fallbacks  []Fallback        `json:"fallbacks,omitempty"`
	LastFault  *Failure          `json:"last_fault,omitempty"`
	// Past are the last failures, oldest first, up to 16, with those of the groups that this one has come from.
	Past []Failure `json:"past,omitempty"`
	// Detection and Recovery have a line for each kind of fault: what passed from the culprit's last sign of life to the report, as far as a
	// connection tells it, and from the report to the first call that worked again.
	Detection []Spread `json:"detection,omitempty"`
	Recovery  []Spread `json:"recovery,omitempty"`
	// LastFailed is the last call that returned an error after it was launched.
	LastFailed *Call `json:"last_failed,omitempty"`
	// Layers are where this rank's tokens went, and Choices those of all layers by rank.
	Layers []Layer `json:"layers,omitempty"`
	// Changes are the last looks of package rebalance after which experts moved, oldest first, up to 16.
	Changes []Change  `json:"changes,omitempty"`
	Choices []float64 `json:"choices,omitempty"`
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
	// Staged counts calls that went through staging by reason: input, output, unreadable or algorithm. On GPUs it is what buffers and algorithm
	// say, on the host also what a message found.
	Staged map[string]uint64 `json:"staged,omitempty"`
	// Timed calls took Seconds together; Buckets counts those that took less than 1 us, 2 us, 4 us and so on, the last one all others.
	Timed   uint64   `json:"timed"`
	Seconds float64  `json:"seconds"`
	Buckets []uint64 `json:"buckets"`
}

// Peer is the traffic with a rank.
type Peer struct {
	// SentBytes and ReceivedBytes are those of exchanges, as their splits say (splits in device memory do not say it), and of rows and scales of
	// dispatches and what goes back. A dispatch tells what has come from ranks of this host, and on a GPU only what was sent, as
	// Dispatcher.Counters has found it last.
	SentBytes     uint64 `json:"sent_bytes"`
	ReceivedBytes uint64 `json:"received_bytes"`
	// SilentSeconds is how long ago the rank's process last gave a sign of life; -1 where no connection tells it.
	SilentSeconds float64 `json:"silent_seconds"`
	// Pid is the rank's process, 0 where no connection on this host tells it.
	Pid int `json:"pid,omitempty"`
}

// Waited is the time that calls of an operation have waited for a rank, on the host.
type Waited struct {
	Operation string  `json:"operation"`
	Peer      int     `json:"peer"`
	Seconds   float64 `json:"seconds"`
	// AbsentSeconds of these were in waits at whose beginning the rank had not begun the call.
	AbsentSeconds float64 `json:"absent_seconds"`
}

// Waiting is a call that waits, longer than 100 us.
type Waiting struct {
	Group     string `json:"group"`
	Operation string `json:"operation"`
	Call      uint64 `json:"call"` // its number among the calls of its communicator, 0 for calls between two ranks, "open memory" and "take back memory"
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
	FreeBytes        int64  `json:"free_bytes"` // in pieces, of which LargestFreeBytes is the largest
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

// Fallback counts calls that one of torch's backends has made in the place of Switchyard.
type Fallback struct {
	Operation string `json:"operation"` // as torch names it
	Backend   string `json:"backend"`
	// Reason is group, gpu, hosts, device, tensor, reduction or form.
	Reason string `json:"reason"`
	Calls  uint64 `json:"calls"`
}

// Failure is a failure of the group.
type Failure struct {
	Kind    string    `json:"kind"`
	Culprit int       `json:"culprit"` // a rank of the group that met as Group, in Job
	Group   string    `json:"group"`
	Job     string    `json:"job"`
	At      time.Time `json:"at"`
	Error   string    `json:"error"`
	// SilentSeconds is how long the culprit had given no sign of life, -1 where no connection tells it.
	SilentSeconds float64 `json:"silent_seconds"`
	// HealedSeconds passed until a call worked again, of a communicator that was made afterwards. It is missing until then.
	HealedSeconds *float64 `json:"healed_seconds,omitempty"`
}

// Spread is the times of something that goes with faults of a kind: Buckets counts those of less than 1 ms, 2 ms, 4 ms and so on, the last one
// all others.
type Spread struct {
	Kind    string   `json:"kind"`
	Count   uint64   `json:"count"`
	Seconds float64  `json:"seconds"`
	Buckets []uint64 `json:"buckets"`
}

// Change is a look at the load of ranks after which experts moved. All ranks of the group tell the same.
type Change struct {
	At    time.Time `json:"at"`
	Group string    `json:"group"`
	Layer string    `json:"layer,omitempty"`
	// Before is the load of the busiest rank over the mean in the window that ended, After what it would have been with the experts moved.
	Before float64 `json:"before"`
	After  float64 `json:"after"`
	Moves  []Move  `json:"moves"`
}

// Move is an expert that came to a rank, with weights from another, by their numbers in the group that met.
type Move struct {
	Expert int `json:"expert"`
	From   int `json:"from"`
	To     int `json:"to"`
}

// Snapshot is the state of the ranks of this process. It may be called at any time, also while calls hang.
func Snapshot() State {
	var ranks []Rank
	for _, r := range flight.Ranks() {
		s := r.State(false)
		ranks = append(ranks, rankOf(&s))
	}
	s := State{Version: switchyard.Version, At: time.Now(), Ranks: ranks}
	for _, j := range flight.Joins() {
		s.Joins = append(s.Joins, Join{j.Group, j.At, j.Rank, j.Size, os.Getpid(), s.At.Sub(j.Since).Seconds(), j.Missing, j.What})
	}
	return Merge(s)
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
		all.Processes = append(all.Processes, s.Processes...)
		all.Joins = append(all.Joins, s.Joins...)
		if s.GPUs != nil { // of one host
			all.GPUs = s.GPUs
		}
	}
	slices.SortStableFunc(all.Joins, func(a, b Join) int {
		return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.Group, b.Group), a.Size-b.Size, a.Rank-b.Rank)
	})
	slices.SortStableFunc(all.Ranks, func(a, b Rank) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Job, b.Job), a.Rank-b.Rank)
	})
	all.identify()
	all.Layers = all.layers(nil)
	all.Verdict = verdict(all.Ranks)
	if jobs := jobsOf(all.Ranks); len(jobs) > 1 {
		all.Verdicts = map[string]string{}
		for _, job := range jobs {
			all.Verdicts[job] = verdict(slices.DeleteFunc(slices.Clone(all.Ranks), func(r Rank) bool { return r.Job != job }))
		}
	}
	all.Findings = findings(&all, nil)
	return all
}

// now is the number of ranks of the group of today.
func (r *Rank) now() int {
	if r.Members == nil { // it has not met
		return r.Size
	}
	return len(r.Members)
}

// seat is the number of a rank in the group that met first.
func (r *Rank) seat(rank int) int {
	if rank >= 0 && rank < len(r.Seats) {
		return r.Seats[rank]
	}
	return rank
}

func jobOf(s *flight.State) string { return fmt.Sprintf("%016x", s.Job) }

func rankOf(s *flight.State) Rank {
	r := Rank{Rank: s.Number, Size: s.Size, Host: s.Host, Group: s.Group, Job: jobOf(s), Pid: os.Getpid(), Program: programOf(procOf(os.Getpid())), NoMetrics: flight.Muted(), Began: s.Began, Epoch: s.Epoch, Members: s.Members, Seats: s.Seats, Passed: s.Passed, PeerTimeoutSeconds: s.PeerTimeout.Seconds(), Operations: []Operation{}, Peers: []Peer{}, Counters: s.Counters}
	for _, k := range s.Kinds {
		r.Operations = append(r.Operations, Operation{
			Operation: k.Operation, Algorithm: k.Algorithm, Calls: k.Begun, Failed: k.Failed, InFlight: k.Begun - k.Ended - k.Unseen, PayloadBytes: k.Payload, Staged: k.Staged(),
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
		if p < len(s.Pids) {
			peer.Pid = s.Pids[p]
		}
		r.Peers = append(r.Peers, peer)
	}
	for w, d := range s.Waited {
		at := slices.IndexFunc(r.Waited, func(k Waited) bool { return k.Operation == w.Operation && k.Peer == w.Peer })
		if at < 0 {
			at = len(r.Waited)
			r.Waited = append(r.Waited, Waited{Operation: w.Operation, Peer: w.Peer})
		}
		k := &r.Waited[at]
		if k.Seconds += d.Seconds(); w.Absent {
			k.AbsentSeconds += d.Seconds()
		}
	}
	slices.SortFunc(r.Waited, func(a, b Waited) int {
		return cmp.Or(cmp.Compare(b.Seconds, a.Seconds), cmp.Compare(a.Operation, b.Operation), a.Peer-b.Peer)
	})
	for _, c := range s.Running {
		r.Waiting = append(r.Waiting, Waiting{c.Group, c.Operation, c.Number, c.WaitsFor, c.Absent, s.At.Sub(c.Since).Seconds()})
	}
	for _, h := range s.Heaps {
		r.Heaps = append(r.Heaps, Heap{h.Device, h.Reserved, h.Used, h.Reserved - h.Used, h.Peak, h.LargestFree, h.Awaits})
	}
	for f, n := range s.Faults {
		r.Faults = append(r.Faults, Fault{f.Kind, f.Culprit, n})
	}
	slices.SortFunc(r.Faults, func(a, b Fault) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), a.Culprit-b.Culprit) })
	for f, n := range s.Fallbacks {
		r.Fallbacks = append(r.Fallbacks, Fallback{f.Operation, f.Backend, f.Reason, n})
	}
	slices.SortFunc(r.Fallbacks, func(a, b Fallback) int {
		return cmp.Or(cmp.Compare(a.Operation, b.Operation), cmp.Compare(a.Backend, b.Backend), cmp.Compare(a.Reason, b.Reason))
	})
	r.GPU, r.Layers = s.GPU, layersOf(s.Layers)
	if r.Choices = choicesOf(r.Layers); s.Failed != nil {
		c := callOf(s, s.Failed)
		r.LastFailed = &c
	}
	if s.Last != nil {
		f := failureOf(s.Last)
		r.LastFault = &f
	}
	for i := range s.Past {
		f := failureOf(&s.Past[i])
		r.Past = append(r.Past, f)
		if l := r.LastFault; l != nil && l.At.Equal(f.At) {
			r.LastFault = &f // it may be healed
		}
	}
	for _, c := range s.Changes {
		change := Change{At: c.At, Group: c.Group, Layer: c.Layer, Before: c.Before, After: c.After}
		for _, m := range c.Moves {
			change.Moves = append(change.Moves, Move(m))
		}
		r.Changes = append(r.Changes, change)
	}
	r.Detection, r.Recovery = spreadsOf(s.Detected), spreadsOf(s.Healed)
	return r
}

func failureOf(f *flight.Failure) Failure {
	k := Failure{Kind: f.Kind, Culprit: f.Culprit, Group: f.Group, Job: fmt.Sprintf("%016x", f.Job), At: f.At, Error: fmt.Sprint(f.Err), SilentSeconds: f.Silent.Seconds()}
	if f.Silent < 0 {
		k.SilentSeconds = -1
	}
	if !f.Healed.IsZero() {
		after := f.Healed.Sub(f.At).Seconds()
		k.HealedSeconds = &after
	}
	return k
}

func spreadsOf(by map[string]flight.Spread) (all []Spread) {
	for _, kind := range slices.Sorted(maps.Keys(by)) {
		s := by[kind]
		all = append(all, Spread{kind, s.Count, s.Sum.Seconds(), slices.Clone(s.Buckets[:])})
	}
	return all
}
