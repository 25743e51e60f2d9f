package allreduce_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

func gpuOf(r *worldtest.Rank) *cuda.Device { return r.Device.(*device.CUDADevice).Context().Device() }

func TestReducersOptionsForMulticastAreChecked(t *testing.T) {
	refused := func(r *worldtest.Rank, o allreduce.Options, says string) {
		_, err := allreduce.New(r.Ctx, r.Heap, o)
		require.ErrorIs(r.T, err, allreduce.ErrInvalid)
		require.ErrorContains(r.T, err, says)
	}
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		refused(r, allreduce.Options{Multicast: "auto"}, "a heap without memory.Options.Multicast")
		refused(r, allreduce.Options{Multicast: "nvls"}, `is "nvls", want "auto"`)
	})
	if !emulated.Driver(t) {
		return
	}
	worldtest.GPUHeaps(t, 2, memory.Options{SegmentBytes: 16 << 20}, func(r *worldtest.Rank) {
		refused(r, allreduce.Options{Multicast: "warps"}, "a heap without memory.Options.Multicast")
	})
	worldtest.GPUHeaps(t, 2, memory.Options{SegmentBytes: 16 << 20, Multicast: memory.MulticastByFile}, func(r *worldtest.Rank) {
		refused(r, allreduce.Options{Multicast: "warps", Algorithm: "one-shot"}, "multicast takes two shots")
		refused(r, allreduce.Options{Multicast: "blocks", MaxSMs: 2}, "with 2 multiprocessors, want at least 3")
	})
}

// Where the environment forbids it nothing of multicast is made, loaded or launched, whatever options say.
func TestReducersHaveNoMulticastWhereItIsForbidden(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	t.Setenv("NCCL_NVLS_ENABLE", "0")
	worldtest.GPUHeaps(t, 2, memory.Options{SegmentBytes: 16 << 20, Multicast: memory.MulticastByFile}, func(r *worldtest.Rank) {
		x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Multicast: "warps", SlotBytes: 4096, MaxSMs: 8})
		r.Must(err)
		d, err := x.Explain(kernels.AllReduce, 1<<22, kernels.Float32)
		r.Must(err)
		require.Equal(r.T, kernels.NoMulticast, d.Multicast)
		require.Contains(r.T, d.String(), "its environment forbids it (NCCL_NVLS_ENABLE=0)")
		b, err := r.Heap.Alloc(1 << 20)
		r.Must(err)
		r.Must(x.AllReduce(nil, b.View(), b.View(), kernels.Float32, kernels.Sum))
		r.Barrier()
		require.Zero(r.T, emulated.Launches.Of(r.T, gpuOf(r)))
		require.Zero(r.T, emulated.Multicast.Of(r.T, gpuOf(r)))
		r.Must(x.Close(r.Ctx))
	})
}

