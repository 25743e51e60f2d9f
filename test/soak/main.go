// Soak has 4 ranks, a process each, work for as long as one likes while their processes are killed, stopped, hung and replaced.
//
//	go run ./test/soak -minutes 30
//	go run ./test/soak -device cuda -kills 100
//	go run ./test/soak -masks -kills 200
//
// The ranks make calls that they draw together: exchanges, reductions, dispatches and combines of random sizes, by changing
// algorithms, into memory in and outside the heap, with splits that the host knows and splits in memory of the device; allocations,
// growth, subgroups, verification, calls that some refuse or give up; on the host messages with tags, also from any rank, and puts and
// gets with signals. Every byte is checked. When a rank is lost the others have to
// name it, shrink, reopen and go on, and let the process in that is started in its place. The holdings of survivors, memory,
// descriptors, goroutines and mappings, has to stay where it was. Between most losses all ranks make calls for a while; every fourth
// comes at once.
//
// With -masks ranks make dispatches and combines alone, are killed until one of them is left, and begin again with a fresh group. The others go on in
// the same group, with tokens at the copies of experts. Rows, counts and sums are checked, and how long after a kill the calls under way have
// ended is told.
//
// It ends with an error at the first wrong byte, wrong name, hang or leak, and prints what has been done.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"
)

func main() {
	if spec := os.Getenv(workerEnv); spec != "" {
		os.Exit(work(spec))
	}
	if spec := os.Getenv(maskedEnv); spec != "" {
		os.Exit(workMasked(spec))
	}
	var o options
	flag.Float64Var(&o.Minutes, "minutes", 0, "how long; 0: 1, and 6 s more for each of -kills")
	flag.IntVar(&o.Kills, "kills", 0, "end after this number of kills, when all ranks are there again")
	on := flag.String("device", "host", "where the ranks are: host or cuda, where they share GPUs if there are fewer than ranks")
	flag.IntVar(&o.Ranks, "ranks", 4, "how many ranks, 3 at least")
	flag.Uint64Var(&o.Seed, "seed", uint64(time.Now().UnixNano()), "what everything is drawn from")
	flag.DurationVar(&o.Pause, "pause", time.Second, "how long the ranks are left in peace at most, unless they have not made -calls")
	flag.IntVar(&o.Calls, "calls", 50, "how many calls all ranks make before the next harm, in most cases")
	flag.StringVar(&o.Harm, "harm", "", "only this: kill, stop (for long), blink (stop for a moment), hang or abort")
	masks := flag.Bool("masks", false, "kill ranks of dispatchers with masks, on the host, until -kills (200) are dead: the others go on in the same group")
	flag.StringVar(&o.Only, "only", "", "calls of this kind alone: "+onlyMessages+", on the host")
	flag.BoolVar(&o.Verbose, "v", false, "show what the ranks say")
	flag.Parse()
	if !slices.Contains([]string{"", "kill", "stop", "blink", "hang", "abort"}, o.Harm) {
		fmt.Fprintf(os.Stderr, "soak: -harm is %q\n", o.Harm)
		os.Exit(2)
	}
	if o.Only != "" && (o.Only != onlyMessages || *on != "host") {
		fmt.Fprintf(os.Stderr, "soak: -only is %q on %s, want %s on host\n", o.Only, *on, onlyMessages)
		os.Exit(2)
	}
	if o.Minutes == 0 {
		o.Minutes = 1 + float64(o.Kills)/10
	}
	if o.Ranks < 3 || o.Ranks > 64 || o.Minutes < 0 || o.Kills < 0 || o.Pause < 0 || o.Calls < 0 {
		fmt.Fprintf(os.Stderr, "soak: %d ranks for %v minutes, %d kills, pauses of %v, %d calls; want 3 to 64 ranks and nothing negative\n",
			o.Ranks, o.Minutes, o.Kills, o.Pause, o.Calls)
		os.Exit(2)
	}
	switch *on {
	case "host":
		if *masks {
			os.Exit(withMasks(o))
		}
	case "cuda":
		var err error
		if o.GPUs, err = gpus(); err != nil {
			fmt.Fprintf(os.Stderr, "soak: %v\n", err)
			os.Exit(2)
		}
	default:
		fmt.Fprintf(os.Stderr, "soak: -device is %q\n", *on)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := &soak{options: o, rng: rand.New(rand.NewPCG(o.Seed, 1)), began: time.Now()}
	err := s.run(ctx)
	fmt.Println(s.report())
	if err != nil {
		fmt.Fprintf(os.Stderr, "soak: seed %d: %v\n", o.Seed, err)
		os.Exit(1)
	}
}

// withMasks is the exit code of maskSoak.
func withMasks(o options) int {
	if o.Kills == 0 {
		o.Kills = 200
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := &maskSoak{options: o}
	err := s.run(ctx, rand.New(rand.NewPCG(o.Seed, 1)).IntN)
	fmt.Println(s.report())
	if err != nil {
		fmt.Fprintf(os.Stderr, "soak: seed %d: %v\n", o.Seed, err)
		return 1
	}
	return 0
}
