package train

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/report"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/internal/loopback"
)

// tiny is a config that trains in no time.
func tiny() config.Config {
	return config.Config{
		Ranks: 1, Experts: 4, TopK: 2, Layers: 2, Hidden: 12, Inner: 10, Context: 3, Embed: 5,
		Batch: 24, Steps: 10, Rate: 1e-2, Seed: 7,
	}
}

// babble is a text with some order in it.
func babble() *text.Corpus {
	r := rand.New(rand.NewPCG(3, 4))
	b := make([]byte, text.Least)
	for i := range b {
		b[i] = "abcdefgh \n"[r.IntN(10)]
		if i > 0 && b[i-1] == 'a' {
			b[i] = 'b'
		}
	}
	return text.New("babble", b)
}

func oneRank(t *testing.T, c config.Config, from *text.Corpus) *worker {
	g, err := comm.Local(1)
	require.NoError(t, err)
	w, err := newWorker(t.Context(), g[0], c, from, nil)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, w.close(context.Background())) // t's is over by now
		require.NoError(t, g[0].Close())
	})
	return w
}

// A survivor that had not finished the step that another has finished does so.
func TestExpertsAreWhatTheyWere(t *testing.T) {
	c := tiny()
	from := babble()
	w := oneRank(t, c, from)
	for n := 1; n <= 3; n++ {
		_, err := w.step(n, false)
		require.NoError(t, err)
	}
	other := oneRank(t, c, from)
	copyAll(other.model.Dense(), w.model.Dense())
	for slot := range c.Experts {
		copyAll(other.model.Expert(slot), w.model.Expert(slot))
	}
	for i, s := range w.model.Slabs {
		o := other.model.Slabs[i]
		require.Equal(t, s.W, o.W)
		require.Equal(t, s.M, o.M)
		require.Equal(t, s.V, o.V)
	}
	copyWeights(other.model.Expert(2), w.model.Expert(0))
	n := c.ExpertSize()
	one, another := w.model.Experts(), other.model.Experts()
	require.Equal(t, one.W[4*n:5*n], another.W[6*n:7*n], "expert 2 of layer 1 is expert 0 of layer 1")
	require.NotEqual(t, one.M[4*n:5*n], another.M[6*n:7*n], "it begins anew")
}

// Where no fresh rank comes, the others go on as they are.
func TestNoFreshRankComes(t *testing.T) {
	defer func(d time.Duration) { admitFor = d }(admitFor)
	admitFor = time.Second
	c := tiny()
	c.Ranks, c.Steps, c.ReplaceAt = 2, 5, 3
	c.MeetAt = loopback.Addr()
	gs, err := comm.Local(2)
	require.NoError(t, err)
	from := babble()
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := trainRank(context.Background(), gs[1], c, from, nil)
		assert.NoError(t, err)
	})
	r, err := trainRank(context.Background(), gs[0], c, from, nil)
	wg.Wait()
	require.NoError(t, err)
	require.Equal(t, []string{"No fresh rank came within 1s before step 3."}, r.Events)
	require.Equal(t, 5, r.Steps)
	require.Equal(t, 1, r.TrafficSince)
}

func TestLostRankInOneProcessIsNamed(t *testing.T) {
	c := tiny()
	c.Ranks, c.Steps = 3, 1<<30
	groups, err := comm.Local(c.Ranks)
	require.NoError(t, err)
	begin := time.Now()
	_, err = All(t.Context(), groups, c, babble(), func(h *report.History) {
		if h.Done() == 5 {
			groups[2].Kill()
		}
	})
	require.ErrorIs(t, err, comm.ErrPeerLost)
	require.ErrorContains(t, err, "rank 2")
	require.Less(t, time.Since(begin), time.Minute)
}

func TestRanksWithDifferentFlagsLearnIt(t *testing.T) {
	c := tiny()
	c.Ranks = 2
	from := babble()
	groups, err := comm.Local(c.Ranks)
	require.NoError(t, err)
	ends := make(chan error)
	for i, g := range groups {
		mine := c
		mine.Seed += uint64(i)
		go func() {
			_, err := trainRank(t.Context(), g, mine, from, nil)
			ends <- err
		}()
	}
	for range groups {
		require.ErrorIs(t, <-ends, comm.ErrMismatch)
	}
}
