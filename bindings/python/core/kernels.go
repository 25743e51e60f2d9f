package core

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/memory/devcomm"
)

// Kernels is what kernels of users on one GPU have of the other ranks; see package devcomm.
type Kernels struct {
	gpu    *GPU
	inner  *devcomm.Comm
	loaded []*devcomm.Kernel // under gpu.mu
}

// OpenKernels submits the making of Kernels, which every rank does together, with as many signals from each rank to each other; 0 is
// devcomm's default. put names them; the name is the ticket's value. A failure on one rank is an error on all.
func (g *GPU) OpenKernels(signals int, put func(*Kernels) uint64) (Ticket, error) {
	return g.comm.do(func() (int64, error) {
		ctx, cancel := g.comm.meeting()
		defer cancel()
		inner, err := devcomm.New(ctx, g.heap, devcomm.Options{Signals: signals, Timeout: g.comm.within()})
		if err != nil {
			return 0, err
		}
		k := &Kernels{gpu: g, inner: inner}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.kernels = append(g.kernels, k)
		return int64(put(k)), nil
	})
}

// Argument is devcomm.Comm.Argument.
func (k *Kernels) Argument() uintptr { return k.inner.Argument() }

// Load finds a kernel in an image, and returns its number.
func (k *Kernels) Load(image []byte, name string) (int, error) {
	f, err := k.inner.Load(image, name)
	if err != nil {
		return 0, err
	}
	k.gpu.mu.Lock()
	defer k.gpu.mu.Unlock()
	k.loaded = append(k.loaded, f)
	return len(k.loaded) - 1, nil
}

// Launch enqueues the kernel of that number on a CUstream, as devcomm.Comm.Launch describes. args is its parameter as it lies in memory.
func (k *Kernels) Launch(stream uintptr, kernel int, grid devcomm.Grid, args []byte) error {
	g := k.gpu
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return ErrClosed
	}
	if kernel < 0 || kernel >= len(k.loaded) {
		return fmt.Errorf("core: %w: kernel %d of %d", ErrInvalid, kernel, len(k.loaded))
	}
	s, err := g.wrap(stream)
	if err != nil {
		return err
	}
	return k.inner.Launch(s, k.loaded[kernel], grid, args)
}
