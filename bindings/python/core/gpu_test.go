package core

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// What the list of variables says of the heap is what there is.
func TestTheDefaultHeapIsTheOneInTheList(t *testing.T) {
	list := env.Variables()
	i := slices.IndexFunc(list, func(v env.Variable) bool { return v.Name == "SWITCHYARD_CUDA_HEAP" })
	require.GreaterOrEqual(t, i, 0)
	const mib = 1 << 20
	base := defaultGPUHeap(0)
	more := defaultGPUHeap(1) - base
	require.Equal(t, fmt.Sprintf("%dM and %dM a rank", base/mib, more/mib), list[i].Default)
	require.Equal(t, base+8*more, defaultGPUHeap(8))
}

// openGPU has c open the first GPU.
func openGPU(c *Comm, o GPUOptions) (*GPU, error) {
	var g *GPU
	ticket, err := c.OpenGPU(o, func(made *GPU) uint64 { g = made; return 1 })
	_, err = await(c, ticket, err)
	return g, err
}

// needGPUs skips the test without a GPU for each of n ranks: those of one process do not share one.
func needGPUs(t *testing.T, n int) {
	t.Helper()
	if have, err := device.CUDACount(); err != nil || have < n {
		t.Skipf("needs %d GPUs: %d, %v", n, have, err)
	}
}

// ownGPU is the GPU of a rank.
func ownGPU(c *Comm) int {
	rank, _, _ := c.Rank()
	return rank
}

func TestF3_WithoutAGPUAllRanksHearThatThereIsNone(t *testing.T) {
	if n, err := device.CUDACount(); err == nil && n > 0 {
		t.Skip("there is one")
	}
	each(t, 3, func(c *Comm) error {
		_, err := openGPU(c, GPUOptions{})
		if code, _ := Classify(err); code != Unsupported || !errors.Is(err, memory.ErrUnsupported) {
			return fmt.Errorf("code %d: %w", code, err)
		}
		ticket, err := c.Barrier() // and the group goes on
		if _, err := await(c, ticket, err); err != nil {
			return err
		}
		ticket, err = c.Close(false)
		_, err = await(c, ticket, err)
		return err
	})
}

func TestF3_RanksThatWantOtherHeapsOnGPUsHearOfIt(t *testing.T) {
	each(t, 2, func(c *Comm) error {
		rank, _, err := c.Rank()
		if err != nil {
			return err
		}
		_, err = openGPU(c, GPUOptions{HeapBytes: int64(1+rank) << 20})
		if code, _ := Classify(err); code != Mismatch {
			return fmt.Errorf("code %d: %w", code, err)
		}
		c.Abandon(time.Second, false)
		return nil
	})
}

