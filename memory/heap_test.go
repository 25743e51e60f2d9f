package memory

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
)

// gather returns every rank's numbers.
func gather(t *rankT, g *comm.Group, mine []int64) [][]int64 {
	parts, err := g.AllGather(t.ctx, slices.Clone(shm.Bytes(mine)))
	require.NoError(t, err)
	out := make([][]int64, len(parts))
	for r, p := range parts {
		for i := range len(p) / 8 {
			out[r] = append(out[r], int64(shm.Word(p, int64(8*i)).Load()))
		}
	}
	return out
}

func TestM1_SameCallsGiveSameOffsets(t *testing.T) { everywhere(t, 3, "offsets") }

// offsetsScenario makes the same calls on every rank, while everything that must not matter differs.
func offsetsScenario(t *rankT, g *comm.Group) {
	const rounds = 3
	chance := rand.New(rand.NewPCG(uint64(g.Rank()), uint64(time.Now().UnixNano())))
	noise := heapOf(t, g, Options{}) // whatever is called here differs by rank
	var noisy []*Buffer
	disturb := func() {
		switch chance.IntN(8) {
		case 0:
			time.Sleep(time.Duration(chance.IntN(100)) * time.Microsecond)
		case 1:
			runtime.GC()
		case 2:
			junk, err := shm.Reserve(2 << 20)
			require.NoError(t, err)
			defer junk.Close()
		case 3:
			if len(noisy) > 0 {
				require.NoError(t, noisy[0].Free())
				noisy = noisy[1:]
			}
		default:
			if b, err := noise.Alloc(chance.Int64N(10000)); err == nil {
				noisy = append(noisy, b)
			}
		}
	}
	var streams []device.Stream
	for range 2 {
		s, err := newStream()
		require.NoError(t, err)
		defer s.Close()
		streams = append(streams, s)
	}
	h := heapOf(t, g, Options{ReserveBytes: 64 << 20})
	for round := range rounds {
		shared := rand.New(rand.NewPCG(77, uint64(round)))
		var seen []int64
		var live []*Buffer
		for range 400 {
			disturb()
			if shared.IntN(5) < 3 {
				n := shared.Int64N(40000)
				var s device.Stream // not a rank's neighbour's business
				if chance.IntN(2) == 0 {
					s = streams[chance.IntN(2)]
				}
				b, err := h.AllocOn(s, n)
				if err != nil {
					require.ErrorIs(t, err, ErrOutOfMemory)
					seen = append(seen, -1)
					continue
				}
				require.Zero(t, b.Offset()%alignment)
				require.Len(t, b.Bytes(), int(n))
				live = append(live, b)
				seen = append(seen, int64(b.Segment()), b.Offset())
			} else if len(live) > 0 {
				k := shared.IntN(len(live))
				var s device.Stream
				if chance.IntN(2) == 0 {
					s = streams[chance.IntN(2)]
				}
				require.NoError(t, live[k].FreeOn(s))
				live = slices.Delete(live, k, k+1)
			}
		}
		all := gather(t, g, seen)
		for r := range all {
			require.Equal(t, all[0], all[r], "rank %d", r)
		}
		require.NoError(t, h.Verify(t.ctx))
		for _, b := range live {
			require.NoError(t, b.Free())
		}
		require.NoError(t, h.Grow(t.ctx, 1<<20))
	}
	require.Equal(t, 1+rounds, h.Stats().Segments)
	require.Zero(t, h.Stats().Buffers)
	require.NoError(t, h.Verify(t.ctx))
	// the other heap's ranks did not agree, and do not get away with it
	err := noise.Verify(t.ctx)
	require.ErrorIs(t, err, ErrDiverged)
	require.NoError(t, h.Close(t.ctx))
	require.NoError(t, noise.Close(t.ctx))
}

func newStream() (device.Stream, error) { return device.Host().NewStream() }

func TestM3_DivergenceIsNamedOnEveryRank(t *testing.T) { everywhere(t, 3, "divergence") }

