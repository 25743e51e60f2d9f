package observe_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/observe"
)

// traced is an event of a Chrome trace.
type traced struct {
	Name  string         `json:"name"`
	Phase string         `json:"ph"`
	Pid   int            `json:"pid"`
	Tid   int            `json:"tid"`
	At    float64        `json:"ts"`
	Took  float64        `json:"dur"`
	ID    int            `json:"id"`
	Args  map[string]any `json:"args"`
}

func timeline(t testing.TB, calls []observe.Call, from time.Time) (base int64, byPhase map[string][]traced) {
	var b bytes.Buffer
	require.NoError(t, observe.Timeline(&b, calls, from))
	var file struct {
		Base   int64    `json:"baseTimeNanoseconds"`
		Events []traced `json:"traceEvents"`
	}
	require.NoError(t, json.Unmarshal(b.Bytes(), &file))
	require.NotNil(t, file.Events)
	byPhase = map[string][]traced{}
	for _, e := range file.Events {
		byPhase[e.Phase] = append(byPhase[e.Phase], e)
	}
	return file.Base, byPhase
}

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// made is a call that was enqueued at a microsecond, started and finished; -1 is never.
func made(rank int, number uint64, enqueued, started, finished int) observe.Call {
	at := func(us int) *time.Time {
		if us < 0 {
			return nil
		}
		x := noon.Add(time.Duration(us) * time.Microsecond)
		return &x
	}
	return observe.Call{Job: "a", Rank: rank, Group: "world", ID: 64, Call: number, Operation: "alltoallv", Algorithm: "ring", Enqueued: *at(enqueued), Started: at(started), Finished: at(finished)}
}

func TestATimelineHasATrackForEachCommunicator(t *testing.T) {
	other := made(0, 1, 60, 60, 70)
	other.ID, other.Stream = 128, "7"
	base, events := timeline(t, []observe.Call{
		made(0, 1, 0, 10, 30), made(0, 2, 30, 30, 50), other,
		made(0, 3, 55, 55, 90), made(0, 4, 60, 60, 80), // at the same time
		made(1, 5, 100, -1, -1), made(1, 6, 110, 110, -1),
	}, time.Time{})
	require.Equal(t, noon.Add(10*time.Microsecond).UnixNano(), base)
	require.Len(t, events["X"], 5)
	tids := map[float64]int{}
	for _, e := range events["X"] {
		require.Zero(t, e.Pid)
		if e.Tid == 0 {
			tids[e.At] = int(e.Took)
		}
	}
	require.Equal(t, map[float64]int{0: 20, 20: 20, 45: 35}, tids, "calls one after the other are on one track")
	require.InDelta(t, 10, events["X"][0].Args["queued_us"], 1e-9)
	require.NotContains(t, events["X"][0].Args, "stream")
	require.True(t, slices.ContainsFunc(events["X"], func(e traced) bool { return e.Args["stream"] == "7" }))
	require.Len(t, events["i"], 1, "a call that the host does not see run")
	require.Equal(t, 90.0, events["i"][0].At)
	require.Len(t, events["B"], 1, "a call that runs")
	var names []any
	for _, e := range events["M"] {
		names = append(names, e.Args["name"])
	}
	require.Equal(t, []any{"rank 0 of job a", "world, communicator 64", "world, communicator 128", "world, communicator 64", "rank 1 of job a", "world, communicator 64"}, names)
	require.Empty(t, events["s"])
}

func TestAnArrowLeadsFromTheLastRankToTheFirst(t *testing.T) {
	apart := []observe.Call{made(0, 2, 200, 200, 210), made(1, 2, 300, 300, 310)} // nobody waited
	_, events := timeline(t, append(apart, made(0, 1, 0, 0, 100), made(1, 1, 20, 20, 100), made(2, 1, 90, 90, 101)), time.Time{})
	require.Len(t, events["s"], 1)
	require.Len(t, events["f"], 1)
	s, f := events["s"][0], events["f"][0]
	require.Equal(t, []int{2, 0}, []int{s.Pid, f.Pid})
	require.Equal(t, s.ID, f.ID)
	require.Equal(t, []float64{90, 90}, []float64{s.At, f.At})

	two := []observe.Call{made(0, 1, 0, 0, 100), made(1, 1, 50, 50, 100)}
	for i := range two {
		two[i].Operation, two[i].Call = "put", 0
	}
	_, events = timeline(t, two, time.Time{})
	require.Empty(t, events["s"], "calls between two ranks have no number")
}

