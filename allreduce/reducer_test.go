package allreduce_test

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc64"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/test/reference"
)

func init() { worldtest.Unseen() }

const (
	f32     = kernels.Float32
	segment = 64 << 20 // of a rank; pages that nobody touches take no memory
)

// newReducer makes a reducer that the test closes.
func newReducer(r *worldtest.Rank, o allreduce.Options) *allreduce.Reducer {
	x, err := allreduce.New(r.Ctx, r.Heap, o)
	r.Must(err)
	return x
}

func hostBuf(n int64) memory.View { return memory.Host(make([]byte, n)) }

// random runs jobs, each twice so that the second is warm, inline and on a stream.
func random(r *worldtest.Rank, o allreduce.Options, seed uint64, jobs int, limit int64) {
	x := newReducer(r, o)
	a := newArena(r, limit, seed)
	s, err := r.Heap.Device().NewStream()
	r.Must(err)
	rnd := rand.New(rand.NewPCG(seed, 99))
	for number := range jobs {
		j := draw(rnd, r.Size(), limit, number)
		r.Must(j.run(r, x, nil, a))
		r.Must(j.run(r, x, s, a))
	}
	r.Must(s.Close())
	r.Must(x.Close(r.Ctx))
	r.Must(x.Close(r.Ctx))
	a.free(r)
}

func TestR2_RandomWorldsAgainstReference(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	jobs := 30
	if proctest.Race {
		jobs = 12
	}
	for n := 1; n <= 9; n++ {
		for _, algorithm := range algorithms {
			t.Run(fmt.Sprintf("ranks=%d/%s", n, algorithm), func(t *testing.T) {
				worldtest.Local(t, n, segment, func(r *worldtest.Rank) {
					o := allreduce.Options{Algorithm: algorithm, OneShotBytes: 20 << 10, SlotBytes: 512, Slots: 2}
					if algorithm == "" {
						o.OneShotBytes, o.Slots = 2000, 3
					}
					random(r, o, seed, jobs, 20<<10)
				})
			})
		}
	}
}

func TestR2_LargeCalls(t *testing.T) {
	for _, algorithm := range []string{"", "ring"} {
		t.Run(algorithm, func(t *testing.T) {
			worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
				random(r, allreduce.Options{Algorithm: algorithm}, 3, 5, 1<<20)
			})
		})
	}
}

func TestR2_AcrossProcesses(t *testing.T) {
	for _, n := range []int{2, 3, 5} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			worldtest.Procs(t, n, segment, func(r *worldtest.Rank) {
				for i, algorithm := range algorithms {
					random(r, allreduce.Options{Algorithm: algorithm, OneShotBytes: 100 << 10, SlotBytes: 16 << 10}, uint64(i), 12, 100<<10)
				}
			})
		})
	}
}

// Full-precision values, where every order of additions gives other bits.
func TestR2_SameBitsOnEveryRankAndEveryTime(t *testing.T) {
	for _, n := range []int{2, 3, 4, 7} {
		for _, algorithm := range algorithms[1:] {
			for _, dt := range []kernels.DType{kernels.Float16, kernels.BFloat16, kernels.Float32, kernels.Float64, kernels.Float8E4M3, kernels.Float8E5M2} {
				t.Run(fmt.Sprintf("ranks=%d/%s/%v", n, algorithm, dt), func(t *testing.T) {
					worldtest.Local(t, n, segment, func(r *worldtest.Rank) {
						x := newReducer(r, allreduce.Options{Algorithm: algorithm, OneShotBytes: 64 << 10, SlotBytes: 1024, Slots: 2})
						const count = 3001
						rnd := rand.New(rand.NewPCG(uint64(n), uint64(r.Rank())))
						mine := make([]byte, count*dt.Size())
						for i := range int64(count) {
							reference.Put(mine, dt, i, rnd.NormFloat64())
						}
						a := newArena(r, int64(len(mine)), uint64(n))
						for _, op := range []kernels.ReduceOp{kernels.Sum, kernels.Avg, kernels.Prod, kernels.Max} {
							var first []byte
							for range 6 {
								src := a.pick(false, int64(len(mine)))
								dst := src
								if a.rnd.IntN(2) == 0 {
									dst = a.pick(true, int64(len(mine)))
								}
								copy(src.Bytes(), mine)
								r.Must(x.AllReduce(nil, dst, src, dt, op))
								if first == nil {
									first = bytes.Clone(dst.Bytes())
								}
								if !bytes.Equal(first, dst.Bytes()) {
									r.Must(fmt.Errorf("%v: other bits than before", op))
								}
							}
							sum := crc64.Checksum(first, crc64.MakeTable(crc64.ECMA))
							all, err := r.Group.AllGather(r.Ctx, []byte(strconv.FormatUint(sum, 16)))
							r.Must(err)
							for p := range all {
								if !bytes.Equal(all[p], all[0]) {
									r.Must(fmt.Errorf("%v: rank %d has other bits than rank 0", op, p))
								}
							}
						}
						r.Must(x.Close(r.Ctx))
						a.free(r)
					})
				})
			}
		}
	}
}

