package flight

import (
	"context"
	"slices"
	"time"
)

// Event is a call of the control plane that has ended: a rank has joined a group, its heap has grown, its group has shrunk or taken ranks in, or
// that has failed.
type Event struct {
	// Name is join, grow, shrink or admit, and Context the caller's.
	Name    string
	Context context.Context
	// Group is the group that the call has made, or whose heap has grown; of a call that failed the one that it was made with. Rank and Size are
	// this rank's number there and how many it has, -1 and 0 where the call did not get so far.
	Group      string
	Rank, Size int
	// Job and Epoch are those of that group, Bytes how much the heap has grown.
	Job          uint64
	Epoch        int
	Bytes        int64
	Began, Ended time.Time
	Err          error
}

// OnEvent has heard called with each event of this process, by the goroutine whose call has ended and before that returns, until stop is
// called.
func OnEvent(heard func(Event)) (stop func()) {
	process.Lock()
	defer process.Unlock()
	process.heard = append(process.heard, &heard)
	return func() {
		process.Lock()
		defer process.Unlock()
		process.heard = slices.DeleteFunc(process.heard, func(f *func(Event)) bool { return f == &heard })
	}
}

// Happened tells of an event that ends now.
func Happened(e Event) {
	process.Lock()
	heard := slices.Clone(process.heard)
	process.Unlock()
	e.Ended = time.Now()
	for _, f := range heard {
		(*f)(e)
	}
}
