package core

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// moeRig makes calls of a dispatcher as callers do, on the host or on a GPU.
type moeRig struct {
	c      *Comm
	d      *Dispatcher
	stream *device.CUDAStream // nil on the host
	room   Buffer             // on the GPU, taken at first: a driver that allocates can wait for kernels, which wait for ranks
	named  []*Handle
}

const moeHidden = 16

func newMoERig(c *Comm, g *GPU, o dispatch.Options) (*moeRig, error) {
	r := &moeRig{c: c}
	place := Place(c)
	if g != nil {
		s, err := g.dev.NewStream()
		if err != nil {
			return nil, err
		}
		place, r.stream = g, s.(*device.CUDAStream)
		r.room.Bytes = 1 << 20
		if r.room.Addr, err = g.dev.Context().MemAlloc(r.room.Bytes); err != nil {
			return nil, err
		}
	}
	ticket, err := place.NewDispatcher(DispatcherOptions{Options: o}, func(d *Dispatcher) uint64 { r.d = d; return 1 })
	_, err = await(c, ticket, err)
	return r, err
}

func (r *moeRig) put(h *Handle) uint64 { r.named = append(r.named, h); return uint64(len(r.named)) }

// memory is where calls find what is in v: there, or on the GPU.
func (r *moeRig) memory(v []float32) (Buffer, error) {
	b := buf(v)
	if r.stream == nil || b.Bytes == 0 {
		return b, nil
	}
	at := Buffer{r.room.Addr, b.Bytes}
	r.room.Addr += uintptr(kernels.AlignUp(b.Bytes, 256))
	return at, memory.Copy(r.stream, memory.Device(at.Addr, at.Bytes), memory.Host(shm.Bytes(v)))
}

// back copies what is in a Buffer of memory into v.
func (r *moeRig) back(v []float32, b Buffer) error {
	if r.stream == nil || b.Bytes == 0 {
		return nil
	}
	return errors.Join(memory.Copy(r.stream, memory.Host(shm.Bytes(v)), memory.Device(b.Addr, b.Bytes)), r.stream.Synchronize())
}

func (r *moeRig) handle() uintptr {
	if r.stream == nil {
		return 0
	}
	return r.stream.Handle()
}

// dispatch sends tokens that are all x to the experts of idx.
func (r *moeRig) dispatch(x float32, idx []int32, half Half) (*Handle, error) {
	tokens, err := r.memory(slices.Repeat([]float32{x}, len(idx)*moeHidden))
	if err != nil {
		return nil, err
	}
	experts, err := r.memory(shm.View[float32](shm.Bytes(idx)))
	if err != nil {
		return nil, err
	}
	call := DispatchCall{X: tokens, Experts: experts, Half: half}
	name, err := r.wait(r.d.Dispatch(r.handle(), &call, nil, false, r.put))
	if err != nil {
		return nil, err
	}
	if r.stream != nil {
		name = int64(call.Made)
	}
	h := r.named[name-1]
	if at := h.Output()[0].Addr; r.stream != nil && call.Rows != at {
		return nil, fmt.Errorf("rows at %#x, told %#x", at, call.Rows)
	}
	return h, nil
}

func (r *moeRig) wait(t Ticket, err error) (int64, error) {
	if r.stream != nil {
		return 0, err
	}
	return await(r.c, t, err)
}

// combine brings the rows of h back and checks that n tokens are want.
func (r *moeRig) combine(h *Handle, n int, want float32, o CombineCall) error {
	y := make([]float32, n*moeHidden)
	b, err := r.memory(y)
	if err != nil {
		return err
	}
	o.Y, o.Rows = b, h.Output()[0]
	if _, err := r.wait(r.d.Combine(r.handle(), &o, h, nil)); err != nil {
		return err
	}
	if o.Half == First {
		if _, err := r.wait(r.d.Receive(r.handle(), h, true)); err != nil {
			return err
		}
	}
	if err := r.back(y, b); err != nil {
		return err
	}
	if i := slices.IndexFunc(y, func(v float32) bool { return v != want }); i >= 0 {
		return fmt.Errorf("element %d is %v, want %v", i, y[i], want)
	}
	return nil
}

