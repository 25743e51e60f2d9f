package allreduce_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/test/reference"
)

// yard is memory of one rank on its device: sources and destinations, in the heap and outside it, each of n bytes.
type yard struct {
	r       *worldtest.Rank
	s       device.Stream
	n       int64
	in, out [2]memory.View // in the heap, outside
	release []func() error
}

func newYard(r *worldtest.Rank, n int64) *yard {
	y := &yard{r: r, n: n}
	var err error
	y.s, err = r.Device.NewStream()
	r.Must(err)
	y.release = append(y.release, y.s.Close)
	for _, v := range []*[2]memory.View{&y.in, &y.out} {
		b, err := r.Heap.Alloc(n)
		r.Must(err)
		y.release = append(y.release, b.Free)
		v[0], v[1] = b.View(), memory.Host(make([]byte, n))
		if d, ok := r.Device.(*device.CUDADevice); ok {
			p, err := d.Context().MemAlloc(n)
			r.Must(err)
			y.release = append(y.release, func() error { return d.Context().MemFree(p) })
			v[1] = memory.Device(p, n)
		}
	}
	// To allocate and to free can wait for running kernels, so no rank calls before all have what they need, or frees before all are through.
	r.Barrier()
	return y
}

// onGPUs runs test for each number of ranks, with a reducer of the defaults and a yard of 1 MiB.
func onGPUs(t *testing.T, ranks []int, room int64, test func(r *worldtest.Rank, n int, x *allreduce.Reducer, y *yard)) {
	for _, n := range ranks {
		t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) {
			worldtest.GPUs(t, n, room, func(r *worldtest.Rank) {
				x, err := allreduce.New(r.Ctx, r.Heap, gpuOptions(""))
				r.Must(err)
				y := newYard(r, 1<<20)
				test(r, n, x, y)
				r.Must(x.Close(r.Ctx))
				y.close()
			})
		})
	}
}

func (y *yard) close() {
	y.r.Barrier()
	for _, f := range y.release {
		y.r.Must(f())
	}
}

func (y *yard) write(v memory.View, b []byte) {
	if len(b) > 0 {
		y.r.Must(memory.Copy(y.s, v.Slice(0, int64(len(b))), memory.Host(b)))
	}
}

func (y *yard) read(v memory.View) []byte {
	b := make([]byte, v.Len())
	if len(b) > 0 {
		y.r.Must(memory.Copy(y.s, memory.Host(b), v))
		y.r.Must(y.s.Synchronize())
	}
	return b
}

// place says where a rank has the buffers of a call.
type place struct {
	inPlace     bool
	in, out     int // 0 in the heap, 1 outside
	inAt, outAt int64
}

func (p place) String() string {
	return fmt.Sprintf("in place %v, source %d+%d, destination %d+%d", p.inPlace, p.in, p.inAt, p.out, p.outAt)
}

// buffers are the source and the destination of a job, and the number of the source's first element.
func (y *yard) buffers(j job, p place) (dst, src memory.View, first int64) {
	es := j.dt.Size()
	at, mine := j.slice(y.r.Rank())
	in, out := j.count, mine
	if !j.coll.Reduces() {
		in, out, first = mine, j.count, at
	}
	src, dst = y.in[p.in].Slice(p.inAt, in*es), y.out[p.out].Slice(p.outAt, out*es)
	switch {
	case p.inPlace && j.coll.Gathers():
		src = dst
		if j.coll == kernels.AllGather {
			src = dst.Slice(at*es, mine*es)
		}
	case p.inPlace:
		dst = src.Slice(at*es, mine*es)
	}
	return dst, src, first
}

// load fills the source and spoils the destination.
func (y *yard) load(j job, dst, src memory.View, first int64) {
	y.write(dst, bytes.Repeat([]byte{0xa5}, int(dst.Len())))
	b := make([]byte, src.Len())
	for i := range src.Len() / j.dt.Size() {
		reference.Put(b, j.dt, i, value(j.number, y.r.Rank(), first+i, j.dt, j.op))
	}
	y.write(src, b)
	y.r.Must(y.s.Synchronize())
}

