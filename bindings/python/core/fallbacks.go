package core

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/observe"
)

// Unmet is a rank of a process group whose calls another library makes: its ranks have not met here, or cannot.
type Unmet struct {
	rank *flight.Rank
	gone func()
}

// UnmetOptions say who that rank is.
type UnmetOptions struct {
	Rank, Size, LocalRank int
	Name                  string
	// Job is the same on all ranks of a job: where the ranks of the process group find each other.
	Job string
	// Environ is as in Options.
	Environ map[string]string
}

// NewUnmet makes an Unmet, which metrics and switchyard status show like a rank whose group has met.
func NewUnmet(o UnmetOptions) (*Unmet, error) {
	if o.Size < 1 || o.Rank < 0 || o.Rank >= o.Size || o.LocalRank < 0 {
		return nil, fmt.Errorf("core: %w: rank %d of %d with local rank %d", ErrInvalid, o.Rank, o.Size, o.LocalRank)
	}
	environment.Lock()
	err := refresh(o.Environ)
	environment.Unlock()
	if err != nil {
		return nil, err
	}
	r := flight.New(o.Rank, o.Size)
	r.Group, r.Job, r.Host, r.Local = o.Name, xxhash.Sum64String(o.Job), -1, o.LocalRank
	u := &Unmet{rank: r, gone: r.Add(&flight.Part{})}
	log, err := env.Logger(os.Stderr)
	if err != nil {
		log = slog.New(slog.DiscardHandler) // a rank that joins hears of it
	}
	observe.FromEnv(log)
	return u, nil
}

// Met ends an Unmet. c takes over its counts, unless it is nil.
func (u *Unmet) Met(c *Comm) error {
	defer u.gone()
	if c == nil {
		return nil
	}
	r, err := c.flight()
	if err == nil {
		r.Was(u.rank)
	}
	return err
}

func (u *Unmet) flight() (*flight.Rank, error) { return u.rank, nil }

func (c *Comm) flight() (*flight.Rank, error) {
	_, g, err := c.ready()
	if err != nil {
		return nil, err
	}
	r, _ := g.Flight()
	return r, nil
}

// Counts is a Comm or an Unmet: a rank that counts calls which another library makes.
type Counts interface{ flight() (*flight.Rank, error) }

// FellBack counts a call that one of torch's backends makes in the place of Switchyard, and logs the first one of its kind.
func FellBack(c Counts, operation, backend, reason string) error {
	if flight.Reasons[reason] == "" {
		return fmt.Errorf("core: %w: reason %q, want one of %v", ErrInvalid, reason, slices.Sorted(maps.Keys(flight.Reasons)))
	}
	r, err := c.flight()
	if err != nil {
		return err
	}
	if r.FellBack(flight.Fallback{Operation: operation, Backend: backend, Reason: reason}) {
		if log, err := env.Logger(os.Stderr); err == nil && log != nil { // a rank that joins hears of one that cannot be made
			log.Warn("calls fall back", "rank", r.Number, "group", r.Group, "operation", operation, "to", backend, "because", flight.Reasons[reason])
		}
	}
	return nil
}
