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
	os.Exit(m.Run())
}

// Processes are killed and replaced a few times: the others name them, go on without them with right results, and let others in.
func TestF2_GroupsOfProcessesHeal(t *testing.T) {
	heal := func(t *testing.T, gpus int) {
		s := &soak{options: options{Minutes: 2, Kills: 6, Ranks: 3, GPUs: gpus, Seed: 1, Pause: time.Second, Calls: 20, Harm: "kill"}, rng: rand.New(rand.NewPCG(1, 1)), began: time.Now()}
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
		heal(t, 0)
	})
	t.Run("cuda", func(t *testing.T) {
		n, err := gpus()
		if err != nil {
			t.Skip(err)
		}
		heal(t, n)
	})
}
