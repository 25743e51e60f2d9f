package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/memory"
)

// patternPeriod is how many bytes a message's pattern takes to come again.
const patternPeriod = 64 << 10

// pattern fills the message from src to dst.
func pattern(b []byte, src, dst int) {
	n := min(len(b), patternPeriod)
	for i := range n {
		b[i] = byte(src*31 + dst*7 + i + i>>8)
	}
	for n > 0 && n < len(b) {
		n += copy(b[n:], b[:n])
	}
}

// patternHolds checks every byte of the message from src to dst.
func patternHolds(b []byte, src, dst int) error {
	want := make([]byte, min(len(b), patternPeriod))
	pattern(want, src, dst)
	for at := 0; at < len(b); at += patternPeriod {
		got := b[at:min(at+patternPeriod, len(b))]
		if bytes.Equal(got, want[:len(got)]) {
			continue
		}
		for i := range got {
			if got[i] != want[i] {
				return fmt.Errorf("byte %d of %d from rank %d is %#x, want %#x", at+i, len(b), src, got[i], want[i])
			}
		}
	}
	return nil
}

// timer collects one rank's times of one size and merges them to the slowest rank's.
type timer struct{ us []float64 }

func (t *timer) merge(ctx context.Context, g *comm.Group) ([]float64, error) {
	all, err := g.AllGather(ctx, shm.Bytes(t.us))
	if err != nil {
		return nil, err
	}
	slowest := append([]float64(nil), t.us...)
	for _, b := range all {
		theirs := make([]float64, len(slowest))
		copy(shm.Bytes(theirs), b)
		for i, us := range theirs {
			slowest[i] = max(slowest[i], us)
		}
	}
	return slowest, nil
}

// iterations of a size, and how many go before them uncounted.
func (c config) iterations(size int64) (warm, timed int) {
	if c.Iters > 0 {
		return 5, c.Iters
	}
	if size <= 1<<20 {
		return 20, 300
	}
	return 5, 30
}

// settle is how long the ranks meet before anything is timed, so that the system has spread them over the cores.
const settle = 300 * time.Millisecond

// newFence makes the Exchanger whose barriers the timed calls begin from.
func newFence(ctx context.Context, h *memory.Heap) (*alltoallv.Exchanger, error) {
	x, err := alltoallv.New(ctx, h, alltoallv.Options{EagerBytes: -1, SlotBytes: 4096})
	if err != nil {
		return nil, err
	}
	// All ranks have to meet equally often: rank 0 tells when it is enough.
	enough := make([]int64, h.Group().Size())
	seen := make([]int64, len(enough))
	for start := time.Now(); seen[0] == 0; {
		if h.Group().Rank() == 0 && time.Since(start) > settle {
			for k := range enough {
				enough[k] = 1
			}
		}
		if err := x.Counts(nil, enough, seen); err != nil {
			return nil, err
		}
	}
	return x, nil
}

// rig is one rank's heap and buffers on some device, and how exchanges are timed there.
type rig interface {
	heap() *memory.Heap
	// load fills the source for the exchange of a matrix of bytes.
	load(m [][]int64) error
	// time runs that exchange, checks every byte of the output and returns the slowest rank's microseconds a call. staged
	// puts the output outside the heap. m is of about size bytes a rank.
	time(ctx context.Context, x *alltoallv.Exchanger, staged bool, size int64) ([]float64, error)
	close(ctx context.Context) error
}

// newRig makes buffers for the largest of some matrices, and room for the control blocks of exchangers.
func newRig(ctx context.Context, g *comm.Group, c config, matrices [][][]int64, exchangers int) (rig, error) {
	var send, recv int64
	for _, m := range matrices {
		for r := range m {
			send, recv = max(send, sum(m[r])), max(recv, columnSum(m, r))
		}
	}
	if c.Device == "cuda" {
		return newCUDARig(ctx, g, c, send, recv, int64(exchangers)*cudaControl)
	}
	return newHostRig(ctx, g, c, send, recv, int64(exchangers)*hostControl)
}

// How much heap an exchanger and what goes with it may take.
const (
	hostControl = 128 << 20
	cudaControl = 512 << 20
)

