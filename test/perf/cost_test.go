package main

import (
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
)

var cost = flag.Int("cost", 0, "measure what notes of calls and people who look on cost, in `N` pairs of blocks")

// costOf is the median, over pairs of blocks, of the time of a call with something on over that with it off. Blocks alternate, and which of a
// pair comes first does too. The quartiles say how far pairs are apart.
type costOf struct {
	with, without    time.Duration
	ratio, low, high float64
	// processor is the least processor time of a call's goroutine over all blocks, with and without: other programs on the machine add to a
	// call's time, and hardly to that.
	processor [2]time.Duration
	// differs are the quartiles, over pairs of blocks, of the difference of their processor times for a call.
	differs [3]time.Duration
}

// more is the processor time that a call takes more with it on.
func (c costOf) more() time.Duration { return c.processor[0] - c.processor[1] }

// processorTime is what this thread has taken of a processor.
func processorTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return time.Duration(t.Nano())
}

// pairs measures call on every rank of a world. set turns what is measured on and off, on rank 0, while no rank calls.
func pairs(r *worldtest.Rank, n, calls int, set func(on bool), call func()) (c costOf) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c.processor = [2]time.Duration{math.MaxInt64, math.MaxInt64}
	block := func(on bool) (a, processor time.Duration) {
		if r.Rank() == 0 {
			set(on)
		}
		r.Barrier()
		for range calls / 10 {
			call()
		}
		from, had := time.Now(), processorTime()
		for range calls {
			call()
		}
		took, least := time.Since(from), &c.processor[1]
		if on {
			least = &c.processor[0]
		}
		processor = (processorTime() - had) / time.Duration(calls)
		*least = min(*least, processor)
		r.Barrier()
		return took / time.Duration(calls), processor
	}
	var ratios []float64
	var with, without, differs []time.Duration
	for i := range n {
		first := i%2 == 0
		a, p := block(first)
		b, q := block(!first)
		if !first {
			a, b, p, q = b, a, q, p
		}
		differs = append(differs, p-q)
		with, without, ratios = append(with, a), append(without, b), append(ratios, float64(a)/float64(b))
	}
	slices.Sort(ratios)
	slices.Sort(with)
	slices.Sort(differs)
	c.differs = [3]time.Duration{differs[n/4], differs[n/2], differs[3*n/4]}
	slices.Sort(without)
	c.with, c.without, c.ratio, c.low, c.high = with[n/2], without[n/2], ratios[n/2], ratios[n/4], ratios[3*n/4]
	return c
}

func (c costOf) String() string {
	return fmt.Sprintf("median %.4f of pairs, quartiles %.4f and %.4f; %v with, %v without; processor at least %v with, %v without, quartiles of the difference %v", c.ratio, c.low,
		c.high, c.with, c.without, c.processor[0], c.processor[1], c.differs)
}

// cases are an exchange of 8 KiB a pair, and a dispatch of 128 tokens with its combine.
func cases(r *worldtest.Rank) (names []string, calls []func(), done func()) {
	n := r.Size()
	x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
	r.Must(err)
	const tokens, hidden, experts, topK = 128, 1024, 8, 2
	d, err := dispatch.New(r.Ctx, r.Heap, dispatch.Options{Experts: experts, TopK: topK, Hidden: hidden, MaxTokens: tokens, Layer: "cost"})
	r.Must(err)
	sp := &alltoallv.Splits{Send: slices.Repeat([]int64{8 << 10}, n), Recv: slices.Repeat([]int64{8 << 10}, n)}
	to, from := memory.Host(make([]byte, n*8<<10)), memory.Host(make([]byte, n*8<<10))
	in, out := memory.NewMatrix[float32](tokens, hidden), memory.NewMatrix[float32](tokens, hidden)
	chosen, weights := memory.NewMatrix[int32](tokens, topK), memory.NewMatrix[float32](tokens, topK)
	for t := range tokens {
		for k := range topK {
			chosen.Row(t)[k], weights.Row(t)[k] = int32((t*topK+k)%experts), 0.5
		}
	}
	exchange := func() { r.Must(x.Exchange(nil, to, from, sp)) }
	layer := func() {
		h, err := d.Dispatch(nil, dispatch.Tokens{X: in.View(), Experts: chosen.View(), Weights: weights.View()})
		r.Must(err)
		rows, err := memory.MatrixOf[float32](h.Rows(), hidden)
		r.Must(err)
		r.Must(d.Combine(nil, out.View(), rows.View(), h, dispatch.CombineOptions{}))
		h.Release()
	}
	return []string{"8 KiB a pair, exchange", "128 tokens, dispatch and combine"}, []func(){exchange, layer}, func() {
		r.Must(x.Close(r.Ctx))
		r.Must(d.Close(r.Ctx))
	}
}