// Reducers on the emulated driver, whose processor runs the kernels on the heap's own memory: every placement of the buffers, each type that
// multicast adds, and calls that it cannot do between them.
func TestMulticastReducesLikeTheHost(t *testing.T) {
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	adds := []kernels.DType{kernels.Float32, kernels.BFloat16, kernels.Float16, kernels.Int32, kernels.Int64, kernels.Float64}
	for i, by := range []memory.Multicast{memory.MulticastByFile, memory.MulticastByFabric} {
		for k, pipeline := range []string{"warps", "blocks", "auto"} {
			if testing.Short() && i != k || proctest.Race && k != 0 { // pipelines are of the kernels, of which the race detector sees nothing
				continue
			}
			ranks := 2 + (i+k)%2
			worldtest.GPUHeaps(t, ranks, memory.Options{SegmentBytes: 1 << 20, Multicast: by}, func(r *worldtest.Rank) {
				x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Multicast: pipeline, MaxSMs: 3, OneShotBytes: 4 << 10, SlotBytes: 4096, Slots: 2})
				r.Must(err)
				y := newYard(r, 1<<20) // in what the heap has grown by
				before, blocks := emulated.Launches.Of(r.T, gpuOf(r)), emulated.BlockLaunches.Of(r.T, gpuOf(r))
				r.Barrier()
				number := 0
				call := func(dt kernels.DType, op kernels.ReduceOp, count int64, p place) {
					j := job{coll: kernels.AllReduce, dt: dt, op: op, count: count, number: number}
					number++
					if err := j.check(y.perform(x, j, p), r.Rank(), ranks, 0); err != nil {
						r.Must(err)
					}
				}
				count := int64(20_000)
				if testing.Short() {
					count = 9_000 // also goes through slots that are used again
				}
				for n, dt := range adds {
					call(dt, kernels.Sum, count+int64(n)%3, place{inPlace: n%2 == 0, in: n % 2, out: n / 2 % 2})
				}
				for where := range 8 {
					mine := where
					if where >= 4 { // ranks have their buffers in other places
						mine = (where + r.Rank()) % 4
					}
					call(kernels.BFloat16, kernels.Sum, count, place{in: mine % 2, out: mine / 2, inAt: int64(where / 4 * 16 * r.Rank())})
				}
				call(kernels.Float32, kernels.Avg, count, place{inPlace: true})
				r.Barrier()
				launches := emulated.Launches.Of(r.T, gpuOf(r)) - before
				require.Equal(r.T, ranks*number, launches)
				blocks = emulated.BlockLaunches.Of(r.T, gpuOf(r)) - blocks
				require.Equal(r.T, pipeline == "blocks", blocks == launches)
				require.Equal(r.T, pipeline == "warps", blocks == 0)
				r.Barrier()
				call(kernels.Float32, kernels.Max, count, place{})
				call(kernels.BFloat16, kernels.Avg, count, place{})
				r.Barrier()
				require.Equal(r.T, launches, emulated.Launches.Of(r.T, gpuOf(r))-before, "an average of bfloat16 and a maximum go another way")
				d, err := x.Explain(kernels.AllReduce, 1<<20, kernels.BFloat16)
				r.Must(err)
				require.NotEqual(r.T, kernels.NoMulticast, d.Multicast)
				r.Must(x.Close(r.Ctx))
				y.close()
			})
		}
	}
	heap := memory.Options{SegmentBytes: 1 << 20, Multicast: memory.MulticastByFile}
	worldtest.GPUHeaps(t, 2, heap, func(r *worldtest.Rank) { multicastFaults(r, "warps", -1) })
	worldtest.GPUHeaps(t, 2, heap, func(r *worldtest.Rank) { multicastFaults(r, "blocks", -1) })
	worldtest.GPUHeaps(t, 2, heap, func(r *worldtest.Rank) { multicastFaults(r, "auto", 128<<10) }) // by packets
}

// Halves of all-reduces, and broadcasts, by multicast: every placement of the buffers, slices of one length and of others, of which some are
// no whole vectors, types that multicast cannot add but move, and calls that it cannot do between them.
func TestMulticastGathersAndScattersLikeTheHost(t *testing.T) {
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	for k, pipeline := range []string{"warps", "blocks", "auto"} {
		if proctest.Race && k != 0 { // pipelines are of the kernels, of which the race detector sees nothing
			continue
		}
		ranks := 2 + k%2
		worldtest.GPUHeaps(t, ranks, memory.Options{SegmentBytes: 1 << 20, Multicast: memory.MulticastByFile + memory.Multicast(k%2)}, func(r *worldtest.Rank) {
			x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Multicast: pipeline, MaxSMs: 3, OneShotBytes: 4 << 10, SlotBytes: 4096, Slots: 2})
			r.Must(err)
			y := newYard(r, 1<<20)
			before := emulated.Launches.Of(r.T, gpuOf(r))
			r.Barrier()
			number := 0
			call := func(coll kernels.Collective, dt kernels.DType, op kernels.ReduceOp, p place, counts ...int64) {
				j := job{coll: coll, dt: dt, op: op, number: number}
				number++
				for q := range ranks {
					j.counts = append(j.counts, counts[q%len(counts)])
					j.count += j.counts[q]
				}
				j.plain = len(counts) == 1
				at, _ := j.slice(r.Rank())
				r.Must(j.check(y.perform(x, j, p), r.Rank(), ranks, at))
			}
			most := int64(20_000) // also goes through slots that are used again
			if testing.Short() {
				most = 9000
			}
			for _, coll := range []kernels.Collective{kernels.AllGather, kernels.ReduceScatter} {
				for where := range 4 {
					call(coll, kernels.BFloat16, kernels.Sum, place{in: where % 2, out: where / 2}, most/8*8)
				}
				call(coll, kernels.Float32, kernels.Sum, place{inPlace: true}, most/2/8*8)
				call(coll, kernels.Int64, kernels.Sum, place{inPlace: true, in: 1, out: 1, inAt: 8, outAt: 8}, most/4)
				call(coll, kernels.Float16, kernels.Sum, place{}, most, 1201) // not whole vectors
				call(coll, kernels.Float64, kernels.Sum, place{}, 2048, 0)
				call(coll, kernels.Int32, kernels.Sum, place{inAt: int64(16 * r.Rank()), outAt: int64(16 * r.Rank())}, most/2/8*8)
			}
			call(kernels.AllGather, kernels.Float8E5M2, kernels.Sum, place{in: 1, inAt: 3}, most, most-16)
			call(kernels.ReduceScatter, kernels.Float32, kernels.Avg, place{out: 1, outAt: 4}, most/2/8*8)
			buf := y.out[0].Slice(0, most)
			y.write(buf, bytes.Repeat([]byte{byte(r.Rank())}, int(most)))
			r.Must(x.Broadcast(y.s, buf, 1))
			r.Must(y.s.Synchronize())
			require.Equal(r.T, bytes.Repeat([]byte{1}, int(most)), y.read(buf))
			r.Barrier()
			launches := emulated.Launches.Of(r.T, gpuOf(r)) - before
			require.Equal(r.T, ranks*(number+1), launches)
			r.Barrier()
			call(kernels.ReduceScatter, kernels.Float32, kernels.Max, place{}, most)
			call(kernels.ReduceScatter, kernels.BFloat16, kernels.Avg, place{}, most)
			call(kernels.ReduceScatter, kernels.Uint8, kernels.Sum, place{}, most)
			r.Barrier()
			require.Equal(r.T, launches, emulated.Launches.Of(r.T, gpuOf(r))-before, "maxima, averages of bfloat16 and sums of bytes go another way")
			r.Must(x.Fault())
			r.Must(x.Close(r.Ctx))
			y.close()
		})
	}
}

