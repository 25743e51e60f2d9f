package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/switchyard-moe/switchyard/observe"
)

// status asks running ranks for their state.
func status(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard status", flag.ContinueOnError)
	flags.SetOutput(stderr)
	asJSON := flags.Bool("json", false, "print an object")
	pid := flags.Int("pid", 0, "ask this process `N` only")
	every := flags.Duration("every", 0, "ask again after this time, until interrupted")
	if code, ok := parsed(flags, args, stderr); !ok {
		return code
	}
	for {
		s, silent, code := ask(*pid, stderr)
		switch {
		case *asJSON && code == 0:
			if err := json.NewEncoder(stdout).Encode(s); err != nil {
				fmt.Fprintf(stderr, "switchyard status: %v\n", err)
				return 1
			}
		case code == 0:
			if *every > 0 && isTerminal(stdout) {
				fmt.Fprint(stdout, "\x1b[H\x1b[2J")
			}
			tell(stdout, s, silent)
		}
		if *every <= 0 {
			return code
		}
		time.Sleep(*every)
	}
}

// parsed parses a command line without arguments.
func parsed(flags *flag.FlagSet, args []string, stderr io.Writer) (code int, ok bool) {
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0, false
	case err != nil:
		return 2, false
	case flags.NArg() > 0:
		fmt.Fprintf(stderr, "%s: %q is too much\n", flags.Name(), flags.Args())
		return 2, false
	}
	return 0, true
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// ask is the state of all processes that answer, and those that do not.
func ask(pid int, stderr io.Writer) (all observe.State, silent []observe.Process, code int) {
	processes, err := observe.Processes(context.Background())
	if err != nil {
		fmt.Fprintf(stderr, "switchyard: %v\n", err)
		return all, nil, 1
	}
	var states []observe.State
	for _, p := range processes {
		switch {
		case pid != 0 && p.Pid != pid:
		case p.Err != nil:
			silent = append(silent, p)
		default:
			states = append(states, p.State)
		}
	}
	if len(states) == 0 {
		for _, p := range silent {
			fmt.Fprintf(stderr, "switchyard: %v\n", p.Err)
		}
		fmt.Fprintln(stderr, "switchyard: no process of this user with ranks answers on this host (SWITCHYARD_STATUS=0 closes its socket, and another network namespace hides it)")
		return all, silent, 1
	}
	return observe.Merge(states...), silent, 0
}

// tell prints a state for a person.
func tell(w io.Writer, s observe.State, silent []observe.Process) {
	verdict := s.Verdict
	if verdict == "" {
		verdict = "no rank has waited for another for 5 ms"
	}
	fmt.Fprintln(w, verdict)
	for _, p := range silent {
		fmt.Fprintf(w, "process %d does not answer: it is stopped, or gets no core\n", p.Pid)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
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
		fmt.Fprintf(t, "%d\t%d\t%d\t%d\t%s\t%s\t%s\t%s\t%s\n", r.Rank, r.Pid, calls, inFlight, whom, since, in, most, strings.Join(heaps, ", "))
	}
	_ = t.Flush()
	for i := range s.Ranks {
		if f := s.Ranks[i].LastFault; f != nil {
			fmt.Fprintf(w, "\nrank %d had a fault at %s: %s\n", s.Ranks[i].Rank, f.At.Format(time.TimeOnly), f.Error)
		}
	}
}

// dump prints the last calls of running ranks.
func dump(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard dump", flag.ContinueOnError)
	flags.SetOutput(stderr)
	pid := flags.Int("pid", 0, "ask this process `N` only")
	if code, ok := parsed(flags, args, stderr); !ok {
		return code
	}
	s, silent, code := ask(*pid, stderr)
	if code != 0 {
		return code
	}
	if err := json.NewEncoder(stdout).Encode(s); err != nil {
		fmt.Fprintf(stderr, "switchyard dump: %v\n", err)
		return 1
	}
	for _, p := range silent {
		fmt.Fprintf(stderr, "switchyard dump: %v\n", p.Err)
		code = 1
	}
	asked := map[int]bool{}
	for _, r := range s.Ranks {
		if asked[r.Pid] {
			continue
		}
		asked[r.Pid] = true
		err := observe.Ask(context.Background(), r.Pid, "/dump", func(body io.Reader) error {
			lines := bufio.NewReader(body)
			if _, err := lines.ReadBytes('\n'); err != nil { // the state of this process alone
				return err
			}
			_, err := io.Copy(stdout, lines)
			return err
		})
		if err != nil {
			fmt.Fprintf(stderr, "switchyard dump: %v\n", err)
			code = 1
		}
	}
	return code
}
