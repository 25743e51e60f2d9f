package alltoallv_test

import (
	"context"
	"log"
	"os"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
)

// One rank of several, each a process with a GPU of its own.
func Example_gpu() {
	if err := serve(context.Background()); err != nil {
		log.Print(err)
		os.Exit(1)
	}
}

func serve(ctx context.Context) error {
	conf, err := comm.FromEnv()
	if err != nil {
		return err
	}
	g, err := comm.Join(ctx, conf)
	if err != nil {
		return err
	}
	defer g.Close()
	gpu, err := device.CUDA(conf.LocalRank) // no toolkit needed; device.ErrUnavailable without a driver
	if err != nil {
		return err
	}
	defer gpu.Close()
	heap, err := memory.NewHeap(ctx, g, gpu, memory.Options{SegmentBytes: 1 << 30})
	if err != nil {
		return err
	}
	defer heap.Close(ctx)
	x, err := alltoallv.New(ctx, heap, alltoallv.Options{})
	if err != nil {
		return err
	}
	defer x.Close(ctx)
	return layers(ctx, heap, x, gpu)
}

// layers exchanges on a stream, once by splits that the host knows, then in a graph whose splits are in the GPU's memory.
func layers(ctx context.Context, heap *memory.Heap, x *alltoallv.Exchanger, gpu *device.CUDADevice) error {
	const rows, hidden = 64, 4096 // for each peer
	size := heap.Group().Size()
	src, err := memory.AllocMatrix[memory.BFloat16](heap, size*rows, hidden)
	if err != nil {
		return err
	}
	dst, err := memory.AllocMatrix[memory.BFloat16](heap, size*rows, hidden) // peers write it in place
	if err != nil {
		return err
	}
	made, err := gpu.NewStream() // or gpu.WrapStream(handle), for another library's
	if err != nil {
		return err
	}
	defer made.Close()
	stream := made.(*device.CUDAStream)
	splits := &alltoallv.Splits{ElemSize: 2 * hidden}
	for range size {
		splits.Send, splits.Recv = append(splits.Send, rows), append(splits.Recv, rows)
	}
	if err := x.Exchange(stream, dst.View(), src.View(), splits); err != nil { // enqueued
		return err
	}

	table, err := heap.Alloc(alltoallv.LiveBytes(size)) // int64 bytes: send, send offsets, receive, receive offsets
	if err != nil {
		return err
	}
	graph, err := stream.Capture(func() error {
		// Here the router's kernels write the table. Then:
		return x.Exchange(stream, dst.View(), src.View(), &alltoallv.Splits{Live: table.View()})
	})
	if err != nil {
		return err
	}
	defer graph.Close()
	for range 1000 {
		if err := graph.Launch(stream); err != nil {
			return err
		}
	}
	if err := stream.Synchronize(); err != nil {
		return err
	}
	return x.Fault() // what a kernel that gave up has written down
}
