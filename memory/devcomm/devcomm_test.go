package devcomm_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/memory/devcomm"
)

// gatherArgs is struct all_gather_args of examples/kernels/all_gather.cu.
type gatherArgs struct{ World, Out, In, Count uint64 }

// gatherer is one rank with the all-gather of examples/kernels.
type gatherer struct {
	*worldtest.Rank
	x       *devcomm.Comm
	k       *devcomm.Kernel
	s       device.Stream // of copies
	out, in *memory.Buffer
	calls   uint64
}

const most = 400 // words of a part

func newGatherer(r *worldtest.Rank, o devcomm.Options) *gatherer {
	g := &gatherer{Rank: r}
	image, err := os.ReadFile("../../kernels/cuda/p2p.fatbin") // the emulated driver finds every kernel in every image
	r.Must(err)
	g.s, err = r.Device.NewStream()
	r.Must(err)
	g.x, err = devcomm.New(r.Ctx, r.Heap, o)
	r.Must(err)
	g.k, err = g.x.Load(image, "all_gather")
	r.Must(err)
	g.out, err = r.Heap.Alloc(int64(8 * most * r.Size()))
	r.Must(err)
	g.in, err = r.Heap.Alloc(8 * most)
	r.Must(err)
	r.Barrier()
	return g
}

func word(call uint64, src, i int) uint64 { return (call*64+uint64(src))<<32 | uint64(i) }

// call gathers count words of each rank, and looks at what has come.
func (g *gatherer) call(s device.Stream, count, blocks int) error {
	g.calls++
	mine := make([]byte, 8*count)
	for i := range count {
		binary.NativeEndian.PutUint64(mine[8*i:], word(g.calls, g.Rank.Rank(), i))
	}
	if count > 0 {
		g.Must(memory.Copy(g.s, g.in.View().Slice(0, int64(len(mine))), memory.Host(mine)))
		g.Must(g.s.Synchronize())
	}
	args := gatherArgs{uint64(g.x.Argument()), uint64(g.out.View().Ptr()), uint64(g.in.View().Ptr()), uint64(count)}
	if err := g.x.Launch(s, g.k, devcomm.Grid{Blocks: blocks, Threads: 64}, args); err != nil {
		return err
	}
	if s != nil {
		g.Must(s.Synchronize())
	}
	if count == 0 {
		return nil
	}
	got := make([]byte, 8*count*g.Size())
	g.Must(memory.Copy(g.s, memory.Host(got), g.out.View().Slice(0, int64(len(got)))))
	g.Must(g.s.Synchronize())
	for src := range g.Size() {
		for i := range count {
			if v := binary.NativeEndian.Uint64(got[8*(src*count+i):]); v != word(g.calls, src, i) {
				return fmt.Errorf("call %d: word %d of rank %d is %#x", g.calls, i, src, v)
			}
		}
	}
	return nil
}

func (g *gatherer) close() {
	g.Barrier()
	g.Must(g.x.Close(g.Ctx))
	g.Must(g.x.Close(g.Ctx))
	require.ErrorIs(g.T, g.x.Launch(nil, g.k, devcomm.Grid{Blocks: 1, Threads: 64}, gatherArgs{}), devcomm.ErrClosed)
	g.Must(g.out.Free())
	g.Must(g.in.Free())
	g.Must(g.s.Close())
}

