package explore_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/test/explore"
)

// Styles with the order of the built-in algorithms.
var (
	direct    = explore.Style{Order: alltoallv.Rotation}
	inPlace   = explore.Style{Order: alltoallv.Rotation, InPlace: true}
	inChunks  = explore.Style{Order: alltoallv.Rotation, InPlace: true, ChunkBytes: 8}
	pipelined = explore.Style{Order: alltoallv.Rotation, InPlace: true, Staged: true}
	ring      = explore.Style{Order: alltoallv.Rotation, Window: 1}
)

// Bounds that put messages of a few units into one mode. A unit has 4 bytes, a slot two units.
var (
	packets = kernels.ExchangeBounds{Slots: 1, SlotBytes: 8, PacketBytes: 8}
	eager   = kernels.ExchangeBounds{Slots: 1, SlotBytes: 8, EagerBytes: 8}
	credits = kernels.ExchangeBounds{Slots: 1, SlotBytes: 8}
	twoSlot = kernels.ExchangeBounds{Slots: 2, SlotBytes: 8}
	mixed   = kernels.ExchangeBounds{Slots: 2, SlotBytes: 8, PacketBytes: 4, EagerBytes: 8}
)

// limit is the most states of an exploration.
const limit = 1_000_000

// two is the split matrix of two ranks.
func two(a, b int64) [][]int64 { return [][]int64{{0, a}, {b, 0}} }

// all is the split matrix of n ranks that send the same to everybody.
func all(n int, bytes int64) [][]int64 {
	m := make([][]int64, n)
	for s := range m {
		m[s] = slices.Repeat([]int64{bytes}, n)
		m[s][s] = 0
	}
	return m
}

// gapped is a style whose messages land behind a gap, so that their places differ from call to call.
func gapped(s explore.Style, gap int64) explore.Style {
	s.Gap = gap
	return s
}

// calls makes a workload of equal calls.
func calls(c kernels.ExchangeBounds, times int, bytes [][]int64, styles ...explore.Style) *explore.Workload {
	w := explore.NewWorkload(len(bytes), c)
	for range times {
		w.Add(bytes, styles...)
	}
	return w
}

// holds explores a protocol that must keep all promises.
func holds(t *testing.T, w *explore.Workload, o explore.Options) {
	t.Helper()
	start := time.Now()
	r, err := explore.Check(explore.NewProtocol(w, o), limit)
	require.NoError(t, err)
	require.Nil(t, r.Violation, "%v", r.Violation)
	t.Logf("%d ranks, %d calls: %d states, %d actions, %d deep, %v", w.Block.Size, len(w.Calls), r.States, r.Moves, r.Depth, time.Since(start).Round(time.Millisecond))
}

// found explores a broken protocol, which must break a promise, in the given way unless that is nil.
func found(t *testing.T, w *explore.Workload, o explore.Options, way error) {
	t.Helper()
	r, err := explore.Check(explore.NewProtocol(w, o), limit)
	require.NoError(t, err)
	require.NotNil(t, r.Violation, "%v was not found in %d states", o.Bug, r.States)
	t.Logf("%v, found in %d states: %v", o.Bug, r.States, r.Violation)
	if way != nil {
		require.ErrorIs(t, r.Violation.Err, way)
	}
}

