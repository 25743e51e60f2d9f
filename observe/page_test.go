package observe_test

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/observe"
)

//go:embed testdata/probe.html
var probe []byte

// seen is what a browser sees of the page.
type seen struct {
	Text              string
	Width             int
	Background, Color string
	Column            []int // how much of the last column of the experts' picture is painted, by expert, up to 255
	Imbalance         int   // the points of its curve
	Errors, Loaded    []string
}

// browse has Chromium show a page 390 pixels wide, and returns a function that waits until it sees something.
func browse(t *testing.T, page http.Handler, dark bool) (address string, until func(what string, see func(s *seen) bool) *seen) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts a browser")
	}
	browser := proctest.Need(t, "chromium")
	looks := make(chan *seen, 1)
	mux := http.NewServeMux()
	mux.Handle("/page/", page)
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(probe) })
	mux.HandleFunc("POST /seen", func(_ http.ResponseWriter, r *http.Request) {
		s := new(seen)
		if json.NewDecoder(r.Body).Decode(s) == nil {
			select {
			case looks <- s:
			case <-r.Context().Done():
			case <-time.After(time.Second): // nobody waits now
			}
		}
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	scheme := 1
	if dark {
		scheme = 0
	}
	profile := proctest.Folder(t)
	cmd := exec.CommandContext(t.Context(), browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
		"--remote-debugging-port=0", "--user-data-dir="+profile, fmt.Sprintf("--blink-settings=preferredColorScheme=%d", scheme),
		"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", server.URL+"/")
	cmd.WaitDelay = 10 * time.Second
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return server.URL, func(what string, see func(s *seen) bool) *seen {
		t.Helper()
		var last *seen
		for end := time.After(2 * time.Minute); ; {
			select {
			case last = <-looks:
				if see(last) {
					return last
				}
			case <-end:
				t.Fatalf("%s: not seen. The last look was %+v", what, last)
			}
		}
	}
}

// A job of 4 ranks loses one, goes on with 3, and takes in another as a new group: the page follows. It shows findings, tokens by expert, GPUs
// and faults, in a window as wide as a telephone, dark and light, and loads nothing but its states.
func TestThePageFollowsAJob(t *testing.T) {
	for name, dark := range map[string]bool{"dark": true, "light": false} {
		t.Run(name, func(t *testing.T) {
			job := &story{job: "aaaa", members: []int{0, 1, 2, 3}, began: time.Now()}
			address, until := browse(t, observe.Page(job.state), dark)
			s := until("a layer with its load", func(s *seen) bool {
				return strings.Contains(s.Text, "rank 2 gets 2.00 times the tokens of the mean rank; expert 5 on rank 2 40%;") && s.Imbalance > 2
			})
			require.Contains(t, s.Text, "4 of 4 ranks of job aaaa answer")
			require.Contains(t, s.Text, "rank 3 has not entered combine 9 of group world; 1 rank waits, the longest 2s")
			require.Contains(t, s.Text, "rank 2 gets 2.0 times the tokens of the mean rank", "a finding")
			require.Len(t, s.Column, 8)
			require.Equal(t, 255, s.Column[5])
			require.InDelta(t, 255/4, s.Column[0], 8)
			for _, want := range []string{"18 of 18 up, 478 GB/s", "17 of 18 up", "18 NVLinks", "no access", "host bridge", "1 of 18 NVLinks are down", "GPU 1"} {
				require.Contains(t, s.Text, want)
			}
			require.Equal(t, 1, strings.Count(s.Text, "layer 7: the busiest rank got 2.00 times the tokens of the mean rank, and 1.10 times with expert 5 from rank 2 to 3, expert 7 from rank 3 to 2"))
			require.Contains(t, s.Text, "group next of 2 ranks has not met at @next after 3.0s: rank 1 is waited for; rank 0 waits here")
			require.Regexp(t, `rank 3\t\d+ MiB/s\t\d+ MiB/s\t\d+ MiB/s\t–`, s.Text, "traffic")
			require.LessOrEqual(t, s.Width, 390, "the page is wider than its window")
			require.Equal(t, dark, brightness(s.Background) < brightness(s.Color))

			job.change(func() {
				job.members, job.epoch = []int{0, 1, 2}, 1
				job.fault = &observe.Failure{Kind: "lost", Culprit: 3, Group: "world", Job: "aaaa", At: time.Now(), Error: "its connection ended", SilentSeconds: 0.25}
			})
			s = until("a fault", func(s *seen) bool { return strings.Contains(s.Text, "No call has worked since") })
			require.Contains(t, s.Text, "3 of 3 ranks of job aaaa answer; epoch 1, ranks 0, 1, 2")
			require.Regexp(t, `rank 3 of group world, lost: its connection ended\. It had been silent for 250\.0 ms\. No call has worked since\. Told by ranks 0, 1, 2`, s.Text)
			require.NotContains(t, s.Text, "\trank 2\trank 3", "a column of the rank that is gone")

			job.change(func() {
				healed := 1.5
				job.fault.HealedSeconds = &healed
				job.job, job.members, job.epoch = "bbbb", []int{0, 1, 2, 3}, 2
				job.other = true // another job of the same user, first in the list
			})
			s = until("a fresh rank", func(s *seen) bool { return strings.Contains(s.Text, "4 of 4 ranks of job bbbb answer; epoch 2") })
			require.Contains(t, s.Text, "Calls worked again after 1.5 s")

			job.change(func() { job.err = errors.New("nobody answers") })
			s = until("that nobody answers", func(s *seen) bool { return strings.Contains(s.Text, "no answer: nobody answers") })
			require.Empty(t, s.Errors)
			for _, name := range s.Loaded {
				require.Equal(t, address+"/page/state", name)
			}
		})
	}
}

func brightness(color string) (sum int) {
	for _, n := range regexp.MustCompile(`\d+`).FindAllString(color, 3) {
		var c int
		_, _ = fmt.Sscan(n, &c)
		sum += c
	}
	return sum
}

// story is a job that changes.
type story struct {
	mu      sync.Mutex
	job     string
	members []int
	epoch   int
	fault   *observe.Failure
	other   bool
	err     error
	began   time.Time
}

func (j *story) change(by func()) {
	j.mu.Lock()
	defer j.mu.Unlock()
	by()
}

// state has counts that grow by the time.
func (j *story) state(*http.Request) (observe.State, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err != nil {
		return observe.State{}, j.err
	}
	n := uint64(time.Since(j.began) / time.Millisecond)
	var ranks []observe.Rank
	for _, r := range j.members {
		rank := observe.Rank{
			Rank: r, Size: 4, Group: "world", Job: j.job, Pid: 1000 + r, Began: j.began, Epoch: j.epoch, Members: j.members, Peers: make([]observe.Peer, 4),
			Operations: []observe.Operation{{Operation: "combine", Algorithm: "flat", Calls: n, Timed: n, Seconds: 0.1, Buckets: make([]uint64, 26)}},
			Heaps:      []observe.Heap{{Device: "host", ReservedBytes: 64 << 20, UsedBytes: 16 << 20}},
			Layers: []observe.Layer{{
				Layer: "7", Tokens: []uint64{n, n, n, n, n, 4 * n, n, 0}, Owners: [][]int{{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}},
				Routed: []float64{2 * float64(n), 2 * float64(n), 5 * float64(n), float64(n)},
			}},
			Changes: []observe.Change{{At: j.began.Add(time.Duration(r) * time.Millisecond), Group: "world", Layer: "7", Before: 2, After: 1.1, Moves: []observe.Move{{Expert: 5, From: 2, To: 3}, {Expert: 7, From: 3, To: 2}}}},
			Choices: []float64{2 * float64(n), 2 * float64(n), 5 * float64(n), float64(n)},
		}
		for p := range rank.Peers {
			rank.Peers[p].SentBytes = n << 19 // 500 MiB/s: a wide table
		}
		if r == 0 {
			rank.Waiting = []observe.Waiting{{Group: "world", Operation: "combine", Call: 9, For: 3, Absent: []int{3}, Seconds: 2}}
		}
		if j.fault != nil {
			rank.Past, rank.LastFault = []observe.Failure{*j.fault}, j.fault
		}
		ranks = append(ranks, rank)
	}
	if j.other {
		ranks = append(ranks, observe.Rank{Group: "a", Job: "0000", Size: 1, Pid: 99, Members: []int{0}, Peers: make([]observe.Peer, 1), Operations: []observe.Operation{}})
	}
	s := observe.Merge(observe.State{At: time.Now(), Ranks: ranks, Joins: []observe.Join{{Group: "next", At: "@next", Size: 2, Seconds: 3, Missing: []int{1}}}})
	s.GPUs = []observe.GPU{
		{Index: 0, Name: "NVIDIA H200", BusyPercent: 40, MemoryUsedBytes: 5 << 30, MemoryTotalBytes: 140 << 30, TemperatureCelsius: 35, PowerWatts: 200, Links: 18, LinkGigabytesPerSecond: 478,
			Peers: []observe.GPUPeer{{Index: 1, Links: 18}, {Index: 2, Refused: "the topology does not support it"}}},
		{Index: 1, Name: "NVIDIA H200", BusyPercent: -1, MemoryUsedBytes: -1, MemoryTotalBytes: -1, TemperatureCelsius: -1, PowerWatts: -1, Links: 17, LinksDown: 1, LinkGigabytesPerSecond: -1,
			Problems: []string{"1 of 18 NVLinks are down"}, Peers: []observe.GPUPeer{{Index: 0, Links: 18}, {Index: 2, Path: "host bridge"}}},
		{Index: 2, Name: "NVIDIA H200", MemoryTotalBytes: 140 << 30, Peers: []observe.GPUPeer{{Index: 0, Refused: "the topology does not support it"}, {Index: 1, Path: "host bridge"}}},
	}
	return s, nil
}