// 256 + 1 is 256 in bfloat16, and 16 + 1 is 16 in float8 e4m3: a sum that is rounded on the way loses all the ones.
func TestR2_NarrowFloatsAccumulateInFloat32(t *testing.T) {
	for _, algorithm := range algorithms[1:] {
		for dt, big := range map[kernels.DType]float64{kernels.BFloat16: 256, kernels.Float16: 2048, kernels.Float8E4M3: 16, kernels.Float8E5M2: 8} {
			t.Run(fmt.Sprintf("%s/%v", algorithm, dt), func(t *testing.T) {
				const n, count = 9, 500
				worldtest.Local(t, n, segment, func(r *worldtest.Rank) {
					x := newReducer(r, allreduce.Options{Algorithm: algorithm})
					buf := hostBuf(count * dt.Size())
					var want [8]byte
					reference.Put(want[:], dt, 0, big+n-1)
					for i := range int64(count) {
						v := 1.0
						if i%n == int64(r.Rank()) {
							v = big
						}
						reference.Put(buf.Bytes(), dt, i, v)
					}
					r.Must(x.AllReduce(nil, buf, buf, dt, kernels.Sum))
					for i := range int64(count) {
						if got := buf.Bytes()[i*dt.Size():][:dt.Size()]; !bytes.Equal(got, want[:dt.Size()]) {
							r.Must(fmt.Errorf("%v at %d, want %v", reference.Get(buf.Bytes(), dt, i), i, reference.Get(want[:], dt, 0)))
						}
					}
					r.Must(x.Close(r.Ctx))
				})
			})
		}
	}
}

func TestR1_OperatorsAreHonouredOrRefused(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{})
		b := hostBuf(64)
		for _, dt := range dtypes {
			for _, op := range ops {
				src := bytes.Clone(b.Bytes())
				err := x.AllReduce(nil, b, b, dt, op)
				if op == kernels.Avg && (dt == kernels.Uint8 || dt == kernels.Int32 || dt == kernels.Int64) {
					require.ErrorIs(r.T, err, allreduce.ErrUnsupported)
					require.ErrorContains(r.T, err, "avg")
					require.ErrorContains(r.T, err, dt.String())
					require.Equal(r.T, src, b.Bytes(), "nothing was written")
					require.ErrorIs(r.T, x.ReduceScatter(nil, b.Slice(0, 32), b, dt, op), allreduce.ErrUnsupported)
					continue
				}
				r.Must(err)
			}
		}
		require.ErrorIs(r.T, x.AllReduce(nil, b, b, f32, kernels.ReduceOp(77)), allreduce.ErrInvalid)
		require.ErrorIs(r.T, x.AllReduce(nil, b, b, kernels.DType(77), kernels.Sum), allreduce.ErrInvalid)
		r.Must(x.Close(r.Ctx))
	})
}

func TestX1_NothingSignalsAndWaitsOnce(t *testing.T) {
	for _, algorithm := range algorithms {
		worldtest.Local(t, 4, segment, func(r *worldtest.Rank) {
			x := newReducer(r, allreduce.Options{Algorithm: algorithm})
			var arrived atomic.Int32
			all, err := r.Group.Share(r.Ctx, &arrived)
			r.Must(err)
			counter := all[0].(*atomic.Int32)
			calls := 0
			for range 50 {
				for _, call := range []func() error{
					func() error { return x.AllReduce(nil, memory.View{}, memory.View{}, f32, kernels.Sum) },
					func() error { return x.ReduceScatter(nil, memory.View{}, memory.View{}, f32, kernels.Sum) },
					func() error { return x.AllGather(nil, memory.View{}, memory.View{}, f32) },
					func() error { return x.Broadcast(nil, memory.View{}, calls%4) },
				} {
					calls++
					counter.Add(1)
					r.Must(call())
					// Nobody leaves a call before all have come to it.
					if got := int(counter.Load()); got < calls*r.Size() {
						r.Must(fmt.Errorf("left call %d after %d arrivals", calls, got))
					}
				}
			}
			r.Must(x.Close(r.Ctx))
		})
	}
}

func TestX3_SlowRank(t *testing.T) {
	for _, algorithm := range algorithms {
		t.Run(algorithm, func(t *testing.T) {
			worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
				x := newReducer(r, allreduce.Options{Algorithm: algorithm, OneShotBytes: 8 << 10, SlotBytes: 256, Slots: 2})
				a := newArena(r, 8<<10, 3)
				rnd := rand.New(rand.NewPCG(5, 5))
				for number := range 60 {
					j := draw(rnd, 3, 8<<10, number)
					if r.Rank() == number%3 {
						time.Sleep(time.Duration(a.rnd.IntN(2000)) * time.Microsecond) // the others run ahead as far as they may
					}
					r.Must(j.run(r, x, nil, a))
				}
				r.Must(x.Close(r.Ctx))
				a.free(r)
			})
		})
	}
}

