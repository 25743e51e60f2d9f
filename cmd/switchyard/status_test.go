package main

import (
	"bytes"
	"encoding/json"
	"os"
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
			for end := time.Now().Add(20 * time.Second); time.Now().Before(end) && !strings.Contains(asked(r.T.(*testing.T), "status"), verdict); {
				time.Sleep(20 * time.Millisecond)
			}
			text := asked(r.T.(*testing.T), "status")
			require.Contains(r.T, text, verdict)
			require.Regexp(r.T, `(?m)^0 +`+pid+` +2 +1 +1 +[0-9.]+m?s +alltoallv 2 `, text)
			var s observe.State
			require.NoError(r.T, json.Unmarshal([]byte(asked(r.T.(*testing.T), "status", "-json")), &s))
			require.Contains(r.T, s.Verdict, verdict)
			lines := strings.Split(strings.TrimSpace(asked(r.T.(*testing.T), "dump")), "\n")
			require.Len(r.T, lines, 4) // the state, two calls of rank 0 and one of rank 1
			var c observe.Call
			require.NoError(r.T, json.Unmarshal([]byte(lines[2]), &c))
			require.Equal(r.T, "started", c.State)
			var timeline struct {
				Events []struct {
					Phase string `json:"ph"`
				} `json:"traceEvents"`
			}
			phases := func(args ...string) string {
				require.NoError(r.T, json.Unmarshal([]byte(asked(r.T.(*testing.T), append([]string{"trace"}, args...)...)), &timeline))
				all := ""
				for _, e := range timeline.Events {
					all += e.Phase
				}
				return all
			}
			require.Equal(r.T, [2]int{2, 1}, [2]int{strings.Count(phases(), "X"), strings.Count(phases(), "B")})
			require.Equal(r.T, "MMB", phases("-d", "1ms"), "what had ended before is left out")
		}
		exchange()
		r.Must(x.Close(r.Ctx))
	})
	var out, errs bytes.Buffer
	require.Equal(t, 1, command([]string{"status", "-pid", "1"}, &out, &errs))
	require.Contains(t, errs.String(), "no process of this user with ranks answers")
	require.Equal(t, 2, command([]string{"status", "now"}, &out, &errs))
}
