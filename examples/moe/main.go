// Command moe trains a mixture-of-experts language model whose experts are spread over ranks. It shows how the packages
// of Switchyard work together, and that they are right:
//
//	go run ./examples/moe            4 ranks in this process learn to write Go, in about a minute
//	go run ./examples/moe -procs     the same with a process for every rank, over shared memory
//	go run ./examples/moe -check     1 rank and 4 ranks compute the same losses
//	go run ./examples/moe -text DIR  another text
//	go run ./examples/moe -html F    a report with pictures
//	go run ./examples/moe -balance 200    experts move to where ranks are equally busy
//	go run ./examples/moe -save F    keeps the model, for examples/serve
//	go run ./examples/moe -kill-rank 1 -at-step 500    the others go on
//	go run ./examples/moe -procs -kill-rank 1 -at-step 500 -replace-at-step 1000    and then a fresh rank comes
//
// # What it does
//
// The model predicts the next byte of a text from the bytes before it. Every rank works on its part of each batch. The
// dense part of the model (embedding, projections, norms, routers) is data-parallel: each rank has a copy, and
// allreduce.Buckets sums the gradients while backward still computes the rest of them. The experts are expert-parallel:
// each lives on one rank, dispatch.Dispatcher carries every token to its two experts and the results back, and in backward
// the gradients go the same ways through the same handle.
//
// At the end it compares the model with a bigram model of the same text, on text that neither has seen, shows what both write, and
// says where the tokens went and where the time. Ctrl-C ends training early, with the report.
//
// It uses public packages of Switchyard only: a copy of this folder builds in another module.
//
// # Where to read
//
//   - model/layer.go: a mixture-of-experts layer, forward and backward, around four calls of the dispatcher
//   - train/train.go: what a rank makes of comm, memory, dispatch and allreduce, and one step of training
//   - train/balance.go: how experts move to where ranks are equally busy
//   - train/heal.go: how ranks go on without one that is lost, and let a fresh one in
//   - model/model.go, nn: the rest of the model and its arithmetic, in plain Go, with matrix products in assembly for amd64
//   - procs.go: a process for every rank
//   - text, config, report: what is learned, what the flags say, and what came of it
//
// It exits with 0 when all is well, 2 for wrong flags or a text that cannot be used, 130 when interrupted, and 1 for
// everything else.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/report"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/examples/moe/train"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() {
		// A second Ctrl-C needs no patience. What comes at once is the same signal again, as timeout sends it to a process and to
		// its group.
		time.AfterFunc(again, stop)
		if report.NewProgress(os.Stderr).Terminal() && !slices.Contains(os.Args, "-join") {
			fmt.Fprint(os.Stderr, "\r\x1b[Kstopping with a report; Ctrl-C again stops at once\n")
		}
	})
	err := run(ctx, os.Args[1:])
	var wrong *config.UsageError
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return
	case !errors.Is(err, errTold):
		fmt.Fprintln(os.Stderr, "moe:", err)
	}
	switch {
	case errors.As(err, &wrong):
		os.Exit(2)
	case ctx.Err() != nil:
		os.Exit(130)
	}
	os.Exit(1)
}

// again is how long after a signal others are ignored.
const again = time.Second

// errTold is an error that another process has told.
var errTold = errors.New("told elsewhere")

// process is one process of a run.
type process struct {
	config.Config
	args   []string
	env    comm.Config // of a rank that the flag -join has started
	out    *report.Screen
	report *report.Report
	speaks bool // this process says what came of the run: it has rank 0, or there are no others
}

func run(ctx context.Context, args []string) error {
	p := &process{args: args, out: &report.Screen{File: os.Stdout}}
	var err error
	if p.Config, err = config.Parse(args, p.out); err == nil {
		err = p.TryFiles()
	}
	switch {
	case errors.Is(err, flag.ErrHelp) && p.out.Err != nil:
		return p.out.Err
	case errors.Is(err, flag.ErrHelp), err != nil && !config.JSONOnStdout(args):
		return err
	case err != nil:
		p.JSON = "-" // who reads that wants to read why
	}
	if p.JSON == "-" {
		p.out.File = os.Stderr
	}

	// From here on there is a report, of whatever there is to report.
	p.report = report.New(p.Config)
	p.speaks = !p.Procs || p.Join || err != nil
	if p.Join {
		wrong := p.readEnv()
		if err == nil {
			err = wrong
		}
	}
	if err == nil {
		err = p.work(ctx)
	}
	return p.end(ctx, err)
}

// readEnv finds out which rank this is.
func (p *process) readEnv() (err error) {
	p.env, err = comm.FromEnv()
	p.speaks = p.env.Rank == 0 && !p.Late
	if err != nil { // nobody knows the ranks' numbers; this is what the first one's should be
		p.speaks = slices.Contains([]string{"", "0"}, os.Getenv("RANK"))
	}
	p.MeetAt, p.Secret = p.env.Addr, p.env.Secret
	return err
}