// Calls queue up on streams, and the streams of the ranks run at different times.
func TestX3_QueuedCalls(t *testing.T) {
	worldtest.Local(t, 4, segment, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{OneShotBytes: 4 << 10, SlotBytes: 1 << 10})
		s, err := device.Host().NewStream()
		r.Must(err)
		const depth = 40
		rnd := rand.New(rand.NewPCG(8, 8))
		for round := range 4 {
			var bufs [depth]memory.View
			var sizes [depth]int64
			for k := range bufs {
				sizes[k] = rnd.Int64N(4000)
				if bufs[k] = hostBuf(sizes[k] * 4); k%2 == 0 {
					b, err := r.Heap.Alloc(sizes[k] * 4)
					r.Must(err)
					defer b.Free()
					bufs[k] = b.View()
				}
				for i := range sizes[k] {
					reference.Put(bufs[k].Bytes(), f32, i, value(k+100*round, r.Rank(), i, f32, kernels.Sum))
				}
				if (k+r.Rank())%7 == 0 {
					time.Sleep(time.Millisecond)
				}
				r.Must(x.AllReduce(s, bufs[k], bufs[k], f32, kernels.Sum))
			}
			r.Must(s.Synchronize())
			for k, b := range bufs {
				for i := range sizes[k] {
					if got, want := reference.Get(b.Bytes(), f32, i), expect(k+100*round, 4, i, f32, kernels.Sum); got != want {
						r.Must(fmt.Errorf("call %d element %d of %d: %v, want %v", k, i, sizes[k], got, want))
					}
				}
			}
		}
		r.Must(s.Close())
		r.Must(x.Close(r.Ctx))
	})
}

func TestX8_RingFinishesForEveryWorld(t *testing.T) {
	for n := 2; n <= 64; n++ {
		if (testing.Short() || proctest.Race) && n > 9 && n != 64 {
			continue
		}
		worldtest.Local(t, n, segment, func(r *worldtest.Rank) {
			x := newReducer(r, allreduce.Options{Algorithm: "ring", SlotBytes: 128, Slots: 2, OneShotBytes: -1})
			a := newArena(r, 16<<10, 9)
			for number, j := range []job{
				{coll: kernels.AllReduce, dt: f32, count: int64(33*n + 5)},
				{coll: kernels.AllReduce, dt: kernels.BFloat16, op: kernels.Avg, count: 1},
			} {
				j.number = number
				r.Must(j.run(r, x, nil, a))
			}
			r.Must(x.Close(r.Ctx))
			a.free(r)
		})
	}
}

// Persistent symmetric buffers, handed out in the same order on every rank while everything else differs: the case that
// gave wrong sums in PyTorch issue 178138. Values are unique to rank and slot.
func TestM1_PersistentBuffersGiveRightSums(t *testing.T) {
	const slots, count, n = 8, 256 << 10, 4
	rounds := 20
	if proctest.Race {
		rounds = 4
	}
	worldtest.Local(t, n, segment, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{})
		var streams [2]device.Stream
		for i := range streams {
			var err error
			streams[i], err = device.Host().NewStream()
			r.Must(err)
		}
		rnd := rand.New(rand.NewPCG(1, uint64(r.Rank())))
		for round := range rounds {
			var bufs [slots]*memory.Buffer
			var garbage [][]byte
			for k := range bufs {
				garbage = append(garbage, make([]byte, rnd.IntN(1<<16))) // moves Go's allocations apart
				var err error
				bufs[k], err = r.Heap.AllocOn(streams[k%2], count*4)
				r.Must(err)
			}
			if rnd.IntN(4) == 0 {
				time.Sleep(time.Duration(rnd.IntN(1000)) * time.Microsecond)
			}
			// The buffers may still be waited for by their streams.
			r.Must(errors.Join(streams[0].Synchronize(), streams[1].Synchronize()))
			for k, b := range bufs {
				v := float64((round+1)*1000 + r.Rank()*slots + k)
				for i := range int64(count) {
					reference.Put(b.Bytes(), f32, i, v+float64(i%16))
				}
			}
			for k, b := range bufs {
				r.Must(x.AllReduce(streams[k%2], b.View(), b.View(), f32, kernels.Sum))
			}
			r.Must(errors.Join(streams[0].Synchronize(), streams[1].Synchronize()))
			for k, b := range bufs {
				want := 0.0
				for p := range n {
					want += float64((round+1)*1000 + p*slots + k)
				}
				for i := range int64(count) {
					if got := reference.Get(b.Bytes(), f32, i); got != want+float64(n*(i%16)) {
						r.Must(fmt.Errorf("round %d slot %d element %d: %v, want %v", round, k, i, got, want+float64(n*(i%16))))
					}
				}
			}
			for k := range bufs {
				r.Must(bufs[k].FreeOn(streams[k%2]))
			}
			_ = garbage
		}
		r.Must(r.Heap.Verify(r.Ctx))
		r.Must(errors.Join(streams[0].Close(), streams[1].Close()))
		r.Must(x.Close(r.Ctx))
	})
}

