package core

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSpansHandOutEachByteOnce(t *testing.T) {
	const base, all = uintptr(1 << 20), 1 << 16
	var f spans
	f.give(base, all)
	rng := rand.New(rand.NewPCG(1, 2))
	used := make(map[uintptr]int64)
	owner := make([]bool, all)
	mark := func(addr uintptr, n int64, to bool) {
		for i := range n {
			at := int64(addr-base) + i
			if owner[at] == to {
				t.Fatalf("byte %d is handed out twice, or given back twice", at)
			}
			owner[at] = to
		}
	}
	for range 20_000 {
		if n := 1 + rng.Int64N(all/8); rng.IntN(2) == 0 {
			if addr := f.take(n); addr != 0 {
				mark(addr, n, true)
				used[addr] = n
			}
			continue
		}
		for addr, n := range used {
			mark(addr, n, false)
			f.give(addr, n)
			delete(used, addr)
			break
		}
	}
	for addr, n := range used {
		f.give(addr, n)
	}
	require.Equal(t, spans{{base, all}}, f, "all of it is one piece again")
	require.Zero(t, f.take(all+1))
	require.Equal(t, base, f.take(all))
	require.Empty(t, f)
	require.Zero(t, f.take(1))
}
