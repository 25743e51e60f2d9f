package communicator

import "sync"

// Pool keeps launches that have ended for later ones. The zero Pool is empty. It has a lock of its own: launches end on
// their streams, while a call may hold the communicator and wait for that.
type Pool[T any] struct {
	mu   sync.Mutex
	idle []*T
}

// Take returns an idle launch, or nil.
func (p *Pool[T]) Take() *T {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.idle)
	if n == 0 {
		return nil
	}
	o := p.idle[n-1]
	p.idle = p.idle[:n-1]
	return o
}

// Give takes a launch back.
func (p *Pool[T]) Give(o *T) {
	p.mu.Lock()
	p.idle = append(p.idle, o)
	p.mu.Unlock()
}
