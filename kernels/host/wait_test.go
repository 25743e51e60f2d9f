package host

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/rails/double"
	"github.com/switchyard-moe/switchyard/kernels"
)

func TestTheEnginesWordsFitTheHeader(t *testing.T) {
	require.LessOrEqual(t, passesOffset+4, kernels.SegmentsOffset)
}

type writer func(b []byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

// A rank that waits says for whom, in which call and for what, again and again; at its deadline the error says as much.
func TestWaitsSayForWhom(t *testing.T) {
	w := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, EagerBytes: 100, PacketBytes: 20}, 0)
	var log bytes.Buffer
	twice := make(chan struct{})
	lines := 0
	w.engines[0].space.Log = slog.New(slog.NewTextHandler(writer(func(line []byte) (int, error) {
		if lines++; lines == 2 {
			close(twice)
		}
		return log.Write(line)
	}), nil))
	w.engines[0].tellEvery = 20 * time.Millisecond
	m := [][]int64{{0, 5}, {7, 0}}
	call := func(rank int, timeout time.Duration) error {
		ro := routes(m, rank)
		return w.ports[rank].Launch(nil, &kernels.AllToAllV{Routes: ro, Src: buffer(make([]byte, ro.SendBytes[1-rank]), -1),
			Dst: buffer(make([]byte, ro.RecvBytes[1-rank]), -1), Launched: kernels.Launched{Timeout: timeout}})
	}
	var ranks sync.WaitGroup
	ranks.Go(func() {
		<-twice
		if err := call(1, time.Minute); err != nil {
			t.Error(err)
		}
	})
	start := time.Now()
	require.NoError(t, call(0, time.Minute))
	took := time.Since(start)
	ranks.Wait()
	said := strings.Split(strings.TrimSpace(log.String()), "\n")
	require.GreaterOrEqual(t, len(said), 2, "again and again")
	require.LessOrEqual(t, len(said), int(took/w.engines[0].tellEvery))
	for _, line := range said {
		require.Contains(t, line, `level=INFO msg=waiting rank=0 for=1 call="1, alltoallv (7 bytes from it and 5 to it)" waited=`)
		require.Contains(t, line, `timeout=1m0s seen="rank 1 has made 0 calls; this is call 1, alltoallv`)
	}

	err := call(0, 30*time.Millisecond)
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.ErrorContains(t, err, "alltoallv: rank 1, epoch 2: timed out after 30ms (7 bytes from it and 5 to it): rank 1 has made 1 call; this is call 2, alltoallv")
}

// A rank that sleeps wakes at once when bytes come from elsewhere, in one process and over several.
func TestRingEndsASleep(t *testing.T) {
	for _, inProcess := range []bool{true, false} {
		w := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, EagerBytes: 100, PacketBytes: 20}, 0)
		e := w.engines[0]
		if !inProcess {
			e.bells = nil
		}
		var s sleeper
		bell := e.enter(&s)
		slept := make(chan time.Duration, 1)
		go func() {
			start := time.Now()
			e.sleep(&s, bell, 5*time.Minute)
			slept <- time.Since(start)
		}()
		time.Sleep(20 * time.Millisecond)
		e.Ring()
		require.Less(t, <-slept, time.Minute, "bells: %v", inProcess)
		e.leave(&s)
	}
}

