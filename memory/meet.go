package memory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/comm"
)

// round is what a rank brings to a collective call of the heap. A rank that has failed comes all the
// same and says so: nobody waits for it, and all ranks fail or go on together.
type round struct {
	// Op is the call, Must what has to be the same on every rank, Info what need not.
	Op   string
	Must []value `json:",omitempty"`
	Info []int64 `json:",omitempty"`
	// Err is why this rank cannot go on, Is which of remoteConditions that is, from 1.
	Err string `json:",omitempty"`
	Is  int    `json:",omitempty"`
}

type value struct{ Name, Value string }

// remoteConditions keep their identity on their way to another rank. The order is part of the
// protocol between ranks.
var remoteConditions = []error{
	ErrOutOfMemory, ErrFreed, ErrClosed, ErrUnsupported, ErrInvalid, comm.ErrMismatch,
}

// rankError is another rank's reason not to go on.
type rankError struct {
	rank int
	text string
	is   error
}

func (e *rankError) Error() string { return fmt.Sprintf("rank %d: %s", e.rank, e.text) }
func (e *rankError) Unwrap() error { return e.is }

// cutError means that a round did not take place: it is not known what the others do.
type cutError struct{ error }

func (e *cutError) Unwrap() error { return e.error }

// meet brings mine, and err if this rank has failed, to the other ranks. It returns everybody's Info.
// The error is err, another rank's, or says which values differ; then every rank gets one.
func meet(ctx context.Context, g *comm.Group, mine round, err error) ([][]int64, error) {
	if err != nil {
		mine.Err = err.Error()
		for i, c := range remoteConditions {
			if errors.Is(err, c) {
				mine.Is = i + 1
			}
		}
	}
	msg, jerr := json.Marshal(mine)
	if jerr != nil {
		return nil, errors.Join(err, jerr)
	}
	all, gerr := g.AllGather(ctx, msg)
	if gerr != nil {
		return nil, errors.Join(err, &cutError{gerr})
	}
	if err != nil {
		return nil, err
	}
	rounds := make([]round, len(all))
	for r := range all {
		if jerr := json.Unmarshal(all[r], &rounds[r]); jerr != nil {
			return nil, &cutError{fmt.Errorf("rank %d: malformed message: %w", r, jerr)}
		}
	}
	return compareRounds(rounds)
}

func compareRounds(rounds []round) ([][]int64, error) {
	first := rounds[0]
	for r, o := range rounds {
		if o.Op != first.Op {
			return nil, fmt.Errorf("%w: rank 0 calls %q, rank %d calls %q", comm.ErrMismatch, first.Op, r, o.Op)
		}
	}
	for r, o := range rounds {
		if o.Err != "" {
			e := &rankError{rank: r, text: o.Err}
			if o.Is > 0 && o.Is <= len(remoteConditions) {
				e.is = remoteConditions[o.Is-1]
			}
			return nil, e
		}
	}
	infos := make([][]int64, len(rounds))
	for r, o := range rounds {
		if len(o.Must) != len(first.Must) {
			return nil, fmt.Errorf("%w: ranks 0 and %d run different versions", comm.ErrMismatch, r)
		}
		for i, v := range o.Must {
			if w := first.Must[i]; v != w {
				return nil, fmt.Errorf("%w: %s: rank 0 has %s, rank %d has %s",
					comm.ErrMismatch, w.Name, w.Value, r, v.Value)
			}
		}
		if len(o.Info) != len(first.Info) {
			return nil, fmt.Errorf("%w: ranks 0 and %d run different versions", comm.ErrMismatch, r)
		}
		infos[r] = o.Info
	}
	return infos, nil
}