// Small calls by packets of multicast: all-reduces of every type and operator, all-gathers and broadcasts, of any length and alignment, on
// buffers anywhere. Reduce-scatters have other packets, and calls between them are too large for any.
func TestR1_PacketsByMulticastHaveEveryOperator(t *testing.T) {
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	for _, ranks := range []int{2, 3} {
		worldtest.GPUHeaps(t, ranks, memory.Options{SegmentBytes: 1 << 20, Multicast: memory.MulticastByFile}, func(r *worldtest.Rank) {
			x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Multicast: "auto", MaxSMs: 3, OneShotBytes: 6 << 10, SlotBytes: 4096, Slots: 2})
			r.Must(err)
			y := newYard(r, 64<<10)
			before := emulated.Launches.Of(r.T, gpuOf(r))
			r.Barrier()
			number := 0
			call := func(j job, p place) {
				j.number = number
				number++
				at, _ := j.slice(r.Rank())
				r.Must(j.check(y.perform(x, j, p), r.Rank(), ranks, at))
			}
			anywhere := func(n int) place {
				return place{inPlace: n%3 == 0, in: n % 2, out: n / 2 % 2, inAt: int64(n % 5 * r.Rank()), outAt: int64(n % 4)}
			}
			n := 0
			for _, dt := range dtypes {
				for _, op := range ops {
					if op.Reducible(dt) {
						call(job{coll: kernels.AllReduce, dt: dt, op: op, count: []int64{1, 7, 130, 511}[n%4]}, anywhere(n))
						n++
					}
				}
			}
			call(job{coll: kernels.AllReduce, dt: kernels.Float32, op: kernels.Sum, count: 1024}, place{}) // the most
			call(job{coll: kernels.AllReduce, dt: kernels.Float32, op: kernels.Sum}, place{})
			gather := func(dt kernels.DType, p place, counts ...int64) {
				j := job{coll: kernels.AllGather, dt: dt}
				for q := range ranks {
					j.counts = append(j.counts, counts[q%len(counts)])
					j.count += j.counts[q]
				}
				call(j, p)
			}
			for n, dt := range dtypes {
				gather(dt, anywhere(n), int64(n*37+1), int64(n))
			}
			gather(kernels.Uint8, place{}, 4096, 0)
			for root := range ranks {
				buf := y.out[root%2].Slice(int64(root), 999)
				y.write(buf, bytes.Repeat([]byte{byte(r.Rank())}, 999))
				r.Must(x.Broadcast(y.s, buf, root))
				require.Equal(r.T, bytes.Repeat([]byte{byte(root)}, 999), y.read(buf))
			}
			r.Barrier()
			launches := emulated.Launches.Of(r.T, gpuOf(r)) - before
			require.Equal(r.T, ranks*(number+ranks), launches)
			r.Barrier()
			call(job{coll: kernels.ReduceScatter, dt: kernels.BFloat16, op: kernels.Sum, plain: true, counts: []int64{100, 100, 100}[:ranks], count: int64(100 * ranks)}, place{})
			call(job{coll: kernels.AllReduce, dt: kernels.Float32, op: kernels.Max, count: 1025}, place{})
			call(job{coll: kernels.AllReduce, dt: kernels.Float32, op: kernels.Max, count: 1024}, place{}) // behind another way
			r.Barrier()
			require.Equal(r.T, launches+ranks, emulated.Launches.Of(r.T, gpuOf(r))-before)
			d, err := x.Explain(kernels.AllReduce, 100, kernels.BFloat16)
			r.Must(err)
			require.Equal(r.T, []any{kernels.MulticastPackets, true, "one-shot", "multicast"}, []any{d.Multicast, d.Packets, d.Algorithm, d.Way})
			r.Must(x.Fault())
			r.Must(x.Close(r.Ctx))
			y.close()
		})
	}
}