// testMoE makes every kind of call, and checks the lives of handles.
func testMoE(c *Comm, g *GPU) error {
	rank, size, err := c.Rank()
	if err != nil {
		return err
	}
	r, err := newMoERig(c, g, dispatch.Options{Experts: size, TopK: 1, Hidden: moeHidden, MaxTokens: 8, Handles: 2, HostCounts: true, IndexType: kernels.Int32})
	if err != nil {
		return err
	}
	next := int32((rank + 1) % size)
	idx := []int32{next, next, int32(rank)}
	for round := range 4 {
		h, err := r.dispatch(float32(1+round), idx, Whole)
		if err != nil {
			return err
		}
		counts, err := h.HostCounts(c.ctx)
		if err != nil {
			return err
		}
		if counts.Rows != 3 || r.d.Alive() != 1 {
			return fmt.Errorf("%d rows came and %d dispatches are alive, want 3 and 1", counts.Rows, r.d.Alive())
		}
		// Another one with its halves around a call of the first.
		two, err := r.dispatch(float32(10+round), idx, First)
		if err != nil {
			return err
		}
		if err := r.combine(h, 3, float32(1+round), CombineCall{}); err != nil {
			return err
		}
		if _, err := r.wait(r.d.Receive(r.handle(), two, false)); err != nil {
			return err
		}
		if err := r.combine(two, 3, float32(10+round), CombineCall{Half: First}); err != nil {
			return err
		}
		if _, err := r.dispatch(0, idx, Whole); !errors.Is(err, dispatch.ErrNoHandle) {
			return fmt.Errorf("a third dispatch of two: %w", err)
		}
		// The same ways again, and what was given back with its combine.
		x, err := r.memory(slices.Repeat([]float32{-5}, 3*moeHidden))
		if err != nil {
			return err
		}
		if _, err := r.wait(r.d.Dispatch(r.handle(), &DispatchCall{X: x, Handle: 1}, h, false, r.put)); err != nil {
			return err
		}
		if err := r.combine(h, 3, -5, CombineCall{Release: 1}); err != nil {
			return err
		}
		if err := r.combine(h, 3, -5, CombineCall{}); !errors.Is(err, dispatch.ErrReleased) {
			return fmt.Errorf("a combine after the release: %w", err)
		}
		h.Release()
		if rank == 0 { // who releases first does not matter
			two.Release()
		}
		if err := r.sync(); err != nil {
			return err
		}
		if rank != 0 {
			two.Release()
		}
		two.Release()
		if r.d.Alive() != 0 {
			return fmt.Errorf("%d dispatches are alive", r.d.Alive())
		}
	}
	other := &Handle{d: &Dispatcher{}}
	if _, err := r.d.Combine(r.handle(), &CombineCall{}, other, nil); !errors.Is(err, dispatch.ErrReleased) {
		return fmt.Errorf("a combine of another dispatcher's: %w", err)
	}
	if _, err := r.d.Dispatch(1, &DispatchCall{}, nil, false, r.put); g == nil && !errors.Is(err, ErrInvalid) {
		return fmt.Errorf("a stream on the host: %w", err)
	}
	ticket, err := r.d.Close()
	_, err = await(c, ticket, err)
	return err
}

// sync waits for the stream, and for the other ranks.
func (r *moeRig) sync() error {
	if r.stream != nil {
		if err := r.stream.Synchronize(); err != nil {
			return err
		}
	}
	ticket, err := r.c.Barrier()
	_, err = await(r.c, ticket, err)
	return err
}

func TestDispatchersOnTheHost(t *testing.T) {
	each(t, 3, func(c *Comm) error {
		if err := testMoE(c, nil); err != nil {
			return err
		}
		ticket, err := c.Close(false)
		_, err = await(c, ticket, err)
		return err
	})
}

func TestDispatchersOnAGPU(t *testing.T) {
	needGPUs(t, 2)
	each(t, 2, func(c *Comm) error {
		g, err := openGPU(c, GPUOptions{Device: ownGPU(c)})
		if err != nil {
			return err
		}
		if err := testMoE(c, g); err != nil {
			return err
		}
		if err := g.Fault(); err != nil {
			return err
		}
		ticket, err := c.Close(false)
		_, err = await(c, ticket, err)
		return err
	})
}

// A call's shape is what C callers fill in: numbers of 64 bits without gaps.
func TestCallsAreNumbersWithoutGaps(t *testing.T) {
	require.EqualValues(t, 14*8, reflect.TypeFor[DispatchCall]().Size())
	require.EqualValues(t, 22*8, reflect.TypeFor[CombineCall]().Size())
	require.EqualValues(t, 26*8, reflect.TypeFor[ResultCall]().Size())
	require.EqualValues(t, 22*8, reflect.TypeFor[ExpandCall]().Size())
	require.EqualValues(t, 11*8, reflect.TypeFor[FoldCall]().Size())
	require.EqualValues(t, 3*8, reflect.TypeFor[RouteCall]().Size())
	require.EqualValues(t, 12*8, reflect.TypeFor[BackwardCall]().Size())
}

func TestErrorsHaveDetails(t *testing.T) {
	index := &kernels.IndexError{Rank: 1, Token: 2, Choice: 3, Expert: 44, Experts: 8}
	require.Equal(t, Detail{Rank: 1, Token: 2, Choice: 3, Expert: 44}, DetailOf(fmt.Errorf("x: %w", index)))
	require.Equal(t, Detail{Earlier: 1, Rank: 1, Token: 2, Choice: 3, Expert: 44}, DetailOf(fmt.Errorf("x: %w: %w", communicator.ErrEarlier, index)))
	require.Equal(t, Detail{Earlier: 1, Rank: -1}, DetailOf(fmt.Errorf("%w: %w", communicator.ErrEarlier, &kernels.OverflowError{})))
	require.Equal(t, Detail{Rank: -1}, DetailOf(fmt.Errorf("%w: %w", communicator.ErrEarlier, &comm.PeerError{Err: comm.ErrTimeout})))
}
