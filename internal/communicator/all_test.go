package communicator_test

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// kind opens communicators for tests of all kinds; validates says that there is an Options.Validate.
type kind struct {
	worldtest.Kind
	validates bool
}

type member = worldtest.Member

func or(bad bool, no, yes int64) int64 {
	if bad {
		return no
	}
	return yes
}

var kinds = map[string]kind{
	"exchanger": {validates: true, Kind: func(r *worldtest.Rank, o worldtest.Opening) (*member, error) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{SlotBytes: or(o.Bad, 100, 0), Validate: o.Validate})
		if err != nil {
			return nil, err
		}
		sp := func(bad bool) *alltoallv.Splits {
			sp := &alltoallv.Splits{}
			for range r.Size() {
				sp.Send, sp.Recv = append(sp.Send, or(bad, -1, 4)), append(sp.Recv, 4)
			}
			return sp
		}
		buffer := func() memory.View { return memory.Host(make([]byte, 4*r.Size())) }
		return &member{Call: func(s device.Stream, bad bool) error { return x.Exchange(s, buffer(), buffer(), sp(bad)) }, Close: x.Close}, nil
	}},
	"reducer": {validates: true, Kind: func(r *worldtest.Rank, o worldtest.Opening) (*member, error) {
		x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{SlotBytes: or(o.Bad, 100, 0), Validate: o.Validate})
		if err != nil {
			return nil, err
		}
		return &member{Call: func(s device.Stream, bad bool) error {
			return x.AllReduce(s, memory.Host(make([]byte, or(bad, 5, 8))), memory.Host(make([]byte, 8)), kernels.Float32, kernels.Sum)
		}, Close: x.Close}, nil
	}},
	"buckets": {Kind: func(r *worldtest.Rank, o worldtest.Opening) (*member, error) {
		b, err := allreduce.NewBuckets(r.Ctx, r.Heap, []allreduce.Gradient{{Len: int(or(o.Bad, -1, 1<<20))}}, allreduce.BucketOptions{})
		if err != nil {
			return nil, err
		}
		return &member{Call: func(_ device.Stream, bad bool) error {
			if err := b.Ready(nil, int(or(bad, 7, 0))); err != nil {
				return err
			}
			return b.Wait(nil)
		}, Close: b.Close}, nil
	}},
	"dispatcher": {Kind: func(r *worldtest.Rank, o worldtest.Opening) (*member, error) {
		d, err := dispatch.New(r.Ctx, r.Heap, dispatch.Options{Experts: r.Size(), TopK: 1, Hidden: 16, MaxTokens: int(or(o.Bad, -1, 8))})
		if err != nil {
			return nil, err
		}
		return &member{Call: dispatchCall(d), Close: d.Close}, nil
	}},
}

func each(t *testing.T, ranks int, segment int64, f func(r *worldtest.Rank, k kind)) {
	for name, k := range kinds {
		t.Run(name, func(t *testing.T) {
			worldtest.Local(t, ranks, segment, func(r *worldtest.Rank) { f(r, k) })
		})
	}
}

func TestF3_AnOptionThatOneRankRefusesIsInvalidOnAll(t *testing.T) { promised(t, worldtest.Refused) }
func TestF3_OneRankWithoutMemoryIsEveryRanksErrorAtOnce(t *testing.T) {
	promised(t, worldtest.NoMemory)
}
func TestTheHeapGrowsWhereNoRankHasRoom(t *testing.T)   { promised(t, worldtest.Growth) }
func TestCallsOnWhatIsClosedEndAtOnce(t *testing.T)     { promised(t, worldtest.Closed) }
func TestACallThatWasRefusedCanBeRepeated(t *testing.T) { promised(t, worldtest.Repeated) }

// promised holds a promise of all communicators.
func promised(t *testing.T, p worldtest.Promise) {
	for name, k := range kinds {
		t.Run(name, func(t *testing.T) { p.Holds(t, k.Kind) })
	}
}

// With a logger at trace level a call writes one line; without, it costs nothing.
func TestTraceHasALineForEachCall(t *testing.T) {
	for name, k := range kinds {
		t.Run(name, func(t *testing.T) {
			for _, level := range []slog.Level{slog.LevelInfo, env.LevelTrace} {
				var said bytes.Buffer
				groups, err := comm.Local(1, comm.LocalOptions{Logger: slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: level}))})
				require.NoError(t, err)
				h, err := memory.NewHeap(t.Context(), groups[0], device.Host(), memory.Options{SegmentBytes: 16 << 20})
				require.NoError(t, err)
				m, err := k.Kind(&worldtest.Rank{T: t, Ctx: t.Context(), Group: groups[0], Device: device.Host(), Heap: h}, worldtest.Opening{})
				require.NoError(t, err)
				require.NoError(t, m.Call(nil, false))
				require.NoError(t, errors.Join(m.Close(t.Context()), h.Close(t.Context()), groups[0].Close()))
				if level == env.LevelTrace {
					require.Regexp(t, `msg=call group=world rank=0 operation=(alltoallv|all-reduce|dispatch) stream=`, said.String())
				} else {
					require.NotContains(t, said.String(), "operation=")
				}
			}
		})
	}
}

func TestF3_WithValidateAnInvalidArgumentIsInvalidOnAll(t *testing.T) {
	each(t, 3, 16<<20, func(r *worldtest.Rank, k kind) {
		if !k.validates {
			return
		}
		m, err := k.Kind(r, worldtest.Opening{Validate: true})
		r.Must(err)
		err = m.Call(nil, r.Rank() == 1)
		require.ErrorIs(r.T, err, comm.ErrInvalid)
		require.NotErrorIs(r.T, err, comm.ErrMismatch)
		if r.Rank() != 1 {
			require.ErrorContains(r.T, err, "rank 1")
		}
		r.Must(m.Call(nil, false)) // which it has not broken
		r.Must(m.Close(r.Ctx))
	})
}

// With Validate ranks that make different calls have an error with both, and nothing has happened.
func TestF3_WithValidateDifferentCallsAreNamed(t *testing.T) {
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		var ms []*member
		for _, name := range []string{"exchanger", "reducer"} {
			m, err := kinds[name].Kind(r, worldtest.Opening{Validate: true})
			r.Must(err)
			ms = append(ms, m)
		}
		err := ms[r.Rank()].Call(nil, false)
		require.ErrorIs(r.T, err, comm.ErrMismatch)
		require.ErrorContains(r.T, err, "rank 0 has an exchange; rank 1 has all-reduce (sum) of 2 float32")
		for _, m := range ms {
			r.Must(m.Call(nil, false))
			r.Must(m.Close(r.Ctx))
		}
	})
}

// dispatchCall sends one token to expert 0.
func dispatchCall(d *dispatch.Dispatcher) func(device.Stream, bool) error {
	return func(s device.Stream, bad bool) error {
		h, err := d.Dispatch(s, dispatch.Tokens{X: memory.Host(make([]byte, or(bad, 60, 64))), Experts: memory.Host(make([]byte, 4))})
		if err == nil {
			h.Release()
		}
		return err
	}
}