// A rank that waits itself is not blamed by those that wait for it in a later call: rank 1 has reached only rank 0 with its last messages.
func TestF2_WhoWaitsItselfIsNotBlamed(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, c := range []struct {
		name         string
		first, after time.Duration // how long rank 2 waits in the first call, rank 0 in the one after
	}{{"it waits", time.Minute, proctest.Scaled(time.Second)}, {"it has given up", 100 * time.Millisecond, proctest.Scaled(2 * time.Second)}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 3, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, EagerBytes: 100, PacketBytes: 20}, 0)
			m := [][]int64{{0, 5, 5}, {5, 0, 5}, {5, 5, 0}}
			call := func(rank int, timeout time.Duration) error {
				ro := routes(m, rank)
				if rank == 1 {
					ro.Order = []int32{0, 2}
				}
				return w.ports[rank].Launch(nil, &kernels.AllToAllV{Routes: ro, Src: buffer(make([]byte, 10), -1), Dst: buffer(make([]byte, 10), -1),
					Launched: kernels.Launched{Timeout: timeout}})
			}
			stopped := make(chan struct{})
			w.engines[1].step = func(_ point, peer int) error {
				if peer == 2 {
					<-stopped
				}
				return nil
			}
			var ranks sync.WaitGroup
			ranks.Go(func() { _ = call(1, time.Minute) })
			ranks.Go(func() {
				if err := call(2, c.first); c.first < c.after {
					var peer *comm.PeerError
					if assert.ErrorAs(t, err, &peer) {
						assert.Equal(t, 1, peer.Rank, err)
					}
				}
			})
			require.NoError(t, call(0, time.Minute))
			err := call(0, c.after)
			var peer *comm.PeerError
			require.ErrorAs(t, err, &peer)
			require.ErrorIs(t, err, comm.ErrTimeout)
			require.Equal(t, 1, peer.Rank, err)
			require.ErrorContains(t, err, "rank 2 waits for rank 1 itself; rank 1 has made 1 call; this is call 2")
			close(stopped)
			ranks.Wait()
		})
	}
}

// A rank that was stopped in a wait still says for whom it waited. Rows: who waits for whom, -1 for nobody, how many calls each has made, and who
// is seen to run: the others are not, in rows that name nobody.
func TestF2_TheCulpritOfACircle(t *testing.T) {
	const at = kernels.HeaderBytes
	for _, c := range []struct {
		waitFor, calls []int
		from, culprit  int
		runs           []int
	}{
		{[]int{-1, -1, -1, -1}, []int{1, 1, 1, 1}, 2, 2, nil},
		{[]int{1, 2, 3, -1}, []int{1, 1, 1, 1}, 1, 3, nil},
		{[]int{1, 2, 0, -1}, []int{1, 1, 1, 1}, 1, 2, nil}, // rank 0 asks, so it is not 0
		{[]int{1, 2, 3, 2}, []int{2, 2, 2, 1}, 1, 3, nil},  // rank 3 is behind
		{[]int{1, 2, 3, 2}, []int{2, 2, 2, 2}, 1, 2, nil},  // ranks 1 and 3 wait for rank 2
		{[]int{1, 1, 9, 9}, []int{1, 1, 1, 1}, 1, 1, nil},  // words that make no sense
		{[]int{1, 2, 3, 2}, []int{2, 2, 2, 2}, 1, 3, []int{0, 1, 2}},
		{[]int{1, 2, 3, 2}, []int{2, 2, 3, 2}, 1, 2, []int{0, 1, 3}},
		{[]int{1, 2, 3, 2}, []int{2, 2, 2, 1}, 1, 3, []int{0, 1, 2, 3}},
		{[]int{1, 2, 0, -1}, []int{1, 1, 1, 1}, 1, 1, []int{0, 2}},
	} {
		w := newWorld(t, 4, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256}, 0)
		e := w.engines[0]
		for p := range 4 {
			e.peers[p].awaited.Store(uint32(c.waitFor[p] + 1))
			e.word(p, at).Store(uint64(c.calls[p]))
		}
		over, running := make(chan struct{}), sync.WaitGroup{}
		running.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
					for _, p := range c.runs {
						e.peers[p].passes.Add(1)
					}
					runtime.Gosched()
				}
			}
		})
		assert.Equal(t, c.culprit, e.culprit(c.from, at), c)
		close(over)
		running.Wait()
	}
}

// Every operation of every family has a name of its own, which can be read in a peer's word.
func TestCallsHaveNamesOfTheirOwn(t *testing.T) {
	table := families()
	require.LessOrEqual(t, len(table), maxFamilies)
	w := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256}, 0)
	seen := make(map[string]bool)
	for place, f := range table {
		require.LessOrEqual(t, len(f.operations), maxOperations)
		for _, name := range f.operations {
			require.False(t, seen[name], "%s is an operation of two families", name)
			seen[name] = true
			code, ok := opcodeOf(place, f.operations, name)
			require.True(t, ok)
			require.Equal(t, name, code.String())
			own := w.engines[0].word(0, kernels.HeaderBytes)
			for _, epoch := range []uint64{1, 77, 1<<epochBits - 1, 1 << epochBits, 1<<40 + 3} {
				c := call{code, kernels.HeaderBytes, epoch}
				for ahead := -1; ahead <= 1; ahead++ {
					own.Store(epoch - uint64(ahead))
					got, a, ok := (&waiter{e: w.engines[0]}).callOf(c.word())
					require.True(t, ok)
					require.Equal(t, c, got)
					require.Equal(t, ahead, a)
				}
			}
		}
	}
	require.Equal(t, fmt.Sprintf("call of kind %d", len(table)<<numberBits), opcode(len(table)<<numberBits).String())
	require.Equal(t, "call of kind 15", opcode(maxOperations-1).String())
	far := call{0, 8<<40 - kernels.LineBytes, 1}
	require.EqualValues(t, far.at/kernels.LineBytes, far.word()>>(epochBits+opcodeBits), "offsets below 8 TiB fit")
}

