package main

import (
	"context"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	if spec := os.Getenv(workerEnv); spec != "" {
		os.Exit(work(spec))
	}
	if spec := os.Getenv(maskedEnv); spec != "" {
		os.Exit(workMasked(spec))
	}
	os.Exit(m.Run())
}

// Processes are killed and replaced a few times: the others name them, go on without them with right results, and let others in.
func TestF2_GroupsOfProcessesHeal(t *testing.T) {
	heal := func(t *testing.T, gpus int, only string) {
		s := &soak{options: options{Minutes: 2, Kills: 6, Ranks: 3, GPUs: gpus, Seed: 1, Pause: time.Second, Calls: 20, Harm: "kill", Only: only}, rng: rand.New(rand.NewPCG(1, 1)), began: time.Now()}
		err := s.run(context.Background())
		t.Log(s.report())
		require.NoError(t, err)
		require.Equal(t, 6, s.done.Kills, "in the time that there was")
		require.NotZero(t, s.done.Named)
		require.Less(t, s.slowest, 10*time.Second)
	}
	t.Run("host", func(t *testing.T) {
		if testing.Short() {
			t.Skip("takes some seconds")
		}
		heal(t, 0, "")
	})
	t.Run("messages", func(t *testing.T) {
		if testing.Short() {
			t.Skip("takes some seconds")
		}
		heal(t, 0, onlyMessages)
	})
	t.Run("cuda", func(t *testing.T) {
		n, err := gpus()
		if err != nil {
			t.Skip(err)
		}
		heal(t, n, "")
	})
}

// Processes are killed one after the other, in any call, and fresh ones come in the places of some, until one is left: the others go on with masks,
// and no row and no sum is wrong.
func TestF1_CallsGoOnWithoutProcessesThatAreKilled(t *testing.T) {
	s := &maskSoak{options: options{Kills: 9, Ranks: 4, Seed: 1}}
	err := s.run(context.Background(), rand.New(rand.NewPCG(1, 1)).IntN)
	t.Log(s.report())
	require.NoError(t, err)
	require.GreaterOrEqual(t, s.deaths, 9)
	require.GreaterOrEqual(t, len(s.delays), s.deaths, "every survivor of a group learns of every death")
	require.NotEmpty(t, s.comings)
	require.NotZero(t, s.whole)
}
