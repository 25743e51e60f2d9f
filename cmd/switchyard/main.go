// Command switchyard starts the ranks of a program, and says what this version of Switchyard is and reads.
//
//	switchyard run -n 4 ./worker -its -own -flags
//	switchyard doctor
//	switchyard status
//	switchyard explain
//	switchyard top -http :8090
//	switchyard dump
//	switchyard trace
//	switchyard version
//	switchyard env
//
// Install it from a clone with
//
//	go install ./cmd/switchyard
//
// # Run
//
// Run starts n copies of a program, the ranks, on this host. Each has SWITCHYARD_RANK, SWITCHYARD_WORLD_SIZE and their relatives, the
// variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), a SWITCHYARD_PORT on which
// they meet, and a random SWITCHYARD_SECRET where none is set. MASTER_ADDR is a loopback address of their own, so runs side by side do
// not meet. The ranks' standard input is empty.
//
// Ranks on several hosts are started by the command on each of them, with -nodes, -node and -addr, and a SWITCHYARD_SECRET that is the
// same:
//
//	switchyard run -nodes 2 -node 0 -addr node0:29500 -n 4 ./worker
//	switchyard run -nodes 2 -node 1 -addr node0:29500 -n 4 ./worker
//
// The output of ranks appears line by line behind a prefix with the rank's number. A program that a rank leaves behind keeps
// nobody: its output ends once it was silent for 200 ms in all, or has printed 4 MiB.
//
// The first rank that fails ends all: the others get SIGTERM where they have not ended 2 seconds later, 17 with SWITCHYARD_METRICS, with an
// error of their own, and SIGKILL when the time of -grace is over. The exit code is that of the first rank that failed, 128 and the
// signal's number if a signal ended it.
//
// SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to all ranks, but for SIGHUP under nohup. Ranks that have not ended when the
// time of -grace is over get SIGKILL. A second SIGINT kills them at once. Then the exit code is 128 and the number of the first
// signal, unless a rank has failed before. After a second of waiting a line on standard error says for whom. Output that nobody
// reads is given up at that time, or 3 seconds after the kill. SIGUSR1 and SIGUSR2 are passed on and have no other effect. Should
// switchyard itself be killed, the ranks are too.
//
// # Doctor
//
// Doctor looks at this machine: versions, limits, launchers, containers, the driver, GPUs and their links. Two ranks, each a process,
// then exchange bytes, on the host and where there are GPUs on those. Every finding that is not fine comes with its cure. The exit code
// is 1 if one is a problem. -json prints an object a line: check, state (ok, note or problem), says, cure.
//
// # Status, explain, dump and trace
//
// Status asks the processes of this user on this host, in this network namespace, what their ranks do: who waits for whom and since when,
// calls, heaps, faults. A process that does not answer within 2 s is stopped, or has no core. -pid asks one process, -job shows one job
// of several, -every 1s asks again and again, -json prints an object. Top does that in the terminal, or serves a page: its address has a random path, since other
// users of this host reach the port as well. Dump prints the last 2,048 calls of each rank as JSON lines, behind a line with the state; -torch
// writes them for torch's analyzer of flight records.
// Trace prints these calls as a Chrome trace, which Perfetto opens; with -d 2s it waits 2 s and leaves out what had ended before. The
// exit code is 1 if no process answers.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/internal/env"
	_ "github.com/switchyard-moe/switchyard/internal/platform" // a clear word on other systems
)

const usage = `usage: switchyard COMMAND

  run -n RANKS PROGRAM [ARGUMENT...]   start a program's ranks on this host;
                                       run -h lists the flags
  doctor                               look at this machine, and have two ranks
                                       exchange bytes; findings have cures
  status [-json] [-pid N] [-every 1s]  ask running ranks who waits for whom,
                                       what they call, what their heaps hold
  explain [-d 1s] [-json]              say why steps take their time: calls,
                                       algorithms, who is waited for
  top [-job JOB] [-http ADDRESS]       status once a second; with -http on a
                                       page, for a browser
  dump [-pid N]                        print the last calls of running ranks
  trace [-pid N] [-d 2s]               print them as a timeline for Perfetto
  version                              print the version
  env                                  list the environment variables that
                                       Switchyard reads, and their values
`

func main() { os.Exit(command(os.Args[1:], os.Stdout, os.Stderr)) }

