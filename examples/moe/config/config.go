// Package config is what the flags of the example say, and what a run of that size costs.
package config

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"strings"

	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/examples/moe/words"
)

// Config is what the flags say. Everything that changes the numbers is in here, so two ranks with equal configs and
// equal text compute the same.
type Config struct {
	Ranks int  `json:"ranks"`
	Procs bool `json:"procs"`
	Join  bool `json:"join"`
	Late  bool `json:"late"`

	Experts int `json:"experts"`
	TopK    int `json:"topk"`
	Layers  int `json:"layers"`
	Hidden  int `json:"hidden"`  // width of a token
	Inner   int `json:"inner"`   // width inside an expert
	Context int `json:"context"` // bytes that the model sees
	Embed   int `json:"embed"`   // width of one byte's embedding

	Batch int    `json:"batch"` // tokens a step, all ranks together
	Steps int    `json:"steps"`
	Rate  Number `json:"rate"` // learning rate
	Seed  uint64 `json:"seed"`

	Balance int `json:"balance"` // steps between two looks at the load of ranks, 0 for never

	KillRank int `json:"kill_rank"` // in step AtStep, -1 for nobody
	AtStep   int `json:"at_step"`
	// Before step ReplaceAt a fresh rank takes its place, 0 for never. The ranks meet at MeetAt, with Secret.
	ReplaceAt int    `json:"replace_at_step"`
	MeetAt    string `json:"-"`
	Secret    []byte `json:"-"`

	Text  string `json:"text"`
	JSON  string `json:"-"`
	HTML  string `json:"-"`
	Save  string `json:"save,omitempty"`
	Check bool   `json:"check"`
}

// UsageError is a mistake of the person at the keyboard: exit code 2.
type UsageError struct{ error }

// Unwrap is the mistake.
func (e *UsageError) Unwrap() error { return e.error }

// Usagef is a UsageError.
func Usagef(format string, args ...any) error {
	return &UsageError{fmt.Errorf(format, args...)}
}

const (
	checkSteps = 50
	helpWidth  = 80 // columns
)

// Defaults is a run without flags.
func Defaults() Config {
	return Config{Ranks: 4, Experts: 8, TopK: 2, Layers: 2, Hidden: 128, Inner: 256, Context: 8, Embed: 64,
		Batch: 1024, Steps: 2500, Rate: 8e-3, Seed: 1, KillRank: -1}
}