// A rank that has waited in vain and makes another call does not wait any more for whom it waited then.
func TestF2_WhoGoesOnDoesNotWait(t *testing.T) {
	w := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, PacketBytes: 20}, 0)
	ro := routes([][]int64{{0, 5}, {5, 0}}, 0)
	err := w.ports[0].Launch(nil, &kernels.AllToAllV{Routes: ro, Src: buffer(make([]byte, 5), -1), Dst: buffer(make([]byte, 5), -1),
		Launched: kernels.Launched{Timeout: 20 * time.Millisecond}})
	require.ErrorIs(t, err, comm.ErrTimeout)
	own := &w.engines[0].peers[0]
	to, failed := w.engines[1].awaits(0)
	require.Equal(t, 1, to)
	require.EqualValues(t, gaveUpBit, failed)
	new(waiter).begin(w.ports[0].(*port), nil, call{at: kernels.HeaderBytes, epoch: 2}, time.Second)
	require.Zero(t, own.awaited.Load())
}

// A rank whose look has lost the core sleeps first in its next waits, and looks again after a rest.
func TestWaitsSleepFirstWhereLookingLosesTheCore(t *testing.T) {
	w := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, PacketBytes: 20}, 0)
	e, port := w.engines[0], w.ports[0].(*port)
	var wait waiter
	wait.begin(port, nil, call{at: kernels.HeaderBytes, epoch: 1}, 10*time.Second)
	require.NoError(t, wait.idle(wait.e.near(1)))
	require.True(t, wait.looks)
	require.NoError(t, wait.idle(wait.e.near(1)))
	require.False(t, wait.entered)
	time.Sleep(3 * time.Millisecond) // others have its core
	wait.busy()

	require.NoError(t, wait.idle(wait.e.near(1)))
	require.False(t, wait.looks)
	require.NoError(t, wait.idle(wait.e.near(1)))
	require.True(t, wait.entered, "peers know that it sleeps")
	start := time.Now()
	require.NoError(t, wait.idle(wait.e.near(1)))
	require.GreaterOrEqual(t, time.Since(start), sleepFor)
	wait.busy()

	e.began = e.began.Add(-time.Minute)
	require.NoError(t, wait.idle(wait.e.near(1)))
	require.True(t, wait.looks)
	wait.busy()
}

// A wait that is interrupted looks once more at what it waits for, which may have come before the interruption.
func TestF2_AnInterruptedWaitLooksOnceMore(t *testing.T) {
	for _, c := range []struct {
		name  string
		stage func(*waiter) bool
	}{
		{"first pass", func(w *waiter) bool { return w.polls == 0 }},
		{"looking", func(w *waiter) bool { return w.looks }},
		{"sleeping", func(w *waiter) bool { return w.entered }},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, PacketBytes: 20}, 0)
			var wait waiter
			wait.begin(w.ports[0].(*port), nil, call{at: kernels.HeaderBytes, epoch: 1}, time.Minute)
			for range 2 { // waits of one call
				for !c.stage(&wait) {
					require.NoError(t, wait.idle(wait.e.near(1)))
				}
				w.engines[0].abort.Store(1) // right behind a look
				require.NoError(t, wait.idle(wait.e.near(1)))
				wait.busy() // the next look has found it
				w.engines[0].abort.Store(0)
			}
			w.engines[0].abort.Store(1)
			var err error
			for err == nil {
				err = wait.idle(wait.e.near(1))
			}
			require.ErrorIs(t, err, comm.ErrAborted)
		})
	}
	t.Run("other host", func(t *testing.T) {
		w := newAcrossWorld(t, double.New(1, 0), 2, 1, 4, 512)
		w.open(t)
		var wait waiter
		wait.begin(w.ports[0].(*port), nil, call{at: kernels.HeaderBytes, epoch: 1}, time.Minute)
		for range 2 {
			w.engines[0].abort.Store(1)
			require.NoError(t, wait.idle(w.families(0)[0].across.far(1)))
			wait.busy()
		}
		require.NoError(t, wait.idle(w.families(0)[0].across.far(1)))
		require.ErrorIs(t, wait.idle(w.families(0)[0].across.far(1)), comm.ErrAborted)
	})
}

