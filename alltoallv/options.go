package alltoallv

import (
	"bytes"
	"fmt"
	"log/slog"
	"time"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Options of an Exchanger. The zero value works. All ranks pass the same; New compares them and names both values where
// they differ.
type Options struct {
	// Algorithm forces one by name. Empty selects by the traffic of each call.
	Algorithm string
	// Algorithms are the caller's own, offered beside packet, direct, pipelined, ring and copy.
	Algorithms []Algorithm
	// PacketBytes bounds messages whose words carry their flag; negative for none. The default is 128 on the host and, on GPUs, 512 KiB
	// for up to 4 ranks and 255 KiB for more.
	PacketBytes int64
	// EagerBytes bounds messages that need no credit; default 1 KiB, negative for empty messages only. Every rank holds two
	// such buffers for every peer. On a GPU packets take the place of eager messages.
	EagerBytes int64
	// SlotBytes is the size of a chunk that goes through staging, Slots how many of them a pair has; on GPUs a pair has as many for
	// each of MaxSMs. By default they are 4 of 256 KiB, on GPUs 8 of 128 KiB, and smaller where StagingBytes would be exceeded.
	SlotBytes int64
	Slots     int
	// StagingBytes bounds the slots of one rank together where SlotBytes is left to default; default 32 MiB, on GPUs 128 MiB.
	StagingBytes int64
	// CacheEntries is how many sets of splits are remembered; default 256.
	CacheEntries int
	// Table is what algorithms are selected by. nil is a table measured on H200s for GPUs, and rules of thumb for the host.
	Table *Table
	// MaxSMs bounds how many multiprocessors of a GPU a call above PacketBytes takes. By default DefaultMaxSMs send, and where peers
	// cannot write the output as many more copy it out of staging. The host device has none.
	MaxSMs int
	// NoSMs leaves a GPU's multiprocessors alone: calls above PacketBytes go by its copy engines or are refused. It is
	// Algorithm "copy", which is for ranks that have a GPU each: others can hold up each other's copies until Timeout.
	NoSMs bool
	// Timeout bounds every wait for a peer; default 30 s. It is the time in which a hung peer is named.
	Timeout time.Duration
	// Validate has the ranks compare their counts on the control plane before every call, so that a disagreement is an
	// error on every rank with nothing enqueued. It costs a round of socket messages a call and waits for the slowest
	// rank. Without it a disagreement is found during the exchange, by the ranks that disagree.
	Validate bool
	// Logger gets decisions at debug level. nil logs nothing.
	Logger *slog.Logger

	apart bool // more multiprocessors than MaxSMs copy out of staging
}

// DefaultMaxSMs is how many multiprocessors of a GPU send where Options.MaxSMs is 0.
const DefaultMaxSMs = 16

const minSlotBytes = 4 << 10

// channels validates the options and lays the control block out.
func (o *Options) channels(size int, kind device.Kind) (kernels.Channels, error) {
	or := func(v, def int64) int64 {
		switch {
		case v < 0:
			return 0
		case v == 0:
			return def
		}
		return v
	}
	if o.CacheEntries < 0 || o.Timeout < 0 || o.MaxSMs < 0 {
		return kernels.Channels{}, invalid("Options.CacheEntries is %d, Timeout %v, MaxSMs %d", o.CacheEntries, o.Timeout, o.MaxSMs)
	}
	if o.MaxSMs == 0 {
		o.MaxSMs, o.apart = DefaultMaxSMs, true
	}
	c := kernels.Channels{Size: size}
	// sharers have slots of their own
	slots, staging, sharers, maxSlotBytes := int64(4), int64(32<<20), size, int64(256<<10)
	if kind == device.CUDAKind { // packets take the place of eager messages
		slots, staging, sharers, maxSlotBytes = 8, 128<<20, size*o.MaxSMs, 128<<10
		packets := int64(512 << 10)
		if size > 4 {
			packets = 255 << 10 // 2 MiB in equal parts of 256 KiB are faster by a ring
		}
		c.PacketBytes = or(o.PacketBytes, packets)
	} else {
		c.PacketBytes, c.EagerBytes = or(o.PacketBytes, 128), or(o.EagerBytes, 1<<10)
		if o.Algorithm == "packet" && o.PacketBytes == 0 {
			c.PacketBytes = 4 << 10
		}
	}
	c.Slots = int(or(int64(o.Slots), slots))
	if c.Slots < 1 {
		return c, invalid("Options.Slots is %d", o.Slots)
	}
	c.SlotBytes = o.SlotBytes
	if o.SlotBytes == 0 {
		fit := or(o.StagingBytes, staging) / int64(sharers*c.Slots) / minSlotBytes * minSlotBytes
		c.SlotBytes = min(max(fit, minSlotBytes), maxSlotBytes)
	}
	if c.SlotBytes < 0 || c.SlotBytes%kernels.LineBytes != 0 {
		return c, invalid("Options.SlotBytes is %d, want a multiple of %d", o.SlotBytes, kernels.LineBytes)
	}
	if c.PacketBytes > 1<<20 || c.EagerBytes > 1<<30 {
		return c, invalid("Options.PacketBytes %d or EagerBytes %d is too large", c.PacketBytes, c.EagerBytes)
	}
	if copies := (copyEngine{}).Name(); o.NoSMs && o.Algorithm == "" {
		o.Algorithm = copies
	} else if o.NoSMs && o.Algorithm != copies {
		return c, invalid("Options.NoSMs with Algorithm %q", o.Algorithm)
	}
	if o.Table == nil && kind == device.CUDAKind {
		var err error
		if o.Table, err = ReadTable(bytes.NewReader(defaultTable)); err != nil {
			return c, err
		}
	} else if o.Table != nil {
		if err := o.Table.validate(); err != nil {
			return c, err
		}
		if o.Table.Device != kind.String() {
			return c, invalid("Options.Table is for device %q, the heap is of %q", o.Table.Device, kind)
		}
	}
	if o.CacheEntries == 0 {
		o.CacheEntries = 256
	}
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// fingerprint is what must be equal on all ranks.
func (o *Options) fingerprint(c *kernels.Channels, names []string) string {
	return fmt.Sprintf("algorithm %q of %v, packets to %d bytes, eager to %d, %d slots of %d, %d multiprocessors, table %s, validate %v",
		o.Algorithm, names, c.PacketBytes, c.EagerBytes, c.Slots, c.SlotBytes, o.MaxSMs, o.Table.digest(), o.Validate)
}
