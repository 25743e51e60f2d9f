package p2p

import (
	"cmp"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Conditions that callers tell apart with errors.Is. They are those of package comm.
var (
	// ErrInvalid is the cause of every error about arguments. Nothing has been enqueued then.
	ErrInvalid = comm.ErrInvalid
	// ErrClosed is returned by calls on a closed Endpoint.
	ErrClosed = comm.ErrClosed
)

func invalid(format string, args ...any) error { return comm.Invalid("p2p", format, args...) }

// maxSemaphores bounds Options.Semaphores.
const maxSemaphores = 1 << 10

// Options of an Endpoint. The zero value works. All ranks pass the same; New compares them, and its error names both values of an option
// that differs.
type Options struct {
	// Semaphores is how many there are from each rank to each other; default 8, at most 1024. Each takes 128 bytes a peer.
	Semaphores int
	// Timeout bounds every wait for a peer; default 30 s. After it an error names the peer. A peer that moves bytes of the Endpoint's calls
	// is not silent.
	Timeout time.Duration
}

// validate checks the options and completes them by the defaults of an engine.
func (o *Options) validate(size int, e kernels.Engine) (kernels.PointBounds, error) {
	c := kernels.PointBounds{Size: size, Semaphores: o.Semaphores}
	if o.Semaphores < 0 || o.Semaphores > maxSemaphores || o.Timeout < 0 {
		return c, invalid("Options.Semaphores is %d, want 0 to %d; Timeout %v", o.Semaphores, maxSemaphores, o.Timeout)
	}
	e.Defaults(&c)
	o.Timeout = cmp.Or(o.Timeout, communicator.DefaultTimeout)
	return c, nil
}

// fingerprint has the options that must be equal on all ranks.
func fingerprint(c *kernels.PointBounds) string { return fmt.Sprintf("%d semaphores", c.Semaphores) }