func divergenceScenario(t *rankT, g *comm.Group) {
	h := heapOf(t, g, Options{})
	defer h.Close(t.ctx)
	var live []*Buffer
	for k := range 9 {
		b, err := h.Alloc(int64(k) * 300)
		require.NoError(t, err)
		live = append(live, b)
	}
	require.NoError(t, live[2].Free())
	require.NoError(t, h.Verify(t.ctx))

	n := int64(5000)
	if g.Rank() == 1 {
		n = 7000
	}
	for range 3 {
		_, err := h.Alloc(n)
		require.NoError(t, err)
	}
	err := h.Verify(t.ctx)
	var d *DivergenceError
	require.ErrorAs(t, err, &d)
	require.ErrorIs(t, err, ErrDiverged)
	require.Equal(t, int64(11), d.Call)
	require.True(t, d.Exact())
	require.Equal(t, []int{1}, d.Ranks)
	require.Len(t, d.Calls, 3)
	require.Equal(t, int64(7000), d.Calls[1].Size)
	require.Equal(t, int64(5000), d.Calls[2].Size)
	require.Equal(t, "alloc", d.Calls[0].Kind)
	texts, gerr := g.AllGather(t.ctx, []byte(err.Error()))
	require.NoError(t, gerr)
	for _, text := range texts {
		require.Equal(t, string(texts[0]), string(text))
	}
	// Verify changed nothing: it says so again
	require.EqualError(t, h.Verify(t.ctx), err.Error())
}

func TestHeapBytesAreWherePeersLook(t *testing.T) { everywhere(t, 4, "bytes") }

// bytesScenario has every rank write into every segment and check its own.
func bytesScenario(t *rankT, g *comm.Group) {
	h := heapOf(t, g, Options{})
	const slot = 1000
	n := int64(g.Size())
	b, err := h.Alloc(n * slot)
	require.NoError(t, err)
	empty, err := h.Alloc(0)
	require.NoError(t, err)
	require.Empty(t, empty.Bytes())
	sp := h.Space()
	require.Equal(t, uintptr(0), sp.Base%4096)
	require.Equal(t, shm.Addr(b.Bytes()), sp.Base+uintptr(int64(g.Rank())*sp.Stride+b.Offset()))
	require.Equal(t, shm.Addr(b.Bytes()), b.View().Ptr())
	for _, c := range sp.Range(g.Rank(), b.Offset(), b.Len()) {
		require.Zero(t, c, "new memory is zero")
	}
	require.NoError(t, g.Barrier(t.ctx))
	for p := range g.Size() {
		to := sp.Range(p, b.Offset()+int64(g.Rank())*slot, slot)
		for i := range to {
			to[i] = byte(31*g.Rank() + 7*p + i)
		}
	}
	require.NoError(t, g.Barrier(t.ctx))
	for p := range g.Size() {
		for i, c := range b.Bytes()[p*slot : (p+1)*slot] {
			require.Equal(t, byte(31*p+7*g.Rank()+i), c)
		}
	}
	// the header is the ranks' too
	shm.Word(sp.Segment((g.Rank()+1)%g.Size()), 1024).Store(uint64(g.Rank() + 1))
	require.NoError(t, g.Barrier(t.ctx))
	require.Equal(t, uint64((g.Rank()+g.Size()-1)%g.Size()+1), shm.Word(sp.Segment(g.Rank()), 1024).Load())
	require.GreaterOrEqual(t, b.Offset(), int64(kernels.HeaderBytes))
	require.NoError(t, h.Close(t.ctx))
}

