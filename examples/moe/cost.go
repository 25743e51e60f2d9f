package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// wide is how many ranks a run can have before it is worth saying what they cost.
const wide = 32

// cost is what a run takes, in round numbers.
type cost struct {
	memory    int64 // bytes
	step, all time.Duration
}

// The numbers of a cost, measured with the default model on 2 processors, up to 1000 ranks.
const (
	costBase    = 150 << 20 // the program with its text
	costRank    = 1 << 20   // a rank's part of the model
	costProcess = 110 << 20 // a rank that is a process
	costPair    = 14 << 10  // what two ranks keep for each other
	pairTime    = 16 * time.Microsecond
	flopsASec   = 60e9 // of one processor
)

func (c config) cost() cost {
	pairs, cpus := int64(c.Ranks)*int64(c.Ranks), float64(runtime.NumCPU())
	weights := int64(c.Layers) * int64(c.Experts) * int64(expertSize(c))
	t := cost{memory: costBase + int64(c.Ranks)*costRank + pairs*costPair + 16*weights}
	if c.Procs {
		t.memory += int64(c.Ranks) * costProcess
	}
	perToken := c.Hidden*(c.Context*c.Embed+256) + c.Layers*c.TopK*expertSize(c)
	flops := 6 * float64(perToken) * float64(c.Batch) // forward and backward are three products of two operations a weight
	step := (flops/flopsASec + float64(c.Layers)/2*float64(pairs)*pairTime.Seconds()) / cpus
	forward := float64(c.heldoutPlaces())/float64(c.Batch) + float64(sampled(step)) // of the report
	t.step = time.Duration(step * 1e9)
	t.all = time.Duration((step * (float64(c.Steps) + 0.4*forward)) * 1e9)
	return t
}

// affordable refuses what this machine has no memory for.
func (c config) affordable() error {
	if free := freeMemory(); free > 0 && c.cost().memory > free {
		return usagef("-ranks %d need about %s of memory and %s are free: use fewer ranks", c.Ranks, size(c.cost().memory), size(free))
	}
	return nil
}

// freeMemory is how many bytes programs can still have, 0 where nobody knows.
func freeMemory() int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			kB, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			if err != nil {
				return 0
			}
			free := kB << 10
			if b, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil { // of a container
				if most, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil {
					free = min(free, most)
				}
			}
			return free
		}
	}
	return 0
}

// size writes a number of bytes for a person.
func size(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	default:
		return fmt.Sprintf("%d MiB", n>>20)
	}
}

// rounded writes a time for a person.
func rounded(d time.Duration) string {
	switch {
	case d >= 100*time.Hour:
		return fmt.Sprintf("%.0f days", d.Hours()/24)
	case d >= 2*time.Hour:
		return fmt.Sprintf("%.0f h", d.Hours())
	case d >= 2*time.Minute:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d >= time.Second:
		return fmt.Sprintf("%.0f s", d.Seconds())
	}
	return fmt.Sprintf("%d ms", d.Milliseconds())
}
