package comm

import (
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A rank that has been accepted keeps its connection, however many others connect at that moment and however few places there are
// for connections that have proven nothing.
func TestF4_AcceptedRanksAreNotEvicted(t *testing.T) {
	const joins, size = 20, 4
	for range joins {
		ls, addrs := make([]*Listener, size), make([]string, size)
		for r := range ls {
			l, err := Listen(Config{Rank: r, Size: size, unproven: 2, JoinTimeout: time.Minute})
			require.NoError(t, err)
			ls[r], addrs[r] = l, l.Addr()
		}
		over := make(chan struct{})
		var crowd sync.WaitGroup
		for range 2 {
			crowd.Go(func() {
				for {
					select {
					case <-over:
						return
					default:
					}
					if c, err := net.Dial("unix", addrs[0]); err == nil {
						defer c.Close()
					}
					time.Sleep(50 * time.Microsecond)
				}
			})
		}
		gs, errs := make([]*Group, size), make([]error, size)
		var wg sync.WaitGroup
		for r, l := range ls {
			wg.Go(func() { gs[r], errs[r] = l.Join(testContext(t), addrs) })
		}
		wg.Wait()
		close(over)
		crowd.Wait()
		requireAll(t, errs)
		requireAll(t, onEach(gs, func(g *Group) error { return g.Barrier(testContext(t)) }))
		requireAll(t, onEach(gs, func(g *Group) error { return g.Close() }))
	}
}

// All ranks may connect at once.
func TestF4_EveryRankHasAPlace(t *testing.T) {
	require.GreaterOrEqual(t, newUnproven(&Config{Size: MaxSize}).limit, MaxSize)
	require.GreaterOrEqual(t, newUnproven(&Config{Size: 2}).limit, minUnprovenConns)
}
