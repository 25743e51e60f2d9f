// Command perf measures Switchyard's operations and sets them next to a peer's.
//
//	go run ./test/perf alltoallv -ranks 2,4 -procs -splits uniform,zipf
//	go run ./test/perf alltoallv -procs -busy 4
//	go run ./test/perf allreduce -json
//	go run ./test/perf allreduce -device cuda -ranks 2 -dtype bfloat16 -collective all-gather
//	go run ./test/perf dispatch -tokens 4096 -hidden 1024
//	go run ./test/perf dispatch -device cuda -ranks 2
//	go run ./test/perf p2p -procs
//	go run ./test/perf hosts -rate 2gbit -dispatch
//	go run ./test/perf all -o bench -python .venv/bin/python
//	go run ./test/perf tune -device cuda -ranks 2,4,8 -o table.json
//	go run ./test/perf tune -of allreduce -device cuda -ranks 2,4 -o table.json
//	go run ./test/perf tune -of dispatch -device cuda -ranks 2,4 -o table.json
//
// Time is the slowest rank's, from a barrier before each call to the call's end; the median over the iterations is
// reported. Bandwidth counts the bytes that the busiest rank sends to other ranks, or receives from them. Every element that
// was received is checked in the same run. tune measures all algorithms and writes the table by which alltoallv selects
// (alltoallv.Options.Table), or allreduce on GPUs (allreduce.Options.Table), or by which dispatch takes multiprocessors (dispatch.Options.Table). With -peer, another program's benchmark runs in alternation with ours, round by round, and the
// medians stand side by side; -h says what it must print. With -busy, processes that only compute share the cores with what is measured. all measures
// everything that a machine has, next to the peers that are installed, and writes bench.json and bench.html.
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
	Packet    int64

	Device      string
	SMs         int
	NoSMs       bool
	Table       string
	Of          string
	EachSMs     []int // of tune and dispatch
	EachTokens  []int // of tune -of dispatch
	TuneRates   []float64
	Quick       bool
	EagerLaunch bool
	Sizes       []int64
	Iters       int
	Reduce      string
	Collective  string
	Tokens      int
	Hidden      int
	Experts     int
	TopK        int
	Layout      string
	DType       string
	Quantize    bool
	All         bool
	Only        string
	JSON        bool
	Bundle      int64 // of hosts
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
	US           float64  `json:"us"`      // the median
	Mean         float64  `json:"us_mean"` // with the calls that had to wait for a core
	P10          float64  `json:"us_p10"`
	P90          float64  `json:"us_p90"`
	GBpsLink     float64  `json:"gbps_link"`
	Checked      bool     `json:"checked"`
	Busy         int      `json:"busy"` // busy loops next to it
	Peer         string   `json:"peer"`
	PeerUS       *float64 `json:"peer_us"`
	CopyUS       *float64 `json:"copy_us,omitempty"`
	Staged       bool     `json:"staged,omitempty"` // of tune
	SMs          int      `json:"sms,omitempty"`
	Rate         float64  `json:"rate,omitempty"`       // of tune
	Collective   string   `json:"collective,omitempty"` // of tune -of allreduce

	MoE *moeFigures `json:"moe,omitempty"` // of dispatch on cuda
}

// timed is a row with what was measured.
func (r row) timed(us []float64) row {
	var all float64
	for _, t := range us {
		all += t
	}
	r.US, r.Mean, r.P10, r.P90 = median(us), all/float64(len(us)), quantile(us, .1), quantile(us, .9)
	return r
}

// bench runs one operation on one rank; rank 0 returns the rows.
type bench func(ctx context.Context, g *comm.Group, c config) ([]row, error)