func TestTwoReducersOnOneHeapFromTwoStreams(t *testing.T) {
	worldtest.Local(t, 4, segment, func(r *worldtest.Rank) {
		var xs [2]*allreduce.Reducer
		var streams [2]device.Stream
		var arenas [2]*arena
		for i := range xs {
			var err error
			xs[i] = newReducer(r, allreduce.Options{SlotBytes: 4096})
			streams[i], err = device.Host().NewStream()
			r.Must(err)
			arenas[i] = newArena(r, 64<<10, uint64(i))
		}
		done := make(chan error, 2)
		for i := range xs {
			go func() {
				rnd := rand.New(rand.NewPCG(uint64(i), 1))
				var err error
				for number := 0; number < 30 && err == nil; number++ {
					err = draw(rnd, 4, 64<<10, number+1000*i).run(r, xs[i], streams[i], arenas[i])
				}
				done <- err
			}()
		}
		r.Must(errors.Join(<-done, <-done))
		for i := range xs {
			r.Must(streams[i].Close())
			r.Must(xs[i].Close(r.Ctx))
			arenas[i].free(r)
		}
	})
}

func TestStreamsOrderOneReducer(t *testing.T) {
	worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{OneShotBytes: 1000})
		var streams [3]device.Stream // the third is nil: inline
		for i := range 2 {
			var err error
			streams[i], err = device.Host().NewStream()
			r.Must(err)
		}
		// A chain: each call reduces what the one before left, on changing streams.
		b, err := r.Heap.Alloc(2000)
		r.Must(err)
		for i := range int64(500) {
			reference.Put(b.Bytes(), f32, i, 1)
		}
		for i := range 12 {
			v := b.View()
			if i%3 == 0 {
				v = v.Slice(0, 800) // another algorithm
				rest := b.View().Slice(800, 1200)
				r.Must(x.AllReduce(streams[(i*2+i/5)%3], rest, rest, f32, kernels.Sum))
			}
			r.Must(x.AllReduce(streams[(i+i/4)%3], v, v, f32, kernels.Sum))
		}
		r.Must(x.AllReduce(nil, b.View(), b.View(), f32, kernels.Max))
		for i := range int64(500) {
			if got, want := reference.Get(b.Bytes(), f32, i), math.Pow(3, 12); got != want {
				r.Must(fmt.Errorf("element %d is %v, want %v", i, got, want))
			}
		}
		r.Must(errors.Join(streams[0].Close(), streams[1].Close()))
		r.Must(x.Close(r.Ctx))
		r.Must(b.Free())
	})
}

func TestF1_DeadlineNamesThePeer(t *testing.T) {
	for _, algorithm := range algorithms[1:] {
		var waited sync.WaitGroup
		waited.Add(2)
		worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
			x := newReducer(r, allreduce.Options{Algorithm: algorithm, Timeout: proctest.Scaled(500 * time.Millisecond)})
			r.Barrier()
			if r.Rank() == 1 {
				waited.Wait() // does not call
				return
			}
			defer waited.Done()
			b := hostBuf(1000)
			err := x.AllReduce(nil, b, b, f32, kernels.Sum)
			var pe *comm.PeerError
			if !errors.Is(err, comm.ErrTimeout) || !errors.As(err, &pe) || pe.Rank != 1 || pe.Epoch != 1 || pe.Op != "all-reduce" {
				r.Must(fmt.Errorf("got %v", err))
			}
			if err := x.AllReduce(nil, b, b, f32, kernels.Sum); !errors.Is(err, comm.ErrTimeout) {
				r.Must(fmt.Errorf("a broken reducer went on: %v", err))
			}
		})
	}
}

// Of the calls queued on a stream only the first waits for the deadline.
func TestF1_QueuedCallsFailAtOnce(t *testing.T) {
	worldtest.QueuedCallsFailAtOnce(t, segment, func(r *worldtest.Rank, timeout time.Duration) func(device.Stream) error {
		x, b := newReducer(r, allreduce.Options{Timeout: timeout}), hostBuf(1000)
		return func(s device.Stream) error { return x.AllReduce(s, b, b, f32, kernels.Sum) }
	})
}

