package stack_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/stack"
)

// One rank of three makes no call. The others wait for it, and for one another, and name it.
func TestCUDA_F1_WhoOnlyWaitsIsNotBlamed(t *testing.T) {
	gpus, err := device.CUDACount()
	if err != nil || gpus == 0 {
		t.Skipf("no GPU: %v", err)
	}
	for _, away := range []int{0, 1, 2} {
		for name, call := range map[string]func(s *stack.Stack) error{
			"exchange":  exchangeMuch,
			"allreduce": reduceMuch,
			"dispatch":  route,
		} {
			t.Run(fmt.Sprintf("%s without rank %d", name, away), func(t *testing.T) {
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				groups, err := comm.Local(3)
				require.NoError(t, err)
				o := options()
				o.Exchanger.Timeout, o.Reducer.Timeout, o.Dispatcher.Timeout = 400*time.Millisecond, 400*time.Millisecond, 400*time.Millisecond
				ss := openAll(ctx, t, groups, gpus, o)
				requireAll(t, each(ss, func(_ int, s *stack.Stack) error { return s.Heap.Grow(ctx, 16<<20) }))
				requireAll(t, each(ss, func(i int, s *stack.Stack) error {
					if i == away {
						return nil
					}
					err := call(s)
					var pe *comm.PeerError
					if !errors.Is(err, comm.ErrTimeout) || !errors.As(err, &pe) || pe.Rank != away {
						return fmt.Errorf("got %w", err)
					}
					return nil
				}))
				closeAll(ctx, t, ss)
			})
		}
	}
}

func exchangeMuch(s *stack.Stack) error {
	n := s.Group.Size()
	var parts []int64
	for range n {
		parts = append(parts, 1<<20)
	}
	src, err := hold(s, make([]byte, n<<20))
	if err != nil {
		return err
	}
	dst, err := hold(s, make([]byte, n<<20))
	if err != nil {
		return err
	}
	return s.Exchanger.Exchange(nil, dst.View(), src.View(), &alltoallv.Splits{Send: parts, Recv: parts})
}

func reduceMuch(s *stack.Stack) error {
	b, err := hold(s, make([]byte, 8<<20))
	if err != nil {
		return err
	}
	return s.Reducer.AllReduce(nil, b.View(), b.View(), kernels.Int32, kernels.Sum)
}

// A rank is lost while kernels of the others wait for it, each on its own stream: they end, the errors name it, the devices go on working,
// and a stack on those that are left has results that are right.
func TestCUDA_F2_KernelsOfALostRanksPeersEnd(t *testing.T) {
	gpus, err := device.CUDACount()
	if err != nil || gpus == 0 {
		t.Skipf("no GPU: %v", err)
	}
	const lost = 1
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	groups, err := comm.Local(3)
	require.NoError(t, err)
	ss := openAll(ctx, t, groups, gpus, options())
	requireAll(t, each(ss, func(_ int, s *stack.Stack) error {
		if err := s.Heap.Grow(ctx, 8<<20); err != nil {
			return err
		}
		return use(s)
	}))
	rest := []*stack.Stack{ss[0], ss[2]}
	time.AfterFunc(500*time.Millisecond, groups[lost].Kill)
	requireAll(t, each(rest, func(i int, s *stack.Stack) error {
		began := time.Now()
		err := launchAll(s)
		var pe *comm.PeerError
		if !errors.Is(err, comm.ErrPeerLost) || !errors.As(err, &pe) || pe.Rank != lost {
			return fmt.Errorf("got %w", err)
		}
		if took := time.Since(began); took > 3*time.Second {
			return fmt.Errorf("that took %v", took)
		}
		if rest[i], err = leave(ctx, s); err != nil {
			return err
		}
		return use(rest[i])
	}))
	require.NoError(t, ss[lost].Close(ctx))
	closeAll(ctx, t, rest)
}

// launchAll has an exchange, a reduction and a dispatch wait on streams of their own, and returns what they come to.
func launchAll(s *stack.Stack) error {
	n := s.Group.Size()
	var parts []int64
	for range n {
		parts = append(parts, 64<<10)
	}
	half := int64(n) * 64 << 10
	var v [5]memory.View
	for i, b := range [][]byte{make([]byte, 2*half), make([]byte, 1<<20), shm.Bytes([]float32{1, 2, 3, 4}), shm.Bytes([]int32{0, 7}), shm.Bytes([]float32{0.5, 0.25})} {
		d, err := hold(s, b)
		if err != nil {
			return err
		}
		v[i] = d.View()
	}
	var streams [3]device.Stream
	for i := range streams {
		var err error
		if streams[i], err = s.Device.NewStream(); err != nil {
			return err
		}
	}
	if err := s.Exchanger.Exchange(streams[0], v[0].Slice(0, half), v[0].Slice(half, half), &alltoallv.Splits{Send: parts, Recv: parts}); err != nil {
		return err
	}
	if err := s.Reducer.AllReduce(streams[1], v[1], v[1], kernels.Int32, kernels.Sum); err != nil {
		return err
	}
	h, err := s.Dispatcher.Dispatch(streams[2], dispatch.Tokens{X: v[2], Experts: v[3], Weights: v[4]})
	if err != nil {
		return err
	}
	defer h.Release()
	for _, stream := range streams {
		if err := errors.Join(stream.Synchronize(), stream.Close()); err != nil {
			return fmt.Errorf("a device is of no more use: %w", err)
		}
	}
	faults := []error{s.Exchanger.Fault(), s.Reducer.Fault(), s.Dispatcher.Fault()}
	for i, err := range faults {
		if !errors.Is(err, comm.ErrPeerLost) {
			return fmt.Errorf("fault %d: %w", i, err)
		}
	}
	return faults[0]
}
