package host

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/kernels"
)

// SetStep has f called at every point of the engine's kernels, with words for what comes next; waiting is true for a pass
// that found nothing to do. An error of f ends a waiting kernel.
func (e *Engine) SetStep(f func(what string, waiting bool) error) {
	words := make([][7]string, e.space.Size)
	for p := range words {
		words[p] = [...]string{
			postingCredit: fmt.Sprintf("posts a credit to rank %d", p),
			puttingData:   fmt.Sprintf("puts data to rank %d", p),
			signalling:    fmt.Sprintf("signals rank %d", p),
			takingData:    fmt.Sprintf("takes data of rank %d", p),
			withdrawing:   fmt.Sprintf("takes its offer to rank %d back", p),
			copying:       "copies on",
			idlePass:      "looks again",
		}
	}
	e.step = func(p point, peer int) error { return f(words[peer][p], p == idlePass) }
}

// SetUnreadable has messages between two ranks go through staging, SetImpatient has them copied aside at once. p is a port of transfers.
func SetUnreadable(p kernels.Port) {
	for i := range p.(*port).fam.(*transfers).pairs {
		p.(*port).fam.(*transfers).pairs[i].readable = false
	}
}

// SetImpatient is described above.
func SetImpatient(p kernels.Port) { p.(*port).fam.(*transfers).patience = 0 }

// StateOf is the word of a slot that offers a message, and of one that has been taken.
func StateOf(number uint64) (offers, took uint64) {
	return stateOf(number, offered), stateOf(number, taken)
}

// SetPull has messages from a length on read in their senders' memory, some bytes at a time.
func (e *Engine) SetPull(from, bytes int64) { e.pullFrom, e.pullBytes = from, bytes }
