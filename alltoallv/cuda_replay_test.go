package alltoallv_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

func read(r *worldtest.Rank, s device.Stream, v memory.View) []byte {
	b := make([]byte, v.Len())
	r.Must(memory.Copy(s, memory.Host(b), v))
	r.Must(s.Synchronize())
	return b
}

func write(r *worldtest.Rank, s device.Stream, v memory.View, b []byte) {
	r.Must(memory.Copy(s, v.Slice(0, int64(len(b))), memory.Host(b)))
}

func TestCUDA_OneGraphReplaysWithOtherSplits(t *testing.T) {
	const limit, replays = 20000, 60
	for _, n := range []int{1, 2, 4} {
		for _, algorithm := range []string{"", "direct", "pipelined", "ring", "staged"} {
			t.Run(fmt.Sprintf("ranks=%d/%s", n, algorithm), func(t *testing.T) {
				worldtest.GPUs(t, n, 128<<20, func(r *worldtest.Rank) {
					o := alltoallv.Options{Algorithm: algorithm, MaxSMs: 2, PacketBytes: 4 << 10, SlotBytes: 2048, Timeout: 20 * time.Second}
					if algorithm == "staged" {
						o.Algorithm = ""
					}
					x, err := alltoallv.New(r.Ctx, r.Heap, o)
					r.Must(err)
					size := int64(n) * (limit + 20)
					buffers, err := r.Heap.Alloc(2*size + alltoallv.LiveBytes(n) + 64)
					r.Must(err)
					live, src := buffers.View().Slice(0, alltoallv.LiveBytes(n)), buffers.View().Slice(alltoallv.LiveBytes(n), size)
					dst := buffers.View().Slice(alltoallv.LiveBytes(n)+size, size+3)
					if algorithm == "staged" {
						foreign, free := gpuMemory(r, size+3)
						defer free()
						dst = foreign
					}
					s := gpuStream(r)
					g, err := s.(*device.CUDAStream).Capture(func() error {
						return x.Exchange(s, dst, src, &alltoallv.Splits{Live: live})
					})
					r.Must(err)
					r.Barrier() // see TestCUDA_GraphReplays
					rnd := rand.New(rand.NewPCG(31, uint64(n)))
					for call := range replays {
						sp := gappy(rnd, n, limit)[r.Rank()]
						if call%10 == 9 { // nothing from anybody
							clear(sp.Send)
							clear(sp.Recv)
						}
						in := make([]byte, size)
						fillSource(in, sp, call, r.Rank())
						table, err := sp.AppendLive(nil)
						r.Must(err)
						if call%7 == 5 && call%n == r.Rank() { // this rank has to refuse it
							table[8*n-1] = 0x40
						}
						write(r, s, src, in)
						write(r, s, dst, slices.Repeat([]byte{0xa5}, int(dst.Len())))
						write(r, s, live, table)
						r.Must(g.Launch(s))
						r.Must(s.Synchronize()) // before more work: see algorithms
						got := read(r, s, dst)
						err = x.Fault()
						if call%7 == 5 {
							var refused *kernels.SplitsError
							if !errors.As(err, &refused) || refused.Rank != call%n || refused.Peer != n-1 || !refused.Send || refused.Epoch != uint64(call+1) {
								r.Must(fmt.Errorf("replay %d, which rank %d refuses: %w", call, call%n, err))
							}
							continue
						}
						r.Must(err)
						if err := differ(got, expected(sp, call, r.Rank(), dst.Len(), 0xa5)); err != nil {
							r.Must(fmt.Errorf("replay %d: %w", call, err))
						}
					}
					r.Must(g.Close())
					r.Must(s.Close())
					r.Must(x.Close(r.Ctx))
				})
			})
		}
	}
}