// Waits are slices within that of their call, also where their clock differs from that of calls, and on the clock of the first host.
func TestATimelineShowsWhatACallWaitsFor(t *testing.T) {
	wait := func(rank, began, us int) observe.CallWait {
		return observe.CallWait{For: rank, Began: noon.Add(time.Duration(began) * time.Microsecond), Seconds: float64(us) / 1e6}
	}
	ended, runs := made(0, 1, 100, 100, 200), made(0, 2, 210, 210, -1)
	ended.Waits = []observe.CallWait{wait(2, 99, 41), wait(1, 150, 51)}
	runs.Waits = []observe.CallWait{wait(2, 220, 30)}
	_, events := timeline(t, []observe.Call{ended, runs}, time.Time{})
	var waits []string
	for _, e := range events["X"] {
		if e.Name != "alltoallv" {
			require.Zero(t, e.Tid)
			waits = append(waits, fmt.Sprintf("%s: %.0f %.0f", e.Name, e.At, e.Took))
		}
	}
	require.Equal(t, []string{"wait for rank 2: 0 40", "wait for rank 1: 50 50", "wait for rank 2: 120 30"}, waits)
}

func TestATimelineBeginsLater(t *testing.T) {
	calls := []observe.Call{made(0, 1, 0, 0, 10), made(0, 2, 10, 10, 30), made(0, 3, 15, -1, -1), made(0, 4, 25, -1, -1), made(0, 5, 1, 1, -1)}
	_, events := timeline(t, calls, noon.Add(20*time.Microsecond))
	require.Len(t, events["X"], 1)
	require.Len(t, events["i"], 1)
	require.Len(t, events["B"], 1)
	_, events = timeline(t, nil, time.Time{})
	require.Empty(t, events)
}

// The arrow of a call that really waited comes from the rank that was late.
func TestATimelineOfRanksShowsTheLateOne(t *testing.T) {
	const late = 0.02 // seconds
	worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		waits := func(rank int) bool {
			s := stateOf(observe.Snapshot(), rank)
			return len(s.Waiting) == 1 && s.Waiting[0].Seconds > late
		}
		for end := time.Now().Add(time.Minute); r.Rank() == 1 && !(waits(0) && waits(2)) && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		exchanges(r, x, 1)
		r.Barrier()
		if r.Rank() == 0 {
			_, events := timeline(r.T, observe.Calls(), time.Time{})
			require.Len(r.T, events["s"], 1)
			require.Equal(r.T, 1, events["s"][0].Pid)
			took, waited, forLate := map[int]float64{}, map[int]float64{}, false
			for _, e := range events["X"] {
				if e.Name == "alltoallv" {
					took[e.Pid] += e.Took
					continue
				}
				waited[e.Pid] += e.Took
				forLate = forLate || e.Name == "wait for rank 1" && e.Took > late*1e6
			}
			require.Len(r.T, took, 3)
			require.True(r.T, forLate, "%v", events["X"]) // the third rank may wait for the one that waits
			for _, pid := range []int{0, 2} {
				require.Greater(r.T, took[pid], waited[pid])
				require.Greater(r.T, waited[pid], late*1e6)
			}
		}
		r.Barrier()
		r.Must(x.Close(r.Ctx))
	})
}

// hosts are exchanges of ranks 0 and 1 on two hosts, of which the second has a clock that is 3 ms ahead. Each call takes 40 us, and the
// ranks begin it up to 15 us apart.
func hosts() (calls []observe.Call) {
	for n := range 200 {
		at := n * 100
		a, b := made(0, uint64(n+1), at, at, at+40), made(1, uint64(n+1), at+3000+n%15, at+3000+n%15, at+3000+40)
		b.Host, a.State, b.State = 1, "finished", "finished"
		calls = append(calls, a, b)
	}
	return calls
}

