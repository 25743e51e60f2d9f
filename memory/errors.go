package memory

import (
	"errors"
	"fmt"
	"strings"

	"github.com/switchyard-moe/switchyard/comm"
)

// errClosed is ErrClosed in words.
var errClosed = fmt.Errorf("heap is %w", ErrClosed)

// Conditions that callers tell apart with errors.Is. Two more come from package comm: ErrMismatch
// when the ranks of a collective call bring different values, with both in the message, and
// ErrPeerLost when one of them is gone.
var (
	// ErrOutOfMemory: no free piece of the pool is large enough, or a Grow would pass
	// Options.ReserveBytes. Every rank gets it in the same call.
	ErrOutOfMemory = comm.ErrOutOfMemory
	// ErrFreed: the buffer, mapping or registration was freed.
	ErrFreed = comm.ErrFreed
	// ErrDiverged: the ranks made different calls. The error is a *DivergenceError.
	ErrDiverged = errors.New("ranks diverged")
	// ErrClosed: the heap is closed.
	ErrClosed = comm.ErrClosed
	// ErrUnsupported: the device or the kind of memory cannot do that. The error says why.
	ErrUnsupported = comm.ErrUnsupported
	// ErrInvalid: an argument is out of its range. The error has the value.
	ErrInvalid = comm.ErrInvalid
)

// DivergenceError says where the ranks of a heap stopped making the same calls. It is an
// ErrDiverged for errors.Is.
type DivergenceError struct {
	// Call is the number of the first call that differs. Calls are counted from 1, per heap:
	// every Alloc, Free, Grow, Register and Deregister is one.
	Call int64
	// After is the last call known to be the same on every rank. It is Call-1 when the call
	// is known exactly; when the divergence is older than the log of recent calls, the first
	// call that differs lies after After and not after Call.
	After int64
	// Ranks are those that differ from the most common history, or from rank 0's if no
	// history is more common.
	Ranks []int
	// Calls is the call of every rank at Call, in rank order; nil if that is no longer known.
	Calls []RankCall
}

// RankCall is one call of one rank.
type RankCall struct {
	Rank int
	// Kind is "alloc", "free", "grow", "register", "deregister", "alloc on the rail" or "free on the rail", or "none" when the rank
	// made fewer calls.
	Kind string
	// Size is the size that was requested (alloc, grow, register) or given back, in bytes.
	Size int64
	// Segment and Offset are the place. Offset is -1 if the call found no memory.
	Segment int
	Offset  int64
}

// String is the call in words.
func (c RankCall) String() string {
	switch {
	case c.Kind == callNone.String():
		return "no call"
	case c.Offset < 0:
		return fmt.Sprintf("%s of %d bytes: out of memory", c.Kind, c.Size)
	}
	return fmt.Sprintf("%s of %d bytes at segment %d offset %d", c.Kind, c.Size, c.Segment, c.Offset)
}

// Exact reports whether Call is the first call that differs, rather than an upper bound.
func (e *DivergenceError) Exact() bool { return e.Call == e.After+1 }

// Unwrap returns ErrDiverged.
func (e *DivergenceError) Unwrap() error { return ErrDiverged }

// Error names the first call that differs and what each rank called.
func (e *DivergenceError) Error() string {
	var s strings.Builder
	fmt.Fprintf(&s, "memory: %v", ErrDiverged)
	if !e.Exact() {
		fmt.Fprintf(&s, " after call %d and before call %d (%s unlike the others): longer ago than the log of recent calls",
			e.After, e.Call+1, rankList(e.Ranks))
		return s.String()
	}
	fmt.Fprintf(&s, " at call %d (%s unlike the others)", e.Call, rankList(e.Ranks))
	sep := ": "
	for i, c := range e.Calls {
		// ranks that did the same are named together, where the first of them stands
		same, first := []int(nil), true
		for j, d := range e.Calls {
			if d.Rank = c.Rank; d == c {
				same = append(same, e.Calls[j].Rank)
				first = first && j >= i
			}
		}
		if first {
			fmt.Fprintf(&s, "%s%s: %s", sep, rankList(same), c)
			sep = "; "
		}
	}
	return s.String()
}

// rankList is "rank 2" or "ranks 1, 2, 5".
func rankList(ranks []int) string {
	word := "rank "
	if len(ranks) != 1 {
		word = "ranks "
	}
	return word + strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ", "), "[]")
}
