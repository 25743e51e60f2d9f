package observe

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Table prints the state for a person: the verdict, the findings, and a line a rank.
func (s State) Table(w io.Writer) {
	several := len(jobsOf(s.Ranks)) > 1
	switch {
	case s.Verdict != "":
		fmt.Fprintln(w, s.Verdict)
	case len(s.Findings) == 0:
		fmt.Fprintln(w, "no rank has waited for another for 5 ms")
	}
	for _, f := range s.Findings {
		if several && f.Job != "" {
			fmt.Fprintf(w, "job %s: ", s.jobName(f.Job))
		}
		fmt.Fprintln(w, f.Text)
	}
	if len(s.Ranks) == 0 {
		return
	}
	for _, job := range jobsOf(s.Ranks) {
		fmt.Fprintln(w)
		if several {
			fmt.Fprintf(w, "job %s\n", s.jobName(job))
		}
		s.epoch(w, job)
		s.ranks(w, job)
	}
	s.notes(w, several)
	s.lost(w, several)
}

// ranks is the table of the ranks of a job. It fits 80 columns.
func (s State) ranks(w io.Writer, job string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "RANK\tPROCESS\tCALLS\tWAITS FOR\tHEAP USED")
	for i := range s.Ranks {
		r := &s.Ranks[i]
		if r.Job != job {
			continue
		}
		var calls uint64
		for _, o := range r.Operations {
			calls += o.Calls
		}
		waits := "-"
		if l := r.longest(); l.Seconds > 0 {
			waits = fmt.Sprintf("%d: %s, %s", l.For, callName(l.Operation, l.Call), brief(l.Seconds))
		}
		var heaps []string
		for _, h := range r.Heaps {
			used := fmt.Sprintf("%d/%d MiB", h.UsedBytes>>20, h.ReservedBytes>>20)
			if h.Device != "host" {
				used = h.Device + " " + used
			}
			heaps = append(heaps, used)
		}
		if len(heaps) == 0 {
			heaps = []string{"-"}
		}
		fmt.Fprintf(t, "%d\t%d\t%d\t%s\t%s\n", r.Rank, r.Pid, calls, waits, strings.Join(heaps, ", "))
	}
	_ = t.Flush()
}

// epoch is a line for a group that is not the one that met any more, with the last fault of a group that it came from.
func (s State) epoch(w io.Writer, job string) {
	at := slices.IndexFunc(s.Ranks, func(r Rank) bool { return r.Job == job && r.Epoch > 0 })
	if at < 0 {
		return
	}
	r := &s.Ranks[at]
	fmt.Fprintf(w, "group %s is in epoch %d, of %d ranks", r.Group, r.Epoch, r.now())
	if n := len(r.Past); n > 0 && r.LastFault == nil {
		l := &r.Past[n-1]
		fmt.Fprintf(w, "; before, rank %d of group %s %s at %s: %s%s", l.Culprit, l.Group, faultWords[l.Kind], l.At.Format(time.TimeOnly), l.Error, l.healed(r))
	}
	fmt.Fprintln(w)
}

// jobName is the identity of a job, short, behind the name of its program, where that is known.
func (s State) jobName(job string) string { return jobName(s.Ranks, job) }

func jobName(ranks []Rank, job string) string {
	short := job[:min(len(job), shortJob)]
	for i := range ranks {
		if r := &ranks[i]; r.Job == job && r.Program != "" {
			return r.Program + " " + short
		}
	}
	return short
}

// shortJob is the number of digits of a job's identity that people see, and longest that of letters of a program's name.
const shortJob, longestName = 8, 20
