package flight

import (
	"context"
	"sort"
	"time"
)

// Wait is a reason to wait. Absent says that the peer had not begun the call when the wait had lasted for some time.
type Wait struct {
	Operation string
	Peer      int
	Absent    bool
}

// Running is a call that runs, as far as the host sees.
type Running struct {
	Group     string
	ID        int64
	Operation string
	Number    uint64
	Since     time.Time
	// WaitsFor is the rank that it waits for, -1 if it waits for none or not for long.
	WaitsFor int
	// Absent are the ranks that have not begun this call.
	Absent []int
}

// began is the key of a time in a context.
type began struct{}

// Continued is ctx for a call that goes on with a wait which began at a time: who asks in turns waits on, and shows since when.
func Continued(ctx context.Context, at time.Time) context.Context {
	return context.WithValue(ctx, began{}, at)
}

// Since is when the wait of a call with ctx began, which is now unless Continued says otherwise.
func Since(ctx context.Context) time.Time {
	if at, ok := ctx.Value(began{}).(time.Time); ok {
		return at
	}
	return time.Now()
}

// Heap is the memory of a symmetric heap.
type Heap struct {
	Device                                    string
	Reserved, Used, Peak, LargestFree, Memory int64
	// Awaits says for each rank of the heap for whom it waits, -1 for nobody.
	Awaits []int
}

// Pause is a wait in a call that has ended, and was long enough to be shown.
type Pause struct {
	Group string
	ID    int64
	For   int
	Began time.Time
	Took  time.Duration
}

// Waiting is a wait of a call for a rank. Began counts from the rank's beginning.
type Waiting struct {
	For         int
	Began, Took time.Duration
}

// place tells communicators of a rank apart.
type place struct {
	group string
	id    int64
}

// pause gives calls their waits. Calls of a communicator that all ranks make follow each other.
func (s *State) pause(pauses []Pause) {
	if len(pauses) == 0 {
		return
	}
	calls := map[place][]*Call{}
	for i := range s.Calls {
		if c := &s.Calls[i]; c.Started != 0 && c.Number != 0 {
			calls[place{c.Group, c.ID}] = append(calls[place{c.Group, c.ID}], c)
		}
	}
	for _, p := range pauses {
		began, all := p.Began.Sub(s.Began), calls[place{p.Group, p.ID}]
		middle := began + p.Took/2 // the two clocks may differ a little
		at := sort.Search(len(all), func(i int) bool { return all[i].Started > middle }) - 1
		if at >= 0 && (all[at].Finished == 0 || middle < all[at].Finished) {
			all[at].Waits = append(all[at].Waits, Waiting{p.For, began, p.Took})
		}
	}
}
