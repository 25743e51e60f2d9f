package alltoallv

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/switchyard-moe/switchyard/device"
)

// Table holds measured times of the built-in algorithms, by which an Exchanger selects. `go run ./test/perf tune` writes
// one; the package has one for H200-class machines, which is the default on GPUs.
type Table struct {
	// Origin says where the figures come from.
	Origin string `json:"origin"`
	// Device is the kind of device: "cuda" or "host".
	Device string `json:"device"`
	// Curves are the measurements. Every number of ranks has at least one curve with and one without Staged that is of
	// direct, pipelined or ring.
	Curves []Curve `json:"curves"`
}

// Curve is the time of one algorithm in one setting by the amount of data.
type Curve struct {
	Algorithm string `json:"algorithm"`
	Ranks     int    `json:"ranks"`
	// Staged says that peers could not write the output. Packets and pipelined do not depend on it and have one curve.
	Staged bool `json:"staged"`
	// SMs is how many multiprocessors the algorithm was given, 0 where it needs none or chooses for itself.
	SMs int `json:"sms"`
	// Rate is the GB/s to which a rank's senders were held together, 0 where they sent as fast as they could.
	Rate float64 `json:"rate,omitempty"`
	// Bytes is what a rank sends in equal parts to all ranks, its own part included, ascending.
	Bytes []int64 `json:"bytes"`
	// Microseconds is the time of each.
	Microseconds []float64 `json:"us"`
}

//go:embed table.json
var defaultTable []byte

// defaultTableDevice is what defaultTable is for.
const defaultTableDevice = "cuda"

// ReadTable reads a table that Write or the tuner has written.
func ReadTable(r io.Reader) (*Table, error) {
	t := new(Table)
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(t); err != nil {
		return nil, fmt.Errorf("alltoallv: read table: %w", err)
	}
	if err := t.validate(); err != nil {
		return nil, err
	}
	return t, nil
}

// LoadTable reads a table from a file.
func LoadTable(path string) (*Table, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("alltoallv: load table: %w", err)
	}
	defer f.Close()
	t, err := ReadTable(f)
	if err != nil {
		return nil, fmt.Errorf("%w (%s)", err, path)
	}
	return t, nil
}

// Write writes the table as JSON, a line a curve.
func (t *Table) Write(w io.Writer) error {
	var b bytes.Buffer
	origin, err := json.Marshal(t.Origin)
	kind, err2 := json.Marshal(t.Device)
	if err := errors.Join(err, err2); err != nil {
		return fmt.Errorf("alltoallv: write table: %w", err)
	}
	fmt.Fprintf(&b, "{\n\"origin\": %s,\n\"device\": %s,\n\"curves\": [\n", origin, kind)
	for i, c := range t.Curves {
		line, err := json.Marshal(c)
		if err != nil {
			return fmt.Errorf("alltoallv: write table: %w", err)
		}
		if i > 0 {
			b.WriteString(",\n")
		}
		b.Write(line)
	}
	b.WriteString("\n]\n}\n")
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("alltoallv: write table: %w", err)
	}
	return nil
}

func (t *Table) validate() error {
	if t.Device != device.CUDAKind.String() && t.Device != device.HostKind.String() {
		return invalid("a table for device %q", t.Device)
	}
	known := map[string]bool{}
	for _, a := range builtin() {
		known[a.Name()] = true
	}
	type key struct {
		name   string
		ranks  int
		staged bool
		sms    int
		rate   float64
	}
	seen, covered := map[key]bool{}, map[key]bool{}
	for _, c := range t.Curves {
		k := key{c.Algorithm, c.Ranks, c.Staged, c.SMs, c.Rate}
		if !known[c.Algorithm] || c.Ranks < 2 || c.SMs < 0 || !(c.Rate >= 0) || math.IsInf(c.Rate, 1) {
			return invalid("table: a curve of algorithm %q, %d ranks, %d multiprocessors, rate %v", c.Algorithm, c.Ranks, c.SMs, c.Rate)
		}
		if seen[k] {
			return invalid("table: two curves of %+v", k)
		}
		seen[k] = true
		if len(c.Bytes) == 0 || len(c.Bytes) != len(c.Microseconds) {
			return invalid("table: %+v has %d sizes and %d times", k, len(c.Bytes), len(c.Microseconds))
		}
		for i, n := range c.Bytes {
			if us := c.Microseconds[i]; n <= 0 || i > 0 && n <= c.Bytes[i-1] || !(us > 0) || math.IsInf(us, 1) {
				return invalid("table: %+v has %v us for %d bytes at place %d", k, us, n, i)
			}
		}
		covered[key{ranks: c.Ranks}] = true
		switch c.Algorithm {
		case direct{}.Name(), ring{}.Name():
			covered[key{"any", c.Ranks, c.Staged, 0, 0}] = true
		case pipelined{}.Name():
			covered[key{"any", c.Ranks, false, 0, 0}], covered[key{"any", c.Ranks, true, 0, 0}] = true, true
		}
	}
	if len(t.Curves) == 0 {
		return invalid("table: no curves")
	}
	for k := range covered {
		for _, staged := range [2]bool{false, true} {
			if !covered[key{"any", k.ranks, staged, 0, 0}] {
				return invalid("table: nothing that does any exchange of %d ranks, staged %v", k.ranks, staged)
			}
		}
	}
	return nil
}

