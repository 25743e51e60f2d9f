package worldtest

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
)

// Kind opens communicators of a kind.
type Kind func(r *Rank, o Opening) (*Member, error)

// Opening says how. Bad has an option refused, Validate sets Options.Validate, and Timeout that of waits; 0 is the default.
type Opening struct {
	Bad, Validate bool
	Timeout       time.Duration
}

// Member is one that is open. Call makes one call, with arguments that are refused if bad.
type Member struct {
	Call  func(s device.Stream, bad bool) error
	Close func(ctx context.Context) error
}

// Promise is one that every communicator keeps, whatever its kind: its test has a number of ranks of the host.
type Promise struct {
	name    string
	ranks   int
	segment int64
	test    func(r *Rank, k Kind)
}

// Holds tests a kind.
func (p Promise) Holds(t *testing.T, k Kind) {
	Local(t, p.ranks, p.segment, func(r *Rank) { p.test(r, k) })
}

// KeepsPromises tests all of them but some, and that queued calls fail at once (F1).
func (k Kind) KeepsPromises(t *testing.T, but ...Promise) {
	for _, p := range []Promise{Refused, NoMemory, Growth, Closed, Repeated, Lean} {
		if !slices.ContainsFunc(but, func(b Promise) bool { return b.name == p.name }) {
			t.Run(p.name, func(t *testing.T) { p.Holds(t, k) })
		}
	}
	t.Run("queued calls fail at once", func(t *testing.T) {
		QueuedCallsFailAtOnce(t, 16<<20, func(r *Rank, timeout time.Duration) func(device.Stream) error {
			m, err := k(r, Opening{Timeout: timeout})
			r.Must(err)
			return func(s device.Stream) error { return m.Call(s, false) }
		})
	})
}

// The promises. A kind needs at most 15 MiB of a segment.
var (
	// An option that one rank refuses is an error on all (F3).
	Refused = Promise{"an option that one rank refuses", 3, 16 << 20, func(r *Rank, k Kind) {
		_, err := k(r, Opening{Bad: r.Rank() == 1})
		require.ErrorIs(r.T, err, comm.ErrInvalid)
		require.NotErrorIs(r.T, err, comm.ErrMismatch)
		if r.Rank() != 1 {
			require.ErrorContains(r.T, err, "rank 1")
		}
		require.Zero(r.T, r.Heap.Stats().InUse)
	}}
	// One rank without memory is every rank's error, at once (F3).
	NoMemory = Promise{"one rank without memory", 3, 16 << 20, func(r *Rank, k Kind) {
		if r.Rank() == 1 {
			b, err := r.Heap.Alloc(r.Heap.Stats().LargestFree)
			r.Must(err)
			defer func() { r.Must(b.Free()) }()
		}
		start := time.Now()
		_, err := k(r, Opening{})
		require.ErrorIs(r.T, err, memory.ErrOutOfMemory)
		require.ErrorContains(r.T, err, "rank 1")
		require.Less(r.T, time.Since(start), time.Minute)
	}}
	// The heap grows if no rank has room.
	Growth = Promise{"the heap grows", 2, 1 << 20, func(r *Rank, k Kind) {
		all, err := r.Heap.Alloc(r.Heap.Stats().LargestFree)
		r.Must(err)
		m, err := k(r, Opening{})
		r.Must(err)
		r.Must(m.Call(nil, false))
		r.Must(m.Close(r.Ctx))
		r.Must(all.Free())
		require.Zero(r.T, r.Heap.Stats().InUse)
		r.Must(r.Heap.Verify(r.Ctx))
	}}
	// Calls on what is closed end at once: a rank that is closed has nobody to compare them with.
	Closed = Promise{"calls on what is closed", 2, 16 << 20, func(r *Rank, k Kind) {
		m, err := k(r, Opening{Validate: true})
		r.Must(err)
		r.Must(m.Call(nil, false))
		r.Must(m.Close(r.Ctx))
		if r.Rank() == 0 {
			start := time.Now()
			require.ErrorIs(r.T, m.Call(nil, false), comm.ErrClosed)
			require.ErrorIs(r.T, m.Call(nil, true), comm.ErrClosed)
			require.Less(r.T, time.Since(start), time.Minute)
		}
		r.Must(m.Close(r.Ctx))
	}}
	// A rank may repeat a call that it has refused, for which the others wait.
	Repeated = Promise{"a call that was refused", 2, 16 << 20, func(r *Rank, k Kind) {
		m, err := k(r, Opening{})
		r.Must(err)
		if r.Rank() == 1 {
			require.ErrorIs(r.T, m.Call(nil, true), comm.ErrInvalid)
		}
		r.Must(m.Call(nil, false))
		r.Must(m.Close(r.Ctx))
	}}
	// A call allocates nothing once warm. Its arguments are the kind's to keep.
	Lean = Promise{"nothing is allocated once warm", 2, 16 << 20, func(r *Rank, k Kind) {
		m, err := k(r, Opening{})
		r.Must(err)
		s := r.Stream()
		r.AllocatesNothing(func() { r.Must(m.Call(nil, false)) })
		r.AllocatesNothing(func() { r.Must(m.Call(s, false)); r.Must(s.Synchronize()) })
		r.Must(m.Close(r.Ctx))
	}}
)
