package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// bench is what the JSON of `make bench` has, as far as it matters here.
type bench struct {
	Schema  int
	Date    string
	Commit  string
	Machine struct {
		Processor string
		Cores     int
		GPUs      []string
	}
	Runs []struct {
		Title string
		Rows  []map[string]any
	}
}

// sizeFields are the names under which rows have their bytes.
var sizeFields = []string{"bytes_per_rank", "bytes", "bytes_per_pair"}

// fill takes the times of the runs that figures name. A run that is not there leaves its figures as they are; one that lacks a row of a figure
// is an error.
func fill(all []*figure, text []byte, page string) error {
	if page == "" {
		return errors.New("-page is missing")
	}
	var b bench
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&b); err != nil {
		return err
	}
	if b.Schema != 1 {
		return fmt.Errorf("schema %d, want 1", b.Schema)
	}
	if strings.HasSuffix(b.Commit, "-dirty") || b.Commit == "unknown" {
		return fmt.Errorf("it is of commit %q, want one that others have", b.Commit)
	}
	machine := fmt.Sprintf("%d cores of %s", b.Machine.Cores, b.Machine.Processor)
	if n := len(b.Machine.GPUs); n > 0 {
		machine = fmt.Sprintf("%d x %s, %s", n, b.Machine.GPUs[0], machine)
	}
	date, _, _ := strings.Cut(b.Date, "T")
	taken := 0
	for _, f := range all {
		for _, r := range b.Runs {
			if f.Run == "" || r.Title != f.Run {
				continue
			}
			if err := f.take(r.Rows); err != nil {
				return err
			}
			f.Sources = []source{{Page: page, Date: date, Commit: b.Commit, Machine: machine}}
			taken++
		}
	}
	if taken == 0 {
		return errors.New("no run of it is in a table")
	}
	return nil
}

// take replaces the times of all rows.
func (f *figure) take(rows []map[string]any) error {
	for i := range f.Rows {
		r := &f.Rows[i]
		wanted := map[string]any{}
		maps.Copy(wanted, f.Where)
		maps.Copy(wanted, r.Where)
		at := slices.IndexFunc(rows, func(o map[string]any) bool { return has(o, wanted) && sizeOf(o) == r.Bytes })
		if at < 0 {
			return fmt.Errorf("run %q has no row of %d bytes with %v", f.Run, r.Bytes, wanted)
		}
		us, err := number(rows[at], "us")
		if err != nil {
			return fmt.Errorf("run %q, %d bytes: %w", f.Run, r.Bytes, err)
		}
		theirs, err := number(rows[at], "peer_us")
		if err != nil {
			return fmt.Errorf("run %q, %d bytes: %w", f.Run, r.Bytes, err)
		}
		r.US, r.Peers, r.Times = microseconds(us), map[string]json.Number{f.Peers[0]: microseconds(theirs)}, ""
		if ratio, err := number(rows[at], "ratio"); err == nil {
			r.Times = json.Number(fmt.Sprintf("%.*f", f.Decimals, ratio))
		}
	}
	return nil
}

// has says whether a row has the fields.
func has(row, fields map[string]any) bool {
	for name, want := range fields {
		if fmt.Sprint(row[name]) != fmt.Sprint(want) {
			return false
		}
	}
	return true
}

func sizeOf(row map[string]any) int64 {
	for _, name := range sizeFields {
		if n, ok := row[name].(json.Number); ok {
			bytes, _ := n.Int64()
			return bytes
		}
	}
	return 0
}

func number(row map[string]any, name string) (float64, error) {
	n, ok := row[name].(json.Number)
	if !ok {
		return 0, fmt.Errorf("%s is %v, want a number", name, row[name])
	}
	return n.Float64()
}

// microseconds is a time with the digits that matter.
func microseconds(us float64) json.Number {
	if us < 100 {
		return json.Number(fmt.Sprintf("%.1f", us))
	}
	return json.Number(fmt.Sprintf("%.0f", us))
}