func matricesOf(c config, n int) ([][][]int64, error) {
	var all [][][]int64
	for _, size := range c.Sizes {
		m, err := splitMatrix(c.Splits, n, size)
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

// splitsOf is rank me's part of a matrix, packed.
func splitsOf(m [][]int64, me int) *alltoallv.Splits {
	sp := &alltoallv.Splits{Send: m[me]}
	for p := range m {
		sp.Recv = append(sp.Recv, m[p][me])
		sp.PeerDispls = append(sp.PeerDispls, before(m, p, me))
	}
	return sp
}

// checkOutput looks at every byte of what rank me has received.
func checkOutput(got []byte, sp *alltoallv.Splits, me int) error {
	var at int64
	for p, k := range sp.Recv {
		if err := patternHolds(got[at:at+k], p, me); err != nil {
			return err
		}
		at += k
	}
	return nil
}

func fillSource(b []byte, sp *alltoallv.Splits, me int) {
	var at int64
	for p, k := range sp.Send {
		pattern(b[at:at+k], me, p)
		at += k
	}
}

func benchAllToAllV(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	matrices, err := matricesOf(c, g.Size())
	if err != nil {
		return nil, err
	}
	r, err := newRig(ctx, g, c, matrices, 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	o := alltoallv.Options{Algorithm: c.Algorithm, EagerBytes: c.Eager, PacketBytes: c.Packet, MaxSMs: c.SMs, NoSMs: c.NoSMs}
	if c.Table != "" {
		if o.Table, err = alltoallv.LoadTable(c.Table); err != nil {
			return nil, err
		}
	}
	x, err := alltoallv.New(ctx, r.heap(), o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.Close(ctx)) }()
	label := c.Splits
	if c.Staged {
		label += ", staged"
	}
	for i, m := range matrices {
		if err := r.load(m); err != nil {
			return nil, err
		}
		us, err := r.time(ctx, x, c.Staged, c.Sizes[i])
		if err != nil {
			return nil, fmt.Errorf("%s, %d bytes: %w", label, c.Sizes[i], err)
		}
		if g.Rank() != 0 {
			continue
		}
		d, err := x.Explain(splitsOf(m, 0), !c.Staged)
		if err != nil {
			return nil, err
		}
		rows = append(rows, newRow(c, g.Size(), label, m, us, d.Algorithm, c.Sizes[i]))
	}
	return rows, nil
}

func newRow(c config, n int, label string, m [][]int64, us []float64, algorithm string, size int64) row {
	return row{Op: c.Op, Ranks: n, Procs: c.Procs, Device: c.Device, Splits: label, Algorithm: algorithm, BytesPerRank: size,
		GBpsLink: float64(busiest(m)) / median(us) / 1e3, Checked: true}.timed(us)
}

// hostRig times calls one by one, each from a barrier on.
type hostRig struct {
	c        config
	h        *memory.Heap
	fence    *alltoallv.Exchanger
	src, dst *memory.Buffer
	foreign  []byte
	splits   *alltoallv.Splits
}

func newHostRig(ctx context.Context, g *comm.Group, c config, send, recv, control int64) (*hostRig, error) {
	h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: send + recv + control + 256<<20})
	if err != nil {
		return nil, err
	}
	r := &hostRig{c: c, h: h}
	if r.fence, err = newFence(ctx, h); err == nil {
		r.src, err = h.Alloc(send)
	}
	if err == nil {
		r.dst, err = h.Alloc(recv)
	}
	if err != nil {
		return nil, errors.Join(err, h.Close(ctx))
	}
	return r, nil
}

func (r *hostRig) heap() *memory.Heap { return r.h }

func (r *hostRig) load(m [][]int64) error {
	me := r.h.Group().Rank()
	r.splits = splitsOf(m, me)
	fillSource(r.src.Bytes(), r.splits, me)
	return nil
}

func (r *hostRig) time(ctx context.Context, x *alltoallv.Exchanger, staged bool, size int64) ([]float64, error) {
	src, dst := r.src.View().Slice(0, sum(r.splits.Send)), r.dst.View()
	if staged {
		if r.foreign == nil {
			r.foreign = make([]byte, r.dst.Len())
		}
		dst = memory.Host(r.foreign)
	}
	dst = dst.Slice(0, sum(r.splits.Recv))
	for i, out := 0, dst.Bytes(); i < len(out); i++ {
		out[i] = 0xff
	}
	var t timer
	warm, timed := r.c.iterations(size)
	for i := -warm; i < timed; i++ {
		if err := r.fence.Barrier(nil); err != nil {
			return nil, err
		}
		start := time.Now()
		if err := x.Exchange(nil, dst, src, r.splits); err != nil {
			return nil, err
		}
		if i >= 0 {
			t.us = append(t.us, float64(time.Since(start).Nanoseconds())/1e3)
		}
	}
	if err := checkOutput(dst.Bytes(), r.splits, r.h.Group().Rank()); err != nil {
		return nil, err
	}
	return t.merge(ctx, r.h.Group())
}

func (r *hostRig) close(ctx context.Context) error {
	return errors.Join(r.fence.Close(ctx), r.h.Close(ctx))
}
