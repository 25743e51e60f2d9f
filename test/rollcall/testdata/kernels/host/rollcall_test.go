package host_test

import (
	"testing"
	"time"

	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/test/explore"
)

// rollCalls is ranks that make roll calls.
func rollCalls(n, times int) *calls {
	s := newSegments(n, roomy, &kernels.RollCallBounds{Size: n})
	return &calls{segments: s, times: times, one: func(rank, _ int, _ explore.Turn) error {
		return s.ports[rank].Launch(nil, &kernels.RollCall{Launched: kernels.Launched{Timeout: time.Second}})
	}}
}

func TestRollCallsEndWhenAllHaveBegun(t *testing.T) {
	for n := 1; n <= 4; n++ {
		holds(t, rollCalls(n, 3), budget(2, 500))
	}
}

// Rank 0 signals rank 1 for rank 2 as well, which may not have begun.
func TestRollCallsFindASignalForAnotherRank(t *testing.T) {
	c := rollCalls(3, 2)
	c.point = func(rank int, what string) {
		if rank == 0 && what == "signals rank 1" {
			*c.word(1, kernels.HeaderBytes+3*kernels.LineBytes) = kernels.LastSeq(1)
		}
	}
	found(t, c, budget(2, 500), errEarly)
}
