package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/memory"
)

// benchDispatch times Dispatch followed by Combine, with experts that do nothing, so that every token comes back as its
// own multiple. Beside it stands the time of copying the bytes that had to move, once, with copy, by the same ranks at
// the same time.
func benchDispatch(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	n, me := g.Size(), g.Rank()
	h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: 1 << 30})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close(ctx)) }()
	d, err := dispatch.New(ctx, h, dispatch.Options{Experts: c.Experts, TopK: c.TopK, Hidden: c.Hidden, MaxTokens: c.Tokens, Handles: 1})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close(ctx)) }()
	fence, err := newFence(ctx, h)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fence.x.Close(ctx)) }()

	rnd := rand.New(rand.NewPCG(1, uint64(me)))
	x, y := make([]float32, c.Tokens*c.Hidden), make([]float32, c.Tokens*c.Hidden)
	for i := range x {
		x[i] = rnd.Float32() - 0.5
	}
	idx, weights := make([]int32, c.Tokens*c.TopK), make([]float32, c.Tokens*c.TopK)
	for t := range c.Tokens {
		for k, e := range rnd.Perm(c.Experts)[:c.TopK] {
			idx[t*c.TopK+k], weights[t*c.TopK+k] = int32(e), float32(k+1)/8
		}
	}
	weight := float32(0) // of a token's experts together
	for k := range c.TopK {
		weight += weights[k]
	}
	tokens := dispatch.Tokens{X: memory.Host(shm.Bytes(x)), Experts: memory.Host(shm.Bytes(idx)), Weights: memory.Host(shm.Bytes(weights))}
	one := func() error {
		hd, err := d.Dispatch(nil, tokens)
		if err != nil {
			return err
		}
		defer hd.Release()
		return d.Combine(nil, memory.Host(shm.Bytes(y)), hd.Rows(), hd, dispatch.CombineOptions{})
	}
	before := d.Counters().Bytes
	if err := one(); err != nil {
		return nil, err
	}
	var moved, link int64
	for p, after := range d.Counters().Bytes {
		moved += after - before[p]
		if p != me {
			link += after - before[p]
		}
	}
	from, to := make([]byte, moved), make([]byte, moved)
	for i := range from {
		from[i] = byte(i)
	}
	copy(to, from)
	var calls, copies timer
	warm, timed := 3, 30
	if c.Iters > 0 {
		timed = c.Iters
	}
	for i := -warm; i < timed; i++ {
		for _, part := range []struct {
			t *timer
			f func() error
		}{{&calls, one}, {&copies, func() error { copy(to, from); return nil }}} {
			if err := fence.wait(); err != nil {
				return nil, err
			}
			start := time.Now()
			if err := part.f(); err != nil {
				return nil, err
			}
			if i >= 0 {
				part.t.us = append(part.t.us, float64(time.Since(start).Nanoseconds())/1e3)
			}
		}
	}
	for i := range y {
		if want := x[i] * weight; y[i] < want-1e-5 || y[i] > want+1e-5 {
			return nil, fmt.Errorf("dispatch: element %d of token %d is %v, want %v", i%c.Hidden, i/c.Hidden, y[i], want)
		}
	}
	us, err := calls.merge(ctx, g)
	if err != nil {
		return nil, err
	}
	copyUS, err := copies.merge(ctx, g)
	if err != nil || me != 0 {
		return nil, err
	}
	plain := median(copyUS)
	return []row{{Op: c.Op, Ranks: n, Procs: c.Procs, Device: "host", Splits: fmt.Sprintf("top-%d of %d", c.TopK, c.Experts), Algorithm: "direct",
		BytesPerRank: moved, US: median(us), P10: quantile(us, .1), P90: quantile(us, .9), GBpsLink: float64(link) / median(us) / 1e3,
		Checked: true, CopyUS: &plain}}, nil
}
