package alltoallv

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/cuda"
	"github.com/switchyard-moe/switchyard/memory"
)

// cudaCarrier launches kernels on a GPU.
type cudaCarrier struct {
	dev      *device.CUDADevice
	engine   *cuda.Engine
	channels cuda.Channels
	stream   device.Stream // of calls without one
	group    func() error
	exchange cuda.Exchange
	places   []int64
}

func (k *cudaCarrier) open(h *memory.Heap, c *kernels.Channels, o *Options, neighbours int) (_ *memory.Buffer, err error) {
	k.group = h.Group().Err
	k.channels = cuda.Channels{Size: c.Size, Stripes: o.MaxSMs, Slots: c.Slots, SlotBytes: c.SlotBytes, PacketBytes: c.PacketBytes}
	b, err := allocate(h, k.channels.Bytes())
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("alltoallv: %w", err), b.Free()) // New closes the carrier
		}
	}()
	c.Offset, k.channels.Offset = b.Offset(), b.Offset()
	if k.stream, err = k.dev.NewStream(); err != nil {
		return nil, err
	}
	n := k.channels.ControlBytes()
	if err = memory.Copy(k.stream, b.View().Slice(0, n), memory.Host(make([]byte, n))); err != nil {
		return nil, err
	}
	if err = k.stream.Synchronize(); err != nil {
		return nil, err
	}
	if k.engine, err = cuda.New(k.dev.Context(), h.Space()); err != nil {
		return nil, err
	}
	if err = k.engine.ShareDevice(neighbours); err != nil {
		return nil, err
	}
	return b, nil
}

func (*cudaCarrier) met(*kernels.Channels) (bool, error) { return false, nil }

func (k *cudaCarrier) launch(s device.Stream, o *op) (done bool, err error) {
	a := &o.args
	k.exchange = cuda.Exchange{Channels: &k.channels, Routes: a.Routes, Src: o.src.Ptr(), Dst: o.dst.Ptr(), DstOffset: a.DstOffset,
		Splits: o.live.Ptr(), SrcBytes: o.src.Len(), DstBytes: o.dst.Len(), Timeout: a.Timeout, Tuning: tuning(o.plan, a.DstOffset >= 0)}
	if o.plan.chosen[1].Algorithm == (copyEngine{}).Name() && a.DstOffset >= 0 && o.plan.places != nil {
		k.places = k.places[:0]
		for _, at := range o.plan.places {
			k.places = append(k.places, a.DstOffset+at)
		}
		k.exchange.Places = k.places
	}
	on := s
	if s == nil {
		on = k.stream
	}
	if err := k.engine.AllToAllV(on.Handle(), &k.exchange); err != nil {
		return true, err
	}
	if s != nil {
		return true, nil
	}
	if err := k.stream.Synchronize(); err != nil {
		return true, err
	}
	return true, k.fault()
}

// tuning is how the CUDA kernel does what the chosen algorithm says.
func tuning(p *plan, inPlace bool) cuda.Tuning {
	d, r := &p.chosen[0], &p.routes[0]
	if inPlace {
		d, r = &p.chosen[1], &p.routes[1]
	}
	return cuda.Tuning{Blocks: d.SMs, Staged: r.Staged, Mesh: r.Window > 1, Rate: d.Rate, Apart: d.CopySMs > 0}
}

// fault is what kernels have written down since, with the group's reason where they were told to give up.
func (k *cudaCarrier) fault() error {
	err := k.engine.Err()
	if err == nil {
		return nil
	}
	var mismatch *kernels.CountMismatchError
	if errors.As(err, &mismatch) {
		// The next call may be on any stream, so what clears the record of this one must be over by then.
		return errors.Join(err, k.engine.ClearMismatch(k.stream.Handle(), &k.channels), k.stream.Synchronize())
	}
	if why := k.group(); why != nil {
		return fmt.Errorf("%w: %w", err, why)
	}
	return err
}

func (k *cudaCarrier) drain(device.Stream) error { return k.dev.Context().Synchronize() }

func (k *cudaCarrier) close() error {
	var err error
	if k.engine != nil {
		err = k.engine.Close()
	}
	if k.stream != nil {
		err = errors.Join(err, k.stream.Close())
	}
	return err
}
