package alltoallv_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

// footprint is what this process holds: free memory of the GPU, descriptors, resident memory of the host.
func footprint(r *worldtest.Rank) (free int64, fds int, resident int64) {
	heapInUse() // collects garbage
	free, _, err := r.Device.(*device.CUDADevice).Context().MemInfo()
	r.Must(err)
	list, err := os.ReadDir("/proc/self/fd")
	r.Must(err)
	status, err := os.ReadFile("/proc/self/status")
	r.Must(err)
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			r.Must(err)
			resident = kib << 10
		}
	}
	return free, len(list), resident
}

func TestCUDA_X9_ChangingSplitsKeepMemoryFlat(t *testing.T) {
	calls := 60000
	if testing.Short() {
		calls = 3000
	}
	worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{MaxSMs: 2, PacketBytes: 2 << 10, Timeout: 20 * time.Second})
		r.Must(err)
		buf, err := r.Heap.Alloc(1 << 20)
		r.Must(err)
		src, dst := buf.View().Slice(0, 1<<19), buf.View().Slice(1<<19, 1<<19)
		s := gpuStream(r)
		sp := &alltoallv.Splits{Send: make([]int64, 2), Recv: make([]int64, 2)}
		me, other := r.Rank(), 1-r.Rank()
		var free, resident int64
		var fds int
		for call := range calls {
			if call%1000 == 0 {
				r.Must(s.Synchronize())
				r.Must(x.Fault())
				r.Barrier()
				if call == calls/10/1000*1000 {
					if me == 0 {
						free, fds, resident = footprint(r)
					}
					r.Barrier()
				}
			}
			sp.Send[me], sp.Recv[me] = int64(call%7), int64(call%7)
			sp.Send[other], sp.Recv[other] = int64((call*31+me)%5000), int64((call*31+other)%5000)
			r.Must(x.Exchange(s, dst, src, sp))
		}
		r.Must(s.Synchronize())
		r.Must(x.Fault())
		r.Barrier()
		if me == 0 {
			freeNow, fdsNow, residentNow := footprint(r)
			if freeNow < free || fdsNow > fds || residentNow > resident+16<<20 {
				r.Must(fmt.Errorf("after %d calls: %d bytes of the GPU less, %d descriptors and %d bytes of the host more", calls, free-freeNow, fdsNow-fds, residentNow-resident))
			}
			if st := x.CacheStats(); st.Entries > 256 || st.Misses < uint64(calls)/2 {
				r.Must(fmt.Errorf("the splits did not change as meant: %+v", st))
			}
		}
		r.Barrier()
		r.Must(s.Close())
		r.Must(x.Close(r.Ctx))
	})
}

// tileBytes is the period of long messages: a prime, so that no offset that a kernel could get wrong is a multiple of it.
const tileBytes = 67108859

// tile is what a long message from one rank to another repeats.
func tile(src, dst int) []byte {
	words := make([]uint64, tileBytes/8+1)
	rnd := rand.NewPCG(uint64(src), uint64(dst))
	for i := range words {
		words[i] = rnd.Uint64()
	}
	return shm.Bytes(words)[:tileBytes]
}

// fillTiles makes v repeat the tile.
func fillTiles(r *worldtest.Rank, s device.Stream, v memory.View, tile []byte) {
	n := min(v.Len(), tileBytes)
	write(r, s, v, tile[:n])
	for n < v.Len() {
		k := min(n, v.Len()-n)
		r.Must(memory.Copy(s, v.Slice(n, k), v.Slice(0, k)))
		n += k
	}
}

// checkTiles compares v with the repeated tile.
func checkTiles(r *worldtest.Rank, s device.Stream, v memory.View, tile []byte) error {
	got := make([]byte, tileBytes)
	for at := int64(0); at < v.Len(); at += tileBytes {
		n := min(tileBytes, v.Len()-at)
		r.Must(memory.Copy(s, memory.Host(got[:n]), v.Slice(at, n)))
		r.Must(s.Synchronize())
		if !bytes.Equal(got[:n], tile[:n]) {
			return fmt.Errorf("in bytes %d to %d: %w", at, at+n, differ(got[:n], tile[:n]))
		}
	}
	return nil
}

