package main

import (
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

// splitMatrix is what every rank sends to every rank when each sends about total bytes: in equal parts, or to rank k a
// part proportional to 1/(k+1).
func splitMatrix(kind string, n int, total int64) ([][]int64, error) {
	m := make([][]int64, n)
	harmonic := 0.0
	for k := range n {
		harmonic += 1 / float64(k+1)
	}
	for r := range m {
		m[r] = make([]int64, n)
		for k := range m[r] {
			switch kind {
			case "uniform":
				m[r][k] = total / int64(n)
			case "zipf":
				m[r][k] = int64(float64(total) / harmonic / float64(k+1))
			default:
				return nil, fmt.Errorf("-splits: %q is neither uniform nor zipf", kind)
			}
		}
	}
	return m, nil
}

func sum(v []int64) (s int64) {
	for _, x := range v {
		s += x
	}
	return s
}

// pattern fills or checks the message from src to dst.
func pattern(b []byte, src, dst int) {
	for i := range b {
		b[i] = byte(src*31 + dst*7 + i + i>>8)
	}
}

func patternHolds(b []byte, src, dst int) error {
	for i := range b {
		if want := byte(src*31 + dst*7 + i + i>>8); b[i] != want {
			return fmt.Errorf("byte %d of %d from rank %d is %#x, want %#x", i, len(b), src, b[i], want)
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

// fence is a barrier on the data plane: an exchange of nothing.
type fence struct {
	x      *alltoallv.Exchanger
	splits alltoallv.Splits
}

// settle is how long the ranks meet before anything is timed, so that the system has spread them over the cores.
const settle = 300 * time.Millisecond

func newFence(ctx context.Context, h *memory.Heap) (*fence, error) {
	x, err := alltoallv.New(ctx, h, alltoallv.Options{EagerBytes: -1, SlotBytes: 4096})
	if err != nil {
		return nil, err
	}
	none := make([]int64, h.Group().Size())
	f := &fence{x, alltoallv.Splits{Send: none, Recv: none}}
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
	return f, nil
}

func (f *fence) wait() error { return f.x.Exchange(nil, memory.View{}, memory.View{}, &f.splits) }

func benchAllToAllV(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	if c.Device == "cuda" {
		return benchAllToAllVCUDA(ctx, g, c)
	}
	n, me := g.Size(), g.Rank()
	var largest int64
	for _, s := range c.Sizes {
		largest = max(largest, s)
	}
	h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: 2*largest*int64(n) + 256<<20})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close(ctx)) }()
	x, err := alltoallv.New(ctx, h, alltoallv.Options{Algorithm: c.Algorithm, EagerBytes: c.Eager})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.Close(ctx)) }()
	fence, err := newFence(ctx, h)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fence.x.Close(ctx)) }()

	for _, size := range c.Sizes {
		m, err := splitMatrix(c.Splits, n, size)
		if err != nil {
			return nil, err
		}
		sp := &alltoallv.Splits{Send: m[me]}
		var most int64 // that any rank receives: buffers are symmetric
		for p := range n {
			sp.Recv = append(sp.Recv, m[p][me])
			var col int64
			for q := range n {
				col += m[q][p]
			}
			most = max(most, col)
		}
		srcBuf, err := h.Alloc(sum(sp.Send))
		if err != nil {
			return nil, err
		}
		dstBuf, err := h.Alloc(most)
		if err != nil {
			return nil, err
		}
		src, dst := srcBuf.View().Bytes(), dstBuf.View().Bytes()[:sum(sp.Recv)]
		dstView := dstBuf.View().Slice(0, int64(len(dst)))
		if c.Staged {
			dst = make([]byte, len(dst))
			dstView = memory.Host(dst)
		}
		var at int64
		for p, k := range sp.Send {
			pattern(src[at:at+k], me, p)
			at += k
		}
		for i := range dst {
			dst[i] = 0xff
		}
		var t timer
		warm, timed := c.iterations(size)
		for i := -warm; i < timed; i++ {
			if err := fence.wait(); err != nil {
				return nil, err
			}
			start := time.Now()
			if err := x.Exchange(nil, dstView, srcBuf.View(), sp); err != nil {
				return nil, err
			}
			if i >= 0 {
				t.us = append(t.us, float64(time.Since(start).Nanoseconds())/1e3)
			}
		}
		at = 0
		for p, k := range sp.Recv {
			if err := patternHolds(dst[at:at+k], p, me); err != nil {
				return nil, fmt.Errorf("%s, %d bytes: %w", c.Splits, size, err)
			}
			at += k
		}
		us, err := t.merge(ctx, g)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(srcBuf.Free(), dstBuf.Free()); err != nil {
			return nil, err
		}
		if me != 0 {
			continue
		}
		d, err := x.Explain(sp, !c.Staged)
		if err != nil {
			return nil, err
		}
		var cross int64
		for r := range m {
			cross = max(cross, sum(m[r])-m[r][r])
		}
		rows = append(rows, row{Op: c.Op, Ranks: n, Procs: c.Procs, Device: "host", Splits: c.Splits, Algorithm: d.Algorithm, BytesPerRank: size,
			US: median(us), P10: quantile(us, .1), P90: quantile(us, .9), GBpsLink: float64(cross) / median(us) / 1e3, Checked: true})
	}
	return rows, nil
}