func TestEveryInterleavingKeepsThePromises(t *testing.T) {
	uneven := [][]int64{{0, 4, 8}, {12, 0, 0}, {20, 4, 0}}
	skewed := [][]int64{{0, 12, 4}, {8, 0, 16}, {0, 12, 0}}
	for _, c := range []struct {
		name string
		w    *explore.Workload
		o    explore.Options
	}{
		{"2 ranks/packets", calls(packets, 3, two(8, 8), direct), explore.Options{}},
		{"2 ranks/packets/relaxed", calls(packets, 3, two(8, 8), direct), explore.Options{Relaxed: true}},
		{"2 ranks/eager", calls(eager, 3, two(8, 8), direct), explore.Options{}},
		{"2 ranks/eager/relaxed", calls(eager, 3, two(8, 8), direct), explore.Options{Relaxed: true}},
		{"2 ranks/eager/one way", calls(eager, 4, two(8, 0), direct), explore.Options{}},
		{"2 ranks/empty", calls(credits, 4, two(0, 0), direct), explore.Options{}},
		{"2 ranks/staged", calls(twoSlot, 3, two(20, 12), direct), explore.Options{}},
		{"2 ranks/staged/relaxed", calls(credits, 2, two(12, 8), direct), explore.Options{Relaxed: true}},
		{"2 ranks/staged/threads", calls(twoSlot, 2, two(20, 20), direct), explore.Options{Concurrent: true}},
		{"2 ranks/in place", calls(credits, 3, two(8, 8), inPlace), explore.Options{}},
		{"2 ranks/in place/relaxed", calls(credits, 3, two(8, 8), inPlace), explore.Options{Relaxed: true}},
		{"2 ranks/in place/chunks", calls(twoSlot, 2, two(24, 16), inChunks), explore.Options{}},
		{"2 ranks/in place/threads", calls(credits, 3, two(8, 8), inPlace), explore.Options{Concurrent: true}},
		{"2 ranks/modes change", explore.NewWorkload(2, mixed).Add(two(4, 12), direct).Add(two(12, 8), inPlace).Add(two(8, 4), direct).
			Add(two(0, 20), direct), explore.Options{}},

		{"2 ranks/pulled", calls(credits, 3, two(12, 8), direct), explore.Options{Pull: true}},
		{"2 ranks/pulled/relaxed", calls(credits, 2, two(12, 8), direct), explore.Options{Pull: true, Relaxed: true}},
		{"2 ranks/pulled/giving up", calls(credits, 2, two(12, 8), direct), explore.Options{Pull: true, Quits: true}},
		{"2 ranks/pulled/giving up/relaxed", calls(credits, 2, two(8, 8), direct), explore.Options{Pull: true, Quits: true, Relaxed: true}},
		{"2 ranks/staged/giving up", calls(twoSlot, 2, two(20, 12), direct), explore.Options{Quits: true}},
		{"2 ranks/pulled, in place and staged", explore.NewWorkload(2, mixed).Add(two(12, 12), direct).Add(two(12, 20), inPlace).Add(two(20, 12), direct).
			Add(two(12, 20), pipelined), explore.Options{Pull: true}},

		{"3 ranks/packets", calls(packets, 3, all(3, 8), direct), explore.Options{}},
		{"3 ranks/packets/relaxed", calls(packets, 2, [][]int64{{0, 4, 0}, {4, 0, 4}, {0, 4, 0}}, direct), explore.Options{Relaxed: true}},
		{"3 ranks/eager", calls(eager, 3, all(3, 8), direct), explore.Options{}},
		{"3 ranks/eager/relaxed", calls(eager, 2, all(3, 4), direct), explore.Options{Relaxed: true}},
		{"3 ranks/eager/threads", calls(eager, 2, all(3, 4), direct), explore.Options{Concurrent: true, Lines: true}},
		{"3 ranks/staged", calls(credits, 2, all(3, 8), direct), explore.Options{}},
		{"3 ranks/pipelined", calls(twoSlot, 2, [][]int64{{0, 20, 4}, {4, 0, 0}, {0, 8, 0}}, pipelined), explore.Options{Lines: true}},
		{"3 ranks/in place", calls(credits, 2, all(3, 8), inPlace), explore.Options{}},
		{"3 ranks/in place/relaxed", calls(credits, 1, all(3, 4), inPlace), explore.Options{Relaxed: true}},
		{"3 ranks/pulled", calls(credits, 2, all(3, 8), direct), explore.Options{Pull: true}},
		{"3 ranks/pulled/giving up", calls(credits, 1, all(3, 8), direct), explore.Options{Pull: true, Quits: true, Lines: true}},
		{"3 ranks/pulled ring", calls(credits, 2, all(3, 8), ring), explore.Options{Pull: true, Lines: true}},
		{"3 ranks/ring", calls(credits, 3, all(3, 8), ring), explore.Options{}},
		{"3 ranks/ring/chunks", calls(twoSlot, 2, [][]int64{{0, 20, 4}, {4, 0, 20}, {20, 4, 0}}, ring), explore.Options{Lines: true}},
		{"3 ranks/modes change", explore.NewWorkload(3, mixed).Add(uneven, direct).Add(skewed, ring).Add(uneven, direct), explore.Options{Lines: true}},
		// X2: every rank chooses for itself.
		{"3 ranks/algorithms differ", calls(mixed, 2, all(3, 12), ring, inPlace, pipelined), explore.Options{Lines: true}},

		{"4 ranks/ring", calls(credits, 1, all(4, 4), ring), explore.Options{Lines: true}},
		{"4 ranks/eager", calls(eager, 2, [][]int64{{0, 4, 0, 0}, {0, 0, 4, 0}, {0, 0, 0, 0}, {4, 0, 0, 0}}, direct), explore.Options{Lines: true}},
	} {
		t.Run(c.name, func(t *testing.T) { holds(t, c.w, c.o) })
	}
}

