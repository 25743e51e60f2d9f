package cuda

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
	"github.com/switchyard-moe/switchyard/test/plans"
)

func TestReductionDefaultsFitTheirBounds(t *testing.T) {
	for size := 1; size <= maxRanks; size++ {
		for _, blocks := range []int{1, 3, 58, 66, 108, 132} {
			c := kernels.ReduceBounds{Size: size}
			x := newReductions(&c, 4096)
			free := max(blocks-forOthers, 1)
			x.defaults(blocks, free)
			require.Equal(t, min(free, maxReduceBlocks), c.Blocks, "a GPU with fewer multiprocessors leaves as many to others (X10)")
			require.NoError(t, x.check())
			l := x.layout()
			staging := 2 * int64(size*c.Blocks*c.Slots) * c.SlotBytes
			require.Equal(t, staging, l.Bytes-l.Zero)
			if c.SlotBytes > tileBytes {
				require.LessOrEqual(t, staging, int64(reduceStaging))
			}
			d := c
			newReductions(&d, 4096).defaults(blocks, free) // what is set stays
			require.Equal(t, c, d)
		}
	}
	c := kernels.ReduceBounds{Size: 2, OneShotBytes: -1, Blocks: 500}
	newReductions(&c, 0).defaults(132, 96)
	require.Zero(t, c.OneShotBytes)
	require.Equal(t, 132, c.Blocks)
}

func TestReduceBoundsThatGPUsCannotHaveAreRefused(t *testing.T) {
	good := kernels.ReduceBounds{Size: 2}
	newReductions(&good, 0).defaults(132, 96)
	for says, change := range map[string]func(c *kernels.ReduceBounds){
		"bounds {":      func(c *kernels.ReduceBounds) { c.Blocks = 0 },
		"9 slots":       func(c *kernels.ReduceBounds) { c.Slots = 9 },
		"of 5000 bytes": func(c *kernels.ReduceBounds) { c.SlotBytes = 5000 },
	} {
		c := good
		change(&c)
		require.ErrorContains(t, newReductions(&c, 0).check(), says)
	}
}

func TestReductionsThatCannotRunAreRefused(t *testing.T) {
	c := kernels.ReduceBounds{Size: 2, OneShotBytes: 1000, Slots: 2, SlotBytes: 4096, Blocks: 8}
	x := newReductions(&c, 0)
	require.NoError(t, x.check())
	good := kernels.Reduction{Family: &c, Call: kernels.ReduceCall{Collective: kernels.AllReduce, DType: kernels.Float32, Count: 250},
		Algorithm: kernels.OneShot, Packets: true, Bounds: []int64{0, 125, 250}, Blocks: 8, Launched: kernels.Launched{Timeout: time.Second}}
	require.NoError(t, x.validate(&good))
	for _, coll := range []kernels.Collective{kernels.ReduceScatter, kernels.AllGather, kernels.Broadcast} {
		half := good
		half.Call.Collective = coll
		require.NoError(t, x.validate(&half), coll)
	}
	for says, change := range map[string]func(a *kernels.Reduction){
		"2 bounds":              func(a *kernels.Reduction) { a.Bounds = a.Bounds[:2] },
		"no ring":               func(a *kernels.Reduction) { a.Algorithm = kernels.Ring },
		"no one-shot":           func(a *kernels.Reduction) { a.Packets = false },
		"packets of 1004 bytes": func(a *kernels.Reduction) { a.Call.Count++ },
		"0 blocks":              func(a *kernels.Reduction) { a.Blocks = 0 },
		"9 blocks":              func(a *kernels.Reduction) { a.Blocks = 9 },
		"too many chunks": func(a *kernels.Reduction) {
			a.Algorithm, a.Packets, a.Bounds = kernels.TwoShot, false, []int64{0, 1 << 50, 1 << 51}
		},
	} {
		a := good
		change(&a)
		require.ErrorContains(t, x.validate(&a), says)
	}
}

