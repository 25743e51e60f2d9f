package config

import (
	"bufio"
	"cmp"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/switchyard-moe/switchyard/examples/moe/words"
)

// wide is how many ranks a run can have before it is worth saying what they cost.
const wide = 32

// cost is what a run takes, in round numbers.
type cost struct {
	memory    float64 // bytes
	step, all time.Duration
}

// large says whether a cost is worth saying.
func (t cost) large() bool { return t.step >= time.Second || t.memory >= 2<<30 }

// The numbers of a cost, measured with the default model on 2 processors, up to 1000 ranks.
const (
	costBase    = 150 << 20 // the program with its text
	costRank    = 1 << 20   // a rank without its part of the model
	costProcess = 110 << 20 // a rank that is a process
	costPair    = 14 << 10  // what two ranks keep for each other
	pairTime    = 16 * time.Microsecond
	flopsASec   = 60e9 // of one processor
)

func (c Config) cost() cost {
	var t cost
	for _, p := range c.memory() {
		t.memory += p.bytes
	}
	pairs, cpus := float64(c.Ranks)*float64(c.Ranks), float64(runtime.NumCPU())
	perToken := c.Hidden*(c.Context*c.Embed+256) + c.Layers*c.TopK*c.ExpertSize()
	flops := 6 * float64(perToken) * float64(c.Batch) // forward and backward are three products of two operations a weight
	step := (flops/flopsASec + float64(c.Layers)/2*pairs*pairTime.Seconds()) / cpus
	forward := float64(c.HeldoutPlaces())/float64(c.Batch) + float64(Sampled(step, false)) // of the report
	t.step = time.Duration(step * 1e9)
	t.all = time.Duration((step * (float64(c.Steps) + 0.4*forward)) * 1e9)
	return t
}

// part is memory for one thing.
type part struct {
	name  string
	bytes float64
}

// memory is what the ranks of a run take together. Flags may be absurd, so it counts in floats, which do not overflow.
func (c Config) memory() []part {
	const (
		element = 4           // bytes of a float32
		state   = 4 * element // a weight, its gradient and two moments
		slack   = 1.25        // see nn.Grow
	)
	ranks, pairs := float64(c.Ranks), float64(c.Ranks)*float64(c.Ranks)
	experts, topk, layers := float64(c.Experts), float64(c.TopK), float64(c.Layers)
	hidden, inner, batch := float64(c.Hidden), float64(c.Inner), float64(c.Batch)
	window := float64(c.Context) * float64(c.Embed)

	models := 1.0
	if c.Heals() {
		models = 2 // the old one is there while the new one is made
	}
	// The model and its layers keep this of a token, and experts of a visit.
	token := 2*window + 5*hidden + 256 + layers*(4*hidden+2*experts+3*topk)
	visits := batch * topk * layers
	parts := []part{
		{"the program and its text", costBase},
		{"the dense part of the model, a copy on every rank", models * ranks * state * c.DenseSize()},
		{"the experts", models * state * layers * experts * 2 * hidden * inner},
		{"the activations of a batch", slack*element*(batch*token+visits*3*inner) + batch*(float64(c.Context)+8*ranks)},
		{"the exchange buffers of a batch", element * visits * 3 * hidden}, // rows, what experts make of them, and what is on its way
		{"what ranks keep for each other", ranks*costRank + pairs*(costPair+8*experts) + 20*ranks*layers*experts},
	}
	if c.Procs {
		parts = append(parts, part{"the processes of the ranks", ranks * costProcess})
	}
	return parts
}

// DenseSize is the sum of stageSizes, of flags that may be absurd.
func (c Config) DenseSize() float64 {
	hidden, window := float64(c.Hidden), float64(c.Context)*float64(c.Embed)
	input, output := window*hidden+hidden+256*float64(c.Embed), hidden*256+256+hidden
	return input + output + float64(c.Layers)*(hidden*float64(c.Experts)+hidden)
}

// Affordable refuses what this machine has no memory for.
func (c Config) Affordable() error { return c.fits(freeMemory()) }

// fits refuses a run that needs more bytes than are free, where that number is known. The error names the largest part and the flag to lower.
func (c Config) fits(free int64) error {
	need := c.cost().memory
	if free <= 0 || need <= float64(free) {
		return nil
	}
	most := slices.MaxFunc(c.memory(), func(a, b part) int { return cmp.Compare(a.bytes, b.bytes) })
	return Usagef("this run needs about %s of memory and %s are free; the most, %s, is for %s: lower -%s",
		words.Bytes(need), words.Bytes(float64(free)), words.Bytes(most.bytes), most.name, c.culprit())
}

// culprit is the flag that saves most memory when it has its default, or half its value if that is less.
func (c Config) culprit() (name string) {
	usual, least := Defaults(), math.Inf(1)
	for _, f := range []struct {
		name     string
		v, usual *int
	}{
		{"ranks", &c.Ranks, &usual.Ranks}, {"layers", &c.Layers, &usual.Layers}, {"experts", &c.Experts, &usual.Experts},
		{"topk", &c.TopK, &usual.TopK}, {"hidden", &c.Hidden, &usual.Hidden}, {"inner", &c.Inner, &usual.Inner},
		{"context", &c.Context, &usual.Context}, {"embed", &c.Embed, &usual.Embed}, {"batch", &c.Batch, &usual.Batch},
	} {
		was := *f.v
		*f.v = max(1, min(*f.usual, was/2))
		if m := c.cost().memory; m < least {
			name, least = f.name, m
		}
		*f.v = was
	}
	return name
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

// ExpertSize is the number of parameters of an expert.
func (c Config) ExpertSize() int { return 2 * c.Hidden * c.Inner }

// How many bytes a model writes of its own.
const (
	sampleBytes = 240
	sampleLeast = 16
	sampleTime  = 30 // seconds of steps; a byte takes a tenth of a step
	stoppedTime = 3  // the same where somebody waits for the end
)

// Sampled is how many bytes a model writes for the report. pace is the seconds that a step takes, stopped says that somebody waits.
func Sampled(pace float64, stopped bool) int {
	seconds := float64(sampleTime)
	if stopped {
		seconds = stoppedTime
	}
	if pace <= 0 {
		return sampleBytes
	}
	return int(min(max(seconds/pace, sampleLeast), sampleBytes))
}
