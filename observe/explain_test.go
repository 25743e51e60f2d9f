package observe_test

import (
	"bytes"
	"fmt"
	"regexp"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
)

// Steps of 4 ranks, in which one comes 100 ms late to each all-reduce or all ranks compute for 100 ms: rank 0 asks why they take so long.
func TestStepsAreExplained(t *testing.T) {
	for _, c := range []struct {
		name    string
		delay   func(rank int) time.Duration
		verdict string
	}{
		{"a late rank", func(rank int) time.Duration { return time.Duration(rank/3) * 100 * time.Millisecond },
			`^rank 3 holds up the others: they wait for it ([4-9]\d|100)% of the time, most in all-reduce, to which it came last in \d+ of \d+ calls$`},
		{"computation", func(int) time.Duration { return 100 * time.Millisecond }, `^calls take \d+% of the time, and no rank is waited for 5% of it: the step is slow outside of calls$`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var over atomic.Bool
			var slower atomic.Int64 // makes steps as many times as long, so that a busy machine, which has ranks be late too, counts less
			slower.Store(1)
			verdict := regexp.MustCompile(c.verdict)
			worldtest.Local(t, 4, 16<<20, func(r *worldtest.Rank) {
				y, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{})
				r.Must(err)
				stop := make([]byte, 4)
				explained := make(chan observe.Explanation, 1)
				if r.Rank() == 0 {
					go func() {
						job := stateOf(observe.Snapshot(), 0).Job
						var x observe.Explanation
						for times := time.Duration(1); times == 1 || times < 64 && !verdict.MatchString(x.Verdict); times *= 2 {
							slower.Store(int64(times))
							time.Sleep(times * 200 * time.Millisecond) // all ranks make such steps
							before, _ := observe.Snapshot().OfJob(job)
							time.Sleep(times * time.Second)
							after, _ := observe.Snapshot().OfJob(job)
							x = observe.Explain(before, after, observe.Calls())
						}
						explained <- x
						over.Store(true)
					}()
				}
				for stop[0] == 0 {
					time.Sleep(time.Duration(slower.Load()) * c.delay(r.Rank()))
					mine := make([]byte, 4)
					if r.Rank() == 0 && over.Load() {
						mine[0] = 1
					}
					r.Must(y.AllReduce(nil, memory.Host(stop), memory.Host(mine), kernels.Int32, kernels.Sum))
				}
				if r.Rank() == 0 {
					x := <-explained
					require.Regexp(r.T, verdict, x.Verdict)
					require.Len(r.T, x.Operations, 1)
					e := x.Operations[0]
					require.Equal(r.T, "all-reduce", e.Operation)
					require.Equal(r.T, 4, e.Plans[0].Ranks)
					require.InDelta(r.T, 4, e.Plans[0].PayloadBytes, 1e-9)
					require.NotEmpty(r.T, e.Plans[0].Algorithm)
					require.NotEmpty(r.T, e.Last)
					var b bytes.Buffer
					x.Table(&b)
					require.Regexp(r.T, `(?m)^all-reduce +\d+% +\S+ +\d+\.\d +4 B +`, b.String())
				}
				r.Must(y.Close(r.Ctx))
			})
		})
	}
}

// states are those of two ranks at the beginning and at the end of a second.
func states(change func(rank int, r *observe.Rank)) (before, after observe.State) {
	for rank := range 2 {
		r := observe.Rank{Rank: rank, Size: 2, Group: "world", Job: "a", Operations: []observe.Operation{{Operation: "dispatch", Algorithm: "rows", Calls: 10, Timed: 10, Seconds: 1}}}
		before.Ranks = append(before.Ranks, r)
		r.Operations = append([]observe.Operation{}, r.Operations...)
		change(rank, &r)
		after.Ranks = append(after.Ranks, r)
	}
	before.At = time.Now()
	after.At = before.At.Add(time.Second)
	return before, after
}

func TestVerdictsOfAWindow(t *testing.T) {
	for _, c := range []struct {
		want   string
		change func(rank int, r *observe.Rank)
	}{
		{"no call began in 1s, and no rank waits for another: the step is slow outside of calls", func(int, *observe.Rank) {}},
		{"no call began in 1s: rank 1 does not come further in dispatch 11 of group world; 1 rank waits, the longest 3s", func(rank int, r *observe.Rank) {
			if rank == 0 {
				r.Waiting = []observe.Waiting{{Group: "world", Operation: "dispatch", Call: 11, For: 1, Seconds: 3}}
			}
		}},
		{"all calls ran on GPUs, of whose times the host knows nothing: take a profile there", func(_ int, r *observe.Rank) { r.Operations[0].Calls += 5 }},
		{"calls take 50% of the time, and no rank is waited for 5% of it: most is dispatch by rows, 2 KiB a call in 100ms", func(_ int, r *observe.Rank) {
			o := &r.Operations[0]
			o.Calls, o.Timed, o.Seconds, o.PayloadBytes = o.Calls+5, o.Timed+5, o.Seconds+0.5, 5*2048
		}},
		{"rank 1 holds up the others: they wait for it 30% of the time, most in dispatch", func(rank int, r *observe.Rank) {
			r.Operations[0].Calls += 5
			if rank == 0 {
				r.Waited = []observe.Waited{{Operation: "dispatch", Peer: 1, Seconds: 0.3}}
			}
		}},
	} {
		before, after := states(c.change)
		require.Equal(t, c.want, observe.Explain(before, after, nil).Verdict)
	}
}

// Two jobs each get a verdict.
func TestJobsAreExplainedApart(t *testing.T) {
	before, after := states(func(int, *observe.Rank) {})
	before.Ranks[1].Job, after.Ranks[1].Job = "b", "b"
	const quiet = "no call began in 1s, and no rank waits for another: the step is slow outside of calls"
	require.Equal(t, fmt.Sprintf("job a: %s\njob b: %[1]s", quiet), observe.Explain(before, after, nil).Verdict)
}
