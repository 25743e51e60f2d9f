package host

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// world is a heap and one engine a rank, without the packages above.
type world struct {
	engines []*Engine
	ports   []kernels.Port
	c       ExchangeBlock
	data    int64 // offset of the part of each segment that tests use as user memory
}

func newWorld(t testing.TB, n int, family kernels.ExchangeBounds, data int64) *world {
	c := ExchangeBlock{&family, kernels.HeaderBytes}
	c.Size = n
	stride := (c.Offset + c.Bytes() + data + 1<<12) &^ (1<<12 - 1)
	stride += 1 << 12
	rng, err := shm.Reserve(stride * int64(n))
	require.NoError(t, err)
	t.Cleanup(func() { rng.Close() })
	fd, err := shm.Create("kernels-test", stride*int64(n))
	require.NoError(t, err)
	require.NoError(t, rng.MapFD(0, fd, 0, stride*int64(n)))
	bells := NewBells(n)
	w := &world{c: c, data: c.Offset + c.Bytes()}
	for r := range n {
		w.engines = append(w.engines, New(kernels.Space{Mem: rng.Bytes(), Base: rng.Addr(), Stride: stride, Rank: r, Size: n}, bells, func() error { return nil }))
	}
	w.open(t)
	return w
}

func (w *world) open(t testing.TB) {
	w.ports = nil
	for _, e := range w.engines {
		p, err := e.Open(w.c.ExchangeBounds, w.c.Offset)
		require.NoError(t, err)
		w.ports = append(w.ports, p)
	}
}

func buffer(b []byte, place int64) kernels.Buffer {
	return kernels.Buffer{Mem: b, Ptr: shm.Addr(b), Bytes: int64(len(b)), Place: place, Reach: place >= 0}
}

// rotation is the order of the built-in algorithms.
func rotation(rank, n int) (order, reverse []int32) {
	for i := 1; i < n; i++ {
		order = append(order, int32((rank+i)%n))
		reverse = append(reverse, int32((rank-i+n)%n))
	}
	return order, reverse
}

// routes packs the rows of the split matrix m.
func routes(m [][]int64, rank int) *kernels.Routes {
	n := len(m)
	r := &kernels.Routes{}
	var so, ro int64
	for p := range n {
		r.SendBytes, r.SendOffsets = append(r.SendBytes, m[rank][p]), append(r.SendOffsets, so)
		r.RecvBytes, r.RecvOffsets = append(r.RecvBytes, m[p][rank]), append(r.RecvOffsets, ro)
		so += m[rank][p]
		ro += m[p][rank]
	}
	r.Order, r.ReverseOrder = rotation(rank, n)
	return r
}

// element is a byte that is unique enough to its place in the exchange.
func element(call, src, dst int, i int64) byte {
	h := uint64(call)*0x9e3779b97f4a7c15 ^ uint64(src+1)*0xbf58476d1ce4e5b9 ^ uint64(dst+1)*0x94d049bb133111eb ^ uint64(i)*0xd6e8feb86659fd93
	h ^= h >> 29
	return byte(h * 0xff51afd7ed558ccd >> 56)
}

func TestAllToAllVModesAndSchedules(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5} {
		for _, inPlace := range []bool{false, true} {
			for _, window := range []int{1, n} {
				t.Run(fmt.Sprintf("ranks=%d/inplace=%v/window=%d", n, inPlace, window), func(t *testing.T) {
					const maxMsg = 3000
					w := newWorld(t, n, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, EagerBytes: 100, PacketBytes: 20}, int64(n)*maxMsg)
					rnd := rand.New(rand.NewPCG(1, uint64(n)))
					for call := range 40 {
						m := make([][]int64, n)
						for i := range m {
							m[i] = make([]int64, n)
							for j := range m[i] {
								m[i][j] = []int64{0, 1, 3, 17, 20, 21, 100, 101, 255, 256, 257, 513, rnd.Int64N(maxMsg)}[rnd.IntN(13)]
							}
						}
						var wg sync.WaitGroup
						for r := range n {
							wg.Go(func() {
								ro := routes(m, r)
								var src []byte
								for p := range n {
									for i := range m[r][p] {
										src = append(src, element(call, r, p, i))
									}
								}
								total := ro.RecvOffsets[n-1] + ro.RecvBytes[n-1]
								dst, place := make([]byte, total), int64(-1)
								if inPlace {
									dst, place = w.engines[r].space.Range(r, w.data, total), w.data
								}
								for i := range dst {
									dst[i] = 0xee
								}
								a := &kernels.AllToAllV{Routes: ro, Schedule: kernels.Schedule{Window: window, ChunkBytes: int64(call%3) * 128},
									Src: buffer(src, -1), Dst: buffer(dst, place), Launched: kernels.Launched{Timeout: time.Minute}}
								if err := w.ports[r].Launch(nil, a); err != nil {
									t.Errorf("rank %d call %d: %v", r, call, err)
									return
								}
								for p := range n {
									for i := range m[p][r] {
										if got, want := dst[ro.RecvOffsets[p]+i], element(call, p, r, i); got != want {
											t.Errorf("call %d: rank %d has %#x from rank %d at %d of %d, want %#x", call, r, got, p, i, m[p][r], want)
											return
										}
									}
								}
							})
						}
						wg.Wait()
						if t.Failed() {
							return
						}
					}
				})
			}
		}
	}
}
