// Command serve answers requests with a mixture-of-experts language model whose experts are spread over ranks. It is small, and has what
// a server needs: batches that requests join and leave at any step, a bounded queue, streams, readiness, a stop in good order, and ranks
// that are lost and replaced under load.
//
//	go run ./examples/serve                  4 ranks in this process learn for some seconds, then answer
//	go run ./examples/serve -procs           the same with a process for every rank: kill one with kill -9
//	go run ./examples/serve -cuda -ranks 2   the same with tokens that GPUs carry, one for each rank
//	go run ./examples/moe -save model        trains for longer, and
//	go run ./examples/serve -model model     serves that
//
//	SWITCHYARD_SECRET=... switchyard run -nodes 2 -node 0 -addr node0:29500 -n 1 serve -model model
//	                                         on two hosts: the same with -node 1 on the other one
//
//	go run ./examples/serve -load 50         50 clients ask the server, and print tokens a second, p50 and p99
//
//	curl -N localhost:8080/v1/completions -d '{"prompt": "func main() {", "max_tokens": 100, "stream": true}'
//
// # Where to read
//
//   - rank.go: a rank. A step is one forward of the model: one dispatch and one combine a layer. Also how ranks go on without one that is
//     lost, and let a fresh one in.
//   - batch.go: the front, which makes the steps: the queue, the batch, the end
//   - heal.go, seats.go: ranks as the front sees them, goroutines or processes
//   - hosts.go: ranks on other hosts, and the process there that starts them
//   - balance.go: experts move to where ranks are equally busy, and the busiest have copies
//   - api.go: HTTP
//   - metrics.go: metrics, a table and a page of what the ranks do
//   - load.go: the clients
//
// It exits with 0 after SIGINT or SIGTERM, 2 for wrong flags, and 1 for everything else.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/examples/moe/checkpoint"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/report"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/examples/moe/train"
)

// options are what the flags say.
type options struct {
	Ranks       int
	Procs       bool
	CUDA        bool
	Batch       int // texts of a rank in a step
	Queue       int // requests that wait
	Spare       int // expert slots of a rank for copies of experts
	Balance     int // steps between two looks at the load of ranks
	Grace       time.Duration
	PeerTimeout time.Duration

	addr, model, text string
	steps             int
	load, tokens      int
	url               string
	span              time.Duration
	rank              bool

	Hosts int
	world comm.Config // of several hosts: which one this is, where the front is, and the secret
}

var errUsage = errors.New("wrong flags")

func parse(args []string, out io.Writer) (o options, err error) {
	o.Hosts = 1
	f := flag.NewFlagSet("serve", flag.ContinueOnError)
	f.SetOutput(out)
	f.IntVar(&o.Ranks, "ranks", 4, "ranks that share the work")
	f.BoolVar(&o.Procs, "procs", false, "run every rank in a process of its own, over shared memory")
	f.BoolVar(&o.CUDA, "cuda", false, "carry tokens between GPUs, one for each rank; processes can share them")
	f.IntVar(&o.Batch, "batch", 64, "requests of a rank in a step")
	f.IntVar(&o.Queue, "queue", 256, "requests that wait; more are refused with 429")
	f.IntVar(&o.Balance, "balance", 0, "every this many steps move experts to where ranks are equally busy; 0 for never")
	f.IntVar(&o.Spare, "spare", 0, "places of a rank for copies of experts that are on other ranks too")
	f.DurationVar(&o.Grace, "grace", 30*time.Second, "time for requests under way after SIGTERM")
	f.DurationVar(&o.PeerTimeout, "peer-timeout", 2*time.Second, "silence after which a rank is lost")
	f.StringVar(&o.addr, "addr", "127.0.0.1:8080", "listen at this `host:port`")
	f.StringVar(&o.model, "model", "", "serve the model in this `file`, which examples/moe -save wrote; default: train one now")
	f.StringVar(&o.text, "text", "", "train on this `file or folder`; default the Go sources of GOROOT")
	f.IntVar(&o.steps, "steps", 300, "training steps")
	f.IntVar(&o.load, "load", 0, "be this many clients of a server that runs")
	f.StringVar(&o.url, "url", "", "with -load: where the server is; default what -addr says")
	f.DurationVar(&o.span, "for", 10*time.Second, "with -load: how long")
	f.IntVar(&o.tokens, "tokens", 64, "with -load: tokens of an answer")
	f.BoolVar(&o.rank, "rank", false, "be one rank, for a server that talks on standard input and output (what -procs starts)")
	if err := f.Parse(args); err != nil {
		return o, errors.Join(errUsage, err)
	}
	if o.url == "" {
		o.url = "http://" + o.addr
	}
	switch {
	case f.NArg() > 0:
		err = fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.Ranks < 1 || o.Batch < 1 || o.Queue < 0 || o.steps < 1 || o.load < 0:
		err = fmt.Errorf("-ranks is %d, -batch %d, -steps %d, want at least 1; -queue is %d, -load %d, want at least 0",
			o.Ranks, o.Batch, o.steps, o.Queue, o.load)
	case o.PeerTimeout <= 0:
		err = fmt.Errorf("-peer-timeout is %v, want more than 0", o.PeerTimeout)
	case o.Balance < 0 || o.Spare < 0:
		err = fmt.Errorf("-balance is %d, -spare %d, want at least 0", o.Balance, o.Spare)
	case o.CUDA && o.Balance > 0:
		err = errors.New("-balance moves weights, which are on the host, and so does not go with -cuda")
	case o.tokens < 1 || o.tokens > maxTokens:
		err = fmt.Errorf("-tokens is %d, want 1 to %d", o.tokens, maxTokens)
	}
	if err != nil {
		err = errors.Join(errUsage, err)
	}
	return o, err
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	err := run(ctx, os.Args[1:], os.Stdout)
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "serve:", err)
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "serve:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	o, err := parse(args, os.Stderr)
	switch {
	case err != nil:
		return err
	case o.rank:
		err := (&rank{process: os.Getpid()}).run(os.Stdin, os.Stdout)
		if errors.Is(err, io.EOF) { // the front has ended
			err = nil
		}
		return err
	case o.load > 0:
		during, stop := context.WithTimeout(ctx, o.span)
		defer stop()
		return load(during, o.url, o.load, o.tokens, out)
	}
	log := slog.New(slog.NewTextHandler(out, nil))
	conf, err := comm.FromEnv()
	if err != nil {
		log.Warn("this server is on one host alone", "error", err)
	} else if err := o.spread(conf); err != nil {
		return err
	}
	if o.world.Rank > 0 {
		return lend(ctx, o, log)
	}
	at, err := net.Listen("tcp", o.addr)
	if err != nil {
		return err
	}
	defer at.Close()
	if o.model == "" {
		dir, err := os.MkdirTemp("", "switchyard-serve-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		o.model = filepath.Join(dir, "model")
		c := config.Defaults()
		c.Ranks, c.Steps, c.Save, c.Text = o.Ranks, o.steps, o.model, o.text
		c.Batch = max(c.Batch, c.Ranks)
		if err := learn(ctx, c, out); err != nil {
			return err
		}
	}
	f, err := prepare(o, log)
	if err != nil {
		return err
	}
	return f.serve(ctx, at)
}

