package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/switchyard-moe/switchyard/observe"
)

const jobHelp = "tell of one `JOB` only: its identity or the name of its program, or the beginning of one"

// status asks running ranks for their state.
func status(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard status", flag.ContinueOnError)
	asJSON := flags.Bool("json", false, "print an object")
	pid := flags.Int("pid", 0, "ask this process `N` only")
	job := flags.String("job", "", jobHelp)
	every := flags.Duration("every", 0, "ask again after this time, until interrupted; what ranks waited for then counts from the time before")
	times := flags.Int("n", 0, "with -every, ask `N` times, for ever if 0")
	if code, ok := parsed(flags, args, stderr); !ok {
		return code
	}
	var before *observe.State
	for n := 1; ; n++ {
		s, code := ask(*pid, *job, stderr)
		if now := s; code == 0 {
			if before != nil {
				s = s.Since(*before)
			}
			before = &now
		}
		switch {
		case *asJSON && code == 0:
			if err := json.NewEncoder(stdout).Encode(s); err != nil {
				fmt.Fprintf(stderr, "switchyard status: %v\n", err)
				return 1
			}
		case code == 0:
			if *every > 0 {
				if isTerminal(stdout) {
					fmt.Fprint(stdout, "\x1b[H\x1b[2J")
				}
				fmt.Fprintln(stdout, s.At.Format(time.TimeOnly))
			}
			s.Table(stdout)
		}
		if *every <= 0 || n == *times {
			return code
		}
		time.Sleep(*every)
	}
}

// parsed parses a command line without arguments.
func parsed(flags *flag.FlagSet, args []string, stderr io.Writer) (code int, ok bool) {
	if code, ok = understood(flags, args, stderr); ok && flags.NArg() > 0 {
		fmt.Fprintf(stderr, "%s: %q is too much\n", flags.Name(), flags.Args())
		return 2, false
	}
	return code, ok
}

// understood parses the flags of a command line. A mistake gets a line, and -h all flags.
func understood(flags *flag.FlagSet, args []string, stderr io.Writer) (code int, ok bool) {
	flags.SetOutput(io.Discard)
	err := flags.Parse(args)
	flags.SetOutput(stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		flags.Usage()
		return 0, false
	case err != nil:
		fmt.Fprintf(stderr, "%s: %v; -h lists the flags\n", flags.Name(), err)
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

// ask is the state of all processes.
func ask(pid int, job string, stderr io.Writer) (all observe.State, code int) {
	all, err := observe.Everybody(context.Background(), pid)
	if err == nil {
		all, err = all.OfJob(job)
	}
	if err != nil {
		fmt.Fprintf(stderr, "switchyard: %v\n", err)
		return all, 1
	}
	return all, 0
}

// dump prints the last calls of running ranks.
func dump(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard dump", flag.ContinueOnError)
	pid := flags.Int("pid", 0, "ask this process `N` only")
	job := flags.String("job", "", jobHelp)
	records := flags.String("torch", "", "write a file for each rank, of this `PREFIX` and the rank's number, for torch's analyzer of flight records, and print their names")
	flags.Bool("json", true, "print JSON, as it does anyway")
	if code, ok := parsed(flags, args, stderr); !ok {
		return code
	}
	s, code := ask(*pid, *job, stderr)
	if code != 0 {
		return code
	}
	if *records != "" {
		calls, code := callsOf(s, flags.Name(), stderr)
		files, err := observe.WriteRecords(*records, calls)
		for _, f := range files {
			fmt.Fprintln(stdout, f)
		}
		if err != nil {
			fmt.Fprintf(stderr, "switchyard dump: %v\n", err)
			return 1
		}
		return code
	}
	out := json.NewEncoder(stdout)
	if err := out.Encode(s); err != nil {
		fmt.Fprintf(stderr, "switchyard dump: %v\n", err)
		return 1
	}
	calls, code := callsOf(s, flags.Name(), stderr)
	for _, c := range calls {
		if err := out.Encode(c); err != nil {
			fmt.Fprintf(stderr, "switchyard dump: %v\n", err)
			return 1
		}
	}
	return code
}

// callsOf are the last calls of all ranks of a state. A process that does not tell them is named, and makes the exit code 1.
func callsOf(s observe.State, command string, stderr io.Writer) (calls []observe.Call, code int) {
	for _, p := range s.Silent {
		fmt.Fprintf(stderr, "%s: %s\n", command, p.Error)
		code = 1
	}
	calls, err := s.Calls(context.Background())
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", command, err)
		code = 1
	}
	return calls, code
}
