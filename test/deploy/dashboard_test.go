package deploy

import (
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	grafana "github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
	"github.com/grafana/grafana-foundation-sdk/go/units"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// imported is the form of a dashboard that every Grafana imports.
//
//lint:ignore SA1019 the next form is for Grafana 12 and newer
type imported = dashboard.Dashboard

// panels are those of the dashboard that show something. Grafana's published schema knows every field of the file, and every value is one
// that it allows.
func panels(t *testing.T) (all []dashboard.Panel) {
	t.Helper()
	runtime := cog.NewRuntime()
	runtime.RegisterDataqueryVariant(grafana.VariantConfig())
	runtime.RegisterPanelcfgVariant(timeseries.VariantConfig())
	runtime.RegisterPanelcfgVariant(stat.VariantConfig())
	text := read(t, "dashboard.json")
	strict := func(text string) string {
		if err := new(imported).UnmarshalJSONStrict([]byte(text)); err != nil {
			return err.Error() // of a list of errors, which may be empty
		}
		return ""
	}
	require.Empty(t, strict(text))
	for field, wrong := range map[string]string{`"showLegend"`: `"showsLegend"`, `"legendFormat"`: `"legend"`, `"gridPos"`: `"grid"`, `"query"`: `"ask"`} {
		require.NotEmpty(t, strict(strings.Replace(text, field, wrong, 1)), "the schema does not know %s", wrong)
	}
	var d imported
	require.NoError(t, json.Unmarshal([]byte(text), &d))
	require.NoError(t, d.Validate())
	ids := map[uint32]bool{}
	for _, p := range d.Panels {
		if p.RowPanel != nil {
			require.False(t, ids[p.RowPanel.Id], p.RowPanel.Id)
			ids[p.RowPanel.Id] = true
			continue
		}
		require.Contains(t, []string{"timeseries", "stat"}, p.Panel.Type, "the schema of its options is registered above")
		require.False(t, ids[*p.Panel.Id], *p.Panel.Title)
		ids[*p.Panel.Id] = true
		all = append(all, *p.Panel)
	}
	return all
}

// queries are those of a panel, for one job.
func queries(t *testing.T, p *dashboard.Panel, job string) (all []grafana.Dataquery) {
	t.Helper()
	require.NotEmpty(t, p.Targets, *p.Title)
	for _, target := range p.Targets {
		q, ok := target.(*grafana.Dataquery)
		if !ok {
			value, is := target.(grafana.Dataquery)
			require.True(t, is, "%T", target)
			q = &value
		}
		one := *q
		one.Expr = strings.NewReplacer("$job", job, "$__rate_interval", "10s").Replace(q.Expr)
		require.NotContains(t, one.Expr, "$", *p.Title)
		all = append(all, one)
	}
	return all
}

// unitOf is the unit of what a query gives, by the names of its metrics.
func unitOf(expr string) string {
	rate := strings.Contains(expr, "rate(")
	switch {
	case strings.Contains(expr, " / on (layer)"): // to the mean
		return units.NoUnit
	case strings.Contains(expr, ") / "), rate && regexp.MustCompile(`_seconds_total\b`).MatchString(expr):
		return units.PercentUnit
	case rate && regexp.MustCompile(`_bytes_total\b`).MatchString(expr):
		return units.BytesPerSecondIEC
	case regexp.MustCompile(`_seconds(_bucket)?\b`).MatchString(expr):
		return units.Seconds
	case rate:
		return units.CountsPerSecond
	case regexp.MustCompile(`_bytes\b`).MatchString(expr):
		return units.BytesIEC
	}
	return units.NoUnit
}

func TestUnitsOfTheDashboard(t *testing.T) {
	for _, p := range panels(t) {
		for _, q := range queries(t, &p, "train") {
			require.Equal(t, unitOf(q.Expr), *p.FieldConfig.Defaults.Unit, "%s: %s", *p.Title, q.Expr)
		}
	}
}

// Every query of the dashboard has series with values that can be, from Prometheus, which scrapes 4 processes of which one comes late, and
// another is killed.
func TestEveryPanelOfTheDashboardShowsSomething(t *testing.T) {
	if testing.Short() {
		t.Skip("runs Prometheus for some seconds")
	}
	dir, all := alerts(t, "prometheus"), panels(t)
	host := loopback.Host()
	ps := proctest.Ranks(t, 4, net.JoinHostPort(host, "29431"), proctest.Spec{Part: "job", Env: []string{"SWITCHYARD_METRICS=" + host + ":9400"}})
	var targets []string
	for r, p := range ps {
		targets = append(targets, net.JoinHostPort(host, strconv.Itoa(9400+r)))
		p.Saw("works")
	}
	address := prometheus(t, dir, "1s", targets...)
	missing := func() (titles []string) {
		for _, p := range all {
			for _, q := range queries(t, &p, "train") {
				if len(values(t, address, q.Expr)) == 0 {
					titles = append(titles, *p.Title+": "+q.Expr)
				}
			}
		}
		return titles
	}
	require.Eventually(t, func() bool { return len(values(t, address, `switchyard_group_size`)) == 4 }, time.Minute, 200*time.Millisecond)
	ps[3].Signal(syscall.SIGKILL)
	ps[0].Saw("went on")
	require.EventuallyWithT(t, func(c *assert.CollectT) { assert.Empty(c, missing()) }, 2*time.Minute, time.Second)

	// And what it shows is right, once no rate looks back at the death of the rank, and scrapes come in time.
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		shown := map[string][]sample{} // by the panel's first query
		for _, p := range all {
			for i, q := range queries(t, &p, "train") {
				found := values(t, address, q.Expr)
				if i == 0 {
					shown[*p.Title] = found
				}
				for _, s := range found {
					assert.False(c, math.IsInf(s.value, 0) || s.value < 0, "%s: %v", q.Expr, s)
					if *p.FieldConfig.Defaults.Unit == units.PercentUnit {
						assert.LessOrEqual(c, s.value, 1.05, "%s: %v", q.Expr, s) // rates are extrapolated
					}
					for _, m := range regexp.MustCompile(`{{(\w+)}}`).FindAllStringSubmatch(*q.LegendFormat, -1) {
						assert.Contains(c, s.labels, m[1], "%s: the legend names a label that the series lacks", *p.Title)
					}
				}
			}
		}
		none := map[string]string{}
		assert.Equal(c, []sample{{none, 3}}, shown["Ranks"])
		assert.Equal(c, []sample{{none, 1}}, shown["Epoch"])
		assert.Equal(c, []sample{{none, 1}}, shown["Faults"])
		assert.Equal(c, []sample{{map[string]string{"kind": "lost", "culprit": "3"}, 1}}, shown["Faults by kind and culprit"])
		slowest := sample{}
		for _, s := range shown["Time that the others wait for a rank"] {
			if s.value > slowest.value {
				slowest = s
			}
		}
		assert.Equal(c, strconv.Itoa(straggler), slowest.labels["peer"], "%v", shown["Time that the others wait for a rank"])
	}, 2*time.Minute, time.Second)
}

// sample is a series at a time.
type sample struct {
	labels map[string]string
	value  float64
}

// values are what a query gives now, without those that are no numbers.
func values(t *testing.T, address, expr string) (all []sample) {
	resp, err := http.Get("http://" + address + "/api/v1/query?" + url.Values{"query": {expr}}.Encode())
	if err != nil {
		return nil // it begins
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode == http.StatusServiceUnavailable {
		return nil // it begins, too
	}
	var answer struct {
		Error string
		Data  struct {
			Result []struct {
				Metric map[string]string
				Value  [2]any
			}
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil || answer.Error != "" {
		t.Errorf("%s: %v %s", expr, err, answer.Error)
	}
	for _, r := range answer.Data.Result {
		v, err := strconv.ParseFloat(fmt.Sprint(r.Value[1]), 64)
		if err == nil && !math.IsNaN(v) {
			all = append(all, sample{r.Metric, v})
		}
	}
	return all
}
