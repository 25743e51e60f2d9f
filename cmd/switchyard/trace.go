package main

import (
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/switchyard-moe/switchyard/observe"
)

// trace prints calls as a timeline: the last ones of running ranks, or those of dumps, which may come from several hosts.
func trace(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard trace", flag.ContinueOnError)
	pid := flags.Int("pid", 0, "ask this process `N` only")
	job := flags.String("job", "", jobHelp)
	during := flags.Duration("d", 0, "wait this long, and leave out calls that had ended before")
	flags.Bool("json", true, "print JSON, as it does anyway")
	with := flags.String("with", "", "put the calls into this `TRACE` of torch's profiler, of the same run")
	if code, ok := understood(flags, args, stderr); !ok {
		return code
	}
	if flags.NArg() > 0 && (*pid != 0 || *job != "" || *during != 0) {
		fmt.Fprintln(stderr, "switchyard trace: -pid, -job and -d choose running ranks: not with dumps")
		return 2
	}
	from, code := time.Time{}, 0
	var calls []observe.Call
	show := func() int {
		if err := writeTimeline(stdout, calls, from, *with); err != nil {
			fmt.Fprintf(stderr, "switchyard trace: %v\n", err)
			return 1
		}
		return code
	}
	if flags.NArg() > 0 {
		for _, path := range flags.Args() {
			more, err := dumped(path)
			if err != nil {
				fmt.Fprintf(stderr, "switchyard trace: %v\n", err)
				return 1
			}
			calls = append(calls, more...)
		}
		return show()
	}
	if *during > 0 {
		from = time.Now()
		time.Sleep(*during)
	}
	s, code := ask(*pid, *job, stderr)
	if code != 0 {
		return code
	}
	calls, code = callsOf(s, flags.Name(), stderr)
	return show()
}

// dumped are the calls of a file that switchyard dump, or SWITCHYARD_DUMP, has written.
func dumped(path string) (calls []observe.Call, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	d := json.NewDecoder(f)
	for {
		var line struct {
			observe.Call
			Ranks json.RawMessage `json:"ranks"` // of the state, which comes first
		}
		switch err := d.Decode(&line); {
		case err == io.EOF:
			return calls, nil
		case err != nil:
			return nil, fmt.Errorf("%s is no dump: %w", path, err)
		case line.Ranks == nil:
			calls = append(calls, line.Call)
		}
	}
}

// writeTimeline writes calls as a timeline, alone or in a trace of torch's profiler, which may be compressed by gzip.
func writeTimeline(w io.Writer, calls []observe.Call, from time.Time, with string) error {
	if with == "" {
		return observe.Timeline(w, calls, from)
	}
	f, err := os.Open(with)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	var trace io.Reader = f
	if strings.HasSuffix(with, ".gz") {
		if trace, err = gzip.NewReader(f); err != nil {
			return fmt.Errorf("%s: %w", with, err)
		}
	}
	return observe.MergeTimeline(w, trace, calls, from)
}
