package dispatch_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"sync"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

// Two ranks in this process have two experts each. Expert e multiplies by e; each token goes to two experts and gets half
// of each result.
func Example() {
	groups, err := comm.Local(2)
	if err != nil {
		log.Fatal(err)
	}
	results := make([][]float32, len(groups))
	var ranks sync.WaitGroup
	for rank, g := range groups {
		ranks.Go(func() {
			y, err := layer(g)
			if err != nil {
				log.Fatal(err)
			}
			results[rank] = y
		})
	}
	ranks.Wait()
	fmt.Println(results[0])
	fmt.Println(results[1])
	// Output:
	// [1.5 3 4.5 1.5 3 4.5]
	// [30 60 90]
}

// layer is one rank's part: rank 0 has two tokens, rank 1 has one.
func layer(g *comm.Group) ([]float32, error) {
	ctx := context.Background()
	heap, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{})
	if err != nil {
		return nil, err
	}
	d, err := dispatch.New(ctx, heap, dispatch.Options{Experts: 4, TopK: 2, Hidden: 3, MaxTokens: 16, HostCounts: true})
	if err != nil {
		return nil, err
	}

	x, idx := []float32{1, 2, 3, 1, 2, 3}, []int32{0, 3, 1, 2}
	if g.Rank() == 1 {
		x, idx = []float32{20, 40, 60}, []int32{3, -1} // one expert only
	}
	weights := make([]float32, len(idx))
	for i := range weights {
		weights[i] = 0.5
	}
	h, err := d.Dispatch(nil, dispatch.Tokens{X: encode(x), Experts: encode(idx), Weights: encode(weights)})
	if err != nil {
		return nil, err
	}
	counts, err := h.HostCounts(ctx)
	if err != nil {
		return nil, err
	}
	rows := make([]float32, 3*counts.Rows)
	decode(rows, h.Rows())
	for i, expert := range h.LocalExperts() {
		for j := 3 * counts.Offsets[i]; j < 3*(counts.Offsets[i]+counts.Counts[i]); j++ {
			rows[j] *= float32(expert)
		}
	}
	result := memory.Host(make([]byte, 4*len(x)))
	if err := d.Combine(nil, result, encode(rows), h, dispatch.CombineOptions{}); err != nil {
		return nil, err
	}
	y := make([]float32, len(x))
	decode(y, result)
	h.Release()

	if err := d.Close(ctx); err != nil {
		return nil, err
	}
	if err := heap.Close(ctx); err != nil {
		return nil, err
	}
	return y, g.Close()
}

// encode is memory with these numbers.
func encode(v any) memory.View {
	b, err := binary.Append(nil, binary.NativeEndian, v)
	if err != nil {
		panic(err)
	}
	return memory.Host(b)
}

// decode reads numbers from memory.
func decode(v []float32, from memory.View) {
	if _, err := binary.Decode(from.Bytes(), binary.NativeEndian, v); err != nil {
		panic(err)
	}
}