// Parse reads the flags. It prints the list of them where -help asks for it, with flag.ErrHelp.
func Parse(args []string, out io.Writer) (Config, error) {
	c := Defaults()
	f := flag.NewFlagSet("moe", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.IntVar(&c.Ranks, "ranks", c.Ranks, "ranks that share the work")
	f.BoolVar(&c.Procs, "procs", false, "run every rank in a process of its own, over shared memory")
	f.BoolVar(&c.Join, "join", false, "be one rank of the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (what -procs starts)")
	f.BoolVar(&c.Late, "late", false, "with -join: take the place of a rank that was lost (what -procs starts for -replace-at-step)")
	f.IntVar(&c.Experts, "experts", c.Experts, "experts of a layer")
	f.IntVar(&c.TopK, "topk", c.TopK, "experts that a token visits")
	f.IntVar(&c.Layers, "layers", c.Layers, "mixture-of-experts layers")
	f.IntVar(&c.Hidden, "hidden", c.Hidden, "width of a token")
	f.IntVar(&c.Inner, "inner", c.Inner, "width inside an expert")
	f.IntVar(&c.Context, "context", c.Context, "bytes of context")
	f.IntVar(&c.Embed, "embed", c.Embed, "width of a byte's embedding")
	f.IntVar(&c.Batch, "batch", c.Batch, "tokens a step, all ranks together")
	f.IntVar(&c.Steps, "steps", c.Steps, "training steps (with -check 50)")
	f.Float64Var((*float64)(&c.Rate), "rate", float64(c.Rate), "peak learning rate")
	f.Uint64Var(&c.Seed, "seed", c.Seed, "seed of weights and data order")
	f.StringVar(&c.Text, "text", "", "train on this file, or the files of this directory; default the Go sources of GOROOT")
	f.StringVar(&c.JSON, "json", "", "write the report as JSON to this file, - for standard output")
	f.StringVar(&c.HTML, "html", "", "write the report with pictures to this file, to look at in a browser")
	f.IntVar(&c.Balance, "balance", 0, "every this many steps move experts to where ranks are equally busy, and leave routers alone")
	f.StringVar(&c.Save, "save", "", "write the trained model to this file, for examples/serve")
	f.IntVar(&c.KillRank, "kill-rank", c.KillRank, "kill this rank in the middle of a step; the others go on without it")
	f.IntVar(&c.AtStep, "at-step", 0, "the step of -kill-rank (default half of -steps)")
	f.IntVar(&c.ReplaceAt, "replace-at-step", 0, "before this step a fresh rank takes the place of the one that was killed (default never)")
	f.BoolVar(&c.Check, "check", false, "train on 1 rank and on -ranks ranks and compare the losses step by step")
	switch err := f.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(out, "usage: moe [flags]\n\nTrains a mixture-of-experts language model whose experts are spread over ranks.\n\n")
		var list strings.Builder
		f.SetOutput(&list)
		f.PrintDefaults()
		for line := range strings.Lines(list.String()) {
			usage, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "    \t")
			if !ok { // the name of a flag
				fmt.Fprint(out, line)
				continue
			}
			for _, line := range words.Fold(usage, helpWidth-8) {
				fmt.Fprintf(out, "        %s\n", line)
			}
		}
		return c, err
	case err != nil:
		return c, Usagef("%w; -help lists the flags", err)
	}
	if f.NArg() > 0 {
		return c, Usagef("unexpected argument %q", f.Arg(0))
	}
	given := map[string]bool{}
	f.Visit(func(g *flag.Flag) { given[g.Name] = true })
	if c.Check && !given["steps"] {
		c.Steps = checkSteps
	}
	switch {
	case given["at-step"] && !given["kill-rank"]:
		return c, Usagef("-at-step needs -kill-rank")
	case given["kill-rank"] && !given["at-step"]:
		c.AtStep = (c.Steps + 1) / 2
	}
	switch {
	case given["replace-at-step"] && !given["kill-rank"]:
		return c, Usagef("-replace-at-step needs -kill-rank")
	case given["replace-at-step"] && (c.ReplaceAt <= c.AtStep || c.ReplaceAt > c.Steps):
		return c, Usagef("-replace-at-step is %d, want a step after the %d of -at-step, at most the %d of -steps", c.ReplaceAt, c.AtStep, c.Steps)
	case c.Late && !c.Join:
		return c, Usagef("-late needs -join")
	}
	if given["kill-rank"] && c.KillRank < 0 {
		return c, Usagef("-kill-rank is %d, want a rank", c.KillRank)
	}
	return c, c.Validate()
}

// JSONOnStdout says whether flags that may be wrong ask for a report on standard output.
func JSONOnStdout(args []string) bool {
	for i, a := range args {
		name, value, whole := strings.Cut(a, "=")
		if !whole && i+1 < len(args) {
			value = args[i+1]
		}
		if (name == "-json" || name == "--json") && value == "-" {
			return true
		}
	}
	return false
}

// Validate refuses what cannot be.
func (c *Config) Validate() error {
	for _, p := range []struct {
		flag string
		v    int
	}{
		{"ranks", c.Ranks}, {"experts", c.Experts}, {"topk", c.TopK}, {"layers", c.Layers}, {"hidden", c.Hidden}, {"inner", c.Inner},
		{"context", c.Context}, {"embed", c.Embed}, {"batch", c.Batch}, {"steps", c.Steps},
	} {
		if p.v < 1 {
			return Usagef("-%s is %d, want at least 1", p.flag, p.v)
		}
	}
	switch {
	case c.Balance < 0:
		return Usagef("-balance is %d, want at least 0", c.Balance)
	case c.Balance > 0 && c.Experts%c.Ranks != 0:
		return Usagef("-balance needs equally many experts on every rank: -experts is %d, -ranks %d", c.Experts, c.Ranks)
	case c.TopK > c.Experts:
		return Usagef("-topk %d is more than -experts %d", c.TopK, c.Experts)
	case c.Batch < c.Ranks:
		return Usagef("-batch %d is less than -ranks %d: some ranks would have no token", c.Batch, c.Ranks)
	case c.Check && c.JSON != "":
		return Usagef("-check makes no report: -json %s would stay empty", c.JSON)
	case c.Check && c.HTML != "":
		return Usagef("-check makes no report: -html %s would stay empty", c.HTML)
	case c.Check && c.Save != "":
		return Usagef("-check makes no model to keep: leave out -save")
	case c.HTML == "-":
		return Usagef("-html wants the name of a file")
	case c.Check && c.KillRank >= 0:
		return Usagef("-check compares runs that lose nobody: leave out -kill-rank")
	case c.KillRank >= 0 && c.Ranks == 1:
		return Usagef("-kill-rank needs a rank that goes on: use at least -ranks 2")
	case c.KillRank >= c.Ranks:
		return Usagef("-kill-rank is %d, the ranks are 0 to %d", c.KillRank, c.Ranks-1)
	case c.KillRank >= 0 && (c.AtStep < 1 || c.AtStep > c.Steps):
		return Usagef("-at-step is %d, the steps are 1 to %d", c.AtStep, c.Steps)
	case !(c.Rate > 0) || math.IsInf(float64(c.Rate), 0):
		return Usagef("-rate is %v, want more than 0", c.Rate)
	}
	return nil
}

