package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
)

// A program whose rank 1 comes late to a call: status names it while rank 0 waits, and dump has the calls of both.
func TestStatusNamesTheRankThatIsWaitedFor(t *testing.T) {
	pid := strconv.Itoa(os.Getpid())
	asked := func(t *testing.T, args ...string) string {
		var out, errs bytes.Buffer
		require.Zero(t, command(append(args, "-pid", pid), &out, &errs), errs.String())
		return out.String()
	}
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		exchange := func() {
			sp := &alltoallv.Splits{Send: []int64{8, 8}, Recv: []int64{8, 8}}
			r.Must(x.Exchange(nil, memory.Host(make([]byte, 16)), memory.Host(make([]byte, 16)), sp))
		}
		exchange()
		if r.Rank() == 1 {
			const verdict = "rank 1 has not entered alltoallv 2 of group world; 1 rank waits"
			for end := time.Now().Add(time.Minute); time.Now().Before(end) && !strings.Contains(asked(r.T.(*testing.T), "status"), verdict); {
				time.Sleep(20 * time.Millisecond)
			}
			text := asked(r.T.(*testing.T), "status")
			require.Contains(r.T, text, verdict)
			require.Regexp(r.T, `(?m)^0 +`+pid+` +2 +1: alltoallv 2, [0-9.]+m?s `, text)
			var s observe.State
			require.NoError(r.T, json.Unmarshal([]byte(asked(r.T.(*testing.T), "status", "-json")), &s))
			require.Contains(r.T, s.Verdict, verdict)
			require.Contains(r.T, asked(r.T.(*testing.T), "explain", "-d", "200ms"), "no call began in ")
			var why observe.Explanation
			require.NoError(r.T, json.Unmarshal([]byte(asked(r.T.(*testing.T), "explain", "-d", "200ms", "-json")), &why))
			require.Contains(r.T, why.Verdict, verdict)
			require.GreaterOrEqual(r.T, why.Seconds, 0.1, "two snapshots, not one twice")
			require.Equal(r.T, "alltoallv", why.Operations[0].Operation)
			require.Equal(r.T, 1, why.Operations[0].Waited[0].Rank)
			lines := strings.Split(strings.TrimSpace(asked(r.T.(*testing.T), "dump")), "\n")
			require.Len(r.T, lines, 4) // the state, two calls of rank 0 and one of rank 1
			var c observe.Call
			require.NoError(r.T, json.Unmarshal([]byte(lines[2]), &c))
			require.Equal(r.T, "started", c.State)
			require.Equal(r.T, len(lines), strings.Count(asked(r.T.(*testing.T), "dump", "-json"), "\n"))
			prefix := filepath.Join(r.T.TempDir(), "calls_rank_")
			require.Equal(r.T, prefix+"0\n"+prefix+"1\n", asked(r.T.(*testing.T), "dump", "-torch", prefix))
			var timeline struct {
				Events []struct {
					Phase string `json:"ph"`
					Name  string
				} `json:"traceEvents"`
			}
			const waits = "wait for rank " // begins the names of slices within calls, where a wait took so long
			phases := func(args ...string) string {
				require.NoError(r.T, json.Unmarshal([]byte(asked(r.T.(*testing.T), append([]string{"trace"}, args...)...)), &timeline))
				all := ""
				for _, e := range timeline.Events {
					if !strings.HasPrefix(e.Name, waits) {
						all += e.Phase
					}
				}
				return all
			}
			require.Equal(r.T, [2]int{2, 1}, [2]int{strings.Count(phases(), "X"), strings.Count(phases(), "B")})
			require.Equal(r.T, "MMBCC", phases("-d", "1ms"), "what had ended before is left out")
			dir := r.T.TempDir()
			write := func(name, text string) string {
				path := filepath.Join(dir, name)
				require.NoError(r.T, os.WriteFile(path, []byte(text), 0o666))
				return path
			}
			var out, errs bytes.Buffer
			// What a dump has is shown as what running ranks say, also in a trace of torch's profiler.
			dumped := write("a.jsonl", asked(r.T.(*testing.T), "dump"))
			kineto := write("kineto.json", `{"baseTimeNanoseconds": 0, "traceEvents": [{"ph": "X", "name": "aten::ones", "pid": 4242}]}`)
			require.Zero(r.T, command([]string{"trace", "-with", kineto, dumped}, &out, &errs), errs.String())
			require.NoError(r.T, json.Unmarshal(out.Bytes(), &timeline))
			require.Equal(r.T, "X", timeline.Events[0].Phase)
			events := 0
			for _, e := range timeline.Events {
				if !strings.HasPrefix(e.Name, waits) {
					events++
				}
			}
			require.Equal(r.T, 1+4+3+2+8, events) // names, calls, an arrow, and changes of the counters
			require.Equal(r.T, 1, command([]string{"trace", write("no.jsonl", "{")}, &out, &errs))
			require.Contains(r.T, errs.String(), "no.jsonl is no dump")
			require.Equal(r.T, 2, command([]string{"trace", "-d", "1s", dumped}, &out, &errs))
		}
		exchange()
		r.Must(x.Close(r.Ctx))
	})
	var out, errs bytes.Buffer
	require.Equal(t, 1, command([]string{"status", "-pid", "1"}, &out, &errs))
	require.Contains(t, errs.String(), "no process of this user with ranks answers")
	require.Equal(t, 1, command([]string{"explain", "-d", "10ms"}, &out, &errs))
	require.Contains(t, errs.String(), "a window of 10ms is shorter than 200ms")
	require.Equal(t, 2, command([]string{"status", "now"}, &out, &errs))
}
