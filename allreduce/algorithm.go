package allreduce

import (
	"fmt"
	"iter"
	"math"
	"strings"

	"github.com/switchyard-moe/switchyard/internal/curve"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// way is one way for a call to travel: its algorithm and, on GPUs, the fields of kernels.Reduction with these names.
type way struct {
	algorithm           kernels.ReduceAlgorithm
	packets, pull, push bool
	plan                *plan.Checked // of kernels.Planned
}

func (w way) String() string {
	switch name := w.algorithm.String(); {
	case w.plan != nil:
		return name + " " + w.plan.Plan.Name
	case w.packets:
		return name + " packet"
	case w.pull:
		return name + " pull"
	case w.push:
		return name + " push"
	default:
		return name
	}
}

// option is the value of Options.Algorithm that leaves only this way, or this one and those that differ in how the data travels.
func (w way) option() string {
	if w.plan != nil {
		return w.plan.Plan.Name
	}
	return w.algorithm.String()
}

// serves reports whether a collective can be done this way. One step of packets is enough for half an all-reduce.
func (w way) serves(c kernels.Collective) bool {
	switch both := c == kernels.AllReduce; {
	case w.pull:
		return !c.Reduces()
	case w.push:
		return c.Reduces()
	case w.packets && w.algorithm == kernels.TwoShot:
		return both
	}
	return true
}

// throughMemory is the way that serves every call on GPUs.
var throughMemory = way{algorithm: kernels.TwoShot}

// The ways of the two engines. GPUs have no ring, because every pair of them has the same link.
var (
	hostWays = []way{{algorithm: kernels.OneShot}, {algorithm: kernels.TwoShot}, {algorithm: kernels.Ring}}
	gpuWays  = []way{
		{algorithm: kernels.OneShot, packets: true}, {algorithm: kernels.TwoShot, packets: true},
		throughMemory, {algorithm: kernels.TwoShot, pull: true}, {algorithm: kernels.TwoShot, push: true},
	}
)

// selector chooses the way of calls. Its fields and inputs are the same on all ranks, so all of them choose alike.
type selector struct {
	forced string // the name of an algorithm or a plan, or empty
	plans  []*plan.Checked
	gpu    bool
	bounds *kernels.ReduceBounds
	table  estimates // on GPUs
	byMulticast
}

// ways are those of a collective, plans among them. Only plans do an all-to-all.
func (s *selector) ways(c kernels.Collective) iter.Seq[way] {
	return func(yield func(way) bool) {
		all := hostWays
		if s.gpu {
			all = gpuWays
		}
		for _, w := range all {
			if c != kernels.AllToAll && w.serves(c) && !yield(w) {
				return
			}
		}
		for _, p := range s.plans {
			if string(p.Plan.Collective) == c.String() && !yield(way{algorithm: kernels.Planned, plan: p}) {
				return
			}
		}
	}
}

// choose sets the way of a call.
func (s *selector) choose(r *kernels.Reduction) error {
	planned := r.Call.Collective == kernels.AllToAll
	if s.bounds.Hosts != nil && !planned {
		s.set(r, way{algorithm: kernels.TwoShot})
		return nil
	}
	best, at, lowest := way{}, curve.Setting{}, math.Inf(1)
	forced := s.forces(&r.Call)
	for w := range s.ways(r.Call.Collective) {
		if forced != "" && forced != w.option() {
			continue
		}
		us, setting, _ := s.cost(r, w)
		untimed := (planned || forced != "") && best.plan == nil && w.plan != nil && unfit(w.plan, &r.Call) == ""
		if us < lowest || untimed {
			best, at, lowest = w, setting, us
		}
	}
	s.set(r, best)
	r.Blocks, r.Rate = 0, at.Rate
	if s.gpu {
		switch r.Blocks = at.SMs; {
		case at.SMs == 0:
			r.Blocks = packetBlocks(r)
		case best.plan == nil && !r.Call.Collective.Reduces() && linkBytes(r) >= manyGathered:
			r.Blocks = max(r.Blocks, gatherBlocks)
		}
		r.Blocks = max(1, min(r.Blocks, s.bounds.Blocks))
	}
	s.overrule(r)
	switch {
	case best.plan != nil:
		return nil
	case planned:
		return fmt.Errorf("allreduce: %v: no plan of %d does that: %w", r.Call, len(s.plans), ErrUnsupported)
	case math.IsInf(lowest, 1):
		c := s.bounds
		return invalid("%v, %d bytes for one peer: algorithm %q with OneShotBytes %d and SlotBytes %d cannot do that",
			r.Call, r.PushBytes(), s.forced, c.OneShotBytes, c.SlotBytes)
	}
	return nil
}

func (*selector) set(r *kernels.Reduction, w way) {
	r.Algorithm, r.Packets, r.Pull, r.Push, r.Plan = w.algorithm, w.packets, w.pull, w.push, w.plan
}

// A gather of manyGathered bytes from the peers or more takes at least gatherBlocks. Tables time symmetric outputs, where fewer fill the link.
// A rank does not know whether its peers' outputs are symmetric. Where they are not, the blocks copy out of staging, too: 512 MiB of 4 H200
// take 1718 us with 16 blocks, and 1271 with 64.
const (
	gatherBlocks = 64
	manyGathered = 4 << 20
)

// packetBlocks is the number of blocks that is fastest for a call by packets: on 2 H200 it grows as the square root of the bytes.
func packetBlocks(r *kernels.Reduction) int {
	return max(8, int(math.Sqrt(float64(r.Call.Count*r.Call.DType.Size())))/8)
}

// cost estimates the time of a call in microseconds, and the setting for it; +Inf means that it cannot travel this way. why is a reason in
// words.
func (s *selector) cost(r *kernels.Reduction, w way) (us float64, at curve.Setting, why string) {
	s.set(r, w)
	if w.plan != nil {
		us, why = planCost(r)
		return us, curve.Setting{SMs: planBlocks(r)}, why
	}
	if s.gpu {
		return s.gpuCost(r, w)
	}
	us, why = hostCost(r)
	return us, at, why
}

// Rough figures of the host device, measured on two cores with 2, 4 and 8 ranks: the cost of a signal to a peer and of its
// answer, the cost of another step, and the speed at which a core copies or adds. They only have to rank algorithms.
const (
	usSignal = 1.2
	usStep   = 1.5
	bytesPer = 10e3 // a microsecond
)

func hostCost(r *kernels.Reduction) (us float64, why string) {
	c, messages := r.Family, r.Messages()
	peers, bytes := float64(c.Size-1), float64(r.Call.Count*r.Call.DType.Size())
	switch {
	case r.Algorithm == kernels.OneShot:
		push := r.PushBytes()
		if push > c.OneShotBytes {
			return math.Inf(1), "more for one peer than OneShotBytes"
		}
		return usSignal*peers + (2*peers+1)*float64(push)/bytesPer, "one signal to each peer, and every rank reduces everything"
	case messages > kernels.MaxChunks:
		return math.Inf(1), "too many chunks of SlotBytes"
	case r.Algorithm == kernels.TwoShot:
		return usSignal*peers + usStep + 2*bytes/bytesPer, "every rank reduces its slice, then the slices are exchanged"
	default:
		wire := float64(r.Call.DType.PartialSize()) / float64(r.Call.DType.Size())
		return usSignal*peers + usStep*float64(messages) + (2+2*wire)*bytes/bytesPer, "one step after the other, between neighbours only"
	}
}

func (s *selector) gpuCost(r *kernels.Reduction, w way) (us float64, at curve.Setting, why string) {
	c, es := r.Family, r.Call.DType.Size()
	message := r.Longest() * es
	if r.Algorithm == kernels.OneShot {
		message = r.PushBytes()
	}
	switch {
	case !w.packets:
	case c.Size == 1:
		return math.Inf(1), at, "nobody to send packets to"
	case message > c.OneShotBytes:
		return math.Inf(1), at, "more for one peer than OneShotBytes"
	default:
		if why := s.noPackets(r, w); why != "" {
			return math.Inf(1), at, why
		}
	}
	us, at, ok := s.table.of(r, w)
	if !ok {
		return math.Inf(1), at, "the table does not have it"
	}
	switch both := r.Call.Collective == kernels.AllReduce; {
	case w.packets && both && r.Algorithm == kernels.OneShot:
		why = "data and signal in one word; every rank reduces everything"
	case w.packets && both:
		why = "data and signal in one word; every rank reduces its slice"
	case w.packets:
		why = "data and signal in one word"
	case w.push:
		why = "every rank writes what the others reduce into their staging"
	case both:
		why = "every rank reads its slice where it can be reached, reduces it, then hands it to all"
	case r.Call.Collective.Reduces():
		why = "every rank reads its slice where it can be reached"
	case w.pull:
		why = "slices are read where they can be reached"
	default:
		why = "slices are written where they can be reached"
	}
	return us, at, why
}

// Decision is the answer of Explain.
type Decision struct {
	// Algorithm is the chosen one: one-shot, two-shot, ring or plan.
	Algorithm string
	// Way is the name among the candidates, which on GPUs also says how the data travels.
	Way string
	// Packets says that data and signals travel in the same words. Only GPUs do that.
	Packets bool
	// Blocks is the number of multiprocessors of a GPU that the call takes; 0 on the host device.
	Blocks int
	// Rate bounds a rank's reads and writes of the others' memory on a GPU, in GB/s; 0 is no bound.
	Rate float64
	// Forced says that Options.Algorithm left no choice: it does where it names an algorithm, or a plan that can do the call.
	Forced bool
	// Chunks is the largest number of chunks from one rank to another; 0 in one-shot and in packets. Buffers that a GPU's peers can reach
	// need none.
	Chunks int64
	// Multicast is the pipeline of a call that goes by multicast, which then has two shots, or packets, which have one.
	Multicast kernels.Pipeline
	// Hosts is the number of hosts where there are several. Then all calls go in two shots: hosts combine the partial results of each.
	Hosts int
	// Candidates holds every estimate, and with Options.Multicast an entry about that.
	Candidates []Candidate
}

// Candidate is the estimate of one algorithm. On GPUs those with "packet" in their name send data and signals in the same words. With "pull"
// ranks read the others' slices of a gather, with "push" they write their input into the others' staging.
type Candidate struct {
	Algorithm    string
	Microseconds float64 // +Inf: not possible; NaN: not measured
	Why          string
}

// String says in a few lines what was chosen and why.
func (d Decision) String() string {
	var b strings.Builder
	how := "lowest estimate"
	if d.Forced {
		how = "forced"
	}
	name := d.Way
	if d.Multicast != kernels.NoMulticast {
		name, how = d.Way+" "+d.Multicast.String(), "asked for"
	}
	if d.Hosts > 0 {
		return fmt.Sprintf("%s, with a partial result of each of %d hosts", name, d.Hosts)
	}
	fmt.Fprintf(&b, "%s (%s); %d chunks", name, how, d.Chunks)
	if d.Blocks > 0 {
		fmt.Fprintf(&b, ", %d multiprocessors", d.Blocks)
	}
	if d.Rate > 0 {
		fmt.Fprintf(&b, " at %g GB/s", d.Rate)
	}
	for _, c := range d.Candidates {
		if math.IsNaN(c.Microseconds) {
			fmt.Fprintf(&b, "\n  %-15s    no estimate  %s", c.Algorithm, c.Why)
			continue
		}
		fmt.Fprintf(&b, "\n  %-15s %10.1f us  %s", c.Algorithm, c.Microseconds, c.Why)
	}
	return b.String()
}

// explain describes the choice that has been made for r. It changes r.
func (s *selector) explain(r *kernels.Reduction) Decision {
	if h := s.bounds.Hosts; h != nil {
		return Decision{Algorithm: r.Algorithm.String(), Way: r.Algorithm.String(), Hosts: h.Count()}
	}
	d := Decision{Algorithm: r.Algorithm.String(), Way: way{r.Algorithm, r.Packets, r.Pull, r.Push, r.Plan}.String(), Packets: r.Packets, Blocks: r.Blocks, Rate: r.Rate, Forced: s.forces(&r.Call) != "", Multicast: r.Multicast}
	if d.Multicast != kernels.NoMulticast {
		d.Way = multicastWay
	}
	if (r.Algorithm == kernels.TwoShot || r.Algorithm == kernels.Ring) && !r.Packets {
		d.Chunks = r.Messages()
	}
	for w := range s.ways(r.Call.Collective) {
		us, _, why := s.cost(r, w)
		d.Candidates = append(d.Candidates, Candidate{w.String(), us, why})
	}
	d.Candidates = append(d.Candidates, s.about(&r.Call, d.Multicast)...)
	return d
}
