package observe

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// notable is the least wait that a verdict tells of.
const notable = 5 * time.Millisecond

// verdict says who is waited for, in words: the rank that most waiting ranks wait for in the end, and what it has not done. It is empty where
// no rank has waited for 5 ms.
func verdict(ranks []Rank) string {
	type blame struct {
		job     string
		rank    int
		waiting int           // ranks that wait for it in the end
		longest time.Duration // of their waits
		call    *Waiting      // the longest of those for it, or of others where none is
		absent  bool
	}
	var blames []*blame
	answers := map[string]map[int]bool{} // ranks by job
	for i := range ranks {
		if answers[ranks[i].Job] == nil {
			answers[ranks[i].Job] = map[int]bool{}
		}
		answers[ranks[i].Job][ranks[i].Rank] = true
	}
	words, crossed := different(ranks, len(answers) > 1)
	for i := range ranks {
		r := &ranks[i]
		longest := r.longest()
		if longest.Seconds < notable.Seconds() || crossed[i] {
			continue
		}
		culprit, absent := longest.For, slices.Contains(longest.Absent, longest.For)
		if len(longest.Absent) > 0 && !absent {
			culprit, absent = longest.Absent[0], true
		}
		if !absent {
			culprit = follow(r, culprit, answers[r.Job], awaits(r, ranks))
		}
		at := slices.IndexFunc(blames, func(b *blame) bool { return b.job == r.Job && b.rank == culprit })
		if at < 0 {
			at = len(blames)
			blames = append(blames, &blame{job: r.Job, rank: culprit})
		}
		b := blames[at]
		b.waiting++
		b.longest = max(b.longest, time.Duration(longest.Seconds*1e9))
		if direct := longest.For == culprit || absent; b.call == nil || direct && (b.call.For != culprit && !b.absent || longest.Seconds > b.call.Seconds) {
			b.call, b.absent = &longest, absent
		}
	}
	slices.SortStableFunc(blames, func(a, b *blame) int { return b.waiting - a.waiting })
	for _, b := range blames {
		call := callName(b.call.Operation, b.call.Call)
		what := fmt.Sprintf("rank %d does not come further in %s", b.rank, call)
		if b.absent {
			what = fmt.Sprintf("rank %d has not entered %s", b.rank, call)
		}
		if owes := owed[b.call.Operation]; owes != "" && b.call.For == b.rank {
			what = fmt.Sprintf("rank %d %s", b.rank, owes)
		}
		wait := "ranks wait"
		if b.waiting == 1 {
			wait = "rank waits"
		}
		of := ""
		if len(answers) > 1 {
			of = fmt.Sprintf("job %s: ", jobName(ranks, b.job))
		}
		words = append(words, of+fmt.Sprintf("%s of group %s; %d %s, the longest %v", what, b.call.Group, b.waiting, wait, b.longest.Round(time.Millisecond)))
	}
	return strings.Join(words, ". ")
}

// owed is, by operation, for what a call waits that the other rank does not enter.
var owed = map[string]string{
	"open memory":      "has shared no memory that a rank is to open",
	"take back memory": "has not given back memory that a rank has shared with it",
}

// longest is the call of a rank that has waited longest.
func (r *Rank) longest() Waiting {
	return slices.MaxFunc(append([]Waiting{{}}, r.Waiting...), func(a, b Waiting) int { return int((a.Seconds - b.Seconds) * 1e9) })
}

// different says which ranks wait for each other in calls that the other has not begun, and which places of ranks that are. Threads that make
// calls side by side may be as far apart for a moment.
func different(ranks []Rank, several bool) (words []string, crossed map[int]bool) {
	crossed = map[int]bool{}
	for i := range ranks {
		a := ranks[i].longest()
		for k := range ranks {
			b := ranks[k].longest()
			if ranks[i].Job == ranks[k].Job && min(a.Seconds, b.Seconds) >= apart.Seconds() && slices.Contains(a.Absent, ranks[k].Rank) && slices.Contains(b.Absent, ranks[i].Rank) {
				crossed[i], crossed[k] = true, true
			}
		}
	}
	for _, job := range jobsOf(ranks) {
		in := map[string][]int{}
		var calls []string
		for i := range ranks {
			if crossed[i] && ranks[i].Job == job {
				w := ranks[i].longest()
				call := callName(w.Operation, w.Call) + " of group " + w.Group
				if in[call] == nil {
					calls = append(calls, call)
				}
				in[call] = append(in[call], ranks[i].Rank)
			}
		}
		if calls == nil {
			continue
		}
		slices.SortStableFunc(calls, func(a, b string) int { return len(in[a]) - len(in[b]) })
		text := "ranks make different calls, and wait for each other: "
		if several {
			text = "job " + jobName(ranks, job) + ": " + text
		}
		for i, call := range calls {
			if i > 0 {
				text += "; "
			}
			text += severalRanks(in[call]) + " in " + call
		}
		words = append(words, text)
	}
	return words, crossed
}

// awaits says for whom each rank of r's job waits, -1 for none: as the memory of r's heaps tells, and where that does not, the rank itself.
func awaits(r *Rank, ranks []Rank) []int {
	all := slices.Repeat([]int{-1}, r.Size)
	if at := slices.IndexFunc(r.Heaps, func(h Heap) bool { return len(h.Awaits) > 0 }); at >= 0 {
		all = slices.Clone(r.Heaps[at].Awaits)
	}
	for i := range ranks {
		if q := &ranks[i]; q.Job == r.Job && q.Rank < len(all) && all[q.Rank] < 0 {
			if l := q.longest(); l.Seconds >= notable.Seconds() {
				all[q.Rank] = l.For
			}
		}
	}
	return all
}

// follow goes from a rank on along those that it waits for itself. It ends at a rank that waits for nobody, or
// whose process does not answer while others do: a rank that was stopped in a wait still says that it waits. Where the way leads in a circle
// for another reason, the one that most ranks wait for is to blame, among those the first on the way.
func follow(r *Rank, peer int, answers map[int]bool, awaits []int) int {
	waiting := make([]int, len(awaits)) // ranks that wait for a rank
	for _, whom := range awaits {
		if whom >= 0 && whom < len(waiting) {
			waiting[whom]++
		}
	}
	var way []int
	for {
		next := -1
		if peer < len(awaits) {
			next = awaits[peer]
		}
		if next < 0 || next == r.Rank || len(answers) > 1 && !answers[peer] {
			return peer
		}
		if at := slices.Index(way, peer); at >= 0 {
			return slices.MaxFunc(way[at:], func(a, b int) int { return waiting[a] - waiting[b] })
		}
		way = append(way, peer)
		peer = next
	}
}
