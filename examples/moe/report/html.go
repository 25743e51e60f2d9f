package report

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/phase"
	"github.com/switchyard-moe/switchyard/examples/moe/words"
)

// The page is one file: styles inside, pictures as SVG, no scripts, nothing to fetch.
//
//go:embed report.html
var page string

// WriteHTML writes the report with pictures.
func (r *Report) WriteHTML(path string) error {
	t, err := template.New("report").Parse(page)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, r.pictures()); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

// The template draws these. Coordinates are pixels.
type (
	pictures struct {
		*Report
		Title   string
		Reduced string
		Facts   [][2]string
		Loss    *lossPicture
		Load    *gridPicture
		Traffic *gridPicture
		Step    *stepPicture
		Phases  []phaseRow
	}
	tick struct {
		At   float64
		Text string
	}
	lossPicture struct {
		W, H, Left, Right, Top, Bottom float64
		Steps, Smooth                  string // points of polylines
		X, Y                           []tick
		Lines                          []lossLine
		Events                         []tick
	}
	lossLine struct {
		Y, TextY    float64
		Text, Class string
	}
	gridPicture struct {
		W, H       float64
		Cells      []cell
		Rows, Cols []tick
		Left, Top  float64
		Note       string
	}
	cell struct {
		X, Y, W, H, TextX, TextY float64
		Text, Title, Fill        string
		Heat                     float64 // of a grid: how much of its colour is in it
		Ink                      string  // of a grid: classes for its text
	}
	stepPicture struct {
		W, H  float64
		Rows  []tick
		Spans []cell
		X     []tick
		Left  float64
		End   float64
		Note  string
	}
	phaseRow struct {
		Name, MS, Part, Fill string
		Width                float64
	}
)

// Colours of the phases: computing is blue and green, communication is warm.
var phaseColours = [phase.Count]string{"#4c78a8", "#54a24b", "#f58518", "#e45756", "#b279a2", "#9d9da1"}

func (r *Report) pictures() pictures {
	p := pictures{Report: r, Title: fmt.Sprintf("%s on %s", words.Count(r.Steps, "step"), words.Count(r.Ranks, "rank")),
		Reduced: words.Grouped(r.ReducedBytes)}
	fact := func(name, format string, args ...any) {
		p.Facts = append(p.Facts, [2]string{name, fmt.Sprintf(format, args...)})
	}
	if r.Sample != nil {
		fact("held-out loss", "%.3f", r.HeldoutLoss)
		fact("bigram model", "%.3f", r.BigramLoss)
	}
	fact("training loss", "%.3f", r.TrainLoss)
	fact("tokens/s", "%s", words.Grouped(int64(r.TokensPerSecond)))
	fact("communication", "%.0f%%", 100*r.CommFraction)
	fact("time", "%.1f s", r.ElapsedSeconds)

	p.Loss = r.drawLoss()
	p.Load = r.drawLoad()
	if len(r.TrafficBytes) > 0 {
		p.Traffic = r.drawTraffic()
	}
	if len(r.Timeline) > 0 {
		p.Step = r.drawStep()
	}
	var all, most float64
	for _, ms := range r.PhasesMS {
		all, most = all+ms, max(most, ms)
	}
	for i, name := range phase.Names {
		ms := r.PhasesMS[name]
		p.Phases = append(p.Phases, phaseRow{name, fmt.Sprintf("%.2f ms", ms), fmt.Sprintf("%.1f%%", 100*ms/all), phaseColours[i], 100 * ms / most})
	}
	return p
}

// ticks are round numbers from lo to hi; their number is near the one given.
func ticks(lo, hi float64, about int) []float64 {
	if !(hi > lo) {
		return []float64{lo}
	}
	raw := (hi - lo) / float64(about)
	step := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, m := range []float64{10, 5, 2} {
		if step*m <= raw*1.5 {
			step *= m
			break
		}
	}
	var at []float64
	for i := math.Ceil(lo / step); i*step <= hi*(1+1e-9); i++ {
		at = append(at, i*step)
	}
	return at
}