// perform makes the call and returns what it leaves.
func (y *yard) perform(x *allreduce.Reducer, j job, p place) []byte {
	dst, src, first := y.buffers(j, p)
	y.load(j, dst, src, first)
	y.r.Must(j.call(x, y.s, dst, src))
	y.r.Must(y.s.Synchronize())
	if err := x.Fault(); err != nil {
		y.r.Must(fmt.Errorf("%v, %v: %w", j, p, err))
	}
	return y.read(dst)
}

// gpuOptions have few blocks, so that ranks which share a GPU run side by side, and small packets, so that all kernels run.
func gpuOptions(algorithm string) allreduce.Options {
	return allreduce.Options{Algorithm: algorithm, MaxSMs: 4, OneShotBytes: 24 << 10, SlotBytes: 4096, Slots: 2, Timeout: 20 * time.Second}
}

// worlds are ranks that share a GPU, and ranks with a GPU each where the machine has two.
var worlds = []int{1, 2, 3, 4, 8}

// everyJob is each collective with each type and operator, of odd counts.
func everyJob(n int, rnd *rand.Rand) (jobs []job) {
	counts := []int64{0, 1, 3, 17, 1000, 4099}
	for _, coll := range []kernels.Collective{kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather} {
		for _, dt := range dtypes {
			for _, op := range ops {
				if coll.Reduces() && !op.Reducible(dt) || !coll.Reduces() && op != kernels.Sum {
					continue
				}
				j := job{coll: coll, dt: dt, op: op, number: len(jobs), plain: rnd.IntN(2) == 0}
				c := counts[rnd.IntN(len(counts))]
				if coll == kernels.AllReduce {
					j.count = c * int64(1+rnd.IntN(n))
				} else {
					for range n {
						j.counts = append(j.counts, c)
						j.count += c
						if !j.plain {
							c = counts[rnd.IntN(len(counts))]
						}
					}
				}
				jobs = append(jobs, j)
			}
		}
	}
	return jobs
}

func TestCUDA_R2_HostAndCUDAGiveTheSameBits(t *testing.T) {
	for _, n := range worlds {
		for _, algorithm := range []string{"", "two-shot"} {
			t.Run(fmt.Sprintf("ranks=%d/%s", n, algorithm), func(t *testing.T) {
				jobs := everyJob(n, rand.New(rand.NewPCG(5, uint64(n))))
				var mu sync.Mutex
				outputs := map[device.Kind]map[string][]byte{device.HostKind: {}, device.CUDAKind: {}}
				run := func(r *worldtest.Rank) {
					x, err := allreduce.New(r.Ctx, r.Heap, gpuOptions(algorithm))
					r.Must(err)
					y := newYard(r, 8*8*5000+64)
					rnd := rand.New(rand.NewPCG(6, uint64(r.Rank())))
					for _, j := range jobs {
						// Each rank has its buffers elsewhere, and reduces in place or not, as it likes.
						p := place{rnd.IntN(3) == 0, rnd.IntN(2), rnd.IntN(2), rnd.Int64N(3) * rnd.Int64N(17), rnd.Int64N(3) * rnd.Int64N(17)}
						if j.coll == kernels.AllReduce && rnd.IntN(2) == 0 {
							p.inAt, p.outAt = 0, 0
						}
						out := y.perform(x, j, p)
						at := int64(0)
						if j.coll == kernels.ReduceScatter {
							for _, c := range j.counts[:r.Rank()] {
								at += c
							}
						}
						if err := j.check(out, r.Rank(), n, at); err != nil {
							r.Must(fmt.Errorf("%v: %w", p, err))
						}
						mu.Lock()
						outputs[r.Device.Kind()][fmt.Sprintf("%v, rank %d", j, r.Rank())] = out
						mu.Unlock()
					}
					r.Must(x.Close(r.Ctx))
					y.close()
				}
				worldtest.GPUs(t, n, 64<<20, run) // skips where there is no GPU
				worldtest.Local(t, n, 64<<20, run)
				for _, of := range outputs {
					require.Len(t, of, n*len(jobs))
				}
				for what, want := range outputs[device.HostKind] {
					require.True(t, bytes.Equal(want, outputs[device.CUDAKind][what]), what)
				}
			})
		}
	}
}

