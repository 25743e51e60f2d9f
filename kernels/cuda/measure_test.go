package cuda

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

var (
	measure  = flag.String("measure", "", "what TestMeasure runs: comma-separated of packet, large, huge, zipf, eager, launch")
	ranks    = flag.Int("ranks", 8, "ranks of TestMeasure")
	stripes  = flag.Int("stripes", 16, "stripes of TestMeasure")
	slots    = flag.Int("slots", 4, "slots of a stripe of TestMeasure")
	slotKiB  = flag.Int64("slot-kib", 128, "slot bytes of TestMeasure")
	only     = flag.String("only", "", "measure only variants whose name contains this")
	maxMiB   = flag.Int64("max-mib", 512, "largest bytes a rank of TestMeasure")
	packetKB = flag.Int64("packet-kib", 256, "packet bytes of TestMeasure")
)

// timing is what a variant took on its slowest rank, a call.
type timing struct{ median, min, max time.Duration }

// timeGraph captures `calls` exchanges of each rank in a graph and times its replays.
func (w *world) timeGraph(c *call, calls, replays int) timing {
	type state struct {
		g  cuda.Graph
		x  cuda.GraphExec
		ev []cuda.Event
		d  []time.Duration
	}
	all := make([]state, w.size)
	ready := make(chan struct{})
	var armed sync.WaitGroup
	armed.Add(w.size)
	go func() { armed.Wait(); close(ready) }()
	w.each(func(k *rank) {
		st := &all[k.id]
		must := func(err error) {
			if err != nil {
				panic(err)
			}
		}
		var err error
		must(k.ctx.BeginCapture(k.s, cuda.RelaxedCapture))
		x := w.exchange(c, k.id)
		for range calls {
			must(k.p.submit(uintptr(k.s), x))
		}
		st.g, err = k.ctx.EndCapture(k.s)
		must(err)
		st.x, err = k.ctx.Instantiate(st.g)
		must(err)
		st.ev = make([]cuda.Event, replays+1)
		for i := range st.ev {
			st.ev[i], err = k.ctx.NewEvent(true)
			must(err)
		}
		armed.Done()
		<-ready
		for range 3 {
			must(k.ctx.LaunchGraph(st.x, k.s))
		}
		must(k.ctx.Record(st.ev[0], k.s))
		for i := range replays {
			must(k.ctx.LaunchGraph(st.x, k.s))
			must(k.ctx.Record(st.ev[i+1], k.s))
		}
		must(k.ctx.SynchronizeStream(k.s))
		for i := range replays {
			d, err := k.ctx.Elapsed(st.ev[i], st.ev[i+1])
			must(err)
			st.d = append(st.d, d/time.Duration(calls))
		}
		for _, e := range st.ev {
			must(k.ctx.DestroyEvent(e))
		}
		must(k.ctx.DestroyGraphExec(st.x))
		must(k.ctx.DestroyGraph(st.g))
	})
	var t timing
	for r := range all {
		d := all[r].d
		slices.Sort(d)
		t.median, t.min, t.max = max(t.median, d[len(d)/2]), max(t.min, d[0]), max(t.max, d[len(d)-1])
	}
	return t
}

// timeEager times calls enqueued one by one.
func (w *world) timeEager(c *call, calls int) timing {
	all := make([]time.Duration, w.size)
	ready := make(chan struct{})
	var armed sync.WaitGroup
	armed.Add(w.size)
	go func() { armed.Wait(); close(ready) }()
	w.each(func(k *rank) {
		must := func(err error) {
			if err != nil {
				panic(err)
			}
		}
		x := w.exchange(c, k.id)
		from, err := k.ctx.NewEvent(true)
		must(err)
		to, err := k.ctx.NewEvent(true)
		must(err)
		armed.Done()
		<-ready
		for range 10 {
			must(k.p.submit(uintptr(k.s), x))
		}
		must(k.ctx.Record(from, k.s))
		for range calls {
			must(k.p.submit(uintptr(k.s), x))
		}
		must(k.ctx.Record(to, k.s))
		must(k.ctx.SynchronizeStream(k.s))
		d, err := k.ctx.Elapsed(from, to)
		must(err)
		all[k.id] = d / time.Duration(calls)
		must(k.ctx.DestroyEvent(from))
		must(k.ctx.DestroyEvent(to))
	})
	m := slices.Max(all)
	return timing{m, m, m}
}

