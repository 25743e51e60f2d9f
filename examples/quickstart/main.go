// Command quickstart exchanges rows of different numbers among its ranks: rank r sends r+1 rows to each.
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
)

func main() {
	ctx := context.Background()
	g := must(comm.Join(ctx, must(comm.FromEnv()))) // by the variables of switchyard run, or of torchrun
	heap := must(memory.NewHeap(ctx, g, device.Host(), memory.Options{}))
	x := must(alltoallv.New(ctx, heap, alltoallv.Options{}))

	const hidden = 4
	splits := &alltoallv.Splits{ElemSize: 4 * hidden} // bytes of a row
	rows := 0
	for peer := range g.Size() {
		splits.Send = append(splits.Send, int64(g.Rank()+1)) // rows for this peer
		splits.Recv = append(splits.Recv, int64(peer+1))     // rows from it
		rows += peer + 1
	}
	src := memory.NewMatrix[float32](g.Size()*(g.Rank()+1), hidden) // any memory will do
	for i := range src.Rows() {
		src.Row(i)[0] = float32(g.Rank())
	}
	dst := must(memory.AllocMatrix[float32](heap, rows, hidden)) // in the heap: peers write it in place

	check(x.Exchange(nil, dst.View(), src.View(), splits))
	fmt.Println("rank", g.Rank(), "got", dst.Data())

	check(x.Close(ctx)) // all ranks together, then what it stands on
	check(heap.Close(ctx))
	check(g.Close())
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
