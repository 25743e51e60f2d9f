package observe_test

import (
	"bytes"
	"encoding/json"
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
	other.ID = 128
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
	const late = 30 * time.Millisecond
	worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		if r.Rank() == 1 {
			time.Sleep(late)
		}
		exchanges(r, x, 1)
		r.Barrier()
		if r.Rank() == 0 {
			_, events := timeline(r.T, observe.Calls(), time.Time{})
			require.Len(r.T, events["X"], 3)
			require.Len(r.T, events["s"], 1)
			require.Equal(r.T, 1, events["s"][0].Pid)
			for _, e := range events["X"] {
				if e.Pid != 1 {
					require.Greater(r.T, e.Took, 10e3)
				}
			}
		}
		r.Barrier()
		r.Must(x.Close(r.Ctx))
	})
}
