// Package agree lets the ranks of a group find out, on the control plane, whether they make the same call with the same
// values. A rank that has failed comes all the same and says so: no rank waits for it, and all fail or go on together.
package agree

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/comm"
)

// Claim is what one rank brings.
type Claim struct {
	// Op is the call that the ranks make. It may be empty where they can make no other.
	Op string `json:",omitempty"`
	// Must is what has to be the same on every rank, entry by entry.
	Must []Value `json:",omitempty"`
	// Own and Info may differ; every rank hears of every other's. Info has as many entries on every rank.
	Own  string  `json:",omitempty"`
	Info []int64 `json:",omitempty"`
	// Error is why the rank cannot go on. All ranks fail then. Is says which of causes that is, from 1.
	Error string `json:",omitempty"`
	Is    int    `json:",omitempty"`
}

// Value is something that ranks compare. Without a name its text says what it is.
type Value struct {
	Name  string `json:",omitempty"`
	Value string
}

// Named is a value, printed as fmt.Sprint does.
func Named(name string, value any) Value { return Value{name, fmt.Sprint(value)} }

// Same is values without names.
func Same(texts ...string) []Value {
	values := make([]Value, len(texts))
	for i, t := range texts {
		values[i].Value = t
	}
	return values
}

// Claims are those of all ranks.
type Claims []Claim

// Owns is the Own of each rank.
func (c Claims) Owns() []string {
	owns := make([]string, len(c))
	for r := range c {
		owns[r] = c[r].Own
	}
	return owns
}

// Infos is the Info of each rank.
func (c Claims) Infos() [][]int64 {
	infos := make([][]int64, len(c))
	for r := range c {
		infos[r] = c[r].Info
	}
	return infos
}

// causes keep their identity on their way to another rank, the first that fits. The order is part of the protocol between
// ranks.
var causes = []error{
	comm.ErrInvalid, comm.ErrUnsupported, comm.ErrOutOfMemory, comm.ErrFreed, comm.ErrPeerLost, comm.ErrAborted, comm.ErrTimeout,
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

// CutError means that the ranks did not meet: it is not known what the others do.
type CutError struct{ Err error }

// Error is that of the meeting.
func (e *CutError) Error() string { return e.Err.Error() }

// Unwrap is the meeting's error.
func (e *CutError) Unwrap() error { return e.Err }

// On brings claim, or failed if that is not nil, to all ranks and returns the claims of all. The error is failed itself, a
// *RefusedError, or comm.ErrMismatch with both values; then every rank gets one. With a *CutError, alone or joined with failed,
// the others may have gone on.
func On(ctx context.Context, g *comm.Group, claim Claim, failed error) (Claims, error) {
	if failed != nil {
		claim = Claim{Op: claim.Op, Error: failed.Error(), Is: 1 + slices.IndexFunc(causes, func(c error) bool { return errors.Is(failed, c) })}
	}
	text, err := json.Marshal(claim)
	if err != nil {
		return nil, errors.Join(failed, err)
	}
	all, err := g.AllGather(ctx, text)
	switch {
	case err != nil && failed != nil:
		return nil, errors.Join(failed, &CutError{err})
	case err != nil:
		return nil, &CutError{err}
	case failed != nil:
		return nil, failed
	}
	if past := all[g.Rank()]; string(past) != string(text) {
		// This process has taken the place of a lost rank, whose claim that was. It has to claim the same, but for what may differ.
		all[g.Rank()] = text
		if _, err := compare(all); err != nil {
			return nil, err
		}
		all[g.Rank()] = past
	}
	return compare(all)
}

func compare(all [][]byte) (Claims, error) {
	claims := make(Claims, len(all))
	for r := range all {
		if err := json.Unmarshal(all[r], &claims[r]); err != nil {
			return nil, &CutError{fmt.Errorf("rank %d: malformed claim: %w", r, err)}
		}
	}
	first := &claims[0]
	for r := range claims {
		if theirs := claims[r].Op; theirs != first.Op {
			return nil, fmt.Errorf("%w: rank 0 calls %q, rank %d calls %q", comm.ErrMismatch, first.Op, r, theirs)
		}
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
	for r := range claims {
		theirs := &claims[r]
		same := len(theirs.Must) == len(first.Must) && len(theirs.Info) == len(first.Info)
		for i, v := range theirs.Must[:min(len(theirs.Must), len(first.Must))] {
			switch w := first.Must[i]; {
			case v == w:
			case v.Name != w.Name || w.Name == "" && !same:
				return nil, shapes(first, theirs, r)
			case w.Name == "":
				return nil, fmt.Errorf("%w: rank 0 has %s; rank %d has %s", comm.ErrMismatch, w.Value, r, v.Value)
			default:
				return nil, fmt.Errorf("%w: %s: rank 0 has %s, rank %d has %s", comm.ErrMismatch, w.Name, w.Value, r, v.Value)
			}
		}
		if !same {
			return nil, shapes(first, theirs, r)
		}
	}
	return claims, nil
}

// shapes is the error of rank r, whose claim has other names or another number of values than rank 0's.
func shapes(first, theirs *Claim, r int) error {
	return fmt.Errorf("%w: rank 0 has %s; rank %d has %s: they call different things, or run different versions",
		comm.ErrMismatch, first.words(), r, theirs.words())
}

// words is what a claim of another shape has.
func (c *Claim) words() string {
	values := make([]string, len(c.Must))
	for i, v := range c.Must {
		values[i] = v.Value
	}
	if len(c.Info) > 0 {
		return fmt.Sprintf("%s and %d numbers", values, len(c.Info))
	}
	return fmt.Sprint(values)
}
