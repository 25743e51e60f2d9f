package main

import (
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/switchyard-moe/switchyard/observe"
)

// trace prints the last calls of running ranks as a timeline.
func trace(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard trace", flag.ContinueOnError)
	flags.SetOutput(stderr)
	pid := flags.Int("pid", 0, "ask this process `N` only")
	job := flags.String("job", "", "tell of the `JOB` only whose identity begins so")
	during := flags.Duration("d", 0, "wait this long, and leave out calls that had ended before")
	if code, ok := parsed(flags, args, stderr); !ok {
		return code
	}
	from := time.Time{}
	if *during > 0 {
		from = time.Now()
		time.Sleep(*during)
	}
	s, code := ask(*pid, *job, stderr)
	if code != 0 {
		return code
	}
	calls, code := callsOf(s, flags.Name(), stderr)
	if err := observe.Timeline(stdout, calls, from); err != nil {
		fmt.Fprintf(stderr, "switchyard trace: %v\n", err)
		return 1
	}
	return code
}