// Ranks refuse their splits in device memory between calls that follow one another without waiting. All have the error of the first refusal,
// nothing arrives at the rank that refuses but by copy engines, and the other calls are right.
func TestCUDA_F3_RefusedSplitsBetweenCallsThatAreRight(t *testing.T) {
	for _, n := range []int{2, 3, 4} {
		for _, algorithm := range append(algorithms(n), "staged") {
			for _, part := range []int64{200, 300 << 10} {
				t.Run(fmt.Sprintf("ranks=%d/%s/%d", n, algorithm, part), func(t *testing.T) {
					worldtest.GPUs(t, n, 128<<20, func(r *worldtest.Rank) {
						o := alltoallv.Options{Algorithm: algorithm, MaxSMs: 2, PacketBytes: 4 << 10, SlotBytes: 2048, Timeout: 20 * time.Second}
						if algorithm == "staged" {
							o.Algorithm = ""
						}
						x, err := alltoallv.New(r.Ctx, r.Heap, o)
						r.Must(err)
						const calls = 7
						refusals := map[int]int{2: 1, 3: 0, 5: n - 1} // by call: the rank
						size := int64(n) * part
						heap, err := r.Heap.Alloc((calls+1)*size + alltoallv.LiveBytes(n))
						r.Must(err)
						s, src, dst, live := gpuStream(r), heap.View().Slice(0, size), heap.View().Slice(size, calls*size), heap.View().Slice((calls+1)*size, alltoallv.LiveBytes(n))
						if algorithm == "staged" {
							foreign, free := gpuMemory(r, calls*size)
							defer free()
							dst = foreign
						}
						sp := alltoallv.Splits{Send: slices.Repeat([]int64{part}, n), Recv: slices.Repeat([]int64{part}, n)}
						in := make([]byte, size)
						fillSource(in, &sp, 1, r.Rank())
						table, err := sp.AppendLive(nil)
						r.Must(err)
						table[8*n-1] = 0x40
						write(r, s, src, in)
						write(r, s, dst, slices.Repeat([]byte{0xa5}, int(dst.Len())))
						write(r, s, live, table)
						known := sp
						if algorithm == "copy" {
							known.PeerDispls = slices.Repeat([]int64{part * int64(r.Rank())}, n)
						}
						r.Must(s.Synchronize())
						g, err := s.(*device.CUDAStream).Capture(func() error { // else a call could tell of the one before, instead of being made
							for call := range calls {
								how := &known
								if who, ok := refusals[call]; ok && who == r.Rank() {
									how = &alltoallv.Splits{Send: sp.Send, Recv: sp.Recv, Live: live}
									if algorithm == "copy" {
										how.Limits.Algorithm = "direct"
									}
								}
								if err := x.Exchange(s, dst.Slice(int64(call)*size, size), src, how); err != nil {
									return err
								}
							}
							return nil
						})
						r.Must(err)
						r.Barrier()
						r.Must(g.Launch(s))
						r.Must(s.Synchronize())
						var refused *kernels.SplitsError
						if err := x.Fault(); !errors.As(err, &refused) || refused.Rank != 1 || refused.Peer != n-1 || refused.Epoch != 3 {
							r.Must(fmt.Errorf("got %w", err))
						}
						r.Must(x.Fault())
						got := read(r, s, dst)
						for call := range calls {
							want, who := expected(&sp, 1, r.Rank(), size, 0xa5), -1
							if w, ok := refusals[call]; ok {
								who, want = w, slices.Repeat([]byte{0xa5}, int(size))
							}
							if who >= 0 && (who != r.Rank() || algorithm == "copy") {
								continue
							}
							if err := differ(got[int64(call)*size:][:size], want); err != nil {
								r.Must(fmt.Errorf("call %d: %w", call, err))
							}
						}
						r.Must(g.Close())
						r.Must(s.Close())
						r.Must(x.Close(r.Ctx))
					})
				})
			}
		}
	}
}

