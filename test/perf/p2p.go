package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// benchP2P sends messages of each size to and fro between two ranks, out of and into Go memory, and counts half of the time of a turn.
func benchP2P(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	if g.Size() != 2 || c.Device != "host" {
		return nil, fmt.Errorf("p2p: %d ranks on %s, want 2 on the host", g.Size(), c.Device)
	}
	h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: 16 << 20})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close(ctx)) }()
	x, err := p2p.New(ctx, h, p2p.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.Close(ctx)) }()
	for _, n := range c.Sizes {
		us, err := toAndFro(x, g, n, c)
		if err != nil {
			return nil, fmt.Errorf("p2p: %d bytes: %w", n, err)
		}
		r := row{Op: "p2p", Ranks: 2, Procs: c.Procs, Device: c.Device, Splits: "Go memory", Algorithm: "send, recv", BytesPerRank: n, Checked: true}.timed(us)
		r.GBpsLink = float64(n) / 1e3 / r.US
		rows = append(rows, r)
	}
	return rows, nil
}

// toAndFro is the time of one way, in us, of each turn. Every byte of the first and the last turn is checked.
func toAndFro(x *p2p.Endpoint, g *comm.Group, n int64, c config) (us []float64, err error) {
	warm, turns := c.iterations(n)
	me, peer := g.Rank(), 1-g.Rank()
	b, got := make([]byte, n), make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + me + 1)
	}
	send := func() error { return x.Send(nil, peer, 1, memory.Host(b)) }
	recv := func() error { return x.Recv(nil, peer, 1, memory.Host(got)) }
	first, second := send, recv
	if me == 1 {
		first, second = recv, send
	}
	for turn := range warm + turns {
		start := time.Now()
		if err := first(); err != nil {
			return nil, err
		}
		if err := second(); err != nil {
			return nil, err
		}
		if turn >= warm {
			us = append(us, float64(time.Since(start).Nanoseconds())/2e3)
		}
		if turn == 0 || turn == warm+turns-1 {
			for i, v := range got {
				if v != byte(i*7+peer+1) {
					return nil, fmt.Errorf("byte %d is %d", i, v)
				}
			}
			clear(got)
		}
	}
	return us, nil
}
