// Command perf measures Switchyard's operations and sets them beside a peer's.
//
//	go run ./test/perf alltoallv -ranks 2,4 -procs -splits uniform,zipf
//	go run ./test/perf allreduce -json
//	go run ./test/perf dispatch -tokens 4096 -hidden 1024
//
// Time is the slowest rank's, from a barrier before each call to the call's end; the median over the iterations is
// reported. Bandwidth counts the bytes that the busiest rank sends to other ranks. Every element that was received is
// checked in the same run. With -peer, another program's benchmark runs in alternation with ours, round by round, and the
// medians stand side by side; -h says what it must print.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/switchyard-moe/switchyard/comm"
)

// config is one run: an operation on one world.
type config struct {
	Op        string
	Ranks     int
	Procs     bool
	Splits    string
	Algorithm string
	Staged    bool
	Eager     int64

	Device      string
	MaxSMs      int
	EagerLaunch bool
	Sizes       []int64
	Iters       int
	Reduce      string
	Tokens      int
	Hidden      int
	Experts     int
	TopK        int
}

// row is one line of the result.
type row struct {
	Op           string   `json:"op"`
	Ranks        int      `json:"ranks"`
	Procs        bool     `json:"procs"`
	Device       string   `json:"device"`
	Splits       string   `json:"splits"`
	Algorithm    string   `json:"algorithm"`
	BytesPerRank int64    `json:"bytes_per_rank"`
	US           float64  `json:"us"`
	P10          float64  `json:"us_p10"`
	P90          float64  `json:"us_p90"`
	GBpsLink     float64  `json:"gbps_link"`
	Checked      bool     `json:"checked"`
	Peer         string   `json:"peer"`
	PeerUS       *float64 `json:"peer_us"`
	CopyUS       *float64 `json:"copy_us,omitempty"`
}

// bench runs one operation on one rank; rank 0 returns the rows.
type bench func(ctx context.Context, g *comm.Group, c config) ([]row, error)

var benches = map[string]bench{"alltoallv": benchAllToAllV, "allreduce": benchAllReduce, "dispatch": benchDispatch}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if worker, err := runWorker(ctx); worker {
		exit(err)
	}
	exit(run(ctx, os.Args[1:]))
}

func exit(err error) {
	if err == nil {
		os.Exit(0)
	}
	if !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "perf:", err)
	}
	os.Exit(1)
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 || benches[args[0]] == nil {
		return errors.New("usage: perf alltoallv|allreduce|dispatch [flags]; perf OP -h lists them")
	}
	var (
		c                         = config{Op: args[0]}
		fs                        = flag.NewFlagSet("perf "+c.Op, flag.ContinueOnError)
		ranks, splits, sizes, cmd string
		asJSON                    bool
		rounds                    int
	)
	defSizes, defRanks := "8KiB,32KiB,128KiB,512KiB,2MiB,8MiB,32MiB", "2,4"
	if c.Op == "dispatch" {
		defSizes, defRanks = "", "4"
	}
	fs.StringVar(&ranks, "ranks", defRanks, "numbers of ranks, comma separated")
	fs.BoolVar(&c.Procs, "procs", false, "one process a rank instead of one goroutine")
	fs.StringVar(&c.Algorithm, "algorithm", "", "force an algorithm")
	fs.IntVar(&c.Iters, "iters", 0, "timed calls a size (default 300 up to 1 MiB, 30 above)")
	fs.BoolVar(&asJSON, "json", false, "print one JSON object a line")
	fs.StringVar(&cmd, "peer", "", "a peer's benchmark: a command that prints 'BYTES_PER_RANK MICROSECONDS ...' a line, # for comments; {ranks} and {splits} are filled in")
	fs.IntVar(&rounds, "rounds", 3, "with -peer: how often each is run, in alternation")
	fs.StringVar(&sizes, "sizes", defSizes, "bytes a rank, own part included")
	switch c.Op {
	case "alltoallv":
		fs.StringVar(&splits, "splits", "uniform,zipf", "how a rank divides its bytes: uniform, zipf")
		fs.StringVar(&c.Device, "device", "host", "host or cuda")
		fs.IntVar(&c.MaxSMs, "max-sms", 0, "on cuda: Options.MaxSMs")
		fs.BoolVar(&c.EagerLaunch, "eager-launch", false, "on cuda: call from Go instead of replaying a graph")
		fs.Int64Var(&c.Eager, "eager", 0, "Options.EagerBytes: messages up to this need no credit (0: the default, -1: none)")
		fs.BoolVar(&c.Staged, "staged", false, "output outside the symmetric heap, so that messages go through staging")
	case "allreduce":
		fs.StringVar(&c.Reduce, "op", "sum", "reduction")
		fs.BoolVar(&c.Staged, "staged", false, "buffers outside the symmetric heap")
	case "dispatch":
		fs.IntVar(&c.Tokens, "tokens", 4096, "tokens a rank")
		fs.IntVar(&c.Hidden, "hidden", 1024, "float32 elements a token")
		fs.IntVar(&c.Experts, "experts", 8, "experts in all")
		fs.IntVar(&c.TopK, "topk", 2, "experts a token")
	}
	if err := fs.Parse(args[1:]); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	for s := range strings.SplitSeq(sizes, ",") {
		if s == "" {
			continue
		}
		n, err := parseSize(s)
		if err != nil {
			return err
		}
		c.Sizes = append(c.Sizes, n)
	}
	if c.Device != "" && c.Device != "host" && c.Device != "cuda" {
		return fmt.Errorf("-device: %q is neither host nor cuda", c.Device)
	}
	fmt.Fprintf(os.Stderr, "# %s, %d cores, %s\n", c.Op, runtime.NumCPU(), runtime.Version())
	p := printer{json: asJSON}
	for rs := range strings.SplitSeq(ranks, ",") {
		n, err := strconv.Atoi(rs)
		if err != nil || n < 1 {
			return fmt.Errorf("-ranks: %q is not a number of ranks", rs)
		}
		for sp := range strings.SplitSeq(splits, ",") {
			c.Ranks, c.Splits = n, sp
			rows, err := measure(ctx, c, cmd, rounds)
			if err != nil {
				return err
			}
			p.print(rows)
		}
	}
	return nil
}

