package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"maps"
	"math"
	"slices"
	"strings"
)

//go:embed all.html
var allPage string

// figures of rows, which are no part of what tells curves apart.
var figures = map[string]bool{
	"us": true, "us_mean": true, "us_p10": true, "us_p90": true, "gbps_link": true, "peer_us": true, "ratio": true, "ratio_low": true,
	"ratio_high": true, "checked": true, "algorithm": true, "way": true, "us_blocks": true, "peer_us_blocks": true, "sent_bytes": true,
	"calls_per_block": true, "load": true, "copy_us": true, "crossing": true, "moe": true, "peer": true,
}

// sizeFields are the names under which rows have their bytes.
var sizeFields = []string{"bytes_per_rank", "bytes", "bytes_per_pair"}

// curve is a chart: the times of rows that differ in their bytes only.
type curve struct {
	Title  string
	Peer   string
	Points []point
}

type point struct {
	Bytes      int64
	Size       string
	US, PeerUS float64 // PeerUS is 0 without a peer
	Times      float64
	Way        string
}

// page is the report for people: a curve for each kind of call, with who was faster by how much and which algorithm a size took.
func (d *document) page() ([]byte, error) {
	t, err := template.New("all").Funcs(template.FuncMap{"us": usText, "curves": curves}).Parse(allPage)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, d); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func usText(us float64) string {
	switch {
	case us >= 1000:
		return fmt.Sprintf("%.2f ms", us/1000)
	case us >= 100:
		return fmt.Sprintf("%.0f us", us)
	default:
		return fmt.Sprintf("%.1f us", us)
	}
}

// curves sorts a section's rows into charts.
func curves(s section) []*curve {
	varied := map[string]map[string]bool{} // the values of each field
	for _, r := range s.Rows {
		for name, v := range flat(r) {
			if varied[name] == nil {
				varied[name] = map[string]bool{}
			}
			varied[name][v] = true
		}
	}
	var all []*curve
	found := map[string]*curve{}
	for _, r := range s.Rows {
		us, ok := r["us"].(float64)
		if !ok || us <= 0 {
			continue
		}
		var names []string
		fields := flat(r)
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			if len(varied[name]) > 1 {
				names = append(names, strings.ReplaceAll(name, "_", " ")+" "+fields[name])
			}
		}
		title := strings.Join(names, ", ")
		c := found[title]
		if c == nil {
			c = &curve{Title: title}
			found[title], all = c, append(all, c)
		}
		p := point{US: us, Size: "one size"}
		for _, name := range sizeFields {
			if n, ok := r[name].(float64); ok {
				p.Bytes, p.Size = int64(n), human(int64(n))
			}
		}
		if theirs, ok := r["peer_us"].(float64); ok && theirs > 0 {
			p.PeerUS, p.Times = theirs, theirs/us
			c.Peer, _ = r["peer"].(string)
		}
		for _, name := range []string{"algorithm", "way"} {
			if w, ok := r[name].(string); ok && w != "" {
				p.Way, _, _ = strings.Cut(w, " (")
			}
		}
		c.Points = append(c.Points, p)
	}
	for _, c := range all {
		slices.SortStableFunc(c.Points, func(a, b point) int { return int(a.Bytes - b.Bytes) })
		c.Peer = peerName(c.Peer)
	}
	return all
}

// flat is what tells rows apart, as text.
func flat(r map[string]any) map[string]string {
	out := map[string]string{}
	for name, v := range r {
		if figures[name] || slices.Contains(sizeFields, name) {
			continue
		}
		if text := fmt.Sprint(v); text != "" {
			out[name] = text
		}
	}
	if moe, ok := r["moe"].(map[string]any); ok {
		for _, name := range []string{"types", "layout", "tokens", "hidden", "routing", "call", "mode"} {
			if v, ok := moe[name]; ok {
				out[name] = fmt.Sprint(v)
			}
		}
	}
	return out
}

