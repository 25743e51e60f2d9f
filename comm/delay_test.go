package comm

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/loopback"
)

var joins = flag.Int("comm.joins", 400, "how many joins TestJoinWhateverTheSchedule makes")

// Ranks join whatever order their goroutines run in: something is waited for before every note and every frame, at random.
// Without delays a Table that overtakes an Accept needs thousands of joins to show.
func TestJoinWhateverTheSchedule(t *testing.T) {
	n := *joins
	if testing.Short() {
		n = min(n, 60)
	}
	var failed int
	var mu sync.Mutex
	var next int
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for {
				mu.Lock()
				seed := next
				next++
				stop := failed > 0
				mu.Unlock()
				if seed >= n || stop {
					return
				}
				if err := delayedJoin(t, uint64(seed)); err != nil {
					t.Errorf("join %d: %v", seed, err)
					mu.Lock()
					failed++
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
}

// delayedJoin makes a group of 2 to 4 ranks with delays drawn from seed.
func delayedJoin(t *testing.T, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 7))
	size := 2 + rng.IntN(3)
	var secret []byte
	if rng.IntN(2) == 0 {
		secret = []byte("sesame")
	}
	addr := loopback.Addr() // of its own: joins run side by side
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	gs, errs := make([]*Group, size), make([]error, size)
	var wg sync.WaitGroup
	for r := range size {
		own, mu := rand.New(rand.NewPCG(seed, uint64(r))), new(sync.Mutex)
		delay := func() {
			mu.Lock()
			d := time.Duration(0)
			if own.IntN(3) == 0 {
				d = time.Duration(own.IntN(3000)) * time.Microsecond
			}
			mu.Unlock()
			time.Sleep(d)
		}
		wg.Go(func() {
			delay()
			gs[r], errs[r] = Join(ctx, Config{Rank: r, Size: size, Addr: addr, Secret: secret, delay: delay})
		})
	}
	wg.Wait()
	for _, g := range gs {
		if g != nil {
			defer g.Close()
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return errors.Join(onEach(gs, func(g *Group) error { return g.Barrier(ctx) })...)
}

// What a guest is told first is that it is accepted, whatever happens meanwhile.
func TestAcceptPrecedesTable(t *testing.T) {
	addr := freeAddr(t)
	var wg sync.WaitGroup
	for r := range 4 {
		wg.Go(func() {
			cfg := Config{Rank: r, Size: 4, Addr: addr}
			if r == 0 {
				cfg.delay = func() { time.Sleep(2 * time.Millisecond) }
			}
			g, err := Join(testContext(t), cfg)
			require.NoError(t, err)
			defer g.Close()
			require.NoError(t, g.Barrier(testContext(t)))
		})
	}
	wg.Wait()
}
