package core

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// ErrInvalid is the cause of errors about arguments that are found here.
var ErrInvalid = errors.New("invalid argument")

// ErrClosed is returned by calls on a closed Comm.
var ErrClosed = errors.New("core: communicator is closed")

// ErrPanic is the cause of errors that were panics.
var ErrPanic = errors.New("internal error")

// Code is an error's kind, as a C caller sees it.
type Code int32

// The codes. Their numbers are part of the ABI.
const (
	OK          Code = 0
	Again       Code = 1 // not complete yet: wait once more
	Invalid     Code = 2
	Unsupported Code = 3
	Closed      Code = 4
	PeerLost    Code = 5
	Timeout     Code = 6
	Aborted     Code = 7
	Mismatch    Code = 8
	OutOfMemory Code = 9
	Diverged    Code = 10
	Freed       Code = 11
	Overflow    Code = 12
	NoHandle    Code = 13
	Failed      Code = 14 // anything else
	Panic       Code = 15
	OutOfStep   Code = 16
	Masked      Code = 17
)

var conditions = []struct {
	err  error
	code Code
}{
	// A peer's end comes first: it explains the other errors.
	{comm.ErrPeerLost, PeerLost},
	{comm.ErrAborted, Aborted},
	{comm.ErrOutOfStep, OutOfStep},
	{comm.ErrMismatch, Mismatch},
	{comm.ErrTimeout, Timeout},
	{comm.ErrClosed, Closed},
	{alltoallv.ErrInvalid, Invalid},
	{alltoallv.ErrClosed, Closed},
	{allreduce.ErrInvalid, Invalid},
	{allreduce.ErrUnsupported, Unsupported},
	{allreduce.ErrClosed, Closed},
	{memory.ErrOutOfMemory, OutOfMemory},
	{memory.ErrFreed, Freed},
	{memory.ErrDiverged, Diverged},
	{memory.ErrClosed, Closed},
	{memory.ErrUnsupported, Unsupported},
	{memory.ErrInvalid, Invalid},
	{dispatch.ErrInvalid, Invalid},
	{dispatch.ErrHalf, Invalid},
	{dispatch.ErrClosed, Closed},
	{dispatch.ErrReleased, Freed},
	{dispatch.ErrNoHandle, NoHandle},
	{device.ErrClosed, Closed},
	{device.ErrUnavailable, Unsupported},
	{ErrPanic, Panic},
	{comm.ErrUnsupported, Unsupported},
	{ErrInvalid, Invalid},
	{ErrClosed, Closed},
}

// badEnvironment is a variable of the environment that cannot be understood.
func badEnvironment(err error) error { return fmt.Errorf("core: environment: %w: %w", ErrInvalid, err) }

// Refusal is an error of a kind, with a caller's text.
func Refusal(code Code, text string) error {
	if code == Unsupported {
		return fmt.Errorf("%w: %s", comm.ErrUnsupported, text)
	}
	return fmt.Errorf("%w: %s", comm.ErrInvalid, text)
}

// Classify tells the kind of an error and which rank it is about, -1 for none.
func Classify(err error) (code Code, rank int) {
	rank = -1
	if err == nil {
		return OK, rank
	}
	var peer *comm.PeerError
	if errors.As(err, &peer) {
		rank = peer.Rank
	}
	var refused *agree.RefusedError
	if errors.As(err, &refused) && peer == nil {
		rank = refused.Rank
	}
	var overflow *dispatch.OverflowError
	if errors.As(err, &overflow) {
		return Overflow, rank
	}
	var masked *kernels.MaskedError
	if errors.As(err, &masked) {
		return Masked, masked.Rank
	}
	var short *kernels.ShortError
	var index *dispatch.IndexError
	if errors.As(err, &short) || errors.As(err, &index) {
		return Invalid, rank
	}
	var splits *kernels.SplitsError
	if errors.As(err, &splits) {
		return Invalid, splits.Rank
	}
	for _, c := range conditions {
		if errors.Is(err, c.err) {
			return c.code, rank
		}
	}
	return Failed, rank
}

// Detail is more about an error, as C callers see it.
type Detail struct {
	// Earlier is not 0 where an earlier call of the ranks is found to have failed, this one was not made, and it can be made now.
	Earlier int64
	// Rank is the one whose Token has as Choice an Expert that there is not, -1 for other errors.
	Rank, Token, Choice, Expert int64
}

// DetailOf tells more about an error.
func DetailOf(err error) Detail {
	d := Detail{Rank: -1}
	if errors.Is(err, communicator.ErrEarlier) && kernels.Recoverable(err) {
		d.Earlier = 1
	}
	var index *dispatch.IndexError
	if errors.As(err, &index) {
		d.Rank, d.Token, d.Choice, d.Expert = int64(index.Rank), int64(index.Token), int64(index.Choice), index.Expert
	}
	return d
}
