package dispatch

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// ready returns the error of a call with h that is not possible. half says that it is the second half of a call.
func (d *Dispatcher) ready(h *Handle, half bool) error {
	if err := d.usable(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.held(h, half); err != nil {
		return err
	}
	if h.lost {
		return fmt.Errorf("dispatch: the handle holds no dispatch: %w", h.err)
	}
	return nil
}

// held refuses a handle that is not the caller's, or is not in that half of a call. d.mu is held.
func (d *Dispatcher) held(h *Handle, half bool) error {
	switch {
	case h == nil || h.d != d || !h.alive:
		return fmt.Errorf("dispatch: %w", ErrReleased)
	case half && h.half == nil:
		return fmt.Errorf("dispatch: %w: the handle has had no first half", ErrHalf)
	case !half && h.half != nil:
		return fmt.Errorf("dispatch: %w: the handle is in a %v, of which the second half is missing", ErrHalf, h.half.kind)
	}
	return nil
}

// check refuses a view that is not memory of the device, does not have want bytes (a negative number: any), is known to consist of
// other elements than those of t, or is not aligned for them.
func (d *Dispatcher) check(name string, v memory.View, want int64, t kernels.DType) error {
	if err := v.Valid(); err != nil {
		return fmt.Errorf("dispatch: %s: %w", name, err)
	}
	if !v.Holds(t) {
		return invalid("%s has elements of %s, want %v", name, v.Element(), t)
	}
	if v.Len() == 0 && want <= 0 {
		return nil
	}
	if !d.c.Heap.Serves(v) {
		return invalid("%s is not %v memory", name, d.c.Heap.Device().Kind())
	}
	if err := d.mine(name, v, 0); err != nil {
		return err
	}
	if want >= 0 && v.Len() != want {
		return invalid("%s has %d bytes, want %d", name, v.Len(), want)
	}
	if v.Ptr()%uintptr(t.Size()) != 0 {
		return invalid("%s is not aligned to its elements of %d bytes", name, t.Size())
	}
	return nil
}

// checkTokens is check for a buffer of one row a token, which may be longer.
func (d *Dispatcher) checkTokens(name string, v memory.View, tokens int, t kernels.DType) error {
	need := int64(tokens) * int64(d.bounds.Hidden) * t.Size()
	if v.Len() < need {
		return invalid("%s has %d bytes, %d tokens of %d x %v need %d", name, v.Len(), tokens, d.bounds.Hidden, t, need)
	}
	return d.checkRows(name, v, t)
}

// checkRows is check for a buffer of rows of any number. A GPU moves them by 16 bytes.
func (d *Dispatcher) checkRows(name string, v memory.View, t kernels.DType) error {
	if err := d.check(name, v, -1, t); err != nil {
		return err
	}
	if d.c.Heap.Device().Kind() != device.HostKind && v.Ptr()%16 != 0 {
		return invalid("%s is not aligned to 16 bytes", name)
	}
	return nil
}

// checkGiven is check for the weights of rows. The zero View is refused where they are used, but not an empty slice: no row may have come.
func (d *Dispatcher) checkGiven(name string, w Weighting, v, rows memory.View) error {
	if w == GivenWeights && v.Len() == 0 && rows.Len() > 0 && v.Element() == (memory.View{}).Element() {
		return invalid("CombineOptions.Weighting is %v and CombineOptions.Weights is empty, for %d bytes of rows", w, rows.Len())
	}
	return d.check(name, v, -1, kernels.Float32)
}

// own is v for an engine, for this rank only.
func (d *Dispatcher) own(v memory.View) kernels.Buffer { return d.c.Heap.Operand(v) }

// shown is v for an engine. Peers access it in place if they reach it.
func (d *Dispatcher) shown(v memory.View) kernels.Buffer { return d.c.Heap.SymmetricOperand(v) }

// overlap reports whether two views, both of the heap's device, share a byte.
func overlap(a, b memory.View) bool {
	return a.Len() > 0 && b.Len() > 0 && a.Ptr() < b.Ptr()+uintptr(b.Len()) && b.Ptr() < a.Ptr()+uintptr(a.Len())
}