// A program may capture in a mode that forbids its threads what could reach into a capture. Nothing that a call needs is of
// that kind, and what cannot be captured leaves the capture alone.
func TestCUDA_CallsLeaveCapturesOfEveryModeAlone(t *testing.T) {
	for name, mode := range map[string]cuda.CaptureMode{"global": cuda.GlobalCapture, "thread": cuda.ThreadLocalCapture, "relaxed": cuda.RelaxedCapture} {
		t.Run(name, func(t *testing.T) {
			worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
				// A capture of such a mode ends on its thread.
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{MaxSMs: 2, Timeout: 20 * time.Second})
				r.Must(err)
				heap, err := r.Heap.Alloc(4 << 20)
				r.Must(err)
				foreign, free := gpuMemory(r, 1<<20)
				defer free()
				registered, freeRegistered := gpuMemory(r, 1<<20)
				defer freeRegistered()
				reg, err := r.Heap.Register(r.Ctx, registered)
				r.Must(err)
				captured, one, two := gpuStream(r), gpuStream(r), gpuStream(r)
				m := [][]int64{{100, 400000}, {333333, 5}}
				var calls []*gpuCall
				for i, dst := range []memory.View{heap.View().Slice(0, 1<<20), foreign, registered} {
					calls = append(calls, newGPUCall(r, one, dst.Slice(0, total(column(m, r.Rank()))), heap.View().Slice(1<<20, 1<<20), m, i))
				}
				for _, k := range calls { // one source for all
					k.want = calls[2].want
				}
				r.Must(one.Synchronize())
				launched := newGPUCall(r, one, heap.View().Slice(2<<20, 1<<20).Slice(0, total(column(m, r.Rank()))), heap.View().Slice(3<<20, 1<<20), m, 7)
				// The stream that will be captured is the one that the next call would be ordered behind.
				r.Must(x.Exchange(captured, launched.dst, launched.src, launched.sp))
				r.Must(captured.Synchronize())
				r.Barrier()

				c := r.Device.(*device.CUDADevice).Context()
				r.Must(c.BeginCapture(cuda.Stream(captured.Handle()), mode))
				for _, k := range calls {
					r.Must(x.Exchange(captured, k.dst, k.src, k.sp))
				}
				require.ErrorIs(r.T, x.Counts(captured, []int64{1, 2}, make([]int64, 2)), device.ErrCapturing)
				// Calls that are not of the capture, on streams in turn, so that they are ordered by events, and more events than a
				// stream keeps without asking for their state.
				for i := range 6 {
					s := []device.Stream{one, two}[i%2]
					r.Must(x.Exchange(s, launched.dst, launched.src, launched.sp))
					r.Must(s.Synchronize())
				}
				for range 100 {
					_, err := one.Record()
					r.Must(err)
				}
				r.Must(x.Exchange(nil, launched.dst, launched.src, launched.sp))
				r.Must(x.Fault())
				graph, err := c.EndCapture(cuda.Stream(captured.Handle()))
				r.Must(err)
				exec, err := c.Instantiate(graph)
				r.Must(err)
				r.Must(launched.check())

				// The captured call has not run, so the next call is still ordered behind the call before it.
				for _, k := range calls {
					require.Equal(r.T, slices.Repeat([]byte{0xa5}, int(k.dst.Len())), read(r, one, k.dst))
				}
				r.Barrier()
				r.Must(c.LaunchGraph(exec, cuda.Stream(captured.Handle())))
				r.Must(captured.Synchronize())
				r.Must(x.Fault())
				for _, k := range calls {
					r.Must(k.check())
				}
				r.Must(errors.Join(c.DestroyGraphExec(exec), c.DestroyGraph(graph), reg.Deregister(r.Ctx)))
				for _, s := range []device.Stream{captured, one, two} {
					r.Must(s.Close())
				}
				r.Must(x.Close(r.Ctx))
			})
		})
	}
}

func TestCUDA_F3_EveryDisagreementIsNamedOnEveryStream(t *testing.T) {
	worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{MaxSMs: 2, PacketBytes: 64 << 10, Timeout: 5 * time.Second})
		r.Must(err)
		b, err := r.Heap.Alloc(2 << 20)
		r.Must(err)
		src, dst := b.View().Slice(0, 1<<20), b.View().Slice(1<<20, 1<<20)
		streams := []device.Stream{gpuStream(r), gpuStream(r), gpuStream(r)}
		for i := range 60 {
			sp := &alltoallv.Splits{Send: []int64{0, 0}, Recv: []int64{0, 0}}
			if r.Rank() == 0 {
				sp.Send[1] = int64(300000 + i)
			} else {
				sp.Recv[0] = int64(300001 + 2*i)
			}
			s := streams[i%3]
			r.Must(x.Exchange(s, dst, src, sp))
			r.Must(s.Synchronize())
			err := x.Fault() // forgets it, and the next call is on another stream
			var mismatch *kernels.CountMismatchError
			if !errors.As(err, &mismatch) || mismatch.Sent != uint64(300000+i) || mismatch.Expected != uint64(300001+2*i) || mismatch.Epoch != uint64(i+1) {
				r.Must(fmt.Errorf("call %d: %w", i, err))
			}
			r.Must(x.Fault())
		}
		for _, s := range streams {
			r.Must(s.Close())
		}
		r.Must(x.Close(r.Ctx))
	})
}
