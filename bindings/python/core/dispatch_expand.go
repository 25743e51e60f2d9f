package core

import (
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
)

// ExpandCall makes of rows one for each token rows one for each choice, as C callers describe it; see dispatch.Expansion.
type ExpandCall struct {
	Indices, Counts, Slots, Rooms, Rows, ToRows, Scales, ToScales, Weights, ToWeights Buffer
	Align, Length                                                                     int64
}

// FoldCall sums such rows for each token, as C callers describe it; see dispatch.Folding. Type is a kernels.DType.
type FoldCall struct {
	Rows, Slots, Sums, Weights, ToWeights Buffer
	Type                                  int64
}

// Expand makes a call.
func (d *Dispatcher) Expand(stream uintptr, c *ExpandCall) error {
	v, err := d.views(&c.Indices, &c.Counts, &c.Slots, &c.Rooms, &c.Rows, &c.ToRows, &c.Scales, &c.ToScales, &c.Weights, &c.ToWeights)
	if err != nil {
		return err
	}
	return d.atOnce(stream, func(s device.Stream) error {
		return d.inner.Expand(s, dispatch.Expansion{
			Indices: v[0], Counts: v[1], Slots: v[2], Rooms: v[3], Rows: v[4], ToRows: v[5], Scales: v[6], ToScales: v[7], Weights: v[8], ToWeights: v[9],
			Align: int(c.Align), Length: int(c.Length),
		})
	})
}

// Fold makes a call.
func (d *Dispatcher) Fold(stream uintptr, c *FoldCall) error {
	kind, err := Numbered[kernels.DType]("Type", c.Type)
	if err != nil {
		return err
	}
	v, err := d.views(&c.Rows, &c.Slots, &c.Sums, &c.Weights, &c.ToWeights)
	if err != nil {
		return err
	}
	return d.atOnce(stream, func(s device.Stream) error {
		return d.inner.Fold(s, dispatch.Folding{Rows: v[0], Slots: v[1], Sums: v[2], Weights: v[3], ToWeights: v[4], Type: kind})
	})
}
