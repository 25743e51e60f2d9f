// Command kernels runs the all-gather of all_gather.cu on GPUs, a rank each, a thousand times by a CUDA graph:
//
//	nvcc -std=c++17 -O3 -cubin -arch=sm_90 -I kernels/cuda/include -o all_gather.cubin examples/kernels/all_gather.cu
//	go build -o bin/ ./cmd/switchyard ./examples/kernels && bin/switchyard run -n 2 bin/kernels all_gather.cubin
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/memory/devcomm"
)

// arguments are struct all_gather_args.
type arguments struct{ World, Out, In, Count uint64 }

const words = 1 << 16 // of each rank's part

// gather is one rank: it replays a graph of the kernel and looks at what has come.
func gather(ctx context.Context, heap *memory.Heap, s *device.CUDAStream, image []byte) error {
	x, err := devcomm.New(ctx, heap, devcomm.Options{})
	if err != nil {
		return err
	}
	kernel, err := x.Load(image, "all_gather")
	if err != nil {
		return err
	}
	rank, size := heap.Group().Rank(), heap.Group().Size()
	out, err := heap.Alloc(int64(8 * words * size))
	if err != nil {
		return err
	}
	in, err := heap.Alloc(8 * words) // any memory of the GPU would do
	if err != nil {
		return err
	}
	mine, all := make([]byte, 8*words), make([]byte, 8*words*size)
	for i := range words {
		binary.NativeEndian.PutUint64(mine[8*i:], uint64(rank)<<32|uint64(i))
	}
	if err := memory.Copy(s, in.View(), memory.Host(mine)); err != nil {
		return err
	}
	args := arguments{uint64(x.Argument()), uint64(out.View().Ptr()), uint64(in.View().Ptr()), words}
	graph, err := s.Capture(func() error {
		return x.Launch(s, kernel, devcomm.Grid{Blocks: 16, Threads: 512}, args)
	})
	if err != nil {
		return err
	}
	for range 1000 {
		if err := graph.Launch(s); err != nil {
			return err
		}
	}
	err = errors.Join(memory.Copy(s, memory.Host(all), out.View()), s.Synchronize(), x.Fault())
	for src := range size {
		for i := range words {
			if got := binary.NativeEndian.Uint64(all[8*(src*words+i):]); err == nil && got != uint64(src)<<32|uint64(i) {
				err = fmt.Errorf("word %d of rank %d is %#x", i, src, got)
			}
		}
	}
	return errors.Join(err, graph.Close(), x.Close(ctx))
}

func run(ctx context.Context, path string) (err error) {
	image, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	conf, err := comm.FromEnv()
	if err != nil {
		return err
	}
	group, err := comm.Join(ctx, conf)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, group.Close()) }()
	gpu, err := device.CUDA(group.Rank())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, gpu.Close()) }()
	heap, err := memory.NewHeap(ctx, group, gpu, memory.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, heap.Close(ctx)) }()
	s, err := gpu.NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := gather(ctx, heap, s.(*device.CUDAStream), image); err != nil {
		return err
	}
	fmt.Println("rank", group.Rank(), "has the parts of all", group.Size())
	return nil
}

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: kernels IMAGE")
	}
	if err := run(context.Background(), os.Args[1]); err != nil {
		log.Fatal(err)
	}
}
