package observe

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Explanation says what the calls of a job took in a window of time, and because of whom.
type Explanation struct {
	Version string    `json:"version"`
	At      time.Time `json:"at"` // the end of the window
	Seconds float64   `json:"seconds"`
	// Verdict says in words why a step takes its time. Where there are several jobs it is a line for each, which begins with the job's name.
	Verdict    string      `json:"verdict"`
	Operations []Explained `json:"operations"` // by job, and those that took most time first
	Silent     []Silent    `json:"silent,omitempty"`
}

// Explained is one operation of a job in the window. Shares are of the window's time, in the mean over ranks.
type Explained struct {
	Job       string `json:"job"`
	Operation string `json:"operation"`
	Plans     []Plan `json:"plans"`
	// Share is that of the time in which a rank was in these calls, on the host.
	Share float64 `json:"share"`
	// Waited has a rank that others waited for, the longest first: the mean is over those others.
	Waited []WaitedShare `json:"waited,omitempty"`
	// Last has the ranks that entered calls after all others. It needs ranks on one host, all of which answer.
	Last []Latecomer `json:"last,omitempty"`
}

// Plan is the calls by one algorithm.
type Plan struct {
	Algorithm    string  `json:"algorithm"`
	Ranks        int     `json:"ranks"` // that made such calls
	Calls        uint64  `json:"calls"` // of all of them
	PayloadBytes float64 `json:"payload_bytes"`
	// Seconds is the mean of calls that ended in the window, UsualSeconds that of all before it. Both are 0 where the host sees no end.
	Seconds      float64 `json:"seconds"`
	UsualSeconds float64 `json:"usual_seconds,omitempty"`
}

// WaitedShare is for how much of the window the others have waited for a rank.
type WaitedShare struct {
	Rank  int     `json:"rank"`
	Share float64 `json:"share"`
}

// Latecomer is a rank that entered some calls last.
type Latecomer struct {
	Rank  int `json:"rank"`
	Calls int `json:"calls"`
	Of    int `json:"of"` // the calls of this operation that all ranks entered
	// Behind is for how much of the window the median of the others was in these calls already.
	Behind float64 `json:"behind"`
}

// shortestWindow has two snapshots that are not the same one.
const shortestWindow = 2 * snapshotEvery

// ExplainFor looks at the processes of this user on this host, or at the one with a number that is not 0, for a time, and explains what
// ranks of a job did meanwhile, as in [State.OfJob]. The window is at least 200 ms: answers of a process less than 100 ms apart are
// the same snapshot.
func ExplainFor(ctx context.Context, pid int, job string, window time.Duration) (Explanation, error) {
	if window < shortestWindow {
		return Explanation{}, fmt.Errorf("observe: explain: a window of %v is shorter than %v", window, shortestWindow)
	}
	look := func() (State, error) {
		s, err := Everybody(ctx, pid)
		if err != nil {
			return s, err
		}
		if s, err = s.OfJob(job); err == nil && len(s.Ranks) == 0 {
			err = fmt.Errorf("observe: job %q: %w", job, ErrNobody)
		}
		return s, err
	}
	before, err := look()
	if err != nil {
		return Explanation{}, err
	}
	select {
	case <-time.After(window):
	case <-ctx.Done():
		return Explanation{}, fmt.Errorf("observe: explain: %w", ctx.Err())
	}
	after, err := look()
	if err != nil {
		return Explanation{}, err
	}
	calls, _ := after.Calls(ctx) // a process that has none to tell is silent, or gone
	return Explain(before, after, calls), nil
}

// Explain explains what ranks did between two states. Calls are the last ones of the ranks; without them nobody is said to come last.
func Explain(before, after State, calls []Call) Explanation {
	x := Explanation{Version: after.Version, At: after.At, Seconds: max(after.At.Sub(before.At).Seconds(), 1e-9), Operations: []Explained{}, Silent: after.Silent}
	jobs := map[string][]*Rank{}
	for i := range after.Ranks {
		r := &after.Ranks[i]
		jobs[r.Job] = append(jobs[r.Job], r)
	}
	var verdicts []string
	for _, job := range slices.Sorted(maps.Keys(jobs)) {
		some := explainJob(before, jobs[job], x.Seconds)
		late(some, jobs[job], calls, before.At, x.Seconds)
		words := explained(after, jobs[job], some, x.Seconds)
		if len(jobs) > 1 {
			words = fmt.Sprintf("job %s: %s", job, words)
		}
		verdicts = append(verdicts, words)
		x.Operations = append(x.Operations, some...)
	}
	x.Verdict = strings.Join(verdicts, "\n")
	return x
}

// sums is an operation while it is added up over ranks.
type sums struct {
	plans   map[string]*planSums
	seconds float64
	waited  []float64 // by rank
}

type planSums struct {
	Plan
	payload, timed, usual float64 // bytes, and calls that were timed in the window and before
}

