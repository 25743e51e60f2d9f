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
			return invalid("Options.Multicast is %q with algorithm %q: multicast takes two shots for what is not packets", o.Multicast, o.Algorithm)
		}
		return nil
	}
	return invalid("Options.Multicast is %q, want %q, %q, %q or nothing", o.Multicast, autoMulticast, warpMulticast, blockMulticast)
}

// byMulticast is Options.Multicast, and the reason why multicast cannot be honoured, or "".
type byMulticast struct{ asked, vain string }

// multicasts reports whether calls go by multicast if they can.
func (m *byMulticast) multicasts() bool { return m.asked != "" && m.vain == "" }

// overrule sends a call by multicast, although another way has been chosen, if the options ask for multicast and the call can go so. In a
// pipeline it takes all blocks that it may have: the least sufficient number has not been measured.
func (s *selector) overrule(r *kernels.Reduction) {
	switch r.Multicast = s.pipeline(r); r.Multicast {
	case kernels.WarpPipeline, kernels.BlockPipeline:
		s.set(r, throughMemory)
		r.Blocks, r.Rate = s.bounds.Blocks, 0
	}
}

// noPackets is why a call does not go by packets of a way although their size would do, or "". With multicast those that gather reach all ranks
// by one store, and have less room.
func (s *selector) noPackets(r *kernels.Reduction, w way) string {
	switch {
	case !s.multicasts() || !r.Call.Collective.Gathers():
		return ""
	case w.algorithm != kernels.OneShot:
		return "packets by multicast take one shot"
	case r.PushBytes() > s.bounds.MulticastPacketBytes():
		return "more than packets by multicast carry"
	}
	return ""
}

// pipeline is the pipeline of a call by multicast, or packets where they have been chosen and the call needs or may take them. No times have
// been measured. With "auto" a call takes the pipeline of warps if staging holds all of it at once, because then no step waits for a later one.
func (s *selector) pipeline(r *kernels.Reduction) kernels.Pipeline {
	c := s.bounds
	switch {
	case !s.multicasts():
		return kernels.NoMulticast
	case r.Packets && (s.asked == autoMulticast || !r.Call.Multicastable()):
		if r.Call.Collective.Gathers() {
			return kernels.MulticastPackets
		}
		return kernels.NoMulticast
	case !r.Call.Multicastable():
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
	case chosen == kernels.MulticastPackets:
		x.Why = "one store of a packet reaches all ranks; it has never run on hardware"
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
