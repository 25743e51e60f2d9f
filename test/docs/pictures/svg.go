package main

import (
	"fmt"
	"strings"
)

// Colours, on a white ground, so that pictures look alike on light and dark pages.
const (
	ink    = "#1f2933"
	faint  = "#7b8794"
	rule   = "#d9dee4"
	panel  = "#f5f7fa"
	ours   = "#0b6bcb"
	theirs = "#d9822b"
	blue   = "#dbeafe"
	orange = "#fde7cf"
	green  = "#d9f2e3"
)

// svg is a picture under way.
type svg struct{ strings.Builder }

func newSVG(width, height int, title string) *svg {
	s := new(svg)
	fmt.Fprintf(s, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" font-family="system-ui, sans-serif" font-size="14">`+"\n",
		width, height, width, height)
	fmt.Fprintf(s, "<title>%s</title>\n", title)
	s.WriteString("<defs>\n")
	for _, colour := range []string{ink, ours, theirs} { // a marker takes no colour from its line everywhere
		fmt.Fprintf(s, `<marker id="tip%s" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">`+
			`<path d="M0 0 L8 4 L0 8 z" fill="%s"/></marker>`+"\n", colour[1:], colour)
	}
	s.WriteString("</defs>\n")
	s.box(0, 0, width, height, "#ffffff", rule)
	return s
}

func (s *svg) box(x, y, w, h int, fill, stroke string) {
	fmt.Fprintf(s, `<rect x="%d" y="%d" width="%d" height="%d" rx="6" fill="%s" stroke="%s"/>`+"\n", x, y, w, h, fill, stroke)
}

// label writes text; anchor is start, middle or end.
func (s *svg) label(x, y int, anchor, colour, style, text string) {
	fmt.Fprintf(s, `<text x="%d" y="%d" text-anchor="%s" fill="%s"%s>%s</text>`+"\n", x, y, anchor, colour, style, text)
}

// arrow goes along a path of SVG's own language.
func (s *svg) arrow(path, colour string) {
	fmt.Fprintf(s, `<path d="%s" fill="none" stroke="%s" stroke-width="2" marker-end="url(#tip%s)"/>`+"\n", path, colour, colour[1:])
}

func (s *svg) end() string { return s.String() + "</svg>\n" }

const (
	bold  = ` font-weight="600"`
	small = ` font-size="12"`
)
