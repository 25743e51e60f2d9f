package alltoallv

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
	"github.com/switchyard-moe/switchyard/memory"
)

// carrier is a device's engine as an Exchanger uses it.
type carrier interface {
	// open allocates the control block of the communicator with zero control words. neighbours is how many ranks are on
	// this rank's device, itself counted.
	open(h *memory.Heap, c *kernels.Channels, o *Options, neighbours int) (*memory.Buffer, error)
	// met comes when all ranks have opened. pulls says that this rank can read large messages in their senders' memory,
	// err of whom it cannot.
	met(c *kernels.Channels) (pulls bool, err error)
	// launch enqueues o on s; with a nil stream it has run when launch returns. done says that o is not used any more.
	// After an error it was not enqueued, or has failed.
	launch(s device.Stream, o *op) (done bool, err error)
	// fault is what launches that were done before they had run have come to.
	fault() error
	// drain returns when everything that was launched has run; the last of it was on the stream last, nil if on none.
	drain(last device.Stream) error
	// close releases the engine. Nothing runs any more.
	close() error
}

func newCarrier(d device.Device) (carrier, error) {
	switch d := d.(type) {
	case *device.HostDevice:
		return &hostCarrier{}, nil
	case *device.CUDADevice:
		return &cudaCarrier{dev: d}, nil
	default:
		return nil, invalid("no engine for %v", d)
	}
}

// hostCarrier runs kernels in Go.
type hostCarrier struct {
	heap   *memory.Heap
	engine *host.Engine
}

func (k *hostCarrier) open(h *memory.Heap, c *kernels.Channels, _ *Options, _ int) (*memory.Buffer, error) {
	b, err := allocate(h, c.Bytes())
	if err != nil {
		return nil, err
	}
	c.Offset = b.Offset()
	clear(b.Bytes()[:c.ControlBytes()])
	k.heap, k.engine = h, host.New(h.Space(), h.Group().Err)
	k.engine.Show(c)
	return b, nil
}

func (k *hostCarrier) met(c *kernels.Channels) (pulls bool, err error) {
	err = k.engine.Look(c)
	return err == nil, err
}

func allocate(h *memory.Heap, n int64) (*memory.Buffer, error) {
	b, err := h.Alloc(n)
	if err != nil {
		return nil, fmt.Errorf("alltoallv: %d bytes for channels and staging: %w", n, err)
	}
	return b, nil
}

func (k *hostCarrier) launch(s device.Stream, o *op) (done bool, err error) {
	o.args.Src, o.args.Dst, o.args.Splits = o.src.Bytes(), o.dst.Bytes(), o.live.Bytes()
	o.args.SrcOffset, _ = o.src.Symmetric(k.heap)
	err = k.engine.AllToAllV(s, &o.args)
	return s == nil || err != nil, err
}

func (*hostCarrier) fault() error { return nil }

func (*hostCarrier) drain(last device.Stream) error { return device.Follow(nil, last) }

func (*hostCarrier) close() error { return nil }
