package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// reductionVariant is one way of a collective on GPUs in one setting.
type reductionVariant struct {
	d         reduction
	algorithm string
	sms       int
	rate      float64
	most      int64 // the largest call, 0 for any
}

// tunedPackets bounds what one rank sends another in packets while they are measured.
const tunedPackets = 4 << 20

// reductionVariants are all settings that are worth knowing.
func reductionVariants(c config, n int) (all []reductionVariant) {
	for _, coll := range []kernels.Collective{kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather} {
		d := reduction{coll: coll, dtype: kernels.BFloat16, op: kernels.Sum, ranks: n}
		whole, parts := int64(tunedPackets), int64(tunedPackets)*int64(n)
		once, other := parts, "two-shot push"
		switch coll {
		case kernels.AllReduce:
			once = whole
			all = append(all, reductionVariant{d: d, algorithm: "two-shot packet", most: parts})
		case kernels.AllGather:
			other = "two-shot pull"
		}
		all = append(all, reductionVariant{d: d, algorithm: "one-shot packet", most: once})
		for _, sms := range c.EachSMs {
			for _, rate := range c.TuneRates {
				all = append(all, reductionVariant{d: d, algorithm: "two-shot", sms: sms, rate: rate}, reductionVariant{d: d, algorithm: other, sms: sms, rate: rate})
			}
		}
	}
	return all
}

// table leaves nothing to choose but the variant: all else takes very long.
func (v *reductionVariant) table() *allreduce.Table {
	t := &allreduce.Table{Device: "cuda"}
	add := func(coll kernels.Collective, algorithm string, sms int, rate, us float64) {
		t.Curves = append(t.Curves, allreduce.Curve{
			Collective: coll.String(), Algorithm: algorithm, Ranks: v.d.ranks, SMs: sms, Rate: rate, Bytes: []int64{1}, Microseconds: []float64{us},
		})
	}
	for _, coll := range []kernels.Collective{kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather} {
		if coll != v.d.coll || v.algorithm != "two-shot" {
			add(coll, "two-shot", 1, 0, 1e12)
		}
	}
	add(v.d.coll, v.algorithm, v.sms, v.rate, 1)
	return t
}

// tuneReductions times one call at a time, out of place in the symmetric heap.
func tuneReductions(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	most := slices.Max(c.Sizes)
	r, err := newReduceRig(ctx, g, c, most, most)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	for _, v := range reductionVariants(c, g.Size()) {
		got, err := v.measure(ctx, g, c, r)
		if err != nil {
			return nil, fmt.Errorf("%v, %s on %d multiprocessors at %v GB/s: %w", v.d, v.algorithm, v.sms, v.rate, err)
		}
		rows = append(rows, got...)
	}
	if g.Rank() != 0 {
		return nil, nil
	}
	return rows, nil
}

func (v *reductionVariant) measure(ctx context.Context, g *comm.Group, c config, r reduceRig) (rows []row, err error) {
	o := allreduce.Options{Table: v.table(), MaxSMs: max(v.sms, 96), OneShotBytes: -1}
	if v.most > 0 {
		o.MaxSMs, o.OneShotBytes = 0, tunedPackets
	}
	x, err := allreduce.New(ctx, r.heap(), o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.Close(ctx)) }()
	whole := int64(g.Size()) * v.d.dtype.Size()
	for _, size := range c.Sizes {
		if v.most > 0 && size > v.most {
			continue
		}
		us, err := r.reduce(ctx, x, v.d, size/whole*whole)
		if err != nil {
			return nil, fmt.Errorf("%d bytes: %w", size, err)
		}
		rows = append(rows, row{Op: c.Op, Ranks: v.d.ranks, Procs: c.Procs, Device: c.Device, Splits: v.d.String(), Collective: v.d.coll.String(), Algorithm: v.algorithm,
			SMs: v.sms, Rate: v.rate, BytesPerRank: size, GBpsLink: v.d.linkBytes(size) / median(us) / 1e3, Checked: true}.timed(us))
	}
	return rows, nil
}

// reductionTable makes curves of rows.
func reductionTable(rows []row, origin string) *allreduce.Table {
	t := &allreduce.Table{Origin: origin, Device: rows[0].Device}
	for _, r := range rows {
		i := slices.IndexFunc(t.Curves, func(c allreduce.Curve) bool {
			return c.Collective == r.Collective && c.Algorithm == r.Algorithm && c.Ranks == r.Ranks && c.SMs == r.SMs && c.Rate == r.Rate
		})
		if i < 0 {
			i = len(t.Curves)
			t.Curves = append(t.Curves, allreduce.Curve{Collective: r.Collective, Algorithm: r.Algorithm, Ranks: r.Ranks, SMs: r.SMs, Rate: r.Rate})
		}
		t.Curves[i].Bytes = append(t.Curves[i].Bytes, r.BytesPerRank)
		t.Curves[i].Microseconds = append(t.Curves[i].Microseconds, hundredths(r.US))
	}
	return t
}
