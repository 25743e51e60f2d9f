package observe

import (
	"context"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// Event is a call of the control plane that has ended, for good or bad.
type Event struct {
	// Name is join (comm.Join, and Join of a Listener), grow (Heap.Grow, also where New of a communicator grows the heap), shrink (Group.Shrink)
	// or admit (Group.Admit).
	Name string
	// Context is the caller's.
	Context context.Context
	// Group is the name of the group that the call has made, or whose heap has grown. Of a call that failed it is that of the group it was made
	// with. Rank is this rank's number in it, -1 where it has none, and Size its number of ranks, 0 where that is not known.
	Group      string
	Rank, Size int
	// Job is that of Rank.Job and Epoch that of Rank.Epoch. Job is empty where ranks have not met.
	Job   string
	Epoch int
	// Bytes is by how much a heap has grown, or was to grow; 0 for others.
	Bytes        int64
	Began, Ended time.Time
	Err          error
}

// OnEvent has heard called with each event of this process until stop is called: by the goroutine that has made the call, before the call
// returns. So heard does not block, and makes no call of this kind.
func OnEvent(heard func(Event)) (stop func()) {
	return flight.OnEvent(func(e flight.Event) {
		job := ""
		if e.Job != 0 {
			job = fmt.Sprintf("%016x", e.Job)
		}
		heard(Event{e.Name, e.Context, e.Group, e.Rank, e.Size, job, e.Epoch, e.Bytes, e.Began, e.Ended, e.Err})
	})
}
