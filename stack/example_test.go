package stack_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/stack"
)

// Three ranks, of which one is lost; the others go on. Ranks are goroutines here, to fit on the page.
func ExampleStack_Reopen() {
	ctx := context.Background()
	groups, err := comm.Local(3)
	if err != nil {
		fmt.Println(err)
		return
	}
	options := stack.Options{Dispatcher: &dispatch.Options{Experts: 6, TopK: 2, Hidden: 16, MaxTokens: 64,
		// Experts 3 to 5 have a copy on another rank.
		Placement: &dispatch.Placement{Ranks: [][]int{{0}, {0}, {1}, {1, 2}, {2, 0}, {2, 1}}}}}
	var wg sync.WaitGroup
	for rank, g := range groups {
		wg.Go(func() {
			s, err := stack.Open(ctx, g, device.Host(), options)
			if err != nil {
				fmt.Println(err)
				return
			}
			// Steps of the job would be here, until one ends with an error that is comm.ErrPeerLost.
			if err := g.Barrier(ctx); err != nil {
				fmt.Println(err)
			}
			if rank == 2 {
				g.Kill()
				return
			}
			<-g.Done()
			smaller, err := g.Shrink(ctx)
			if err != nil {
				fmt.Println(err)
				return
			}
			if s, err = s.Reopen(ctx, smaller); err != nil {
				fmt.Println(err)
				return
			}
			g.Close()
			if smaller.Rank() == 0 {
				fmt.Println(g.Err())
				fmt.Println(smaller, "has experts", s.Dispatcher.Placement(), "and lost", s.Moves)
			}
			if err := s.Close(ctx); err != nil {
				fmt.Println(err)
			}
			smaller.Close()
		})
	}
	wg.Wait()
	// Output:
	// comm: rank 2: peer lost: killed
	// world/survivors[0/2] has experts 0:[0] 1:[0] 2:[1] 3:[1] 4:[0] 5:[1] and lost []
}
