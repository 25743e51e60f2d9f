package model

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/examples/moe/nn"
	"github.com/switchyard-moe/switchyard/memory"
)

// Carrier is what a model needs whose dispatcher is on a GPU: the arithmetic of these examples is on the host, so what layers send and get is
// copied. Such a model is not trained. Views are memory of the GPU, and hold what as many tokens have as the dispatcher takes.
type Carrier struct {
	Stream  device.Stream
	X       memory.View // [tokens, Hidden]; then the sums of what experts made
	Chosen  memory.View // [tokens, TopK], int32
	Weights memory.View // [tokens, TopK]

	rows, made []float32 // on the host: what experts get and make
}

// Carry has the calls of all layers made by a carrier.
func (m *Model) Carry(c *Carrier) {
	for _, l := range m.Layers {
		l.carrier = c
	}
}

// dispatch sends tokens of the host.
func (c *Carrier) dispatch(d *dispatch.Dispatcher, t dispatch.Tokens) (*dispatch.Handle, error) {
	for _, v := range []struct{ to, from *memory.View }{{&c.X, &t.X}, {&c.Chosen, &t.Experts}, {&c.Weights, &t.Weights}} {
		to := v.to.Slice(0, v.from.Len())
		if err := memory.Copy(c.Stream, to, *v.from); err != nil {
			return nil, err
		}
		*v.from = to
	}
	return d.Dispatch(c.Stream, t)
}

// land copies rows that have come to the host, and returns them with room for what experts make of them.
func (c *Carrier) land(rows memory.View) (came, made memory.View, err error) {
	n := int(rows.Len() / 4)
	c.rows, c.made = nn.Grow(c.rows, n), nn.Grow(c.made, n)
	came, made = memory.Wrap(c.rows), memory.Wrap(c.made)
	return came, made, memory.Copy(c.Stream, came, rows)
}

// combine brings the sums of what experts made to y, through the rows of the heap.
func (c *Carrier) combine(d *dispatch.Dispatcher, y []float32, rows memory.View, h *dispatch.Handle) error {
	made, to := memory.Wrap(c.made), memory.Wrap(y)
	if err := memory.Copy(c.Stream, rows.Slice(0, made.Len()), made); err != nil {
		return err
	}
	sums := c.X.Slice(0, to.Len())
	if err := d.Combine(c.Stream, sums, rows, h, dispatch.CombineOptions{}); err != nil {
		return err
	}
	err := errors.Join(memory.Copy(c.Stream, to, sums), c.Stream.Synchronize(), d.Fault())
	if err != nil {
		return fmt.Errorf("on %v: %w", c.Stream.Device(), err)
	}
	return nil
}