// multicastFaults makes ranks that call different things hear of it and go on (F3), and a rank that waits until its timeout name the other (F1).
func multicastFaults(r *worldtest.Rank, pipeline string, packets int64) {
	o := allreduce.Options{Multicast: pipeline, MaxSMs: 3, OneShotBytes: packets, SlotBytes: 4096, Slots: 2}
	x, err := allreduce.New(r.Ctx, r.Heap, o)
	r.Must(err)
	o.Timeout = 500 * time.Microsecond // of a clock that goes 50 ns in every turn of the threads
	impatient, err := allreduce.New(r.Ctx, r.Heap, o)
	r.Must(err)
	b, err := r.Heap.Alloc(64 << 10)
	r.Must(err)
	r.Barrier()
	for range 2 {
		var differ *kernels.CallMismatchError
		err = x.AllReduce(nil, b.View().Slice(0, 40_000+int64(4*r.Rank())), b.View().Slice(0, 40_000+int64(4*r.Rank())), kernels.Float32, kernels.Sum)
		require.ErrorAs(r.T, err, &differ)
		require.Equal(r.T, []int64{10_000 + int64(r.Rank()), 10_001 - int64(r.Rank())}, []int64{differ.Mine.Count, differ.Theirs.Count})
		r.Barrier()
		r.Must(x.AllReduce(nil, b.View(), b.View(), kernels.Float32, kernels.Sum))
		r.Barrier()
	}
	if r.Rank() == 0 {
		var missing *comm.PeerError
		err = impatient.AllReduce(nil, b.View(), b.View(), kernels.Float32, kernels.Sum)
		require.ErrorIs(r.T, err, comm.ErrTimeout)
		require.ErrorAs(r.T, err, &missing)
		require.Equal(r.T, 1, missing.Rank)
	}
	r.Barrier()
	r.Must(impatient.Close(r.Ctx))
	r.Must(x.Close(r.Ctx))
}

// Two reducers with multicast on one heap, each on a stream of its own, whose calls run at the same time. Ranks launch them in different
// orders.
func TestTwoReducersShareMulticast(t *testing.T) {
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	for _, pipelines := range [][2]string{{"warps", "warps"}, {"warps", "blocks"}} {
		worldtest.GPUHeaps(t, 2, memory.Options{SegmentBytes: 1 << 20, Multicast: memory.MulticastByFile}, func(r *worldtest.Rank) {
			var reducers [2]*allreduce.Reducer
			var yards [2]*yard
			for i, pipeline := range pipelines {
				var err error
				reducers[i], err = allreduce.New(r.Ctx, r.Heap, allreduce.Options{Multicast: pipeline, MaxSMs: 3, OneShotBytes: -1, SlotBytes: 4096, Slots: 2})
				r.Must(err)
				yards[i] = newYard(r, 64<<10)
			}
			before := emulated.Launches.Of(r.T, gpuOf(r))
			r.Barrier()
			const rounds = 4
			for round := range rounds {
				var jobs [2]job
				var dst [2]memory.View
				for i := range 2 {
					k := (i + r.Rank() + round) % 2 // the ranks' orders differ
					jobs[k] = job{coll: kernels.AllReduce, dt: kernels.Float32, op: kernels.Sum, count: 9000 + int64(k), number: 2*round + k}
					p := place{in: (round + k) % 2, out: round / 2 % 2}
					var src memory.View
					var first int64
					dst[k], src, first = yards[k].buffers(jobs[k], p)
					yards[k].load(jobs[k], dst[k], src, first)
					r.Must(jobs[k].call(reducers[k], yards[k].s, dst[k], src))
				}
				for k := range 2 {
					r.Must(yards[k].s.Synchronize())
					r.Must(jobs[k].check(yards[k].read(dst[k]), r.Rank(), 2, 0))
					r.Must(reducers[k].Fault())
				}
			}
			r.Barrier()
			require.Equal(r.T, 2*2*rounds, emulated.Launches.Of(r.T, gpuOf(r))-before)
			for k := range 2 {
				r.Must(reducers[k].Close(r.Ctx))
				yards[k].close()
			}
		})
	}
}