// measure runs one world, in alternation with the peer when there is one.
func measure(ctx context.Context, c config, cmd string, rounds int) ([]row, error) {
	if cmd == "" {
		return runWorld(ctx, c)
	}
	var ours [][]row
	theirs := map[int64][]float64{}
	for range rounds {
		us, err := runPeer(ctx, cmd, c)
		if err != nil {
			return nil, err
		}
		for size, t := range us {
			theirs[size] = append(theirs[size], t)
		}
		rows, err := runWorld(ctx, c)
		if err != nil {
			return nil, err
		}
		ours = append(ours, rows)
	}
	rows := ours[0]
	for i := range rows {
		r := &rows[i]
		pick := func(f func(row) float64) float64 {
			v := make([]float64, len(ours))
			for k := range ours {
				v[k] = f(ours[k][i])
			}
			return median(v)
		}
		cross := r.GBpsLink * r.US
		r.US, r.P10, r.P90 = pick(func(r row) float64 { return r.US }), pick(func(r row) float64 { return r.P10 }), pick(func(r row) float64 { return r.P90 })
		r.GBpsLink = cross / r.US
		r.Peer = cmd
		if t := theirs[r.BytesPerRank]; len(t) > 0 {
			m := median(t)
			r.PeerUS = &m
		}
	}
	return rows, nil
}

func median(v []float64) float64 { return quantile(v, 0.5) }

func quantile(v []float64, q float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[min(int(q*float64(len(s))), len(s)-1)]
}

func parseSize(s string) (int64, error) {
	num, unit := strings.TrimRight(s, "KMGiB"), int64(1)
	switch strings.TrimPrefix(s, num) {
	case "", "B":
	case "KiB", "K":
		unit = 1 << 10
	case "MiB", "M":
		unit = 1 << 20
	case "GiB", "G":
		unit = 1 << 30
	default:
		return 0, fmt.Errorf("size %q: want a number with B, KiB, MiB or GiB", s)
	}
	n, err := strconv.ParseInt(num, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("size %q: want a number with B, KiB, MiB or GiB", s)
	}
	return n * unit, nil
}

func human(n int64) string {
	for _, u := range []struct {
		name string
		size int64
	}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.size && n%u.size == 0 {
			return fmt.Sprintf("%d %s", n/u.size, u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}