// Numbers that float32 rounds, whose sum depends on the order.
func TestCUDA_R2_RoundedSumsAreTheHostsBitForBit(t *testing.T) {
	for _, n := range []int{2, 3, 4, 8} {
		t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) {
			var mu sync.Mutex
			outputs := map[string][]byte{}
			run := func(r *worldtest.Rank) {
				for _, algorithm := range []string{"", "two-shot"} {
					o := gpuOptions(algorithm)
					x, err := allreduce.New(r.Ctx, r.Heap, o)
					r.Must(err)
					y := newYard(r, 400<<10)
					for i, dt := range []kernels.DType{kernels.Float32, kernels.BFloat16, kernels.Float16, kernels.Float64, kernels.Float8E4M3, kernels.Float8E5M2} {
						for _, op := range []kernels.ReduceOp{kernels.Sum, kernels.Avg, kernels.Prod} {
							for _, count := range []int64{1001, 40009} {
								rnd := rand.New(rand.NewPCG(uint64(100*i)+uint64(count), uint64(r.Rank())))
								b := make([]byte, count*dt.Size())
								for e := range count {
									reference.Put(b, dt, e, (rnd.Float64()-0.5)*4)
								}
								src, dst := y.in[0].Slice(0, int64(len(b))), y.out[i%2].Slice(0, int64(len(b)))
								y.write(src, b)
								r.Must(x.AllReduce(y.s, dst, src, dt, op))
								r.Must(y.s.Synchronize())
								r.Must(x.Fault())
								out := y.read(dst)
								key := fmt.Sprintf("%v %v %d", dt, op, count)
								mu.Lock()
								if first, ok := outputs[key]; !ok {
									outputs[key] = out
								} else if !bytes.Equal(first, out) {
									t.Errorf("%s by %q on %v differs", key, algorithm, r.Device)
								}
								mu.Unlock()
							}
						}
					}
					r.Must(x.Close(r.Ctx))
					y.close()
				}
			}
			worldtest.GPUs(t, n, 64<<20, run)
			worldtest.Local(t, n, 64<<20, run)
		})
	}
}

// Every placement of the buffers, through every kernel, with many chunks of staging.
func TestCUDA_EveryPlacementOfLargeBuffers(t *testing.T) {
	onGPUs(t, []int{2, 4}, 192<<20, func(r *worldtest.Rank, n int, x *allreduce.Reducer, y *yard) {
		number := 0
		for _, coll := range []kernels.Collective{kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather} {
			for mixed := range 2 {
				for where := range 8 {
					for _, shift := range []int64{0, 2, 34} {
						each := int64(200<<10+6)/int64(n) + int64(where)
						j := job{coll: coll, dt: kernels.BFloat16, op: kernels.Sum, count: each * int64(n), plain: true, number: number}
						for range n {
							j.counts = append(j.counts, each)
						}
						number++
						w := where
						if mixed == 1 { // ranks have their buffers in other places
							w = (where + 3*r.Rank()) % 8
						}
						p := place{w&1 != 0, w >> 1 & 1, w >> 2 & 1, shift * int64(r.Rank()%2), shift}
						at := int64(0)
						if coll == kernels.ReduceScatter {
							at = each * int64(r.Rank())
						}
						if err := j.check(y.perform(x, j, p), r.Rank(), n, at); err != nil {
							r.Must(fmt.Errorf("%v: %w", p, err))
						}
					}
				}
			}
		}
	})
}

