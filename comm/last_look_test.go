package comm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// A wait whose time is over looks once more: what it waits for may have come since it looked last. Each of these tests has that happen again and
// again, since who hears of both at the same time may choose.
const lastLooks = 40

// until waits for what ok says, which is called with n.mu held.
func (n *node) until(ok func() bool) {
	for done := false; !done; time.Sleep(20 * time.Microsecond) {
		n.mu.Lock()
		done = ok()
		n.mu.Unlock()
	}
}

func TestF1_AJoinThatIsLateLooksOnceMore(t *testing.T) {
	const size = 3
	for range lastLooks {
		ctx, addr := testContext(t), freeAddr(t)
		var ms []*meeting
		for r := range size {
			cfg := Config{Rank: r, Size: size, Addr: addr}
			require.NoError(t, cfg.validate())
			ms = append(ms, newMeeting(&cfg, fmt.Sprint("@", r), func(error) {}))
		}
		h, err := newHost(ctx, ctx, ms[0])
		require.NoError(t, err)
		until := func(phase slotPhase) {
			for there := 0; there < size; time.Sleep(20 * time.Microsecond) {
				h.mu.Lock()
				there = 0
				for r := range h.slots {
					if h.slots[r].phase >= phase {
						there++
					}
				}
				h.mu.Unlock()
			}
		}
		guests := make([]*guest, size)
		got, errs := make([][]string, size), make([]error, size)
		var all sync.WaitGroup
		for r := 1; r < size; r++ {
			guests[r], err = newGuest(ctx, ms[r])
			require.NoError(t, err)
			all.Go(func() { got[r], errs[r] = guests[r].addrs(ctx) })
		}
		until(slotAccepted)
		got[0], errs[0] = h.addrs(proctest.Moment(ctx, func() { until(slotPresent) })) // they answer that they are still there
		all.Wait()
		requireAll(t, errs)
		for _, addrs := range got {
			require.Equal(t, []string{"@0", "@1", "@2"}, addrs)
		}
		for _, g := range guests[1:] {
			all.Go(func() { g.end(ctx) })
		}
		h.end(ctx)
		all.Wait()
	}
}

// A rank that gives up when rank 0 has just told it where all are does not say that rank 0 does not answer.
func TestF2_WhoGivesUpAsTheAddressesComeDoesNotBlameRankZero(t *testing.T) {
	ctx, addr := testContext(t), freeAddr(t)
	var ms []*meeting
	for r := range 2 {
		cfg := Config{Rank: r, Size: 2, Addr: addr}
		require.NoError(t, cfg.validate())
		ms = append(ms, newMeeting(&cfg, fmt.Sprint("@", r), func(error) {}))
	}
	h, err := newHost(ctx, ctx, ms[0])
	require.NoError(t, err)
	g, err := newGuest(ctx, ms[1])
	require.NoError(t, err)
	sent := make(chan error, 1)
	go func() {
		_, err := h.addrs(ctx)
		sent <- err
	}()
	kind, _, err := g.s.recv()
	require.NoError(t, err)
	require.Equal(t, framePresent, kind)
	require.NoError(t, g.s.send(framePresent, nil))
	require.NoError(t, <-sent)
	over, cancel := context.WithTimeout(ctx, 0)
	defer cancel()
	err = g.giveUp(g.absent(over, nil, "waiting for the other ranks"))
	require.ErrorIs(t, err, ErrTimeout)
	require.ErrorContains(t, err, "waiting for the other ranks")
	require.NotContains(t, err.Error(), "rank 0")
	requirePeer(t, h.giveUp(errors.New("the mesh does not stand")), 1, ErrTimeout)
	g.end(ctx)
	h.end(ctx)
}

// What a rank has said to the agreement counts, also where the rank is gone a moment later: then the next group has failed, as all find.
func TestF1_AShrinkThatIsLateLooksOnceMore(t *testing.T) {
	for _, goes := range []bool{false, true} {
		t.Run(fmt.Sprint("the other one goes: ", goes), func(t *testing.T) {
			for range lastLooks {
				ctx := testContext(t)
				gs, err := Local(2)
				require.NoError(t, err)
				next, errs := make([]*Group, 2), make([]error, 2)
				var other sync.WaitGroup
				next[0], errs[0] = gs[0].Shrink(proctest.Moment(ctx, func() {
					other.Go(func() { next[1], errs[1] = gs[1].Shrink(ctx) })
					gs[0].n.until(func() bool { return len(gs[0].shrinkAbsent()) == 0 })
					if goes {
						other.Wait()
						gs[1].Kill()
						gs[0].n.until(func() bool { return gs[0].n.peers[1].how != nil })
					}
				}))
				other.Wait()
				requireAll(t, errs)
				for _, g := range next {
					require.Equal(t, 2, g.Size())
				}
				for _, g := range append(gs, next...) {
					g.Close()
				}
			}
		})
	}
}

func TestF1_AReplaceThatIsLateLooksOnceMore(t *testing.T) {
	const me, first, second = 0, 1, 2
	living := []int{me, first, second}
	begin := func() (*node, chan answer) { return newNode(me, 4, nil), make(chan answer, 8) }
	for range lastLooks {
		n, answers := begin()
		require.NoError(t, n.connected(proctest.Moment(testContext(t), func() {
			answers <- answer{from: first}
			answers <- answer{from: second}
		}), answers, living))
	}
	n, answers := begin()
	answers <- answer{from: first}
	answers <- answer{from: first} // which counts once
	err := n.connected(proctest.Moment(testContext(t), func() {}), answers, living)
	require.ErrorIs(t, err, ErrTimeout)
	require.ErrorContains(t, err, "1 of 2 ranks are connected")
}

// A rank that is lost holds up a replacement where it has not connected. One that has, and is lost then, does not, also where both are news.
func TestF2_WhoIsLostOnceItHasConnectedHoldsUpNoReplacement(t *testing.T) {
	const me, first, second = 0, 1, 2
	for _, c := range []struct {
		name     string
		connects bool
	}{{"before", false}, {"after", true}} {
		t.Run(c.name, func(t *testing.T) {
			n, answers := newNode(me, 4, nil), make(chan answer, 8)
			end := make(chan error, 1)
			n.mu.Lock()
			go func() { end <- n.connected(testContext(t), answers, []int{me, first, second}) }()
			time.Sleep(2 * newsGrace) // it looks who is lost, and has to wait for that
			n.peers[first].how = &failure{code: failLost, culprit: first}
			if c.connects {
				answers <- answer{from: first}
			}
			n.mu.Unlock()
			if !c.connects {
				err := <-end
				require.ErrorIs(t, err, ErrPeerLost)
				require.ErrorContains(t, err, "rank 1, while it was to connect")
				return
			}
			time.Sleep(2 * newsGrace) // it looks again
			answers <- answer{from: second}
			require.NoError(t, <-end)
		})
	}
}
