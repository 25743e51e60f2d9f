package allreduce

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/internal/curve"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
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
	return comm.Invalid("allreduce", format, args...)
}

// Options of a Reducer. The zero value works. All ranks pass the same; New compares them, and its error names both values of
// an option that differs.
type Options struct {
	// Algorithm forces "one-shot", "two-shot", "ring" or a plan by its name, for the plan's collective. Empty selects by the size of each call.
	// Ranks on several hosts have one way for all calls, whatever it says.
	Algorithm string
	// Plans are collectives as steps (package kernels/plan), for as many ranks as the group has. A call takes one where its time is less than the
	// estimates of all other ways; without times it is taken only by its name, or if nothing else does the collective. Calls with slices of
	// different lengths never take one, nor do floats of 16 and 8 bits if it hands partial results on, because those are rounded once (R2).
	// All ranks get the same bits, in the order that the plan combines. Ranks are on one host.
	Plans []*plan.Checked
	// OneShotBytes bounds what a rank pushes to a peer in the one-shot algorithm, and on GPUs in packets; negative for nothing. The
	// default is 16 KiB, on GPUs 2 MiB divided by the number of ranks. Every rank holds two such buffers for every peer, on GPUs four.
	OneShotBytes int64
	// SlotBytes is the size of a slot of staging, Slots the number of slots from one rank to another (default 4, at least 2, on GPUs
	// at most 8 for each multiprocessor). The default size is 64 KiB, and less if the slots would exceed StagingBytes. On GPUs it is a
	// multiple of 4096.
	SlotBytes int64
	Slots     int
	// StagingBytes bounds the slots of one rank together if SlotBytes is 0, and always those of plans, which a reducer with plans has besides;
	// default 16 MiB, on GPUs 96 MiB.
	StagingBytes int64
	// MaxSMs bounds the multiprocessors of a GPU that a call takes; default 96, or all if a rank's GPU has fewer. Ranks that share a
	// GPU have an equal share of it each. All ranks take equally many. The host device ignores it.
	MaxSMs int
	// Table has the times by which an algorithm is selected on GPUs. nil is a table measured on H200s. The host device has no table.
	Table *Table
	// Multicast makes calls on GPUs travel by NVLink multicast if it can do them: all-gathers, broadcasts, and reductions that add (R1: sums,
	// except of uint8 and float8, and averages of float32 and float64); other calls travel as without it. "warps" and "blocks" name the
	// pipeline for such calls of every size; with "auto" small calls take packets, and the size chooses the pipeline of others. Packets of
	// all-reduces, with any operator, all-gathers and broadcasts are stored on all ranks at once, and carry 2 thirds of OneShotBytes. Empty, the
	// default, is never. A heap without memory.Options.Multicast makes it an ErrInvalid; if the heap has that option and no multicast, it is
	// off, and Explain says why. Multicast has never run on hardware: it has been tested on an emulated driver and with its kernels on a
	// processor. The order in which a switch adds is not known, so results of floats may differ from run to run, but not in packets, which ranks
	// add themselves; all ranks of an all-reduce get the same bits.
	Multicast string
	// Timeout bounds every wait for a peer; default 30 s. After it an error names the peer.
	// A peer that moves bytes of the communicator's calls is not silent.
	Timeout time.Duration
	// Validate has the ranks compare every call on the control plane first, so that a rank that refuses its arguments is an error
	// on every rank, with nothing enqueued. It costs a round of socket messages a call. Without it, ranks that make different calls
	// get the error from the call itself, and wait for a rank that refuses its arguments.
	Validate bool
}

// validate checks the options and completes them by the defaults of an engine.
func (o *Options) validate(size int, e kernels.Engine, gpu bool) (kernels.ReduceBounds, error) {
	if err := o.validatePlans(size); err != nil {
		return kernels.ReduceBounds{}, err
	}
	c := kernels.ReduceBounds{Size: size, OneShotBytes: o.OneShotBytes, Slots: o.Slots, SlotBytes: o.SlotBytes, StagingBytes: o.StagingBytes, Blocks: o.MaxSMs, Multicast: o.Multicast != ""}
	switch {
	case o.Algorithm != "" && o.plan(o.Algorithm) == nil && !slices.ContainsFunc(kernels.ReduceAlgorithms(), func(a kernels.ReduceAlgorithm) bool { return a.String() == o.Algorithm }):
		return c, invalid("no algorithm is called %q; there are %v and %d plans", o.Algorithm, kernels.ReduceAlgorithms(), len(o.Plans))
	case gpu && o.Algorithm == kernels.Ring.String():
		return c, fmt.Errorf("allreduce: algorithm %q on GPUs: %w", o.Algorithm, ErrUnsupported)
	case o.OneShotBytes > 64<<20:
		return c, invalid("Options.OneShotBytes is %d, more than %d", o.OneShotBytes, 64<<20)
	case o.StagingBytes < 0:
		return c, invalid("Options.StagingBytes is %d, want at least 0", o.StagingBytes)
	case o.MaxSMs < 0:
		return c, invalid("Options.MaxSMs is %d, want at least 0", o.MaxSMs)
	case o.Timeout < 0:
		return c, invalid("Options.Timeout is %v, want at least 0", o.Timeout)
	case o.Slots != 0 && o.Slots < 2 || o.Slots > 1<<10:
		return c, invalid("Options.Slots is %d, want 2 to %d", o.Slots, 1<<10)
	case o.SlotBytes < 0 || o.SlotBytes > 1<<30 || o.SlotBytes%kernels.LineBytes != 0:
		return c, invalid("Options.SlotBytes is %d, want a multiple of %d, at most %d", o.SlotBytes, kernels.LineBytes, 1<<30)
	}
	if err := o.validateMulticast(); err != nil {
		return c, err
	}
	switch {
	case !gpu && o.Table != nil:
		return c, invalid("Options.Table is for GPUs, the heap is of the host")
	case gpu && o.Table == nil:
		var err error
		if o.Table, err = builtinTable(); err != nil {
			return c, err
		}
	case gpu:
		if err := o.Table.validate(); err != nil {
			return c, err
		}
	}
	for _, p := range o.Plans {
		c.Plans.Add(p)
	}
	e.Defaults(&c)
	if o.Multicast == blockMulticast && c.Blocks < leastPipelineBlocks {
		return c, invalid("Options.Multicast is %q with %d multiprocessors, want at least %d", o.Multicast, c.Blocks, leastPipelineBlocks)
	}
	o.Timeout = cmp.Or(o.Timeout, communicator.DefaultTimeout)
	return c, nil
}

// fingerprint has the options that must be equal on all ranks.
func (o *Options) fingerprint(c *kernels.ReduceBounds) string {
	return fmt.Sprintf("algorithm %q, one-shot to %d bytes, %d slots of %d, at most %d multiprocessors, table %s, multicast %q, validate %v%s",
		o.Algorithm, c.OneShotBytes, c.Slots, c.SlotBytes, c.Blocks, curve.Digest(o.Table), o.Multicast, o.Validate, o.planNames())
}