type noSizes struct{ plain }

func (noSizes) sizes(int) string { return "" }

// So does one whose time is over: what it waits for may have come between its last look and the deadline.
func TestF1_AWaitThatIsLateLooksOnceMore(t *testing.T) {
	here := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, PacketBytes: 20}, 0)
	across := newAcrossWorld(t, double.New(1, 0), 2, 1, 4, 512)
	across.open(t)
	for name, c := range map[string]struct {
		port kernels.Port
		idle func(*waiter) error
	}{
		"this host":  {here.ports[0], func(w *waiter) error { return w.idle(w.e.near(1)) }},
		"other host": {across.ports[0], func(w *waiter) error { return w.idle(across.families(0)[0].across.far(1)) }},
	} {
		t.Run(name, func(t *testing.T) {
			var wait waiter
			wait.begin(c.port.(*port), noSizes{}, call{at: kernels.HeaderBytes, epoch: 1}, 10*time.Millisecond)
			for range 2 {
				for wait.polls < lastLook {
					require.NoError(t, c.idle(&wait))
				}
				wait.busy() // the last look has found it
			}
			for wait.polls < lastLook {
				require.NoError(t, c.idle(&wait))
			}
			require.ErrorIs(t, c.idle(&wait), comm.ErrTimeout)
		})
	}
}

// A process that was stopped past its deadline while it waited for a rank of another host hears why its group has failed before it blames
// anybody, as it does for one of its own host. So does one whose connection to another host has failed.
func TestF2_AStoppedRankBlamesNoOtherHost(t *testing.T) {
	why := &comm.PeerError{Rank: 0, Err: comm.ErrPeerLost}
	for name, c := range map[string]struct {
		timeout time.Duration
		wait    func(*waiter, *far) error
	}{
		"it wakes late": {time.Second, func(w *waiter, p *far) error {
			w.from = time.Now().Add(-time.Minute)
			for {
				if err := w.idle(p); err != nil {
					return w.fail(p, err)
				}
			}
		}},
		"its connection has failed": {time.Minute, func(w *waiter, p *far) error {
			return w.fail(p, &comm.PeerError{Rank: 1, Err: comm.ErrPeerLost})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newAcrossWorld(t, double.New(1, 0), 2, 1, 4, 512)
			w.open(t)
			w.engines[0].why = func() error { return why }
			var wait waiter
			wait.begin(w.ports[0].(*port), nil, call{at: kernels.HeaderBytes, epoch: 1}, c.timeout)
			time.AfterFunc(10*time.Millisecond, func() { w.engines[0].abort.Store(1) })
			err := c.wait(&wait, w.families(0)[0].across.far(1))
			require.ErrorIs(t, err, why, "%v", err)
		})
	}
}

// A rank that gives its wait up and ends is not blamed by those whose calls end for that: the rank is that it waited for.
func TestF2_WhoGaveUpAndEndedIsNotBlamed(t *testing.T) {
	w := newWorld(t, 3, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, PacketBytes: 20}, 0)
	until := func(rank, peer int, timeout time.Duration) (wait waiter, err error) {
		wait.begin(w.ports[rank].(*port), noSizes{}, call{at: kernels.HeaderBytes, epoch: 1}, timeout)
		for err == nil {
			err = wait.idle(wait.e.near(peer))
		}
		return wait, err
	}
	wait, err := until(1, 2, time.Millisecond)
	require.ErrorIs(t, err, comm.ErrTimeout)
	_ = wait.fail(wait.e.near(2), err)
	for rank, want := range map[int]int{1: 2, 2: 2} { // who is lost, and who is to blame
		why := &comm.PeerError{Rank: rank, Err: comm.ErrPeerLost}
		w.engines[0].why = func() error { return why }
		w.engines[0].abort.Store(1)
		wait, err := until(0, rank, time.Minute)
		require.ErrorIs(t, err, comm.ErrAborted)
		var peer *comm.PeerError
		err = wait.fail(wait.e.near(rank), err)
		require.ErrorAs(t, err, &peer)
		require.Equal(t, want, peer.Rank, "%v", err)
		require.ErrorIs(t, err, comm.ErrPeerLost)
		require.Equal(t, rank != want, errors.Is(err, comm.ErrTimeout), "%v", err)
	}
}

