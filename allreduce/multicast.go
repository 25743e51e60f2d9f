package allreduce

import (
	"math"

	"github.com/switchyard-moe/switchyard/kernels"
)

// The values of Options.Multicast that are not empty.
const (
	autoMulticast  = "auto"
	warpMulticast  = "warps"
	blockMulticast = "blocks"
)

// multicastWay is the name of multicast among the ways of a call.
const multicastWay = "multicast"

// leastPipelineBlocks is the least number of blocks of a block pipeline: one for each step.
const leastPipelineBlocks = 3

func (o *Options) validateMulticast() error {
	switch o.Multicast {
	case "":
		return nil
	case autoMulticast, warpMulticast, blockMulticast:
		if o.Algorithm == kernels.OneShot.String() {
			return invalid("Options.Multicast is %q with algorithm %q: multicast takes two shots", o.Multicast, o.Algorithm)
		}
		return nil
	}
	return invalid("Options.Multicast is %q, want %q, %q, %q or nothing", o.Multicast, autoMulticast, warpMulticast, blockMulticast)
}

// byMulticast is Options.Multicast, and the reason why multicast cannot be honoured, or "".
type byMulticast struct{ asked, vain string }

// overrule sends a call by multicast, although another way has been chosen, if the options ask for multicast and the call can go so. The
// call takes all blocks that it may have: the least sufficient number has not been measured.
func (s *selector) overrule(r *kernels.Reduction) {
	if r.Multicast = s.pipeline(r); r.Multicast != kernels.NoMulticast {
		s.set(r, throughMemory)
		r.Blocks, r.Rate = s.bounds.Blocks, 0
	}
}

// pipeline is the pipeline of a call by multicast. No times have been measured. With "auto" a call takes the pipeline of warps if staging
// holds all of it at once, because then no step waits for a later one.
func (s *selector) pipeline(r *kernels.Reduction) kernels.Pipeline {
	c := s.bounds
	switch {
	case s.asked == "" || s.vain != "" || !r.Call.Multicastable():
		return kernels.NoMulticast
	case s.asked == autoMulticast && r.Packets:
		return kernels.NoMulticast
	case s.asked == blockMulticast:
		return kernels.BlockPipeline
	case s.asked == warpMulticast || c.Blocks < leastPipelineBlocks:
		return kernels.WarpPipeline
	case r.Longest()*r.Call.DType.Size() <= int64(c.Blocks)*int64(c.Slots)*c.SlotBytes:
		return kernels.WarpPipeline
	}
	return kernels.BlockPipeline
}

// about says why a call goes by multicast or does not, if the options ask for multicast.
func (m *byMulticast) about(c *kernels.ReduceCall, chosen kernels.Pipeline) []Candidate {
	x := Candidate{Algorithm: multicastWay, Microseconds: math.NaN()}
	switch {
	case m.asked == "":
		return nil
	case m.vain != "":
		x.Microseconds, x.Why = math.Inf(1), m.vain
	case !c.Multicastable():
		x.Microseconds, x.Why = math.Inf(1), "multicast only adds: sums, and averages of float32 and float64"
	case chosen == kernels.NoMulticast:
		x.Why = "packets are taken for small calls"
	case !c.Collective.Reduces():
		x.Why = "switches hand every slice to all; it has never run on hardware"
	case !c.Collective.Gathers():
		x.Why = "switches add; it has never run on hardware"
	default:
		x.Why = "switches add and hand the result to all; it has never run on hardware"
	}
	return []Candidate{x}
}
