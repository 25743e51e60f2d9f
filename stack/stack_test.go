package stack_test

import (
	"context"
	"errors"
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
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
	"github.com/switchyard-moe/switchyard/stack"
)

const hidden = 4

func options() stack.Options {
	return stack.Options{
		Heap:       memory.Options{SegmentBytes: 8 << 20, ShareGPUs: true},
		Exchanger:  &alltoallv.Options{Timeout: 20 * time.Second},
		Reducer:    &allreduce.Options{Timeout: 20 * time.Second},
		Dispatcher: &dispatch.Options{Experts: 8, TopK: 2, Hidden: hidden, MaxTokens: 16, Timeout: 20 * time.Second},
	}
}

// onDevices runs f with ranks on the host and on GPUs, where there are as many as it needs.
func onDevices(t *testing.T, needed int, f func(t *testing.T, gpus int)) {
	t.Run("host", func(t *testing.T) { f(t, 0) })
	t.Run("cuda", func(t *testing.T) {
		gpus, err := device.CUDACount()
		if err != nil || gpus < needed {
			t.Skipf("needs %d GPUs: %d, %v", needed, gpus, err)
		}
		f(t, gpus)
	})
}

// openDevice is the device of a rank. Those of GPUs stay open: their contexts are the process's.
func openDevice(rank, gpus int) (device.Device, error) {
	if gpus == 0 {
		return device.Host(), nil
	}
	return device.CUDA(rank % gpus)
}

// data is memory of a stack's heap, and copies to and from it.
type data struct {
	*memory.Buffer
	stream device.Stream // nil on the host
}

// copying are the streams of stacks' copies on GPUs, until the process ends.
var copying sync.Map

// ready makes what use needs on a stack, and returns when all ranks have it: the driver can have a new stream wait for the kernels of
// another rank on the same GPU, and those would wait for this rank.
func ready(ctx context.Context, s *stack.Stack) error {
	if s.Device.Kind() != device.HostKind {
		made, err := s.Device.NewStream()
		if err != nil {
			return err
		}
		copying.Store(s, made)
	}
	return s.Group.Barrier(ctx)
}

// hold takes memory of the heap that holds b, as all ranks do.
func hold(s *stack.Stack, b []byte) (d data, err error) {
	if made, ok := copying.Load(s); ok {
		d.stream = made.(device.Stream)
	}
	if d.Buffer, err = s.Heap.Alloc(int64(len(b))); err != nil {
		return d, err
	}
	return d, memory.Copy(d.stream, d.View(), memory.Host(b))
}

// end gives the memory back and returns what it holds.
func (d data) end() ([]byte, error) {
	b := make([]byte, d.View().Len())
	err := memory.Copy(d.stream, memory.Host(b), d.View())
	return b, errors.Join(err, d.Free())
}

// use makes a call of each kind and checks what comes out.
func use(s *stack.Stack) error { return useOn(s, nil) }

// useOn is use with the calls on a stream.
func useOn(s *stack.Stack, q device.Stream) error {
	n, me := int64(s.Group.Size()), s.Group.Rank()
	ones := make([]int64, n)
	in := make([]byte, 8*n)
	for p := range n {
		ones[p] = 8
		in[8*p] = byte(16*me + int(p))
	}
	src, err := hold(s, in)
	if err != nil {
		return err
	}
	dst, err := hold(s, make([]byte, 8*n))
	if err != nil {
		return err
	}
	if err := s.Exchanger.Exchange(q, dst.View(), src.View(), &alltoallv.Splits{Send: ones, Recv: ones}); err != nil {
		return err
	}
	if err := device.Follow(nil, q); err != nil {
		return err
	}
	if _, err := src.end(); err != nil {
		return err
	}
	out, err := dst.end()
	if err != nil {
		return err
	}
	for p := range n {
		if int(out[8*p]) != 16*int(p)+me {
			return fmt.Errorf("rank %d has %d of rank %d", me, out[8*p], p)
		}
	}
	one := make([]byte, 4)
	one[0] = byte(me + 1)
	sum, err := hold(s, one)
	if err != nil {
		return err
	}
	if err := s.Reducer.AllReduce(q, sum.View(), sum.View(), kernels.Int32, kernels.Sum); err != nil {
		return err
	}
	if err := device.Follow(nil, q); err != nil {
		return err
	}
	if one, err = sum.end(); err != nil {
		return err
	}
	if want := byte(n * (n + 1) / 2); one[0] != want {
		return fmt.Errorf("the sum is %d, want %d", one[0], want)
	}
	if err := ringOn(s, q); err != nil {
		return err
	}
	return routeOn(s, q)
}

