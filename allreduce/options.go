package allreduce

import (
	"fmt"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Conditions that callers tell apart with errors.Is. They are those of package comm.
var (
	// ErrInvalid is the cause of every error about arguments. Nothing has been enqueued then.
	ErrInvalid = comm.ErrInvalid
	// ErrUnsupported means that the operator does not exist for the data type. Nothing has been enqueued then.
	ErrUnsupported = comm.ErrUnsupported
	// ErrClosed is returned by calls on a closed Reducer or closed Buckets.
	ErrClosed = comm.ErrClosed
)

func invalid(format string, args ...any) error {
	return communicator.Invalid("allreduce", format, args...)
}

// Options of a Reducer. The zero value works. All ranks pass the same; New compares them and names both values where they
// differ.
type Options struct {
	// Algorithm forces "one-shot", "two-shot" or "ring". Empty selects by the size of each call.
	Algorithm string
	// OneShotBytes bounds what a rank pushes to a peer in the one-shot algorithm; default 16 KiB, negative for nothing.
	// Every rank holds two such buffers for every peer.
	OneShotBytes int64
	// SlotBytes is the size of a chunk, Slots how many of them can be under way between two ranks (default 4, at least
	// 2). The default size is 64 KiB, and less where StagingBytes would be exceeded.
	SlotBytes int64
	Slots     int
	// StagingBytes bounds the slots of one rank together where SlotBytes is left to default; default 16 MiB.
	StagingBytes int64
	// Timeout bounds every wait for a peer; default 30 s. It is the time in which a hung peer is named.
	Timeout time.Duration
	// Validate has the ranks compare every call on the control plane first, so that a rank that refuses its arguments is
	// an error on every rank, with nothing enqueued. It costs a round of socket messages a call. Without it, ranks that
	// make different calls learn it from the call itself, and a rank that refuses its arguments is waited for.
	Validate bool
}

const (
	minSlotBytes = 4 << 10
	maxSlotBytes = 64 << 10
)

// validate fills in the defaults for a group of size ranks and says the bounds of launches.
func (o *Options) validate(size int) (kernels.ReduceChannels, error) {
	c := kernels.ReduceChannels{Size: size}
	if o.Algorithm != "" && !slices.ContainsFunc(kernels.ReduceAlgorithms(), func(a kernels.ReduceAlgorithm) bool { return a.String() == o.Algorithm }) {
		return c, invalid("no algorithm is called %q; there are %v", o.Algorithm, kernels.ReduceAlgorithms())
	}
	if o.OneShotBytes > 64<<20 {
		return c, invalid("Options.OneShotBytes is %d, more than %d", o.OneShotBytes, 64<<20)
	}
	if o.OneShotBytes == 0 {
		o.OneShotBytes = 16 << 10
	}
	c.OneShotBytes = max(o.OneShotBytes, 0)
	if o.Slots == 0 {
		o.Slots = 4
	}
	if c.Slots = o.Slots; c.Slots < 2 || c.Slots > 1<<10 {
		return c, invalid("Options.Slots is %d, want 2 to %d", o.Slots, 1<<10)
	}
	if o.StagingBytes == 0 {
		o.StagingBytes = 16 << 20
	}
	if o.SlotBytes == 0 {
		fit := o.StagingBytes / int64((size+1)*c.Slots) / minSlotBytes * minSlotBytes
		o.SlotBytes = min(max(fit, minSlotBytes), maxSlotBytes)
	}
	if c.SlotBytes = o.SlotBytes; c.SlotBytes <= 0 || c.SlotBytes > 1<<30 || c.SlotBytes%kernels.LineBytes != 0 {
		return c, invalid("Options.SlotBytes is %d, want a multiple of %d, at most %d", o.SlotBytes, kernels.LineBytes, 1<<30)
	}
	if o.StagingBytes < 0 || o.Timeout < 0 {
		return c, invalid("Options.StagingBytes is %d, Timeout %v", o.StagingBytes, o.Timeout)
	}
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Second
	}
	return c, nil
}

// fingerprint is what must be equal on all ranks.
func (o *Options) fingerprint(c *kernels.ReduceChannels) string {
	return fmt.Sprintf("algorithm %q, one-shot to %d bytes, %d slots of %d, validate %v", o.Algorithm, c.OneShotBytes, c.Slots, c.SlotBytes, o.Validate)
}