func TestBuffersMayPassFourGiB(t *testing.T) {
	runRanks(t, socketRanks(t, 2), func(t *rankT, g *comm.Group) {
		const n = 5 << 30 // addresses; memory only where touched
		h := heapOf(t, g, Options{SegmentBytes: 2 * n})
		_, err := h.Alloc(n)
		require.NoError(t, err)
		b, err := h.Alloc(n)
		require.NoError(t, err)
		require.Greater(t, b.Offset(), int64(n))
		sp := h.Space()
		sp.Range(1-g.Rank(), b.Offset()+n-1, 1)[0] = byte(5 + g.Rank())
		require.NoError(t, g.Barrier(t.ctx))
		require.Equal(t, byte(6-g.Rank()), b.Bytes()[n-1])
		require.Equal(t, byte(6-g.Rank()), b.View().Slice(n-1, 1).Bytes()[0])
		require.NoError(t, h.Close(t.ctx))
	})
}

func TestM8_OnlyGrowMaps(t *testing.T) { everywhere(t, 2, "grow") }

func growScenario(t *rankT, g *comm.Group) {
	h := heapOf(t, g, Options{SegmentBytes: 2 << 20, ReserveBytes: 16 << 20})
	require.NoError(t, g.Barrier(t.ctx))
	before := heapMappings()
	require.Positive(t, before)
	var live []*Buffer
	var err error
	for {
		var b *Buffer
		if b, err = h.Alloc(100_000); err != nil {
			break
		}
		live = append(live, b)
	}
	require.ErrorIs(t, err, ErrOutOfMemory)
	require.ErrorContains(t, err, "allocate 100000 bytes")
	require.ErrorContains(t, err, "a larger Options.SegmentBytes or Heap.Grow makes room")
	require.Equal(t, before, heapMappings(), "Alloc mapped memory")
	require.NoError(t, g.Barrier(t.ctx))

	require.NoError(t, h.Grow(t.ctx, 4<<20))
	b, err := h.Alloc(4 << 20)
	require.NoError(t, err, "there is room for what was asked for")
	require.Equal(t, 1, b.Segment())
	// old segments stay where they were, and peers see the new one
	live[0].Bytes()[0] = 1
	b.Bytes()[0] = byte(g.Rank() + 1)
	require.NoError(t, g.Barrier(t.ctx))
	sp := h.Space()
	for p := range g.Size() {
		require.Equal(t, byte(p+1), sp.Range(p, b.Offset(), 1)[0])
	}

	// a refused Grow is refused everywhere and changes nothing
	stats := h.Stats()
	err = h.Grow(t.ctx, 1<<40)
	require.ErrorIs(t, err, ErrOutOfMemory)
	require.ErrorContains(t, err, "Options.ReserveBytes")
	require.ErrorIs(t, h.Grow(t.ctx, 0), ErrInvalid)
	require.ErrorIs(t, h.Grow(t.ctx, -5), ErrInvalid)
	err = h.Grow(t.ctx, int64(1000*(1+g.Rank())))
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, "rank 0 has 1000, rank 1 has 2000")
	n := int64(1000)
	if g.Rank() == 1 {
		n = -1
	}
	require.ErrorIs(t, h.Grow(t.ctx, n), ErrInvalid, "the other rank's error too")
	require.Equal(t, stats, h.Stats())
	require.NoError(t, h.Verify(t.ctx))
	require.NoError(t, h.Close(t.ctx))
}

func TestF3_RanksThatDifferLearnIt(t *testing.T) { everywhere(t, 3, "mismatch") }

// otherBuild is what a rank with other kernels has.
type otherBuild struct{ backing }

func (otherBuild) build() string { return "0.0.1 (build 0123456789ab)" }