func TestCUDA_X5_MoreThan4GiBInOneExchange(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	const whole = 10 << 30 // both buffers of a rank
	d, err := device.CUDA(0)
	if errors.Is(err, device.ErrUnavailable) {
		t.Skipf("no GPU: %v", err)
	}
	require.NoError(t, err)
	free, _, err := d.Context().MemInfo()
	require.NoError(t, err)
	require.NoError(t, d.Close())
	if free < 3*whole {
		t.Skipf("needs %d bytes of GPU memory, %d are free", int64(3*whole), free)
	}
	worldtest.GPUs(t, 2, whole, func(r *worldtest.Rank) {
		// From rank 0 to rank 1 more than 4 GiB in one message; in both buffers of both ranks offsets beyond.
		m := [][]int64{{1<<28 + 3, 1<<32 + 17}, {1<<32 + 5, 1<<28 + 1}}
		me := r.Rank()
		sp := &alltoallv.Splits{Send: m[me], Recv: column(m, me)}
		src, err := r.Heap.Alloc(whole/2 - 1<<28)
		r.Must(err)
		dst, err := r.Heap.Alloc(whole/2 - 1<<28)
		r.Must(err)
		s := gpuStream(r)
		var at int64
		for p, n := range sp.Send {
			fillTiles(r, s, src.View().Slice(at, n), tile(me, p))
			at += n
		}
		for _, o := range []alltoallv.Options{{Algorithm: "direct"}, {Algorithm: "ring"}, {Algorithm: "pipelined"}, {Algorithm: "copy"}} {
			o.Timeout = 20 * time.Second
			x, err := alltoallv.New(r.Ctx, r.Heap, o)
			r.Must(err)
			if sp.PeerDispls = nil; o.Algorithm == "copy" {
				sp.PeerDispls = peerDispls(m, me)
			}
			r.Must(r.Device.(*device.CUDADevice).Context().Set(cuda.Stream(s.Handle()), dst.View().Ptr(), 0xa5, dst.Len()))
			r.Must(x.Exchange(s, dst.View().Slice(0, total(sp.Recv)), src.View(), sp))
			r.Must(s.Synchronize())
			r.Must(x.Fault())
			at = 0
			for p, n := range sp.Recv {
				if err := checkTiles(r, s, dst.View().Slice(at, n), tile(p, me)); err != nil {
					r.Must(fmt.Errorf("%s: from rank %d: %w", o.Algorithm, p, err))
				}
				at += n
			}
			r.Must(x.Close(r.Ctx))
		}
		r.Must(s.Close())
	})
}

func TestCUDA_HostAndCUDAGiveTheSameBytes(t *testing.T) {
	const limit, calls = 30000, 5
	for n := 1; n <= 8; n++ {
		t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) {
			// Every rank's whole output of every algorithm and call, staged and in place, from either engine.
			outputs := map[device.Kind]map[string][]byte{device.HostKind: {}, device.CUDAKind: {}}
			var mu sync.Mutex
			run := func(r *worldtest.Rank) {
				s, err := r.Device.NewStream()
				r.Must(err)
				size := int64(n) * (limit + 20)
				src, err := r.Heap.Alloc(size + 64)
				r.Must(err)
				sym, err := r.Heap.Alloc(size + 64)
				r.Must(err)
				foreign := memory.Host(make([]byte, size+64))
				if r.Device.Kind() == device.CUDAKind {
					var free func()
					foreign, free = gpuMemory(r, size+64)
					defer free()
				}
				for _, algorithm := range algorithms(n) {
					x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithm: algorithm, MaxSMs: 2, PacketBytes: 4 << 10, SlotBytes: 2048, Timeout: 20 * time.Second})
					r.Must(err)
					for call := range 2 * calls {
						all := gappy(rand.New(rand.NewPCG(41, uint64(100*n+call))), n, limit)
						sp := all[r.Rank()]
						dst := sym.View()
						if call%2 == 1 && algorithm != "copy" {
							dst = foreign
						}
						for k := 0; k < n && algorithm == "copy"; k++ {
							sp.PeerDispls = append(sp.PeerDispls, all[k].RecvDispls[r.Rank()])
						}
						// Source and destination begin at odd addresses, differently.
						in, from, to := make([]byte, size), src.View().Slice(int64(call%7), size), dst.Slice(int64(call*3%11), size)
						fillSource(in, sp, call, r.Rank())
						r.Must(memory.Copy(s, from, memory.Host(in)))
						r.Must(memory.Copy(s, to, memory.Host(bytes.Repeat([]byte{0xa5}, int(size)))))
						r.Must(s.Synchronize())
						r.Must(x.Exchange(s, to, from, sp))
						r.Must(s.Synchronize())
						r.Must(x.Fault())
						out := read(r, s, to)
						mu.Lock()
						outputs[r.Device.Kind()][fmt.Sprintf("%s, call %d, rank %d", algorithm, call, r.Rank())] = out
						mu.Unlock()
					}
					r.Must(x.Close(r.Ctx))
				}
				r.Must(s.Close())
			}
			worldtest.GPUs(t, n, 256<<20, run) // skips where there is no GPU
			worldtest.Local(t, n, 128<<20, run)
			for _, of := range outputs {
				require.Equal(t, len(algorithms(n))*2*calls*n, len(of))
			}
			for what, want := range outputs[device.HostKind] {
				require.NoError(t, differ(outputs[device.CUDAKind][what], want), what)
			}
		})
	}
}