func TestClocksOfHostsAreMeasuredByTheirCalls(t *testing.T) {
	clocks := observe.Clocks(hosts())
	require.Len(t, clocks, 1)
	k := clocks[0]
	require.Equal(t, []any{"a", 1, 200}, []any{k.Job, k.Host, k.Calls})
	require.InDelta(t, -3000e3, k.Offset, float64(k.Within))
	require.Less(t, k.Within, 41*time.Microsecond)

	base, events := timeline(t, hosts(), time.Time{})
	require.InDelta(t, noon.UnixNano(), base, 1e5)
	byCall := map[float64][]float64{}
	for _, e := range events["X"] {
		n := e.Args["call"].(float64)
		byCall[n] = append(byCall[n], e.At)
	}
	for n, at := range byCall {
		require.InDelta(t, at[0], at[1], 60, "call %v", n)
	}
	require.True(t, slices.ContainsFunc(events["M"], func(e traced) bool {
		return e.Pid == 1 && strings.HasPrefix(fmt.Sprint(e.Args["labels"]), "host 1, times moved by -")
	}))

	put := hosts()
	for i := range put {
		put[i].Operation = "broadcast"
	}
	require.Zero(t, observe.Clocks(put)[0].Calls, "the root of a broadcast waits for nobody")
}

func TestCountersFollowTheCalls(t *testing.T) {
	a, b := made(0, 1, 0, 0, 30), made(0, 2, 10, 10, 20)
	a.PayloadBytes, b.PayloadBytes = 64, 36
	_, events := timeline(t, []observe.Call{a, b, made(0, 3, 30, 30, -1)}, time.Time{})
	var flight, bytes []any
	for _, e := range events["C"] {
		if e.Name == "calls in flight" {
			flight = append(flight, e.At, e.Args["calls"])
		} else {
			bytes = append(bytes, e.At, e.Args["bytes"])
		}
	}
	require.Equal(t, []any{0., 1., 10., 2., 20., 1., 30., 0., 30., 1.}, flight)
	require.Equal(t, []any{0., 64., 10., 100.}, bytes)
}

// What was in the profiler's trace stays, and calls are at their times on its clock, in processes that it does not have.
func TestATimelineIsMergedIntoATraceOfTheProfiler(t *testing.T) {
	base := noon.Add(-time.Second).UnixNano()
	trace := fmt.Sprintf(`{"schemaVersion": 1, "baseTimeNanoseconds": %d, "traceEvents": [{"ph": "X", "name": "aten::ones", "pid": 4242, "tid": 4242, "ts": 1000005.5, "dur": 2.5}, {"ph": "i", "name": "end", "pid": "Traces", "tid": "x", "ts": 3}]}`, base)
	var b bytes.Buffer
	require.NoError(t, observe.MergeTimeline(&b, strings.NewReader(trace), []observe.Call{made(1, 1, 0, 10, 30)}, time.Time{}))
	var file struct {
		Schema int   `json:"schemaVersion"`
		Base   int64 `json:"baseTimeNanoseconds"`
		Events []struct {
			Name string  `json:"name"`
			Pid  any     `json:"pid"`
			At   float64 `json:"ts"`
		} `json:"traceEvents"`
	}
	require.NoError(t, json.Unmarshal(b.Bytes(), &file))
	require.Equal(t, []any{1, base}, []any{file.Schema, file.Base})
	require.Equal(t, []any{"aten::ones", 4242., 1000005.5}, []any{file.Events[0].Name, file.Events[0].Pid, file.Events[0].At})
	at := slices.IndexFunc(file.Events, func(e struct {
		Name string  `json:"name"`
		Pid  any     `json:"pid"`
		At   float64 `json:"ts"`
	}) bool {
		return e.Name == "alltoallv"
	})
	require.Equal(t, []any{10_000_001., 1000010.}, []any{file.Events[at].Pid, file.Events[at].At})
	for bad, why := range map[string]string{"[]": "cannot unmarshal", `{"traceEvents": []}`: "baseTimeNanoseconds", `{"baseTimeNanoseconds": 1}`: "traceEvents"} {
		require.ErrorContains(t, observe.MergeTimeline(&b, strings.NewReader(bad), nil, time.Time{}), why)
	}
}