func mismatchScenario(t *rankT, g *comm.Group) {
	o := Options{SegmentBytes: 1 << 20}
	if g.Rank() == 2 {
		o.SegmentBytes = 3 << 20
	}
	_, err := NewHeap(t.ctx, g, device.Host(), o)
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.EqualError(t, err, "memory: new heap: mismatch: segment bytes: rank 0 has 1048576, rank 2 has 3145728")

	_, err = newHeap(t.ctx, g, device.Host(), Options{}, func(d device.Device) (backing, error) {
		b, err := newBacking(d)
		if g.Rank() == 1 {
			b = otherBuild{b}
		}
		return b, err
	}, ucx.Open)
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.EqualError(t, err, "memory: new heap: mismatch: kernels: rank 0 has "+host.Build()+", rank 1 has 0.0.1 (build 0123456789ab)")

	o = Options{}
	if g.Rank() == 0 {
		o.ReserveBytes = -7
	}
	_, err = NewHeap(t.ctx, g, device.Host(), o)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "-7")

	var d device.Device = device.Host()
	if g.Rank() == 1 {
		d = cudaDevice{}
	}
	_, err = NewHeap(t.ctx, g, d, Options{})
	require.ErrorIs(t, err, ErrUnsupported)
	require.ErrorContains(t, err, "cuda:3")
	if g.Rank() == 1 {
		d = nil
	}
	_, err = NewHeap(t.ctx, g, d, Options{})
	require.Error(t, err)

	// nothing is left of it: the group still works
	h := heapOf(t, g, Options{})
	require.NoError(t, h.Close(t.ctx))
}

type cudaDevice struct{ device.Device }

func (cudaDevice) Kind() device.Kind { return device.CUDAKind }
func (cudaDevice) Index() int        { return 3 }
func (cudaDevice) String() string    { return "cuda:3" }

func TestM4_CloseInEveryWay(t *testing.T) { everywhere(t, 3, "close") }

func closeScenario(t *rankT, g *comm.Group) {
	h := heapOf(t, g, Options{})
	b, err := h.Alloc(100)
	require.NoError(t, err)
	v := b.View().Slice(10, 20)
	freed, err := h.Alloc(1)
	require.NoError(t, err)
	require.NoError(t, freed.Free())
	require.NoError(t, h.Close(t.ctx))
	require.NoError(t, h.Close(t.ctx), "idempotent")

	require.ErrorIs(t, v.Valid(), ErrClosed)
	require.ErrorIs(t, freed.View().Valid(), ErrFreed)
	require.ErrorIs(t, b.Free(), ErrClosed)
	_, err = h.Alloc(1)
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, h.Grow(t.ctx, 1), ErrClosed)
	require.ErrorIs(t, h.Verify(t.ctx), ErrClosed)
	_, err = h.Register(t.ctx, View{})
	require.ErrorIs(t, err, ErrClosed)

	// a rank that does not come: the others give up with ctx and release what they have
	h = heapOf(t, g, Options{})
	require.NoError(t, g.Barrier(t.ctx))
	beside, err := g.Split(t.ctx, 0, g.Rank()) // for a barrier that is none of the heap's calls
	require.NoError(t, err)
	defer beside.Close()
	if g.Rank() == 0 {
		require.NoError(t, beside.Barrier(t.ctx))
		require.NoError(t, h.Close(t.ctx), "the others were here")
		return
	}
	ctx, cancel := context.WithTimeout(t.ctx, 50*time.Millisecond)
	defer cancel()
	start := time.Now()
	err = h.Close(ctx)
	require.Error(t, err)
	require.Less(t, time.Since(start), time.Minute)
	require.NoError(t, beside.Barrier(t.ctx))
	require.NoError(t, h.Close(t.ctx))
}

func TestF1_GroupFailureAbortsOwnWaits(t *testing.T) { everywhere(t, 3, "abort") }

func abortScenario(t *rankT, g *comm.Group) {
	h := heapOf(t, g, Options{})
	sp := h.Space()
	word := shm.Word(sp.Segment(g.Rank()), kernels.AbortOffset)
	require.NoError(t, g.Barrier(t.ctx))
	require.Zero(t, word.Load())
	_ = g.Barrier(t.ctx) // which rank 1's death may overtake
	if g.Rank() == 1 {
		g.Kill()
	}
	require.Eventually(t, func() bool { return word.Load() != 0 }, time.Minute, time.Millisecond)
	// closing does not wait for the dead
	start := time.Now()
	require.NoError(t, h.Close(context.Background()))
	require.Less(t, time.Since(start), time.Minute)
	_, err := NewHeap(t.ctx, g, device.Host(), Options{})
	require.Error(t, err)
}

