package observe

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var byReduction = Fallback{Operation: "all_reduce", Backend: "gloo", Reason: "reduction"}

// with is a fallback with its number of calls.
func (k Fallback) with(calls uint64) Fallback {
	k.Calls = calls
	return k
}

func TestFallbacksAreFindings(t *testing.T) {
	s := Merge(fourRanks(func(r *Rank) {
		r.Operations = []Operation{{Operation: "alltoallv", Calls: 90}}
		if r.Rank != 3 {
			r.Fallbacks = []Fallback{byReduction.with(10), {"all_gather", "nccl", "gpu", 4}}
		}
	}))
	kinds, text := kindsOf(s)
	require.Equal(t, "fallback fallback", kinds)
	require.Equal(t, "ranks 0, 1 and 2: calls of all_reduce fall back to gloo, 30 in all: Switchyard does not reduce this element type with this operator\n"+
		"ranks 0, 1 and 2: calls of all_gather fall back to nccl, 12 in all: these GPUs cannot reach each other's memory\n", text)
	require.Equal(t, []int{0, 1, 2}, s.Findings[0].Ranks)
}

// A program may gather an object now and then.
func TestFewFallbacksAreNoFinding(t *testing.T) {
	job := func(ours, theirs uint64) State {
		return fourRanks(func(r *Rank) {
			r.Operations = []Operation{{Operation: "alltoallv", Calls: ours}}
			r.Fallbacks = []Fallback{byReduction.with(theirs)}
		})
	}
	require.Empty(t, Merge(job(1000, 9)).Findings)
	require.Len(t, Merge(job(989, 11)).Findings, 1)
	before := job(1000, 500)
	require.Empty(t, job(2000, 500).Since(before).Findings, "none since")
	_, text := kindsOf(job(2000, 505).Since(job(1900, 500)))
	require.Contains(t, text, "fall back to gloo, 20 in all")
}

func TestFallbacksAreMetrics(t *testing.T) {
	s := fourRanks(func(r *Rank) { r.Fallbacks = []Fallback{byReduction.with(7)} })
	s.Ranks[1].Host = -1
	var b strings.Builder
	require.NoError(t, WriteMetrics(&b, s, OpenMetrics))
	require.Contains(t, b.String(), "# TYPE switchyard_fallback_calls counter\n")
	require.Contains(t, b.String(), `switchyard_fallback_calls_total{rank="1",host="-1",operation="all_reduce",backend="gloo",reason="reduction"} 7`+"\n")
}
