package plan_test

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/kernels/plan"
	"github.com/switchyard-moe/switchyard/test/plans"
)

var update = flag.Bool("update", false, "write the example plans")

var builders = []func(int) *plan.Plan{plans.OneShotAllReduce, plans.RingAllReduce, plans.RingAllGather, plans.DirectAllToAll}

func TestBuiltPlansPass(t *testing.T) {
	for _, build := range builders {
		for ranks := 2; ranks <= 9; ranks++ {
			_, err := plan.Check(build(ranks))
			require.NoError(t, err)
		}
	}
}

// The files of examples/plans are what Write makes of the plans for 4 ranks, and Load gives the same plans again.
func TestExamplesAreWhatIsBuilt(t *testing.T) {
	for _, build := range builders {
		p := build(4)
		path := filepath.Join("..", "..", "examples", "plans", p.Name+".json")
		var b bytes.Buffer
		require.NoError(t, p.Write(&b))
		if *update {
			require.NoError(t, os.WriteFile(path, b.Bytes(), 0o644))
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, b.String(), string(text), "go test ./kernels/plan -update writes it")
		c, err := plan.Load(path)
		require.NoError(t, err)
		require.Equal(t, p, &c.Plan)
	}
}

// pair is an all-reduce of two ranks, in which rank 0 combines.
func pair() *plan.Plan {
	p, err := plan.Read(bytes.NewReader([]byte(`{
  "name": "pair", "collective": "all-reduce", "ranks": 2, "chunks": 1, "scratch": 1,
  "programs": [
    [{"do": "wait", "peer": 1},
     {"do": "reduce", "from": ["input:0", "scratch:0"], "to": "output:0"},
     {"do": "put", "from": ["output:0"], "to": "output:0@1"},
     {"do": "signal", "peer": 1}],
    [{"do": "put", "from": ["input:0"], "to": "scratch:0@0"},
     {"do": "signal", "peer": 0},
     {"do": "wait", "peer": 0}]
  ]
}`)))
	if err != nil {
		panic(err)
	}
	return &p.Plan
}

func peer(p int) *int { return &p }

