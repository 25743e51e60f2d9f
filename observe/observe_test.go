package observe_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
)

// exchanges makes n exchanges of 64 bytes a pair.
func exchanges(r *worldtest.Rank, x *alltoallv.Exchanger, n int) {
	sp := &alltoallv.Splits{}
	for range r.Size() {
		sp.Send, sp.Recv = append(sp.Send, 64), append(sp.Recv, 64)
	}
	for range n {
		r.Must(x.Exchange(nil, memory.Host(make([]byte, 64*r.Size())), memory.Host(make([]byte, 64*r.Size())), sp))
	}
}

// stateOf is the state of a rank of this world: other tests' ranks have none by then.
func stateOf(s observe.State, rank int) *observe.Rank {
	for i := range s.Ranks {
		if s.Ranks[i].Rank == rank {
			return &s.Ranks[i]
		}
	}
	return nil
}

func TestCallsAndBytesAreCounted(t *testing.T) {
	worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		y, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{})
		r.Must(err)
		exchanges(r, x, 5)
		r.Must(y.AllReduce(nil, memory.Host(make([]byte, 8)), memory.Host(make([]byte, 8)), kernels.Float32, kernels.Sum))
		require.Error(r.T, y.AllReduce(nil, memory.Host(make([]byte, 5)), memory.Host(make([]byte, 8)), kernels.Float32, kernels.Sum))
		s := stateOf(observe.Snapshot(), r.Rank())
		require.Equal(r.T, 3, s.Size)
		require.Equal(r.T, "world", s.Group)
		byName := map[string]observe.Operation{}
		for _, o := range s.Operations {
			byName[o.Operation] = o
			require.NotEmpty(r.T, o.Algorithm)
		}
		e := byName["alltoallv"]
		require.Equal(r.T, []uint64{5, 0, 0, 5, 5 * 128}, []uint64{e.Calls, e.Failed, e.InFlight, e.Timed, e.PayloadBytes})
		require.Positive(r.T, e.Seconds)
		require.Equal(r.T, uint64(1), byName["all-reduce"].Calls, "a refused call is none")
		require.Equal(r.T, uint64(8), byName["all-reduce"].PayloadBytes)
		for p, peer := range s.Peers {
			if p == r.Rank() {
				require.Zero(r.T, peer.SentBytes)
			} else {
				require.Equal(r.T, []uint64{320, 320}, []uint64{peer.SentBytes, peer.ReceivedBytes})
			}
		}
		require.Equal(r.T, uint64(4), s.Counters["plan_cache_hits"])
		require.Equal(r.T, uint64(1), s.Counters["plan_cache_misses"])
		require.Len(r.T, s.Heaps, 1)
		require.Equal(r.T, r.Heap.Stats().InUse, s.Heaps[0].UsedBytes)
		r.Must(r.Group.Barrier(r.Ctx))
		r.Must(x.Close(r.Ctx))
		r.Must(y.Close(r.Ctx))
	})
	require.Empty(t, observe.Snapshot().Ranks, "a rank that has left tells nothing")
}

// A rank that comes late to a call is named while the others wait, and their seconds are counted when it has come.
func TestALateRankIsNamed(t *testing.T) {
	const late = 400 * time.Millisecond
	worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		exchanges(r, x, 2)
		r.Must(r.Group.Barrier(r.Ctx))
		if r.Rank() == 2 {
			deadline := time.Now().Add(time.Minute)
			var s observe.State
			for time.Now().Before(deadline) && !strings.Contains(s.Verdict, "2 ranks wait") {
				time.Sleep(late / 20)
				s = observe.Snapshot()
			}
			require.Regexp(r.T, `^rank 2 has not entered alltoallv 3 of group world; 2 ranks wait, the longest [\d.]+m?s$`, s.Verdict)
			w := stateOf(s, 0).Waiting
			require.Len(r.T, w, 1)
			require.Equal(r.T, 2, w[0].For)
			require.Equal(r.T, []int{2}, w[0].Absent)
			time.Sleep(late)
		}
		exchanges(r, x, 1)
		r.Must(r.Group.Barrier(r.Ctx))
		if r.Rank() == 0 {
			s := observe.Snapshot()
			require.Empty(r.T, s.Verdict)
			longest := stateOf(s, 0).Waited[0]
			require.Equal(r.T, 2, longest.Peer)
			require.Equal(r.T, "alltoallv", longest.Operation)
			require.GreaterOrEqual(r.T, longest.Seconds, late.Seconds())
		}
		r.Must(r.Group.Barrier(r.Ctx))
		r.Must(x.Close(r.Ctx))
	})
}