func TestF2_AbortEndsWaits(t *testing.T) {
	for _, algorithm := range algorithms[1:] {
		var others sync.WaitGroup // that are past the barrier, which would end with the abort
		others.Add(2)
		worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
			x := newReducer(r, allreduce.Options{Algorithm: algorithm, Timeout: time.Minute})
			r.Barrier()
			if r.Rank() == 2 {
				others.Wait()
				time.Sleep(30 * time.Millisecond)
				r.Group.Abort(errors.New("pulled the plug"))
				return
			}
			others.Done()
			b := hostBuf(1000)
			start := time.Now()
			err := x.AllReduce(nil, b, b, f32, kernels.Sum)
			var pe *comm.PeerError
			if !errors.As(err, &pe) || pe.Rank != 2 || !errors.Is(err, comm.ErrAborted) || time.Since(start) > time.Minute {
				t.Errorf("rank %d: got %v after %v", r.Rank(), err, time.Since(start))
			}
			if err := x.AllReduce(nil, b, b, f32, kernels.Sum); !errors.Is(err, comm.ErrAborted) {
				t.Errorf("rank %d: an aborted reducer went on: %v", r.Rank(), err)
			}
			if err := x.Close(r.Ctx); err != nil {
				t.Errorf("rank %d: close: %v", r.Rank(), err)
			}
		})
	}
}

func TestF2_DeadProcessIsNamed(t *testing.T) {
	worldtest.Procs(t, 3, segment, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{Timeout: time.Minute})
		b := hostBuf(1 << 20)
		err := x.AllReduce(nil, b, b, f32, kernels.Sum)
		if r.Rank() == 1 {
			os.Exit(0) // the others may still be in that call
		}
		start := time.Now()
		for err == nil && time.Since(start) < 30*time.Second {
			err = x.AllReduce(nil, b, b, f32, kernels.Sum)
		}
		var pe *comm.PeerError
		if !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, comm.ErrPeerLost) || time.Since(start) > 30*time.Second {
			r.T.Errorf("rank %d: got %v after %v", r.Rank(), err, time.Since(start))
		}
	})
}