// costs measures all cases on ranks of this process, and returns what rank 0 saw.
func costs(t *testing.T, ranks int, calls []int, set func(on bool)) (all []costOf) {
	if *cost == 0 {
		t.Skip("needs -cost N, and a quiet machine")
	}
	worldtest.Local(t, ranks, 64<<20, func(r *worldtest.Rank) {
		names, call, done := cases(r)
		for i, name := range names {
			c := pairs(r, *cost, calls[i], set, call[i])
			if r.Rank() == 0 {
				all = append(all, c)
				t.Logf("%s: %v", name, c)
			}
		}
		r.Barrier()
		if r.Rank() == 0 {
			set(false)
		}
		r.Barrier()
		done()
	})
	return all
}

// Notes of calls, with metrics that are written once a second, cost at most 0.3 us of the host's time a call. One rank waits for nobody, so its
// processor time says what a note takes; a dispatch takes so much of it that two notes are less than its noise on a busy machine.
func TestCostOfNotes(t *testing.T) {
	var on atomic.Bool
	ended, stop := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Second):
				if on.Load() {
					_ = observe.WriteMetrics(io.Discard, observe.Snapshot(), observe.OpenMetrics)
				}
			}
		}
	}()
	defer func() { close(stop); <-ended }()
	set := func(notes bool) {
		on.Store(notes)
		rest(!notes)
	}
	costs(t, 2, []int{400, 20}, set) // whose waits are as long as the machine is busy
	exchanges := costs(t, 1, []int{4000, 200}, set)[0]
	require.LessOrEqual(t, exchanges.differs[1], mostOfANote)
}

const mostOfANote = 300 * time.Nanosecond

// rest has all ranks note no calls, or note them again.
func rest(rests bool) {
	for _, n := range flight.Ranks() {
		n.Rest(rests)
	}
}

// A note stays within its bound of the host's time, and no call allocates, also those of a layer whose tokens are told by expert.
func TestNotesAreCheap(t *testing.T) {
	if proctest.Race {
		t.Skip("the race detector takes longer than what is measured")
	}
	worldtest.Local(t, 1, 64<<20, func(r *worldtest.Rank) {
		_, call, done := cases(r)
		for _, f := range call {
			f()
			require.Zero(r.T, testing.AllocsPerRun(50, f))
		}
		var c costOf
		for range 5 { // others on the machine only make it longer
			if c = pairs(r, 20, 500, func(notes bool) { rest(!notes) }, call[0]); c.more() <= mostOfANote {
				break
			}
		}
		require.LessOrEqual(r.T, c.more(), mostOfANote, "%v", c)
		rest(false)
		done()
	})
}

// The time of a processor for one scrape.
func BenchmarkScrape(b *testing.B) {
	worldtest.Local(b, 2, 64<<20, func(r *worldtest.Rank) {
		_, call, done := cases(r)
		for _, f := range call {
			f()
		}
		r.Barrier()
		if r.Rank() == 0 {
			for b.Loop() {
				if err := observe.WriteMetrics(io.Discard, observe.Snapshot(), observe.OpenMetrics); err != nil {
					b.Error(err)
				}
			}
		}
		r.Barrier()
		done()
	})
}

const attackEnv = "SWITCHYARD_PERF_ATTACK"

// Another process of this user holds 1,000 connections to the socket of the ranks' process, of which a part asks for dumps and reads none, and
// sends 100 hostile requests a second. On 2 cores its own work is part of what is measured.
func TestCostOfHostileRequests(t *testing.T) {
	var attacker *exec.Cmd
	end := func() {
		if attacker != nil {
			_ = attacker.Process.Kill()
			_ = attacker.Wait()
			attacker = nil
		}
	}
	defer end()
	costs(t, 2, []int{10000, 300}, func(on bool) {
		end()
		if !on {
			return
		}
		attacker = exec.Command(os.Args[0], "-test.run", "^TestPlayAttacker$", "-test.timeout", "60s")
		attacker.Env = append(os.Environ(), fmt.Sprintf("%s=@switchyard-status-%d-%d", attackEnv, os.Geteuid(), os.Getpid()))
		out, err := attacker.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, attacker.Start())
		_, err = io.ReadFull(out, make([]byte, len("ready\n")))
		require.NoError(t, err)
	})
}

// TestPlayAttacker is that process.
func TestPlayAttacker(t *testing.T) {
	name := os.Getenv(attackEnv)
	if name == "" {
		t.Skip("is a part of another test")
	}
	var held []net.Conn
	for i := range 1000 {
		c, err := net.DialTimeout("unix", name, time.Second)
		if err != nil {
			continue
		}
		if i%10 == 0 {
			_, _ = io.WriteString(c, "GET /dump HTTP/1.0\r\n\r\n")
		}
		held = append(held, c)
	}
	fmt.Println("ready")
	for i := 0; ; i++ {
		if c, err := net.DialTimeout("unix", name, 10*time.Millisecond); err == nil {
			_, _ = io.WriteString(c, []string{"\x00\xff\x00", "GET /" + strings.Repeat("x", 8<<10), "POST /state HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n", "GET /state HTTP/1.0\r\n\r\n"}[i%4])
			_ = held[i%len(held)].Close()
			held[i%len(held)] = c
		}
		time.Sleep(10 * time.Millisecond)
	}
}
