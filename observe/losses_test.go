package observe

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Who waited for whom between two states, with waits that have not ended, the most first.
func TestLossesAreThoseOfAWindow(t *testing.T) {
	rank := func(number, pid int, waited []Waited, waiting ...Waiting) Rank {
		return Rank{Rank: number, Size: 3, Job: "a", Group: "world", Pid: pid, Waited: waited, Waiting: waiting}
	}
	before := State{At: noonOfFindings, Ranks: []Rank{
		rank(0, 10, []Waited{{Operation: "combine", Peer: 1, Seconds: 5}}),
		rank(1, 11, []Waited{{Operation: "combine", Peer: 0, Seconds: 7}}, Waiting{Operation: "dispatch", For: 2, Seconds: 0.5}),
		rank(2, 12, []Waited{{Operation: "combine", Peer: 0, Seconds: 100}}),
	}}
	now := State{At: noonOfFindings.Add(2 * time.Second), Ranks: []Rank{
		rank(0, 10, []Waited{{Operation: "combine", Peer: 1, Seconds: 5.6}, {Operation: "dispatch", Peer: 1, Seconds: 0.01}}),
		rank(1, 11, []Waited{{Operation: "combine", Peer: 0, Seconds: 7.001}, {Operation: "dispatch", Peer: 2, Seconds: 0.7}}, Waiting{Operation: "dispatch", For: 2, Seconds: 0.8}),
		rank(2, 99, []Waited{{Operation: "combine", Peer: 0, Seconds: 3}}), // a fresh process
	}}
	lost := now.Since(before).Lost
	require.Len(t, lost, 2)
	require.Equal(t, []any{"a", 1, 2, "dispatch"}, []any{lost[0].Job, lost[0].Rank, lost[0].For, lost[0].Operation})
	require.InDelta(t, 1.0, lost[0].Seconds, 1e-9)
	require.InDelta(t, 0.5, lost[0].Share, 1e-9)
	require.Equal(t, []any{0, 1, "combine"}, []any{lost[1].Rank, lost[1].For, lost[1].Operation})
	require.InDelta(t, 0.6, lost[1].Seconds, 1e-9)
	var b bytes.Buffer
	now.Since(before).Table(&b)
	require.Regexp(t, `(?m)^TIME LOST +BY RANK +WAITING FOR +IN\n50% +1 +2 +dispatch\n30% +0 +1 +combine$`, b.String())
	b.Reset()
	now.Table(&b)
	require.NotContains(t, b.String(), "LOST", "a snapshot has no window")
}
