package dispatch_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

func TestMain(m *testing.M) {
	worldtest.Unseen()
	os.Exit(m.Run())
}

// gpuMemory is one rank's memory and streams for tests, taken before anything runs: a driver that allocates, or has the first work of a
// stream, can wait for kernels, which wait for ranks. Half of the memory is of the heap, half is not. Views of it are good until reuse.
type gpuMemory struct {
	r      *rank
	c      *cuda.Context
	copies device.Stream   // of what the test puts there and looks at
	marks  device.Stream   // of words that are written while a call runs
	calls  []device.Stream // of the test's calls
	parts  [2]memory.View
	used   [2]int64
	turn   int
}

const (
	gpuPart     = 96 << 20
	mostStreams = 2 // that a test calls on
)

// gpuTest is how a world on GPUs begins and ends.
func gpuTest(w *worldtest.Rank, f func(r *rank)) {
	d := w.Device.(*device.CUDADevice)
	r := &rank{Rank: w}
	g := &gpuMemory{r: r, c: d.Context()}
	p, err := g.c.MemAlloc(gpuPart)
	w.Must(err)
	b, err := w.Heap.Alloc(gpuPart)
	w.Must(err)
	g.parts = [2]memory.View{memory.Device(p, gpuPart), b.View()}
	g.calls = make([]device.Stream, mostStreams)
	streams := []*device.Stream{&g.copies, &g.marks}
	for i := range g.calls {
		streams = append(streams, &g.calls[i])
	}
	for _, s := range streams {
		*s, err = d.NewStream()
		w.Must(err)
		w.Must(g.c.Set(cuda.Stream((*s).(*device.CUDAStream).Handle()), p, 0, 256))
		w.Must((*s).Synchronize())
	}
	r.gpu = g
	w.Barrier()
	f(r)
	for _, s := range g.calls {
		w.Must(s.Close())
	}
	err = errors.Join(g.copies.Close(), g.marks.Close(), g.c.MemFree(p))
	if w.Group.Err() == nil {
		err = errors.Join(err, b.Free())
		w.Barrier()
	}
	w.Must(err)
}

// gpus runs f on n ranks of this process, which share GPUs where there are fewer.
func gpus(t testing.TB, n int, f func(r *rank)) {
	t.Helper()
	worldtest.GPUs(t, n, gpuPart+160<<20, func(w *worldtest.Rank) { gpuTest(w, f) })
}

// reuse ends the life of all views.
func (g *gpuMemory) reuse() { g.used = [2]int64{} }

// stream is one for calls, which the test closes.
func (r *rank) stream() device.Stream {
	if r.gpu != nil {
		return r.gpuStream()
	}
	s, err := r.Device.NewStream()
	require.NoError(r, err)
	return s
}

// take is n bytes, which begin at a multiple of 256.
func (g *gpuMemory) take(n int64) memory.View {
	g.turn = 1 - g.turn
	at := g.used[g.turn]
	if at+n > g.parts[g.turn].Len() {
		g.r.Errorf("the test wants more than %d bytes", g.parts[g.turn].Len())
		g.r.FailNow()
	}
	g.used[g.turn] = kernels.AlignUp(at+n, 256)
	return g.parts[g.turn].Slice(at, n)
}

// reached reports whether peers reach the memory that take has made.
func (g *gpuMemory) reached(v memory.View) bool {
	heap := g.parts[1]
	return v.Ptr() >= heap.Ptr() && v.Ptr() < heap.Ptr()+uintptr(heap.Len())
}

func (g *gpuMemory) up(b []byte) memory.View {
	if len(b) == 0 {
		return memory.View{}
	}
	v := g.take(int64(len(b)))
	g.write(v, b)
	return v
}

func (g *gpuMemory) write(v memory.View, b []byte) {
	if len(b) > 0 {
		require.NoError(g.r, memory.Copy(g.copies, v.Slice(0, int64(len(b))), memory.Host(b)))
		require.NoError(g.r, g.copies.Synchronize())
	}
}

func (g *gpuMemory) down(v memory.View) []byte {
	if v.Len() == 0 {
		return nil
	}
	b := make([]byte, v.Len())
	require.NoError(g.r, memory.Copy(g.copies, memory.Host(b), v))
	require.NoError(g.r, g.copies.Synchronize())
	return b
}

// mark writes a word while calls run. It is not for the test's goroutine, so it does not end it.
func (g *gpuMemory) mark(v memory.View, n uint32) {
	if err := memory.Copy(g.marks, v, memory.Host(shm.Bytes([]uint32{n}))); err != nil {
		g.r.Errorf("mark %d: %v", n, err)
	}
}

// forGPUs makes options of what the host serves such as GPUs do, where that can be.
func forGPUs(rng *rand.Rand, o *dispatch.Options) bool {
	o.Hidden = []int{8, 16, 32, 48, 64, 144, 304, 1040}[rng.IntN(8)]
	o.MaxSMs = []int{0, 0, 1, 3, 16}[rng.IntN(5)]
	if o.Hidden <= 64 && rng.IntN(3) == 0 {
		tokens := 100 + rng.IntN(300)
		if o.Layout == dispatch.Padded {
			o.Capacity = o.Capacity / o.MaxTokens * tokens
		}
		o.MaxTokens = tokens
	}
	b := &batch{o: *o}
	for _, t := range []kernels.DType{b.dtype(), b.rowType(), b.sumType()} {
		if int64(o.Hidden)*t.Size()%16 != 0 {
			return false
		}
	}
	return true
}