func TestM4_MemoryOfAKilledProcessStays(t *testing.T) {
	errs := processes(t, 3, "killed")
	require.ErrorContains(t, errs[1], "killed")
	require.NoError(t, errors.Join(errs[0], errs[2]))
}

func killedScenario(t *rankT, g *comm.Group) {
	h := heapOf(t, g, Options{})
	b, err := h.Alloc(100)
	require.NoError(t, err)
	copy(b.Bytes(), "still here")
	require.NoError(t, g.Barrier(t.ctx))
	_ = g.Barrier(t.ctx) // which rank 1's death may overtake
	if g.Rank() == 1 {
		require.NoError(t, unix.Kill(os.Getpid(), unix.SIGKILL))
	}
	start := time.Now()
	err = h.Verify(t.ctx)
	require.ErrorIs(t, err, comm.ErrPeerLost)
	require.Less(t, time.Since(start), time.Minute)
	sp := h.Space()
	require.Equal(t, "still here", string(sp.Range(1, b.Offset(), 10)))
	own := shm.Word(sp.Segment(g.Rank()), kernels.AbortOffset)
	require.Eventually(t, func() bool { return own.Load() != 0 }, time.Minute, time.Millisecond)
	require.NoError(t, h.Close(t.ctx))

	// the survivors go on, with a heap of their own
	g2, err := g.Shrink(t.ctx)
	require.NoError(t, err)
	defer g2.Close()
	h = heapOf(t, g2, Options{})
	require.NoError(t, h.Verify(t.ctx))
	require.NoError(t, h.Close(t.ctx))
}

func TestCollectiveCallsThatDoNotMeet(t *testing.T) { everywhere(t, 2, "cut") }

func cutScenario(t *rankT, g *comm.Group) {
	// different calls: each rank learns it, and the heap is as it was
	h := heapOf(t, g, Options{SegmentBytes: 1 << 20})
	var err error
	if g.Rank() == 0 {
		err = h.Grow(t.ctx, 1000)
	} else {
		err = h.Verify(t.ctx)
	}
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, `rank 0 calls "grow", rank 1 calls "verify"`)
	require.NoError(t, h.Grow(t.ctx, 1000))
	require.NoError(t, h.Close(t.ctx))

	// one rank cannot map what another registers
	deny := func(rank int, op string, n int64) error {
		if op == "place" && n == pageSize() && rank == 1 {
			return errors.New("denied by the test")
		}
		return nil
	}
	h, err = newHeap(t.ctx, g, device.Host(), Options{SegmentBytes: 1 << 20}, sawBackings(g.Rank(), nil, deny), ucx.Open)
	require.NoError(t, err)
	m := mapped(t, object(t, 10), 0, 10)
	_, err = h.Register(t.ctx, m.View())
	require.ErrorContains(t, err, "denied by the test")
	require.Zero(t, h.Stats().Registrations)
	_, ok := m.View().Symmetric(h)
	require.False(t, ok)
	require.NoError(t, h.Verify(t.ctx))
	require.NoError(t, m.Close())
	require.NoError(t, h.Close(t.ctx))

	_, err = NewHeap(t.ctx, nil, device.Host(), Options{})
	require.ErrorIs(t, err, ErrInvalid)

	// a call that rank 1 does not wait for: nothing can be said about the heap any more, except that
	// it can be closed
	h = heapOf(t, g, Options{SegmentBytes: 1 << 20})
	beside, err := g.Split(t.ctx, 0, g.Rank())
	require.NoError(t, err)
	defer beside.Close()
	if g.Rank() == 0 {
		require.NoError(t, beside.Barrier(t.ctx))
		_, err = h.Register(t.ctx, View{})
		require.ErrorIs(t, err, comm.ErrMismatch)
	} else {
		ctx, cancel := context.WithTimeout(t.ctx, 20*time.Millisecond)
		_, err = h.Register(ctx, View{})
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, beside.Barrier(t.ctx))
		_, err = h.Alloc(1)
		require.ErrorContains(t, err, "cut off")
		require.ErrorContains(t, h.Grow(t.ctx, 1), "cut off") // meets what rank 0 is in
	}
	ctx, cancel := context.WithTimeout(t.ctx, 100*time.Millisecond)
	defer cancel()
	_ = h.Close(ctx)
	require.NoError(t, h.Close(t.ctx))
}

