package allreduce

import (
	"fmt"
	"math"
	"strings"

	"github.com/switchyard-moe/switchyard/kernels"
)

// way is how a call can travel: its algorithm and, on GPUs, whether by packets.
type way struct {
	algorithm kernels.ReduceAlgorithm
	packets   bool
}

func (w way) String() string {
	if w.packets {
		return w.algorithm.String() + " packet"
	}
	return w.algorithm.String()
}

// The ways of the two engines. A GPU has no ring, because among GPUs every pair is linked alike.
var (
	hostWays = []way{{algorithm: kernels.OneShot}, {algorithm: kernels.TwoShot}, {algorithm: kernels.Ring}}
	gpuWays  = []way{{kernels.OneShot, true}, {kernels.TwoShot, true}, {kernels.TwoShot, false}}
)

// selector chooses how calls travel. What it is made of, and what it looks at, is the same on all ranks, so all of them choose alike.
type selector struct {
	forced   string // the name of an algorithm, or empty
	gpu      bool
	channels *kernels.ReduceChannels
}

func (s *selector) ways() []way {
	if s.gpu {
		return gpuWays
	}
	return hostWays
}

// choose sets how a call travels.
func (s *selector) choose(r *kernels.Reduction) error {
	best, lowest := way{}, math.Inf(1)
	for _, w := range s.ways() {
		if s.forced != "" && s.forced != w.algorithm.String() {
			continue
		}
		if us, _ := s.cost(r, w); us < lowest {
			best, lowest = w, us
		}
	}
	s.set(r, best)
	if math.IsInf(lowest, 1) {
		c := s.channels
		return invalid("%v, %d bytes for one peer: algorithm %q with OneShotBytes %d and SlotBytes %d cannot do that",
			r.Call, r.PushBytes(), s.forced, c.OneShotBytes, c.SlotBytes)
	}
	return nil
}

func (s *selector) set(r *kernels.Reduction, w way) {
	r.Algorithm, r.Packets = w.algorithm, w.packets
	r.Pull = s.gpu && !w.packets && !r.Call.Collective.Reduces()
	r.Blocks = 0
	if s.gpu {
		r.Blocks = max(1, min(blocks(r), s.channels.Blocks))
	}
}

// The most blocks of a GPU that a call takes, where it reads and writes the buffers of peers. With more the link is no fuller.
const (
	mostReducing  = 96
	mostElsewhere = 64
)

// blocks is how many blocks of a GPU are fastest, by measurements on 2 H200: their number grows as the root of the bytes.
func blocks(r *kernels.Reduction) int {
	root := int(math.Sqrt(float64(r.Call.Count * r.Call.DType.Size())))
	if r.Packets {
		return max(8, root/8)
	}
	most := mostElsewhere
	if r.Call.Collective == kernels.AllReduce {
		most = mostReducing
	}
	return min(max(8, root/20), most)
}

// cost estimates the time of a call in microseconds; +Inf means that it cannot travel this way. why is for people.
func (s *selector) cost(r *kernels.Reduction, w way) (us float64, why string) {
	r.Algorithm, r.Packets = w.algorithm, w.packets
	if s.gpu {
		return gpuCost(r)
	}
	return hostCost(r)
}

// Rough figures of the host device, measured on two cores with 2, 4 and 8 ranks: what it costs to signal a peer and hear
// from it, what another step costs, and how fast a core copies or adds. They only have to rank algorithms.
const (
	usSignal = 1.2
	usStep   = 1.5
	bytesPer = 10e3 // a microsecond
)

