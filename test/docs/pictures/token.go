package main

import "fmt"

// token shows the way of one token with two experts, one on its own rank and one on another.
func token() string {
	s := newSVG(900, 330, "A token goes from its rank to its experts and back")
	for r, x := range []int{20, 470} {
		s.box(x, 20, 410, 245, panel, rule)
		s.label(x+16, 44, "start", ink, bold, fmt.Sprintf("rank %d", r))
		s.label(x+394, 44, "end", faint, small, []string{"a process or a goroutine, with its GPU or core", "another"}[r])
	}
	cell := func(x, y, w int, fill, text string) {
		s.box(x, y, w, 34, fill, faint)
		s.label(x+w/2, y+22, "middle", ink, "", text)
	}
	// Rank 0: the token, the router, the rows of expert 1, the result.
	cell(40, 70, 110, blue, "token x")
	cell(40, 134, 110, "#ffffff", "router: 1, 6")
	cell(40, 212, 110, blue, "y")
	cell(270, 100, 140, orange, "rows of expert 1")
	cell(270, 164, 140, green, "expert 1")
	// Rank 1.
	cell(600, 100, 140, orange, "rows of expert 6")
	cell(600, 164, 140, green, "expert 6")
	s.label(760, 122, "start", faint, small, "each expert's rows")
	s.label(760, 138, "start", faint, small, "lie in one piece")

	s.arrow("M95 104 V132", ink)
	s.arrow("M150 146 H210 V117 H268", ours)
	s.arrow("M150 156 H226 V78 H670 V98", ours)
	s.label(440, 72, "middle", ours, bold, "1  dispatch: written straight into the peer's output")
	s.arrow("M340 134 V162", ink)
	s.arrow("M670 134 V162", ink)
	s.arrow("M270 188 H226 V222 H152", theirs)
	s.arrow("M670 198 V236 H152", theirs)
	s.label(450, 256, "middle", theirs, bold, "2  combine: y = sum of weight x row, read back by the token's rank")

	s.box(20, 280, 860, 34, "#ffffff", rule)
	s.label(36, 302, "start", ink, bold, "symmetric heap")
	s.label(170, 302, "start", faint, "", "every rank maps the memory of all: a peer's address is base + rank x stride + offset")
	return s.end()
}
