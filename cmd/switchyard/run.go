package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/loopback"
)

// forwarded are the signals that go on to the ranks. Under nohup, SIGHUP is not one.
func forwarded() []os.Signal {
	all := []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}
	if !signal.Ignored(syscall.SIGHUP) {
		all = append(all, syscall.SIGHUP)
	}
	return all
}

const (
	// How long the others of a rank that failed may take to end with an error of their own, and to leave their calls (SWITCHYARD_DUMP). With
	// SWITCHYARD_METRICS they may also wait for a scrape.
	lastWords = 2 * time.Second
	// How long ranks that were told to end may take before we say for whom we wait.
	patience = time.Second
	// How long killed ranks may take to end, and their last output to be read, once we were told to end.
	afterKill = 3 * time.Second
)

// The exit codes of a shell for a program that does not exist or cannot be run.
const (
	exitNotRunnable = 126
	exitNotFound    = 127
)

const signalsHelp = `
The first rank that fails ends all: the others get SIGTERM where they have not
ended 2 seconds later, or 17 with SWITCHYARD_METRICS. SIGINT (Ctrl-C), SIGTERM,
SIGHUP and SIGQUIT are passed on. In both cases, ranks that are left after the
time of -grace are killed. A second SIGINT kills them at once. The exit code is
that of the first rank that failed, or 128 and the number of the signal if ranks
had to be killed after it.
`

func run(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard run", flag.ContinueOnError)
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "usage: switchyard run -n RANKS [FLAGS] PROGRAM [ARGUMENT...]")
		flags.PrintDefaults()
		fmt.Fprint(flags.Output(), signalsHelp)
	}
	n := flags.Int("n", 0, "how many `ranks` to start on this host")
	nodes := flags.Int("nodes", 1, "on how many `hosts` this command is run, with equal flags\nbut for -node")
	node := flags.Int("node", 0, "which of them this is, the `number` from 0 on; ranks count on\nfrom host to host")
	addr := flags.String("addr", "", "with -nodes: `host:port` of node 0, which is MASTER_ADDR and\nMASTER_PORT of all ranks; they meet on the port behind it.\nSWITCHYARD_SECRET has to be the same on all hosts")
	port := flags.Int("port", 0, "MASTER_PORT of the ranks, which meet on the `port` behind it;\n0: one that is free")
	prefix := flags.Bool("prefix", true, "begin every line that a rank prints with its number")
	grace := flags.Duration("grace", 5*time.Second, "how long ranks may take to end once a signal told them\nto, also SIGTERM after a failure; then they are killed")
	if code, ok := understood(flags, args, stderr); !ok {
		return code
	}
	missing := true
	flags.Visit(func(f *flag.Flag) { missing = missing && f.Name != "n" })
	switch {
	case missing:
		fmt.Fprintln(stderr, "switchyard run: -n is missing: how many ranks? For example: switchyard run -n 4 ./worker")
		return 2
	case *n < 1:
		fmt.Fprintf(stderr, "switchyard run: -n %d: how many ranks? At least 1\n", *n)
		return 2
	case *n > comm.MaxSize/max(*nodes, 1):
		fmt.Fprintf(stderr, "switchyard run: -n %d on %d hosts: at most %d ranks in all\n", *n, *nodes, comm.MaxSize)
		return 2
	case *port < 0 || *port > maxPort:
		fmt.Fprintf(stderr, "switchyard run: -port %d, want 1 to %d\n", *port, maxPort)
		return 2
	case flags.NArg() == 0:
		fmt.Fprintln(stderr, "switchyard run: which program? It comes behind the flags: switchyard run -n 4 ./worker")
		return 2
	}
	host, secret := loopback.Host(), env.Secret()
	id := rand.Text()
	if *nodes != 1 || *node != 0 || *addr != "" {
		var err error
		if host, *port, err = across(*nodes, *node, *addr, *port, secret); err != nil {
			fmt.Fprintf(stderr, "switchyard run: %v\n", err)
			return 2
		}
	}
	path, err := exec.LookPath(flags.Arg(0))
	if err != nil {
		fmt.Fprintf(stderr, "switchyard run: %v%s\n", err, here(flags.Arg(0)))
		if errors.Is(err, os.ErrPermission) {
			return exitNotRunnable
		}
		return exitNotFound
	}
	if *port == 0 {
		if *port, err = freePort(); err != nil {
			fmt.Fprintf(stderr, "switchyard run: a free port: %v\n", err)
			return 1
		}
	}
	if *nodes > 1 {
		if id, err = meet(host, *port+1, *node, *nodes, secret); err != nil {
			fmt.Fprintf(stderr, "switchyard run: the commands of %d hosts meet at %s, -node is their rank: %v\n", *nodes, *addr, err)
			return 1
		}
	}
	w := &world{n: *n, first: *node * *n, size: *nodes * *n, host: host, port: *port, prefix: *prefix, grace: *grace, path: path, args: flags.Args(), secret: secret, id: id,
		stdout: &lines{to: stdout}, stderr: &lines{to: stderr}}
	if w.secret == "" {
		w.secret = rand.Text()
	}
	return w.run()
}

// across checks the flags of a run on several hosts, and returns where its ranks meet.
func across(nodes, node int, addr string, port int, secret string) (host string, at int, err error) {
	if nodes < 1 || node < 0 || node >= nodes {
		return "", 0, fmt.Errorf("-node %d of -nodes %d, want 0 to one below -nodes", node, nodes)
	}
	host, text, err := net.SplitHostPort(addr)
	if err == nil {
		at, err = strconv.Atoi(text)
	}
	switch {
	case err != nil || host == "" || at < 1 || at > maxPort:
		return "", 0, fmt.Errorf("-addr %q, want HOST:PORT of node 0, a port of 1 to %d", addr, maxPort)
	case port != 0:
		return "", 0, fmt.Errorf("-port %d with -addr %s, which has the port", port, addr)
	case secret == "":
		return "", 0, errors.New("ranks on several hosts need one SWITCHYARD_SECRET: make a random text, and set it on all of them")
	}
	return host, at, nil
}

// meet has the commands of one start meet where its ranks will, and returns an id that is this start's alone: ranks of an earlier one that are
// still there cannot join it.
func meet(host string, port, node, nodes int, secret string) (id string, err error) {
	settings, err := env.ReadSettings()
	if err != nil {
		return "", err
	}
	g, err := comm.Join(context.Background(), comm.Config{Rank: node, Size: nodes, LocalSize: 1, Addr: net.JoinHostPort(host, strconv.Itoa(port)),
		Secret: []byte(secret), JoinTimeout: settings.JoinTimeout, Job: "a start of switchyard run", Name: "hosts"})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	ids, err := g.AllGather(context.Background(), []byte(rand.Text()))
	if err != nil {
		return "", err
	}
	return string(ids[0]), nil
}

// here asks whether the program of that name in this directory was meant, if there is one.
func here(name string) string {
	if _, err := exec.LookPath("./" + name); err != nil || filepath.Base(name) != name {
		return ""
	}
	return "; did you mean ./" + name + "?"
}

// freePort finds a port for a store that a program may have of its own, such as torch's. It may be taken again before the
// ranks get to it. Switchyard's own needs no such luck: the ranks meet at an address of their own.
func freePort() (int, error) {
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return min(l.Addr().(*net.TCPAddr).Port, maxPort), nil
}

// maxPort leaves room for the port behind it.
const maxPort = 65534

const (
	emptyWait  = 10 * time.Millisecond
	emptyMost  = 20
	behindMost = 4 << 20
)