func TestMulticastThatCannotRunIsRefused(t *testing.T) {
	c := kernels.ReduceBounds{Size: 2, OneShotBytes: 1000, Slots: 2, SlotBytes: 4096, Blocks: 8, Multicast: true}
	x := newReductions(&c, 0)
	require.NoError(t, x.check())
	good := kernels.Reduction{Family: &c, Call: kernels.ReduceCall{Collective: kernels.AllReduce, DType: kernels.BFloat16, Count: 500},
		Algorithm: kernels.TwoShot, Multicast: kernels.BlockPipeline, Bounds: []int64{0, 250, 500}, Blocks: 3, Launched: kernels.Launched{Timeout: time.Second}}
	require.NoError(t, x.validate(&good))
	for _, coll := range []kernels.Collective{kernels.ReduceScatter, kernels.AllGather, kernels.Broadcast} {
		half := good
		half.Call.Collective = coll
		require.NoError(t, x.validate(&half), coll)
	}
	for says, change := range map[string]func(a *kernels.Reduction){
		"a block pipeline of 2 blocks": func(a *kernels.Reduction) { a.Blocks = 2 },
		"packets true":                 func(a *kernels.Reduction) { a.Packets = true },
		"push true":                    func(a *kernels.Reduction) { a.Push = true },
		"rate 100":                     func(a *kernels.Reduction) { a.Rate = 100 },
		"(max) of 500 bfloat16":        func(a *kernels.Reduction) { a.Call.Op = kernels.Max },
		"(avg) of 500 bfloat16":        func(a *kernels.Reduction) { a.Call.Op = kernels.Avg },
		"of 500 uint8":                 func(a *kernels.Reduction) { a.Call.DType = kernels.Uint8 },
		"all-to-all":                   func(a *kernels.Reduction) { a.Call.Collective = kernels.AllToAll },
		"reduce-scatter (max)":         func(a *kernels.Reduction) { a.Call.Collective, a.Call.Op = kernels.ReduceScatter, kernels.Max },
		"too many chunks": func(a *kernels.Reduction) {
			a.Bounds = []int64{0, 1 << 33, 1 << 34}
		},
	} {
		a := good
		change(&a)
		require.ErrorContains(t, x.validate(&a), says)
	}
	packets := good
	packets.Algorithm, packets.Packets, packets.Multicast = kernels.OneShot, true, kernels.MulticastPackets
	packets.Call.Op, packets.Call.Count, packets.Bounds = kernels.Max, 333, []int64{0, 166, 333} // 666 bytes are the most
	require.NoError(t, x.validate(&packets))
	for says, change := range map[string]func(a *kernels.Reduction){
		"packets of multicast of 668 bytes, at most 666": func(a *kernels.Reduction) { a.Call.Count, a.Bounds = 334, []int64{0, 166, 334} },
		"(two-shot) by packets of multicast":             func(a *kernels.Reduction) { a.Algorithm = kernels.TwoShot },
		"reduce-scatter (max)":                           func(a *kernels.Reduction) { a.Call.Collective = kernels.ReduceScatter },
		"beside those of multicast":                      func(a *kernels.Reduction) { a.Multicast = kernels.NoMulticast },
	} {
		a := packets
		change(&a)
		require.ErrorContains(t, x.validate(&a), says)
	}
	scatter := packets
	scatter.Call.Collective, scatter.Multicast = kernels.ReduceScatter, kernels.NoMulticast
	require.NoError(t, x.validate(&scatter), "whose packets have other places")
	x.c.Multicast = false
	require.ErrorContains(t, x.validate(&good), "bounds without it")
	require.ErrorContains(t, x.validate(&packets), "bounds without it")
}

// withPlan are bounds of two ranks with a plan, completed.
func withPlan(t *testing.T) (*kernels.ReduceBounds, *plan.Checked) {
	t.Helper()
	p, err := plan.Check(plans.RingAllReduce(2))
	require.NoError(t, err)
	c := &kernels.ReduceBounds{Size: 2, Blocks: 8}
	c.Plans.Add(p)
	newReductions(c, 0).defaults(132, 96)
	return c, p
}

