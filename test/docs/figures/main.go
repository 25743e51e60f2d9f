// Command figures writes the tables of README.md and docs/figures.md, from docs/measured/figures.json:
//
//	go run ./test/docs/figures
//	go run ./test/docs/figures -take bench/bench.json -page 2026-12-01-gpus.md
//
// It runs in the module's root. A table stands behind a line <!-- figures: NAME -->. A test fails when a page has another table. With -take
// the times of tables that name a run of `make bench` first become those of its bench.json; -page is the page under docs/measured that tells
// about that run.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// pages are those with tables.
var pages = []string{"README.md", filepath.Join("docs", "figures.md")}

// source is where figures are from.
type source struct {
	Page    string `json:"page"` // under docs/measured
	Date    string `json:"date"`
	Commit  string `json:"commit"`
	Machine string `json:"machine"`
	// Of says which of the figures these are, if not all.
	Of string `json:"of,omitempty"`
}

// figure is a table. Numbers are kept as they are written.
type figure struct {
	Name    string   `json:"name"`
	Sources []source `json:"sources"`
	// Run is the title of the run of `make bench` that measures it, empty for a table that none does. Where are fields of its rows.
	Run   string         `json:"run,omitempty"`
	Where map[string]any `json:"where,omitempty"`
	// Label is the title of the first column, Peers are those of the others' times, Times is that of the last column.
	Label string   `json:"label"`
	Peers []string `json:"peers"`
	Times string   `json:"times"`
	// Decimals are those of the last column.
	Decimals int   `json:"decimals"`
	Rows     []row `json:"rows"`
}

// row is a row: microseconds of Switchyard and of each peer.
type row struct {
	Label string `json:"label"`
	// Bytes and Where find the row in the JSON of a run.
	Bytes int64                  `json:"bytes,omitempty"`
	Where map[string]any         `json:"where,omitempty"`
	US    json.Number            `json:"us"`
	Peers map[string]json.Number `json:"peers"`
	// Times is how many times as fast Switchyard is, if that was measured in pairs and is not the quotient of the times.
	Times json.Number `json:"times,omitempty"`
}

func main() {
	log.SetFlags(0)
	take := flag.String("take", "", "a bench.json whose times come into the tables")
	page := flag.String("page", "", "the page under docs/measured that tells about it")
	flag.Parse()
	if err := run(*take, *page); err != nil {
		log.Fatal("figures: ", err)
	}
}

func run(take, page string) error {
	path := filepath.Join("docs", "measured", "figures.json")
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	all, err := parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if take != "" {
		bench, err := os.ReadFile(take)
		if err != nil {
			return err
		}
		if err := fill(all, bench, page); err != nil {
			return fmt.Errorf("%s: %w", take, err)
		}
		if text, err = format(all); err != nil {
			return err
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return err
		}
	}
	for _, page := range pages {
		old, err := os.ReadFile(page)
		if err != nil {
			return err
		}
		text, err := written(string(old), all)
		if err != nil {
			return fmt.Errorf("%s: %w", page, err)
		}
		if err := os.WriteFile(page, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// parse reads figures and refuses those that say less than a table needs.
func parse(text []byte) ([]*figure, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	d.UseNumber()
	var all []*figure
	if err := d.Decode(&all); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("more behind the figures")
	}
	for _, f := range all {
		if f.Name == "" || len(f.Sources) == 0 || len(f.Rows) == 0 {
			return nil, fmt.Errorf("figure %q has %d sources and %d rows", f.Name, len(f.Sources), len(f.Rows))
		}
		for _, s := range f.Sources {
			if s.Page == "" || s.Date == "" || s.Commit == "" || s.Machine == "" {
				return nil, fmt.Errorf("figure %q has the source %+v, want page, date, commit and machine", f.Name, s)
			}
		}
		for _, r := range f.Rows {
			for peer := range r.Peers {
				if !slices.Contains(f.Peers, peer) {
					return nil, fmt.Errorf("figure %q, row %q: peer %q has no column", f.Name, r.Label, peer)
				}
			}
		}
	}
	return all, nil
}

// format is the text of figures, a line a row.
func format(all []*figure) ([]byte, error) {
	var b bytes.Buffer
	b.WriteString("[")
	for i, f := range all {
		head := *f
		head.Rows = nil
		text, err := json.MarshalIndent(head, " ", " ")
		if err != nil {
			return nil, err
		}
		b.WriteString([]string{",\n ", "\n "}[first(i)])
		b.Write(bytes.TrimSuffix(text, []byte("null\n }")))
		b.WriteString("[")
		for k, r := range f.Rows {
			line, err := json.Marshal(r)
			if err != nil {
				return nil, err
			}
			b.WriteString([]string{",\n   ", "\n   "}[first(k)])
			b.Write(line)
		}
		b.WriteString("\n  ]\n }")
	}
	b.WriteString("\n]\n")
	return b.Bytes(), nil
}

func first(i int) int {
	if i == 0 {
		return 1
	}
	return 0
}

// mark stands before a table.
var mark = regexp.MustCompile(`(?m)^<!-- figures: (.+) -->\n(?:\|.*\n)*`)

// written is the page with the tables of its marks.
func written(page string, all []*figure) (string, error) {
	var errs []error
	text := mark.ReplaceAllStringFunc(page, func(old string) string {
		name := mark.FindStringSubmatch(old)[1]
		i := slices.IndexFunc(all, func(f *figure) bool { return f.Name == name })
		if i < 0 {
			errs = append(errs, fmt.Errorf("no figure is called %q", name))
			return old
		}
		table, err := all[i].table()
		if err != nil {
			errs = append(errs, err)
			return old
		}
		return "<!-- figures: " + name + " -->\n" + table
	})
	return text, errors.Join(errs...)
}

// table is the figure in Markdown.
func (f *figure) table() (string, error) {
	var b strings.Builder
	line := func(cells ...string) {
		for _, cell := range cells {
			b.WriteString("|")
			if cell != "" {
				b.WriteString(" " + cell)
			}
			b.WriteString(" ")
		}
		b.WriteString("|\n")
	}
	line(slices.Concat([]string{f.Label, "Switchyard"}, f.Peers, []string{f.Times})...)
	b.WriteString(strings.Repeat("|---", len(f.Peers)+3) + "|\n")
	for _, r := range f.Rows {
		cells := []string{r.Label, r.US.String() + " us"}
		ours, err := r.US.Float64()
		if err != nil {
			return "", fmt.Errorf("figure %q, row %q: %w", f.Name, r.Label, err)
		}
		best := 0.0
		for _, peer := range f.Peers {
			n, ok := r.Peers[peer]
			if !ok {
				cells = append(cells, "")
				continue
			}
			us, err := n.Float64()
			if err != nil {
				return "", fmt.Errorf("figure %q, row %q: %w", f.Name, r.Label, err)
			}
			if best == 0 || us < best {
				best = us
			}
			cells = append(cells, n.String()+" us")
		}
		times := r.Times.String()
		if times == "" {
			times = fmt.Sprintf("%.*f", f.Decimals, best/ours)
		}
		line(append(cells, times)...)
	}
	return b.String(), nil
}
