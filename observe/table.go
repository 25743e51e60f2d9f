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

// Table prints the state for a person: the verdict, the processes that do not answer, a line a rank, and the last faults.
func (s State) Table(w io.Writer) {
	verdict := s.Verdict
	if verdict == "" {
		verdict = "no rank has waited for another for 5 ms"
	}
	fmt.Fprintln(w, verdict)
	for _, p := range s.Silent {
		fmt.Fprintf(w, "process %d does not answer: it is stopped, or gets no core\n", p.Pid)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	several := len(s.Ranks) > 0 && slices.ContainsFunc(s.Ranks, func(r Rank) bool { return r.Job != s.Ranks[0].Job })
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
	for i := range s.Ranks {
		if f := s.Ranks[i].LastFault; f != nil {
			fmt.Fprintf(w, "\nrank %d had a fault at %s: %s\n", s.Ranks[i].Rank, f.At.Format(time.TimeOnly), f.Error)
		}
	}
}
