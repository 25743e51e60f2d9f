package p2p

import (
	"cmp"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Conditions that callers tell apart with errors.Is. They are those of package comm.
var (
	// ErrInvalid is the cause of every error about arguments. Nothing has been enqueued then.
	ErrInvalid = comm.ErrInvalid
	// ErrUnsupported means that the device does not have the call. Nothing has been enqueued then.
	ErrUnsupported = comm.ErrUnsupported
	// ErrClosed is returned by calls on a closed Endpoint.
	ErrClosed = comm.ErrClosed
)

func invalid(format string, args ...any) error { return comm.Invalid("p2p", format, args...) }

// maxLines bounds Options.Semaphores and Boxes.
const maxLines = 1 << 10

// Options of an Endpoint. The zero value works. All ranks pass the same; New compares them, and its error names both values of an option
// that differs.
type Options struct {
	// Semaphores is how many there are from each rank to each other; default 8, at most 1024. Each takes 128 bytes a peer.
	Semaphores int
	// Boxes is how many messages of a rank can be on their way to another, received or not; default 32, at most 1024. One more waits for room.
	// GPUs have the next power of two.
	Boxes int
	// EagerBytes bounds messages whose sender is done with them at once; default 8 KiB, at most 1 MiB. Every rank holds Boxes times as much
	// for every peer. Negative is for empty messages only.
	EagerBytes int64
	// StagingBytes is the size of each of two buffers from a peer, for messages that this rank cannot read in their sender's memory; default
	// 64 KiB, at most 64 MiB. From a peer on another host there are ten. On GPUs there are two for each of MaxSMs, by default of 128 KiB, or of
	// as much less as lets those of all peers take 32 MiB.
	StagingBytes int64
	// ParkBytes bounds the copies that this rank keeps of larger messages whose receivers are late, so that a rank which sends first comes to
	// its receives; default 256 MiB, negative for none. Ranks may pass different values.
	ParkBytes int64
	// MaxSMs bounds the multiprocessors of a GPU that a put or a get of less than 4 MiB takes, larger ones take a copy engine, and those that
	// the messages of a call with one rank in one direction take; default 32, at most 128.
	MaxSMs int
	// Timeout bounds every wait for a peer; default 30 s. After it an error names the peer. A peer that moves bytes of the Endpoint's calls
	// is not silent.
	Timeout time.Duration
}

// validate checks the options and completes them by the defaults of a heap's engine.
func (o *Options) validate(h *memory.Heap) (kernels.PointBounds, error) {
	c := kernels.PointBounds{Size: h.Group().Size(), Hosts: h.Hosts(), Semaphores: o.Semaphores, Boxes: o.Boxes, EagerBytes: o.EagerBytes, StagingBytes: o.StagingBytes, ParkBytes: o.ParkBytes, Blocks: o.MaxSMs}
	switch {
	case o.Semaphores < 0 || o.Semaphores > maxLines:
		return c, invalid("Options.Semaphores is %d, want 0 to %d", o.Semaphores, maxLines)
	case o.Boxes < 0 || o.Boxes > maxLines:
		return c, invalid("Options.Boxes is %d, want 0 to %d", o.Boxes, maxLines)
	case o.EagerBytes > 1<<20:
		return c, invalid("Options.EagerBytes is %d, more than %d", o.EagerBytes, 1<<20)
	case o.StagingBytes < 0 || o.StagingBytes > 64<<20 || o.StagingBytes%kernels.LineBytes != 0:
		return c, invalid("Options.StagingBytes is %d, want a multiple of %d, at most %d", o.StagingBytes, kernels.LineBytes, 64<<20)
	case o.MaxSMs < 0:
		return c, invalid("Options.MaxSMs is %d, want at least 0", o.MaxSMs)
	case o.Timeout < 0:
		return c, invalid("Options.Timeout is %v, want at least 0", o.Timeout)
	}
	h.Engine().Defaults(&c)
	o.Timeout = cmp.Or(o.Timeout, communicator.DefaultTimeout)
	return c, nil
}

// fingerprint has the options that must be equal on all ranks.
func fingerprint(c *kernels.PointBounds) string {
	return fmt.Sprintf("%d semaphores, %d boxes, eager to %d bytes, staging of %d for %d blocks", c.Semaphores, c.Boxes, c.EagerBytes, c.StagingBytes, c.Blocks)
}
