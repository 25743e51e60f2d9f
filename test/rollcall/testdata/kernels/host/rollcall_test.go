package host_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
	"github.com/switchyard-moe/switchyard/test/explore"
)

var errEarly = errors.New("a rank left a roll call that another had not begun")

// rollCalls makes some roll calls of n ranks, for explore.Schedules. point, when set, runs at every point of a rank, to put a bug in.
func rollCalls(n, calls int, point func(mem []byte, stride int64, rank int, what string)) func() explore.Program {
	const stride = kernels.HeaderBytes + 4096
	mem := make([]byte, int64(n)*stride)
	bells := host.NewBells(n)
	var engines []*host.Engine
	var ports []kernels.Port
	for r := range n {
		e := host.New(kernels.Space{Mem: mem, Stride: stride, Rank: r, Size: n}, bells, func() error { return nil })
		engines, ports = append(engines, e), append(ports, open(e, &kernels.RollCallBounds{Size: n}, kernels.HeaderBytes))
	}
	return func() (p explore.Program) {
		clear(mem)
		begun := make([]int, n)
		for r, e := range engines {
			p.Ranks = append(p.Ranks, func(turn explore.Turn) error {
				e.SetStep(func(what string, waiting bool) error {
					if point != nil && !waiting {
						point(mem, stride, r, what)
					}
					return turn(what, waiting)
				})
				for call := 1; call <= calls; call++ {
					if err := turn(fmt.Sprintf("begins call %d", call), false); err != nil {
						return err
					}
					begun[r] = call
					if err := ports[r].Launch(nil, &kernels.RollCall{Launched: kernels.Launched{Timeout: time.Second}}); err != nil {
						return err
					}
					for q := range begun {
						if begun[q] < call {
							return fmt.Errorf("%w: call %d, rank %d", errEarly, call, q)
						}
					}
				}
				return nil
			})
		}
		return p
	}
}

func TestRollCallsEndWhenAllHaveBegun(t *testing.T) {
	for n := 1; n <= 4; n++ {
		r := budget(2, 500).Explore(rollCalls(n, 3, nil))
		require.Nil(t, r.Violation, "%d ranks, after %d schedules: %v", n, r.Schedules, r.Violation)
	}
}

// Rank 0 signals rank 1 for rank 2 as well, which may not have begun.
func TestRollCallsFindASignalForAnotherRank(t *testing.T) {
	r := budget(2, 500).Explore(rollCalls(3, 2, func(mem []byte, stride int64, rank int, what string) {
		if rank == 0 && what == "signals rank 1" {
			shm.Word(mem, stride+kernels.HeaderBytes+3*kernels.LineBytes).Store(kernels.LastSeq(1))
		}
	}))
	require.NotNil(t, r.Violation, "not found in %d schedules", r.Schedules)
	require.ErrorIs(t, r.Violation.Err, errEarly)
}
