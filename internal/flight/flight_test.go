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
	c := r.Recorder("world", 4096, []int{0, 1, 2}, "host")
	bad := errors.New("bad")
	for i := range Kept + 10 {
		on := NoStream
		if i%2 == 0 {
			on = OnStream(1)
		}
		k := c.Begin("alltoallv", "ring", 100, NotStaged, on, false, []int64{1, 2, 3}, []int64{4, 5, 6})
		k.Started()
		if i%4 == 0 {
			k.Finished(bad)
		} else {
			k.Finished(nil)
		}
		k.Finished(nil) // counts once
	}
	open := c.Begin("barrier", "", -1, NotStaged, OnStream(1), false, nil, nil)
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
	c.Begin("put", "", 1, NotStaged, NoStream, true, nil, nil)
	s = r.State(true)
	require.Zero(t, s.Calls[Kept-1].Number, "a call of this rank alone")
	require.Equal(t, uint64(Kept+11), s.Calls[Kept-2].Number)
	open.Finished(bad) // it was not enqueued: no time of it is known
	require.Zero(t, r.State(false).Kinds[1].Timed)
	require.Equal(t, uint64(1), r.State(false).Kinds[1].Failed)
}

// A call that failed keeps the ranks that had not begun it, as ranks of the group that met; its error stays what it was.
func TestACallThatFailedKeepsWhoWasAbsent(t *testing.T) {
	r := New(0, 4)
	c := r.Recorder("half", 0, []int{0, 2, 3}, "host")
	bad := errors.New("bad")
	c.Begin("alltoallv", "ring", 1, NotStaged, NoStream, false, nil, nil).Finished(bad, 1, 2)
	c.Begin("alltoallv", "ring", 1, NotStaged, NoStream, false, nil, nil).Finished(bad)
	c.Begin("alltoallv", "ring", 1, NotStaged, NoStream, false, nil, nil).Finished(nil, 1)
	s := r.State(true)
	require.Equal(t, []int{2, 3}, s.Calls[0].Absent)
	require.Same(t, bad, s.Calls[0].Err)
	require.Empty(t, s.Calls[1].Absent)
	require.Empty(t, s.Calls[2].Absent)
	require.NoError(t, s.Calls[2].Err)
	require.Same(t, bad, s.Failed.Err)
	require.Empty(t, s.Failed.Absent, "the second one failed last")
}

// A call that has left the ring is still counted when it ends.
func TestACallOfLongAgoEnds(t *testing.T) {
	r := New(0, 1)
	c := r.Recorder("world", 0, []int{0}, "host")
	old := c.Begin("dispatch", "flat", 1, NotStaged, OnStream(1), false, nil, nil)
	for range Kept {
		c.Begin("combine", "flat", 1, NotStaged, NoStream, false, nil, nil).Finished(nil)
	}
	old.Started()
	old.Finished(nil)
	require.Equal(t, uint64(1), r.State(false).Kinds[0].Ended)
	require.Equal(t, "combine", r.State(true).Calls[0].Operation)
}

func TestDurationsFallIntoBuckets(t *testing.T) {
	r := New(0, 1)
	c := r.Recorder("world", 0, []int{0}, "host")
	k := c.Begin("x", "", 0, NotStaged, NoStream, false, nil, nil)
	k.call().started -= moment(float64(time.Hour) / r.clock.dial(r.began).rate) // so long ago
	k.Finished(nil)
	require.Equal(t, uint64(1), r.State(false).Kinds[0].Buckets[Buckets-1])
	for i := range Buckets - 1 {
		above := Shortest << i // the first duration that is too long for bucket i
		require.Equal(t, i, bucket(above-1))
		require.Equal(t, i+1, bucket(above))
	}
	require.Equal(t, 0, bucket(0))
}

