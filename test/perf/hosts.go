package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/proctest/netns"
	"github.com/switchyard-moe/switchyard/memory"
)

// hostsRow is one line of the result of hosts: exchanges in which each rank sends Bytes to each other rank and to itself.
type hostsRow struct {
	Op        string     `json:"op"`
	Hosts     int        `json:"hosts"`
	PerHost   int        `json:"per_host"`
	Rate      string     `json:"rate"`           // to which each host's sending is held, empty for none
	Bytes     int64      `json:"bytes_per_pair"` // of dispatches those of a row, of reductions those of a rank
	Way       string     `json:"way"`            // of messages to other hosts
	Calls     int        `json:"calls_per_block"`
	US        float64    `json:"us"` // the median of the blocks' means
	Blocks    []float64  `json:"us_blocks"`
	SentBytes int64      `json:"sent_bytes"`         // a call, of the first host's interface, on which acknowledgements go too
	Crossing  float64    `json:"crossing,omitempty"` // of dispatches: SentBytes over those of the rows that cross
	Checked   bool       `json:"checked"`
	Peer      string     `json:"peer"`
	PeerUS    *float64   `json:"peer_us"`
	Theirs    []float64  `json:"peer_us_blocks,omitempty"`
	Load      [2]float64 `json:"load"` // of the machine, before and after
}

// The operations of workers of hosts -dispatch and hosts -reduce.
const (
	hostsDispatch = "hosts-dispatch"
	hostsReduce   = "hosts-reduce"
)

// bytesOf says what an operation's bytes are of.
var bytesOf = map[string]string{"hosts": "a pair", hostsDispatch: "a row", hostsReduce: "a rank"}

// hostsConfig is what hosts measures.
type hostsConfig struct {
	hosts, perHost, blocks int
	sizes                  []int64
	op, rate, peer         string
	dispatch, reduce       bool
	bundle                 int64
	json                   bool
}

// measureHosts runs exchanges of ranks in network namespaces, in alternation with a peer's, block by block.
func measureHosts(ctx context.Context, args []string) error {
	var c hostsConfig
	var sizes, perHost string
	fs := flag.NewFlagSet("perf hosts", flag.ContinueOnError)
	fs.IntVar(&c.hosts, "hosts", 2, "number of hosts, each a network namespace")
	fs.StringVar(&perHost, "per-host", "2,1", "numbers of ranks a host, comma separated")
	fs.StringVar(&sizes, "sizes", "", "bytes a pair of ranks, or of a row, or of a rank (default 256B,1KiB,4KiB,64KiB,256KiB,512KiB,2MiB,4MiB, or 2KiB,14KiB, or 1KiB,8KiB,64KiB,512KiB,4MiB,64MiB)")
	fs.BoolVar(&c.dispatch, "dispatch", false, "measure dispatch with combine: 512 tokens a rank, the best 8 of 32 experts, bfloat16; the peer\nonly carries a row to each rank and back")
	fs.BoolVar(&c.reduce, "reduce", false, "measure all-reduce: sums of float32")
	fs.IntVar(&c.blocks, "blocks", 9, "blocks of calls a size, ours and the peer's in turn; the median of their means is reported")
	fs.StringVar(&c.rate, "rate", "", "the rate to which tc holds what a host sends, such as 2gbit")
	fs.StringVar(&c.peer, "peer", "python3 test/peers/gloo_alltoall.py {op}", "a peer's worker, which speaks as ours do; empty for none. {op} is hosts, hosts-dispatch or hosts-reduce")
	fs.Int64Var(&c.bundle, "bundle", 0, "alltoallv.Options.BundleBytes: messages up to this go in bundles (0: by the table, -1: none)")
	fs.BoolVar(&c.json, "json", false, "print one JSON object a line")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	if c.hosts < 2 || c.blocks < 1 {
		return fmt.Errorf("%d hosts and %d blocks, want at least 2 and 1", c.hosts, c.blocks)
	}
	var usual string
	switch {
	case c.dispatch && c.reduce:
		return errors.New("-dispatch and -reduce are two measurements")
	case c.dispatch:
		c.op, usual = hostsDispatch, "2KiB,14KiB"
	case c.reduce:
		c.op, usual = hostsReduce, "1KiB,8KiB,64KiB,512KiB,4MiB,64MiB"
	default:
		c.op, usual = "hosts", "256B,1KiB,4KiB,64KiB,256KiB,512KiB,2MiB,4MiB"
	}
	c.peer = strings.ReplaceAll(c.peer, "{op}", c.op)
	for s := range strings.SplitSeq(cmp.Or(sizes, usual), ",") {
		n, err := parseSize(s)
		if err != nil {
			return err
		}
		c.sizes = append(c.sizes, n)
	}
	fmt.Fprintf(os.Stderr, "# hosts, %d cores, %s, %d blocks\n", runtime.NumCPU(), runtime.Version(), c.blocks)
	for s := range strings.SplitSeq(perHost, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return fmt.Errorf("-per-host: %q is not a number of ranks", s)
		}
		c.perHost = n
		if err := c.measure(ctx); err != nil {
			return fmt.Errorf("%d hosts of %d ranks: %w", c.hosts, n, err)
		}
	}
	return nil
}