// learn trains a model for some seconds. A signal ends that, and the program.
func learn(ctx context.Context, c config.Config, out io.Writer) error {
	from, err := text.Load(ctx, c.Text, c.Context)
	if err != nil {
		return err
	}
	groups, err := comm.Local(c.Ranks)
	if err != nil {
		return err
	}
	bar := report.NewProgress(&report.Screen{File: os.Stderr})
	r, err := train.All(ctx, groups, c, from, func(h *report.History) { bar.Step(c, h) })
	bar.Done(r)
	if err != nil {
		return fmt.Errorf("train a model: %w", err)
	}
	_, err = fmt.Fprintf(out, "trained for %.0f s on %s: loss %.2f, a bigram model has %.2f\n", r.ElapsedSeconds, from.Name, r.HeldoutLoss, r.BigramLoss)
	return err
}

// prepare reads the model.
func prepare(o options, log *slog.Logger) (*front, error) {
	m, err := checkpoint.Read(o.model)
	if err != nil {
		return nil, err
	}
	meet := joining{Addr: "@switchyard-serve-" + rand.Text(), Secret: []byte(rand.Text()), PeerTimeout: o.PeerTimeout,
		Model: o.model, Digest: m.Digest, Batch: o.Batch, Patience: joinTimeout,
		Spare: o.Spare, Balance: o.Balance, CUDA: o.CUDA}
	if o.Hosts > 1 {
		meet.Secret = nil // each host has it: it does not go over the network
	}
	return newFront(o, meet, m.Config.Context, log), nil
}

// serve answers requests until ctx ends, and then those that are under way.
func (f *front) serve(ctx context.Context, at net.Listener) error {
	// The API is there at once, and says that the ranks are not.
	api := &http.Server{Handler: f.handler(), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute}
	gone := make(chan error, 1)
	go func() { gone <- api.Serve(at) }()
	f.log.Info("listening", "at", "http://"+at.Addr().String())
	if f.Hosts > 1 {
		if err := f.listen(); err != nil {
			return errors.Join(err, api.Close())
		}
		defer f.port.Close()
	}
	if err := f.open(); err != nil {
		return errors.Join(err, api.Close())
	}
	inner, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- f.loop(inner) }()
	var err error
	select {
	case err = <-ended:
	case err = <-gone: // the listener has failed
		stop()
		err = errors.Join(err, <-ended)
	}
	// Answers are complete, and on their way. Connections that carry none hold nothing up for long.
	last, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	if api.Shutdown(last) != nil {
		err = errors.Join(err, api.Close())
	}
	return err
}