// command runs one command and returns its exit code: 2 for a command line that is not understood.
func command(args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return 2
	}
	switch name, rest := args[0], args[1:]; name {
	case "run":
		return run(rest, stdout, stderr)
	case "doctor":
		return examine(rest, stdout, stderr)
	case "status":
		return status(rest, stdout, stderr)
	case "explain":
		return explain(rest, stdout, stderr)
	case "top":
		return top(rest, stdout, stderr)
	case "dump":
		return dump(rest, stdout, stderr)
	case "trace":
		return trace(rest, stdout, stderr)
	case "version", "-version", "--version":
		if len(rest) > 0 {
			fmt.Fprintf(stderr, "switchyard version: %q is too much\n", rest)
			return 2
		}
		fmt.Fprintf(stdout, "switchyard %s (%s, %s/%s%s)\n", switchyard.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH, revision())
		return 0
	case "env":
		return environment(rest, stdout, stderr)
	case "help", "-h", "-help", "--help":
		fmt.Fprint(stdout, usage)
		return 0
	default:
		fmt.Fprintf(stderr, "switchyard: there is no command %q\n%s", name, usage)
		return 2
	}
}

// revision is the commit that the program was built from, where the build knows it.
func revision() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return ", commit " + s.Value[:12]
		}
	}
	return ""
}

// environment lists the variables for a person, or as the page of the documentation.
func environment(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard env", flag.ContinueOnError)
	page := flags.Bool("markdown", false, "print docs/environment.md")
	if code, ok := parsed(flags, args, stderr); !ok {
		return code
	}
	if *page {
		fmt.Fprint(stdout, markdown())
		return 0
	}
	fmt.Fprint(stdout, list(told(), columns(stdout)))
	return 0
}

// columns is the width of a terminal, and 80 of what is none.
func columns(out io.Writer) int {
	if f, ok := out.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			return int(size.Col)
		}
	}
	return 80
}

// told are the variables that a person wants to see: those of launchers that set none of them are left out.
func told() []env.Variable {
	return slices.DeleteFunc(env.Variables(), func(v env.Variable) bool { return v.Launcher != "" && v.Value() == "" })
}

// list says what variables are set to and what they mean, in lines of at most width columns.
func list(variables []env.Variable, width int) string {
	var b strings.Builder
	below := func(text string) {
		const indent = "    "
		for _, line := range fold(text, width-len(indent)) {
			b.WriteString(indent + line + "\n")
		}
	}
	longest := 0
	for _, v := range variables {
		longest = max(longest, len(v.Name))
	}
	row := func(name, value, usual string) {
		if line := fmt.Sprintf("%-*s  %-9s  %s", longest, name, value, usual); utf8.RuneCountInString(line) <= width {
			b.WriteString(line + "\n")
			return
		}
		b.WriteString(name + "\n")
		below("is set to " + value)
		below("default " + usual)
	}
	if longest+len("  IS SET TO  DEFAULT") <= width {
		row("VARIABLE", "IS SET TO", "DEFAULT")
	}
	for _, v := range variables {
		value := v.Value()
		switch {
		case value == "":
			value = "-"
		case strings.Contains(v.Name, "SECRET"):
			value = "(set)"
		}
		row(v.Name, value, v.Default)
		below(v.Meaning)
	}
	return b.String()
}

// fold breaks a text at spaces into lines of at most width columns. A word that is longer is broken.
func fold(text string, width int) (lines []string) {
	width = max(width, 1)
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) <= width {
			line += " " + word
			continue
		}
		if line != "" {
			lines = append(lines, line)
		}
		rest := []rune(word)
		for ; len(rest) > width; rest = rest[width:] {
			lines = append(lines, string(rest[:width]))
		}
		line = string(rest)
	}
	return append(lines, line)
}

func markdown() string {
	var b strings.Builder
	b.WriteString(`# Environment variables

<!-- Made by "go run ./cmd/switchyard env -markdown" from internal/env. Do not edit. -->

What Switchyard reads from the environment, in Go and in Python. A variable that is set but empty counts as not set.
` + "`switchyard env`" + ` prints this list with the values that are set. Options in code win over variables, but for the last three, which only
forbid. [Launchers](launchers.md) set variables of their own, which that page lists. Words in this page are in the [glossary](glossary.md).

| variable | default | meaning |
|---|---|---|
`)
	for _, v := range env.Variables() {
		if v.Launcher == "" {
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", v.Name, v.Default, v.Meaning)
		}
	}
	b.WriteString(`
Three more are read when Switchyard is built: ` + "`GO`" + ` names the go command for ` + "`pip install`" + `, ` + "`CC`" + ` its C compiler, which is fetched
from PyPI where that is not set, and ` + "`NVCC`" + ` the CUDA compiler for ` + "`make kernels`" + `, which only those need who change the kernels.
`)
	return b.String()
}
