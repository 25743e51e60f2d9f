package allreduce

import (
	"fmt"
	"math"
	"strings"

	"github.com/switchyard-moe/switchyard/kernels"
)

// Rough figures of the host device, measured on two cores with 2, 4 and 8 ranks: what it costs to signal a peer and hear
// from it, what another step costs, and how fast a core copies or adds. They only have to rank algorithms.
const (
	usSignal = 1.2
	usStep   = 1.5
	bytesPer = 10e3 // a microsecond
)

// cost estimates the time of a call in microseconds; +Inf means that its algorithm cannot do it. It depends on nothing
// but what all ranks have agreed on, so all of them choose the same algorithm. why is for people.
func cost(r *kernels.Reduction) (us float64, why string) {
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

// choose sets the algorithm of a call. forced is an algorithm's name or empty.
func choose(r *kernels.Reduction, forced string) error {
	best, lowest := kernels.TwoShot, math.Inf(1)
	for a := kernels.OneShot; a <= kernels.Ring; a++ {
		if forced != "" && forced != a.String() {
			continue
		}
		r.Algorithm = a
		if us, _ := cost(r); us < lowest {
			best, lowest = a, us
		}
	}
	r.Algorithm = best
	if math.IsInf(lowest, 1) {
		c := r.Channels
		return invalid("%v, %d bytes for one peer: algorithm %q with OneShotBytes %d and SlotBytes %d cannot do that",
			r.Call, r.PushBytes(), forced, c.OneShotBytes, c.SlotBytes)
	}
	return nil
}

// Decision is the answer of Explain.
type Decision struct {
	// Algorithm is the chosen one: one-shot, two-shot or ring.
	Algorithm string
	// Forced says that Options.Algorithm left no choice.
	Forced bool
	// Chunks is the largest number of chunks that one rank hands to another; 0 in one-shot.
	Chunks int64
	// Candidates holds every algorithm's estimate.
	Candidates []Candidate
}

// Candidate is one algorithm's estimate.
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
	fmt.Fprintf(&b, "%s (%s); %d chunks", d.Algorithm, how, d.Chunks)
	for _, c := range d.Candidates {
		fmt.Fprintf(&b, "\n  %-10s %10.1f us  %s", c.Algorithm, c.Microseconds, c.Why)
	}
	return b.String()
}

// explain describes the choice that has been made for r, and leaves r in no particular state.
func explain(r *kernels.Reduction, forced string) Decision {
	d := Decision{Algorithm: r.Algorithm.String(), Forced: forced != ""}
	if r.Algorithm != kernels.OneShot {
		d.Chunks = r.Messages()
	}
	for _, r.Algorithm = range kernels.ReduceAlgorithms() {
		us, why := cost(r)
		d.Candidates = append(d.Candidates, Candidate{r.Algorithm.String(), us, why})
	}
	return d
}
