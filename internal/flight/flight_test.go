package flight

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCallsAreCountedAndTheLastAreKept(t *testing.T) {
	r := New(1, 3)
	c := r.Recorder("world", 4096, []int{0, 1, 2})
	bad := errors.New("bad")
	for i := range Kept + 10 {
		k := c.Begin("alltoallv", "ring", 100, i%2 == 0, false, []int64{1, 2, 3}, []int64{4, 5, 6})
		k.Started()
		if i%4 == 0 {
			k.Finished(bad)
		} else {
			k.Finished(nil)
		}
		k.Finished(nil) // counts once
	}
	open := c.Begin("barrier", "", -1, true, false, nil, nil)
	s := r.State(true)
	require.Len(t, s.Calls, Kept)
	require.Equal(t, uint64(Kept+11), s.Calls[Kept-1].Seq)
	require.Equal(t, "barrier", s.Calls[Kept-1].Operation)
	require.Zero(t, s.Calls[Kept-1].Started)
	require.Equal(t, uint64(12), s.Calls[0].Seq)
	require.Equal(t, uint64(12), s.Calls[0].Number)
	require.Len(t, s.Kinds, 2)
	k := s.Kinds[0]
	require.Equal(t, uint64(Kept+10), k.Begun)
	require.Equal(t, k.Begun, k.Ended)
	require.Equal(t, uint64(Kept+10+3)/4, k.Failed)
	require.Equal(t, k.Begun, k.Timed)
	require.Equal(t, 100*k.Begun, k.Payload)
	var sum uint64
	for _, n := range k.Buckets {
		sum += n
	}
	require.Equal(t, k.Timed, sum)
	require.Equal(t, Traffic{k.Begun, 4 * k.Begun}, s.Peers[0])
	require.Equal(t, Traffic{}, s.Peers[1], "a rank's own part")
	require.Zero(t, s.Kinds[1].Ended)
	c.Begin("put", "", 1, false, true, nil, nil)
	s = r.State(true)
	require.Zero(t, s.Calls[Kept-1].Number, "a call of this rank alone")
	require.Equal(t, uint64(Kept+11), s.Calls[Kept-2].Number)
	open.Finished(bad) // it was not enqueued: no time of it is known
	require.Zero(t, r.State(false).Kinds[1].Timed)
	require.Equal(t, uint64(1), r.State(false).Kinds[1].Failed)
}

// A call that has left the ring is still counted when it ends.
func TestACallOfLongAgoEnds(t *testing.T) {
	r := New(0, 1)
	c := r.Recorder("world", 0, []int{0})
	old := c.Begin("dispatch", "flat", 1, true, false, nil, nil)
	for range Kept {
		c.Begin("combine", "flat", 1, false, false, nil, nil).Finished(nil)
	}
	old.Started()
	old.Finished(nil)
	require.Equal(t, uint64(1), r.State(false).Kinds[0].Ended)
	require.Equal(t, "combine", r.State(true).Calls[0].Operation)
}

func TestDurationsFallIntoBuckets(t *testing.T) {
	r := New(0, 1)
	c := r.Recorder("world", 0, []int{0})
	for _, d := range []time.Duration{0, 999, time.Microsecond, 3 * time.Microsecond, time.Hour} {
		k := c.Begin("x", "", 0, false, false, nil, nil)
		k.call().Started -= d // so long ago
		k.Finished(nil)
	}
	b := r.State(false).Kinds[0].Buckets
	require.GreaterOrEqual(t, b[0]+b[1]+b[2]+b[3]+b[4]+b[5]+b[6], uint64(4))
	require.Equal(t, uint64(1), b[Buckets-1])
}

// What a part tells is read while it is there, and its waits stay when it is gone.
func TestPartsTellUntilTheyAreDropped(t *testing.T) {
	r := New(0, 2)
	gone := false
	drop := r.Add(&Part{
		Heap: func() Heap { require.False(t, gone); return Heap{Used: 7} },
		Waited: func(add func(string, int, time.Duration)) {
			require.False(t, gone)
			add("dispatch", 1, time.Second)
		},
		Counters: func(add func(string, uint64)) { add("n", 3) },
	})
	require.Contains(t, Ranks(), r)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 500 {
				r.State(true)
			}
		})
	}
	s := r.State(false)
	require.Equal(t, []Heap{{Used: 7}}, s.Heaps)
	require.Equal(t, uint64(3), s.Counters["n"])
	require.Equal(t, time.Second, s.Waited[Wait{"dispatch", 1}])
	drop()
	gone = true
	wg.Wait()
	require.Equal(t, time.Second, r.State(false).Waited[Wait{"dispatch", 1}])
	require.NotContains(t, Ranks(), r)
	drop()
	require.Equal(t, time.Second, r.State(false).Waited[Wait{"dispatch", 1}])
}

func TestRecordersOfManyGoroutines(t *testing.T) {
	r := New(0, 2)
	c := r.Recorder("world", 0, []int{0, 1})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 2000 {
				k := c.Begin("put", "", 1, false, false, nil, nil)
				k.Started()
				k.Finished(nil)
			}
		})
	}
	for range 50 {
		r.State(true)
		r.Failed("lost", 1, errors.New("gone"))
	}
	wg.Wait()
	s := r.State(false)
	require.Equal(t, uint64(8000), s.Kinds[0].Ended)
	require.Equal(t, uint64(50), s.Faults[Fault{"lost", 1}])
}

func TestNotingAllocatesNothing(t *testing.T) {
	r := New(0, 8)
	c := r.Recorder("world", 0, []int{0, 1, 2, 3, 4, 5, 6, 7})
	send := make([]int64, 8)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		c.Begin("alltoallv", "ring", 1, false, false, send, send).Finished(nil)
	}))
}

// What a call costs: at most 300 ns are allowed.
func BenchmarkNote(b *testing.B) {
	r := New(0, 8)
	c := r.Recorder("world", 0, []int{0, 1, 2, 3, 4, 5, 6, 7})
	send := make([]int64, 8)
	for b.Loop() {
		c.Begin("alltoallv", "ring", 1, false, false, send, send).Finished(nil)
	}
}
