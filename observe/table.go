package observe

import (
	"fmt"
	"io"
	"slices"
	"strconv"
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
			fmt.Fprintf(w, "job %s: ", f.Job)
		}
		fmt.Fprintln(w, f.Text)
	}
	if len(s.Ranks) == 0 {
		return
	}
	fmt.Fprintln(w)
	s.epochs(w, several)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if several {
		fmt.Fprint(t, "JOB\t")
	}
	fmt.Fprintln(t, "RANK\tPROCESS\tCALLS\tIN FLIGHT\tWAITS FOR\tSINCE\tIN\tWAITED MOST FOR\tHEAP USED")
	for i := range s.Ranks {
		r := &s.Ranks[i]
		var calls, inFlight uint64
		for _, o := range r.Operations {
			calls, inFlight = calls+o.Calls, inFlight+o.InFlight
		}
		whom, since, in := "-", "-", "-"
		for _, c := range r.Waiting {
			whom, since, in = strconv.Itoa(c.For), (time.Duration(c.Seconds * 1e9)).Round(time.Millisecond).String(), c.Operation
			if c.Call != 0 {
				in += " " + strconv.FormatUint(c.Call, 10)
			}
		}
		most := "-"
		if len(r.Waited) > 0 {
			most = fmt.Sprintf("%d (%.3gs in %s)", r.Waited[0].Peer, r.Waited[0].Seconds, r.Waited[0].Operation)
		}
		var heaps []string
		for _, h := range r.Heaps {
			heaps = append(heaps, fmt.Sprintf("%s %d of %d MiB", h.Device, h.UsedBytes>>20, h.ReservedBytes>>20))
		}
		if several {
			fmt.Fprintf(t, "%s\t", r.Job)
		}
		fmt.Fprintf(t, "%d\t%d\t%d\t%d\t%s\t%s\t%s\t%s\t%s\n", r.Rank, r.Pid, calls, inFlight, whom, since, in, most, strings.Join(heaps, ", "))
	}
	_ = t.Flush()
	s.notes(w, several)
	s.lost(w, several)
}

// epochs has a line for each group that is not the one that met any more, with the last fault of a group that it came from.
func (s State) epochs(w io.Writer, several bool) {
	for _, job := range jobsOf(s.Ranks) {
		at := slices.IndexFunc(s.Ranks, func(r Rank) bool { return r.Job == job && r.Epoch > 0 })
		if at < 0 {
			continue
		}
		r := &s.Ranks[at]
		if several {
			fmt.Fprintf(w, "job %s: ", job)
		}
		fmt.Fprintf(w, "group %s is in epoch %d, of %d ranks", r.Group, r.Epoch, r.now())
		if n := len(r.Past); n > 0 && r.LastFault == nil {
			l := &r.Past[n-1]
			fmt.Fprintf(w, "; before, rank %d of group %s %s at %s: %s%s", l.Culprit, l.Group, faultWords[l.Kind], l.At.Format(time.TimeOnly), l.Error, l.healed(r))
		}
		fmt.Fprintln(w)
	}
}