// Rank 0 waits for rank 1, which waits for rank 2: rank 2 is the one that is named.
func TestWhoWaitsIsNotBlamed(t *testing.T) {
	s := observe.Merge(
		observe.State{Ranks: []observe.Rank{{Rank: 0, Group: "world", Heaps: []observe.Heap{{Awaits: []int{-1, 2, -1}}},
			Waiting: []observe.Waiting{{Group: "world", Operation: "dispatch", Call: 812, For: 1, Seconds: 0.024}}}}},
		observe.State{Ranks: []observe.Rank{{Rank: 1, Group: "world",
			Waiting: []observe.Waiting{{Group: "world", Operation: "dispatch", Call: 812, For: 2, Seconds: 0.02}}}}})
	require.Equal(t, "rank 2 does not come further in dispatch 812 of group world; 2 ranks wait, the longest 24ms", s.Verdict)
}

// Ranks that wait for memory of others say so, and what they are owed.
func TestWaitsForSharedMemoryHaveAVerdict(t *testing.T) {
	waits := func(rank, whom int, operation string, seconds float64) observe.Rank {
		return observe.Rank{Rank: rank, Size: 3, Group: "world", Waiting: []observe.Waiting{{Group: "world", Operation: operation, For: whom, Seconds: seconds}}}
	}
	verdict := func(ranks ...observe.Rank) string { return observe.Merge(observe.State{Ranks: ranks}).Verdict }
	idle := observe.Rank{Rank: 2, Size: 3, Group: "world"}
	opens, takes := waits(0, 2, "open memory", 2), waits(0, 2, "take back memory", 2)
	require.Equal(t, "rank 2 has shared no memory that a rank is to open of group world; 1 rank waits, the longest 2s", verdict(opens, idle))
	require.Equal(t, "rank 2 has not given back memory that a rank has shared with it of group world; 1 rank waits, the longest 2s", verdict(takes, idle))
	// who waits for one that waits itself, on a GPU too, whose heap does not tell it
	first := waits(1, 0, "open memory", 3)
	require.Equal(t, "rank 2 has not given back memory that a rank has shared with it of group world; 2 ranks wait, the longest 3s", verdict(takes, first, idle))
	var b bytes.Buffer
	s := observe.Merge(observe.State{Ranks: []observe.Rank{takes, first, idle}})
	s.Table(&b)
	require.Regexp(t, `(?m)^0 .* 2: take back memory, 2s .*\n1 .* 0: open memory, 3s `, b.String())
}

// Rank 1 was stopped while it waited for rank 2, which still shows, and rank 2 waits for it now.
func TestAStoppedRankIsNamed(t *testing.T) {
	waits := func(rank, whom int) observe.Rank {
		return observe.Rank{Rank: rank, Group: "world", Heaps: []observe.Heap{{Awaits: []int{1, 2, 1}}},
			Waiting: []observe.Waiting{{Group: "world", Operation: "all-reduce", Call: 3, For: whom, Seconds: 2}}}
	}
	const want = "rank 1 does not come further in all-reduce 3 of group world; %s, the longest 2s"
	zero := observe.State{Ranks: []observe.Rank{waits(0, 1)}}
	require.Equal(t, fmt.Sprintf(want, "1 rank waits"), observe.Merge(zero).Verdict, "as rank 0 sees it")
	require.Equal(t, fmt.Sprintf(want, "2 ranks wait"), observe.Merge(zero, observe.State{Ranks: []observe.Rank{waits(2, 1)}}).Verdict)
}

