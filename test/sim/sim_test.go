package main

import (
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// The model keeps to published times that it was not fitted on.
func TestTheModelKeepsToPublishedTimes(t *testing.T) {
	if testing.Short() {
		t.Skip("draws a million tokens")
	}
	mean, worst := meanAndWorst(errorsOf(io.Discard, map[shape]counts{}))
	require.LessOrEqual(t, mean, 0.06)
	require.LessOrEqual(t, worst, 0.15)
}

// The plan sends what a count by hand of the same choices does.
func TestThePlanSendsATokenOnceToAHost(t *testing.T) {
	s := shape{ep: 32, tokens: 300}
	c := count(s)
	rng := rand.New(rand.NewPCG(uint64(s.ep), uint64(s.tokens)))
	var remote, logical, choices, inside float64
	for rank := range s.ep {
		all := draw(rng, s)
		for token := range s.tokens {
			hosts, ranks := map[int]bool{}, map[int]bool{}
			for _, e := range all[token*topK:][:topK] {
				r := int(e) / (256 / s.ep)
				hosts[r/perHost], ranks[r] = true, true
				if r/perHost != rank/perHost {
					choices++
				}
			}
			logical += float64(len(hosts))
			delete(hosts, rank/perHost)
			remote += float64(len(hosts))
			for r := range ranks {
				if r%perHost != rank%perHost {
					inside++
				}
			}
		}
	}
	n := float64(s.ep)
	require.InDelta(t, remote/n, c.remote, 1e-6)
	require.InDelta(t, logical/n, c.logical, 1e-6)
	require.InDelta(t, choices/n, c.choices, 1e-6)
	require.InDelta(t, inside/n, c.inside, 1e-6)
	require.Greater(t, c.busiest, 1.0)
	require.Greater(t, c.head, 20*c.choices+8*c.remote) // entries and records
}
