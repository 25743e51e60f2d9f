package config

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/examples/moe/text"
)

// The memory of a run is near what was measured with a text of 350 kB on 2 processors: the program and the text are less there.
func TestCostIsNearWhatWasMeasured(t *testing.T) {
	for args, mib := range map[string]float64{
		"":                                    88,
		"-batch 20000":                        811,
		"-hidden 1024 -inner 1024 -batch 256": 623,
		"-experts 64 -topk 8 -batch 2048":     373,
		"-layers 30":                          752,
		"-context 1000":                       1078,
	} {
		c, err := Parse(strings.Fields(args), nil)
		require.NoError(t, err)
		got := c.cost().memory / (1 << 20)
		require.Greater(t, got, mib, args)
		require.Less(t, got, 1.4*mib+100, args)
	}
}

// A run that this machine has no memory for is refused before it takes any. The refusal says what is large, and why.
func TestRefusalNamesTheFlag(t *testing.T) {
	const dense, experts, activations = "for the dense part of the model", "for the experts", "for the activations of a batch"
	begin := time.Now()
	for args, want := range map[string][]string{
		"-context 20000 -ranks 8":      {dense, "lower -context"},
		"-context 1000000":             {activations, "lower -context"},
		"-batch 10000000":              {activations, "lower -batch"},
		"-hidden 1000000":              {experts, "lower -hidden"},
		"-inner 10000000":              {experts, "lower -inner"},
		"-embed 10000000":              {activations, "lower -embed"},
		"-layers 10000":                {activations, "lower -layers"},
		"-experts 100000":              {experts, "lower -experts"},
		"-experts 5000 -topk 5000":     {"exchange buffers|activations", "lower -topk"},
		"-ranks 10000 -batch 10000":    {"for what ranks keep for each other", "lower -ranks"},
		"-procs -ranks 400":            {"for the processes of the ranks", "lower -ranks"},
		"-hidden 9000000000000000000":  {"e\\+\\d+ TiB", "lower -hidden"},
		"-context 9000000000000000000": {activations, "lower -context"},
		"-layers 9000000000000000000":  {activations, "lower -layers"},
		"-batch 9000000000000000000":   {activations, "lower -batch"},
	} {
		c, err := Parse(strings.Fields(args), nil)
		require.NoError(t, err, args)
		err = c.fits(20 << 30)
		var wrong *UsageError
		require.ErrorAs(t, err, &wrong, args)
		require.Regexp(t, `^this run needs about .* of memory and 20.0 GiB are free; the most, .*, is for .*: lower -[a-z]+$`, err.Error())
		for _, w := range want {
			require.Regexp(t, w, err.Error(), args)
		}
	}
	require.Less(t, time.Since(begin), time.Minute, "no time at all where nothing else runs")

	for _, args := range []string{"", "-procs", "-check", "-ranks 64 -kill-rank 1", "-procs -steps 600 -kill-rank 1 -at-step 200 -replace-at-step 400"} {
		c, err := Parse(strings.Fields(args), nil)
		require.NoError(t, err, args)
		require.NoError(t, c.fits(1<<30), args)
	}
	require.NoError(t, Defaults().fits(0), "nobody knows what is free")
}

// A run that is large says so, whatever makes it large.
func TestLargeRunsSayWhatTheyCost(t *testing.T) {
	say := func(args string) string {
		c, err := Parse(strings.Fields(args), nil)
		require.NoError(t, err)
		var out strings.Builder
		c.Describe(&out, text.New("a text", make([]byte, text.Least)), "in one process", 80)
		return out.String()
	}
	require.Regexp(t, `A run of that size on \d+ processors? costs about .* a step\n +and \d+\.\d GiB of memory: .* in all\n`, say("-layers 1000"))
	require.NotContains(t, say(""), "memory")
}