// The defaults of a GPU, at the sizes where the kernels change.
func TestCUDA_DefaultsAtEverySize(t *testing.T) {
	worldtest.GPUs(t, 2, 256<<20, func(r *worldtest.Rank) {
		x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Timeout: 20 * time.Second})
		r.Must(err)
		y := newYard(r, 10<<20)
		for i, size := range []int64{2, 8 << 10, 48<<10 + 2, 128 << 10, 1 << 20, 1<<20 + 2, 2 << 20, 2<<20 + 4, 9 << 20} {
			for _, coll := range []kernels.Collective{kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather} {
				each := (size/2 + 1) / 2
				j := job{coll: coll, dt: kernels.BFloat16, op: kernels.Sum, count: 2 * each, counts: []int64{each, each}, plain: true, number: i}
				for where := range 4 {
					at := int64(0)
					if coll == kernels.ReduceScatter {
						at = each * int64(r.Rank())
					}
					r.Must(j.check(y.perform(x, j, place{inPlace: where&1 != 0, in: where >> 1, out: where >> 1}), r.Rank(), 2, at))
				}
			}
		}
		r.Must(x.Close(r.Ctx))
		y.close()
	})
}

// Every way through memory that a table can name, as fast as it can and held to a rate.
func TestCUDA_EveryWayThroughMemory(t *testing.T) {
	collectives := []kernels.Collective{kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather}
	worldtest.GPUs(t, 2, 128<<20, func(r *worldtest.Rank) {
		y := newYard(r, 2<<20)
		number := 0
		for _, coll := range collectives {
			for _, way := range []string{"two-shot", "two-shot pull", "two-shot push"} {
				if way == "two-shot pull" && coll.Reduces() || way == "two-shot push" && !coll.Reduces() {
					continue
				}
				for _, rate := range []float64{0, 50} {
					table := &allreduce.Table{Device: "cuda"}
					add := func(coll kernels.Collective, way string, rate, us float64) {
						table.Curves = append(table.Curves, allreduce.Curve{
							Collective: coll.String(), Algorithm: way, Ranks: 2, SMs: 4, Rate: rate, Bytes: []int64{1}, Microseconds: []float64{us},
						})
					}
					for _, c := range collectives {
						if c != coll || way != "two-shot" {
							add(c, "two-shot", 0, 1e12)
						}
					}
					add(coll, way, rate, 1)
					x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Table: table, MaxSMs: 4, OneShotBytes: -1, SlotBytes: 8192, Slots: 3, Timeout: 20 * time.Second})
					r.Must(err)
					const each = 300_001
					d, err := x.Explain(coll, 2*each, kernels.BFloat16)
					r.Must(err)
					if d.Way != way || d.Rate != rate || d.Blocks != 4 {
						r.Must(fmt.Errorf("%v by %s at %v GB/s: %v", coll, way, rate, d))
					}
					for where := range 4 {
						j := job{coll: coll, dt: kernels.BFloat16, op: kernels.Sum, count: 2 * each, counts: []int64{each, each}, plain: true, number: number}
						number++
						at := int64(0)
						if coll == kernels.ReduceScatter {
							at = each * int64(r.Rank())
						}
						p := place{inPlace: where&1 != 0, in: where >> 1, out: where >> 1}
						if err := j.check(y.perform(x, j, p), r.Rank(), 2, at); err != nil {
							r.Must(fmt.Errorf("%s at %v GB/s, %v: %w", way, rate, p, err))
						}
					}
					r.Must(x.Close(r.Ctx))
				}
			}
		}
		y.close()
	})
}

