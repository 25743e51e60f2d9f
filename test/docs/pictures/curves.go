package main

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
)

// curve is the times of a call in the model of test/sim, by the number of ranks, and those that others have published of it.
type curve struct {
	name, colour string
	us           []float64
	published    []reported
	shift        int // of the name
}

type reported struct {
	ranks int
	us    float64
}

// world is the curves of test/sim: of many tokens, and of few.
type world struct {
	ranks     []int
	predicted int // from which of these on nothing is published
	many, few []curve
}

// The rows that test/sim prints.
var (
	publishedRow = regexp.MustCompile(`(?m)^  (dispatch|combine) +EP (\d+) +(\d+) tokens  published +(\d+) us`)
	modelRow     = regexp.MustCompile(`(?m)^  (\d+) +[\d.]+ +[\d.]+ +(\d+) +(\d+) +(\d+) +(\d+)(?: +(prediction))?`)
)

// The numbers of tokens in the rows of the model.
const manyTokens, fewTokens = 4096, 128

// curves reads what test/sim has printed on a page. Of published times it takes those of the model's numbers of tokens.
func curves(page string) (*world, error) {
	w := &world{
		many: []curve{{name: "combine bf16", colour: theirs, shift: 5}, {name: "dispatch float8", colour: ours, shift: 5}},
		few:  []curve{{name: "dispatch float8", colour: ours, shift: -3}, {name: "a row a choice", colour: theirs, shift: 15}},
	}
	number := func(digits string) int {
		n, _ := strconv.Atoi(digits) // of digits alone
		return n
	}
	for _, row := range modelRow.FindAllStringSubmatch(page, -1) {
		if row[6] == "" {
			w.predicted++
		}
		w.ranks = append(w.ranks, number(row[1]))
		for column, c := range []*curve{&w.many[1], &w.many[0], &w.few[0], &w.few[1]} {
			c.us = append(c.us, float64(number(row[2+column])))
		}
	}
	for _, row := range publishedRow.FindAllStringSubmatch(page, -1) {
		at := reported{number(row[2]), float64(number(row[4]))}
		switch tokens := number(row[3]); {
		case tokens == manyTokens && row[1] == "combine":
			w.many[0].published = append(w.many[0].published, at)
		case tokens == manyTokens:
			w.many[1].published = append(w.many[1].published, at)
		case tokens == fewTokens: // of systems that send a row for each choice
			w.few[1].published = append(w.few[1].published, at)
		}
	}
	if len(w.ranks) < 2 || w.predicted == 0 || len(w.many[0].published) == 0 || len(w.many[1].published) == 0 || len(w.few[1].published) == 0 {
		return nil, errors.New("the rows of test/sim are not there")
	}
	return w, nil
}

// draw shows time over ranks, both in logarithms.
func (w *world) draw() string {
	s := newSVG(900, 390, "The model of larger worlds: time of a call by the number of ranks")
	s.label(60, 30, "start", ink, bold, "Microseconds a call, by ranks on hosts of 8 (less is better)")
	w.panel(s, 60, fmt.Sprintf("%d tokens a rank", manyTokens), []float64{500, 1000, 2000, 5000, 10000}, w.many)
	w.panel(s, 500, fmt.Sprintf("%d tokens a rank", fewTokens), []float64{50, 100, 200}, w.few)
	s.label(60, 352, "start", faint, small, fmt.Sprintf("lines: the model for Switchyard; dashed above %d ranks, where nothing is published: predictions", w.ranks[w.predicted-1]))
	s.label(60, 370, "start", faint, small, "circles: published times of other systems with as many tokens, in the colour of the call")
	return s.end()
}

// panel is the curves of one number of tokens, with lines at some times.
func (w *world) panel(s *svg, left int, title string, lines []float64, all []curve) {
	const top, bottom, width = 75, 300, 270
	low, high := math.Log(lines[0]), math.Log(1.3*lines[len(lines)-1])
	first, last := math.Log(float64(w.ranks[0])), math.Log(float64(w.ranks[len(w.ranks)-1]))
	x := func(ranks int) int {
		return left + 12 + int(math.Round((width-24)*(math.Log(float64(ranks))-first)/(last-first)))
	}
	y := func(us float64) int { return bottom - int(math.Round((bottom-top)*(math.Log(us)-low)/(high-low))) }
	s.label(left, 58, "start", ink, small, title)
	for _, us := range lines {
		fmt.Fprintf(s, `<path d="M%d %d H%d" stroke="%s"/>`+"\n", left, y(us), left+width, rule)
		s.label(left-6, y(us)+4, "end", faint, ` font-size="11"`, strconv.FormatFloat(us, 'f', -1, 64))
	}
	for _, ranks := range w.ranks {
		fmt.Fprintf(s, `<path d="M%d %d V%d" stroke="%s"/>`+"\n", x(ranks), bottom, bottom+5, faint)
		s.label(x(ranks), bottom+20, "middle", faint, ` font-size="11"`, strconv.Itoa(ranks))
	}
	s.label(left+width+10, bottom+20, "start", faint, small, "ranks")
	for _, c := range all {
		var path strings.Builder
		for i, ranks := range w.ranks {
			if i == w.predicted {
				s.line(&path, c.colour, "")
				fmt.Fprintf(&path, "M%d %d ", x(w.ranks[i-1]), y(c.us[i-1]))
			}
			fmt.Fprintf(&path, "%c%d %d ", "ML"[min(i, 1)], x(ranks), y(c.us[i]))
		}
		s.line(&path, c.colour, ` stroke-dasharray="6 4"`)
		for _, p := range c.published {
			fmt.Fprintf(s, `<circle cx="%d" cy="%d" r="4" fill="#ffffff" stroke="%s" stroke-width="2"/>`+"\n", x(p.ranks), y(p.us), c.colour)
		}
		s.label(left+width+10, y(c.us[len(c.us)-1])+c.shift, "start", c.colour, small+` font-weight="600"`, c.name)
	}
}

// line draws a path, and begins a new one.
func (s *svg) line(path *strings.Builder, colour, dashes string) {
	fmt.Fprintf(s, `<path d="%s" fill="none" stroke="%s" stroke-width="2.5"%s/>`+"\n", strings.TrimSpace(path.String()), colour, dashes)
	path.Reset()
}
