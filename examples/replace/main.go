// Command replace shows a dispatcher that goes on while a rank is killed and a fresh process takes its place: no other rank makes a new group,
// or opens anything again.
//
//	go run ./examples/replace
//
// Without RANK it starts the ranks as processes of its own, kills one of them in mid-step and starts another.
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

const (
	ranks  = 4
	hidden = 8
	victim = 2 // not 0, which tells the others when to end
)

func main() {
	log.SetFlags(0)
	if os.Getenv("RANK") != "" {
		work(context.Background())
		return
	}
	meet, place := must(comm.NewID("")), must(comm.NewID(""))
	processes := make([]*process, ranks)
	for r := range processes {
		processes[r] = start(r, meet, "")
	}
	for _, p := range processes {
		p.await("without ranks []") // it has made a step
	}
	fmt.Println("four ranks are in: killing rank", victim)
	check(processes[victim].cmd.Process.Kill())
	_ = processes[victim].cmd.Wait() // it was killed
	processes[0].await("without ranks [2]")
	fmt.Println("the others go on, its experts' tokens go to the copies; a fresh process is started")
	fmt.Fprintln(processes[1].in, "replace", place) // any rank that lives will do
	processes[victim] = start(victim, place, "yes")
	for _, p := range processes {
		p.await("without ranks []")
	}
	fmt.Println("the fresh process is in, and all ranks have each other's tokens")
	fmt.Fprintln(processes[0].in, "end")
	for _, p := range processes {
		for p.out.Scan() {
		}
		check(p.cmd.Wait())
	}
}

// work is the life of a rank.
func work(ctx context.Context) {
	conf := must(comm.FromEnv())
	conf.Replaceable, conf.Addr, conf.Replaces = true, os.Getenv("MEET"), os.Getenv("REPLACES") != ""
	g := must(comm.Join(ctx, conf)) // in the place of the lost rank, where Replaces is set
	heap := must(memory.NewHeap(ctx, g, device.Host(), memory.Options{}))
	d := must(dispatch.New(ctx, heap, dispatch.Options{
		Experts: ranks, TopK: ranks, Hidden: hidden, MaxTokens: 2, Masks: true, Sources: true,
		Placement: &dispatch.Placement{Ranks: [][]int{{0, 1}, {1, 2}, {2, 3}, {3, 0}}}, // each expert is on two ranks
	}))
	if conf.Replaces {
		must(d.Unmask(ctx)) // returns behind a combine of the others
	}
	var ends atomic.Bool
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			at, asked := strings.CutPrefix(in.Text(), "replace ")
			if !asked {
				ends.Store(true)
				continue
			}
			c := conf
			c.Addr = at
			check(g.Replace(ctx, victim, c)) // while this rank makes its steps
		}
	}()
	said := ""
	for over := false; !over; {
		over = step(d, g.Rank() == 0 && ends.Load())
		if state := fmt.Sprint("without ranks ", must(d.Masked())); state != said {
			said = state
			fmt.Println(state)
		}
	}
	check(d.Close(ctx))
	check(heap.Close(ctx))
	check(g.Close())
}

// step sends two tokens to all experts, which return them as they are. It reports whether rank 0 has said that this is the last one.
func step(d *dispatch.Dispatcher, last bool) (over bool) {
	x := memory.NewMatrix[float32](2, hidden)
	experts := memory.NewMatrix[int32](2, ranks)
	for t := range 2 {
		for e := range ranks {
			experts.Row(t)[e] = int32(e)
		}
		if x.Row(t)[0] = 1; last {
			x.Row(t)[0] = 2
		}
	}
	before := must(d.Masked())
	h := must(d.Dispatch(nil, dispatch.Tokens{X: x.View(), Experts: experts.View()}))
	y := memory.NewMatrix[float32](2, hidden)
	rows := must(memory.MatrixOf[float32](h.Rows(), hidden))
	offsets := memory.Of[int32](h.Offsets())
	for i, n := range memory.Of[int32](h.Counts()) {
		for row := offsets[i]; row < offsets[i]+n; row++ {
			over = over || rows.Row(int(row))[0] == 2
		}
	}
	check(d.Combine(nil, y.View(), h.Rows(), h, dispatch.CombineOptions{Weighting: dispatch.Unweighted}))
	h.Release()
	if after := must(d.Masked()); slices.Equal(before, after) && y.Row(0)[0] != ranks*x.Row(0)[0] {
		log.Fatalf("without ranks %v a token came back from %v experts", after, y.Row(0)[0]/x.Row(0)[0])
	}
	time.Sleep(time.Millisecond)
	return over
}

// process is a rank.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func start(rank int, at comm.ID, replaces string) *process {
	p := &process{cmd: exec.Command(must(os.Executable()))}
	p.cmd.Env = append(os.Environ(), fmt.Sprint("RANK=", rank), fmt.Sprint("WORLD_SIZE=", ranks), fmt.Sprint("LOCAL_RANK=", rank), "MEET="+string(at), "REPLACES="+replaces)
	p.cmd.Stderr, p.cmd.SysProcAttr = os.Stderr, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.in = must(p.cmd.StdinPipe())
	p.out = bufio.NewScanner(must(p.cmd.StdoutPipe()))
	check(p.cmd.Start())
	return p
}

// await reads until the process says what is awaited.
func (p *process) await(what string) {
	for p.out.Scan() {
		if p.out.Text() == what {
			return
		}
	}
	log.Fatalf("a process has ended before it said %q", what)
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
