package p2p_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
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

func ExampleEndpoint_Put_shared() {
	groups, err := comm.Local(2)
	if err != nil {
		log.Fatal(err)
	}
	var ranks sync.WaitGroup
	for _, g := range groups {
		ranks.Go(func() {
			if err := open(context.Background(), g); err != nil {
				log.Print(err)
			}
		})
	}
	ranks.Wait()
	// Output: rank 1 has put this
}

// open is one rank.
func open(ctx context.Context, group *comm.Group) (err error) {
	defer func() { err = errors.Join(err, group.Close()) }()
	heap, err := memory.NewHeap(ctx, group, device.Host(), memory.Options{SegmentBytes: 8 << 20})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, heap.Close(ctx)) }()
	x, err := p2p.New(ctx, heap, p2p.Options{})
	if err != nil {
		return err
	}
	if group.Rank() == 0 {
		err = lend(ctx, heap, x, 1)
	} else {
		err = borrow(ctx, heap, x, 0)
	}
	return errors.Join(err, x.Close(ctx))
}

// lend shares memory of this rank with a peer, which puts into it.
func lend(ctx context.Context, heap *memory.Heap, x *p2p.Endpoint, peer int) error {
	f, err := os.CreateTemp("", "") // on a GPU memory.Device of any cudaMalloc memory
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(4096), os.Remove(f.Name())); err != nil {
		return err
	}
	m, err := memory.MapFile(int(f.Fd()), 0, 4096)
	if err != nil {
		return err
	}
	shared, err := heap.Share(peer, m.View().Slice(0, 23)) // waits for nobody
	if err != nil {
		return err
	}
	if err := x.Wait(nil, peer, 0); err != nil {
		return err
	}
	fmt.Printf("%s\n", m.Bytes()[:19])
	return errors.Join(shared.Close(ctx), m.Close(), f.Close()) // Close waits for the peer's
}

// borrow puts into memory that a peer has shared with this rank.
func borrow(ctx context.Context, heap *memory.Heap, x *p2p.Endpoint, peer int) error {
	opened, err := heap.Open(ctx, peer) // waits for the peer
	if err != nil {
		return err
	}
	return errors.Join(
		x.Put(nil, peer, opened.View().Slice(0, 19), memory.Host([]byte("rank 1 has put this"))),
		x.Signal(nil, peer, 0),
		opened.Close())
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
