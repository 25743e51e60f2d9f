package host

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// The last waits are kept, oldest first, with the time at which each began.
func TestTheLastWaitsAreKept(t *testing.T) {
	e := &Engine{began: time.Now(), pauses: pauses{ring: make([]pause, 3)}}
	require.Empty(t, e.Pauses())
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	var want []flight.Pause
	for n := range 7 {
		e.pauses.add(pause{64, n, ms(n), ms(1)})
		want = append(want, flight.Pause{ID: 64, For: n, Began: e.began.Add(ms(n)), Took: ms(1)})
		require.Equal(t, want[max(0, n-2):], e.Pauses())
	}
}