// explainJob adds up what the ranks of a job did since an earlier state.
func explainJob(before State, ranks []*Rank, window float64) []Explained {
	ops, size := map[string]*sums{}, ranks[0].Size
	of := func(name string) *sums {
		if ops[name] == nil {
			ops[name] = &sums{plans: map[string]*planSums{}, waited: make([]float64, size)}
		}
		return ops[name]
	}
	for _, r := range ranks {
		was := &Rank{}
		if at := slices.IndexFunc(before.Ranks, func(b Rank) bool { return b.Job == r.Job && b.Rank == r.Rank && b.Pid == r.Pid }); at >= 0 {
			was = &before.Ranks[at]
		}
		in := map[string]float64{} // seconds in calls of an operation
		for _, o := range r.Operations {
			var old Operation
			if at := slices.IndexFunc(was.Operations, func(b Operation) bool { return b.Operation == o.Operation && b.Algorithm == o.Algorithm }); at >= 0 {
				old = was.Operations[at]
			}
			if o.Calls == old.Calls && o.Timed == old.Timed && o.InFlight == 0 {
				continue
			}
			s := of(o.Operation)
			p := s.plans[o.Algorithm]
			if p == nil {
				p = &planSums{Plan: Plan{Algorithm: o.Algorithm}}
				s.plans[o.Algorithm] = p
			}
			p.Ranks++
			p.Calls += o.Calls - old.Calls
			p.payload += float64(o.PayloadBytes - old.PayloadBytes)
			p.timed, p.Seconds = p.timed+float64(o.Timed-old.Timed), p.Seconds+o.Seconds-old.Seconds
			p.usual, p.UsualSeconds = p.usual+float64(old.Timed), p.UsualSeconds+old.Seconds
			in[o.Operation] += o.Seconds - old.Seconds
		}
		// What waits now has not been added to what a rank has waited, nor to what its calls took.
		waited := map[waitOf]float64{}
		for _, w := range r.Waited {
			waited[waitOf{w.Operation, w.Peer}] += w.Seconds
		}
		for _, w := range was.Waited {
			waited[waitOf{w.Operation, w.Peer}] -= w.Seconds
		}
		for _, w := range r.Waiting {
			waited[waitOf{w.Operation, w.For}] += w.Seconds
			in[w.Operation] += w.Seconds
		}
		for k, seconds := range waited {
			if seconds > 0 && k.peer >= 0 && k.peer < size {
				of(k.operation).waited[k.peer] += min(seconds, window)
			}
		}
		for name, seconds := range in {
			of(name).seconds += min(seconds, window)
		}
	}
	some := []Explained{}
	for name, s := range ops {
		e := Explained{Job: ranks[0].Job, Operation: name, Plans: []Plan{}, Share: s.seconds / window / float64(len(ranks))}
		for _, p := range s.plans {
			p.PayloadBytes = p.payload / max(1, float64(p.Calls))
			p.Seconds, p.UsualSeconds = p.Seconds/max(1, p.timed), p.UsualSeconds/max(1, p.usual)
			e.Plans = append(e.Plans, p.Plan)
		}
		slices.SortFunc(e.Plans, func(a, b Plan) int {
			return cmp.Or(-cmp.Compare(a.Calls, b.Calls), cmp.Compare(a.Algorithm, b.Algorithm))
		})
		for peer, seconds := range s.waited {
			others := 0
			for _, r := range ranks {
				if r.Rank != peer {
					others++
				}
			}
			if seconds > 0 && others > 0 {
				e.Waited = append(e.Waited, WaitedShare{peer, seconds / window / float64(others)})
			}
		}
		slices.SortFunc(e.Waited, func(a, b WaitedShare) int { return cmp.Or(-cmp.Compare(a.Share, b.Share), a.Rank-b.Rank) })
		some = append(some, e)
	}
	slices.SortFunc(some, func(a, b Explained) int {
		return cmp.Or(-cmp.Compare(a.Share, b.Share), cmp.Compare(a.Operation, b.Operation))
	})
	return some
}

type waitOf struct {
	operation string
	peer      int
}

// late finds out who entered calls last, where all members of a group told when they did.
func late(some []Explained, ranks []*Rank, calls []Call, from time.Time, window float64) {
	type entry struct {
		rank int
		at   time.Time
	}
	entered := map[meeting][]entry{}
	members := map[meeting]int{}
	for i := range calls {
		c := &calls[i]
		if c.Job != ranks[0].Job || c.Call == 0 || c.Started == nil || c.Started.Before(from) {
			continue
		}
		k := meeting{c.Job, c.Group, c.ID, c.Call, c.Operation}
		entered[k] = append(entered[k], entry{c.Rank, *c.Started})
		members[k] = len(c.Members)
	}
	for i := range some {
		e, all, by := &some[i], 0, map[int]*Latecomer{}
		for k, in := range entered {
			if k.operation != e.Operation || len(in) < 2 || len(in) < members[k] {
				continue
			}
			all++
			slices.SortFunc(in, func(a, b entry) int { return a.at.Compare(b.at) })
			last, others := in[len(in)-1], in[:len(in)-1]
			if by[last.rank] == nil {
				by[last.rank] = &Latecomer{Rank: last.rank}
			}
			by[last.rank].Calls++
			by[last.rank].Behind += last.at.Sub(others[len(others)/2].at).Seconds() / window
		}
		for _, l := range by {
			l.Of = all
			e.Last = append(e.Last, *l)
		}
		slices.SortFunc(e.Last, func(a, b Latecomer) int { return cmp.Or(-cmp.Compare(a.Behind, b.Behind), a.Rank-b.Rank) })
	}
}
