package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
)

// state is how bad a finding is.
type state string

// The states. A problem keeps something from working; a note says what is slower, or not there.
const (
	fine    state = "ok"
	note    state = "note"
	problem state = "problem"
)

// finding is what a check found.
type finding struct {
	Check string `json:"check"` // its name, one word
	State state  `json:"state"`
	Says  string `json:"says"`           // one sentence with the values
	Cure  string `json:"cure,omitempty"` // what to do, of what is not fine
}

// doctor looks at this machine and has ranks exchange bytes. The exit code is 1 if there is a problem.
func doctor(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard doctor", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: switchyard doctor [-json]\n\nLooks at this machine: versions, limits, GPUs, links, what joins ranks, and has\ntwo ranks exchange bytes. Every finding comes with its cure. The exit code is 1\nif one of them is a problem.")
	}
	asJSON := flags.Bool("json", false, "print a JSON object for each finding")
	where := flags.String("trial", "", "be a rank of the exchange that doctor makes, on host or cuda")
	if err := flags.Parse(args); err != nil || flags.NArg() > 0 {
		switch {
		case errors.Is(err, flag.ErrHelp):
			return 0
		case err == nil:
			fmt.Fprintf(stderr, "switchyard doctor: %q is too much\n", flags.Args())
		}
		return 2
	}
	if *where != "" {
		return trial(*where, stdout, stderr)
	}
	code := 0
	show := func(f finding) {
		if f.State == problem {
			code = 1
		}
		if *asJSON {
			line, _ := json.Marshal(f) // of strings
			fmt.Fprintf(stdout, "%s\n", line)
			return
		}
		fmt.Fprint(stdout, f.text(columns(stdout)))
	}
	for _, f := range newMachine().examine() {
		show(f)
	}
	gpus := false
	for _, f := range examineGPUs() {
		gpus = gpus || (f.Check == "driver" && f.State == fine)
		show(f)
	}
	show(exchanged("host"))
	if gpus {
		show(exchanged("cuda"))
	}
	return code
}

// text is the finding for a person, in lines of at most width columns.
func (f finding) text(width int) string {
	const indent = "                     "
	var b strings.Builder
	head := fmt.Sprintf("%-8s %-11s ", f.State, f.Check)
	for i, line := range fold(f.Says, width-len(indent)) {
		if i > 0 {
			head = indent
		}
		b.WriteString(head + line + "\n")
	}
	if f.Cure != "" {
		for _, line := range fold("cure: "+f.Cure, width-len(indent)) {
			b.WriteString(indent + line + "\n")
		}
	}
	return b.String()
}
