package observe

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Finding is something that is wrong with ranks of a job, in words that name them.
type Finding struct {
	Job   string `json:"job,omitempty"`
	Ranks []int  `json:"ranks"`
	// Kind is joining, silent, fault, failed, files, core, swap, late, slow, load, fallback, heap or metrics.
	Kind string `json:"kind"`
	Text string `json:"text"`
}

// Limits from which a finding is one.
const (
	full       = 0.9     // of a heap, or of the descriptors
	swapped    = 1 << 20 // bytes
	diskReads  = 20      // a second
	waitShare  = 0.2     // of the time, in which the others wait for a rank,
	waitFactor = 3       // and how many times as long as for the median rank
	loadFactor = 2       // times the mean of what ranks get
	awayShare  = 0.01    // of a rank's calls, which fall back for one reason
	coreWaits  = 0.3     // of the time, in which a thread in the mean waits for a core
	apart      = 500 * time.Millisecond
)

// findings are those of a state. before is an earlier state of the same ranks, from which waits and loads count; nil is their beginning.
func findings(s, before *State) (all []Finding) {
	all = joins(s.Joins)
	for _, job := range jobsOf(s.Ranks) {
		ranks := slices.DeleteFunc(slices.Clone(s.Ranks), func(r Rank) bool { return r.Job != job })
		f := finder{job: job, ranks: ranks, state: s}
		f.faults()
		f.failed()
		f.processes()
		f.waits(before)
		f.load(before)
		f.fallbacks(before)
		f.heaps()
		f.mute()
		all = append(all, f.found...)
	}
	for _, p := range s.Silent {
		text := fmt.Sprintf("process %d %s", p.Pid, s.mute(p.Pid))
		if p.Rank >= 0 {
			text = fmt.Sprintf("rank %d, process %d, %s", p.Rank, p.Pid, s.mute(p.Pid))
		}
		all = append(all, Finding{p.Job, []int{p.Rank}, "silent", text})
	}
	return all
}

func jobsOf(ranks []Rank) (jobs []string) {
	for _, r := range ranks {
		if !slices.Contains(jobs, r.Job) {
			jobs = append(jobs, r.Job)
		}
	}
	return jobs
}

// joins says who is missing where ranks wait to make a group: rank 0 knows it. Where it is missing itself, or has found its port taken, the
// others do.
func joins(waiting []Join) (all []Finding) {
	for from := 0; from < len(waiting); {
		to := from
		first := waiting[from]
		for to++; to < len(waiting); to++ {
			if w := waiting[to]; w.At != first.At || w.Group != first.Group || w.Size != first.Size || w.Rank == waiting[to-1].Rank { // of another job
				break
			}
		}
		longest := slices.MaxFunc(waiting[from:to], func(a, b Join) int { return int((a.Seconds - b.Seconds) * 1e9) })
		missing := []int{0}
		if first.Rank == 0 {
			missing = first.Missing
		}
		var here []int
		var who []string
		if len(missing) > 0 {
			who = append(who, waitedFor(missing))
		}
		for _, w := range waiting[from:to] {
			if !slices.Contains(missing, w.Rank) {
				here = append(here, w.Rank)
			}
		}
		if len(here) > 0 {
			who = append(who, severalWait(here)+" here")
		}
		text := fmt.Sprintf("group %s of %d ranks has not met at %s after %.1fs: %s. %s", first.Group, first.Size, first.At, longest.Seconds, strings.Join(who, "; "), first.What)
		all = append(all, Finding{"", missing, "joining", text})
		from = to
	}
	return all
}

func waitedFor(ranks []int) string {
	if len(ranks) == 1 {
		return severalRanks(ranks) + " is waited for"
	}
	return severalRanks(ranks) + " are waited for"
}

func severalWait(ranks []int) string {
	if len(ranks) == 1 {
		return severalRanks(ranks) + " waits"
	}
	return severalRanks(ranks) + " wait"
}

