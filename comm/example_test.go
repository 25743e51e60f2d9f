package comm_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/loopback"
)

// Four ranks in one process, each in a goroutine of its own.
func ExampleLocal() {
	groups, err := comm.Local(4)
	if err != nil {
		log.Fatal(err)
	}
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			defer g.Close()
			tokens := fmt.Sprintf("%d tokens", 10*g.Rank())
			all, err := g.AllGather(context.Background(), []byte(tokens))
			if err != nil {
				log.Fatal(err)
			}
			if g.Rank() == 0 {
				for rank, t := range all {
					fmt.Printf("rank %d has %s\n", rank, t)
				}
			}
		})
	}
	wg.Wait()
	// Output:
	// rank 0 has 0 tokens
	// rank 1 has 10 tokens
	// rank 2 has 20 tokens
	// rank 3 has 30 tokens
}

// Each rank is a process that runs the body of this loop. Here they are
// goroutines, to fit on the page.
func ExampleJoin() {
	addr := loopback.Addr() // that of rank 0, such as 10.0.0.5:29552

	var wg sync.WaitGroup
	for rank := range 3 {
		wg.Go(func() {
			g, err := comm.Join(context.Background(), comm.Config{
				Rank:   rank,
				Size:   3,
				Addr:   addr,
				Secret: []byte("32 random bytes would be better"),
			})
			if err != nil {
				log.Fatal(err)
			}
			defer g.Close()
			if err := g.Barrier(context.Background()); err != nil {
				log.Fatal(err)
			}
			if g.Rank() == 0 {
				fmt.Println(g.Size(), "ranks have met")
			}
		})
	}
	wg.Wait()
	// Output: 3 ranks have met
}

// Ranks that can exchange their addresses by themselves need no port.
func ExampleListener_Join() {
	store := make([]string, 2) // yours
	var published, done sync.WaitGroup
	published.Add(2)
	for rank := range 2 {
		done.Go(func() {
			l, err := comm.Listen(comm.Config{Rank: rank, Size: 2})
			if err != nil {
				log.Fatal(err)
			}
			store[rank] = l.Addr()
			published.Done()
			published.Wait()

			g, err := l.Join(context.Background(), store)
			if err != nil {
				log.Fatal(err)
			}
			defer g.Close()
			all, err := g.AllGather(context.Background(), fmt.Append(nil, rank))
			if err != nil {
				log.Fatal(err)
			}
			if rank == 1 {
				fmt.Printf("%s\n", all)
			}
		})
	}
	done.Wait()
	// Output: [0 1]
}

// Two groups of two out of one of four.
func ExampleGroup_Split() {
	groups, err := comm.Local(4)
	if err != nil {
		log.Fatal(err)
	}
	names := make([]string, 4)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			defer g.Close()
			sub, err := g.Split(context.Background(), g.Rank()%2, g.Rank())
			if err != nil {
				log.Fatal(err)
			}
			defer sub.Close()
			names[g.Rank()] = sub.String()
		})
	}
	wg.Wait()
	for rank, name := range names {
		fmt.Printf("rank %d is %s\n", rank, name)
	}
	// Output:
	// rank 0 is world/0[0/2]
	// rank 1 is world/1[0/2]
	// rank 2 is world/0[1/2]
	// rank 3 is world/1[1/2]
}

// A rank dies; the others learn which, and go on.
func ExampleGroup_Shrink() {
	groups, err := comm.Local(3)
	if err != nil {
		log.Fatal(err)
	}
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			if g.Rank() == 1 {
				g.Kill() // as a crash would
				return
			}
			err := g.Barrier(context.Background())
			var peer *comm.PeerError
			if !errors.As(err, &peer) || !errors.Is(err, comm.ErrPeerLost) {
				log.Fatal(err)
			}
			survivors, err := g.Shrink(context.Background())
			if err != nil {
				log.Fatal(err)
			}
			g.Close()
			defer survivors.Close()
			if survivors.Rank() == 0 {
				fmt.Printf("rank %d is lost, %d go on\n", peer.Rank, survivors.Size())
			}
		})
	}
	wg.Wait()
	// Output: rank 1 is lost, 2 go on
}
