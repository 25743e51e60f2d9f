package communicator_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

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

// member is a communicator of any kind. call makes one call, with arguments that are refused where bad.
type member struct {
	call  func(s device.Stream, bad bool) error
	close func(ctx context.Context) error
}

// kind opens communicators. bad has an option refused; validate sets Options.Validate, where there is one.
type kind struct {
	open      func(r *worldtest.Rank, bad, validate bool) (*member, error)
	validates bool
}

func or(bad bool, no, yes int64) int64 {
	if bad {
		return no
	}
	return yes
}

var kinds = map[string]kind{
	"exchanger": {validates: true, open: func(r *worldtest.Rank, bad, validate bool) (*member, error) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{SlotBytes: or(bad, 100, 0), Validate: validate})
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
		return &member{func(s device.Stream, bad bool) error { return x.Exchange(s, buffer(), buffer(), sp(bad)) }, x.Close}, nil
	}},
	"reducer": {validates: true, open: func(r *worldtest.Rank, bad, validate bool) (*member, error) {
		x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{SlotBytes: or(bad, 100, 0), Validate: validate})
		if err != nil {
			return nil, err
		}
		return &member{func(s device.Stream, bad bool) error {
			return x.AllReduce(s, memory.Host(make([]byte, or(bad, 5, 8))), memory.Host(make([]byte, 8)), kernels.Float32, kernels.Sum)
		}, x.Close}, nil
	}},
	"buckets": {open: func(r *worldtest.Rank, bad, _ bool) (*member, error) {
		b, err := allreduce.NewBuckets(r.Ctx, r.Heap, []allreduce.Gradient{{Len: int(or(bad, -1, 1<<20))}}, allreduce.BucketOptions{})
		if err != nil {
			return nil, err
		}
		return &member{func(_ device.Stream, bad bool) error {
			if err := b.Ready(nil, int(or(bad, 7, 0))); err != nil {
				return err
			}
			return b.Wait(nil)
		}, b.Close}, nil
	}},
	"dispatcher": {open: func(r *worldtest.Rank, bad, _ bool) (*member, error) {
		d, err := dispatch.New(r.Ctx, r.Heap, dispatch.Options{Experts: r.Size(), TopK: 1, Hidden: 16, MaxTokens: int(or(bad, -1, 8))})
		if err != nil {
			return nil, err
		}
		return &member{dispatchCall(d), d.Close}, nil
	}},
}

func each(t *testing.T, ranks int, segment int64, f func(r *worldtest.Rank, k kind)) {
	for name, k := range kinds {
		t.Run(name, func(t *testing.T) {
			worldtest.Local(t, ranks, segment, func(r *worldtest.Rank) { f(r, k) })
		})
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
				m, err := k.open(&worldtest.Rank{T: t, Ctx: t.Context(), Group: groups[0], Device: device.Host(), Heap: h}, false, false)
				require.NoError(t, err)
				require.NoError(t, m.call(nil, false))
				require.NoError(t, errors.Join(m.close(t.Context()), h.Close(t.Context()), groups[0].Close()))
				if level == env.LevelTrace {
					require.Regexp(t, `msg=call group=world rank=0 operation=(alltoallv|all-reduce|dispatch) stream=`, said.String())
				} else {
					require.NotContains(t, said.String(), "operation=")
				}
			}
		})
	}
}

func TestF3_AnOptionThatOneRankRefusesIsInvalidOnAll(t *testing.T) {
	each(t, 3, 16<<20, func(r *worldtest.Rank, k kind) {
		_, err := k.open(r, r.Rank() == 1, false)
		require.ErrorIs(r.T, err, comm.ErrInvalid)
		require.NotErrorIs(r.T, err, comm.ErrMismatch)
		if r.Rank() != 1 {
			require.ErrorContains(r.T, err, "rank 1")
		}
		require.Zero(r.T, r.Heap.Stats().InUse)
	})
}

