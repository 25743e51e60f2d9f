package comm

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Conditions. Test for them with [errors.Is]; they arrive wrapped, most often
// in a [*PeerError] that says which rank is meant.
var (
	// ErrPeerLost means that a rank of the group is gone: its process died,
	// it was silent for longer than [Config.PeerTimeout], or it closed its end
	// of the group while others still needed it. Survivors can [Group.Shrink].
	ErrPeerLost = errors.New("peer lost")

	// ErrAborted means that a rank called [Group.Abort]. The error also wraps
	// the cause it gave; across processes the cause keeps its text and the
	// conditions of this list, not its type.
	ErrAborted = errors.New("aborted")

	// ErrClosed means that this rank has closed the group itself, or whatever
	// else was called: packages above use the same value.
	ErrClosed = errors.New("closed")

	// ErrTimeout means that something did not happen within its deadline.
	ErrTimeout = errors.New("timed out")

	// ErrMismatch means that ranks were configured differently or made
	// different calls. The message holds both values.
	ErrMismatch = errors.New("mismatch")

	// ErrOutOfStep means that ranks wait for each other in calls of different
	// kinds, one in an exchange and one in a reduction for example. The
	// object that made the call can then only be closed.
	ErrOutOfStep = errors.New("out of step")

	// ErrInvalid means that an argument is out of its range; the message holds
	// the value. Nothing has been done then. Packages above use the same value.
	ErrInvalid = errors.New("invalid argument")

	// ErrOutOfMemory means that there is no memory for what was asked. Packages
	// above use the same value.
	ErrOutOfMemory = errors.New("out of memory")

	// ErrFreed means that the memory that was given was freed before. Packages
	// above use the same value.
	ErrFreed = errors.New("memory was freed")

	// ErrUnsupported means that the device or the kind of memory cannot do
	// what was asked; the message says why. Packages above use the same value.
	ErrUnsupported = errors.New("not supported")
)

// Invalid returns an [ErrInvalid] error, prefixed with the name of the package
// that refuses. Packages above use it.
func Invalid(name, format string, args ...any) error {
	return fmt.Errorf("%s: %w: %s", name, ErrInvalid, fmt.Sprintf(format, args...))
}

// PeerError says which rank an error is about. Conditions and causes are
// found through Err: errors.Is(err, [ErrPeerLost]) and so on.
type PeerError struct {
	// Rank is the rank the error is about, as numbered in the group that the
	// caller holds. It is -1 for a rank that is not a member of that group,
	// which happens when an abort of a parent group reaches its subgroups.
	Rank int
	// Op is what this rank was doing when it learned of it, empty if nothing.
	Op string
	// Epoch is the epoch that was waited for: of a call of a communicator on the data plane,
	// of a collective call in this package (the first call is 1). 0 means unknown.
	Epoch uint64
	// Err is the condition and its cause.
	Err error
}

// Error formats the error as "comm: op: rank 3, epoch 7: peer lost: ...".
func (e *PeerError) Error() string {
	var b strings.Builder
	b.WriteString("comm: ")
	if e.Op != "" {
		b.WriteString(e.Op)
		b.WriteString(": ")
	}
	switch {
	case e.Rank < 0:
		b.WriteString("a rank outside this group")
	default:
		fmt.Fprintf(&b, "rank %d", e.Rank)
	}
	if e.Epoch != 0 {
		fmt.Fprintf(&b, ", epoch %d", e.Epoch)
	}
	b.WriteString(": ")
	if e.Err != nil {
		b.WriteString(e.Err.Error())
	} else {
		b.WriteString("unknown error")
	}
	return b.String()
}

// Unwrap returns Err.
func (e *PeerError) Unwrap() error { return e.Err }

// A condition crosses a socket as one bit, so that errors.Is gives the same
// answer in every process. The order is part of the protocol.
var conditions = [...]error{
	ErrPeerLost,
	ErrAborted,
	ErrClosed,
	ErrTimeout,
	ErrMismatch,
	context.Canceled,
	context.DeadlineExceeded,
}

func conditionBits(err error) uint32 {
	var bits uint32
	for i, c := range conditions {
		if errors.Is(err, c) {
			bits |= 1 << i
		}
	}
	return bits
}

// remoteError is the cause of a failure in another process: its text, and the
// conditions it met there.
type remoteError struct {
	text string
	bits uint32
}

func (e *remoteError) Error() string { return e.text }

func (e *remoteError) Is(target error) bool {
	for i, c := range conditions {
		if e.bits&(1<<i) != 0 && target == c {
			return true
		}
	}
	return false
}
