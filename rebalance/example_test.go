package rebalance_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/rebalance"
	"github.com/switchyard-moe/switchyard/stack"
)

// Two ranks, of which one has both busy experts. After 10 steps they change an expert, and its weights come along.
func ExampleLoop_Step() {
	ctx := context.Background()
	groups, err := comm.Local(2)
	if err != nil {
		fmt.Println(err)
		return
	}
	var wg sync.WaitGroup
	for rank, g := range groups {
		wg.Go(func() {
			defer g.Close()
			s, err := stack.Open(ctx, g, device.Host(), stack.Options{Dispatcher: &dispatch.Options{Experts: 4, TopK: 1, Hidden: 4, MaxTokens: 8}})
			if err != nil {
				fmt.Println(err)
				return
			}
			defer s.Close(ctx)
			weights := []float32{0, 0.5, 1, 1.5} // two of each expert: e, e + 0.5
			if rank == 1 {
				weights = []float32{2, 2.5, 3, 3.5}
			}
			l, err := rebalance.New(ctx, s.Heap, s.Dispatcher, []memory.View{memory.Wrap(weights)}, rebalance.Options{Window: 10})
			if err != nil {
				fmt.Println(err)
				return
			}
			defer l.Close(ctx)
			for range 10 {
				// The job's steps. The tokens choose experts 0 and 1 three times as often as 2 and 3.
				h, err := s.Dispatcher.Dispatch(nil, dispatch.Tokens{X: memory.Wrap(make([]float32, 8*4)), Experts: memory.Wrap([]int32{0, 0, 0, 1, 1, 1, 2, 3})})
				if err != nil {
					fmt.Println(err)
					return
				}
				h.Release()
				change, err := l.Step(ctx, nil)
				if err != nil {
					fmt.Println(err)
					return
				}
				if change.Moved() && rank == 0 {
					fmt.Printf("imbalance %.1f, now %.1f: %v\n", change.Before, change.After, s.Dispatcher.Placement())
					fmt.Println("weights of rank 0:", weights)
				}
			}
		})
	}
	wg.Wait()
	// Output:
	// imbalance 1.5, now 1.0: 0:[0] 1:[1] 2:[0] 3:[1]
	// weights of rank 0: [0 0.5 2 2.5]
}