// mute says why a process does not answer.
func (s *State) mute(pid int) string {
	at := slices.IndexFunc(s.Processes, func(v Vitals) bool { return v.Pid == pid })
	if at < 0 {
		return "does not answer: it is stopped, or gets no core"
	}
	switch v := s.Processes[at]; {
	case v.State == "stopped":
		return "is stopped: it got a signal such as SIGSTOP, and goes on after SIGCONT"
	case v.State == "traced":
		return "is stopped by a debugger"
	case v.State == "waiting for a device":
		return "does not answer: it waits for a disk or a driver"
	case v.State == "dead":
		return "has ended, and its parent has not noticed"
	case v.crowded():
		return fmt.Sprintf("has %d of %d file descriptors open and cannot accept a connection: ulimit -n is its limit", v.Files, v.FileLimit)
	default:
		return "does not answer: it gets no core, or its threads hold all of them"
	}
}

func (v *Vitals) crowded() bool {
	return v.FileLimit > 0 && float64(v.Files) >= full*float64(v.FileLimit)
}

// finder looks at the ranks of one job.
type finder struct {
	job   string
	ranks []Rank
	state *State
	found []Finding
}

func (f *finder) add(kind string, ranks []int, format string, args ...any) {
	f.found = append(f.found, Finding{f.job, ranks, kind, fmt.Sprintf(format, args...)})
}

// severalRanks is like "ranks 0, 1 and 3", or "rank 3".
func severalRanks(ranks []int) string {
	words := make([]string, len(ranks))
	for i, r := range ranks {
		words[i] = strconv.Itoa(r)
	}
	if len(words) == 1 {
		return "rank " + words[0]
	}
	return "ranks " + strings.Join(words[:len(words)-1], ", ") + " and " + words[len(words)-1]
}

var faultWords = map[string]string{"lost": "was lost", "left": "has left", "aborted": "has aborted the group", "mismatch": "disagreed with the others", "absent": "was absent"}

// faults names the last rank that each rank has lost, once.
func (f *finder) faults() {
	type fault struct {
		kind    string
		culprit int
	}
	said := map[fault][]int{}
	for i := range f.ranks {
		if l := f.ranks[i].LastFault; l != nil {
			k := fault{l.Kind, l.Culprit}
			if said[k] = append(said[k], f.ranks[i].Rank); len(said[k]) == 1 {
				f.add("fault", []int{l.Culprit}, "rank %d %s at %s: %s%s", l.Culprit, faultWords[l.Kind], l.At.Format(time.TimeOnly), l.Error, l.healed(&f.ranks[i]))
			}
		}
	}
}

// healed says what came of a failure, as a rank knows it.
func (l *Failure) healed(r *Rank) string {
	if l.HealedSeconds == nil {
		return ""
	}
	return fmt.Sprintf("; the group, epoch %d, went on with %d ranks, and its first call ended %.3gs later", r.Epoch, r.now(), *l.HealedSeconds)
}

// failed names calls that failed while the group did not: ranks that disagree, or make different calls.
func (f *finder) failed() {
	for i := range f.ranks {
		if c := f.ranks[i].LastFailed; c != nil && f.ranks[i].LastFault == nil {
			at := c.Enqueued
			if c.Finished != nil {
				at = *c.Finished
			}
			f.add("failed", []int{c.Rank}, "rank %d: %s failed at %s: %s", c.Rank, callName(c.Operation, c.Call), at.Format(time.TimeOnly), c.Error)
		}
	}
}

func callName(operation string, number uint64) string {
	if number == 0 {
		return operation
	}
	return fmt.Sprintf("%s %d", operation, number)
}

