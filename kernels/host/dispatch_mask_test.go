package host

import (
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// Whether a rank learns of a mask first, or takes the masked rank in first, it knows the same in the end.
func TestMasksAndAdmissionsCommute(t *testing.T) {
	steps := []func(*atomic.Uint64){
		func(w *atomic.Uint64) { learn(w, maskOf(0, wordMasked)) },
		func(w *atomic.Uint64) { learn(w, maskOf(0, wordMasked|wordEnded)) },
		func(w *atomic.Uint64) { admit(w, 1) },
		func(w *atomic.Uint64) { learn(w, maskOf(1, wordMasked)) },
	}
	for range 100 {
		var w atomic.Uint64
		for _, i := range rand.Perm(len(steps)) {
			steps[i](&w)
		}
		require.Equal(t, maskOf(1, wordMasked), maskWord(w.Load()))
		admit(&w, 2)
		learn(&w, maskOf(1, wordMasked|wordEnded)) // late
		require.Equal(t, maskOf(2, 0), maskWord(w.Load()))
	}
}

func TestADecisionHasWhatItWasMadeOf(t *testing.T) {
	for range 1000 {
		who := newcomer{rand.IntN(17) - 1, rand.Uint64N(1 << 40)}
		members, decider, epoch := rand.Uint64N(1<<16), rand.IntN(16), rand.Uint64()
		c := castOf(members, who, decider, epoch)
		require.Equal(t, members, c.members())
		require.Equal(t, decider, c.decider())
		require.Equal(t, who.rank, c.admitted())
		behind := rand.Uint64N(1 << 20)
		require.EqualValues(t, behind, c.after(epoch-behind))
		if who.rank != none {
			require.Equal(t, who.term, c.term(who.term+rand.Uint64N(1000)-500))
		}
	}
}
