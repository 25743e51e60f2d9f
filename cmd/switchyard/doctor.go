package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/switchyard-moe/switchyard/internal/doctor"
)

// examine looks at this machine and has ranks exchange bytes. The exit code is 1 if there is a problem.
func examine(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard doctor", flag.ContinueOnError)
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "usage: switchyard doctor [-json]\n\nLooks at this machine: versions, limits, GPUs, links, what joins ranks, and has\ntwo ranks exchange bytes. Every finding comes with its cure. The exit code is 1\nif one of them is a problem.")
	}
	asJSON := flags.Bool("json", false, "print a JSON object for each finding")
	where := flags.String("trial", "", "be a rank of the exchange that doctor makes, on host or cuda")
	if code, ok := parsed(flags, args, stderr); !ok {
		return code
	}
	if *where != "" {
		line, err := doctor.Trial(*where)
		if err != nil {
			fmt.Fprintln(stderr, err)
			return 1
		}
		if line != nil {
			fmt.Fprintf(stdout, "%s\n", line)
		}
		return 0
	}
	code := 0
	show := func(f doctor.Finding) {
		if f.State == doctor.Problem {
			code = 1
		}
		if *asJSON {
			line, _ := json.Marshal(f) // of strings
			fmt.Fprintf(stdout, "%s\n", line)
			return
		}
		fmt.Fprint(stdout, textOf(f, columns(stdout)))
	}
	for _, f := range doctor.Host() {
		show(f)
	}
	gpus := examineGPUs()
	for _, f := range gpus {
		show(f)
	}
	self, err := os.Executable()
	if err != nil {
		show(doctor.Finding{Check: "exchange", State: doctor.Problem, Says: fmt.Sprintf("this program cannot be started again: %v", err), Cure: "start it from a folder that can be read"})
		return code
	}
	doctor.Rest(gpus, []string{self, "doctor", "-trial"}, show)
	return code
}

// textOf is a finding for a person, in lines of at most width columns.
func textOf(f doctor.Finding, width int) string {
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