// digest is a short name of the figures.
func (t *Table) digest() string {
	if t == nil {
		return "none"
	}
	var b bytes.Buffer
	_ = t.Write(&b) // to memory, of figures that validate has let pass
	return fmt.Sprintf("%016x", xxhash.Sum64(b.Bytes()))
}

// estimates is what a table says about one world and one bound of multiprocessors, made for fast questions.
type estimates struct {
	curves []estimate
}

// estimate is the best that an algorithm does, over all numbers of multiprocessors that are allowed.
type estimate struct {
	algorithm string
	staged    bool
	ranks     int
	points    []point
}

// setting is what a measurement was made with.
type setting struct {
	sms  int
	rate float64
}

// point is a measurement: log2 of the bytes that leave a rank, and log2 of the microseconds.
type point struct {
	bytes, us float64
	setting
}

// forWorld prepares the table for questions about a world. It uses the measurements of the next larger world that has been
// measured, or else of the largest.
func (t *Table) forWorld(ranks, maxSMs int) *estimates {
	if t == nil {
		return nil
	}
	nearest := 0
	for _, c := range t.Curves {
		switch {
		case nearest == 0, c.Ranks >= ranks && (nearest < ranks || c.Ranks < nearest), c.Ranks < ranks && nearest < c.Ranks:
			nearest = c.Ranks
		}
	}
	e := &estimates{}
	for _, c := range t.Curves {
		if c.Ranks != nearest {
			continue
		}
		i := slices.IndexFunc(e.curves, func(o estimate) bool { return o.algorithm == c.Algorithm && o.staged == c.Staged })
		if i < 0 {
			e.curves = append(e.curves, estimate{algorithm: c.Algorithm, staged: c.Staged, ranks: nearest, points: t.best(c.Algorithm, nearest, c.Staged, maxSMs)})
		}
	}
	return e
}

// fewer is by how much a larger number of multiprocessors must be faster to be taken.
const fewer = 0.98

// best merges the curves of one algorithm into that of the best allowed number of multiprocessors at each size. Where only
// larger numbers were measured, the time grows as the number shrinks.
func (t *Table) best(algorithm string, ranks int, staged bool, maxSMs int) []point {
	var of []Curve
	for _, c := range t.Curves {
		if c.Algorithm == algorithm && c.Ranks == ranks && c.Staged == staged {
			of = append(of, c)
		}
	}
	slices.SortStableFunc(of, func(a, b Curve) int { return a.SMs - b.SMs })
	var points []point
	add := func(n int64, us float64, s setting) {
		p := point{math.Log2(float64(n) * float64(ranks-1) / float64(ranks)), math.Log2(us), s}
		for i, q := range points {
			if q.bytes == p.bytes {
				if q.sms == p.sms && us < math.Exp2(q.us) || us < fewer*math.Exp2(q.us) {
					points[i] = p
				}
				return
			}
		}
		points = append(points, p)
	}
	for i, c := range of {
		if c.SMs > maxSMs && i > 0 && of[0].SMs <= maxSMs {
			break
		}
		for k, n := range c.Bytes {
			us, s := c.Microseconds[k], setting{c.SMs, c.Rate}
			if s.sms > maxSMs { // so few offer less than a link carries
				us, s = us*float64(s.sms)/float64(maxSMs), setting{sms: maxSMs}
			}
			add(n, us, s)
		}
	}
	slices.SortFunc(points, func(a, b point) int {
		if a.bytes < b.bytes {
			return -1
		}
		return 1
	})
	return points
}

// at is the time in microseconds with 2^x bytes leaving or reaching a rank, and the setting for it. Between two
// measurements it follows the straight line in logarithms, below the first it stays, above the last the rate stays.
func (e *estimate) at(x float64) (us float64, s setting) {
	p := e.points
	if first := p[0]; x > first.bytes {
		last := p[len(p)-1]
		if x >= last.bytes {
			return math.Exp2(last.us + x - last.bytes), last.setting
		}
		i := 1
		for p[i].bytes < x {
			i++
		}
		a, b := p[i-1], p[i]
		f := (x - a.bytes) / (b.bytes - a.bytes)
		if s = a.setting; f >= 0.5 {
			s = b.setting
		}
		return math.Exp2(a.us + f*(b.us-a.us)), s
	}
	return math.Exp2(p[0].us), p[0].setting
}

// Estimate is what the Exchanger's table says of a built-in algorithm: the microseconds of this traffic, by the busiest
// port that this rank can think of, and how many multiprocessors to use, 0 for the algorithm's own choice. ok is false where there is
// no table or nothing about the algorithm.
func (t *Traffic) Estimate(algorithm string) (us float64, sms int, ok bool) {
	us, s, ok := t.estimate(algorithm)
	return us, s.sms, ok
}

// link is what the busiest port of all carries, as far as this rank can tell: who gets its largest message gets as much from others.
func (t *Traffic) link() int64 { return max(t.SendTotal, t.RecvTotal, t.Largest*int64(t.Size-1)) }

func (t *Traffic) estimate(algorithm string) (us float64, s setting, ok bool) {
	if t.table == nil {
		return 0, setting{}, false
	}
	staged := !t.InPlace
	switch algorithm {
	case packet{}.Name():
		staged = false
	case pipelined{}.Name():
		staged = true
	}
	for i := range t.table.curves {
		if c := &t.table.curves[i]; c.algorithm == algorithm && c.staged == staged {
			us, s = c.at(t.log)
			return us, s, true
		}
	}
	return 0, setting{}, false
}