// What is wrong with a plan is said with both values.
func TestWrongPlansAreRefused(t *testing.T) {
	for _, c := range []struct {
		name  string
		wrong func(p *plan.Plan)
		want  string
	}{
		{"a cycle", func(p *plan.Plan) {
			s := p.Programs[1]
			s[0], s[1], s[2] = s[2], s[0], s[1]
		}, "a cycle: each waits for the next, and the last for the first: rank 0, step 0 (wait for rank 1, semaphore 0); rank 1, step 0 (wait for rank 0, semaphore 0)"},
		{"a signal too few", func(p *plan.Plan) { p.Programs[1] = append(p.Programs[1][:1], p.Programs[1][2]) },
			"rank 1 signals semaphore 0 of rank 0 0 times, which waits for it 1 times"},
		{"a signal too many", func(p *plan.Plan) { p.Programs[0] = append(p.Programs[0], p.Programs[0][3]) },
			"rank 0 signals semaphore 0 of rank 1 2 times, which waits for it 1 times"},
		{"a hole", func(p *plan.Plan) { p.Programs[0] = append(p.Programs[0][:2], p.Programs[0][3]) },
			"a hole: nothing writes output:0 of rank 1, which should be input:0 of all ranks"},
		{"an early read", func(p *plan.Plan) { s := p.Programs[0]; s[0], s[1] = s[1], s[0] },
			"rank 0, step 0 (reduce of input:0, scratch:0 to output:0) reads scratch:0 of rank 0, which nothing has written before"},
		{"a race", func(p *plan.Plan) { s := p.Programs[1]; p.Programs[1] = []plan.Step{s[0], s[1], s[0], s[2]} },
			"a race for scratch:0 of rank 0: no signal orders rank 1, step 2 (put of input:0 to scratch:0@0) and rank 0, step 1 (reduce of input:0, scratch:0 to output:0)"},
		{"a late write", func(p *plan.Plan) { s := p.Programs[0]; s[2], s[3] = s[3], s[2] },
			"rank 0, step 3 (put of output:0 to output:0@1) touches output:0 of rank 1, which may have ended: no signal tells it"},
		{"another value", func(p *plan.Plan) { p.Programs[0][2].From = []plan.Place{plan.At(plan.Input, 0)} },
			"output:0 of rank 1 is input:0 of rank 0, and should be input:0 of all ranks"},
		{"twice", func(p *plan.Plan) { p.Programs[0][1].From[1] = plan.At(plan.Input, 0) },
			"rank 0, step 1 (reduce of input:0, input:0 to output:0) has the input of rank 0 twice"},
		{"a written input", func(p *plan.Plan) { *p.Programs[0][1].To = plan.At(plan.Input, 0) }, "nothing writes an input"},
		{"a chunk too far", func(p *plan.Plan) { *p.Programs[1][0].To = plan.At(plan.Scratch, 1).Of(0) }, "scratch:1@0, of which there are 1 chunks"},
		{"no such rank", func(p *plan.Plan) { p.Programs[0][0].Peer = peer(2) }, "has peer 2, want another of 2 ranks"},
		{"itself", func(p *plan.Plan) { p.Programs[0][0].Peer = peer(0) }, "has peer 0, want another of 2 ranks"},
		{"a rank too few", func(p *plan.Plan) { p.Ranks = 3 }, "2 programs for 3 ranks"},
		{"a time of nothing", func(p *plan.Plan) { p.Bytes, p.Microseconds = []int64{8}, []float64{0} }, "0 us for 8 bytes"},
		{"no collective", func(p *plan.Plan) { p.Collective = "gather" }, `collective "gather", want "all-reduce"`},
		{"a reduce that gathers", func(p *plan.Plan) { p.Collective = plan.AllGather }, "a reduce in an all-gather"},
		{"no such step", func(p *plan.Plan) { p.Programs[0][0].Do = "get" }, `a step that does "get"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := pair()
			c.wrong(p)
			_, err := plan.Check(p)
			require.ErrorIs(t, err, plan.ErrInvalid)
			require.ErrorContains(t, err, c.want)
		})
	}
}

// 2^62 chunks of each of 4 ranks would be 0.
func TestChunksThatOverflowAreRefused(t *testing.T) {
	p := plans.DirectAllToAll(4)
	p.Chunks = 1 << 62
	require.ErrorContains(t, p.Validate(), "4611686018427387904 chunks, want 1 to 1024")
}

// Ranks that combine in different orders would have different bits.
func TestRanksCombineInOneOrder(t *testing.T) {
	p := plans.OneShotAllReduce(3)
	last := p.Programs[2][len(p.Programs[2])-1].From
	last[0], last[1] = last[1], last[0]
	_, err := plan.Check(p)
	require.ErrorContains(t, err, "output:0 is combined as (1 + 0 + 2) on rank 2 and as (0 + 1 + 2) on rank 0")
}

func TestPlacesAreRead(t *testing.T) {
	for _, text := range []string{"input:0", "scratch:17", "output:3@2"} {
		var p plan.Place
		require.NoError(t, p.UnmarshalText([]byte(text)))
		require.Equal(t, text, p.String())
	}
	for _, text := range []string{"", "input", "input:", "inputs:0", "input:-1", "input:1@", "input:1@-1", "input:1@x", "1:input"} {
		require.ErrorIs(t, new(plan.Place).UnmarshalText([]byte(text)), plan.ErrInvalid, text)
	}
}

func TestEstimate(t *testing.T) {
	p := &plan.Plan{Bytes: []int64{100, 300}, Microseconds: []float64{1, 5}}
	require.Equal(t, []float64{1, 1, 3, 5, 10}, []float64{p.Estimate(0), p.Estimate(100), p.Estimate(200), p.Estimate(300), p.Estimate(600)})
}

// Steps whose places are parts of one list stay as they are.
func TestACheckLeavesStepsAlone(t *testing.T) {
	p := plans.OneShotAllReduce(3)
	last := &p.Programs[0][len(p.Programs[0])-1]
	all := append(slices.Clone(last.From), plan.At(plan.Input, 7))
	last.From = all[:3]
	_, err := plan.Check(p)
	require.NoError(t, err)
	require.Equal(t, plan.At(plan.Input, 7), all[3])
}
