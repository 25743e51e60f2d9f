package devcomm_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/memory/devcomm"
)

// Programs that also run without a GPU ask New whether there can be kernels of their own. examples/kernels launches one.
func ExampleNew() {
	ctx := context.Background()
	groups, err := comm.Local(1)
	if err != nil {
		log.Fatal(err)
	}
	heap, err := memory.NewHeap(ctx, groups[0], device.Host(), memory.Options{SegmentBytes: 1 << 20})
	if err != nil {
		log.Fatal(err)
	}
	_, err = devcomm.New(ctx, heap, devcomm.Options{})
	if errors.Is(err, devcomm.ErrUnsupported) {
		fmt.Println("the host has no kernels of users: take another way")
	}
	if err := errors.Join(heap.Close(ctx), groups[0].Close()); err != nil {
		log.Fatal(err)
	}
	// Output: the host has no kernels of users: take another way
}
