package core

import (
	"fmt"
	"sync"
)

// Handles names objects by integers. A number is never used twice, so a stale one is an error and not another object.
type Handles struct {
	mu   sync.RWMutex
	next uint64
	all  map[uint64]any
}

// NewHandles makes an empty table.
func NewHandles() *Handles { return &Handles{all: make(map[uint64]any)} }

// Put names v.
func (h *Handles) Put(v any) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.next++
	h.all[h.next] = v
	return h.next
}

// Drop forgets a name.
func (h *Handles) Drop(id uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.all, id)
}

// Len is how many names there are.
func (h *Handles) Len() int {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return len(h.all)
}

// Get returns the object with the name, an ErrInvalid when there is none of that type.
func Get[T any](h *Handles, id uint64) (T, error) {
	h.mu.RLock()
	v, ok := h.all[id]
	h.mu.RUnlock()
	t, is := v.(T)
	switch {
	case !ok:
		return t, fmt.Errorf("core: %w: handle %d is not in use", ErrInvalid, id)
	case !is:
		return t, fmt.Errorf("core: %w: handle %d is a %T, want a %T", ErrInvalid, id, v, t)
	}
	return t, nil
}
