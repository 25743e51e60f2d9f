package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
)

// config is what the flags say. Everything that changes the numbers is in here, so two ranks with equal configs and
// equal text compute the same.
type config struct {
	Ranks int
	Procs bool
	Join  bool

	Experts int
	TopK    int
	Layers  int
	Hidden  int // width of a token
	Inner   int // width inside an expert
	Context int // bytes that the model sees
	Embed   int // width of one byte's embedding

	Batch int // tokens a step, all ranks together
	Steps int
	Rate  float64 // learning rate
	Seed  uint64

	Text  string
	JSON  string
	Check bool
}

// usageError is a mistake of the person at the keyboard: exit code 2.
type usageError struct{ error }

func (e *usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...)}
}

const checkSteps = 50

func parseFlags(args []string, out io.Writer) (config, error) {
	var c config
	f := flag.NewFlagSet("moe", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.IntVar(&c.Ranks, "ranks", 4, "ranks that share the work")
	f.BoolVar(&c.Procs, "procs", false, "run every rank in a process of its own, over shared memory")
	f.BoolVar(&c.Join, "join", false, "be one rank of the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (what -procs starts)")
	f.IntVar(&c.Experts, "experts", 8, "experts of a layer")
	f.IntVar(&c.TopK, "topk", 2, "experts that a token visits")
	f.IntVar(&c.Layers, "layers", 2, "mixture-of-experts layers")
	f.IntVar(&c.Hidden, "hidden", 128, "width of a token")
	f.IntVar(&c.Inner, "inner", 256, "width inside an expert")
	f.IntVar(&c.Context, "context", 8, "bytes of context")
	f.IntVar(&c.Embed, "embed", 64, "width of a byte's embedding")
	f.IntVar(&c.Batch, "batch", 1024, "tokens a step, all ranks together")
	f.IntVar(&c.Steps, "steps", 2500, "training steps (with -check 50)")
	f.Float64Var(&c.Rate, "rate", 8e-3, "peak learning rate")
	f.Uint64Var(&c.Seed, "seed", 1, "seed of weights and data order")
	f.StringVar(&c.Text, "text", "", "train on this file, or the files of this directory; default the Go sources of GOROOT")
	f.StringVar(&c.JSON, "json", "", "write the report as JSON to this file")
	f.BoolVar(&c.Check, "check", false, "train on 1 rank and on -ranks ranks and compare the losses step by step")
	switch err := f.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(out, "usage: moe [flags]\n\nTrains a mixture-of-experts language model whose experts are spread over ranks.\n\n")
		f.SetOutput(out)
		f.PrintDefaults()
		return c, err
	case err != nil:
		return c, usagef("%w; -help lists the flags", err)
	}
	if f.NArg() > 0 {
		return c, usagef("unexpected argument %q", f.Arg(0))
	}
	stepsGiven := false
	f.Visit(func(g *flag.Flag) { stepsGiven = stepsGiven || g.Name == "steps" })
	if c.Check && !stepsGiven {
		c.Steps = checkSteps
	}
	return c, c.validate()
}

func (c *config) validate() error {
	for _, p := range []struct {
		flag string
		v    int
	}{
		{"ranks", c.Ranks}, {"experts", c.Experts}, {"topk", c.TopK}, {"layers", c.Layers}, {"hidden", c.Hidden}, {"inner", c.Inner},
		{"context", c.Context}, {"embed", c.Embed}, {"batch", c.Batch}, {"steps", c.Steps},
	} {
		if p.v < 1 {
			return usagef("-%s is %d, want at least 1", p.flag, p.v)
		}
	}
	switch {
	case c.TopK > c.Experts:
		return usagef("-topk %d is more than -experts %d", c.TopK, c.Experts)
	case c.Batch < c.Ranks:
		return usagef("-batch %d is less than -ranks %d: some ranks would have no token", c.Batch, c.Ranks)
	case c.Check && c.JSON != "":
		return usagef("-check makes no report: -json %s would stay empty", c.JSON)
	case !(c.Rate > 0):
		return usagef("-rate is %v, want more than 0", c.Rate)
	}
	return nil
}

// shared is the part of the config that all ranks must have in common.
func (c config) shared() config {
	c.Join, c.JSON = false, ""
	return c
}

// tryJSON finds out now whether the report can be written later.
func (c config) tryJSON() error {
	if c.JSON == "" || c.Join {
		return nil
	}
	f, err := os.OpenFile(c.JSON, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return usagef("json: %w", err)
	}
	return f.Close()
}

// describe says what is going to be trained.
func (c config) describe(out io.Writer, text *corpus, where string) {
	dense := 0
	for _, n := range stageSizes(c) {
		dense += n
	}
	experts := c.Layers * c.Experts * expertSize(c)
	fmt.Fprintf(out, "text   %s: %s, %.1f MB to learn from, %.1f MB held out\n", text.name, count(text.files, "file"), float64(len(text.train))/1e6, float64(len(text.heldout))/1e6)
	fmt.Fprintf(out, "model  %s of %s, top-%d, hidden %d: %.2f million parameters in experts, %.2f in the dense part\n",
		count(c.Layers, "layer"), count(c.Experts, "expert"), c.TopK, c.Hidden, float64(experts)/1e6, float64(dense)/1e6)
	fmt.Fprintf(out, "ranks  %d, %s\n\n", c.Ranks, where)
}

// count is like "1 rank" or "4 ranks".
func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// slice is the part [lo, hi) of n things that a rank works on.
func slice(n, rank, ranks int) (lo, hi int) { return n * rank / ranks, n * (rank + 1) / ranks }