// drawLoss draws the loss of every step, a running mean of it, and the losses on held-out text as lines across.
func (r *Report) drawLoss() *lossPicture {
	v := slices.DeleteFunc(slices.Clone([]float64(r.Losses)), func(x float64) bool { return math.IsNaN(x) || math.IsInf(x, 0) })
	if len(v) == 0 {
		return nil
	}
	d := &lossPicture{W: 860, H: 320, Left: 44, Right: 720, Top: 12, Bottom: 288}
	lo, hi := slices.Min(v), slices.Max(v)
	for _, l := range []config.Number{r.HeldoutLoss, r.BigramLoss} {
		if x := float64(l); !math.IsNaN(x) && !math.IsInf(x, 0) {
			lo, hi = min(lo, x), max(hi, x)
		}
	}
	pad := max(0.04*(hi-lo), 1e-3)
	lo, hi = max(0, lo-pad), hi+pad
	x := func(step float64) float64 {
		return d.Left + (d.Right-d.Left)*(step-1)/max(1, float64(len(v)-1))
	}
	y := func(loss float64) float64 { return d.Bottom - (d.Bottom-d.Top)*(loss-lo)/(hi-lo) }
	for _, t := range ticks(lo, hi, 6) {
		d.Y = append(d.Y, tick{y(t), trim(t)})
	}
	for _, t := range ticks(1, float64(len(v)), 8) {
		if t >= 1 {
			d.X = append(d.X, tick{x(t), trim(t)})
		}
	}
	// A point for every pixel is enough: of the steps that fall on it, the least and the greatest. The running mean reaches as far
	// to both sides.
	var steps, smooth strings.Builder
	reach := len(v) / 50
	per := max(1, len(v)/int(d.Right-d.Left))
	for i := 0; i < len(v); i += per {
		some := v[i:min(i+per, len(v))]
		at := x(float64(i + 1))
		fmt.Fprintf(&steps, "%.1f,%.1f ", at, y(slices.Min(some)))
		if len(some) > 1 {
			fmt.Fprintf(&steps, "%.1f,%.1f ", at, y(slices.Max(some)))
		}
		r := min(reach, i, len(v)-1-i)
		fmt.Fprintf(&smooth, "%.1f,%.1f ", at, y(Mean(v[i-r:i+r+1])))
	}
	d.Steps, d.Smooth = steps.String(), smooth.String()
	if r.Sample != nil {
		d.Lines = []lossLine{
			{y(float64(r.HeldoutLoss)), 0, fmt.Sprintf("held-out %.3f", r.HeldoutLoss), "heldout"},
			{y(float64(r.BigramLoss)), 0, fmt.Sprintf("bigram %.3f", r.BigramLoss), "bigram"},
		}
		for i := range d.Lines {
			d.Lines[i].TextY = d.Lines[i].Y + 4
		}
		if a, b := &d.Lines[0], &d.Lines[1]; math.Abs(a.TextY-b.TextY) < 14 { // side by side they could not be read
			up, down := a, b
			if a.Y > b.Y {
				up, down = b, a
			}
			up.TextY, down.TextY = up.TextY-7, down.TextY+7
		}
	}
	labelled := math.Inf(-1)
	for _, step := range r.Changes {
		e := tick{At: x(float64(step))}
		if e.At-labelled > 110 { // or else one could not read either
			e.Text, labelled = "the ranks change", e.At
		}
		d.Events = append(d.Events, e)
	}
	return d
}

// trim writes a number without zeros at its end.
func trim(v float64) string { return fmt.Sprintf("%.6g", v) }

// colour is one of the page's, red, green and blue.
type colour [3]float64

func (c colour) String() string { return fmt.Sprintf("#%02x%02x%02x", int(c[0]), int(c[1]), int(c[2])) }

// luminance is that of WCAG 2, from 0 to 1.
func (c colour) luminance() float64 {
	weights, sum := colour{0.2126, 0.7152, 0.0722}, 0.0
	for i, v := range c {
		v /= 255
		if v <= 0.04045 {
			v /= 12.92
		} else {
			v = math.Pow((v+0.055)/1.055, 2.4)
		}
		sum += weights[i] * v
	}
	return sum
}

// theme is what cells of a grid lie on, and what they are of. The page has both as variables.
type theme struct{ card, heat colour }

var light, dark = theme{colour{255, 255, 255}, colour{8, 69, 132}}, theme{colour{27, 34, 44}, colour{138, 184, 245}}

// cell is the colour of a cell with so much heat.
func (t theme) cell(heat float64) (c colour) {
	for i := range c {
		c[i] = t.card[i] + (t.heat[i]-t.card[i])*heat
	}
	return c
}

// black reports whether black can be read better on a cell than white.
func (t theme) black(heat float64) bool {
	const even = 0.179 // where both contrast alike
	return t.cell(heat).luminance() > even
}

// shade is how much of a grid's colour is in a cell for a part from 0 to 1, and what to write on it.
func shade(part float64) (heat float64, ink string) {
	heat = 0.06 + 0.94*min(max(part, 0), 1)
	ink = "white"
	if light.black(heat) {
		ink = "black"
	}
	if dark.black(heat) {
		return heat, ink + " dark-black"
	}
	return heat, ink + " dark-white"
}

