package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func committed(t *testing.T) (text string, all []*figure) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "measured", "figures.json"))
	require.NoError(t, err)
	all, err = parse(b)
	require.NoError(t, err)
	return string(b), all
}

// The tables of README.md and docs/figures.md are what the program writes, and so is the file that they are made of.
func TestTablesAreMadeFromTheirFigures(t *testing.T) {
	text, all := committed(t)
	again, err := format(all)
	require.NoError(t, err)
	require.Equal(t, string(again), text, "docs/measured/figures.json")
	marked := map[string]bool{}
	for _, page := range pages {
		b, err := os.ReadFile(filepath.Join("..", "..", "..", page))
		require.NoError(t, err)
		want, err := written(string(b), all)
		require.NoError(t, err)
		require.Equal(t, want, string(b), "%s: go run ./test/docs/figures", page)
		for _, m := range mark.FindAllStringSubmatch(string(b), -1) {
			marked[m[1]] = true
			before, _, _ := strings.Cut(string(b), m[0])
			for _, f := range all {
				for _, s := range f.Sources {
					if f.Name == m[1] {
						require.Contains(t, before[max(0, len(before)-1500):], "measured/"+s.Page, "%s has no link to where %s is from", page, f.Name)
						_, err := os.Stat(filepath.Join("..", "..", "..", "docs", "measured", s.Page))
						require.NoError(t, err)
					}
				}
			}
		}
		// A time without a mark would be typed in.
		for line := range strings.Lines(mark.ReplaceAllString(want, "")) {
			require.NotRegexp(t, `^\|.* us \|`, line, "%s: a table of times without figures", page)
		}
	}
	for _, f := range all {
		require.True(t, marked[f.Name], "no page shows %s", f.Name)
	}
}

func TestATableHasItsFigures(t *testing.T) {
	f := &figure{Name: "x", Label: "bytes", Peers: []string{"A", "B"}, Times: "times", Decimals: 2, Rows: []row{
		{Label: "1 KiB", US: "2.0", Peers: map[string]json.Number{"A": "5", "B": "3"}},
		{Label: "2 KiB", US: "4", Peers: map[string]json.Number{"B": "10.0"}, Times: "2.6"},
	}}
	const table = `<!-- figures: x -->
| bytes | Switchyard | A | B | times |
|---|---|---|---|---|
| 1 KiB | 2.0 us | 5 us | 3 us | 1.50 |
| 2 KiB | 4 us | | 10.0 us | 2.6 |
`
	text, err := written("Before.\n\n<!-- figures: x -->\n| old |\n\nAfter.\n| more |\n", []*figure{f})
	require.NoError(t, err)
	require.Equal(t, "Before.\n\n"+table+"\nAfter.\n| more |\n", text)
	_, err = written("<!-- figures: y -->\n", []*figure{f})
	require.ErrorContains(t, err, `no figure is called "y"`)
	f.Rows[0].US = "much"
	_, err = written(text, []*figure{f})
	require.ErrorContains(t, err, `figure "x", row "1 KiB"`)
}

func TestFiguresThatLackSomething(t *testing.T) {
	for said, text := range map[string]string{
		`unknown field "color"`:               `[{"name": "x", "color": 3}]`,
		`figure "x" has 0 sources and 1 rows`: `[{"name": "x", "rows": [{}]}]`,
		"want page, date, commit and machine": `[{"name": "x", "sources": [{"page": "p.md", "date": "d", "commit": "c"}], "rows": [{}]}]`,
		`peer "A" has no column`: `[{"name": "x", "sources": [{"page": "p.md", "date": "d", "commit": "c", "machine": "m"}],
			"rows": [{"us": 1, "peers": {"A": 2}}]}]`,
		"more behind the figures": `[] []`,
	} {
		_, err := parse([]byte(text))
		require.ErrorContains(t, err, said)
	}
}

// A bench.json fills the tables that name one of its runs, and leaves the others.
func TestTimesOfABenchmarkComeIntoTheTables(t *testing.T) {
	_, all := committed(t)
	before, err := format(all)
	require.NoError(t, err)
	var rows []map[string]any
	for i, n := range []int{8 << 10, 128 << 10, 1 << 20, 8 << 20, 32 << 20} {
		row := map[string]any{"op": "all_to_all_single", "ranks": 2, "symmetric": false, "bytes": n, "us": 40.04 + 30*float64(i), "peer": "gloo", "peer_us": 350.5, "ratio": 8.04}
		rows = append(rows, row, map[string]any{"ranks": 4, "symmetric": false, "bytes": n, "us": 1, "peer_us": 1})
	}
	d := map[string]any{
		"schema": 1, "date": "2026-12-01T10:00:00Z", "commit": "0123abc",
		"machine": map[string]any{"processor": "a processor", "cores": 2, "gpus": []string{}},
		"runs":    []any{map[string]any{"title": "all_to_all_single on the host next to gloo, from Python", "rows": rows}},
	}
	text := func() []byte {
		b, err := json.Marshal(d)
		require.NoError(t, err)
		return b
	}
	require.NoError(t, fill(all, text(), "2026-12-01-host.md"))
	for _, f := range all {
		if f.Name != "python-host" {
			continue
		}
		require.Equal(t, []source{{Page: "2026-12-01-host.md", Date: "2026-12-01", Commit: "0123abc", Machine: "2 cores of a processor"}}, f.Sources)
		table, err := f.table()
		require.NoError(t, err)
		require.Contains(t, table, "| 8 KiB | 40.0 us | 350 us | 8.0 |\n")
		require.Contains(t, table, "| 32 MiB | 160 us | 350 us | 8.0 |\n")
		f.Sources = nil
	}
	_, old := committed(t)
	for i := range all {
		if all[i].Name != "python-host" {
			require.Equal(t, old[i], all[i])
		}
	}

	refused := func(said string, change func()) {
		t.Helper()
		change()
		_, all := committed(t)
		require.ErrorContains(t, fill(all, text(), "p.md"), said)
	}
	require.ErrorContains(t, fill(old, text(), ""), "-page is missing")
	refused("run \"all_to_all_single on the host next to gloo, from Python\", 8192 bytes: peer_us is <nil>, want a number", func() { delete(rows[0], "peer_us") })
	refused("has no row of 8192 bytes with map[ranks:2 symmetric:false]", func() { rows[0]["ranks"] = 3 })
	refused("no run of it is in a table", func() { d["runs"] = []any{} })
	refused(`it is of commit "0123abc-dirty"`, func() { d["commit"] = "0123abc-dirty" })
	refused("schema 2, want 1", func() { d["schema"] = 2 })
	again, err := format(old)
	require.NoError(t, err)
	require.Equal(t, string(before), string(again))
}