func TestKnownBugsAreFound(t *testing.T) {
	oneWay := [][]int64{{0, 8, 0}, {0, 0, 0}, {0, 0, 0}}
	for _, c := range []struct {
		name string
		w    *explore.Workload
		o    explore.Options
		way  error
	}{
		{"X1 skipped wait on a zero count", calls(eager, 3, two(8, 0), direct), explore.Options{Bug: explore.SkipZeroWait}, explore.ErrData},
		{"X1 skipped wait on a zero count, packets", calls(packets, 3, two(8, 0), direct), explore.Options{Bug: explore.SkipZeroWait}, explore.ErrDeadlock},
		{"X1 skipped wait on a zero count, 3 ranks", calls(eager, 3, oneWay, direct), explore.Options{Bug: explore.SkipZeroWait, Lines: true}, explore.ErrData},
		{"X2 a cache miss takes for granted that all miss", explore.NewWorkload(3, eager).Add(all(3, 4), direct).
			Add([][]int64{{0, 8, 4}, {4, 0, 4}, {4, 4, 0}}, direct), explore.Options{Bug: explore.CacheMissMeets, Lines: true}, explore.ErrDeadlock},
		{"X2 a cache hit takes the receiver's displacement for granted", explore.NewWorkload(3, credits).
			Add([][]int64{{0, 0, 8}, {0, 0, 0}, {0, 0, 0}}, inPlace).Add([][]int64{{0, 0, 8}, {0, 0, 0}, {0, 0, 0}}, gapped(inPlace, 8)),
			explore.Options{Bug: explore.CacheKeepsPlace}, explore.ErrData},
		{"X3 missing credit, in place", calls(credits, 2, two(8, 8), inPlace), explore.Options{Bug: explore.MissingCredit}, nil},
		{"X3 missing credit, one slot", calls(credits, 1, two(16, 8), direct), explore.Options{Bug: explore.MissingCredit}, explore.ErrData},
		{"X3 grant before copy", calls(credits, 1, two(16, 8), direct), explore.Options{Bug: explore.GrantBeforeCopy}, explore.ErrData},
		{"X3 one eager buffer", calls(eager, 2, two(8, 8), direct), explore.Options{Bug: explore.OneEagerBuffer}, explore.ErrData},
		{"X3 one packet buffer", calls(packets, 2, two(8, 8), direct), explore.Options{Bug: explore.OnePacketBuffer}, explore.ErrDeadlock},
		{"X3 one signal line", explore.NewWorkload(2, eager).Add(two(8, 8), direct).Add(two(4, 8), direct),
			explore.Options{Bug: explore.OneSignalLine}, explore.ErrCount},
		{"X3 two-state semaphore", calls(eager, 2, two(8, 8), direct), explore.Options{Bug: explore.TwoStateSemaphore}, nil},
		{"X3 two-state semaphore, 3 ranks", calls(eager, 2, all(3, 4), direct), explore.Options{Bug: explore.TwoStateSemaphore, Lines: true}, nil},
		{"X9 epochs modulo two, eager", calls(eager, 3, two(8, 8), direct), explore.Options{Bug: explore.TwoEpochs}, explore.ErrData},
		{"X9 epochs modulo two, packets", calls(packets, 3, two(8, 8), direct), explore.Options{Bug: explore.TwoEpochs}, explore.ErrData},
		{"X9 epochs modulo two, credits", calls(credits, 3, two(8, 8), inPlace), explore.Options{Bug: explore.TwoEpochs}, nil},
		{"X4 signal before data, eager", calls(eager, 1, two(8, 8), direct), explore.Options{Bug: explore.SignalBeforeData}, explore.ErrData},
		{"X4 signal before data, in place", calls(credits, 1, two(8, 8), inPlace), explore.Options{Bug: explore.SignalBeforeData}, nil},
		{"X4 signal before its total", calls(eager, 1, two(8, 8), direct), explore.Options{Bug: explore.SignalBeforeTotal}, explore.ErrCount},
		{"X4 signal without release, eager", calls(eager, 1, two(8, 8), direct), explore.Options{Bug: explore.PlainSignal, Relaxed: true}, nil},
		{"X4 signal without release, in place", calls(credits, 1, two(8, 0), inPlace), explore.Options{Bug: explore.PlainSignal, Relaxed: true}, explore.ErrData},
		{"X4 credit before its place", calls(credits, 1, two(8, 8), inPlace), explore.Options{Bug: explore.CreditBeforePlace}, nil},
		{"X4 credit without release", calls(credits, 1, two(8, 8), direct), explore.Options{Bug: explore.PlainCredit, Relaxed: true}, explore.ErrCredit},
		{"X3 a credit says that a message was read", explore.NewWorkload(2, credits).Add(two(8, 0), direct).Add(two(8, 0), inPlace),
			explore.Options{Bug: explore.TakenAsCredit, Pull: true}, explore.ErrDeadlock},
		{"F1 an offer is not taken back", calls(credits, 1, two(8, 8), direct), explore.Options{Bug: explore.KeepOffer, Pull: true, Quits: true}, explore.ErrData},
		{"F1 a message is taken without another look at its offer", calls(credits, 1, two(8, 8), direct),
			explore.Options{Bug: explore.TakeWithoutLook, Pull: true, Quits: true}, explore.ErrData},
		{"X7 return before the sends are done, pulled", calls(credits, 2, two(8, 8), direct), explore.Options{Bug: explore.ReturnBeforeSends, Pull: true}, nil},
		{"X7 return before the sends are done", calls(credits, 2, two(8, 8), inPlace), explore.Options{Bug: explore.ReturnBeforeSends}, explore.ErrData},
	} {
		t.Run(c.name, func(t *testing.T) {
			right := c.o
			right.Bug = explore.NoBug
			holds(t, c.w, right)
			found(t, c.w, c.o, c.way)
		})
	}

	t.Run("X8 a ring waits on the rank it sends to", func(t *testing.T) {
		for _, n := range []int{3, 4} {
			// The window of the receivers alone would forgive it: whoever has granted is served.
			w, o := calls(credits, 1, all(n, 4), ring), explore.Options{Lines: true, Bug: explore.WindowOnSends}
			holds(t, w, o)
			for _, r := range w.Calls[0].Routes {
				r.ReverseOrder = r.Order
			}
			found(t, w, o, explore.ErrDeadlock)
			o.Bug = explore.NoBug
			holds(t, w, o)
		}
	})
	t.Run("X1 a zero count is left out on both sides", func(t *testing.T) {
		w := calls(eager, 3, two(8, 0), direct)
		holds(t, w, explore.Options{})
		for _, c := range w.Calls {
			c.Routes[0].ReverseOrder, c.Routes[1].Order = nil, nil
		}
		found(t, w, explore.Options{}, explore.ErrAhead)
	})
}

// Orders that differ need four ranks to be in each other's way: with three, whoever sends to a rank first is the one it
// receives from first, in either order.
func TestX2_RingsInDifferentOrders(t *testing.T) {
	butterfly := explore.Style{Order: func(rank, _ int) []int { return []int{rank ^ 1, rank ^ 2, rank ^ 3} }, Window: 1}
	mixtures := func(mixture int) *explore.Workload {
		styles := []explore.Style{ring, ring, ring, ring}
		for rank := range styles {
			if mixture>>rank&1 == 1 {
				styles[rank] = butterfly
			}
		}
		return calls(credits, 1, all(4, 4), styles...)
	}
	for _, m := range []int{0b0001, 0b0101, 0b1010} { // ranks 1 and 3 receive in the same order either way
		holds(t, mixtures(m), explore.Options{Lines: true})
	}
	found(t, mixtures(0b0101), explore.Options{Lines: true, Bug: explore.WindowOnSends}, explore.ErrDeadlock)
}
