package proctest

import (
	"context"
	"sync"
)

// moment is a context that ends when somebody begins to wait for its end, right after something else has happened.
type moment struct {
	context.Context
	before func()
	once   sync.Once
	over   chan struct{}
}

// Moment is a context that ends at the worst moment for who has looked at what it waits for and begins to wait for the end of the context: before
// is called then, which has all come that is waited for, and then the context is over. A caller that waits for both has to look once more.
func Moment(ctx context.Context, before func()) context.Context {
	return &moment{Context: ctx, before: before, over: make(chan struct{})}
}

func (m *moment) Done() <-chan struct{} {
	m.once.Do(func() {
		m.before()
		close(m.over)
	})
	return m.over
}

func (m *moment) Err() error {
	select {
	case <-m.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}