func TestExchangesOnAGPU(t *testing.T) {
	needGPUs(t, 2)
	const rows = 70_000 // of 8 bytes for each rank: more than goes by packets
	each(t, 2, func(c *Comm) error {
		g, err := openGPU(c, GPUOptions{Device: ownGPU(c), HeapBytes: 1 << 20}) // which has to grow for the channels
		if err != nil {
			return err
		}
		var blocks []*Block
		for _, n := range []int64{2 * rows * 8, 2 * rows * 8, 100 << 20} { // the last one makes the heap grow
			ticket, err := g.Alloc(0, n, func(b *Block) uint64 { blocks = append(blocks, b); return 1 })
			if _, err = await(c, ticket, err); err != nil {
				return err
			}
		}
		var arena *Arena
		ticket, err := g.NewArena(0, 4<<20, func(a *Arena) (uint64, error) { arena = a; return 1, nil })
		if _, err = await(c, ticket, err); err != nil {
			return err
		}
		rank, size, err := c.Rank()
		if err != nil {
			return err
		}
		// Kernels of two ranks wait for each other, and the ranks of this test share a process: a stream for each.
		own, err := g.dev.NewStream()
		if err != nil {
			return err
		}
		s := own.Handle()
		// The same through the heap, a place of the arena that is another on every rank, and foreign memory.
		arena.Alloc(int64(1+rank) * 1000)
		foreign, err := g.dev.Context().MemAlloc(2 * rows * 8)
		if err != nil {
			return err
		}
		shape := Shape{&ShapeHead{Row: 8, DstBytes: 2 * rows * 8, SrcBytes: 2 * rows * 8}, []int64{rows, rows, rows, rows}}
		in, out := make([]int64, 2*rows), make([]int64, 2*rows)
		for k, dst := range []uintptr{blocks[1].Addr(), arena.Alloc(2 * rows * 8), foreign} {
			for i := range in {
				in[i] = int64(1_000_000*(10*k+rank) + i)
			}
			src, err := g.view(Buffer{blocks[0].Addr(), 2 * rows * 8})
			if err != nil {
				return err
			}
			if err := memory.Copy(own, src, memory.Host(shm.Bytes(in))); err != nil {
				return err
			}
			if _, err := g.AllToAll(s, dst, blocks[0].Addr(), shape); err != nil {
				return err
			}
			if err := memory.Copy(own, memory.Host(shm.Bytes(out)), memory.Device(dst, 2*rows*8)); err != nil {
				return err
			}
			for i, v := range out {
				if want := int64(1_000_000*(10*k+i/rows) + rank*rows + i%rows); v != want {
					return fmt.Errorf("destination %d: %d at %d, want %d", k, v, i, want)
				}
			}
			v, err := g.view(Buffer{dst, 16})
			if _, inPlace := v.Symmetric(g.heap); err != nil || inPlace != (k < 2) {
				return fmt.Errorf("destination %d: in place %v, %w", k, inPlace, err)
			}
		}
		if err := g.Fault(); err != nil {
			return err
		}
		// A part that was given back is no destination any more.
		ticket, err = blocks[1].Free(0)
		if _, err = await(c, ticket, err); err != nil {
			return err
		}
		if _, err := g.AllToAll(s, blocks[1].Addr(), blocks[0].Addr(), shape); !errors.Is(err, memory.ErrFreed) {
			return fmt.Errorf("into freed memory: %w", err)
		}
		ticket, err = g.Verify()
		if _, err = await(c, ticket, err); err != nil {
			return err
		}
		// Sizes that do not agree.
		if rank == 0 {
			shape = Shape{&ShapeHead{Row: 8, DstBytes: 2 * rows * 8, SrcBytes: 2 * rows * 8}, []int64{rows, rows - 1, rows, rows}}
		}
		if _, err := g.AllToAll(s, foreign, blocks[0].Addr(), shape); err != nil {
			return err
		}
		if err := own.Synchronize(); err != nil {
			return err
		}
		var mismatch *kernels.CountMismatchError
		if err := g.Fault(); !errors.As(err, &mismatch) {
			return fmt.Errorf("sizes that do not agree, %d ranks: %w", size, err)
		}
		if err := g.dev.Context().MemFree(foreign); err != nil {
			return err
		}
		ticket, err = c.Close(false)
		if _, err = await(c, ticket, err); err != nil {
			return err
		}
		if _, err := g.AllToAll(s, 1, 1, shape); !errors.Is(err, ErrClosed) {
			return fmt.Errorf("after the end: %w", err)
		}
		return nil
	})
}

func TestHeapSizesComeFromTheEnvironment(t *testing.T) {
	for text, want := range map[string]int64{"": (36 + 20*8) << 20, "3M": 3 << 20} {
		o := GPUOptions{Environ: map[string]string{"SWITCHYARD_CUDA_HEAP": text}}
		n, err := o.heapBytes(8)
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	o := GPUOptions{Environ: map[string]string{"SWITCHYARD_CUDA_HEAP": "much"}}
	_, err := o.heapBytes(8)
	require.ErrorIs(t, err, ErrInvalid)
	o = GPUOptions{Environ: map[string]string{}, HeapBytes: 5}
	n, err := o.heapBytes(8)
	require.NoError(t, err)
	require.EqualValues(t, 5, n)
}
