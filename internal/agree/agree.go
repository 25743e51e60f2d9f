// Package agree lets the ranks of a group find out, on the control plane, whether they want the same thing.
package agree

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/memory"
)

// Claim is what one rank brings.
type Claim struct {
	// Must is what has to be the same on every rank, entry by entry.
	Must []string `json:",omitempty"`
	// Own may differ; every rank hears of every other's.
	Own string `json:",omitempty"`
	// Error is why the rank cannot go on. All ranks fail then. Is says which of causes that is, from 1.
	Error string `json:",omitempty"`
	Is    int    `json:",omitempty"`
}

// causes keep their identity on their way to another rank, the first that fits. The order is part of the protocol between
// ranks.
var causes = []error{
	comm.ErrInvalid, comm.ErrUnsupported, memory.ErrOutOfMemory, memory.ErrFreed, comm.ErrPeerLost, comm.ErrAborted, comm.ErrTimeout,
	comm.ErrMismatch, comm.ErrClosed,
}

// RefusedError is another rank's reason not to go on.
type RefusedError struct {
	Rank  int
	Why   string
	Cause error // the condition that it is there, nil for another one
}

// Error names the rank.
func (e *RefusedError) Error() string { return fmt.Sprintf("rank %d refused: %s", e.Rank, e.Why) }

// Unwrap is the cause.
func (e *RefusedError) Unwrap() error { return e.Cause }

// On brings claim, or failed if that is not nil, to all ranks and returns the Own of each. The error is failed itself, a
// *RefusedError, or comm.ErrMismatch with both values. Every rank that calls On leaves it, so all of them go on or
// none does.
func On(ctx context.Context, g *comm.Group, claim Claim, failed error) ([]string, error) {
	if failed != nil {
		claim = Claim{Error: failed.Error(), Is: 1 + slices.IndexFunc(causes, func(c error) bool { return errors.Is(failed, c) })}
	}
	text, err := json.Marshal(claim)
	if err != nil {
		return nil, errors.Join(failed, err)
	}
	all, err := g.AllGather(ctx, text)
	switch {
	case failed != nil:
		return nil, failed
	case err != nil:
		return nil, err
	}
	return compare(all)
}

func compare(all [][]byte) ([]string, error) {
	claims, owns := make([]Claim, len(all)), make([]string, len(all))
	for r := range all {
		if err := json.Unmarshal(all[r], &claims[r]); err != nil {
			return nil, fmt.Errorf("rank %d: malformed claim: %w", r, err)
		}
		owns[r] = claims[r].Own
	}
	for r := range claims {
		if claims[r].Error != "" {
			e := &RefusedError{Rank: r, Why: claims[r].Error}
			if is := claims[r].Is; is > 0 && is <= len(causes) {
				e.Cause = causes[is-1]
			}
			return nil, e
		}
	}
	first := claims[0].Must
	for r := range claims {
		theirs := claims[r].Must
		if len(theirs) != len(first) {
			return nil, fmt.Errorf("%w: rank 0 has %s; rank %d has %s: they call different things, or run different versions",
				comm.ErrMismatch, first, r, theirs)
		}
		for i := range theirs {
			if theirs[i] != first[i] {
				return nil, fmt.Errorf("%w: rank 0 has %s; rank %d has %s", comm.ErrMismatch, first[i], r, theirs[i])
			}
		}
	}
	return owns, nil
}
