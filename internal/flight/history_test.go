package flight

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var errGone = errors.New("gone")

func call(c *Recorder, err error) {
	c.Begin("put", "", 1, NotStaged, NoStream, true, nil, nil).Finished(err)
}

// A fault is healed by the first call that goes well on a communicator that was made after it, and by no other.
func TestAFaultIsHealedByACallOfALaterCommunicator(t *testing.T) {
	r := New(0, 3)
	r.Group = "world"
	before := r.Recorder("world", 0, []int{0, 1, 2}, "host")
	r.Failed("lost", 2, 40*time.Millisecond, errGone)
	call(before, nil)
	after := r.Recorder("world/survivors", 64, []int{0, 1}, "host")
	call(after, errGone)
	s := r.State(false)
	require.Len(t, s.Past, 1)
	require.Equal(t, []any{"lost", 2, "world", true}, []any{s.Past[0].Kind, s.Past[0].Culprit, s.Past[0].Group, s.Past[0].Healed.IsZero()})
	require.Empty(t, s.Healed)
	require.Equal(t, uint64(1), s.Detected["lost"].Count)
	require.Equal(t, 40*time.Millisecond, s.Detected["lost"].Sum)
	require.Equal(t, uint64(1), s.Detected["lost"].Buckets[6], "less than 64 ms, and not less than 32")

	call(after, nil)
	healed := r.State(false).Past[0].Healed
	require.False(t, healed.IsZero())
	call(after, nil)
	s = r.State(false)
	require.Equal(t, healed, s.Past[0].Healed, "by the first call")
	require.Equal(t, uint64(1), s.Healed["lost"].Count)
	require.Equal(t, healed.Sub(s.Past[0].At), s.Healed["lost"].Sum)
}

// A call of a GPU is counted when it is enqueued: the host sees no more of it.
func TestACallThatTheHostDoesNotSeeEndHeals(t *testing.T) {
	r := New(0, 2)
	r.Failed("lost", 1, -1, errGone)
	r.Recorder("world", 0, []int{0}, "host").Begin("put", "", 1, NotStaged, OnStream(1), true, nil, nil).Unseen()
	s := r.State(false)
	require.Equal(t, uint64(1), s.Healed["lost"].Count)
	require.Empty(t, s.Detected, "nothing tells how long the rank was silent")
}

// A communicator that was made between two faults heals the first one only.
func TestALaterFaultIsNotHealed(t *testing.T) {
	r := New(0, 3)
	r.Failed("lost", 1, 0, errGone)
	c := r.Recorder("world", 0, []int{0, 2}, "host")
	r.Failed("lost", 2, 0, errGone)
	call(c, nil)
	s := r.State(false)
	require.Equal(t, []bool{false, true}, []bool{s.Past[0].Healed.IsZero(), s.Past[1].Healed.IsZero()})
	call(r.Recorder("world", 0, []int{0}, "host"), nil)
	require.Equal(t, uint64(2), r.State(false).Healed["lost"].Count)
}

func TestTheLastFailuresAreKept(t *testing.T) {
	r := New(0, 64)
	for p := range Past + 3 {
		r.Failed("lost", p, 0, errGone)
	}
	s := r.State(false)
	require.Len(t, s.Past, Past)
	require.Equal(t, 3, s.Past[0].Culprit)
	require.Equal(t, uint64(Past+3), s.Detected["lost"].Count)
}

// The rank of a group that took others in goes on with the faults of the one before.
func TestARankSucceedsAnother(t *testing.T) {
	old, next := New(1, 3), New(0, 3)
	old.Group, next.Group = "world", "workers"
	next.Seats = []int{1, 0, 2}
	old.Failed("lost", 2, 0, errGone)
	for i := range KeptChanges + 1 {
		old.Changed(Change{Layer: "a", Moves: []Move{{Expert: i, To: 1}}})
	}
	old.Regroup(1, []int{0, 1})
	next.Regroup(2, []int{0, 1, 2})
	next.Succeeds(old)
	call(next.Recorder("workers", 0, []int{0, 1, 2}, "host"), nil)
	s := next.State(false)
	require.Equal(t, []any{2, []int{0, 1, 2}, 1, "world", false}, []any{s.Epoch, s.Members, len(s.Past), s.Past[0].Group, s.Past[0].Healed.IsZero()})
	require.Equal(t, map[Fault]uint64{{"lost", 2}: 1}, s.Faults, "by the number of the group that met first")
	require.Len(t, s.Changes, KeptChanges)
	require.Equal(t, 1, s.Changes[0].Moves[0].Expert, "the oldest that is kept")
	require.Empty(t, old.State(false).Changes)
	s = old.State(false)
	require.Equal(t, []any{1, []int{0, 1}, 0}, []any{s.Epoch, s.Members, len(s.Past)})
	require.Equal(t, 1, old.Epoch())
}

// A rank tells its end where its group has failed and nothing has gone well since: it has not shrunk, and no other rank has its place.
func TestARankThatAFailureEndsTellsIt(t *testing.T) {
	var told []*Rank
	OnEnd(time.Minute, func(r *Rank) { told = append(told, r) })
	defer func() { process.ends = nil }()
	well, over, healed, passed := New(0, 3), New(0, 3), New(0, 3), New(0, 3)
	for _, r := range []*Rank{over, healed, passed} {
		r.Failed("lost", 2, 0, errGone)
	}
	call(healed.Recorder("world/survivors", 64, []int{0, 1}, "host"), nil)
	New(0, 3).Succeeds(passed)
	for _, r := range []*Rank{well, over, healed, passed} {
		r.Ends()
	}
	require.Equal(t, []*Rank{over}, told)
}
