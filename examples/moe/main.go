// Command moe trains a mixture-of-experts language model whose experts are spread over ranks. It shows how the packages
// of Switchyard work together, and that they are right:
//
//	go run ./examples/moe            4 ranks in this process learn to write Go, in about a minute
//	go run ./examples/moe -procs     the same with a process for every rank, over shared memory
//	go run ./examples/moe -check     1 rank and 4 ranks compute the same losses
//	go run ./examples/moe -text DIR  another text
//
// # What it does
//
// The model predicts the next byte of a text from the bytes before it. Every rank works on its part of each batch. The
// dense part of the model (embedding, projections, norms, routers) is data-parallel: each rank has a copy, and
// allreduce.Buckets sums the gradients while backward still computes the rest of them. The experts are expert-parallel:
// each lives on one rank, dispatch.Dispatcher carries every token to its two experts and the results back, and in backward
// the gradients go the same ways through the same handle.
//
// At the end it compares the model with a bigram model of the same text, on text that neither has seen, and says where
// the tokens went and where the time.
//
// # Where to read
//
//   - train.go: what a rank makes of comm, memory, dispatch and allreduce, and one step of training
//   - moe.go: a mixture-of-experts layer, forward and backward, around four calls of the dispatcher
//   - model.go, nn.go: the rest of the model, in plain Go
//   - procs.go: a process for every rank
//
// It exits with 0 when all is well, 2 for wrong flags or a text that cannot be used, 130 when interrupted, and 1 for
// everything else.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/switchyard-moe/switchyard/comm"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C needs no patience
	err := run(ctx, os.Args[1:])
	var wrong *usageError
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return
	default:
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

func run(ctx context.Context, args []string) error {
	c, err := parseFlags(args, os.Stdout)
	if err != nil {
		return err
	}
	text, err := loadCorpus(c.Text, c.Context)
	if err != nil {
		return err
	}
	if err := c.tryJSON(); err != nil {
		return err
	}
	if c.Procs && !c.Join {
		return launch(ctx, c, args)
	}

	var groups []*comm.Group // this process's ranks
	where := "in one process"
	if c.Join {
		g, err := join(ctx, &c)
		if err != nil {
			return err
		}
		groups, where = []*comm.Group{g}, "in a process each"
	} else if groups, err = comm.Local(c.Ranks); err != nil {
		return err
	}
	speaks := groups[0].Rank() == 0
	if speaks {
		c.describe(os.Stdout, text, where)
	}
	bar := newProgress(os.Stdout)
	r, err := trainAll(ctx, groups, c, text, bar.step)
	bar.close()
	switch {
	case err != nil:
		return err
	case !speaks:
		return nil
	case c.Check:
		one, err := alone(ctx, c, text)
		if err != nil {
			return err
		}
		return compare(os.Stdout, one, r.losses, c.Ranks)
	}
	r.write(os.Stdout)
	if c.JSON != "" {
		return r.writeJSON(c.JSON)
	}
	return nil
}

// join meets the other processes.
func join(ctx context.Context, c *config) (*comm.Group, error) {
	env, err := comm.FromEnv()
	if err != nil {
		return nil, err
	}
	if c.Ranks = env.Size; c.Ranks == 0 {
		c.Ranks = 1
	}
	if err := c.validate(); err != nil {
		return nil, err
	}
	return comm.Join(ctx, env)
}

// trainAll runs this process's ranks and returns when all have ended. The error is the first that happened.
func trainAll(ctx context.Context, groups []*comm.Group, c config, text *corpus, watch func(*worker)) (*report, error) {
	type end struct {
		rank   int
		report *report
		err    error
	}
	ends := make(chan end)
	for i, g := range groups {
		var w func(*worker)
		if g.Rank() == 0 {
			w = watch
		}
		go func() {
			r, err := trainRank(ctx, groups[i], c, text, w)
			g.Close()
			ends <- end{g.Rank(), r, err}
		}()
	}
	var r *report
	var first error
	for range groups {
		e := <-ends
		if e.err != nil && first == nil {
			first = fmt.Errorf("rank %d: %w", e.rank, e.err)
		}
		if e.report != nil {
			r = e.report
		}
	}
	return r, first
}
