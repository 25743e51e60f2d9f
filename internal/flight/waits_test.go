package flight

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A wait belongs to the call of its communicator that ran in its middle, and to none where the ring has lost that.
func TestWaitsBelongToTheirCalls(t *testing.T) {
	began := time.Now()
	call := func(id int64, number uint64, started, finished time.Duration) Call {
		return Call{Group: "world", ID: id, Number: number, Started: started, Finished: finished}
	}
	s := State{Began: began, Calls: []Call{call(1, 1, 100, 200), call(2, 1, 100, 400), call(1, 0, 150, 160), call(1, 2, 250, 300), call(1, 3, 310, 0), call(2, 2, 0, 0)}}
	wait := func(id int64, rank int, from, took time.Duration) Pause {
		return Pause{"world", id, rank, began.Add(from), took}
	}
	s.pause([]Pause{
		wait(1, 0, 10, 20),  // before all
		wait(1, 2, 98, 100), // begun a little early, by another clock
		wait(1, 3, 202, 30), // in no call
		wait(2, 4, 240, 40), wait(1, 5, 255, 10), wait(1, 6, 320, 500), wait(3, 7, 100, 10),
	})
	var got [][]Waiting
	for _, c := range s.Calls {
		got = append(got, c.Waits)
	}
	require.Equal(t, [][]Waiting{{{2, 98, 100}}, {{4, 240, 40}}, nil, {{5, 255, 10}}, {{6, 320, 500}}, nil}, got)
}