func TestF3_BadArgumentsAreRefusedWithTheirValues(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{})
		freed, err := r.Heap.Alloc(100)
		r.Must(err)
		stale := freed.View()
		r.Must(freed.Free())
		b, c := hostBuf(100), hostBuf(100)
		i64, i16, u32, i8 := memory.Wrap(make([]int64, 10)), memory.Wrap(make([]int16, 10)), memory.Wrap(make([]uint32, 10)), memory.Wrap(make([]int8, 8))
		sum := kernels.Sum
		for i, bad := range []struct {
			err  error
			is   error
			says []string
		}{
			{x.AllReduce(nil, b, c.Slice(0, 96), f32, sum), allreduce.ErrInvalid, []string{"96", "100"}},
			{x.AllReduce(nil, b.Slice(0, 99), c.Slice(0, 99), f32, sum), allreduce.ErrInvalid, []string{"99", "4", "float32"}},
			{x.AllReduce(nil, b.Slice(0, 80), b.Slice(4, 80), f32, sum), allreduce.ErrInvalid, []string{"overlap"}},
			{x.AllReduce(nil, stale, c, f32, sum), memory.ErrFreed, []string{"destination", "freed"}},
			{x.AllReduce(nil, b, stale, f32, sum), memory.ErrFreed, []string{"source", "freed"}},
			{x.AllReduce(nil, memory.Device(4096, 100), b, f32, sum), allreduce.ErrInvalid, []string{"0x1000", "memory of host"}},
			{x.ReduceScatter(nil, b.Slice(0, 52), c, f32, sum), allreduce.ErrInvalid, []string{"source", "100", "2 times the 52"}},
			{x.ReduceScatter(nil, b.Slice(0, 50), c, f32, sum), allreduce.ErrInvalid, []string{"50", "whole float32"}},
			{x.ReduceScatter(nil, b.Slice(int64(52-52*r.Rank()), 48), b.Slice(0, 96), f32, sum), allreduce.ErrInvalid, []string{"overlap"}},
			{x.AllGather(nil, b, c.Slice(0, 52), f32), allreduce.ErrInvalid, []string{"destination", "100", "2 times the 52"}},
			{x.AllGather(nil, b.Slice(0, 96), b.Slice(1, 48), f32), allreduce.ErrInvalid, []string{"overlap"}},
			{x.ReduceScatterV(nil, b, c, []int64{1, 2, 3}, f32, sum), allreduce.ErrInvalid, []string{"3 counts for 2 ranks"}},
			{x.ReduceScatterV(nil, b, c, nil, f32, sum), allreduce.ErrInvalid, []string{"0 counts for 2 ranks"}},
			{x.ReduceScatterV(nil, b, c, []int64{-1, 26}, f32, sum), allreduce.ErrInvalid, []string{"-1", "rank 0"}},
			{x.ReduceScatterV(nil, b, c, []int64{1, math.MaxInt64 / 4}, f32, sum), allreduce.ErrInvalid, []string{"overflows"}},
			{x.AllGatherV(nil, b, c.Slice(0, 4), []int64{3, 4}, f32), allreduce.ErrInvalid, []string{"100", "28"}},
			{x.AllReduce(nil, b.Slice(0, 80), i64, f32, sum), allreduce.ErrInvalid, []string{"the source has elements of int64, the all-reduce is of float32"}},
			{x.AllReduce(nil, i64, b.Slice(0, 80), f32, sum), allreduce.ErrInvalid, []string{"the destination has elements of int64"}},
			{x.AllReduce(nil, i64, i64, kernels.Uint8, sum), allreduce.ErrInvalid, []string{"elements of int64", "uint8"}},
			{x.ReduceScatter(nil, b.Slice(0, 40), i64, f32, sum), allreduce.ErrInvalid, []string{"elements of int64"}},
			{x.AllGather(nil, b.Slice(0, 80), i64.Slice(0, 40), f32), allreduce.ErrInvalid, []string{"elements of int64"}},
			{x.AllReduce(nil, i16, i16, kernels.Int32, sum), allreduce.ErrInvalid, []string{"elements of int16"}},
			{x.AllGather(nil, i64, b.Slice(0, 40), f32), allreduce.ErrInvalid, []string{"the destination has elements of int64, the all-gather is of float32"}},
			{x.AllGather(nil, i64, memory.Wrap(make([]int32, 10)), kernels.Uint8), allreduce.ErrInvalid, []string{"the source has elements of int32, the destination of int64"}},
			{x.AllReduce(nil, u32, u32, kernels.Int32, kernels.Max), allreduce.ErrInvalid, []string{"elements of uint32", "int32"}},
			{x.AllReduce(nil, memory.As[uint64](i64), i64, kernels.Int64, kernels.Min), allreduce.ErrInvalid, []string{"elements of uint64", "int64"}},
			{x.ReduceScatter(nil, i8.Slice(0, 4), i8, kernels.Uint8, kernels.Min), allreduce.ErrInvalid, []string{"elements of int8", "uint8"}},
		} {
			if !errors.Is(bad.err, bad.is) {
				r.Must(fmt.Errorf("case %d: got %v, want %v", i, bad.err, bad.is))
			}
			for _, s := range bad.says {
				require.ErrorContains(r.T, bad.err, s, "case %d", i)
			}
		}
		var none *device.HostStream
		_, nilHeap := allreduce.New(r.Ctx, nil, allreduce.Options{})
		_, unknown := x.Explain(99, 1, f32)
		for says, err := range map[string]error{
			"the stream is a nil *device.HostStream":   x.AllReduce(none, b, c, f32, sum),
			"the heap is nil":                          nilHeap,
			"explain: no collective is Collective(99)": unknown,
		} {
			require.ErrorIs(r.T, err, allreduce.ErrInvalid)
			require.ErrorContains(r.T, err, says)
		}
		// Nothing of this has happened: the next call works.
		for _, dt := range []kernels.DType{kernels.BFloat16, kernels.Float16} {
			r.Must(x.AllReduce(nil, i16, i16, dt, sum))
		}
		gathered := memory.Wrap(make([]int64, 20))
		r.Must(x.AllGather(nil, gathered, i64, kernels.Int64))
		r.Must(x.AllGather(nil, gathered, i64, kernels.Uint8))
		a := newArena(r, 1000, 1)
		r.Must(job{coll: kernels.AllReduce, dt: f32, count: 100}.run(r, x, nil, a))
		r.Must(x.Close(r.Ctx))
		require.ErrorIs(r.T, x.AllReduce(nil, b, c, f32, sum), allreduce.ErrClosed)
		_, err = x.Explain(kernels.AllReduce, 1, f32)
		require.ErrorIs(r.T, err, allreduce.ErrClosed)
		a.free(r)
	})
}