func TestCUDA_Broadcast(t *testing.T) {
	onGPUs(t, []int{1, 2, 4}, 64<<20, func(r *worldtest.Rank, n int, x *allreduce.Reducer, y *yard) {
		for i, size := range []int64{0, 1, 5000, 23 << 10, 100_001, 900_000} {
			for root := range n {
				b := y.out[i%2].Slice(int64(i), size)
				want := make([]byte, size)
				for k := range want {
					want[k] = worldtest.Element(i, root, 0, int64(k))
				}
				y.write(b, bytes.Repeat([]byte{0xa5}, int(size)))
				if r.Rank() == root {
					y.write(b, want)
				}
				r.Must(y.s.Synchronize())
				r.Must(x.Broadcast(y.s, b, root))
				r.Must(y.s.Synchronize())
				r.Must(x.Fault())
				if got := y.read(b); !bytes.Equal(got, want) {
					r.Must(fmt.Errorf("%d bytes from rank %d differ", size, root))
				}
			}
		}
	})
}

func TestCUDA_GraphsReplay(t *testing.T) {
	onGPUs(t, []int{2, 4}, 64<<20, func(r *worldtest.Rank, n int, x *allreduce.Reducer, y *yard) {
		number := 0
		for _, each := range []int64{701, 30011} {
			for _, coll := range []kernels.Collective{kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather} {
				for where := range 2 {
					j := job{coll: coll, dt: kernels.Float16, op: kernels.Sum, count: each * int64(n), plain: true, number: number}
					for range n {
						j.counts = append(j.counts, each)
					}
					number++
					dst, src, first := y.buffers(j, place{in: where, out: where})
					y.load(j, dst, src, first)
					g, err := y.s.(*device.CUDAStream).Capture(func() error {
						return errors.Join(j.call(x, y.s, dst, src), j.call(x, y.s, dst, src), j.call(x, y.s, dst, src))
					})
					r.Must(err)
					r.Barrier() // to make a graph may wait in the driver for a kernel on that GPU, which may wait for this rank
					at := int64(0)
					if coll == kernels.ReduceScatter {
						at = each * int64(r.Rank())
					}
					for replay := range 50 {
						j.number = 1000*number + replay // other data every time
						y.load(j, dst, src, first)
						r.Must(g.Launch(y.s))
						r.Must(y.s.Synchronize())
						r.Must(x.Fault())
						r.Must(j.check(y.read(dst), r.Rank(), n, at))
					}
					r.Must(g.Close())
				}
			}
		}
	})
}

func TestCUDA_F3_DifferentCallsAreNamedOnEveryRank(t *testing.T) {
	onGPUs(t, []int{2, 4}, 64<<20, func(r *worldtest.Rank, n int, x *allreduce.Reducer, y *yard) {
		for i, bytes := range []int64{1 << 10, 512 << 10} { // by packets, and through memory
			for _, what := range []string{"type", "operator", "length", "collective"} {
				c, dt, op, length := kernels.AllReduce, kernels.Int32, kernels.Sum, bytes
				if r.Rank() == n-1 {
					switch what {
					case "type":
						dt = kernels.Float32
					case "operator":
						op = kernels.Max
					case "length":
						length -= 8
					case "collective":
						c = kernels.ReduceScatter
					}
				}
				src, dst := y.in[i].Slice(0, length), y.out[i].Slice(0, length)
				y.write(dst, make([]byte, length))
				if c == kernels.AllReduce {
					r.Must(x.AllReduce(y.s, dst, src, dt, op))
				} else {
					r.Must(x.ReduceScatter(y.s, dst.Slice(0, length/int64(n)), src, dt, op))
				}
				r.Must(y.s.Synchronize())
				err := x.Fault()
				var mismatch *kernels.CallMismatchError
				if !errors.Is(err, comm.ErrMismatch) || !errors.As(err, &mismatch) || mismatch.Rank != r.Rank() {
					r.Must(fmt.Errorf("%s, %d bytes: got %v", what, bytes, err))
				}
				mine := kernels.ReduceCall{Collective: c, DType: dt, Op: op, Count: length / 4}
				if mismatch.Mine != mine || mismatch.Theirs == mine {
					r.Must(fmt.Errorf("%s, %d bytes: this rank called %v, the error says %v", what, bytes, mine, mismatch))
				}
				for at, b := range y.read(dst) {
					if b != 0 {
						r.Must(fmt.Errorf("%s, %d bytes: byte %d has been written", what, bytes, at))
					}
				}
				r.Must(x.Fault()) // told once
				r.Barrier()       // and everywhere, before the next call
				j := job{coll: kernels.AllReduce, dt: kernels.Int32, op: kernels.Sum, count: bytes / 4, number: i}
				r.Must(j.check(y.perform(x, j, place{}), r.Rank(), n, 0))
			}
		}
	})
}

