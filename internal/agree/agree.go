// Package agree lets the ranks of a group find out, on the control plane, whether they want the same thing.
package agree

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/comm"
)

// Claim is what one rank brings.
type Claim struct {
	// Must is what has to be the same on every rank, entry by entry.
	Must []string `json:",omitempty"`
	// Own may differ; every rank hears of every other's.
	Own string `json:",omitempty"`
	// Error is why the rank cannot go on. All ranks fail then.
	Error string `json:",omitempty"`
}

// RefusedError is another rank's reason not to go on. It is a comm.ErrMismatch.
type RefusedError struct {
	Rank int
	Why  string
}

// Error names the rank.
func (e *RefusedError) Error() string { return fmt.Sprintf("rank %d refused: %s", e.Rank, e.Why) }

// Unwrap is comm.ErrMismatch.
func (e *RefusedError) Unwrap() error { return comm.ErrMismatch }

// On brings claim, or failed if that is not nil, to all ranks and returns the Own of each. The error is failed itself, a
// *RefusedError, or comm.ErrMismatch with both values. Every rank that calls On leaves it, so all of them go on or
// none does.
func On(ctx context.Context, g *comm.Group, claim Claim, failed error) ([]string, error) {
	if failed != nil {
		claim = Claim{Error: failed.Error()}
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
			return nil, &RefusedError{r, claims[r].Error}
		}
	}
	first := claims[0].Must
	for r := range claims {
		theirs := claims[r].Must
		if len(theirs) != len(first) {
			return nil, fmt.Errorf("%w: ranks 0 and %d run different versions", comm.ErrMismatch, r)
		}
		for i := range theirs {
			if theirs[i] != first[i] {
				return nil, fmt.Errorf("%w: rank 0 has %s; rank %d has %s", comm.ErrMismatch, first[i], r, theirs[i])
			}
		}
	}
	return owns, nil
}
