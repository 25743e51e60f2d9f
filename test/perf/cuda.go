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
	"github.com/switchyard-moe/switchyard/memory"
)

// callsPerGraph is how many exchanges one graph holds.
const callsPerGraph = 20

// benchAllToAllVCUDA times exchanges on GPUs, one a rank while there are enough. A sample is many calls back to back, from
// a barrier to the end of the stream, divided by their number: replays of a graph that holds callsPerGraph of them, or
// calls from Go with -eager-launch.
func benchAllToAllVCUDA(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	n, me := g.Size(), g.Rank()
	gpus, err := device.CUDACount()
	if err != nil {
		return nil, err
	}
	dev, err := device.CUDA(me % gpus)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	var largest int64
	for _, s := range c.Sizes {
		largest = max(largest, s)
	}
	h, err := memory.NewHeap(ctx, g, dev, memory.Options{SegmentBytes: (2+int64(n))*largest + 512<<20})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close(ctx)) }()
	x, err := alltoallv.New(ctx, h, alltoallv.Options{Algorithm: c.Algorithm, MaxSMs: c.MaxSMs})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.Close(ctx)) }()
	s, err := dev.NewStream()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()

	for _, size := range c.Sizes {
		m, err := splitMatrix(c.Splits, n, size)
		if err != nil {
			return nil, err
		}
		r, err := timeCUDA(ctx, g, c, x, h, s.(*device.CUDAStream), m)
		if err != nil {
			return nil, fmt.Errorf("%s, %d bytes: %w", c.Splits, size, err)
		}
		if me == 0 {
			r.BytesPerRank = size
			rows = append(rows, r)
		}
	}
	return rows, nil
}

// before is what ranks below me send to rank p: where my part begins in its packed output.
func before(m [][]int64, p, me int) (at int64) {
	for q := range me {
		at += m[q][p]
	}
	return at
}

func timeCUDA(ctx context.Context, g *comm.Group, c config, x *alltoallv.Exchanger, h *memory.Heap, s *device.CUDAStream, m [][]int64) (_ row, err error) {
	n, me := g.Size(), g.Rank()
	sp := &alltoallv.Splits{Send: m[me]}
	var most, cross, busiest int64
	for p := range n {
		sp.Recv = append(sp.Recv, m[p][me])
		var column int64
		for q := range n {
			column += m[q][p]
		}
		most = max(most, column)
		sp.PeerDispls = append(sp.PeerDispls, before(m, p, me))
		cross = max(cross, sum(m[p])-m[p][p])
		busiest = max(busiest, column-m[p][p])
	}
	src, err := h.Alloc(sum(sp.Send))
	if err != nil {
		return row{}, err
	}
	dst, err := h.Alloc(most)
	if err != nil {
		return row{}, err
	}
	defer func() { err = errors.Join(err, src.Free(), dst.Free()) }()
	out := dst.View().Slice(0, sum(sp.Recv))
	var in []byte
	for p, k := range sp.Send {
		part := make([]byte, k)
		pattern(part, me, p)
		in = append(in, part...)
	}
	if err := errors.Join(memory.Copy(s, src.View(), memory.Host(in)), memory.Copy(s, out, memory.Host(bytes.Repeat([]byte{0xff}, int(out.Len()))))); err != nil {
		return row{}, err
	}
	exchange := func() error { return x.Exchange(s, out, src.View(), sp) }
	calls, one := callsPerGraph, func() error {
		for range callsPerGraph {
			if err := exchange(); err != nil {
				return err
			}
		}
		return nil
	}
	if err := g.Barrier(ctx); err != nil {
		return row{}, err
	}
	if err := errors.Join(exchange(), s.Synchronize(), x.Fault()); err != nil {
		return row{}, err
	}
	if !c.EagerLaunch {
		graph, err := s.Capture(one)
		if err != nil {
			return row{}, err
		}
		defer graph.Close()
		one = func() error { return graph.Launch(s) }
	}
	var t timer
	samples, repeats := 15, 10
	if most > 64<<20 {
		samples, repeats = 8, 1
	}
	for i := -2; i < samples; i++ {
		if err := g.Barrier(ctx); err != nil {
			return row{}, err
		}
		start := time.Now()
		for range repeats {
			if err := one(); err != nil {
				return row{}, err
			}
		}
		if err := s.Synchronize(); err != nil {
			return row{}, err
		}
		if i >= 0 {
			t.us = append(t.us, float64(time.Since(start).Nanoseconds())/1e3/float64(repeats*calls))
		}
	}
	if err := x.Fault(); err != nil {
		return row{}, err
	}
	got := make([]byte, out.Len())
	if err := memory.Copy(s, memory.Host(got), out); err != nil {
		return row{}, err
	}
	var at int64
	for p, k := range sp.Recv {
		if err := patternHolds(got[at:at+k], p, me); err != nil {
			return row{}, err
		}
		at += k
	}
	us, err := t.merge(ctx, g)
	if err != nil || me != 0 {
		return row{}, err
	}
	d, err := x.Explain(sp, true)
	if err != nil {
		return row{}, err
	}
	return row{Op: c.Op, Ranks: n, Procs: c.Procs, Device: "cuda", Splits: c.Splits, Algorithm: d.Algorithm, US: median(us), P10: quantile(us, .1),
		P90: quantile(us, .9), GBpsLink: float64(max(cross, busiest)) / median(us) / 1e3, Checked: true}, nil
}
