package host

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// apart makes the ranks of w read each other's memory as processes do.
func (w *world) apart(t *testing.T) {
	for _, e := range w.engines {
		e.bells = nil
		e.SetPull(0, 256)
	}
	w.open(t)
}

func (w *world) look(t *testing.T) {
	for _, p := range w.ports {
		require.NoError(t, p.Ready().Slow)
	}
}

// swap has two ranks exchange messages of n bytes from src into memory outside the heap.
func (w *world) swap(call int, n int64, src [2][]byte, timeout time.Duration) (dst [2][]byte, errs [2]error) {
	m := [][]int64{{0, n}, {n, 0}}
	var wg sync.WaitGroup
	for r := range dst {
		for i := range n {
			src[r][i] = element(call, r, 1-r, i)
		}
		dst[r] = bytes.Repeat([]byte{0xee}, int(n))
		wg.Go(func() {
			errs[r] = w.launch(r, m, src[r][:n], w.place(r, src[r]), dst[r], timeout)
		})
	}
	wg.Wait()
	return dst, errs
}

func (w *world) launch(rank int, m [][]int64, src []byte, place int64, dst []byte, timeout time.Duration) error {
	return w.ports[rank].Launch(nil, &kernels.AllToAllV{Routes: routes(m, rank), Src: buffer(src, place), Dst: buffer(dst, -1), Launched: kernels.Launched{Timeout: timeout}})
}

// place is where b lies in the segment of a rank, -1 when it is elsewhere.
func (w *world) place(rank int, b []byte) int64 {
	if own := w.engines[rank].space.Range(rank, w.data, 4096); shm.Addr(b)-shm.Addr(own) < uintptr(len(own)) {
		return w.data
	}
	return -1
}

func (w *world) swaps(t *testing.T, src [2][]byte) {
	for call := range 20 {
		n := int64(500 + 700*call%3000)
		dst, errs := w.swap(call, n, src, time.Minute)
		require.NoError(t, errors.Join(errs[:]...))
		for r := range dst {
			for i, got := range dst[r] {
				if want := element(call, 1-r, r, int64(i)); got != want {
					t.Fatalf("call %d: byte %d of rank %d is %#x, want %#x", call, i, r, got, want)
				}
			}
		}
	}
}

func twoRanks(t *testing.T) *world {
	w := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, EagerBytes: 100, PacketBytes: 20}, 4096)
	w.apart(t)
	return w
}

func heapSources() (src [2][]byte) { return [2][]byte{make([]byte, 4096), make([]byte, 4096)} }

// taken is the last call of which dst has read src's message in src's memory.
func (w *world) taken(src, dst int) uint64 {
	return w.engines[src].word(src, w.c.Taken(dst)).Load()
}

func TestMessagesAreReadInTheirSendersMemory(t *testing.T) {
	w := twoRanks(t)
	w.look(t)
	w.swaps(t, heapSources())
	require.Equal(t, kernels.LastSeq(20), w.taken(0, 1))
	require.Equal(t, kernels.LastSeq(20), w.taken(1, 0))
}

// What lies in the heap is mapped: the receiver would not notice if it could not read the sender's other memory any more.
func TestMessagesAreReadInTheHeap(t *testing.T) {
	w := twoRanks(t)
	w.look(t)
	for _, p := range w.ports {
		sources := p.(*port).fam.(*exchanges).sources
		for r := range sources {
			sources[r].memory = shm.Process{}
		}
	}
	src := heapSources()
	src[0] = w.engines[0].space.Range(0, w.data, 4096)
	w.swaps(t, src)
	require.Equal(t, kernels.LastSeq(20), w.taken(0, 1))
	require.Zero(t, w.taken(1, 0))
}