func TestCUDA_F1_AMissingRankIsNamed(t *testing.T) {
	for _, bytes := range []int64{1 << 10, 512 << 10} {
		t.Run(fmt.Sprint(bytes), func(t *testing.T) {
			worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
				o := gpuOptions("")
				o.Timeout = 200 * time.Millisecond
				x, err := allreduce.New(r.Ctx, r.Heap, o)
				r.Must(err)
				b, err := r.Heap.Alloc(1 << 20)
				r.Must(err)
				v := b.View().Slice(0, bytes)
				if r.Rank() == 1 {
					time.Sleep(time.Second) // does not call
					return
				}
				err = x.AllReduce(nil, v, v, f32, kernels.Sum)
				var pe *comm.PeerError
				if !errors.Is(err, comm.ErrTimeout) || !errors.As(err, &pe) || pe.Rank != 1 {
					r.Must(fmt.Errorf("got %v", err))
				}
				if err := x.AllReduce(nil, v, v, f32, kernels.Sum); !errors.Is(err, comm.ErrTimeout) {
					r.Must(fmt.Errorf("the call after it: %v", err))
				}
			})
		})
	}
}

func TestCUDA_F2_AbortEndsWaits(t *testing.T) {
	worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{MaxSMs: 4, Timeout: time.Minute})
		r.Must(err)
		b, err := r.Heap.Alloc(1 << 20)
		r.Must(err)
		r.Barrier()
		if r.Rank() == 1 {
			time.Sleep(200 * time.Millisecond)
			r.Group.Abort(errors.New("pulled the plug"))
			return
		}
		start := time.Now()
		err = x.AllReduce(nil, b.View(), b.View(), f32, kernels.Sum)
		var pe *comm.PeerError
		if !errors.As(err, &pe) || time.Since(start) > 10*time.Second {
			t.Errorf("got %v after %v", err, time.Since(start))
		}
	})
}

func TestCUDA_WhatGPUsCannotDoIsRefused(t *testing.T) {
	worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
		_, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Algorithm: "ring"})
		require.ErrorIs(r.T, err, allreduce.ErrUnsupported)
		_, err = allreduce.New(r.Ctx, r.Heap, allreduce.Options{SlotBytes: 512})
		require.ErrorIs(r.T, err, allreduce.ErrInvalid)
		require.ErrorContains(r.T, err, "512")
		x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{MaxSMs: 3})
		r.Must(err)
		y := newYard(r, 4096)
		host := memory.Host(make([]byte, 64))
		require.ErrorIs(r.T, x.AllReduce(y.s, host, host, f32, kernels.Sum), allreduce.ErrInvalid)
		require.ErrorIs(r.T, x.AllReduce(y.s, y.out[0], y.in[0], kernels.Int32, kernels.Avg), allreduce.ErrUnsupported)
		for _, count := range []int64{1, 1 << 20, 1 << 30} {
			d, err := x.Explain(kernels.AllReduce, count, f32)
			r.Must(err)
			require.Equal(r.T, 3, d.Blocks, "%v", d)
		}
		r.Must(x.Close(r.Ctx))
		y.close()
	})
}

