// Command moe trains a mixture-of-experts language model whose experts are spread over ranks. It shows how the packages
// of Switchyard work together, and that they are right:
//
//	go run ./examples/moe            4 ranks in this process learn to write Go, in about a minute
//	go run ./examples/moe -procs     the same with a process for every rank, over shared memory
//	go run ./examples/moe -check     1 rank and 4 ranks compute the same losses
//	go run ./examples/moe -text DIR  another text
//	go run ./examples/moe -html F    a report with pictures
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
//   - train.go: what a rank makes of comm, memory, dispatch and allreduce, and one step of training
//   - moe.go: a mixture-of-experts layer, forward and backward, around four calls of the dispatcher
//   - heal.go: how ranks go on without one that is lost, and let a fresh one in
//   - model.go, nn.go: the rest of the model, in plain Go; matmul.go: matrix products
//   - procs.go: a process for every rank
//   - report.go, html.go: the report
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
	"sync/atomic"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() {
		// A second Ctrl-C needs no patience. What comes at once is the same signal again, as timeout sends it to a process and to
		// its group.
		time.AfterFunc(again, stop)
		if newProgress(os.Stderr).terminal && !slices.Contains(os.Args, "-join") {
			fmt.Fprint(os.Stderr, "\r\x1b[Kstopping with a report; Ctrl-C again stops at once\n")
		}
	})
	err := run(ctx, os.Args[1:])
	var wrong *usageError
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

func run(ctx context.Context, args []string) (err error) {
	out := &screen{File: os.Stdout} // for people
	c, err := parseFlags(args, out)
	if err == nil {
		err = c.tryFiles()
	}
	switch {
	case errors.Is(err, flag.ErrHelp) && out.err != nil:
		return out.err
	case errors.Is(err, flag.ErrHelp), err != nil && !jsonOnStdout(args):
		return err
	case err != nil:
		c.JSON = "-" // who reads that wants to read why
	}
	if c.JSON == "-" {
		out.File = os.Stderr
	}

	// From here on there is a report, of whatever there is to report.
	r := newReport(c)
	speaks := !c.Procs || c.Join || err != nil // and is rank 0
	var env comm.Config
	if c.Join {
		var wrong error
		env, wrong = comm.FromEnv()
		speaks = env.Rank == 0 && !c.Late
		if wrong != nil { // nobody knows the ranks' numbers; this is what the first one's should be
			speaks = slices.Contains([]string{"", "0"}, os.Getenv("RANK"))
		}
		c.MeetAt, c.Secret = env.Addr, env.Secret
		if err == nil {
			err = wrong
		}
	}
	defer func() {
		defer func() { err = errors.Join(err, out.err) }() // what nobody could read is no success
		if err != nil && ctx.Err() != nil {
			switch {
			case !speaks && c.Join:
				err = fmt.Errorf("%w: %w", errTold, err)
			case r.Steps == 0 && !errors.Is(err, errTold):
				r.Stopped = true
				err = fmt.Errorf("stopped before the first step: %w", context.Cause(ctx))
			}
		}
		if c.JSON == "" || !speaks {
			return
		}
		if err != nil && !errors.Is(err, errStopped) {
			r.Error = err.Error()
		}
		err = errors.Join(err, r.writeJSON(c.JSON))
	}()
	if err != nil {
		return err
	}
	if !c.Join {
		if err := c.affordable(); err != nil {
			speaks = true
			return err
		}
	}
	text, err := loadCorpus(ctx, c.Text, c.Context)
	if err != nil {
		speaks = speaks || !c.Join
		return err
	}
	if c.Procs && !c.Join {
		speaks, err = launch(ctx, c, args, out)
		return err
	}

	var groups []*comm.Group // this process's ranks
	where := "in one process"
	switch {
	case c.Late:
		c.Ranks = env.Size
	case c.Join:
		g, err := join(ctx, env, &c)
		if err != nil {
			return err
		}
		groups, where = []*comm.Group{g}, "in a process each"
	default:
		if groups, err = until(ctx, func() ([]*comm.Group, error) { return comm.Local(c.Ranks) }); err != nil {
			return err
		}
	}
	if c.ReplaceAt > 0 && !c.Join {
		c.MeetAt = net.JoinHostPort(place())
	}
	if speaks {
		c.describe(out, text, where, columns(out))
	}
	bar := newProgress(out)
	result, err := trainAll(ctx, groups, c, text, bar.step)
	if result != nil {
		r, speaks = result, true
	}
	if !speaks {
		if errors.Is(err, errDiverged) { // which rank 0 tells
			err = fmt.Errorf("%w: %w", errTold, err)
		}
		return err
	}
	bar.done(result)
	if c.Check {
		if err != nil {
			return stoppedAfter(err, r)
		}
		fmt.Fprintln(out, "\nthe same on 1 rank")
		one, err := alone(ctx, c, text, newProgress(out))
		if err != nil && !errors.Is(err, errStopped) {
			return err
		}
		return errors.Join(compare(out, one.Losses, r.Losses[:one.Steps], c.Ranks), stoppedAfter(err, one))
	}
	if err == nil || errors.Is(err, errStopped) || ctx.Err() != nil && r.Steps > 0 {
		r.write(out, columns(out))
	}
	if err = stoppedAfter(err, r); err != nil && ctx.Err() != nil && r.Steps > 0 && !errors.Is(err, errStopped) {
		err = fmt.Errorf("gave up in step %d of %d, which did not end: %w", r.Steps+1, c.Steps, context.Cause(ctx))
	}
	if c.HTML != "" && r.Steps > 0 {
		err = errors.Join(err, r.writeHTML(c.HTML))
	}
	return err
}

