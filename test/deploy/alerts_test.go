package deploy

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
)

// alerts puts the rules in a folder, changed by pairs of an old text and a new one, and returns that.
func alerts(t *testing.T, program string, changes ...string) string {
	t.Helper()
	proctest.Need(t, program)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "alerts.yml"), []byte(strings.NewReplacer(changes...).Replace(read(t, "alerts.yml"))), 0o666))
	return dir
}

func TestAlertsFireForTheirSeries(t *testing.T) {
	dir := alerts(t, "promtool")
	series, err := os.ReadFile("testdata/alerts_test.yml")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "alerts_test.yml"), series, 0o666))
	cmd := exec.Command("promtool", "test", "rules", "alerts_test.yml")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
}

// prometheus starts Prometheus with the rules in a folder, which scrapes the targets once in a time, and returns its address.
func prometheus(t *testing.T, dir, every string, targets ...string) string {
	t.Helper()
	address := loopback.Addr()
	list, err := json.Marshal(targets)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "prometheus.yml"), fmt.Appendf(nil, `
global: {scrape_interval: %[1]s, scrape_timeout: %[1]s, evaluation_interval: 1s}
rule_files: [alerts.yml]
scrape_configs:
  - job_name: train
    static_configs: [{targets: %[2]s}]
`, every, list), 0o666))
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	cmd := exec.CommandContext(ctx, "prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address="+address)
	cmd.Dir = dir
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { cancel(); _ = cmd.Wait() })
	return address
}

// Prometheus scrapes 4 ranks of which rank 2 comes late to every call, and the alert names it.
func TestPrometheusFindsTheStraggler(t *testing.T) {
	if testing.Short() {
		t.Skip("runs Prometheus for some seconds")
	}
	dir := alerts(t, "prometheus", "for: 1m", "for: 0s")
	metrics := httptest.NewServer(observe.Handler())
	defer metrics.Close()
	address := prometheus(t, dir, "1s", strings.TrimPrefix(metrics.URL, "http://"))

	var found []string
	worldtest.Local(t, 4, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		sp := &alltoallv.Splits{Send: []int64{1, 1, 1, 1}, Recv: []int64{1, 1, 1, 1}}
		from, to := make([]byte, 4), make([]byte, 4)
		for begun := time.Now(); to[2] == 0; {
			if r.Rank() == 2 {
				time.Sleep(50 * time.Millisecond)
				if found = firing(address); slices.Equal(found, []string{"2"}) || time.Since(begun) > 3*time.Minute {
					copy(from, []byte{1, 1, 1, 1}) // it is over
				}
			}
			r.Must(x.Exchange(nil, memory.Host(to), memory.Host(from), sp))
		}
		r.Must(x.Close(r.Ctx))
	})
	require.Equal(t, []string{"2"}, found)
}

// firing are the ranks of the alerts for stragglers that fire now.
func firing(address string) []string { return alarms(address)["SwitchyardStraggler"] }

// alarms are the ranks that alerts name which fire now, by alert.
func alarms(address string) map[string][]string {
	resp, err := http.Get("http://" + address + "/api/v1/alerts")
	if err != nil {
		return nil // it begins
	}
	defer func() { _ = resp.Body.Close() }()
	var answer struct {
		Data struct {
			Alerts []struct {
				State  string
				Labels map[string]string
			}
		}
	}
	if json.NewDecoder(resp.Body).Decode(&answer) != nil {
		return nil
	}
	all := map[string][]string{}
	for _, a := range answer.Data.Alerts {
		rank := cmp.Or(a.Labels["peer"], a.Labels["culprit"], a.Labels["rank"])
		if name := a.Labels["alertname"]; a.State == "firing" && !slices.Contains(all[name], rank) {
			all[name] = append(all[name], rank)
		}
	}
	return all
}

// A rank that is killed or stopped is named, with a scrape every 5 seconds, in a job that ends with it and in one that goes on.
func TestPrometheusFindsTheRankThatIsLost(t *testing.T) {
	if testing.Short() {
		t.Skip("runs Prometheus for a minute")
	}
	for _, c := range []struct {
		name   string
		signal syscall.Signal
		ends   bool
		alarms []string
	}{
		{"killed, and the others go on", syscall.SIGKILL, false, []string{"SwitchyardFault", "SwitchyardGone"}},
		{"killed, and the job ends", syscall.SIGKILL, true, []string{"SwitchyardFault"}},
		{"stopped, and the others go on", syscall.SIGSTOP, false, []string{"SwitchyardFault", "SwitchyardSilent"}},
		{"stopped, and the job ends", syscall.SIGSTOP, true, []string{"SwitchyardFault", "SwitchyardSilent"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // it mostly waits
			dir := alerts(t, "prometheus")
			host := loopback.Host()
			env := []string{"SWITCHYARD_METRICS=" + host + ":9400"}
			if c.ends {
				env = append(env, endsVar+"=1")
			}
			ps := proctest.Ranks(t, 4, net.JoinHostPort(host, "29431"), proctest.Spec{Part: "job", Env: env})
			var targets []string
			for r, p := range ps {
				targets = append(targets, net.JoinHostPort(host, strconv.Itoa(9400+r)))
				p.Saw("works")
			}
			address := prometheus(t, dir, "5s", targets...)
			require.Eventually(t, func() bool { return len(values(t, address, `switchyard_group_size`)) == 4 }, time.Minute, 200*time.Millisecond)
			require.Empty(t, alarms(address)["SwitchyardFault"])
			require.Empty(t, alarms(address)["SwitchyardSilent"])
			ps[3].Signal(c.signal)
			seen := map[string][]string{}
			require.EventuallyWithT(t, func(k *assert.CollectT) {
				for name, ranks := range alarms(address) {
					seen[name] = ranks
				}
				for _, name := range c.alarms {
					assert.Equal(k, []string{"3"}, seen[name], "%s of %v", name, seen)
				}
			}, 2*time.Minute, 500*time.Millisecond)
		})
	}
}