func hostCost(r *kernels.Reduction) (us float64, why string) {
	c, messages := r.Channels, r.Messages()
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

// line is a time that grows with the bytes of a rank's port: us for none, and per microsecond so many more bytes.
type line struct{ us, per float64 }

func (l line) at(bytes int64) float64 { return l.us + float64(bytes)/l.per }

// The lines of reductions on GPUs, by measurements on 2 H200 in graphs. A gather through memory is taken for as fast as a reduce-scatter.
var (
	oneShotPackets = line{4.6, 250e3}
	twoShotPackets = line{6.1, 340e3}
	reducePackets  = line{4.9, 250e3}
	gatherPackets  = line{3.95, 240e3}
	allReduceLine  = line{10.3, 340e3}
	halfLine       = line{9.6, 330e3}
)

func gpuCost(r *kernels.Reduction) (us float64, why string) {
	c, es := r.Channels, r.Call.DType.Size()
	peers, slice, push := int64(c.Size-1), r.Longest()*es, r.PushBytes()
	both := r.Call.Collective == kernels.AllReduce
	switch {
	case !r.Packets && both:
		return allReduceLine.at(2 * peers * slice), "every rank reduces its slice where the others can reach it, then hands it to all"
	case !r.Packets:
		return halfLine.at(peers * slice), "slices are read where they can be reached"
	case c.Size == 1:
		return math.Inf(1), "nobody to send packets to"
	case r.Algorithm == kernels.OneShot && push > c.OneShotBytes, r.Algorithm == kernels.TwoShot && slice > c.OneShotBytes:
		return math.Inf(1), "more for one peer than OneShotBytes"
	case r.Algorithm == kernels.TwoShot && !both:
		return math.Inf(1), "one step is enough"
	case r.Algorithm == kernels.TwoShot:
		return twoShotPackets.at(2 * peers * slice), "data and signal in one word; every rank reduces its slice"
	case both:
		return oneShotPackets.at(peers * push), "data and signal in one word; every rank reduces everything"
	case r.Call.Collective.Reduces():
		return reducePackets.at(peers * push), "data and signal in one word"
	}
	return gatherPackets.at(peers * push), "data and signal in one word"
}

// Decision is the answer of Explain.
type Decision struct {
	// Algorithm is the chosen one: one-shot, two-shot or ring.
	Algorithm string
	// Packets says that data and signals travel in the same words. Only GPUs do that.
	Packets bool
	// Blocks is how many multiprocessors of a GPU the call takes; 0 on the host device.
	Blocks int
	// Forced says that Options.Algorithm left no choice.
	Forced bool
	// Chunks is the largest number of chunks that one rank hands to another; 0 in one-shot and in packets. Buffers that a GPU's peers can
	// reach need none.
	Chunks int64
	// Candidates holds every estimate.
	Candidates []Candidate
}

// Candidate is the estimate of one algorithm. On GPUs those with "packet" in their name send data and signals in the same words.
type Candidate struct {
	Algorithm    string
	Microseconds float64 // +Inf: cannot do it
	Why          string
}

// String says in a few lines what was chosen and why.
func (d Decision) String() string {
	var b strings.Builder
	how := "lowest estimate"
	if d.Forced {
		how = "forced"
	}
	name := d.Algorithm
	if d.Packets {
		name += " packet"
	}
	fmt.Fprintf(&b, "%s (%s); %d chunks", name, how, d.Chunks)
	if d.Blocks > 0 {
		fmt.Fprintf(&b, ", %d multiprocessors", d.Blocks)
	}
	for _, c := range d.Candidates {
		fmt.Fprintf(&b, "\n  %-15s %10.1f us  %s", c.Algorithm, c.Microseconds, c.Why)
	}
	return b.String()
}

// explain describes the choice that has been made for r, and leaves r in no particular state.
func (s *selector) explain(r *kernels.Reduction) Decision {
	d := Decision{Algorithm: r.Algorithm.String(), Packets: r.Packets, Blocks: r.Blocks, Forced: s.forced != ""}
	if r.Algorithm != kernels.OneShot && !r.Packets {
		d.Chunks = r.Messages()
	}
	for _, w := range s.ways() {
		us, why := s.cost(r, w)
		d.Candidates = append(d.Candidates, Candidate{w.String(), us, why})
	}
	return d
}
