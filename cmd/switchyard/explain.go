package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/switchyard-moe/switchyard/observe"
)

// explain looks at running ranks for a time, and says why their steps take it.
func explain(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard explain", flag.ContinueOnError)
	asJSON := flags.Bool("json", false, "print an object")
	pid := flags.Int("pid", 0, "ask this process `N` only")
	job := flags.String("job", "", jobHelp)
	during := flags.Duration("d", time.Second, "look for this long")
	if code, ok := parsed(flags, args, stderr); !ok {
		return code
	}
	x, err := observe.ExplainFor(context.Background(), *pid, *job, *during)
	if err != nil {
		fmt.Fprintf(stderr, "switchyard: %v\n", err)
		return 1
	}
	if !*asJSON {
		x.Table(stdout)
		return 0
	}
	if err := json.NewEncoder(stdout).Encode(x); err != nil {
		fmt.Fprintf(stderr, "switchyard explain: %v\n", err)
		return 1
	}
	return 0
}
