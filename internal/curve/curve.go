// Package curve is what tables of measured times have in common: how they are written, and what they say of sizes between those that
// were measured.
package curve

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// Setting is what a way was given on a GPU: multiprocessors, 0 where it chooses for itself, and the GB/s to which it was held, 0 where
// it went as fast as it could.
type Setting struct {
	SMs  int
	Rate float64
}

// Measured are the times of a way in one setting.
type Measured struct {
	Setting
	// Sizes are what a rank has for all ranks, its own part included, ascending: bytes or tokens. Microseconds are the time of each.
	Sizes        []int64
	Microseconds []float64
}

// Validate refuses figures that cannot be. unit is what the sizes count.
func (m *Measured) Validate(unit string) error {
	if m.SMs < 0 || !(m.Rate >= 0) || math.IsInf(m.Rate, 1) {
		return fmt.Errorf("%d multiprocessors, rate %v", m.SMs, m.Rate)
	}
	if len(m.Sizes) == 0 || len(m.Sizes) != len(m.Microseconds) {
		return fmt.Errorf("%d sizes and %d times", len(m.Sizes), len(m.Microseconds))
	}
	for i, n := range m.Sizes {
		if us := m.Microseconds[i]; n <= 0 || i > 0 && n <= m.Sizes[i-1] || !(us > 0) || math.IsInf(us, 1) {
			return fmt.Errorf("%v us for %d %s at place %d", us, n, unit, i)
		}
	}
	return nil
}

// Read reads a table that Write has written, for the package pkg. validate refuses what the table may not say.
func Read[T any](pkg string, r io.Reader, validate func(*T) error) (*T, error) {
	t := new(T)
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(t); err != nil {
		return nil, fmt.Errorf("%s: read table: %w", pkg, err)
	}
	if err := validate(t); err != nil {
		return nil, err
	}
	return t, nil
}

// Load reads a table from a file by read, whose errors name the package; where there is no such file the error names pkg.
func Load[T any](pkg, path string, read func(io.Reader) (*T, error)) (*T, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%s: load table: %w", pkg, err)
	}
	defer f.Close()
	t, err := read(f)
	if err != nil {
		return nil, fmt.Errorf("%w (%s)", err, path)
	}
	return t, nil
}

// ForWorld is the curves that speak for a world of the given number of ranks: those of the next larger world that has been measured, or
// else of the largest. of is the world that a curve was measured in.
func ForWorld[C any](curves []C, ranks int, of func(C) int) []C {
	var measured []int
	for _, c := range curves {
		measured = append(measured, of(c))
	}
	n := nearest(ranks, measured)
	return slices.DeleteFunc(slices.Clone(curves), func(c C) bool { return of(c) != n })
}

// nearest is the next larger of the measured worlds, or else the largest, 0 of none.
func nearest(ranks int, measured []int) int {
	nearest := 0
	for _, n := range measured {
		switch {
		case nearest == 0, n >= ranks && (nearest < ranks || n < nearest), n < ranks && nearest < n:
			nearest = n
		}
	}
	return nearest
}

// Point is a measurement: log2 of the bytes or tokens that leave a rank, and log2 of the microseconds.
type Point struct {
	Size, US float64
	Setting
}

// Leaving is log2 of what leaves a rank of a size that it has in equal parts for all ranks, its own part included.
func Leaving(size int64, ranks int) float64 {
	return math.Log2(float64(size) * float64(ranks-1) / float64(ranks))
}

// Points are the best measurements of a way, ascending by size.
type Points []Point

// fewer is by how much a larger number of multiprocessors must be faster to be taken.
const fewer = 0.98

// Best merges the curves of one way, measured on the given number of ranks, into that of the best allowed setting at each size. Where only larger
// numbers of multiprocessors were measured, the time grows as the number shrinks. It sorts the curves.
func Best(of []Measured, ranks, maxSMs int) Points {
	slices.SortStableFunc(of, func(a, b Measured) int { return a.SMs - b.SMs })
	var points Points
	for i, c := range of {
		if c.SMs > maxSMs && i > 0 && of[0].SMs <= maxSMs {
			break
		}
		for k, n := range c.Sizes {
			us, s := c.Microseconds[k], c.Setting
			if s.SMs > maxSMs { // so few offer less than a link carries
				us, s = us*float64(s.SMs)/float64(maxSMs), Setting{SMs: maxSMs}
			}
			points.add(Point{Leaving(n, ranks), math.Log2(us), s})
		}
	}
	slices.SortFunc(points, func(a, b Point) int {
		if a.Size < b.Size {
			return -1
		}
		return 1
	})
	return points
}

// add takes a point in where it is the best of its size.
func (p *Points) add(n Point) {
	for i, q := range *p {
		if q.Size == n.Size {
			us := math.Exp2(n.US)
			if q.SMs == n.SMs && us < math.Exp2(q.US) || us < fewer*math.Exp2(q.US) {
				(*p)[i] = n
			}
			return
		}
	}
	*p = append(*p, n)
}

// At is the time in microseconds with 2^x bytes or tokens leaving or reaching a rank, and the setting for it. Between two measurements it follows
// the straight line in logarithms, below the first it stays, above the last the rate stays.
func (p Points) At(x float64) (us float64, s Setting) {
	first, last := p[0], p[len(p)-1]
	if x <= first.Size {
		return math.Exp2(first.US), first.Setting
	}
	if x >= last.Size {
		return math.Exp2(last.US + x - last.Size), last.Setting
	}
	i := 1
	for p[i].Size < x {
		i++
	}
	a, b := p[i-1], p[i]
	f := (x - a.Size) / (b.Size - a.Size)
	if s = a.Setting; f >= 0.5 {
		s = b.Setting
	}
	return math.Exp2(a.US + f*(b.US-a.US)), s
}

// Write writes a table of curves as JSON, a line a curve, for the package pkg.
func Write[C any](pkg string, w io.Writer, origin, device string, curves []C) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\n\"origin\": %s,\n\"device\": %s,\n\"curves\": [\n", quoted(origin), quoted(device))
	for i, c := range curves {
		line, err := json.Marshal(c)
		if err != nil {
			return fmt.Errorf("%s: write table: %w", pkg, err)
		}
		if i > 0 {
			b.WriteString(",\n")
		}
		b.Write(line)
	}
	b.WriteString("\n]\n}\n")
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("%s: write table: %w", pkg, err)
	}
	return nil
}

// quoted is a string of JSON.
func quoted(s string) []byte {
	b, _ := json.Marshal(s) // strings can always be written
	return b
}

// Between is the time of n bytes, by sizes that ascend and their times: between two of them it follows the straight line, below the first it
// stays, and above the last the rate stays.
func Between(bytes []int64, us []float64, n int64) float64 {
	if n <= bytes[0] {
		return us[0]
	}
	for i := 1; i < len(bytes); i++ {
		if n <= bytes[i] {
			part := float64(n-bytes[i-1]) / float64(bytes[i]-bytes[i-1])
			return us[i-1] + part*(us[i]-us[i-1])
		}
	}
	last := len(bytes) - 1
	return us[last] * float64(n) / float64(bytes[last])
}

// Digest is a short name of the figures of a table, "none" of a nil pointer.
func Digest[T any](table *T) string {
	if table == nil {
		return "none"
	}
	b, _ := json.Marshal(table) // figures that were read, or validated, can be written
	return fmt.Sprintf("%016x", xxhash.Sum64(b))
}