func size(b int64) string {
	switch {
	case b >= 1<<20:
		return strconv.FormatInt(b>>20, 10) + "MiB"
	case b >= 1<<10:
		return strconv.FormatInt(b>>10, 10) + "KiB"
	}
	return strconv.FormatInt(b, 10) + "B"
}

// zipf is bytes a rank split over ranks by popularity 1/(k+1), in units of 128 bytes.
func zipf(n int, bytes int64) [][]int64 {
	rng := rand.New(rand.NewPCG(20260217, 1))
	perm := rng.Perm(n)
	var sum float64
	for i := range n {
		sum += 1 / float64(i+1)
	}
	m := make([][]int64, n)
	for s := range m {
		m[s] = make([]int64, n)
		for d := range m[s] {
			m[s][d] = int64(float64(bytes)/sum/float64(perm[d]+1)) / 128 * 128
		}
	}
	return m
}

// busiest is the bytes that cross the busiest port.
func busiest(m [][]int64) int64 {
	var most int64
	for i := range m {
		var out, in int64
		for j := range m {
			if i != j {
				out += m[i][j]
				in += m[j][i]
			}
		}
		most = max(most, out, in)
	}
	return most
}

// TestMeasure prints times and link bandwidths of variants. Every variant is checked on every byte in the same run.
func TestMeasure(t *testing.T) {
	if *measure == "" {
		t.Skip("needs -measure")
	}
	n := *ranks
	w := newWorld(t, n, 2*(*maxMiB)<<20+64<<20, kernels.ExchangeBounds{Stripes: *stripes, Slots: *slots, SlotBytes: *slotKiB << 10, PacketBytes: *packetKB << 10})
	defer w.close()
	run := func(name string, c *call, graph bool, calls, replays int) {
		if *only != "" && !strings.Contains(name, *only) {
			return
		}
		w.prepare(c)
		w.launch(c)
		w.sync()
		w.verifyDevice(c, name)
		var x timing
		if graph {
			x = w.timeGraph(c, calls, replays)
		} else {
			x = w.timeEager(c, calls)
		}
		for r, k := range w.ranks {
			require.NoError(t, k.p.err(), "%s: rank %d", name, r)
		}
		w.prepare(c)
		w.launch(c)
		w.sync()
		w.verifyDevice(c, name)
		hot := float64(busiest(c.m))
		fmt.Printf("%-44s %9.2f us (%.2f to %.2f) %7.1f GB/s\n", name, float64(x.median)/1e3, float64(x.min)/1e3, float64(x.max)/1e3, hot/float64(x.median))
	}
	for _, what := range strings.Split(*measure, ",") {
		switch what {
		case "launch":
			k := w.ranks[0]
			for _, v := range []struct {
				name  string
				bytes int
				grid  uint32
				flags cuda.LaunchFlags
			}{
				{"empty", 32, 1, 0}, {"empty", 32, 16, 0}, {"empty_many", 2752, 1, 0}, {"empty_many", 2752, 16, 0},
				{"empty", 32, 16, cuda.Programmatic}, {"empty_many", 2752, 16, cuda.Programmatic},
				{"empty_many", 2752, 16, cuda.RemoteDomain}, {"empty_many", 2752, 16, cuda.RemoteDomain | cuda.Programmatic},
				{"empty_many", 2752, 16, cuda.Cooperative},
			} {
				f, err := k.ctx.Function(k.verify, v.name)
				require.NoError(t, err)
				var b cuda.Batch
				for range 20 {
					b.Launch(0, cuda.Launch{Function: f, Grid: [3]uint32{v.grid, 1, 1}, Block: [3]uint32{512, 1, 1}, Flags: v.flags, Args: make([]byte, v.bytes)})
				}
				require.NoError(t, k.ctx.BeginCapture(k.s, cuda.RelaxedCapture))
				require.NoError(t, k.ctx.Submit(&b, uintptr(k.s)))
				g, err := k.ctx.EndCapture(k.s)
				require.NoError(t, err)
				x, err := k.ctx.Instantiate(g)
				require.NoError(t, err)
				from, err := k.ctx.NewEvent(true)
				require.NoError(t, err)
				to, err := k.ctx.NewEvent(true)
				require.NoError(t, err)
				for i := range 60 {
					if i == 10 {
						require.NoError(t, k.ctx.Record(from, k.s))
					}
					require.NoError(t, k.ctx.LaunchGraph(x, k.s))
				}
				require.NoError(t, k.ctx.Record(to, k.s))
				require.NoError(t, k.ctx.SynchronizeStream(k.s))
				d, err := k.ctx.Elapsed(from, to)
				require.NoError(t, err)
				fmt.Printf("launch %s of %d bytes, %d blocks, flags %d: %.2f us\n", v.name, v.bytes, v.grid, v.flags, float64(d)/1e3/1000)
			}
		case "packet":
			for _, b := range []int64{8 << 10, 64 << 10, 128 << 10, 512 << 10, 2 << 20} {
				for _, blocks := range []int{0, 16, 32, 48} {
					c := w.newCall(uniform(n, b/int64(n)), none)
					c.schedule.Blocks = blocks
					run(fmt.Sprintf("packet %s blocks %d", size(b), blocks), c, true, 20, 30)
				}
			}
		case "eager":
			for _, b := range []int64{8 << 10, 512 << 10, 2 << 20} {
				c := w.newCall(uniform(n, b/int64(n)), none)
				run(fmt.Sprintf("eager %s", size(b)), c, false, 300, 1)
			}
		case "large", "huge", "zipf":
			sizes := []int64{2 << 20, 8 << 20, 32 << 20, 128 << 20}
			if what == "huge" {
				sizes = []int64{512 << 20}
			}
			for _, b := range sizes {
				if b > *maxMiB<<20 || what == "zipf" && b > *maxMiB<<19 {
					continue
				}
				m := uniform(n, b/int64(n))
				if what == "zipf" {
					m = zipf(n, b)
				}
				type variant struct {
					name    string
					inPlace bool
					s       kernels.Schedule
				}
				variants := []variant{
					{"copies", true, kernels.Schedule{Window: 1}},
					{"mesh", true, kernels.Schedule{}},
					{"ring", true, kernels.Schedule{Window: 1}},
					{"ring, 8 blocks", true, kernels.Schedule{Window: 1, Blocks: 8}},
					{"ring at 335", true, kernels.Schedule{Window: 1, Rate: 335}},
					{"ring at 345", true, kernels.Schedule{Window: 1, Rate: 345}},
					{"ring at 355", true, kernels.Schedule{Window: 1, Rate: 355}},
					{"ring at 365", true, kernels.Schedule{Window: 1, Rate: 365}},
					{"staged mesh", false, kernels.Schedule{}},
					{"staged ring", false, kernels.Schedule{Window: 1}},
					{"staged ring at 345", false, kernels.Schedule{Window: 1, Rate: 345}},
					{"staged ring at 355", false, kernels.Schedule{Window: 1, Rate: 355}},
					{"staged ring at 355, apart", false, kernels.Schedule{Window: 1, Rate: 355, CopyBlocks: *stripes}},
					{"staged ring at 365, apart", false, kernels.Schedule{Window: 1, Rate: 365, CopyBlocks: *stripes}},
				}
				for _, v := range variants {
					c := w.newCall(m, none)
					c.inPlace, c.schedule, c.copies = v.inPlace, v.s, strings.HasPrefix(v.name, "copies")
					calls := int(max(1, min(10, (256<<20)/b)))
					run(fmt.Sprintf("%s %s %s", what, size(b), v.name), c, true, calls, 20)
				}
			}
		default:
			t.Fatalf("unknown -measure %q", what)
		}
	}
}