// ringOn has every rank send a message to the next and receive one of the last, all of them the send first, where the stack has messages.
func ringOn(s *stack.Stack, q device.Stream) error {
	n, me := s.Group.Size(), s.Group.Rank()
	if s.Endpoint == nil || n == 1 {
		return nil
	}
	last := (me + n - 1) % n
	got := []byte{0xff}
	if err := errors.Join(
		s.Endpoint.Send(q, (me+1)%n, 3, memory.Host([]byte{byte(me)})),
		s.Endpoint.Recv(q, last, 3, memory.Host(got)),
		device.Follow(nil, q)); err != nil {
		return err
	}
	if int(got[0]) != last {
		return fmt.Errorf("rank %d has the message of rank %d, want that of %d", me, got[0], last)
	}
	return nil
}

// route sends a token of every rank to two experts, which give it back as it is.
func route(s *stack.Stack) error { return routeOn(s, nil) }

// routeOn is route with the calls on a stream.
func routeOn(s *stack.Stack, q device.Stream) error {
	me := s.Group.Rank()
	row := []float32{float32(me), 1, 2, float32(8 * me)}
	var in dispatch.Tokens
	var held []data
	for _, v := range []struct {
		to *memory.View
		b  []byte
	}{{&in.X, shm.Bytes(row)}, {&in.Experts, shm.Bytes([]int32{int32(me), int32(7 - me)})}, {&in.Weights, shm.Bytes([]float32{0.5, 0.25})}} {
		d, err := hold(s, v.b)
		if err != nil {
			return err
		}
		*v.to = d.View()
		held = append(held, d)
	}
	y, err := hold(s, make([]byte, 4*hidden))
	if err != nil {
		return err
	}
	h, err := s.Dispatcher.Dispatch(q, in)
	if err != nil {
		return err
	}
	defer h.Release()
	if err := s.Dispatcher.Combine(q, y.View(), h.Rows(), h, dispatch.CombineOptions{}); err != nil {
		return err
	}
	if err := device.Follow(nil, q); err != nil {
		return err
	}
	for _, d := range held {
		if _, err := d.end(); err != nil {
			return err
		}
	}
	sums, err := y.end()
	if err != nil {
		return err
	}
	for i, got := range shm.View[float32](sums) {
		if got != 0.75*row[i] {
			return fmt.Errorf("element %d of rank %d's token became %v, want %v", i, me, got, 0.75*row[i])
		}
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

// openAll opens a stack on each group.
func openAll(ctx context.Context, t *testing.T, groups []*comm.Group, gpus int, o stack.Options) []*stack.Stack {
	t.Helper()
	ss := make([]*stack.Stack, len(groups))
	requireAll(t, each(ss, func(i int, _ *stack.Stack) error {
		d, err := openDevice(i, gpus)
		if err != nil {
			return err
		}
		if ss[i], err = stack.Open(ctx, groups[i], d, o); err != nil {
			return err
		}
		return ready(ctx, ss[i])
	}))
	return ss
}

// leave gives the stack on the group of those that are left, without some that are not lost.
func leave(ctx context.Context, s *stack.Stack, out ...int) (*stack.Stack, error) {
	old := s.Group
	g, err := old.Shrink(ctx, out...)
	if err != nil {
		return nil, err
	}
	if s, err = s.Reopen(ctx, g); err != nil {
		return nil, err
	}
	old.Close()
	return s, ready(ctx, s)
}

func closeAll(ctx context.Context, t *testing.T, ss []*stack.Stack) {
	t.Helper()
	requireAll(t, each(ss, func(_ int, s *stack.Stack) error {
		err := s.Close(ctx)
		s.Group.Close()
		return err
	}))
}

// Calls go on when the stream of those before has been closed, on a GPU also where it was another library's.
func TestX3_ClosedStreamsHoldUpNobody(t *testing.T) { onDevices(t, 1, closedStreamsHoldUpNobody) }

func closedStreamsHoldUpNobody(t *testing.T, gpus int) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	groups, err := comm.Local(2)
	require.NoError(t, err)
	requireAll(t, each(make([]*stack.Stack, 2), func(i int, _ *stack.Stack) error {
		d, err := openDevice(i, gpus)
		if err != nil {
			return err
		}
		s, err := stack.Open(ctx, groups[i], d, options())
		if err != nil {
			return err
		}
		another, err := d.NewStream()
		if err != nil {
			return err
		}
		var streams [4]device.Stream
		for call := range streams {
			open := d.NewStream
			if g, ok := d.(*device.CUDADevice); ok && call%2 == 1 {
				open = func() (device.Stream, error) { return g.WrapStream(another.Handle()) }
			}
			if streams[call], err = open(); err != nil {
				return err
			}
		}
		if err := ready(ctx, s); err != nil {
			return err
		}
		for call, q := range streams {
			if err := errors.Join(useOn(s, q), q.Close()); err != nil {
				return fmt.Errorf("call %d: %w", call, err)
			}
		}
		err = errors.Join(use(s), s.Close(ctx), another.Close())
		s.Group.Close()
		return err
	}))
}

// A group loses a rank, goes on without it, lets another one in, and loses one that only hangs. Ranks of one process that share a GPU can block
// each other in their first calls, so each has its own.
func TestF2_StackReopens(t *testing.T) { onDevices(t, 4, stackReopens) }

func stackReopens(t *testing.T, gpus int) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	groups, err := comm.Local(4)
	require.NoError(t, err)
	o := options()
	if gpus == 0 {
		o.Endpoint = &p2p.Options{Timeout: 20 * time.Second}
	}
	ss := openAll(ctx, t, groups, gpus, o)
	requireAll(t, each(ss, func(_ int, s *stack.Stack) error { return use(s) }))
	require.Empty(t, ss[0].Moves)

	groups[1].Kill()
	rest := []*stack.Stack{ss[0], ss[2], ss[3]}
	requireAll(t, each(rest, func(i int, s *stack.Stack) (err error) {
		if err := use(s); err == nil {
			return fmt.Errorf("a call without rank 1")
		}
		if rest[i], err = leave(ctx, s); err != nil {
			return err
		}
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
			d, err := openDevice(i, gpus)
			if err != nil {
				return err
			}
			if four[i], err = stack.Open(ctx, g, d, o); err != nil {
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
		if err := ready(ctx, four[i]); err != nil {
			return err
		}
		return use(four[i])
	}))
	for _, s := range four {
		require.Equal(t, []dispatch.Move{{Expert: 2, From: 0, To: 3}, {Expert: 5, From: 1, To: 3}}, s.Moves)
	}

	// Rank 2 hangs: the others leave it out, within their time.
	three := []*stack.Stack{four[0], four[1], four[3]}
	requireAll(t, each(three, func(i int, s *stack.Stack) (err error) {
		short, stop := context.WithTimeout(ctx, 300*time.Millisecond)
		defer stop()
		if err := s.Group.Barrier(short); err == nil {
			return fmt.Errorf("a barrier without rank 2")
		}
		if three[i], err = leave(ctx, s, 2); err != nil {
			return err
		}
		return use(three[i])
	}))
	require.ErrorIs(t, use(four[2]), comm.ErrPeerLost)
	require.NoError(t, four[2].Close(ctx))
	four[2].Group.Close()
	require.NoError(t, ss[1].Close(ctx))
	closeAll(ctx, t, three)
}

// Experts that have moved stay where they have moved to, in each stack that follows.
func TestF2_StackReopensWhereExpertsAre(t *testing.T) { onDevices(t, 3, stackReopensWhereExpertsAre) }

func stackReopensWhereExpertsAre(t *testing.T, gpus int) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	groups, err := comm.Local(3)
	require.NoError(t, err)
	o := options()
	o.Dispatcher.Experts = 6
	ss := openAll(ctx, t, groups, gpus, o)
	requireAll(t, each(ss, func(_ int, s *stack.Stack) error {
		return s.Dispatcher.SetPlacement(ctx, &dispatch.Placement{Ranks: [][]int{{2}, {1}, {0}, {2}, {1}, {0}}})
	}))
	two := ss[:2]
	requireAll(t, each(two, func(i int, s *stack.Stack) (err error) {
		two[i], err = leave(ctx, s, 2)
		return err
	}))
	for _, s := range two {
		require.Equal(t, []dispatch.Move{{Expert: 0, From: -1, To: 0}, {Expert: 3, From: -1, To: 1}}, s.Moves)
		require.Equal(t, "0:[0] 1:[1] 2:[0] 3:[1] 4:[1] 5:[0]", s.Dispatcher.Placement().String())
	}
	requireAll(t, each(two, func(_ int, s *stack.Stack) error {
		return s.Dispatcher.SetPlacement(ctx, &dispatch.Placement{Ranks: [][]int{{1}, {0}, {1}, {0}, {1}, {0}}})
	}))
	one := two[:1]
	requireAll(t, each(one, func(i int, s *stack.Stack) (err error) {
		one[i], err = leave(ctx, s, 1)
		return err
	}))
	require.Equal(t, []dispatch.Move{{Expert: 0, From: -1, To: 0}, {Expert: 2, From: -1, To: 0}, {Expert: 4, From: -1, To: 0}}, one[0].Moves)
	closeAll(ctx, t, one)
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
	require.Less(t, time.Since(start), time.Minute)
	groups[0].Close()
	require.NoError(t, ss[1].Close(ctx))
}