func TestM4_ImportersCloseBeforeExporters(t *testing.T) {
	type event struct {
		rank int
		op   string
		at   int64
	}
	var mu sync.Mutex
	var events []event
	saw := func(rank int, op string, at, n int64) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, event{rank, op, at})
	}
	const n = 3
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(1<<20))
	var stride int64
	runRanks(t, socketRanks(t, n), func(t *rankT, g *comm.Group) {
		chance := rand.New(rand.NewPCG(uint64(g.Rank()), 5))
		h, err := newHeap(t.ctx, g, device.Host(), Options{SegmentBytes: 1 << 20, ReserveBytes: 8 << 20}, sawBackings(g.Rank(), saw, nil), ucx.Open)
		require.NoError(t, err)
		require.NoError(t, h.Grow(t.ctx, 1))
		m, err := MapFile(int(f.Fd()), 0, 5000)
		require.NoError(t, err)
		defer m.Close()
		r, err := h.Register(t.ctx, m.View())
		require.NoError(t, err)
		_, err = h.Register(t.ctx, m.View())
		require.NoError(t, err)
		mu.Lock()
		stride = h.space.Stride
		mu.Unlock()
		time.Sleep(time.Duration(chance.IntN(20)) * time.Millisecond)
		require.NoError(t, r.Deregister(t.ctx))
		time.Sleep(time.Duration(chance.IntN(20)) * time.Millisecond)
		require.NoError(t, h.Close(t.ctx))
	})
	// for every place: all importers let go of it before its owner does
	gone := make(map[int]int)                   // owner -> importers' displacements of what it will close
	placed, displaced := 0, make(map[int64]int) // by place
	for _, e := range events {
		owner := int(e.at / stride)
		switch e.op {
		case "place":
			placed++
		case "displace":
			if owner == e.rank { // deregistration by the exporter
				require.Equal(t, n-1, displaced[e.at], "rank %d took its memory away from importers", owner)
				continue
			}
			displaced[e.at]++
			gone[owner]++
		case "close":
			// two extents, two registrations, of n-1 importers each
			require.Equal(t, 4*(n-1), gone[e.rank], "rank %d freed while imported", e.rank)
		}
	}
	require.Equal(t, 4*n*n, placed)
}

func TestHeapFailsOnAllRanksOrNone(t *testing.T) {
	denied := errors.New("denied by the test")
	runRanks(t, socketRanks(t, 2), func(*rankT, *comm.Group) {}) // a process keeps what it opens for its first group
	for _, op := range []string{"reserve", "create", "place"} {
		for kind, groups := range map[string]func(testing.TB, int) []*comm.Group{"local": localRanks, "sockets": socketRanks} {
			t.Run(op+"/"+kind, func(t *testing.T) {
				culprit := 1
				if kind == "local" && op == "reserve" {
					culprit = 0
				}
				for _, at := range []string{"new", "grow"} {
					if at == "grow" && op == "reserve" {
						continue
					}
					fds := openFDs(t)
					runRanks(t, groups(t, 3), func(t *rankT, g *comm.Group) {
						armed := at == "new"
						calls := 0
						deny := func(rank int, o string, n int64) error {
							// the second placement of a rank, if there is one, is an import
							if o == op && armed && rank == culprit {
								if calls++; op != "place" || kind == "local" || calls == 2 {
									return fmt.Errorf("%w: %s", denied, o)
								}
							}
							return nil
						}
						o := Options{SegmentBytes: 1 << 20, ReserveBytes: 32 << 20}
						h, err := newHeap(t.ctx, g, device.Host(), o, sawBackings(g.Rank(), nil, deny), ucx.Open)
						if at == "grow" {
							require.NoError(t, err)
							armed = true
							stats := h.Stats()
							err = h.Grow(t.ctx, 1<<20)
							armed = false
							require.Equal(t, stats, h.Stats())
							defer func() {
								require.NoError(t, h.Grow(t.ctx, 1<<20), "a refusal does no harm")
								require.NoError(t, h.Verify(t.ctx))
								require.NoError(t, h.Close(t.ctx))
							}()
						}
						require.ErrorContains(t, err, denied.Error())
						if g.Rank() == culprit {
							require.ErrorIs(t, err, denied)
						} else {
							require.ErrorContains(t, err, fmt.Sprintf("rank %d", culprit))
						}
					})
					require.LessOrEqual(t, openFDs(t), fds)
				}
			})
		}
	}
}

