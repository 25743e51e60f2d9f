package observe

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Shares of the window from which on a verdict speaks of a rank that holds up others, and up to which it says that calls are not the matter.
const (
	notableShare = 0.05
	minorShare   = 0.2
)

// explained says why a step of a job takes its time, in words.
func explained(after State, ranks []*Rank, some []Explained, window float64) string {
	took := time.Duration(window * 1e9).Round(time.Millisecond)
	var calls uint64
	var timed bool
	share := 0.0
	for i := range some {
		share += some[i].Share
		for _, p := range some[i].Plans {
			calls += p.Calls
			timed = timed || p.Seconds > 0
		}
	}
	job := State{Version: after.Version, At: after.At}
	for _, r := range ranks {
		job.Ranks = append(job.Ranks, *r)
	}
	stuck := verdict(job.Ranks)
	if calls == 0 {
		if stuck != "" {
			return "no call began in " + took.String() + ": " + stuck
		}
		return "no call began in " + took.String() + ", and no rank waits for another: the step is slow outside of calls"
	}
	rank, most, held, last := holdsUp(some, ranks[0].Size)
	if !timed && share == 0 && held == 0 {
		return "all calls ran on GPUs, of whose times the host knows nothing: take a profile there"
	}
	switch {
	case held >= notableShare:
		words := fmt.Sprintf("rank %d holds up the others: they wait for it %s of the time, most in %s", rank, percent(held), most)
		if last != nil {
			words += fmt.Sprintf(", to which it came last in %d of %d calls", last.Calls, last.Of)
		}
		return words
	case share < minorShare:
		return fmt.Sprintf("calls take %s of the time, and no rank is waited for %s of it: the step is slow outside of calls", percent(share), percent(notableShare))
	}
	words := fmt.Sprintf("calls take %s of the time, and no rank is waited for %s of it: most is %s", percent(share), percent(notableShare), some[0].Operation)
	if p := some[0].Plans; len(p) > 0 && p[0].Seconds > 0 {
		words += fmt.Sprintf(" by %s, %s a call in %s", p[0].Algorithm, size(p[0].PayloadBytes), brief(p[0].Seconds))
	}
	return words
}

// holdsUp is the rank for which the others wait most, in which operation, how much, and how often it came last there. Where ranks wait one for
// the other, as around a ring, all of them are waited for: then it is the one that came last.
func holdsUp(some []Explained, size int) (rank int, most string, held float64, last *Latecomer) {
	waited, behind := make([]float64, size), make([]float64, size)
	for i := range some {
		for _, w := range some[i].Waited {
			waited[w.Rank] += w.Share
		}
		for _, l := range some[i].Last {
			if l.Rank < size {
				behind[l.Rank] += l.Behind
			}
		}
	}
	score := make([]float64, size)
	for r := range score {
		score[r] = waited[r] + behind[r]
	}
	rank = slices.Index(score, slices.Max(score))
	held = max(waited[rank], behind[rank])
	top := -1.0
	for i := range some {
		of := 0.0
		for _, w := range some[i].Waited {
			if w.Rank == rank {
				of += w.Share
			}
		}
		var here *Latecomer
		for k := range some[i].Last {
			if l := &some[i].Last[k]; l.Rank == rank {
				of += l.Behind
				here = l
			}
		}
		if of > top {
			top, most, last = of, some[i].Operation, here
		}
	}
	return rank, most, held, last
}

func percent(share float64) string { return fmt.Sprintf("%.0f%%", 100*min(1, share)) }

// size is a number of bytes for a person.
func size(bytes float64) string {
	for _, unit := range []string{"B", "KiB", "MiB"} {
		if bytes < 1024 {
			return fmt.Sprintf("%.3g %s", bytes, unit)
		}
		bytes /= 1024
	}
	return fmt.Sprintf("%.3g GiB", bytes)
}

// brief is a time for a person.
func brief(seconds float64) string {
	d := time.Duration(seconds * 1e9)
	for _, to := range []time.Duration{time.Second, time.Millisecond, time.Microsecond} {
		if d >= to {
			return d.Round(to / 100).String()
		}
	}
	return d.String()
}

// Table prints the explanation for a person: the verdict, and a line for each operation and algorithm.
func (x Explanation) Table(w io.Writer) {
	fmt.Fprintln(w, x.Verdict)
	for _, p := range x.Silent {
		fmt.Fprintf(w, "process %d does not answer: it is stopped, or gets no core\n", p.Pid)
	}
	if len(x.Operations) == 0 {
		return
	}
	fmt.Fprintln(w)
	several := slices.ContainsFunc(x.Operations, func(e Explained) bool { return e.Job != x.Operations[0].Job })
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if several {
		fmt.Fprint(t, "JOB\t")
	}
	fmt.Fprintln(t, "OPERATION\tOF TIME\tALGORITHM\tCALLS/S OF A RANK\tPAYLOAD\tTAKES\tUSUALLY\tWAITED FOR\tCAME LAST")
	for i := range x.Operations {
		e := &x.Operations[i]
		waits, last := []string{}, "-"
		for _, p := range e.Waited[:min(3, len(e.Waited))] {
			waits = append(waits, fmt.Sprintf("%d (%s)", p.Rank, percent(p.Share)))
		}
		if len(waits) == 0 {
			waits = []string{"-"}
		}
		if len(e.Last) > 0 {
			last = fmt.Sprintf("%d (%d of %d)", e.Last[0].Rank, e.Last[0].Calls, e.Last[0].Of)
		}
		for k, p := range e.Plans {
			takes, usually := "-", "-"
			if p.Seconds > 0 {
				takes = brief(p.Seconds)
			}
			if p.UsualSeconds > 0 {
				usually = brief(p.UsualSeconds)
			}
			if several {
				fmt.Fprintf(t, "%s\t", e.Job)
			}
			name, of, whom, late := e.Operation, percent(e.Share), strings.Join(waits, ", "), last
			if k > 0 {
				name, of, whom, late = "", "", "", ""
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%.1f\t%s\t%s\t%s\t%s\t%s\n", name, of, p.Algorithm, float64(p.Calls)/x.Seconds/float64(p.Ranks), size(p.PayloadBytes), takes, usually, whom, late)
		}
	}
	_ = t.Flush()
}