// measure measures all sizes with one number of ranks a host.
func (c *hostsConfig) measure(ctx context.Context) (err error) {
	net, err := netns.New(c.hosts)
	if err != nil {
		return err
	}
	defer net.Close()
	if c.rate != "" {
		for _, s := range net.Spaces {
			if err := s.Limit(c.rate); err != nil {
				return err
			}
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	spec, err := json.Marshal(config{Op: c.op, Ranks: c.hosts * c.perHost, Sizes: []int64{slices.Max(c.sizes)}, Bundle: c.bundle})
	if err != nil {
		return err
	}
	ours, err := startHosts(ctx, net, c.perHost, []string{self}, 29500, workerEnv+"="+string(spec))
	defer func() { err = errors.Join(err, ours.stop()) }()
	if err != nil {
		return err
	}
	var theirs *hostWorkers
	if c.peer != "" {
		theirs, err = startHosts(ctx, net, c.perHost, []string{"sh", "-c", c.peer}, 29700)
		defer func() { err = errors.Join(err, theirs.stop()) }()
		if err != nil {
			return err
		}
	}
	if !c.json {
		fmt.Printf("\n%d hosts of %d ranks, %s; peer: %s\n%14s  %-9s %6s %11s %11s %7s %12s %12s\n", c.hosts, c.perHost, cmp.Or(c.rate, "no limit"), cmp.Or(c.peer, "none"),
			"bytes "+bytesOf[c.op], "way", "calls", "us", "peer us", "ours/", "bytes sent", "load")
	}
	for _, n := range c.sizes {
		r, err := c.size(ctx, net, ours, theirs, n)
		if err != nil {
			return fmt.Errorf("%s %s: %w", human(n), bytesOf[c.op], err)
		}
		c.print(r)
	}
	return nil
}

// calls is how many calls of n bytes a pair, a row or a rank are a block.
func (c *hostsConfig) calls(n int64) int {
	if c.dispatch {
		n *= hostTokens
	}
	return int(min(100, max(4, (16<<20)/max(1, n))))
}

// size measures one size.
func (c *hostsConfig) size(ctx context.Context, net *netns.Net, ours, theirs *hostWorkers, n int64) (hostsRow, error) {
	r := hostsRow{Op: c.op, Hosts: c.hosts, PerHost: c.perHost, Rate: c.rate, Bytes: n, Calls: c.calls(n), Checked: true, Peer: c.peer}
	r.Load[0] = load()
	before, err := net.Spaces[0].SentBytes()
	if err != nil {
		return r, err
	}
	var sent int64
	for range c.blocks {
		us, way, err := ours.block(ctx, n, r.Calls)
		if err != nil {
			return r, fmt.Errorf("ours: %w", err)
		}
		r.Blocks, r.Way = append(r.Blocks, us), way
		after, err := net.Spaces[0].SentBytes()
		if err != nil {
			return r, err
		}
		sent += after - before
		if theirs != nil {
			if us, _, err = theirs.block(ctx, n, r.Calls); err != nil {
				return r, fmt.Errorf("the peer: %w", err)
			}
			r.Theirs = append(r.Theirs, us)
		}
		if before, err = net.Spaces[0].SentBytes(); err != nil {
			return r, err
		}
	}
	r.Load[1] = load()
	r.US, r.SentBytes = median(r.Blocks), sent/int64(c.blocks*(r.Calls+1))
	if c.dispatch {
		r.Crossing = float64(r.SentBytes) / float64(c.crossing(n))
	}
	if theirs != nil {
		m := median(r.Theirs)
		r.PeerUS = &m
	}
	return r, nil
}

func (c *hostsConfig) print(r hostsRow) {
	if c.json {
		_ = json.NewEncoder(os.Stdout).Encode(r)
		return
	}
	peer, ratio := "", ""
	if r.PeerUS != nil {
		peer, ratio = fmt.Sprintf("%.1f", *r.PeerUS), fmt.Sprintf("%.2f", r.US / *r.PeerUS)
	}
	fmt.Printf("%14s  %-9s %6d %11.1f %11s %7s %12d %5.1f %5.1f", human(r.Bytes), r.Way, r.Calls, r.US, peer, ratio, r.SentBytes, r.Load[0], r.Load[1])
	if r.Crossing > 0 {
		fmt.Printf("  %.3f of the rows", r.Crossing)
	}
	fmt.Println()
}

// load is the machine's load average of a minute, NaN where it is not told.
func load() float64 {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return math.NaN()
	}
	first, _, _ := strings.Cut(string(b), " ")
	v, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return math.NaN()
	}
	return v
}

// hostWorkers are the processes of one program on all hosts.
type hostWorkers struct {
	all []hostWorker
}

