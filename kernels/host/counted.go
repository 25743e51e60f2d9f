package host

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/kernels"
)

// common is what most families share. A family embeds it, and has methods of its own where it differs.
type common struct{}

func (common) defaults()                    {}
func (common) ready(*Engine) kernels.Traits { return kernels.Traits{} }

// failedOffset is where the word of a call that failed half-way is, from the one that counts the communicator's calls.
const failedOffset = 8

// counted is the calls of a communicator that all ranks make, one behind the other. Its control block begins with a line that only its own rank
// writes: the words of calls, of a failed call and of progress (progress.go).
type counted struct {
	e      *Engine
	offset int64  // of the control block
	epoch  uint64 // of the call that runs
	w      waiter
	why    error // of the call that failed half-way
}

// kernel is what a rank does in a counted call.
type kernel interface {
	teller
	call(op kernels.Operation) error
}

// do runs a call. After one that failed half-way it fails at once, so that of the calls in a stream only the first waits for its deadline (F1).
func (c *counted) do(p *port, op kernels.Operation, k kernel) error {
	e := p.e
	failed := e.word(e.space.Rank, c.offset+failedOffset)
	if failed.Load() != 0 {
		if c.why == nil { // of a process in whose place this one has come
			return kernels.ErrFailed
		}
		return fmt.Errorf("%w: %w", kernels.ErrFailed, c.why)
	}
	c.e, c.epoch = e, e.count(c.offset)
	c.w.begin(p, k, p.call(op, c.offset, c.epoch), op.Within())
	defer c.w.leave()
	err := k.call(op)
	if err != nil && !kernels.Recoverable(err) {
		c.why = err
		failed.Store(1)
	}
	return err
}