func TestPlansThatCannotRunAreRefused(t *testing.T) {
	c, p := withPlan(t)
	other, err := plan.Check(plans.RingAllReduce(2))
	require.NoError(t, err)
	x := newReductions(c, 0)
	require.NoError(t, x.check())
	x.layout()
	good := kernels.Reduction{Family: c, Call: kernels.ReduceCall{Collective: kernels.AllReduce, DType: kernels.Float32, Count: 250},
		Algorithm: kernels.Planned, Plan: p, Bounds: []int64{0, 125, 250}, Blocks: 8, Launched: kernels.Launched{Timeout: time.Second}}
	require.NoError(t, x.validate(&good))
	for says, change := range map[string]func(a *kernels.Reduction){
		"not in the bounds": func(a *kernels.Reduction) { a.Plan = other },
		"packets true":      func(a *kernels.Reduction) { a.Packets = true },
		"rate 100":          func(a *kernels.Reduction) { a.Rate = 100 },
		"0 blocks":          func(a *kernels.Reduction) { a.Blocks = 0 },
		"9 blocks":          func(a *kernels.Reduction) { a.Blocks = 9 },
		"more parts than":   func(a *kernels.Reduction) { a.Call.Count = 1 << 50 },
	} {
		a := good
		change(&a)
		require.ErrorContains(t, x.validate(&a), says)
	}
	c.Plans.SlotBytes = 7 * planGrain
	require.ErrorContains(t, newReductions(c, 0).check(), "slots of 896 bytes for plans in 8 blocks")
}

// Semaphores are zero before the first call; programs and slots lie behind them.
func TestPlansHaveRoomBehindReductions(t *testing.T) {
	c, p := withPlan(t)
	x := newReductions(c, 4096)
	l, r, b := x.layout(), x.block(), x.planBlock()
	require.Equal(t, kernels.Layout{Bytes: b.end - 4096, Zero: b.programs - 4096}, l)
	require.LessOrEqual(t, r.end, b.semaphores)
	require.Equal(t, b.semaphores+2*int64(p.Semaphores+1)*8*lineBytes, b.programs)
	require.Equal(t, b.programs, x.programs[0].at)
	require.LessOrEqual(t, x.programs[0].at+x.programs[0].bytes, b.inputs)
	require.LessOrEqual(t, b.end-b.inputs, c.StagingBytes)
	require.Equal(t, b.end, b.scratch+int64(p.Plan.Scratch)*c.Plans.SlotBytes)
}

// A step as the kernel reads it: signals are counted by semaphore, and places name ranks.
func TestAPlanIsEncoded(t *testing.T) {
	_, p := withPlan(t)
	steps, words := encode(p, 1)
	require.Equal(t, planStep{kind: planCopy, to: planScratch << planPlaceBuffer, rows: 1, chunk: 1}, steps[0])
	require.Equal(t, uint32(planInput<<planPlaceBuffer|1<<planPlaceRank|1), words[0])
	require.Equal(t, planStep{kind: planSignal, number: 1, total: 2}, steps[1])
	require.Equal(t, planStep{kind: planWait, number: 1, total: 2}, steps[2])
	require.Equal(t, planStep{kind: planReduce, to: planOutput<<planPlaceBuffer | 1<<planPlaceRank, first: 1, rows: 2, last: 1}, steps[3])
	require.Equal(t, uint32(2), steps[5].number)
	require.Len(t, text(steps, words), len(steps)*40+len(words)*4)
}

// The kernels' record holds the flags of a call and the number of blocks next to the call itself.
func TestAReductionsMismatchIsDecoded(t *testing.T) {
	mine := kernels.ReduceCall{Collective: kernels.AllReduce, DType: kernels.BFloat16, Op: kernels.Max, Count: 1000}
	theirs := kernels.ReduceCall{Collective: kernels.Broadcast, DType: kernels.Uint8, Count: 77, Shape: 2}
	f := faultWords{kind: faultMismatch, peer: 1, epoch: 5, expected: 1000, sent: 77, theirShape: 2,
		mine: 12<<32 | reduceOneShot<<24 | mine.Word(), theirs: 96<<32 | reducePull<<24 | theirs.Word()}
	err := (*reductions)(nil).fault(&f, 3)
	require.Equal(t, &kernels.CallMismatchError{Rank: 3, Peer: 1, Mine: mine, Theirs: theirs, Epoch: 5}, err)
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.True(t, kernels.Recoverable(err))
	f.kind = faultTimeout
	require.NoError(t, (*reductions)(nil).fault(&f, 3))
}
