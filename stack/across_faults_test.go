package stack_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/stack"
)

// gpuCall is an exchange of n bytes a pair that has been enqueued.
type gpuCall struct {
	s        *stack.Stack
	on       device.Stream
	dst, src *memory.Buffer
	n        int64
}

// enqueue begins one, with bytes that tell ranks apart.
func enqueue(s *stack.Stack, n int64) (*gpuCall, error) {
	c, size := &gpuCall{s: s, n: n}, int64(s.Group.Size())
	var err error
	if c.on, err = s.Device.(*device.CUDADevice).NewStream(); err != nil {
		return nil, err
	}
	for _, b := range []**memory.Buffer{&c.dst, &c.src} {
		if *b, err = s.Heap.Alloc(size * n); err != nil {
			return nil, err
		}
	}
	mine := bytes.Repeat([]byte{byte(1 + s.Group.Rank())}, int(size*n))
	if err := memory.Copy(c.on, c.src.View(), memory.Host(mine)); err != nil {
		return nil, err
	}
	splits := &alltoallv.Splits{Send: slices.Repeat([]int64{n}, int(size)), Recv: slices.Repeat([]int64{n}, int(size))}
	return c, s.Exchanger.Exchange(c.on, c.dst.View(), c.src.View(), splits)
}

// end waits for it and compares what has come.
func (c *gpuCall) end() error {
	if err := errors.Join(c.on.Synchronize(), c.s.Exchanger.Fault()); err != nil {
		return errors.Join(err, c.on.Close())
	}
	got := make([]byte, c.n*int64(c.s.Group.Size()))
	if err := errors.Join(memory.Copy(c.on, memory.Host(got), c.dst.View()), c.on.Synchronize()); err != nil {
		return err
	}
	for i, b := range got {
		if want := byte(1 + int64(i)/c.n); b != want {
			return fmt.Errorf("byte %d is %d, want %d", i, b, want)
		}
	}
	return errors.Join(c.src.Free(), c.dst.Free(), c.on.Close())
}

// exchangeOnGPUs makes exchanges, one of them of more than a slot.
func exchangeOnGPUs(s *stack.Stack) error {
	for _, n := range []int64{3, 9000} {
		c, err := enqueue(s, n)
		if err == nil {
			err = c.end()
		}
		if err != nil {
			return fmt.Errorf("%d bytes a pair: %w", n, err)
		}
	}
	return nil
}

// A rank of GPUs on several hosts dies while the kernels of the others wait for it: their calls end and name it and its host. Their stacks
// reopen without it, until one host is left, and in the end nothing is left of any.
func TestF2_StackOfGPUsReopensOnTheHostsLeft(t *testing.T) {
	worldtest.NeedUCX(t)
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	var gpus []*cuda.Device
	held := func() (n []int) {
		for _, d := range gpus {
			for _, c := range emulated.Leaks() {
				n = append(n, c.Of(t, d))
			}
		}
		return n
	}
	for i := range emulated.Devices {
		d, _ := emulated.Device(t, i)
		gpus = append(gpus, d)
	}
	before := held()
	hostsOfGPUsAreLost(t, 4, []int{3, 0, 1}, stack.Options{
		Heap:      memory.Options{SegmentBytes: 32 << 20, RailBytes: 1 << 20},
		Exchanger: &alltoallv.Options{MaxSMs: 1, CopySMs: -1, Timeout: time.Hour}, // of the emulation's own time
	})
	require.Equal(t, before, held(), "what the driver has given out")
}

// The same on GPUs.
func TestCUDA_F2_StackReopensOnTheHostsLeft(t *testing.T) {
	gpus, err := device.CUDACount()
	if err != nil || gpus == 0 {
		t.Skipf("needs a GPU: %d, %v", gpus, err)
	}
	worldtest.NeedUCX(t)
	n := max(2, min(gpus, 4))
	o := stack.Options{Heap: memory.Options{SegmentBytes: 64 << 20, ShareGPUs: gpus < n}, Exchanger: &alltoallv.Options{Timeout: time.Minute}}
	hostsOfGPUsAreLost(t, n, []int{n - 1, 0, 1}[:n-1], o)
}

// hostsOfGPUsAreLost has n ranks, each on a host of its own, lose these, by their numbers in the group of the time.
func hostsOfGPUsAreLost(t *testing.T, n int, ranks []int, o stack.Options) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	gpus, err := device.CUDACount()
	require.NoError(t, err)
	groups, err := comm.Local(n, comm.LocalOptions{PerHost: 1})
	require.NoError(t, err)
	ss, devices := make([]*stack.Stack, n), make([]*device.CUDADevice, n)
	requireAll(t, each(ss, func(r int, _ *stack.Stack) (err error) {
		if devices[r], err = device.CUDA(r % gpus); err != nil {
			return err
		}
		ss[r], err = stack.Open(ctx, groups[r], devices[r], o)
		return err
	}))
	for _, lost := range ranks {
		requireAll(t, each(ss, func(_ int, s *stack.Stack) error { return exchangeOnGPUs(s) }))
		dead := ss[lost]
		ss = slices.Delete(slices.Clone(ss), lost, lost+1)
		calls := make([]*gpuCall, len(ss))
		requireAll(t, each(ss, func(i int, s *stack.Stack) (err error) {
			calls[i], err = enqueue(s, 3000)
			return err
		}))
		dead.Group.Kill()
		requireAll(t, each(ss, func(i int, s *stack.Stack) error {
			err := calls[i].end()
			if !strings.Contains(fmt.Sprint(err), fmt.Sprint("on host ", lost)) {
				return fmt.Errorf("host %d is lost, got: %w", lost, err)
			}
			return hasLost(err, lost)
		}))
		requireAll(t, each(ss, func(i int, s *stack.Stack) error {
			old := s.Group
			defer old.Close()
			g, err := old.Shrink(ctx)
			if err == nil {
				ss[i], err = s.Reopen(ctx, g)
			}
			return err
		}))
		require.NoError(t, dead.Close(ctx))
	}
	requireAll(t, each(ss, func(_ int, s *stack.Stack) error { return exchangeOnGPUs(s) }))
	closeAll(ctx, t, ss)
	for _, d := range devices {
		require.NoError(t, d.Close())
	}
}