func TestF3_OneRankWithoutMemoryIsEveryRanksErrorAtOnce(t *testing.T) {
	each(t, 3, 16<<20, func(r *worldtest.Rank, k kind) {
		if r.Rank() == 1 {
			b, err := r.Heap.Alloc(r.Heap.Stats().LargestFree)
			r.Must(err)
			defer func() { r.Must(b.Free()) }()
		}
		start := time.Now()
		_, err := k.open(r, false, false)
		require.ErrorIs(r.T, err, memory.ErrOutOfMemory)
		require.ErrorContains(r.T, err, "rank 1")
		require.Less(r.T, time.Since(start), 5*time.Second)
	})
}

func TestTheHeapGrowsWhereNoRankHasRoom(t *testing.T) {
	each(t, 2, 1<<20, func(r *worldtest.Rank, k kind) {
		all, err := r.Heap.Alloc(r.Heap.Stats().LargestFree)
		r.Must(err)
		m, err := k.open(r, false, false)
		r.Must(err)
		r.Must(m.call(nil, false))
		r.Must(m.close(r.Ctx))
		r.Must(all.Free())
		require.Zero(r.T, r.Heap.Stats().InUse)
		r.Must(r.Heap.Verify(r.Ctx))
	})
}

// Nobody else makes the call: a rank that is closed has nobody to compare it with.
func TestCallsOnWhatIsClosedEndAtOnce(t *testing.T) {
	each(t, 2, 16<<20, func(r *worldtest.Rank, k kind) {
		m, err := k.open(r, false, true)
		r.Must(err)
		r.Must(m.call(nil, false))
		r.Must(m.close(r.Ctx))
		if r.Rank() == 0 {
			start := time.Now()
			require.ErrorIs(r.T, m.call(nil, false), comm.ErrClosed)
			require.ErrorIs(r.T, m.call(nil, true), comm.ErrClosed)
			require.Less(r.T, time.Since(start), 5*time.Second)
		}
		r.Must(m.close(r.Ctx))
	})
}

func TestF3_WithValidateAnInvalidArgumentIsInvalidOnAll(t *testing.T) {
	each(t, 3, 16<<20, func(r *worldtest.Rank, k kind) {
		if !k.validates {
			return
		}
		m, err := k.open(r, false, true)
		r.Must(err)
		err = m.call(nil, r.Rank() == 1)
		require.ErrorIs(r.T, err, comm.ErrInvalid)
		require.NotErrorIs(r.T, err, comm.ErrMismatch)
		if r.Rank() != 1 {
			require.ErrorContains(r.T, err, "rank 1")
		}
		r.Must(m.call(nil, false)) // which it has not broken
		r.Must(m.close(r.Ctx))
	})
}

// With Validate ranks that make different calls have an error with both, and nothing has happened.
func TestF3_WithValidateDifferentCallsAreNamed(t *testing.T) {
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		var ms []*member
		for _, name := range []string{"exchanger", "reducer"} {
			m, err := kinds[name].open(r, false, true)
			r.Must(err)
			ms = append(ms, m)
		}
		err := ms[r.Rank()].call(nil, false)
		require.ErrorIs(r.T, err, comm.ErrMismatch)
		require.ErrorContains(r.T, err, "rank 0 has an exchange; rank 1 has all-reduce (sum) of 2 float32")
		for _, m := range ms {
			r.Must(m.call(nil, false))
			r.Must(m.close(r.Ctx))
		}
	})
}

// Without, a rank that refuses may repeat the call, for which the others wait.
func TestACallThatWasRefusedCanBeRepeated(t *testing.T) {
	each(t, 2, 16<<20, func(r *worldtest.Rank, k kind) {
		m, err := k.open(r, false, false)
		r.Must(err)
		if r.Rank() == 1 {
			require.ErrorIs(r.T, m.call(nil, true), comm.ErrInvalid)
		}
		r.Must(m.call(nil, false))
		r.Must(m.close(r.Ctx))
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
