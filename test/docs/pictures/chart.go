package main

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// point is one row of the table: a size, and what a call of it takes.
type point struct {
	size         string
	ours, theirs float64 // microseconds
}

// tableMark stands before the table that the chart shows.
const tableMark = "<!-- figures: all-to-all -->"

// table reads rows like "| 8 KiB | 3.3 us | 12.1 us | 3.7 |".
func table(page string) ([]point, error) {
	_, rest, ok := strings.Cut(page, tableMark+"\n")
	if !ok {
		return nil, errors.New("there is no " + tableMark)
	}
	var points []point
	for i, line := range strings.Split(strings.TrimLeft(rest, "\n"), "\n") {
		if !strings.HasPrefix(line, "|") {
			break
		}
		if i < 2 { // header
			continue
		}
		cells := strings.Split(strings.Trim(line, "| "), "|")
		if len(cells) < 3 {
			return nil, fmt.Errorf("%q has too few columns", line)
		}
		var p point
		var err [2]error
		p.size = strings.TrimSpace(cells[0])
		p.ours, err[0] = microseconds(cells[1])
		p.theirs, err[1] = microseconds(cells[2])
		if e := errors.Join(err[:]...); e != nil {
			return nil, fmt.Errorf("%q: %w", line, e)
		}
		points = append(points, p)
	}
	if len(points) < 2 {
		return nil, errors.New("the table has no rows")
	}
	return points, nil
}

func microseconds(s string) (float64, error) {
	number, ok := strings.CutSuffix(strings.TrimSpace(s), " us")
	v, err := strconv.ParseFloat(number, 64)
	if !ok || err != nil {
		return 0, fmt.Errorf("%q is not a number of us", s)
	}
	return v, nil
}

// chart shows time over size, both in logarithms.
func chart(points []point) string {
	const left, top, right, bottom = 70, 50, 760, 320
	s := newSVG(900, 370, "All-to-all: time of a call against NCCL")
	least, most := math.Inf(1), 0.0
	for _, p := range points {
		least, most = min(least, p.ours, p.theirs), max(most, p.ours, p.theirs)
	}
	low, high := math.Floor(math.Log10(least)), math.Log10(1.3*most)
	x := func(i int) int { return left + 20 + (right-left-40)*i/(len(points)-1) }
	y := func(us float64) int {
		return bottom - int(math.Round((bottom-top)*(math.Log10(us)-low)/(high-low)))
	}
	s.label(left, 30, "start", ink, bold, "All-to-all: microseconds a call, by bytes a rank (less is better)")
	for e := low; e <= high; e++ {
		us := math.Pow(10, e)
		fmt.Fprintf(s, `<path d="M%d %d H%d" stroke="%s"/>`+"\n", left, y(us), right, rule)
		s.label(left-8, y(us)+5, "end", faint, small, strconv.FormatFloat(us, 'f', -1, 64))
	}
	for i, p := range points {
		fmt.Fprintf(s, `<path d="M%d %d V%d" stroke="%s"/>`+"\n", x(i), bottom, bottom+5, faint)
		s.label(x(i), bottom+20, "middle", faint, ` font-size="11"`, p.size)
	}
	for _, l := range []struct {
		name, colour string
		of           func(point) float64
		shift        int
	}{
		{"NCCL", theirs, func(p point) float64 { return p.theirs }, -4},
		{"Switchyard", ours, func(p point) float64 { return p.ours }, 16},
	} {
		var path strings.Builder
		for i, p := range points {
			fmt.Fprintf(&path, "%c%d %d ", "ML"[min(i, 1)], x(i), y(l.of(p)))
		}
		fmt.Fprintf(s, `<path d="%s" fill="none" stroke="%s" stroke-width="2.5"/>`+"\n", strings.TrimSpace(path.String()), l.colour)
		for i, p := range points {
			fmt.Fprintf(s, `<circle cx="%d" cy="%d" r="4" fill="%s"/>`+"\n", x(i), y(l.of(p)), l.colour)
		}
		end := points[len(points)-1]
		s.label(right+14, y(l.of(end))+l.shift, "start", l.colour, bold, l.name)
	}
	for i, p := range points {
		s.label(x(i), bottom+38, "middle", ink, ` font-size="11"`, strconv.FormatFloat(p.theirs/p.ours, 'f', 1, 64)+" x")
	}
	s.label(right+14, bottom+20, "start", faint, small, "bytes a rank")
	s.label(right+14, bottom+38, "start", ink, small, "times as fast")
	return s.end()
}
