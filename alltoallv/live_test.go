package alltoallv_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// fillSource writes what rank me sends in a call.
func fillSource(b []byte, sp *alltoallv.Splits, call, me int) {
	var next int64
	for p, n := range sp.Send {
		at := next
		if sp.SendDispls != nil {
			at = sp.SendDispls[p]
		}
		for i := range n {
			b[at+i] = worldtest.Element(call, me, p, i)
		}
		next = at + n
	}
}

// expected is what rank me must find in its whole destination of n bytes that held fill before.
func expected(sp *alltoallv.Splits, call, me int, n int64, fill byte) []byte {
	want := slices.Repeat([]byte{fill}, int(n))
	var next int64
	for p, k := range sp.Recv {
		at := next
		if sp.RecvDispls != nil {
			at = sp.RecvDispls[p]
		}
		for i := range k {
			want[at+i] = worldtest.Element(call, p, me, i)
		}
		next = at + k
	}
	return want
}

// gappy draws splits, the same on every rank, with gaps between the parts. It returns every rank's.
func gappy(rnd *rand.Rand, n int, limit int64) []*alltoallv.Splits {
	m := matrix(rnd, n, limit)
	all := make([]*alltoallv.Splits, n)
	for r := range all {
		all[r] = &alltoallv.Splits{Send: m[r], Recv: column(m, r)}
		var at, to int64
		for p := range n {
			at += rnd.Int64N(20)
			to += rnd.Int64N(20)
			all[r].SendDispls, all[r].RecvDispls = append(all[r].SendDispls, at), append(all[r].RecvDispls, to)
			at += m[r][p]
			to += m[p][r]
		}
	}
	return all
}

func differ(got, want []byte) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d bytes, want %d", len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			return fmt.Errorf("byte %d of %d is %#x, want %#x", i, len(got), got[i], want[i])
		}
	}
	return nil
}

func TestLiveSplitsAreReadInStreamOrder(t *testing.T) {
	const limit, calls = 9000, 30
	for _, n := range []int{1, 2, 3, 5} {
		for _, algorithm := range []string{"", "direct", "pipelined", "ring"} {
			t.Run(fmt.Sprintf("ranks=%d/%s", n, algorithm), func(t *testing.T) {
				worldtest.Local(t, n, 64<<20, func(r *worldtest.Rank) {
					x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithm: algorithm, SlotBytes: 2048})
					r.Must(err)
					s, err := device.Host().NewStream()
					r.Must(err)
					size := int64(n) * (limit + 20)
					sym, err := r.Heap.Alloc(calls * size)
					r.Must(err)
					out, live := sym.View(), memory.Host(shm.Bytes(make([]int64, 4*n)))
					if algorithm == "ring" {
						out = memory.Host(make([]byte, calls*size))
					}
					for i := range out.Bytes() {
						out.Bytes()[i] = 0xa5
					}
					rnd := rand.New(rand.NewPCG(21, uint64(n)))
					var want []byte
					for call := range calls { // all of them under way at once
						sp := gappy(rnd, n, limit)[r.Rank()]
						src := make([]byte, size)
						fillSource(src, sp, call, r.Rank())
						table, err := sp.AppendLive(nil)
						r.Must(err)
						r.Must(memory.Copy(s, live, memory.Host(table)))
						ask := &alltoallv.Splits{Live: live}
						if call%2 == 0 { // any estimate is as good
							ask.Send, ask.Recv = slices.Repeat([]int64{7}, n), slices.Repeat([]int64{7}, n)
						}
						r.Must(x.Exchange(s, out.Slice(int64(call)*size, size), memory.Host(src), ask))
						want = append(want, expected(sp, call, r.Rank(), size, 0xa5)...)
					}
					r.Must(s.Synchronize())
					r.Must(differ(out.Bytes(), want))
					r.Must(s.Close())
					r.Must(x.Close(r.Ctx))
				})
			})
		}
	}
}

func TestF3_BadLiveSplitsAreRefused(t *testing.T) {
	run := func(t *testing.T, world func(testing.TB, int, int64, func(*worldtest.Rank))) {
		world(t, 2, 64<<20, func(r *worldtest.Rank) {
			b, err := r.Heap.Alloc(4 << 10)
			r.Must(err)
			freed, err := r.Heap.Alloc(64)
			r.Must(err)
			stale := freed.View()
			r.Must(freed.Free())
			dst, src, live := b.View().Slice(0, 1000), b.View().Slice(1024, 1000), b.View().Slice(2048, 64)
			other := memory.Host(make([]byte, 64))
			if r.Device.Kind() == device.HostKind {
				other = memory.Device(4096, 64)
			}
			for _, bad := range []struct {
				o    alltoallv.Options
				sp   *alltoallv.Splits
				says string
				is   error
			}{
				{alltoallv.Options{}, &alltoallv.Splits{Live: live.Slice(0, 56)}, "56 bytes of device memory, 2 ranks need 64", alltoallv.ErrInvalid},
				{alltoallv.Options{}, &alltoallv.Splits{Live: b.View().Slice(2052, 64)}, "aligned", alltoallv.ErrInvalid},
				{alltoallv.Options{}, &alltoallv.Splits{Live: other}, "not aligned memory of", alltoallv.ErrInvalid},
				{alltoallv.Options{}, &alltoallv.Splits{Live: stale}, "splits: ", memory.ErrFreed},
				{alltoallv.Options{}, &alltoallv.Splits{Live: live, Send: []int64{1}}, "1 send splits", alltoallv.ErrInvalid},
				{alltoallv.Options{}, &alltoallv.Splits{Live: live, PeerDispls: []int64{0, 0}}, "PeerDispls", alltoallv.ErrInvalid},
				{alltoallv.Options{Algorithm: "copy"}, &alltoallv.Splits{Live: live}, "copy engines", alltoallv.ErrInvalid},
				{alltoallv.Options{Validate: true}, &alltoallv.Splits{Live: live}, "Options.Validate", alltoallv.ErrInvalid},
			} {
				x, err := alltoallv.New(r.Ctx, r.Heap, bad.o)
				r.Must(err)
				err = x.Exchange(nil, dst, src, bad.sp)
				require.ErrorIs(r.T, err, bad.is, bad.says)
				require.ErrorContains(r.T, err, bad.says)
				r.Must(x.Close(r.Ctx))
			}
		})
	}
	t.Run("host", func(t *testing.T) { run(t, worldtest.Local) })
	t.Run("cuda", func(t *testing.T) { run(t, worldtest.GPUs) })
}