// processes names those that swap, or run out of descriptors.
func (f *finder) processes() {
	for _, v := range f.state.Processes {
		var ranks []int
		for i := range f.ranks {
			if f.ranks[i].Pid == v.Pid {
				ranks = append(ranks, f.ranks[i].Rank)
			}
		}
		if ranks == nil {
			continue
		}
		if v.crowded() {
			f.add("files", ranks, "%s, process %d, has %d of %d file descriptors open: ulimit -n is its limit", severalRanks(ranks), v.Pid, v.Files, v.FileLimit)
		}
		if v.CoreWaits >= coreWaits {
			f.add("core", ranks, "%s, process %d, gets too few cores: its threads wait for one %.0f ms a second", severalRanks(ranks), v.Pid, 1e3*v.CoreWaits)
		}
		switch {
		case v.SwapBytes >= swapped:
			f.add("swap", ranks, "%s, process %d, has %d MiB of its memory swapped out, and reads memory from a disk %.0f times a second", severalRanks(ranks), v.Pid, v.SwapBytes>>20, v.DiskReadsASecond)
		case v.DiskReadsASecond >= diskReads:
			f.add("swap", ranks, "%s, process %d, reads memory from a disk %.0f times a second: memory is short on its host", severalRanks(ranks), v.Pid, v.DiskReadsASecond)
		}
	}
}

// past is a rank as it was in an earlier state, nil if that does not have it.
func (f *finder) past(before *State, r *Rank) *Rank {
	if before == nil {
		return nil
	}
	return before.past(r)
}

// past is the rank of a later state as it was here, nil if it was not.
func (s *State) past(r *Rank) *Rank {
	at := slices.IndexFunc(s.Ranks, func(b Rank) bool { return b.Job == r.Job && b.Group == r.Group && b.Rank == r.Rank })
	if at < 0 {
		return nil
	}
	return &s.Ranks[at]
}

// waits names a rank for which the others wait much of the time: because it comes late to calls, or because it is slow in them. The two are
// compared apart: after a call that one rank held up the others are not equally far, and come to the next a little late.
func (f *finder) waits(before *State) {
	n := f.ranks[0].Size
	if n < 3 {
		return
	}
	absent, begun := make([]waits, n), make([]waits, n) // by peer
	for i := range f.ranks {
		r := &f.ranks[i]
		elapsed, was := f.state.At.Sub(r.Began).Seconds(), f.past(before, r)
		if was != nil {
			elapsed = f.state.At.Sub(before.At).Seconds()
		}
		if elapsed <= 0 {
			continue
		}
		for p := range n {
			if p != r.Rank {
				absent[p].observers++
				begun[p].observers++
			}
		}
		for _, w := range r.Waited {
			if was != nil {
				for _, old := range was.Waited {
					if old.Operation == w.Operation && old.Peer == w.Peer {
						w.Seconds, w.AbsentSeconds = w.Seconds-old.Seconds, w.AbsentSeconds-old.AbsentSeconds
					}
				}
			}
			if w.Peer != r.Rank && w.Peer < n {
				absent[w.Peer].add(w.Operation, w.AbsentSeconds/elapsed)
				begun[w.Peer].add(w.Operation, (w.Seconds-w.AbsentSeconds)/elapsed)
			}
		}
	}
	// A rank that is both has one finding: the wait that costs more.
	for _, p := range outstanding(absent) {
		if begun[p].share() > absent[p].share() {
			continue
		}
		f.add("late", []int{p}, "rank %d comes late to calls: the others wait %s of the time until it begins one, most in %s", p, percent(absent[p].share()), absent[p].most())
	}
	for _, p := range outstanding(begun) {
		if begun[p].share() <= absent[p].share() {
			continue
		}
		f.add("slow", []int{p}, "rank %d is slow in calls that it has begun: the others wait for it %s of the time, most in %s: a link, its copies or its core", p, percent(begun[p].share()), begun[p].most())
	}
}

// waits are those of other ranks for one, as parts of the time of each.
type waits struct {
	observers int
	by        map[string]float64
	sum       float64
}

func (w *waits) add(operation string, part float64) {
	if w.by == nil {
		w.by = map[string]float64{}
	}
	w.by[operation] += part
	w.sum += part
}