// Ranks that make different calls all learn both of them, whatever algorithms they chose, and go on.
func TestF3_DifferentCallsAreNamedOnEveryRank(t *testing.T) {
	type call func(x *allreduce.Reducer, b, c memory.View) error
	sum := func(n int64, dt kernels.DType, op kernels.ReduceOp) call {
		return func(x *allreduce.Reducer, b, c memory.View) error {
			return x.AllReduce(nil, b.Slice(0, n), c.Slice(0, n), dt, op)
		}
	}
	for _, algorithm := range algorithms {
		for name, v := range map[string]struct {
			most, odd call
			says      []string
		}{
			"length":                    {sum(400, f32, kernels.Sum), sum(404, f32, kernels.Sum), []string{"100 float32", "101 float32"}},
			"lengths of two algorithms": {sum(400, f32, kernels.Sum), sum(200<<10, f32, kernels.Sum), []string{"100 float32", "51200 float32"}},
			"type":                      {sum(400, f32, kernels.Sum), sum(400, kernels.Int32, kernels.Sum), []string{"100 float32", "100 int32"}},
			"op":                        {sum(400, f32, kernels.Sum), sum(400, f32, kernels.Max), []string{"(sum)", "(max)"}},
			"collective": {sum(1200, f32, kernels.Sum), func(x *allreduce.Reducer, b, c memory.View) error {
				return x.AllGather(nil, b.Slice(0, 1200), c.Slice(0, 400), f32)
			}, []string{"all-reduce", "all-gather"}},
			"counts": {func(x *allreduce.Reducer, b, c memory.View) error {
				return x.AllGatherV(nil, b.Slice(0, 12), c.Slice(0, 4), []int64{1, 1, 1}, f32)
			}, func(x *allreduce.Reducer, b, c memory.View) error {
				return x.AllGatherV(nil, b.Slice(0, 12), c.Slice(0, 4), []int64{0, 1, 2}, f32)
			}, []string{"digest"}},
			"root": {func(x *allreduce.Reducer, b, _ memory.View) error { return x.Broadcast(nil, b.Slice(0, 100), 0) },
				func(x *allreduce.Reducer, b, _ memory.View) error { return x.Broadcast(nil, b.Slice(0, 100), 2) },
				[]string{"broadcast of 100 bytes from rank 0", "broadcast of 100 bytes from rank 2"}},
			"elements": {func(x *allreduce.Reducer, b, _ memory.View) error {
				return x.Broadcast(nil, memory.As[float32](b.Slice(0, 100)), 0)
			}, func(x *allreduce.Reducer, b, _ memory.View) error {
				return x.Broadcast(nil, memory.As[int32](b.Slice(0, 100)), 0)
			}, []string{"broadcast of 100 bytes (float32) from rank 0", "broadcast of 100 bytes (int32) from rank 0"}},
			"elements of bytes": {func(x *allreduce.Reducer, b, c memory.View) error {
				return x.AllGather(nil, memory.As[float32](b.Slice(0, 12)), c.Slice(0, 4), kernels.Uint8)
			}, func(x *allreduce.Reducer, b, c memory.View) error {
				return x.AllGather(nil, b.Slice(0, 12), memory.As[int32](c.Slice(0, 4)), kernels.Uint8)
			}, []string{"12 bytes (float32)", "12 bytes (int32)"}},
		} {
			t.Run(name+"/"+algorithm, func(t *testing.T) {
				worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
					x := newReducer(r, allreduce.Options{Algorithm: algorithm, OneShotBytes: 256 << 10, SlotBytes: 1024})
					a := newArena(r, 256<<10, 1)
					for round := range 6 {
						b, c := a.pick(true, 200<<10), a.pick(false, 200<<10)
						for i := range b.Bytes() {
							b.Bytes()[i] = 0x77
						}
						f := v.most
						if r.Rank() == 1 {
							f = v.odd
						}
						err := f(x, b, c)
						var mismatch *kernels.CallMismatchError
						if !errors.As(err, &mismatch) || !errors.Is(err, comm.ErrMismatch) || mismatch.Rank != r.Rank() ||
							(mismatch.Peer == 1) == (r.Rank() == 1) {
							r.Must(fmt.Errorf("round %d: got %v", round, err))
						}
						for _, s := range v.says {
							require.ErrorContains(r.T, err, s)
						}
						if bytes.Count(b.Bytes(), []byte{0x77}) != len(b.Bytes()) {
							r.Must(errors.New("the destination was written"))
						}
						j := job{coll: kernels.AllReduce, dt: f32, count: 777, number: round}
						r.Must(j.run(r, x, nil, a))
					}
					r.Must(x.Close(r.Ctx))
					a.free(r)
				})
			})
		}
	}
}

func TestF3_DifferentOptionsAreNamedAtNew(t *testing.T) {
	for says, o := range map[string]allreduce.Options{
		`"ring"`:         {Algorithm: "ring"},
		"one-shot to 77": {OneShotBytes: 77},
		"slots of 8192":  {SlotBytes: 8192},
		"validate true":  {Validate: true},
		"wobble":         {Algorithm: "wobble"},
		"-5":             {Slots: -5},
		"1000":           {SlotBytes: 1000},
	} {
		worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
			mine := allreduce.Options{}
			if r.Rank() == 2 {
				mine = o
			}
			_, err := allreduce.New(r.Ctx, r.Heap, mine)
			if !errors.Is(err, comm.ErrMismatch) && !errors.Is(err, allreduce.ErrInvalid) {
				r.Must(fmt.Errorf("got %v", err))
			}
			require.ErrorContains(r.T, err, says)
		})
	}
}

