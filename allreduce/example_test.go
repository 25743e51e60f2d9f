package allreduce_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// onFourRanks runs f on four ranks of this process, each with its end of a symmetric heap.
func onFourRanks(f func(ctx context.Context, rank int, h *memory.Heap) error) {
	ctx := context.Background()
	groups, err := comm.Local(4)
	if err != nil {
		log.Fatal(err)
	}
	var ranks sync.WaitGroup
	for _, g := range groups {
		ranks.Go(func() {
			defer g.Close()
			h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{})
			if err != nil {
				log.Fatal(err)
			}
			if err := f(ctx, g.Rank(), h); err != nil {
				log.Fatal(err)
			}
			if err := h.Close(ctx); err != nil {
				log.Fatal(err)
			}
		})
	}
	ranks.Wait()
}

func ExampleReducer_AllReduce() {
	onFourRanks(func(ctx context.Context, rank int, h *memory.Heap) error {
		r, err := allreduce.New(ctx, h, allreduce.Options{})
		if err != nil {
			return err
		}
		votes := []float32{1, float32(rank) / 2, float32(rank * rank)}
		v := memory.Wrap(votes)
		if err := r.AllReduce(nil, v, v, kernels.Float32, kernels.Sum); err != nil {
			return err
		}
		if rank == 2 {
			fmt.Println("every rank has", votes)
		}
		return r.Close(ctx)
	})
	// Output: every rank has [4 3 14]
}

func ExampleReducer_Broadcast() {
	onFourRanks(func(ctx context.Context, rank int, h *memory.Heap) error {
		r, err := allreduce.New(ctx, h, allreduce.Options{})
		if err != nil {
			return err
		}
		seed := []int64{int64(100 * rank)}
		if err := r.Broadcast(nil, memory.Wrap(seed), 3); err != nil {
			return err
		}
		if rank == 0 {
			fmt.Println("rank 0 has", seed)
		}
		return r.Close(ctx)
	})
	// Output: rank 0 has [300]
}

func ExampleBuckets() {
	onFourRanks(func(ctx context.Context, rank int, h *memory.Heap) error {
		// A model of two layers. Backward ends with the first, so its gradient is listed last.
		b, err := allreduce.NewBuckets(ctx, h, []allreduce.Gradient{{Len: 3}, {Len: 2}}, allreduce.BucketOptions{Op: kernels.Avg})
		if err != nil {
			return err
		}
		for layer := range b.Len() {
			grad := b.Float32(layer)
			for k := range grad { // backward of this layer
				grad[k] = float32(rank + 10*layer + k)
			}
			if err := b.Ready(nil, layer); err != nil { // its reduction may begin
				return err
			}
		}
		if err := b.Wait(nil); err != nil {
			return err
		}
		if rank == 0 {
			fmt.Println(b.Float32(0), b.Float32(1))
		}
		return b.Close(ctx)
	})
	// Output: [1.5 2.5 3.5] [11.5 12.5]
}

func ExampleReducer_Explain() {
	onFourRanks(func(ctx context.Context, rank int, h *memory.Heap) error {
		r, err := allreduce.New(ctx, h, allreduce.Options{})
		if err != nil {
			return err
		}
		if rank == 0 {
			for _, count := range []int64{100, 1 << 20} {
				d, err := r.Explain(kernels.AllReduce, count, kernels.Float32)
				if err != nil {
					return err
				}
				fmt.Println(count, "elements:", d.Algorithm)
			}
		}
		return r.Close(ctx)
	})
	// Output:
	// 100 elements: one-shot
	// 1048576 elements: two-shot
}
