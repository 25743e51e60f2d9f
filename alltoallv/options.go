package alltoallv

import (
	"bytes"
	"cmp"
	"fmt"
	"log/slog"
	"time"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/internal/curve"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Options of an Exchanger. The zero value works. All ranks pass the same; New compares them, and its error names both values
// of an option that differs.
type Options struct {
	// Algorithm forces one by name. Empty selects by the traffic of each call.
	Algorithm string
	// Algorithms are the caller's own, in addition to packet, direct, pipelined, ring and copy. Ranks whose algorithms have other names,
	// orders or Lists are refused.
	Algorithms []Algorithm
	// PacketBytes bounds messages whose words carry their flag; negative for none. The default is 128 on the host and, on GPUs, 512 KiB
	// for up to 4 ranks and 255 KiB for more.
	PacketBytes int64
	// EagerBytes bounds messages that need no credit; default 1 KiB, negative for empty messages only. Every rank holds two
	// such buffers for every peer. On a GPU packets take the place of eager messages.
	EagerBytes int64
	// SlotBytes is the size of a slot of staging, Slots the number of slots of an ordered pair of ranks; on GPUs a pair has that many
	// for each of MaxSMs. The default is 4 of 256 KiB, on GPUs 8 of 128 KiB, and smaller if these would exceed StagingBytes.
	SlotBytes int64
	Slots     int
	// StagingBytes bounds the slots of one rank together if SlotBytes is 0; default 32 MiB, on GPUs 128 MiB.
	StagingBytes int64
	// BundleBytes bounds messages to ranks of other hosts that go together with the others for that host, in one put; larger ones go straight
	// to their rank. 0 is what a table of measured times says, negative is none. Every rank holds two such messages for every rank of other
	// hosts.
	BundleBytes int64
	// CacheEntries is the number of plans that the cache keeps; default 256.
	CacheEntries int
	// Table has the times by which an algorithm is selected. nil is a table measured on H200s for GPUs, and rules of thumb for the host.
	Table *Table
	// MaxSMs bounds the multiprocessors of a GPU that send in a call above PacketBytes; default DefaultMaxSMs. The host device ignores
	// it.
	MaxSMs int
	// CopySMs bounds the further multiprocessors that copy the output out of staging if peers cannot write it. At most as many send as
	// copy then. The default is DefaultMaxSMs if MaxSMs is 0, otherwise none: those that send also copy. Negative is none.
	CopySMs int
	// NoSMs takes no multiprocessors of a GPU for calls above PacketBytes: these go by its copy engines or are refused. It is
	// Algorithm "copy", for ranks with a GPU each: ranks that share one can hold up each other's copies until Timeout.
	NoSMs bool
	// Timeout bounds every wait for a peer; default 30 s. After it an error names the peer.
	// A peer that moves bytes of the communicator's calls is not silent.
	Timeout time.Duration
	// Validate has the ranks compare their counts on the control plane before every call, so that a disagreement is an
	// error on every rank with nothing enqueued. It costs a round of socket messages a call and waits for the slowest
	// rank. Without it a disagreement is found during the exchange, by the ranks that disagree.
	Validate bool
	// Logger gets a line, at info level, if large messages take two copies. nil is the group's.
	Logger *slog.Logger
}

// No GPU has more multiprocessors than mostSMs. Sizes of memory are products of these.
const (
	mostSMs       = 1 << 12
	mostSlots     = 1 << 10
	mostSlotBytes = 1 << 30
)

// DefaultMaxSMs is the bound of multiprocessors of a GPU that send if Options.MaxSMs is 0.
const DefaultMaxSMs = 16

// limits are those of all calls.
func (o *Options) limits() Limits {
	return Limits{Algorithm: o.Algorithm, MaxSMs: o.MaxSMs, CopySMs: o.CopySMs, NoSMs: o.NoSMs}
}

// complete validates the options and completes them by the defaults of an engine.
func (o *Options) complete(size int, e kernels.Engine, dev device.Kind) (kernels.ExchangeBounds, error) {
	switch {
	case o.CacheEntries < 0:
		return kernels.ExchangeBounds{}, invalid("Options.CacheEntries is %d", o.CacheEntries)
	case o.Timeout < 0:
		return kernels.ExchangeBounds{}, invalid("Options.Timeout is %v", o.Timeout)
	case o.MaxSMs < 0 || o.MaxSMs > mostSMs || o.CopySMs > mostSMs:
		return kernels.ExchangeBounds{}, invalid("Options.MaxSMs is %d and CopySMs %d, want 0 to %d and at most %d", o.MaxSMs, o.CopySMs, mostSMs, mostSMs)
	case o.Slots > mostSlots:
		return kernels.ExchangeBounds{}, invalid("Options.Slots is %d, want at most %d", o.Slots, mostSlots)
	}
	if o.CopySMs == 0 && o.MaxSMs == 0 {
		o.CopySMs = DefaultMaxSMs
	}
	if o.MaxSMs == 0 {
		o.MaxSMs = DefaultMaxSMs
	}
	c := kernels.ExchangeBounds{Size: size, Slots: o.Slots, SlotBytes: o.SlotBytes, StagingBytes: o.StagingBytes,
		EagerBytes: o.EagerBytes, PacketBytes: o.PacketBytes, Stripes: o.MaxSMs}
	e.Defaults(&c)
	if o.Algorithm == (packet{}).Name() && o.PacketBytes == 0 {
		c.PacketBytes = max(c.PacketBytes, 4<<10)
	}
	if c.Slots < 1 {
		return c, invalid("Options.Slots is %d", o.Slots)
	}
	if c.SlotBytes < 0 || c.SlotBytes > mostSlotBytes || c.SlotBytes%kernels.LineBytes != 0 {
		return c, invalid("Options.SlotBytes is %d, want a multiple of %d, at most %d", o.SlotBytes, kernels.LineBytes, mostSlotBytes)
	}
	if c.PacketBytes > 1<<20 {
		return c, invalid("Options.PacketBytes is %d, want at most %d", c.PacketBytes, 1<<20)
	}
	if c.EagerBytes > 1<<30 {
		return c, invalid("Options.EagerBytes is %d, want at most %d", c.EagerBytes, 1<<30)
	}
	if o.Table == nil && dev.String() == defaultTableDevice {
		var err error
		if o.Table, err = ReadTable(bytes.NewReader(defaultTable)); err != nil {
			return c, err
		}
	} else if o.Table != nil {
		if err := o.Table.validate(); err != nil {
			return c, err
		}
		if o.Table.Device != dev.String() {
			return c, invalid("Options.Table is for device %q, the heap is of %q", o.Table.Device, dev)
		}
	}
	if o.CacheEntries == 0 {
		o.CacheEntries = 256
	}
	o.Timeout = cmp.Or(o.Timeout, communicator.DefaultTimeout)
	return c, nil
}

// fingerprint has the options that must be equal on all ranks.
func (o *Options) fingerprint(c *kernels.ExchangeBounds, algorithms []string) string {
	return fmt.Sprintf("algorithm %q of %v (no multiprocessors: %v), packets to %d bytes, eager to %d, %d slots of %d, bundles to %d, %d multiprocessors and %d, table %s, validate %v",
		o.Algorithm, algorithms, o.NoSMs, c.PacketBytes, c.EagerBytes, c.Slots, c.SlotBytes, c.BundleBytes, o.MaxSMs, o.CopySMs, curve.Digest(o.Table), o.Validate)
}