// Two reducers with multicast on one heap take turns on one stream, and nobody waits between their calls: a rank may be in a call of one
// while another rank is in the next call, of the other.
func TestTwoReducersTakeTurnsOnAStream(t *testing.T) {
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	worldtest.GPUHeaps(t, 2, memory.Options{SegmentBytes: 1 << 20, Multicast: memory.MulticastByFile}, func(r *worldtest.Rank) {
		var reducers [2]*allreduce.Reducer
		for i, pipeline := range []string{"warps", "blocks"} {
			var err error
			reducers[i], err = allreduce.New(r.Ctx, r.Heap, allreduce.Options{Multicast: pipeline, MaxSMs: 3, OneShotBytes: -1, SlotBytes: 4096, Slots: 2})
			r.Must(err)
		}
		turns := []int{0, 1, 1, 0, 1, 0}
		const room = 32 << 10 // of a call
		y := newYard(r, room*int64(len(turns)))
		before := emulated.Launches.Of(r.T, gpuOf(r))
		r.Barrier()
		for round := range 2 {
			jobs, outputs := make([]job, len(turns)), make([]memory.View, len(turns))
			sources := make([]memory.View, len(turns))
			for i, k := range turns {
				jobs[i] = job{coll: kernels.AllReduce, dt: kernels.Float32, op: kernels.Sum, count: 5000 + int64(i), number: len(turns)*round + i}
				at := room * int64(i)
				var first int64
				outputs[i], sources[i], first = y.buffers(jobs[i], place{in: (k + round) % 2, out: i / 2 % 2, inAt: at, outAt: at})
				y.load(jobs[i], outputs[i], sources[i], first)
			}
			for i, k := range turns {
				r.Must(jobs[i].call(reducers[k], y.s, outputs[i], sources[i]))
			}
			for i := range turns {
				r.Must(jobs[i].check(y.read(outputs[i]), r.Rank(), 2, 0))
			}
			for k := range reducers {
				r.Must(reducers[k].Fault())
			}
		}
		r.Barrier()
		require.Equal(r.T, 2*2*len(turns), emulated.Launches.Of(r.T, gpuOf(r))-before)
		for k := range reducers {
			r.Must(reducers[k].Close(r.Ctx))
		}
		y.close()
	})
}

// Each call of each rank's driver fails once while a reducer with multicast is made, calls and is closed: no rank waits for ever, and nothing
// is left when the heap is closed too.
func TestAFailureOfAnyDriverCallOfAReducerLeaksNothing(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	const ranks = 2
	devices, contexts := make([]*cuda.Device, ranks), make([]*cuda.Context, ranks)
	for r := range ranks {
		devices[r], contexts[r] = emulated.Device(t, r)
	}
	held := func() (all []int) {
		for _, c := range emulated.Leaks() {
			for _, d := range devices {
				all = append(all, c.Of(t, d))
			}
		}
		return all
	}
	worldtest.GPUHeaps(t, ranks, memory.Options{SegmentBytes: 8 << 20}, func(*worldtest.Rank) {}) // whose contexts stay
	before := held()
	for victim := range ranks {
		told := 0
		for n := 1; ; n++ {
			var made [ranks]error
			var failed bool
			worldtest.GPUHeaps(t, ranks, memory.Options{SegmentBytes: 4 << 20, Multicast: memory.MulticastByFile}, func(r *worldtest.Rank) {
				b, err := r.Heap.Alloc(4096)
				r.Must(err)
				r.Barrier()
				if r.Rank() == victim {
					emulated.Fail(r.T, contexts[victim], n)
				}
				r.Barrier()
				x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Multicast: "warps", MaxSMs: 3, SlotBytes: 4096, Slots: 2})
				if made[r.Rank()] = err; err == nil {
					_ = x.AllReduce(nil, b.View(), b.View(), kernels.Float32, kernels.Sum)
					_ = x.Close(r.Ctx)
				}
				r.Barrier()
				if r.Rank() == victim {
					failed = emulated.Fired.Of(r.T, devices[victim]) == 1
					emulated.Fail(r.T, contexts[victim], 0)
				}
				r.Barrier()
			})
			require.Equal(t, made[0] == nil, made[1] == nil, "call %d of rank %d: %v", n, victim, made)
			require.Equal(t, before, held(), "call %d of rank %d: %v", n, victim, made)
			if made[0] != nil {
				told++
			}
			if !failed {
				require.Greater(t, n, 20, "calls")
				break
			}
		}
		require.Greater(t, told, 10)
	}
}