// Ranks with unequal shares of their GPUs take equally many blocks.
func TestCUDA_UnequalSharesOfGPUs(t *testing.T) {
	worldtest.GPUs(t, 3, 128<<20, func(r *worldtest.Rank) {
		x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Timeout: 20 * time.Second})
		r.Must(err)
		y := newYard(r, 4<<20)
		for i, count := range []int64{100, 1 << 20} {
			j := job{coll: kernels.AllReduce, dt: f32, op: kernels.Sum, count: count, number: i}
			r.Must(j.check(y.perform(x, j, place{}), r.Rank(), 3, 0))
		}
		r.Must(x.Close(r.Ctx))
		y.close()
	})
}

// stamp is an event of the GPU's timeline.
func stamp(r *worldtest.Rank, s device.Stream) cuda.Event {
	c := r.Device.(*device.CUDADevice).Context()
	e, err := c.NewEvent(true)
	r.Must(err)
	r.Must(c.Record(e, cuda.Stream(s.(*device.CUDAStream).Handle())))
	return e
}

// Gradients are reduced on the buckets' stream while the stream that computes goes on: the timeline of the GPU says so.
func TestCUDA_BucketsOverlapWithAnotherStream(t *testing.T) {
	if gpus, err := device.CUDACount(); err != nil || gpus < 2 {
		t.Skip("ranks that share a GPU have no room for work other than their reductions")
	}
	worldtest.GPUs(t, 2, 1<<30, func(r *worldtest.Rank) {
		const layers, n = 8, 4 << 20 // of float32
		var gradients []allreduce.Gradient
		for range layers {
			gradients = append(gradients, allreduce.Gradient{Len: n})
		}
		b, err := allreduce.NewBuckets(r.Ctx, r.Heap, gradients, allreduce.BucketOptions{Op: kernels.Avg, BucketBytes: 4 * n})
		r.Must(err)
		y := newYard(r, 256<<20)
		c := r.Device.(*device.CUDADevice).Context()
		ones, twos := make([]byte, 4*n), make([]byte, 4*n)
		for i := range int64(n) {
			reference.Put(ones, f32, i, float64(1+r.Rank()))
			reference.Put(twos, f32, i, 1.5)
		}
		y.write(y.out[0], ones)
		timed := func(f func()) time.Duration {
			r.Must(y.s.Synchronize())
			r.Barrier()
			begin := stamp(r, y.s)
			f()
			end := stamp(r, y.s)
			r.Must(y.s.Synchronize())
			d, err := c.Elapsed(begin, end)
			r.Must(err)
			r.Must(errors.Join(c.DestroyEvent(begin), c.DestroyEvent(end)))
			return d
		}
		step := func(reduce bool) time.Duration {
			return timed(func() {
				for i := range layers {
					r.Must(memory.Copy(y.s, y.in[0], y.in[1])) // what computes: as long as a layer's reduction, or longer
					r.Must(memory.Copy(y.s, b.View(i), y.out[0].Slice(0, 4*n)))
					if reduce {
						r.Must(b.Ready(y.s, i))
					}
				}
				if reduce {
					r.Must(b.Wait(y.s))
				}
			})
		}
		alone := func() time.Duration { // the reductions by themselves
			return timed(func() {
				for i := range layers {
					r.Must(b.Ready(y.s, i))
				}
				r.Must(b.Wait(y.s))
			})
		}
		least := func(f func() time.Duration) (d time.Duration) {
			d = f() // warm
			for i := range 5 {
				if got := f(); i == 0 || got < d {
					d = got
				}
			}
			return d
		}
		computing := least(func() time.Duration { return step(false) })
		reducing := least(alone)
		both := least(func() time.Duration { return step(true) })
		t.Logf("rank %d: compute %v, reductions %v, both %v", r.Rank(), computing, reducing, both)
		if both > computing+reducing*6/10 {
			t.Errorf("rank %d: compute takes %v and the reductions %v: together %v is no overlap", r.Rank(), computing, reducing, both)
		}
		for i := range layers {
			if got := y.read(b.View(i)); !bytes.Equal(got, twos) {
				r.Must(fmt.Errorf("gradient %d is not the average", i))
			}
		}
		r.Must(b.Close(r.Ctx))
		y.close()
	})
}