// grid lays rows and columns of cells out.
func grid(rows, cols []string, at func(row, col int) (part float64, text, title string)) *gridPicture {
	g := &gridPicture{Top: 24}
	for _, s := range rows {
		g.Left = max(g.Left, 7*float64(len(s))+14)
	}
	const all = 860
	w := min((all-g.Left)/float64(len(cols)), 120)
	h := min(max(w*0.5, 14), 26)
	var longest float64
	for _, name := range cols {
		longest = max(longest, 7*float64(len(name))+6)
	}
	for j, name := range cols {
		if j%int(math.Ceil(longest/w)) == 0 {
			g.Cols = append(g.Cols, tick{g.Left + w*(float64(j)+0.5), name})
		}
	}
	for i, name := range rows {
		y := g.Top + h*float64(i)
		g.Rows = append(g.Rows, tick{y + h/2 + 4, name})
		for j := range cols {
			part, text, title := at(i, j)
			if 6.5*float64(len(text)) > w-4 {
				text = ""
			}
			heat, ink := shade(part)
			x := g.Left + w*float64(j)
			g.Cells = append(g.Cells, cell{X: x, Y: y, W: w - 1, H: h - 1, TextX: x + w/2, TextY: y + h/2 + 4, Text: text, Title: title, Heat: heat, Ink: ink})
		}
	}
	g.W, g.H = g.Left+w*float64(len(cols)), g.Top+h*float64(len(rows))+4
	return g
}

// drawLoad draws the experts as rows and the layers as columns. In the middle of the scale is an equal share.
func (r *Report) drawLoad() *gridPicture {
	var rows, cols []string
	eb, lb := blocks(r.Config.Experts, 64), blocks(r.Config.Layers, 24)
	for _, b := range eb {
		name := b.name("expert")
		if b.hi-b.lo == 1 {
			name += fmt.Sprintf(", rank %d", r.ExpertRanks[b.lo])
		}
		rows = append(rows, name)
	}
	for _, b := range lb {
		cols = append(cols, b.name("layer"))
	}
	return grid(rows, cols, func(i, j int) (float64, string, string) {
		var some, all int64
		for _, layer := range r.ExpertTokens[lb[j].lo:lb[j].hi] {
			for e, n := range layer {
				if all += n; e >= eb[i].lo && e < eb[i].hi {
					some += n
				}
			}
		}
		part := float64(some) / float64(max(all, 1))
		return part * float64(len(eb)) / 2, fmt.Sprintf("%.1f%%", 100*part), fmt.Sprintf("%s, %s: %s tokens", rows[i], cols[j], words.Grouped(some))
	})
}

// drawTraffic draws the bytes between ranks, or blocks of them.
func (r *Report) drawTraffic() *gridPicture {
	b := blocks(len(r.TrafficBytes), 32)
	sums := sumBlocks(r.TrafficBytes, b)
	var most int64
	for _, row := range sums {
		most = max(most, slices.Max(row))
	}
	var rows, cols []string
	for _, b := range b {
		rows, cols = append(rows, b.name("from rank")), append(cols, "to "+b.short())
	}
	name, bytes := unit(most)
	g := grid(rows, cols, func(i, j int) (float64, string, string) {
		n := sums[i][j]
		return float64(n) / float64(max(most, 1)), fmt.Sprintf("%.1f", float64(n)/bytes), fmt.Sprintf("%s %s: %s bytes", rows[i], cols[j], words.Grouped(n))
	})
	g.Note = "Numbers are " + name + " of tokens. "
	if len(b) < len(r.TrafficBytes) {
		g.Note += "Blocks of ranks are summed; the diagonal includes what stayed where it was."
	} else {
		g.Note += "The diagonal stayed where it was."
	}
	if r.TrafficSince > 1 {
		g.Note += fmt.Sprintf(" Counted since step %d, for the ranks that were there then.", r.TrafficSince)
	}
	return g
}

// drawStep draws what each rank did in one step.
func (r *Report) drawStep() *stepPicture {
	const most, w, h = 32, 860.0, 24.0
	ranks := r.Timeline
	d := &stepPicture{Left: 64, W: w}
	if len(ranks) > most {
		d.Note = fmt.Sprintf("The first %d of %d ranks.", most, len(ranks))
		ranks = ranks[:most]
	}
	begin, end := int64(math.MaxInt64), int64(0)
	for _, spans := range ranks {
		for _, s := range spans {
			begin, end = min(begin, s.Begin), max(end, s.End)
		}
	}
	scale := (w - d.Left - 20) / float64(max(end-begin, 1))
	for rank, spans := range ranks {
		y := h * float64(rank)
		d.Rows = append(d.Rows, tick{y + h/2 + 4, fmt.Sprintf("rank %d", rank)})
		for _, s := range spans {
			title := fmt.Sprintf("rank %d, %s: %.3f ms, from %.3f ms", rank, phase.Names[s.Phase], float64(s.End-s.Begin)/1e6, float64(s.Begin-begin)/1e6)
			d.Spans = append(d.Spans, cell{X: d.Left + scale*float64(s.Begin-begin), Y: y + 2, W: max(scale*float64(s.End-s.Begin), 0.3), H: h - 4,
				Title: title, Fill: phaseColours[s.Phase]})
		}
	}
	d.End = h * float64(len(ranks))
	for _, t := range ticks(0, float64(end-begin)/1e6, 8) {
		d.X = append(d.X, tick{d.Left + scale*t*1e6, trim(t)})
	}
	d.H = d.End + 24
	return d
}