// What a part tells is read while it is there, and its waits stay when it is gone.
func TestPartsTellUntilTheyAreDropped(t *testing.T) {
	r := New(0, 2)
	gone := false
	drop := r.Add(&Part{
		Heap: func() Heap { require.False(t, gone); return Heap{Used: 7} },
		Waited: func(add func(Wait, time.Duration)) {
			require.False(t, gone)
			add(Wait{"dispatch", 1, true}, time.Second)
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
	require.Equal(t, time.Second, s.Waited[Wait{"dispatch", 1, true}])
	drop()
	gone = true
	wg.Wait()
	require.Equal(t, time.Second, r.State(false).Waited[Wait{"dispatch", 1, true}])
	require.NotContains(t, Ranks(), r)
	drop()
	require.Equal(t, time.Second, r.State(false).Waited[Wait{"dispatch", 1, true}])
}

func TestRecordersOfManyGoroutines(t *testing.T) {
	r := New(0, 2)
	c := r.Recorder("world", 0, []int{0, 1}, "host")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 2000 {
				k := c.Begin("put", "", 1, NotStaged, NoStream, false, nil, nil)
				k.Started()
				k.Finished(nil)
			}
		})
	}
	for range 50 {
		r.State(true)
		r.Failed("lost", 1, -1, errors.New("gone"))
	}
	wg.Wait()
	s := r.State(false)
	require.Equal(t, uint64(8000), s.Kinds[0].Ended)
	require.Equal(t, uint64(50), s.Faults[Fault{"lost", 1}])
}

// A call that began while the rank rested is none, also where it ends later.
func TestARankThatRestsNotesNothing(t *testing.T) {
	r := New(0, 2)
	c := r.Recorder("world", 0, []int{0, 1}, "host")
	r.Rest(true)
	k := c.Begin("put", "", 1, NotStaged, NoStream, false, nil, nil)
	r.Rest(false)
	k.Started()
	k.Unseen()
	k.Finished(nil)
	require.Empty(t, r.State(true).Calls)
	c.Begin("put", "", 1, NotStaged, NoStream, false, nil, nil).Finished(nil)
	require.Len(t, r.State(true).Calls, 1)
}

func TestNotingAllocatesNothing(t *testing.T) {
	r := New(0, 8)
	c := r.Recorder("world", 0, []int{0, 1, 2, 3, 4, 5, 6, 7}, "host")
	send := make([]int64, 8)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		c.Begin("alltoallv", "ring", 1, NotStaged, NoStream, false, send, send).Finished(nil)
	}))
}

// What a call costs: at most 300 ns are allowed.
func BenchmarkNote(b *testing.B) {
	r := New(0, 8)
	c := r.Recorder("world", 0, []int{0, 1, 2, 3, 4, 5, 6, 7}, "host")
	send := make([]int64, 8)
	for b.Loop() {
		c.Begin("alltoallv", "ring", 1, NotStaged, NoStream, false, send, send).Finished(nil)
	}
}

// The same where nothing of a rank is in a cache: 256 ranks make calls in turn.
func BenchmarkNoteOutOfCaches(b *testing.B) {
	ranks := make([]*Recorder, 256)
	for i := range ranks {
		ranks[i] = New(0, 8).Recorder("world", 0, []int{0, 1, 2, 3, 4, 5, 6, 7}, "host")
	}
	send := make([]int64, 8)
	for i := 0; b.Loop(); i++ {
		ranks[i%len(ranks)].Begin("alltoallv", "ring", 1, NotStaged, NoStream, false, send, send).Finished(nil)
	}
}

// A part that goes while a state is made has told the rank what it had: numbers that only grow do not go back.
func TestWhatIsToldDoesNotGoBack(t *testing.T) {
	r := New(0, 2)
	r.Recorder("world", 0, []int{0, 1}, "host")
	var drop func()
	defer r.Add(&Part{Heap: func() Heap { drop(); return Heap{} }})()
	drop = r.Add(&Part{
		Waited:  func(add func(Wait, time.Duration)) { add(Wait{Operation: "put", Peer: 1}, time.Second) },
		Layer:   func() Layer { return Layer{Name: "a", Tokens: []uint64{1}} },
		Traffic: func(add func(int, Traffic)) { add(1, Traffic{Sent: 1}) },
	})
	for range 2 {
		s := r.State(false)
		require.Len(t, s.Heaps, 1)
		require.Equal(t, []Traffic{{}, {Sent: 1}}, s.Peers)
		require.Equal(t, map[Wait]time.Duration{{Operation: "put", Peer: 1}: time.Second}, s.Waited)
		require.Equal(t, []Layer{{Name: "a", Tokens: []uint64{1}}}, s.Layers)
	}
}