var benches = map[string]bench{"alltoallv": benchAllToAllV, "allreduce": benchAllReduce, "dispatch": benchDispatch, "p2p": benchP2P, "tune": benchTune, "hosts": benchHosts, hostsDispatch: benchHosts, hostsReduce: benchHosts}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if worker, err := runWorker(ctx); worker {
		exit(err)
	}
	if runBusy() {
		return
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

// stagings is a flag: where the outputs are that are measured. -staged means outside the symmetric heap, -staged=both there
// after inside.
type stagings []bool

func (s *stagings) String() string { return fmt.Sprint([]bool(*s)) }

func (*stagings) IsBoolFlag() bool { return true }

func (s *stagings) Set(v string) error {
	switch v {
	case "true":
		*s = stagings{true}
	case "false":
		*s = stagings{false}
	case "both":
		*s = stagings{false, true}
	default:
		return errors.New("want both or nothing")
	}
	return nil
}

func run(ctx context.Context, args []string) (err error) {
	if len(args) > 0 && args[0] == "all" {
		return measureAll(ctx, args[1:])
	}
	if len(args) == 0 || benches[args[0]] == nil {
		return errors.New("usage: perf all|alltoallv|allreduce|dispatch|p2p|tune|hosts [flags]; perf OP -h lists them")
	}
	if _, ok := bytesOf[args[0]]; ok {
		return measureHosts(ctx, args[1:])
	}
	var (
		c                         = config{Op: args[0], Device: "host"}
		fs                        = flag.NewFlagSet("perf "+c.Op, flag.ContinueOnError)
		ranks, splits, sizes, cmd string
		out, origin, sms, rates   string
		tokens                    string
		rounds, busy              int
		staged                    = stagings{false}
	)
	defSizes, defRanks := "8KiB,32KiB,128KiB,512KiB,2MiB,8MiB,32MiB", "2,4"
	if c.Op == "dispatch" {
		defSizes, defRanks = "", "4"
	}
	if c.Op == "p2p" {
		defSizes, defRanks = "8B,1KiB,8KiB,64KiB,256KiB,1MiB,8MiB,64MiB", "2"
	}
	fs.StringVar(&ranks, "ranks", defRanks, "numbers of ranks, comma separated")
	fs.BoolVar(&c.Procs, "procs", false, "one process a rank instead of one goroutine")
	fs.IntVar(&c.Iters, "iters", 0, "timed calls a size (default 300 up to 1 MiB, 30 above); on cuda samples of many calls each (default 25 and 8)")
	fs.BoolVar(&c.JSON, "json", false, "print one JSON object a line")
	fs.IntVar(&busy, "busy", 0, "busy loops that run beside it, as processes")
	fs.StringVar(&sizes, "sizes", defSizes, "bytes a rank, own part included; of reductions those of all slices")
	if c.Op == "alltoallv" || c.Op == "tune" {
		fs.StringVar(&c.Device, "device", "host", "host or cuda")
		fs.Int64Var(&c.Eager, "eager", 0, "Options.EagerBytes: messages up to this need no credit (0: the default, -1: none)")
	}
	if c.Op == "tune" {
		fs.StringVar(&c.Of, "of", "alltoallv", "whose table: "+tunedNames()+"; on the host only alltoallv has one")
		fs.StringVar(&sms, "sms", "", "on cuda: numbers of multiprocessors, comma separated (default 8,16; of allreduce 16,32,64,96; of dispatch 16,24,32,48,64,96, without those that the GPU does not have)")
		fs.StringVar(&tokens, "tokens", "", "of dispatch: tokens a rank, comma separated (default 8 to 512 with low latency, which takes at most 1024, and else 256 to 8192)")
		fs.StringVar(&rates, "rates", "0,335,345,355,365", "on cuda: GB/s to which a ring's senders are held, or a reduction; 0: as fast as they can")
		fs.StringVar(&out, "o", "table.json", "the file to write")
		fs.StringVar(&origin, "origin", "", "what the file says of the machine, date and commit")
	} else {
		fs.StringVar(&c.Algorithm, "algorithm", "", "force an algorithm")
		fs.StringVar(&cmd, "peer", "", "a peer's benchmark: a command that prints 'BYTES_PER_RANK MICROSECONDS ...' a line, # for comments; {ranks} and {splits} are filled in")
		fs.IntVar(&rounds, "rounds", 3, "with -peer: how often each is run, in alternation")
	}
	switch c.Op {
	case "alltoallv":
		fs.StringVar(&splits, "splits", "uniform,zipf", "how a rank divides its bytes: uniform, zipf, or file:PATH with a JSON object of matrices of bytes by the bytes a rank (and these sizes, without -sizes)")
		fs.IntVar(&c.SMs, "sms", 0, "on cuda: Options.MaxSMs")
		fs.StringVar(&c.Table, "table", "", "a file that tune has written, for Options.Table")
		fs.BoolVar(&c.NoSMs, "no-sms", false, "on cuda: Options.NoSMs")
		fs.Int64Var(&c.Packet, "packet", 0, "Options.PacketBytes: messages up to this are packets (0: the default, -1: none)")
		fs.BoolVar(&c.EagerLaunch, "eager-launch", false, "on cuda: call from Go instead of replaying a graph")
		fs.Var(&staged, "staged", "output outside the symmetric heap; -staged=both measures both")
	case "allreduce":
		fs.StringVar(&c.Device, "device", "host", "host or cuda")
		fs.StringVar(&c.Table, "table", "", "a file that tune -of allreduce has written, for Options.Table")
		fs.StringVar(&c.Collective, "collective", "all-reduce", "all-reduce, reduce-scatter or all-gather")
		fs.StringVar(&c.DType, "dtype", "float32", "type of elements: float32 or bfloat16")
		fs.StringVar(&c.Reduce, "op", "sum", "reduction")
		fs.IntVar(&c.SMs, "sms", 0, "on cuda: Options.MaxSMs")
		fs.BoolVar(&c.EagerLaunch, "eager-launch", false, "on cuda: call from Go instead of replaying a graph")
		fs.Var(&staged, "staged", "buffers outside the symmetric heap; -staged=both measures both")
	case "dispatch":
		fs.StringVar(&c.Layout, "layout", "flat", "on the host: flat, padded, slab, token-major or rank-padded")
		fs.StringVar(&c.DType, "dtype", "float32", "on the host: type of tokens: float32, bfloat16 or float16")
		fs.BoolVar(&c.Quantize, "quantize", false, "on the host: rows are made float8 on their way to the experts")
		fs.StringVar(&c.Device, "device", "host", "host, or cuda, which has a table of cases of its own")
		fs.IntVar(&c.Tokens, "tokens", 4096, "on the host: tokens a rank")
		fs.IntVar(&c.Hidden, "hidden", 1024, "on the host: elements a token")
		fs.IntVar(&c.Experts, "experts", 8, "on the host: experts in all")
		fs.IntVar(&c.TopK, "topk", 2, "on the host: experts a token")
		fs.BoolVar(&c.All, "all", false, "on cuda: other lengths of rows, numbers of experts and tokens, skew, and multiprocessors, too")
		fs.StringVar(&sms, "sms", "", "on cuda: numbers of multiprocessors, comma separated, that every case runs with (0: the default) in place of its own")
		fs.StringVar(&c.Table, "table", "", "on cuda: a file that tune -of dispatch has written, for Options.Table")
		fs.StringVar(&c.Only, "only", "", "on cuda: a regular expression that picks cases by their names, such as 'low latency, .* 128 tokens'")
	}
	if err := fs.Parse(args[1:]); err != nil {
		return err
	}
	if busy < 0 {
		return fmt.Errorf("-busy: %d is not a number of busy loops", busy)
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	if c.Device != "host" && c.Device != "cuda" {
		return fmt.Errorf("-device: %q is neither host nor cuda", c.Device)
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if c.Op == "tune" && c.Device == "cuda" && !given["sizes"] {
		sizes += ",128MiB,512MiB"
	}
	if c.Op == "tune" {
		of, known := tuned[c.Of]
		switch {
		case !known:
			return fmt.Errorf("-of: %q is none of %s", c.Of, tunedNames())
		case of.onCUDA && c.Device != "cuda":
			return fmt.Errorf("-of %s: only %s on cuda have a table", c.Of, of.calls)
		case sms == "":
			sms = of.sms
		}
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
	least := 0
	if c.Op == "tune" {
		least = 1
	}
	if c.EachSMs, err = numbers("sms", sms, "multiprocessors", least); err != nil {
		return err
	}
	if c.EachTokens, err = numbers("tokens", tokens, "tokens", 1); err != nil {
		return err
	}
	for s := range strings.SplitSeq(rates, ",") {
		if s == "" {
			continue
		}
		v, err := strconv.ParseFloat(s, 64)
		if err != nil || !(v >= 0) {
			return fmt.Errorf("-rates: %q is not a rate in GB/s", s)
		}
		c.TuneRates = append(c.TuneRates, v)
	}
	stop, err := startBusy(busy)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	fmt.Fprintf(os.Stderr, "# %s, %d cores, %d busy loops, %s\n", c.Op, runtime.NumCPU(), busy, runtime.Version())
	p := printer{json: c.JSON}
	var all []row
	for rs := range strings.SplitSeq(ranks, ",") {
		n, err := strconv.Atoi(rs)
		if err != nil || n < 1 {
			return fmt.Errorf("-ranks: %q is not a number of ranks", rs)
		}
		for sp := range strings.SplitSeq(splits, ",") {
			c := c
			c.Ranks, c.Splits = n, sp
			if path, ok := strings.CutPrefix(sp, fileSplits); ok && !given["sizes"] {
				if c.Sizes, err = fileSizes(path); err != nil {
					return err
				}
			}
			for _, s := range staged {
				c.Staged = c.Staged || s
				rows, err := measure(ctx, c, cmd, rounds)
				if err != nil {
					return err
				}
				for i := range rows {
					rows[i].Busy = busy
				}
				p.print(rows)
				all = append(all, rows...)
				if c.Op == "tune" { // so far: a later world may run out of time
					if err := writeTable(out, all, origin); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

// numbers are those of a flag, comma separated.
func numbers(flag, list, of string, least int) (all []int, err error) {
	for s := range strings.SplitSeq(list, ",") {
		if s == "" {
			continue
		}
		n, err := strconv.Atoi(s)
		if err != nil || n < least {
			return nil, fmt.Errorf("-%s: %q is not a number of %s", flag, s, of)
		}
		all = append(all, n)
	}
	return all, nil
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
		r.US, r.Mean = pick(func(r row) float64 { return r.US }), pick(func(r row) float64 { return r.Mean })
		r.P10, r.P90 = pick(func(r row) float64 { return r.P10 }), pick(func(r row) float64 { return r.P90 })
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