// The driver waits for a kernel of this rank, which waits for its peer: both end once the context has.
func TestF1_GrowEndsWithItsContext(t *testing.T) {
	runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
		var h *Heap
		waited := errors.New("the kernel has waited for its peer")
		deny := func(rank int, op string, _ int64) error {
			if h == nil || op != "create" || rank != 0 {
				return nil
			}
			for until := time.Now().Add(2 * time.Minute); time.Now().Before(until); time.Sleep(time.Millisecond) {
				if shm.Word(h.space.Segment(0), kernels.AbortOffset).Load() != 0 {
					return nil
				}
			}
			return waited
		}
		made, err := newHeap(t.ctx, g, device.Host(), Options{SegmentBytes: 1 << 20}, sawBackings(g.Rank(), nil, deny), ucx.Open)
		require.NoError(t, err)
		h = made
		ctx, cancel := context.WithTimeout(t.ctx, 200*time.Millisecond)
		defer cancel()
		began := time.Now()
		err = h.Grow(ctx, 1<<20)
		require.Less(t, time.Since(began), time.Minute)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, waited)
		short, stop := context.WithTimeout(t.ctx, 200*time.Millisecond)
		defer stop()
		h.Close(short)
	})
}

func TestHeapTakesTheAddressesThereAre(t *testing.T) {
	limits := make([]int64, 3)
	runRanks(t, socketRanks(t, 3), func(t *rankT, g *comm.Group) {
		deny := func(rank int, op string, n int64) error {
			if op == "reserve" && rank == 1 && n > 1<<30 {
				return errors.New("no addresses")
			}
			return nil
		}
		h, err := newHeap(t.ctx, g, device.Host(), Options{SegmentBytes: 1 << 20}, sawBackings(g.Rank(), nil, deny), ucx.Open)
		require.NoError(t, err)
		limits[g.Rank()] = h.limit
		b, err := h.Alloc(10)
		require.NoError(t, err)
		b.Bytes()[0] = 1
		require.NoError(t, h.Close(t.ctx))
	})
	require.Equal(t, limits[0], limits[1])
	require.Equal(t, limits[0], limits[2])
	require.LessOrEqual(t, limits[0]*6, int64(1<<30))
	require.Greater(t, limits[0]*12, int64(1<<30))
}

func TestOptions(t *testing.T) {
	const granule = 2 << 20
	for size := 1; size <= comm.MaxSize; size *= 2 {
		l, err := Options{}.validate(size, granule)
		require.NoError(t, err)
		require.Zero(t, l.first%granule)
		require.Zero(t, l.stride()%granule)
		require.GreaterOrEqual(t, l.first, int64(64<<20+kernels.HeaderBytes))
		require.GreaterOrEqual(t, l.limit, l.first)
		require.LessOrEqual(t, l.stride()*int64(size), int64(maxAddresses))
	}
	l, err := Options{}.validate(64, granule)
	require.NoError(t, err)
	require.Equal(t, int64(32<<30), l.limit)
	l, err = Options{}.validate(2, granule)
	require.NoError(t, err)
	require.Equal(t, int64(1<<40), l.limit)
	l, err = Options{SegmentBytes: 8 << 30, ReserveBytes: 8 << 30}.validate(64, granule)
	require.NoError(t, err)
	require.Equal(t, l.first, l.limit)
	l, err = Options{ReserveBytes: 100}.validate(64, granule)
	require.NoError(t, err)
	require.Equal(t, int64(granule), l.first)
	for _, o := range []Options{
		{SegmentBytes: -1}, {ReserveBytes: -1}, {SegmentBytes: 2 << 20, ReserveBytes: 1 << 20},
		{SegmentBytes: 1 << 62}, {ReserveBytes: 1<<63 - 1},
	} {
		_, err := o.validate(4, granule)
		require.ErrorIs(t, err, ErrInvalid, o)
	}
}