// Splits that do not fit are an error on all ranks, at once, and the next call works.
func TestF3_LiveSplitsStayInsideTheBuffers(t *testing.T) {
	run := func(t *testing.T, world func(testing.TB, int, int64, func(*worldtest.Rank))) {
		for _, bad := range []struct {
			table [8]int64 // of rank 0: send bytes, send offsets, receive bytes, receive offsets
			want  kernels.SplitsError
		}{
			{[8]int64{10, 991, 0, 10, 10, 20, 0, 10}, kernels.SplitsError{Peer: 1, Send: true, Bytes: 991, Offset: 10, Limit: 1000}},
			{[8]int64{10, 20, 0, 10, 10, 21, 0, 980}, kernels.SplitsError{Peer: 1, Bytes: 21, Offset: 980, Limit: 1000}},
			{[8]int64{10, -1, 0, 10, 10, 20, 0, 10}, kernels.SplitsError{Peer: 1, Send: true, Bytes: -1, Offset: 10, Limit: 1000}},
			{[8]int64{10, 20, 0, 10, 10, 20, 0, -8}, kernels.SplitsError{Peer: 1, Bytes: 20, Offset: -8, Limit: 1000}},
			{[8]int64{10, 20, -8, 10, 10, 20, 0, 10}, kernels.SplitsError{Peer: 0, Send: true, Bytes: 10, Offset: -8, Limit: 1000}},
			{[8]int64{10, math.MaxInt64, 0, 10, 10, 20, 0, 10}, kernels.SplitsError{Peer: 1, Send: true, Bytes: math.MaxInt64, Offset: 10, Limit: 1000}},
		} {
			world(t, 2, 64<<20, func(r *worldtest.Rank) {
				x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: time.Minute})
				r.Must(err)
				b, err := r.Heap.Alloc(4 << 10)
				r.Must(err)
				good := [8]int64{20, 10, 0, 20, 20, 10, 0, 20}
				table := good
				if r.Rank() == 0 {
					good, table = [8]int64{10, 20, 0, 10, 10, 20, 0, 10}, bad.table
				}
				s, err := r.Device.NewStream()
				r.Must(err)
				all, live := b.View(), b.View().Slice(2048, 64)
				r.Must(memory.Copy(s, all, memory.Host(slices.Repeat([]byte{0xa5}, 4096))))
				r.Must(memory.Copy(s, live, memory.Host(shm.Bytes(table[:]))))
				r.Must(s.Synchronize())
				one := &alltoallv.Splits{Live: live}
				err = x.Exchange(nil, all.Slice(0, 1000), all.Slice(1024, 1000), one)
				var got *kernels.SplitsError
				if !errors.As(err, &got) {
					r.Must(fmt.Errorf("%+v: got %v", bad.table, err))
				}
				want := bad.want
				want.Epoch = 1
				require.Equal(r.T, want, *got)
				after := make([]byte, 1000)
				if r.Rank() == 0 {
					r.Must(memory.Copy(s, memory.Host(after), all.Slice(0, 1000)))
					r.Must(s.Synchronize())
					r.Must(differ(after, slices.Repeat([]byte{0xa5}, 1000)))
				}
				r.Must(memory.Copy(s, live, memory.Host(shm.Bytes(good[:]))))
				r.Must(memory.Copy(s, all.Slice(1024, 1000), memory.Host(slices.Repeat([]byte{byte(r.Rank())}, 1000))))
				r.Must(s.Synchronize())
				r.Must(x.Exchange(nil, all.Slice(0, 1000), all.Slice(1024, 1000), one))
				r.Must(memory.Copy(s, memory.Host(after), all.Slice(0, 1000)))
				r.Must(s.Synchronize())
				r.Must(differ(after[:30], append(make([]byte, good[4]), slices.Repeat([]byte{1}, int(good[5]))...)))
				r.Must(s.Close())
				r.Must(x.Close(r.Ctx))
			})
		}
	}
	t.Run("host", func(t *testing.T) { run(t, worldtest.Local) })
	t.Run("cuda", func(t *testing.T) { run(t, worldtest.GPUs) })
}