// share is the part of their time that the mean of those ranks waits.
func (w *waits) share() float64 { return w.sum / float64(max(1, w.observers)) }

func (w *waits) most() (most string) {
	for _, op := range slices.Sorted(maps.Keys(w.by)) {
		if most == "" || w.by[op] > w.by[most] {
			most = op
		}
	}
	return most
}

// outstanding are the ranks for which the others wait much longer than for the median rank.
func outstanding(all []waits) (ranks []int) {
	shares := make([]float64, len(all))
	for p := range all {
		shares[p] = all[p].share()
	}
	slices.Sort(shares)
	for p := range all {
		if s := all[p].share(); s >= waitShare && s >= waitFactor*shares[len(shares)/2] {
			ranks = append(ranks, p)
		}
	}
	return ranks
}

// load names ranks whose experts get far more tokens than those of the mean rank.
func (f *finder) load(before *State) {
	var sums []float64
	total := 0.0
	for i := range f.ranks {
		was := f.past(before, &f.ranks[i])
		for p, n := range f.ranks[i].Choices {
			if was != nil && p < len(was.Choices) {
				n -= was.Choices[p]
			}
			for len(sums) <= p {
				sums = append(sums, 0)
			}
			sums[p], total = sums[p]+n, total+n
		}
	}
	for p, n := range sums {
		if mean := total / float64(len(sums)); n > 0 && n >= loadFactor*mean {
			f.add("load", []int{p}, "rank %d gets %.1f times the tokens of the mean rank: its experts are in demand, and package rebalance can move them", p, n/mean)
		}
	}
}

// heaps names those that are nearly full. They are so on all ranks alike, which allocate the same.
func (f *finder) heaps() {
	said := map[string]int{}
	for i := range f.ranks {
		for _, h := range f.ranks[i].Heaps {
			if h.ReservedBytes == 0 || float64(h.UsedBytes) < full*float64(h.ReservedBytes) {
				continue
			}
			text := fmt.Sprintf("has used %d of %d MiB of its heap on %s; the largest buffer that fits has %d KiB", h.UsedBytes>>20, h.ReservedBytes>>20, h.Device, h.LargestFreeBytes>>10)
			if at, ok := said[text]; ok {
				f.found[at].Ranks = append(f.found[at].Ranks, f.ranks[i].Rank)
				continue
			}
			said[text] = len(f.found)
			f.add("heap", []int{f.ranks[i].Rank}, "%s", text)
		}
	}
	for text, at := range said {
		f.found[at].Text = severalRanks(f.found[at].Ranks) + ": each " + text
		if len(f.found[at].Ranks) == 1 {
			f.found[at].Text = severalRanks(f.found[at].Ranks) + " " + text
		}
	}
}

// mute names ranks whose metrics nobody can have.
func (f *finder) mute() {
	for i := range f.ranks {
		if r := &f.ranks[i]; r.NoMetrics != "" {
			f.add("metrics", []int{r.Rank}, "rank %d, process %d, serves no metrics: %s", r.Rank, r.Pid, r.NoMetrics)
		}
	}
}

// identify finds the ranks of processes that do not answer, by the connections of others with them.
func (s *State) identify() {
	for i := range s.Silent {
		p := &s.Silent[i]
		p.Rank = -1
		for k := range s.Ranks {
			at := slices.IndexFunc(s.Ranks[k].Peers, func(peer Peer) bool { return peer.Pid == p.Pid })
			if at >= 0 {
				p.Job, p.Rank = s.Ranks[k].Job, at
				break
			}
		}
	}
}

// Since is the state with layers and findings about the time since an earlier state of the same ranks, instead of all their time, and with what
// ranks lost to waits in that time.
func (s State) Since(before State) State {
	s.Layers = s.layers(&before)
	s.Findings = findings(&s, &before)
	s.Lost = s.losses(&before)
	return s
}