// Shared is the part of the config that all ranks must have in common.
func (c Config) Shared() Config {
	c.Join, c.Late, c.JSON, c.HTML = false, false, "", ""
	return c
}

// TryFiles finds out now whether the reports can be written later.
func (c Config) TryFiles() error {
	if c.Join {
		return nil
	}
	for _, name := range []string{c.JSON, c.HTML, c.Save} {
		if name == "" || name == "-" {
			continue
		}
		_, missing := os.Stat(name)
		f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return Usagef("output: %w", err)
		}
		if err := f.Close(); err != nil {
			return Usagef("output: %w", err)
		}
		if missing != nil {
			_ = os.Remove(name) // no empty report if there will be none
		}
	}
	return nil
}

// Describe says what is going to be trained, in lines of at most the given columns.
func (c Config) Describe(out io.Writer, from *text.Corpus, where string, columns int) {
	experts := c.Layers * c.Experts * c.ExpertSize()
	lines := func(format string, args ...any) {
		for _, line := range words.Fold(fmt.Sprintf(format, args...), columns) {
			fmt.Fprintln(out, line)
		}
	}
	lines("text   %s: %s", from.Name, from.Found)
	name, bytes := "MB", 1e6
	if len(from.Train) < 1e6 {
		name, bytes = "kB", 1e3
	}
	lines("       %.1f %s to learn from, %.1f %s held out", float64(len(from.Train))/bytes, name, float64(len(from.Heldout))/bytes, name)
	lines("model  %s of %s, top-%d, hidden %d", words.Count(c.Layers, "layer"), words.Count(c.Experts, "expert"), c.TopK, c.Hidden)
	lines("       %.2f million parameters in experts, %.2f in the dense part", float64(experts)/1e6, c.DenseSize()/1e6)
	lines("ranks  %d, %s", c.Ranks, where)
	if t := c.cost(); c.Ranks > wide || t.large() {
		what := "A run of that size on %s costs about %s a step"
		if c.Ranks > wide {
			what = "That many ranks on %s cost about %s a step"
		}
		lines("       "+what, words.Count(runtime.NumCPU(), "processor"), words.Rounded(t.step))
		lines("       and %s of memory: %s in all", words.Bytes(t.memory), words.Rounded(t.all))
	}
	lines("")
}

// Heals says whether ranks that are left go on without one that is lost.
func (c Config) Heals() bool { return c.AtStep > 0 }

// RateAt is the learning rate of a step: up in a straight line for the first twentieth, then down half a cosine to a twentieth
// of the peak.
func (c Config) RateAt(step int) float64 {
	const floor = 0.05
	at := float64(step) / float64(c.Steps)
	rise := min(1, 20*at)
	return float64(c.Rate) * rise * (floor + (1-floor)*(1+math.Cos(math.Pi*at))/2)
}

// The places of the held-out text that are judged: heldoutPlaces, and not more than heldoutBatches batches.
const (
	heldoutPlaces  = 32 << 10
	heldoutBatches = 32
)

// HeldoutPlaces is how many places of the held-out text are judged.
func (c Config) HeldoutPlaces() int { return min(heldoutPlaces, heldoutBatches*c.Batch) }

// Slice is the part [lo, hi) of n things that a rank works on.
func Slice(n, rank, ranks int) (lo, hi int) { return n * rank / ranks, n * (rank + 1) / ranks }

// Number is a float64 that JSON can hold whatever it is.
type Number float64

// MarshalJSON writes null for what is no number.
func (n Number) MarshalJSON() ([]byte, error) {
	if v := float64(n); math.IsNaN(v) || math.IsInf(v, 0) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(n))
}