// A rank in another namespace has another number there than here, where a stranger may have it.
func TestWhoCannotBeReadIsNamedAndSendsThroughStaging(t *testing.T) {
	for name, spoil := range map[string]func(card []uint64){
		"nobody has its number":         func(card []uint64) { card[0] = 1 << 30 },
		"a stranger has its number":     func(card []uint64) { card[0] = 1 },
		"its number is somebody else's": func(card []uint64) { card[3]++ },
	} {
		t.Run(name, func(t *testing.T) {
			w := twoRanks(t)
			spoil(shm.View[uint64](w.engines[0].space.Range(0, w.c.Card(), 32)))
			require.ErrorContains(t, w.ports[1].Ready().Slow, "rank 0: ")
			require.NoError(t, w.ports[0].Ready().Slow)
			w.swaps(t, heapSources())
			require.Zero(t, w.taken(0, 1))
			require.Equal(t, kernels.LastSeq(20), w.taken(1, 0), "the other direction does not mind")
		})
	}
}

// Drivers have memory that only its own process reaches, and so has memfd_secret.
func TestMemoryThatOthersCannotReadGoesThroughStaging(t *testing.T) {
	const memfdSecret = 447
	fd, _, errno := unix.Syscall(memfdSecret, 0, 0, 0)
	if errno != 0 {
		t.Skipf("memfd_secret: %v", errno)
	}
	require.NoError(t, unix.Ftruncate(int(fd), 4096))
	secret, err := unix.Mmap(int(fd), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	require.NoError(t, unix.Close(int(fd)))
	defer func() { require.NoError(t, unix.Munmap(secret)) }()
	w := twoRanks(t)
	w.look(t)
	src := heapSources()
	src[0] = secret
	w.swaps(t, src)
	require.Zero(t, w.taken(0, 1))
	require.Equal(t, kernels.LastSeq(20), w.taken(1, 0))
}

// TestF1_NobodyWritesToWhoHasGivenUp has one rank come too late: the other's output must stay as it is from then on.
func TestF1_NobodyWritesToWhoHasGivenUp(t *testing.T) {
	for _, shared := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared=%v", shared), func(t *testing.T) {
			w := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256}, 0)
			if !shared {
				w.apart(t)
				w.look(t)
			}
			const n = 1 << 20
			m := [][]int64{{0, n}, {n, 0}}
			out, late := make([]byte, n), make([]byte, n)
			call := func(rank int, dst []byte, timeout time.Duration) error {
				return w.launch(rank, m, make([]byte, n), -1, dst, timeout)
			}
			var peer *comm.PeerError
			err := call(0, out, 10*time.Millisecond)
			require.ErrorAs(t, err, &peer)
			require.ErrorIs(t, err, comm.ErrTimeout)
			require.Equal(t, 1, peer.Rank)
			want := bytes.Repeat([]byte{0xee}, n)
			copy(out, want)
			require.ErrorIs(t, call(1, late, 50*time.Millisecond), comm.ErrTimeout)
			require.Equal(t, want, out)
		})
	}
}

// TestF1_NobodyTakesWhatItsSenderHasTakenBack has ranks give up at any time while others read: who succeeds has the right
// data.
func TestF1_NobodyTakesWhatItsSenderHasTakenBack(t *testing.T) {
	const n = 300 << 10
	rnd := rand.New(rand.NewPCG(1, 1))
	outcomes := [2]int{}
	for try := range 200 {
		w := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256}, 0)
		w.apart(t)
		w.look(t)
		for _, e := range w.engines {
			e.SetPull(0, 4096)
		}
		m := [][]int64{{0, n}, {0, 0}}
		src, dst, want := make([]byte, n), make([]byte, n), make([]byte, n)
		for i := range src {
			want[i] = byte(i ^ i>>8 ^ try)
		}
		copy(src, want)
		quit := time.Duration(rnd.Int64N(int64(200 * time.Microsecond)))
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(quit)
			w.engines[0].abort.Store(1)
		})
		wg.Go(func() {
			if w.launch(0, m, src, -1, nil, time.Minute) != nil {
				fill(src, 0xee)
			}
		})
		err := w.launch(1, m, nil, -1, dst, 5*time.Millisecond)
		wg.Wait()
		if err != nil {
			require.ErrorIs(t, err, comm.ErrTimeout)
			outcomes[1]++
			continue
		}
		outcomes[0]++
		require.True(t, bytes.Equal(want, dst), "try %d", try)
	}
	t.Logf("%d read, %d given up", outcomes[0], outcomes[1])
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}