type hostWorker struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// startHosts starts a process for every rank.
func startHosts(ctx context.Context, net *netns.Net, perHost int, args []string, port int, env ...string) (*hostWorkers, error) {
	w := &hostWorkers{}
	size := perHost * len(net.Spaces)
	for r := range size {
		s := net.Spaces[r/perHost]
		line := append(slices.Clone(s.Via), args...)
		cmd := exec.CommandContext(ctx, line[0], line[1:]...)
		cmd.Env = append(append(os.Environ(), env...), fmt.Sprint("RANK=", r), fmt.Sprint("WORLD_SIZE=", size), fmt.Sprint("LOCAL_RANK=", r%perHost),
			fmt.Sprint("LOCAL_WORLD_SIZE=", perHost), "MASTER_ADDR="+net.Spaces[0].IP, fmt.Sprint("MASTER_PORT=", port), fmt.Sprint("SWITCHYARD_PORT=", port),
			"GLOO_SOCKET_IFNAME="+s.Device, "TORCH_CPP_LOG_LEVEL=ERROR")
		cmd.Stderr = os.Stderr
		in, err1 := cmd.StdinPipe()
		out, err2 := cmd.StdoutPipe()
		if err := errors.Join(err1, err2, cmd.Start()); err != nil {
			return w, err
		}
		w.all = append(w.all, hostWorker{cmd, in, bufio.NewReader(out)})
	}
	return w, nil
}

// block has all ranks make calls, and returns the slowest rank's microseconds a call, and what rank 0 says of the way.
func (w *hostWorkers) block(ctx context.Context, bytes int64, calls int) (us float64, way string, err error) {
	for _, p := range w.all {
		if _, err := fmt.Fprintln(p.in, bytes, calls); err != nil {
			return 0, "", err
		}
	}
	eg, _ := errgroup.WithContext(ctx)
	times, ways := make([]float64, len(w.all)), make([]string, len(w.all))
	for i, p := range w.all {
		eg.Go(func() error {
			line, err := p.out.ReadString('\n')
			if err != nil {
				return fmt.Errorf("rank %d has ended: %w", i, err)
			}
			first, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
			times[i], err = strconv.ParseFloat(first, 64)
			ways[i] = rest
			return err
		})
	}
	err = eg.Wait()
	return slices.Max(times), ways[0], err
}

// stop ends the processes: their input ends.
func (w *hostWorkers) stop() (err error) {
	for _, p := range w.all {
		err = errors.Join(err, p.in.Close())
	}
	for r, p := range w.all {
		if e := p.cmd.Wait(); e != nil {
			err = errors.Join(err, fmt.Errorf("rank %d: %w", r, e))
		}
	}
	return err
}

// benchHosts is a worker of hosts. It reads lines "BYTES CALLS" from its standard input until that ends. For each it makes one exchange that
// is not timed and then the calls, checks every byte of the last, and writes a line: its microseconds a call, and the way.
func benchHosts(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	n, me, most := g.Size(), g.Rank(), c.Sizes[0]*int64(g.Size())
	h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: 2*most + 2*hostControl})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close(ctx)) }()
	x, err := alltoallv.New(ctx, h, alltoallv.Options{BundleBytes: c.Bundle})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.Close(ctx)) }()
	src, err := h.Alloc(most)
	if err != nil {
		return nil, err
	}
	dst, err := h.Alloc(most)
	if err != nil {
		return nil, err
	}
	switch c.Op {
	case hostsDispatch:
		return nil, hostDispatches(ctx, h, x)
	case hostsReduce:
		return nil, hostReductions(ctx, h, x, src.View(), dst.View())
	}
	return nil, eachLine(func(bytes int64, calls int) error {
		if bytes > c.Sizes[0] {
			return fmt.Errorf("%d bytes, at most %d", bytes, c.Sizes[0])
		}
		m := make([][]int64, n)
		for r := range m {
			m[r] = slices.Repeat([]int64{bytes}, n)
		}
		sp := splitsOf(m, me)
		fillSource(src.Bytes(), sp, me)
		in, out := src.View().Slice(0, bytes*int64(n)), dst.View().Slice(0, bytes*int64(n))
		if err := x.Exchange(nil, out, in, sp); err != nil {
			return err
		}
		for i, b := 0, out.Bytes(); i < len(b); i++ {
			b[i] = 0xff
		}
		if err := x.Barrier(nil); err != nil { // nobody writes it before
			return err
		}
		start := time.Now()
		for range calls {
			if err := x.Exchange(nil, out, in, sp); err != nil {
				return err
			}
		}
		us := float64(time.Since(start).Nanoseconds()) / 1e3 / float64(calls)
		if err := checkOutput(out.Bytes(), sp, me); err != nil {
			return err
		}
		d, err := x.Explain(sp, true)
		if err != nil {
			return err
		}
		way := "straight"
		if d.Bundled > 0 {
			way = "bundled"
		}
		fmt.Printf("%.2f %s\n", us, way)
		return nil
	})
}

// eachLine calls f for each line of the standard input.
func eachLine(f func(bytes int64, calls int) error) error {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var bytes int64
		var calls int
		if _, err := fmt.Sscan(lines.Text(), &bytes, &calls); err != nil || bytes < 0 || calls < 1 {
			return fmt.Errorf("line %q: want bytes and calls: %w", lines.Text(), err)
		}
		if err := f(bytes, calls); err != nil {
			return err
		}
	}
	return lines.Err()
}
