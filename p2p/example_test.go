package p2p_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

func Example() {
	groups, err := comm.Local(2)
	if err != nil {
		log.Fatal(err)
	}
	var ranks sync.WaitGroup
	for _, g := range groups {
		ranks.Go(func() {
			if err := talk(context.Background(), g); err != nil {
				log.Print(err)
			}
		})
	}
	ranks.Wait()
	// Output: 16 bytes of data, then hello
}

// talk is one rank.
func talk(ctx context.Context, group *comm.Group) (err error) {
	defer func() { err = errors.Join(err, group.Close()) }()
	heap, err := memory.NewHeap(ctx, group, device.Host(), memory.Options{SegmentBytes: 8 << 20})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, heap.Close(ctx)) }()
	buffer, err := heap.Alloc(16)
	if err != nil {
		return err
	}
	// In every rank. buffer is memory of the heap, at the same place in all ranks.
	x, err := p2p.New(ctx, heap, p2p.Options{})
	if err != nil {
		return err
	}
	if group.Rank() == 0 {
		err = errors.Join(
			x.Put(nil, 1, buffer.View(), memory.Host([]byte("16 bytes of data"))),
			x.Signal(nil, 1, 0))
	} else {
		err = x.Wait(nil, 0, 0)
	}

	next, last := (group.Rank()+1)%group.Size(), (group.Rank()+group.Size()-1)%group.Size()
	got := make([]byte, 5)
	err = errors.Join(err,
		x.Send(nil, next, 7, memory.Host([]byte("hello"))),
		x.Recv(nil, last, 7, memory.Host(got)))
	if group.Rank() == 1 {
		fmt.Printf("%s, then %s\n", buffer.Bytes(), got)
	}
	return errors.Join(err, x.Close(ctx))
}
