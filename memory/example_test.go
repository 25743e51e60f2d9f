package memory_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
)

// Two ranks allocate a buffer each, write their own and read the other's. Its address needs no exchange.
func Example() {
	ctx := context.Background()
	groups, err := comm.Local(2)
	if err != nil {
		fmt.Println(err)
		return
	}
	said := make([]string, len(groups))
	rank := func(g *comm.Group) error {
		defer g.Close()
		h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{})
		if err != nil {
			return err
		}
		defer h.Close(ctx)

		b, err := h.Alloc(64)
		if err != nil {
			return err
		}
		copy(b.Bytes(), fmt.Sprintf("bytes of rank %d", g.Rank()))
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		peer := 1 - g.Rank()
		space := h.Space()
		theirs := space.Range(peer, b.Offset(), 15)
		said[g.Rank()] = fmt.Sprintf("rank %d reads %q", g.Rank(), theirs)
		return b.Free()
	}
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			if err := rank(g); err != nil {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
	for _, s := range said {
		fmt.Println(s)
	}
	// Output:
	// rank 0 reads "bytes of rank 1"
	// rank 1 reads "bytes of rank 0"
}

// Verify finds out when the ranks did not make the same calls.
func ExampleHeap_Verify() {
	ctx := context.Background()
	groups, err := comm.Local(2)
	if err != nil {
		fmt.Println(err)
		return
	}
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			defer g.Close()
			h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{})
			if err != nil {
				fmt.Println(err)
				return
			}
			defer h.Close(ctx)
			size := int64(1000)
			for range 3 {
				if _, err := h.Alloc(size); err != nil {
					fmt.Println(err)
				}
				if g.Rank() == 1 {
					size = 3000 // a mistake, from the second call on
				}
			}
			if err := h.Verify(ctx); g.Rank() == 0 {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
	// Output:
	// memory: ranks diverged at call 2 (rank 1 unlike the others): rank 0: alloc of 1000 bytes at segment 0 offset 66560; rank 1: alloc of 3000 bytes at segment 0 offset 66560
}

// Rows of numbers in the heap, without a look at their bytes.
func ExampleMatrix() {
	ctx := context.Background()
	groups, err := comm.Local(1)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer groups[0].Close()
	h, err := memory.NewHeap(ctx, groups[0], device.Host(), memory.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer h.Close(ctx)
	m, err := memory.AllocMatrix[memory.BFloat16](h, 2, 3)
	if err != nil {
		fmt.Println(err)
		return
	}
	for i := range m.Rows() {
		for j := range m.Row(i) {
			m.Row(i)[j] = memory.ToBFloat16(float32(i) + float32(j)/2)
		}
	}
	fmt.Println(m.Row(1)[2].Float32(), m.View().Len(), "bytes")
	fmt.Println(memory.Of[uint16](m.Slice(1, 2).View()))
	fmt.Println(m.Free())
	// Output:
	// 2 12 bytes
	// [16256 16320 16384]
	// <nil>
}
