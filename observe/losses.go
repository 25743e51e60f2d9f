package observe

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// Loss is the time that calls of a rank have waited for another one since an earlier state.
type Loss struct {
	Job       string `json:"job"`
	Rank      int    `json:"rank"` // that waited
	For       int    `json:"for"`
	Operation string `json:"operation"`
	// Seconds of the time between the states, of which they are the Share.
	Seconds float64 `json:"seconds"`
	Share   float64 `json:"share"`
}

// losses are those of all ranks since an earlier state, the longest first.
func (s *State) losses(before *State) (all []Loss) {
	for i := range s.Ranks {
		r := &s.Ranks[i]
		was, window := before.past(r), s.At.Sub(before.At).Seconds()
		if was == nil || was.Pid != r.Pid || window <= 0 {
			continue
		}
		// What waits now has not been added to what a rank has waited.
		first := len(all)
		add := func(operation string, peer int, seconds float64) {
			at := slices.IndexFunc(all[first:], func(l Loss) bool { return l.Operation == operation && l.For == peer })
			if at < 0 {
				at = len(all) - first
				all = append(all, Loss{Job: r.Job, Rank: r.Rank, For: peer, Operation: operation})
			}
			all[first+at].Seconds += seconds
		}
		for _, from := range []struct {
			rank *Rank
			sign float64
		}{{r, 1}, {was, -1}} {
			for _, w := range from.rank.Waited {
				add(w.Operation, w.Peer, from.sign*w.Seconds)
			}
			for _, w := range from.rank.Waiting {
				add(w.Operation, w.For, from.sign*w.Seconds)
			}
		}
		for k := first; k < len(all); k++ {
			all[k].Seconds = min(all[k].Seconds, window)
			all[k].Share = all[k].Seconds / window
		}
	}
	all = slices.DeleteFunc(all, func(l Loss) bool { return l.Share < leastLoss })
	slices.SortStableFunc(all, func(a, b Loss) int { return cmp.Compare(b.Seconds, a.Seconds) })
	return all
}

// A loss that is told is at least a part of the time, and a table shows some.
const (
	leastLoss   = 0.01
	lossesShown = 10
)

// lost has a line for each of the longest losses.
func (s State) lost(w io.Writer, several bool) {
	if len(s.Lost) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if several {
		fmt.Fprint(t, "JOB\t")
	}
	fmt.Fprintln(t, "TIME LOST\tBY RANK\tWAITING FOR\tIN")
	for _, l := range s.Lost[:min(len(s.Lost), lossesShown)] {
		if several {
			fmt.Fprintf(t, "%s\t", s.jobName(l.Job))
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%s\n", percent(l.Share), l.Rank, l.For, l.Operation)
	}
	_ = t.Flush()
}