// Ranks of equal numbers of two jobs are not taken for one.
func TestJobsAreToldApart(t *testing.T) {
	waits := func(job string, rank, whom int) observe.Rank {
		return observe.Rank{Rank: rank, Group: "world", Job: job, Waiting: []observe.Waiting{{Group: "world", Operation: "combine", Call: 3, For: whom, Seconds: 2}}}
	}
	s := observe.Merge(observe.State{Ranks: []observe.Rank{waits("a1", 0, 1), {Rank: 1, Group: "world", Job: "a1"}, waits("b2", 2, 1)}})
	require.Equal(t, "job a1: rank 1 does not come further in combine 3 of group world; 1 rank waits, the longest 2s. "+
		"job b2: rank 1 does not come further in combine 3 of group world; 1 rank waits, the longest 2s", s.Verdict)
	var b bytes.Buffer
	s.Table(&b)
	require.Regexp(t, `(?m)^job a1\nRANK .*\n^0 .*\n^1 .*\n\njob b2\nRANK .*\n^2 `, b.String())
	require.Equal(t, map[string]string{
		"a1": "rank 1 does not come further in combine 3 of group world; 1 rank waits, the longest 2s",
		"b2": "rank 1 does not come further in combine 3 of group world; 1 rank waits, the longest 2s"}, s.Verdicts)
	named := s
	named.Ranks = slices.Clone(s.Ranks)
	for i := range named.Ranks {
		named.Ranks[i].Program = "train_" + named.Ranks[i].Job
	}
	require.Contains(t, observe.Merge(named).Verdict, "job train_b2 b2: rank 1 ")
	one, err := s.OfJob("b")
	require.NoError(t, err)
	require.Len(t, one.Ranks, 1)
	require.NotContains(t, one.Verdict, "job")
	all, err := named.OfJob("")
	require.NoError(t, err)
	require.Len(t, all.Ranks, 3)
}

// A job is found by the beginning of its identity or of its program's name. Several that begin so are named, unless one has just that name, or
// they are jobs of the same processes.
func TestAJobIsFoundByABeginning(t *testing.T) {
	s := observe.State{
		Ranks: []observe.Rank{{Job: "a100", Program: "train", Pid: 1}, {Job: "a100", Program: "train", Pid: 2}, {Job: "a200", Program: "trainer", Pid: 3},
			{Job: "b300", Program: "serve", Pid: 4}, {Job: "c400", Program: "serve", Pid: 5}, {Job: "d500", Program: "grow", Pid: 6}, {Job: "d600", Program: "grow", Pid: 6}},
		Silent: []observe.Silent{{Job: "e700", Pid: 7}, {Pid: 8}},
	}
	for name, want := range map[string]string{
		"train": "1 2", "trainer": "3", "traine": "3", "a1": "1 2", "a100": "1 2", "b": "4", "c400": "5", "grow": "6 6", "d": "6 6", "e": "",
	} {
		got, err := s.OfJob(name)
		require.NoError(t, err, name)
		var pids []string
		for _, r := range got.Ranks {
			pids = append(pids, fmt.Sprint(r.Pid))
		}
		require.Equal(t, want, strings.Join(pids, " "), name)
		require.Len(t, got.Silent, map[string]int{"e": 1}[name], name)
	}
	for name, want := range map[string]string{
		"tra":   `observe: "tra" may be any of these jobs: train a100, trainer a200`,
		"a":     `observe: "a" may be any of these jobs: train a100, trainer a200`,
		"serve": `observe: "serve" may be any of these jobs: serve b300, serve c400`,
		"x":     `observe: job "x": no process of this user with ranks answers on this host`,
	} {
		_, err := s.OfJob(name)
		require.EqualError(t, err, want)
	}
}

// A wait of less than 5 ms is none to speak of.
func TestShortWaitsAreNoVerdict(t *testing.T) {
	short := observe.Rank{Waiting: []observe.Waiting{{Operation: "combine", For: 1, Seconds: 0.0049}}}
	require.Empty(t, observe.Merge(observe.State{Ranks: []observe.Rank{short}}).Verdict)
}