// stoppedAfter adds to errStopped where it was.
func stoppedAfter(err error, r *report) error {
	if errors.Is(err, errStopped) {
		return fmt.Errorf("%w after step %d of %d: the report is of the steps until then", err, r.Steps, r.Config.Steps)
	}
	return err
}

// join meets the other processes.
func join(ctx context.Context, env comm.Config, c *config) (*comm.Group, error) {
	if c.Ranks = env.Size; c.Ranks == 0 {
		c.Ranks = 1
	}
	if err := c.validate(); err != nil {
		return nil, err
	}
	return comm.Join(ctx, env)
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

// trainAll runs this process's ranks and returns when all have ended. The error is the first that happened. The report is that of
// rank 0, if it is here.
//
// Making many ranks takes long. When ctx ends before the first step, and nobody waits for these ranks elsewhere, trainAll leaves them to
// the end of the process.
func trainAll(ctx context.Context, groups []*comm.Group, c config, text *corpus, watch func(*worker)) (*report, error) {
	type end struct {
		rank   int
		report *report
		err    error
	}
	ends := make(chan end, len(groups)+1)
	const making, training, abandoned = 0, 1, 2
	var now atomic.Int32
	seen := func(w *worker) {
		now.CompareAndSwap(making, training)
		if watch != nil && now.Load() == training {
			watch(w)
		}
	}
	for _, g := range groups {
		rank := g.Rank()
		go func() {
			r, err := trainRank(ctx, g, c, text, seen)
			ends <- end{rank, r, err}
		}()
	}
	left := len(groups)
	alone, stop := context.WithCancel(ctx) // ends when only the one that is late is left, of those that are here
	defer stop()
	if c.Late || c.ReplaceAt > 0 && !c.Join {
		left++
		go func() {
			rank, r, err := trainLate(ctx, alone, c, text, seen)
			ends <- end{rank, r, err}
		}()
	}
	var r *report
	var first error
	asked := ctx.Done()
	if c.Join {
		asked = nil
	}
	for left > 0 {
		if left == 1 && !c.Late {
			stop()
		}
		var e end
		select {
		case e = <-ends:
			left--
		case <-asked:
			if asked = nil; now.CompareAndSwap(making, abandoned) {
				return nil, context.Cause(ctx)
			}
			continue
		}
		if e.err != nil && first == nil {
			first = e.err
			if !errors.Is(e.err, errStopped) && !errors.Is(e.err, errDiverged) { // which all ranks have
				first = fmt.Errorf("rank %d: %w", e.rank, e.err)
			}
		}
		if e.report != nil {
			r = e.report
		}
	}
	return r, first
}

// lateFor is how long a fresh rank waits until it is admitted: longer than anybody trains.
const lateFor = 1000 * time.Hour

// trainLate is what a fresh rank does: it waits until the others admit it. When waiting ends before, nobody needs it.
func trainLate(ctx, waiting context.Context, c config, text *corpus, watch func(*worker)) (rank int, r *report, err error) {
	meet := c.meeting()
	meet.Late, meet.JoinTimeout = true, lateFor
	g, err := comm.Join(waiting, meet)
	if err != nil {
		if waiting.Err() != nil {
			err = nil
		}
		return -1, nil, err
	}
	rank, c.Late = g.Rank(), true
	r, err = trainRank(ctx, g, c, text, watch)
	return rank, r, err
}