// A rank that is lost has done its part in a call perhaps, as one that ends at an error that all have: the others still hear of each other.
func TestF2_ALossSparesTheOthersCalls(t *testing.T) {
	w := newWorld(t, 3, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, PacketBytes: 20}, 0)
	w.engines[0].why = func() error { return &comm.PeerError{Rank: 1, Err: comm.ErrPeerLost} }
	begin := func() (wait waiter) {
		wait.begin(w.ports[0].(*port), noSizes{}, call{at: kernels.HeaderBytes, epoch: 1}, time.Minute)
		return wait
	}
	w.engines[0].abort.Store(1)
	wait := begin()
	for range 10 {
		require.NoError(t, wait.idle(wait.e.near(2)))
	}
	require.Less(t, wait.polls, lastLook)
	wait.busy()
	require.NoError(t, wait.idle(wait.e.near(1)))
	require.GreaterOrEqual(t, wait.polls, lastLook)

	var err error
	for wait, start := begin(), time.Now(); err == nil; err = wait.idle(wait.e.near(2)) {
		require.Less(t, time.Since(start), time.Minute)
	}
	require.ErrorIs(t, err, comm.ErrAborted, "it does not last")

	var other waiter // rank 2 gives up, too
	other.begin(w.ports[2].(*port), noSizes{}, call{at: kernels.HeaderBytes, epoch: 1}, time.Minute)
	other.leaves(1, failedBit)
	wait = begin()
	require.NoError(t, wait.idle(wait.e.near(2)))
	require.GreaterOrEqual(t, wait.polls, lastLook)
}

// A transfer that fails since an earlier one has names whom that one does.
func TestF2_ATransferBehindAFailedOneNamesItsRank(t *testing.T) {
	var failed failedWait
	var first, second kernels.Turn
	issued := &atomic.Uint64{}
	first.Issued, second.Issued, first.Number, second.Number = issued, issued, 1, 2
	issued.Store(2)
	require.False(t, failed.late(&second))
	failed.fail(&first, &comm.PeerError{Rank: 2, Err: comm.ErrPeerLost})
	require.True(t, failed.late(&second))
	err := failed.error()
	var peer *comm.PeerError
	require.ErrorAs(t, err, &peer)
	require.Equal(t, 2, peer.Rank)
	require.ErrorIs(t, err, kernels.ErrFailed)
	require.EqualError(t, err, "kernels: an earlier call of this communicator failed: comm: rank 2: peer lost")
}

// A rank whose call has ended may interrupt the peer at once: all that the peer waits for is there.
func TestF2_AnInterruptionBehindACallSparesThePeer(t *testing.T) {
	w := newWorld(t, 2, kernels.ExchangeBounds{Slots: 2, SlotBytes: 256, EagerBytes: 100, PacketBytes: 20}, 0)
	for _, bytes := range []int64{5, 50, 200, 2000} { // a packet, eager, with a credit, in pieces
		m := [][]int64{{0, bytes}, {bytes, 0}}
		call := func(rank int) error {
			return w.ports[rank].Launch(nil, &kernels.AllToAllV{Routes: routes(m, rank), Src: buffer(make([]byte, bytes), -1),
				Dst: buffer(make([]byte, bytes), -1), Launched: kernels.Launched{Timeout: time.Minute}})
		}
		for range 1000 {
			var ranks sync.WaitGroup
			var errs [2]error
			ranks.Go(func() { errs[0] = call(0) })
			ranks.Go(func() {
				if errs[1] = call(1); errs[1] == nil {
					w.engines[0].Interrupt()
				}
			})
			ranks.Wait()
			require.NoError(t, errs[0])
			require.NoError(t, errs[1])
			w.engines[0].abort.Store(0)
		}
	}
}