func openFDs(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(d)
}

// mappings counts the process's memory maps.
func mappings() int {
	b, _ := os.ReadFile("/proc/self/maps")
	return strings.Count(string(b), "\n")
}

// heapMappings counts the maps of heaps' memory. The Go runtime's own come and go.
func heapMappings() int {
	b, _ := os.ReadFile("/proc/self/maps")
	return strings.Count(string(b), "memfd:switchyard-heap")
}

// residentKiB is the memory the process has touched and not given back.
func residentKiB() int {
	b, _ := os.ReadFile("/proc/self/status")
	for line := range strings.SplitSeq(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	return 0
}

func TestM5_ManyHeapsLeaveNothing(t *testing.T) {
	for kind, groups := range map[string]func(testing.TB, int) []*comm.Group{"local": localRanks, "sockets": socketRanks} {
		t.Run(kind, func(t *testing.T) {
			var fds, maps, kib [2]int
			runRanks(t, groups(t, 2), func(t *rankT, g *comm.Group) {
				look := func(i int) {
					require.NoError(t, g.Barrier(t.ctx))
					if g.Rank() == 0 {
						debug.FreeOSMemory() // or what Go keeps for later, on a busy machine more, is taken for a leak
						d, err := os.ReadDir("/proc/self/fd")
						require.NoError(t, err)
						fds[i], maps[i], kib[i] = len(d), mappings(), residentKiB()
					}
					require.NoError(t, g.Barrier(t.ctx))
				}
				one := func() {
					h := heapOf(t, g, Options{})
					b, err := h.Alloc(1 << 20)
					require.NoError(t, err)
					b.Bytes()[0], b.Bytes()[1<<19] = 1, 2
					sp := h.Space()
					sp.Range(1-g.Rank(), b.Offset()+4096, 1)[0] = 3
					require.NoError(t, h.Close(t.ctx))
				}
				for range 50 {
					one()
				}
				look(0)
				for range 1000 {
					one()
				}
				look(1)
			})
			require.Equal(t, fds[0], fds[1], "file descriptors")
			require.InDelta(t, maps[0], maps[1], 20, "mappings (the Go runtime makes a few of its own)")
			require.Less(t, kib[1]-kib[0], 16<<10, "resident KiB grew from %d to %d", kib[0], kib[1])
		})
	}
}

func TestM5_ManyRanksOfOneProcessShareTheMap(t *testing.T) {
	const n = 64
	before := mappings()
	runRanks(t, localRanks(t, n), func(t *rankT, g *comm.Group) {
		h := heapOf(t, g, Options{})
		b, err := h.Alloc(8 * n)
		require.NoError(t, err)
		sp := h.Space()
		for p := range n {
			shm.Word(sp.Range(p, b.Offset(), 8*n), int64(8*g.Rank())).Store(uint64(1000*g.Rank() + p))
		}
		require.NoError(t, g.Barrier(t.ctx))
		for p := range n {
			require.Equal(t, uint64(1000*p+g.Rank()), shm.Word(b.Bytes(), int64(8*p)).Load())
		}
		if g.Rank() == 0 {
			require.Less(t, mappings()-before, 4*n)
		}
		require.Len(t, h.back.(*hostBacking).shared.bells, n)
		require.NoError(t, h.Close(t.ctx))
	})
}
