package alltoallv

import (
	"fmt"
	"strings"

	"github.com/switchyard-moe/switchyard/kernels"
)

// Decision is the answer of Explain.
type Decision struct {
	// Algorithm is the chosen one.
	Algorithm string
	// Forced says that Options or Splits.Limits left no choice.
	Forced bool
	// InPlace says that peers write the output directly.
	InPlace bool
	// Pulled says that this rank reads large messages in their senders' memory.
	Pulled bool
	// Cached says that the splits were in the cache.
	Cached bool
	// SMs is the number of multiprocessors of a GPU that the call takes; 0 leaves it to the kernel, or means none.
	SMs int
	// CopySMs is the number of those that only copy messages out of staging; with 0 those that send do it.
	CopySMs int
	// Rate is the bound of the senders on a GPU together, in GB/s; 0 is no bound.
	Rate float64
	// Across counts the messages to ranks of other hosts. Those of them that are Bundled go together with the others for their host; the rest
	// go straight to their ranks.
	Across, Bundled int
	// Modes counts the messages to other ranks of the host by wire mode: packet, eager, credit.
	Modes [3]int
	// Candidates holds every algorithm's estimate, in the order of the attempts.
	Candidates []Candidate
}

// Candidate is one algorithm's estimate.
type Candidate struct {
	Algorithm    string
	Microseconds float64
	Why          string
}

// String says in a few lines what was chosen and why.
func (d Decision) String() string {
	var b strings.Builder
	how := "lowest estimate"
	if d.Forced {
		how = "forced"
	}
	b.WriteString(d.Algorithm)
	if d.SMs > 0 {
		fmt.Fprintf(&b, " on %d multiprocessors", d.SMs)
	}
	if d.Rate > 0 {
		fmt.Fprintf(&b, " at %g GB/s", d.Rate)
	}
	fmt.Fprintf(&b, " (%s); messages: %d packet, %d eager, %d credit", how, d.Modes[0], d.Modes[1], d.Modes[2])
	if d.Across > 0 {
		fmt.Fprintf(&b, "; to other hosts: %d bundled, %d straight", d.Bundled, d.Across-d.Bundled)
	}
	switch {
	case d.InPlace:
		b.WriteString("; output in place")
	case d.Pulled:
		b.WriteString("; output pulled")
	default:
		b.WriteString("; output through staging")
		if d.CopySMs > 0 {
			fmt.Fprintf(&b, " by %d more multiprocessors", d.CopySMs)
		}
	}
	for _, c := range d.Candidates {
		fmt.Fprintf(&b, "\n  %-10s %10.1f us  %s", c.Algorithm, c.Microseconds, c.Why)
	}
	return b.String()
}

// tell fills in what a schedule says.
func (d *Decision) tell(t *Traffic, k *kernels.Schedule) {
	d.SMs, d.CopySMs, d.Rate = k.Blocks, k.CopyBlocks, k.Rate
	d.Pulled = t.Pulled && !k.Staged
}