// A kernel of a user's on the emulated driver, whose processor runs it on the heap's own memory: calls of many sizes, with and without a
// stream, bad arguments between them, and a rank that does not come.
func TestAKernelOfAUsersGathers(t *testing.T) {
	if !emulated.Kernels(t, "../../kernels/cuda") {
		return
	}
	for _, ranks := range []int{2, 3} {
		worldtest.GPUHeaps(t, ranks, memory.Options{SegmentBytes: 4 << 20}, func(r *worldtest.Rank) {
			g := newGatherer(r, devcomm.Options{Signals: 6})
			s, err := r.Device.NewStream()
			r.Must(err)
			for i, count := range []int{1, 399, 0, 64, 400, 7, 130} {
				on := s
				if i%2 == 0 {
					on = nil
				}
				r.Must(g.call(on, count, 1+i%3))
			}
			r.Must(g.x.Fault())
			refused := func(grid devcomm.Grid, args any, says string) {
				for _, on := range []device.Stream{s, nil} {
					err := g.x.Launch(on, g.k, grid, args)
					require.ErrorIs(r.T, err, devcomm.ErrInvalid)
					require.ErrorContains(r.T, err, says)
				}
			}
			refused(devcomm.Grid{Blocks: 1 << 20, Threads: 64}, gatherArgs{}, "1048576 blocks of 64 threads with 0 bytes of shared memory, of which 264 run at the same time")
			refused(devcomm.Grid{Threads: 64}, gatherArgs{}, "0 blocks of 64 threads with 0 bytes, want at least 1 block")
			refused(devcomm.Grid{Blocks: 1, Threads: 64}, struct {
				A uint32
				B uint64
			}{}, "arguments of 12 bytes in a struct { A uint32; B uint64 }, want a struct of numbers without padding")
			refused(devcomm.Grid{Blocks: 1, Threads: 64}, "text", "launch: arguments: binary.")
			require.ErrorIs(r.T, g.x.Launch(s, nil, devcomm.Grid{Blocks: 1, Threads: 1}, gatherArgs{}), devcomm.ErrInvalid)
			_, err = g.x.Load(nil, "all_gather")
			require.ErrorIs(r.T, err, devcomm.ErrInvalid)
			r.Must(g.call(s, 100, 2))
			otherVersion(g, s)
			r.Must(s.Close())
			g.close()
		})
	}
	worldtest.GPUHeaps(t, 3, memory.Options{SegmentBytes: 4 << 20}, func(r *worldtest.Rank) {
		g := newGatherer(r, devcomm.Options{Timeout: 500 * time.Microsecond}) // of a clock that goes 50 ns in every turn of the threads
		r.Must(g.call(nil, 10, 1))
		r.Barrier()
		if r.Rank() != 2 {
			var missing *comm.PeerError
			require.ErrorAs(r.T, g.call(nil, 10, 1), &missing)
			require.ErrorIs(r.T, missing, comm.ErrTimeout)
			require.Equal(r.T, 2, missing.Rank)
			require.Error(r.T, g.call(nil, 10, 1), "a Comm that has failed goes on")
		}
		r.Barrier()
		g.Must(g.x.Close(g.Ctx))
		g.Must(g.s.Close())
	})
}

// otherVersion has the library say that it has another version of the header than the kernel, which is an error of that call alone.
func otherVersion(g *gatherer, s device.Stream) {
	version := memory.Device(g.x.Argument(), 4) // the first word that kernels read
	write := func(v uint32) {
		g.Must(memory.Copy(g.s, version, memory.Host(binary.NativeEndian.AppendUint32(nil, v))))
		g.Must(g.s.Synchronize())
		g.Barrier()
	}
	write(7)
	g.Must(g.x.Launch(s, g.k, devcomm.Grid{Blocks: 2, Threads: 64}, gatherArgs{World: uint64(g.x.Argument())}))
	g.Must(s.Synchronize())
	var old *kernels.DeviceVersionError
	require.ErrorAs(g.T, g.x.Fault(), &old)
	require.Equal(g.T, []uint64{1, 7}, []uint64{old.Kernel, old.Library})
	require.ErrorIs(g.T, old, comm.ErrMismatch)
	write(1)
	g.Must(g.x.Fault())
	g.Must(g.call(s, 50, 2))
}

func TestACommIsForGPUs(t *testing.T) {
	worldtest.Local(t, 2, 4<<20, func(r *worldtest.Rank) {
		_, err := devcomm.New(r.Ctx, r.Heap, devcomm.Options{})
		require.ErrorIs(r.T, err, devcomm.ErrUnsupported)
		require.ErrorContains(r.T, err, "they run on GPUs")
		_, err = devcomm.New(r.Ctx, r.Heap, devcomm.Options{Signals: 5000})
		require.ErrorIs(r.T, err, devcomm.ErrInvalid)
		require.ErrorContains(r.T, err, "Options.Signals is 5000, want 0 to 4096")
	})
}
