package stack_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/stack"
)

const hidden = 4

func options() stack.Options {
	return stack.Options{
		Heap:       memory.Options{SegmentBytes: 8 << 20},
		Exchanger:  &alltoallv.Options{Timeout: 20 * time.Second},
		Reducer:    &allreduce.Options{Timeout: 20 * time.Second},
		Dispatcher: &dispatch.Options{Experts: 8, TopK: 2, Hidden: hidden, MaxTokens: 16, Timeout: 20 * time.Second},
	}
}

// use makes a call of each kind and checks what comes out.
func use(s *stack.Stack) error {
	n, me := int64(s.Group.Size()), s.Group.Rank()
	ones := make([]int64, n)
	src, dst := make([]byte, 8*n), make([]byte, 8*n)
	for p := range n {
		ones[p] = 8
		src[8*p] = byte(16*me + int(p))
	}
	if err := s.Exchanger.Exchange(nil, memory.Host(dst), memory.Host(src), &alltoallv.Splits{Send: ones, Recv: ones}); err != nil {
		return err
	}
	for p := range n {
		if int(dst[8*p]) != 16*int(p)+me {
			return fmt.Errorf("rank %d has %d of rank %d", me, dst[8*p], p)
		}
	}
	sum := make([]byte, 4)
	sum[0] = byte(me + 1)
	if err := s.Reducer.AllReduce(nil, memory.Host(sum), memory.Host(sum), kernels.Int32, kernels.Sum); err != nil {
		return err
	}
	if want := byte(n * (n + 1) / 2); sum[0] != want {
		return fmt.Errorf("the sum is %d, want %d", sum[0], want)
	}
	return nil
}

func each(ss []*stack.Stack, f func(i int, s *stack.Stack) error) []error {
	errs := make([]error, len(ss))
	var wg sync.WaitGroup
	for i, s := range ss {
		wg.Go(func() { errs[i] = f(i, s) })
	}
	wg.Wait()
	return errs
}

func requireAll(t *testing.T, errs []error) {
	t.Helper()
	for i, err := range errs {
		require.NoError(t, err, "rank %d", i)
	}
}

// A group loses a rank, goes on without it, lets another one in, and loses one that only hangs.
func TestF2_StackReopens(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	groups, err := comm.Local(4)
	require.NoError(t, err)
	ss := make([]*stack.Stack, 4)
	requireAll(t, each(ss, func(i int, _ *stack.Stack) (err error) {
		if ss[i], err = stack.Open(ctx, groups[i], device.Host(), options()); err != nil {
			return err
		}
		return use(ss[i])
	}))
	require.Empty(t, ss[0].Moves)

	groups[1].Kill()
	rest := []*stack.Stack{ss[0], ss[2], ss[3]}
	requireAll(t, each(rest, func(i int, s *stack.Stack) error {
		if err := use(s); err == nil {
			return fmt.Errorf("a call without rank 1")
		}
		old := s.Group
		g, err := old.Shrink(ctx)
		if err != nil {
			return err
		}
		if rest[i], err = s.Reopen(ctx, g); err != nil {
			return err
		}
		old.Close()
		return use(rest[i])
	}))
	for _, s := range rest {
		require.Equal(t, []dispatch.Move{{Expert: 2, From: -1, To: 0}, {Expert: 3, From: -1, To: 1}}, s.Moves)
		require.Equal(t, "0:[0] 1:[0] 2:[0] 3:[1] 4:[1] 5:[1] 6:[2] 7:[2]", s.Dispatcher.Placement().String())
	}

	cfg := comm.Config{Addr: loopback.Addr(), JoinTimeout: 20 * time.Second}
	four := append(rest[:3:3], nil)
	requireAll(t, each(four, func(i int, s *stack.Stack) (err error) {
		if s == nil {
			late := cfg
			late.Late = true
			g, err := comm.Join(ctx, late)
			if err != nil {
				return err
			}
			if four[i], err = stack.Open(ctx, g, device.Host(), options()); err != nil {
				return err
			}
		} else {
			old := s.Group
			g, err := old.Admit(ctx, 1, cfg)
			if err != nil {
				return err
			}
			if four[i], err = s.Reopen(ctx, g); err != nil {
				return err
			}
			old.Close()
		}
		return use(four[i])
	}))
	for _, s := range four {
		require.Equal(t, []dispatch.Move{{Expert: 2, From: 0, To: 3}, {Expert: 5, From: 1, To: 3}}, s.Moves)
	}

	// Rank 2 hangs: the others leave it out, within their time.
	three := []*stack.Stack{four[0], four[1], four[3]}
	requireAll(t, each(three, func(i int, s *stack.Stack) error {
		short, stop := context.WithTimeout(ctx, 300*time.Millisecond)
		defer stop()
		if err := s.Group.Barrier(short); err == nil {
			return fmt.Errorf("a barrier without rank 2")
		}
		old := s.Group
		g, err := old.Shrink(ctx, 2)
		if err != nil {
			return err
		}
		if three[i], err = s.Reopen(ctx, g); err != nil {
			return err
		}
		old.Close()
		return use(three[i])
	}))
	require.ErrorIs(t, use(four[2]), comm.ErrPeerLost)
	require.NoError(t, four[2].Close(ctx))
	four[2].Group.Close()
	requireAll(t, each(three, func(_ int, s *stack.Stack) error {
		err := s.Close(ctx)
		s.Group.Close()
		return err
	}))
}

// Close ends with its context while another rank does not come.
func TestF2_StackClosesWithItsContext(t *testing.T) {
	groups, err := comm.Local(2)
	require.NoError(t, err)
	ss := make([]*stack.Stack, 2)
	requireAll(t, each(ss, func(i int, _ *stack.Stack) (err error) {
		o := options()
		o.Exchanger.Timeout = 200 * time.Millisecond
		ss[i], err = stack.Open(context.Background(), groups[i], device.Host(), o)
		return err
	}))
	b := memory.Host(make([]byte, 16<<20))
	parts := []int64{4 << 20, 4 << 20}
	err = ss[0].Exchanger.Exchange(nil, b.Slice(8<<20, 8<<20), b.Slice(0, 8<<20), &alltoallv.Splits{Send: parts, Recv: parts})
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.ErrorContains(t, err, "rank 1 has made 0 calls; this is call 1")
	start := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	err = ss[0].Close(ctx)
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.Less(t, time.Since(start), 3*time.Second)
	groups[0].Close()
	require.NoError(t, ss[1].Close(ctx))
}