// work trains, in this process or in others.
func (p *process) work(ctx context.Context) error {
	if !p.Join {
		if err := p.Affordable(); err != nil {
			p.speaks = true
			return err
		}
	}
	from, err := text.Load(ctx, p.Text, p.Context)
	if err != nil {
		p.speaks = p.speaks || !p.Join
		if ctx.Err() != nil {
			return err
		}
		return config.Usagef("%w", err)
	}
	if p.Procs && !p.Join {
		p.speaks, err = launch(ctx, p.Config, p.args, p.out)
		return err
	}
	groups, err := p.meet(ctx)
	if err != nil {
		return err
	}
	if p.speaks {
		where := "in one process"
		if p.Join {
			where = "in a process each"
		}
		p.Describe(p.out, from, where, report.Columns(p.out))
	}
	bar := report.NewProgress(p.out)
	result, err := train.All(ctx, groups, p.Config, from, func(h *report.History) { bar.Step(p.Config, h) })
	switch {
	case result != nil:
		p.report, p.speaks = result, true
	case !p.speaks:
		if errors.Is(err, train.ErrDiverged) { // which rank 0 tells
			err = fmt.Errorf("%w: %w", errTold, err)
		}
		return err
	}
	bar.Done(result)
	if p.Check {
		return p.check(ctx, from, err)
	}
	return p.show(ctx, err)
}

// meet makes the groups of this process's ranks. A rank that is late has none yet.
func (p *process) meet(ctx context.Context) ([]*comm.Group, error) {
	switch {
	case p.Late:
		p.Ranks = p.env.Size
		return nil, nil
	case p.Join:
		p.Ranks = max(p.env.Size, 1)
		if err := p.Validate(); err != nil {
			return nil, err
		}
		g, err := comm.Join(ctx, p.env)
		return []*comm.Group{g}, err
	}
	if p.ReplaceAt > 0 {
		p.MeetAt = net.JoinHostPort(place())
	}
	return until(ctx, func() ([]*comm.Group, error) { return comm.Local(p.Ranks) })
}

// check trains once more, on one rank, and compares.
func (p *process) check(ctx context.Context, from *text.Corpus, err error) error {
	if err != nil {
		return stoppedAfter(err, p.report)
	}
	fmt.Fprintln(p.out, "\nthe same on 1 rank")
	one, err := alone(ctx, p.Config, from, report.NewProgress(p.out))
	if err != nil && !errors.Is(err, train.ErrStopped) {
		return err
	}
	return errors.Join(compare(p.out, one.Losses, p.report.Losses[:one.Steps], p.Ranks), stoppedAfter(err, one))
}

// show writes the report for people. err is how training ended.
func (p *process) show(ctx context.Context, err error) error {
	r := p.report
	some := ctx.Err() != nil && r.Steps > 0 // somebody wants an end, and there is something to show
	if err == nil || errors.Is(err, train.ErrStopped) || some {
		r.Write(p.out, report.Columns(p.out))
	}
	switch {
	case errors.Is(err, train.ErrStopped):
		err = stoppedAfter(err, r)
	case err != nil && some:
		err = fmt.Errorf("gave up in step %d of %d, which did not end: %w", r.Steps+1, p.Steps, context.Cause(ctx))
	}
	if r.Saved != "" {
		fmt.Fprintf(p.out, "\nthe model is in %s\n", r.Saved)
	}
	if p.HTML != "" && r.Steps > 0 {
		err = errors.Join(err, r.WriteHTML(p.HTML))
	}
	return err
}

// end writes the report as data, also of a run that has failed.
func (p *process) end(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		switch {
		case !p.speaks && p.Join:
			err = fmt.Errorf("%w: %w", errTold, err)
		case p.report.Steps == 0 && !errors.Is(err, errTold):
			p.report.Stopped = true
			err = fmt.Errorf("stopped before the first step: %w", context.Cause(ctx))
		}
	}
	if p.JSON != "" && p.speaks {
		if err != nil && !errors.Is(err, train.ErrStopped) {
			p.report.Error = err.Error()
		}
		err = errors.Join(err, p.report.WriteJSON(p.JSON))
	}
	return errors.Join(err, p.out.Err) // what nobody could read is no success
}

// stoppedAfter adds to train.ErrStopped where it was.
func stoppedAfter(err error, r *report.Report) error {
	if errors.Is(err, train.ErrStopped) {
		return fmt.Errorf("%w after step %d of %d: the report is of the steps until then", err, r.Steps, r.Config.Steps)
	}
	return err
}

// until returns what f makes. When ctx ends before, it returns at once and leaves f to the end of the process.
func until[T any](ctx context.Context, f func() (T, error)) (v T, err error) {
	made := make(chan struct{})
	var late T
	var lateErr error
	go func() {
		defer close(made)
		late, lateErr = f()
	}()
	select {
	case <-made:
		return late, lateErr
	case <-ctx.Done():
		return v, context.Cause(ctx)
	}
}