// TestF3_OneRanksLackOfMemoryIsEveryRanksError also has a rank whose memory lies elsewhere than the others'.
func TestF3_OneRanksLackOfMemoryIsEveryRanksError(t *testing.T) {
	worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
		odd := func(n int64) (x *allreduce.Reducer, err error) {
			if r.Rank() == 1 {
				b, aerr := r.Heap.Alloc(n)
				r.Must(aerr)
				defer func() { r.Must(b.Free()) }()
			}
			return allreduce.New(r.Ctx, r.Heap, allreduce.Options{})
		}
		_, err := odd(r.Heap.Stats().LargestFree)
		require.ErrorIs(r.T, err, memory.ErrOutOfMemory)
		require.ErrorContains(r.T, err, "rank 1")
		_, err = odd(1000)
		require.ErrorIs(r.T, err, comm.ErrMismatch)
		require.ErrorContains(r.T, err, "offset")
		require.Zero(r.T, r.Heap.Stats().InUse)
		x := newReducer(r, allreduce.Options{})
		r.Must(x.Close(r.Ctx))
	})
}

func TestF3_ValidateRefusesOnEveryRank(t *testing.T) {
	worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{Validate: true})
		b, c := hostBuf(400), hostBuf(400)
		n := int64(400)
		if r.Rank() == 1 {
			n = 399
		}
		err := x.AllReduce(nil, b.Slice(0, n), c.Slice(0, n), f32, kernels.Sum)
		require.ErrorIs(r.T, err, allreduce.ErrInvalid)
		require.ErrorContains(r.T, err, "399")
		n = 400 - 4*int64(r.Rank()/2)
		err = x.AllReduce(nil, b.Slice(0, n), c.Slice(0, n), f32, kernels.Sum)
		require.ErrorIs(r.T, err, comm.ErrMismatch)
		require.ErrorContains(r.T, err, "99 float32")
		require.ErrorContains(r.T, err, "100 float32")
		r.Must(x.AllReduce(nil, b, c, f32, kernels.Sum))
		r.Must(x.Close(r.Ctx))
	})
}

func TestExplainAndForce(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{})
		for count, want := range map[int64]string{0: "one-shot", 1: "one-shot", 1000: "one-shot", 10 << 20: "two-shot"} {
			d, err := x.Explain(kernels.AllReduce, count, f32)
			r.Must(err)
			require.Equal(r.T, want, d.Algorithm, "%d elements: %v", count, d)
			require.Len(r.T, d.Candidates, 3)
			require.Contains(r.T, d.String(), want)
		}
		_, err := x.Explain(kernels.AllGather, 3, f32)
		require.ErrorIs(r.T, err, allreduce.ErrInvalid)
		r.Must(x.Close(r.Ctx))

		x = newReducer(r, allreduce.Options{Algorithm: "one-shot", OneShotBytes: 100})
		b := hostBuf(200)
		err = x.AllReduce(nil, b, b, f32, kernels.Sum)
		require.ErrorIs(r.T, err, allreduce.ErrInvalid)
		require.ErrorContains(r.T, err, "OneShotBytes 100")
		require.ErrorContains(r.T, err, "200 bytes")
		r.Must(x.Close(r.Ctx))

		x = newReducer(r, allreduce.Options{Algorithm: "ring"})
		d, err := x.Explain(kernels.ReduceScatter, 1<<20, kernels.BFloat16)
		r.Must(err)
		require.Equal(r.T, "ring", d.Algorithm)
		require.True(r.T, d.Forced)
		r.Must(x.Close(r.Ctx))
	})
}

func TestNothingIsAllocatedOnceWarm(t *testing.T) {
	for _, algorithm := range algorithms {
		worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
			x := newReducer(r, allreduce.Options{Algorithm: algorithm, OneShotBytes: 64 << 10, SlotBytes: 4096})
			s, err := device.Host().NewStream()
			r.Must(err)
			sym, err := r.Heap.Alloc(64 << 10)
			r.Must(err)
			foreign := hostBuf(64 << 10)
			counts := []int64{8000, 0}
			step := func() {
				for _, dt := range dtypes {
					r.Must(x.AllReduce(nil, sym.View(), foreign, dt, kernels.Sum))
					r.Must(x.AllReduce(nil, foreign, foreign, dt, kernels.Max))
				}
				r.Must(x.ReduceScatter(nil, foreign.Slice(0, 32<<10), sym.View(), f32, kernels.Avg))
				r.Must(x.AllGatherV(nil, sym.View().Slice(0, 32000), foreign.Slice(0, 4*counts[r.Rank()]), counts, f32))
			}
			onStream := func() {
				r.Must(x.AllReduce(s, sym.View(), sym.View(), f32, kernels.Sum))
				r.Must(x.AllGather(s, sym.View(), foreign.Slice(0, 32<<10), f32))
				r.Must(s.Synchronize())
			}
			r.AllocatesNothing(step)
			r.AllocatesNothing(onStream)
			r.Must(s.Close())
			r.Must(x.Close(r.Ctx))
			r.Must(sym.Free())
		})
	}
}
