package memory

import "fmt"

// Counterpart is the place of what lies at rank p where v lies here, as kernels.Space.Addr takes it. v is symmetric: a view of a buffer or of
// registered memory. The error is an ErrInvalid where v is not, or where the memory that rank p has registered ends before, and has both
// lengths.
func (h *Heap) Counterpart(v View, p int) (place int64, err error) {
	if err := v.Valid(); err != nil {
		return 0, err
	}
	place, ok := v.Symmetric(h)
	if !ok {
		return 0, fmt.Errorf("%w: %d bytes at %#x are not symmetric memory of this heap", ErrInvalid, v.n, v.Ptr())
	}
	if place < h.limit {
		return place, nil
	}
	for _, r := range h.registrations() {
		if at := place - r.place; at >= 0 && at+v.n <= r.n {
			if at+v.n > r.lens[p] {
				return 0, fmt.Errorf("%w: bytes %d to %d of registered memory of which rank %d has %d", ErrInvalid, at, at+v.n, p, r.lens[p])
			}
			return place, nil
		}
	}
	return 0, fmt.Errorf("memory: %d bytes at %#x: %w", v.n, v.Ptr(), ErrFreed)
}