func TestALostRankIsAFault(t *testing.T) {
	var opened sync.WaitGroup
	opened.Add(2)
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		opened.Done()
		if r.Rank() == 1 {
			opened.Wait() // an abort may take along the heap of a rank that opens it yet
			r.Group.Abort(nil)
		}
		<-r.Group.Done()
		s := stateOf(observe.Snapshot(), r.Rank())
		require.NotNil(r.T, s)
		require.Equal(r.T, []observe.Fault{{Kind: "aborted", Culprit: 1, Count: 1}}, s.Faults)
		require.Contains(r.T, s.LastFault.Error, "no reason given")
	})
}

func TestTheHandlerServesMetricsStateAndDump(t *testing.T) {
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		exchanges(r, x, 3)
		r.Must(r.Group.Barrier(r.Ctx))
		if r.Rank() == 0 {
			server := httptest.NewServer(observe.Handler())
			defer server.Close()
			get := func(path, accept string) (*http.Response, string) {
				req, err := http.NewRequest(http.MethodGet, server.URL+path, nil)
				r.Must(err)
				req.Header.Set("Accept", accept)
				resp, err := server.Client().Do(req)
				r.Must(err)
				var b bytes.Buffer
				_, err = b.ReadFrom(resp.Body)
				r.Must(err)
				r.Must(resp.Body.Close())
				return resp, b.String()
			}
			resp, text := get("/metrics", "application/openmetrics-text;version=1.0.0")
			require.Contains(r.T, resp.Header.Get("Content-Type"), "application/openmetrics-text")
			require.True(r.T, strings.HasSuffix(text, "\n# EOF\n"))
			require.Regexp(r.T, `(?m)^switchyard_calls_total{rank="1",host="0",operation="alltoallv",algorithm="[a-z-]+"} 3$`, text)
			require.Contains(r.T, text, `switchyard_sent_bytes_total{rank="0",host="0",peer="1"} 192`)
			require.Contains(r.T, text, "# TYPE switchyard_calls counter\n")
			require.Regexp(r.T, `switchyard_call_duration_seconds_bucket{rank="0",host="0",operation="alltoallv",algorithm="[a-z-]+",le="\+Inf"} 3\n`, text)
			line := regexp.MustCompile(`^(# (TYPE|UNIT|HELP) switchyard[a-z_]* .+|switchyard[a-z_]+{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*} [0-9.e+-]+|# EOF)$`)
			for _, l := range strings.Split(strings.TrimSpace(text), "\n") {
				require.Regexp(r.T, line, l)
			}

			resp, text = get("/metrics", "*/*")
			require.Contains(r.T, resp.Header.Get("Content-Type"), "version=0.0.4")
			require.Contains(r.T, text, "# TYPE switchyard_calls_total counter\n")
			require.NotContains(r.T, text, "EOF")

			_, text = get("/state", "")
			var s observe.State
			r.Must(json.Unmarshal([]byte(text), &s))
			require.Len(r.T, s.Ranks, 2)

			_, text = get("/dump", "")
			lines := bufio.NewScanner(strings.NewReader(text))
			require.True(r.T, lines.Scan())
			r.Must(json.Unmarshal(lines.Bytes(), &s))
			var calls []observe.Call
			for lines.Scan() {
				var c observe.Call
				r.Must(json.Unmarshal(lines.Bytes(), &c))
				calls = append(calls, c)
			}
			require.Len(r.T, calls, 6)
			require.Equal(r.T, "finished", calls[2].State)
			require.Equal(r.T, uint64(3), calls[2].Call)
			require.False(r.T, calls[2].Finished.Before(*calls[2].Started))

			post, err := server.Client().Post(server.URL+"/metrics", "text/plain", strings.NewReader("x"))
			r.Must(err)
			r.Must(post.Body.Close())
			require.Equal(r.T, http.StatusMethodNotAllowed, post.StatusCode)
		}
		r.Must(r.Group.Barrier(r.Ctx))
		r.Must(x.Close(r.Ctx))
	})
}