// peerName is short: the peer of a row may be its command.
func peerName(peer string) string {
	for _, name := range []string{"gloo", "mpi"} {
		if strings.Contains(peer, name) {
			return map[string]string{"gloo": "gloo", "mpi": "Open MPI"}[name]
		}
	}
	return peer
}

// The chart's measures.
const (
	chartWidth, chartHeight = 640.0, 260.0
	chartLeft, chartBottom  = 56.0, 36.0
)

// Chart reports whether there are sizes to draw a curve of.
func (c *curve) Chart() bool {
	return len(c.Points) > 1 && c.Points[0].Bytes != c.Points[len(c.Points)-1].Bytes
}

// x and y are where a size and a time are, both on logarithmic scales.
func (c *curve) x(n int64) float64 {
	low, high := math.Log2(float64(max(c.Points[0].Bytes, 1))), math.Log2(float64(max(c.Points[len(c.Points)-1].Bytes, 2)))
	return chartLeft + (chartWidth-chartLeft-16)*(math.Log2(float64(max(n, 1)))-low)/(high-low)
}

func (c *curve) bounds() (low, high float64) {
	low, high = math.Inf(1), 0
	for _, p := range c.Points {
		for _, us := range []float64{p.US, p.PeerUS} {
			if us > 0 {
				low, high = min(low, us), max(high, us)
			}
		}
	}
	return low / 1.3, high * 1.3
}

func (c *curve) y(us float64) float64 {
	low, high := c.bounds()
	return 12 + (chartHeight-chartBottom-12)*(1-math.Log(us/low)/math.Log(high/low))
}

func (c *curve) line(of func(p point) float64) string {
	var at []string
	for _, p := range c.Points {
		if us := of(p); us > 0 {
			at = append(at, fmt.Sprintf("%.1f,%.1f", c.x(p.Bytes), c.y(us)))
		}
	}
	return strings.Join(at, " ")
}

// Ours and Theirs are the lines of the chart.
func (c *curve) Ours() string { return c.line(func(p point) float64 { return p.US }) }

// Theirs is the peer's line.
func (c *curve) Theirs() string { return c.line(func(p point) float64 { return p.PeerUS }) }

// mark is a tick, or the region of an algorithm under the sizes.
type mark struct {
	X, Y, Width float64
	Text        string
}

// Sizes are the ticks of the axis.
func (c *curve) Sizes() (marks []mark) {
	last := -100.0
	for _, p := range c.Points {
		if x := c.x(p.Bytes); x-last > 48 {
			marks, last = append(marks, mark{X: x, Y: chartHeight - 8, Text: p.Size}), x
		}
	}
	return marks
}

// Levels are the lines of times, one for each power of ten or, in a narrow chart, of two.
func (c *curve) Levels() (marks []mark) {
	low, high := c.bounds()
	step := 10.0
	if high/low < 20 {
		step = 2
	}
	for us := math.Pow(step, math.Ceil(math.Log(low)/math.Log(step))); us <= high; us *= step {
		marks = append(marks, mark{Y: c.y(us), Text: usText(us)})
	}
	return marks
}

// Regions are the sizes that took one algorithm each, nothing where none is told.
func (c *curve) Regions() (marks []mark) {
	for i := 0; i < len(c.Points); {
		k := i
		for k+1 < len(c.Points) && c.Points[k+1].Way == c.Points[i].Way {
			k++
		}
		from, to := c.x(c.Points[i].Bytes), c.x(c.Points[k].Bytes)
		if i > 0 {
			from = (c.x(c.Points[i-1].Bytes) + from) / 2
		}
		if k+1 < len(c.Points) {
			to = (to + c.x(c.Points[k+1].Bytes)) / 2
		}
		if c.Points[i].Way != "" {
			marks = append(marks, mark{X: from, Y: chartHeight - chartBottom + 2, Width: max(to-from-2, 2), Text: c.Points[i].Way})
		}
		i = k + 1
	}
	return marks
}
