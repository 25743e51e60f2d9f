package alltoallv_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
)

// Two ranks of one process send each other rows of different lengths.
func Example() {
	ctx := context.Background()
	groups, err := comm.Local(2)
	if err != nil {
		fmt.Println(err)
		return
	}
	received := make([]string, 2)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			defer g.Close()
			if err := exchangeWords(ctx, g, received); err != nil {
				g.Abort(err)
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
	for r, s := range received {
		fmt.Printf("rank %d: %s\n", r, s)
	}
	// Output:
	// rank 0: to myself, hello from 1
	// rank 1: hello from 0, still me
}

func exchangeWords(ctx context.Context, g *comm.Group, received []string) error {
	heap, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{})
	if err != nil {
		return err
	}
	defer heap.Close(ctx)
	x, err := alltoallv.New(ctx, heap, alltoallv.Options{})
	if err != nil {
		return err
	}
	defer x.Close(ctx)

	src := []string{"to myself, ", "hello from 0, "}
	if g.Rank() == 1 {
		src = []string{"hello from 1", "still me"}
	}
	send, recv := []int64{int64(len(src[0])), int64(len(src[1]))}, make([]int64, 2)
	if err := x.Counts(nil, send, recv); err != nil { // how much will come
		return err
	}
	out, err := heap.Alloc(64) // from the pool: peers write it in place
	if err != nil {
		return err
	}
	defer out.Free()
	err = x.Exchange(nil, out.View(), memory.Host([]byte(src[0]+src[1])), &alltoallv.Splits{Send: send, Recv: recv})
	received[g.Rank()] = string(out.Bytes()[:recv[0]+recv[1]])
	return err
}
