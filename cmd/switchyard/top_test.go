package main

import (
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
)

func TestThePageHasAPathThatIsNotKnown(t *testing.T) {
	server := httptest.NewServer(pageAt("/ABC/", ""))
	defer server.Close()
	for path, want := range map[string]int{"/": 404, "/state": 404, "/ABC/": 200, "/ABC/other": 404} {
		resp, err := server.Client().Get(server.URL + path)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, want, resp.StatusCode, path)
	}
	resp, err := server.Client().Post(server.URL+"/ABC/state", "text/plain", strings.NewReader("x"))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 405, resp.StatusCode)
}

// A browser shows the ranks of a job, the one that is late, and the traffic between them, and reports no error of the page.
func TestABrowserShowsThePage(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a browser")
	}
	browser := proctest.Need(t, "chromium")
	profile := proctest.Folder(t)
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: 4 * time.Minute}) // a browser may take long to start
		r.Must(err)
		exchange := func() {
			sp := &alltoallv.Splits{Send: []int64{8, 8}, Recv: []int64{8, 8}}
			r.Must(x.Exchange(nil, memory.Host(make([]byte, 16)), memory.Host(make([]byte, 16)), sp))
		}
		exchange()
		if r.Rank() == 1 {
			time.Sleep(20 * time.Millisecond)
			server := httptest.NewServer(pageAt("/ABC/", ""))
			out, err := exec.Command(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
				"--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--user-data-dir="+profile, "--virtual-time-budget=4000", "--dump-dom", server.URL+"/ABC/#"+observe.Snapshot().Ranks[0].Job).CombinedOutput() // other tests have jobs, too
			server.Close()
			r.Must(err)
			text := string(out)
			require.NotContains(r.T, text, "CONSOLE", "an error of the page")
			require.Contains(r.T, text, "2 of 2 ranks")
			require.Contains(r.T, text, "rank 1 has not entered alltoallv 2 of group world")
			require.Regexp(r.T, `<td>0</td><td>\d+</td><td>\d+</td><td>1</td><td>rank 1</td><td>[0-9.]+ m?s</td><td>alltoallv 2</td>`, text)
		}
		exchange()
		r.Must(x.Close(r.Ctx))
	})
}
