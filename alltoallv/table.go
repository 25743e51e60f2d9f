package alltoallv

import (
	_ "embed"
	"io"
	"slices"

	"github.com/switchyard-moe/switchyard/internal/curve"
)

// Table holds measured times of the built-in algorithms, by which an Exchanger selects. `go run ./test/perf tune` writes
// one; the package has one for H200-class machines, which is the default on GPUs.
type Table struct {
	// Origin states the source of the figures.
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
	// SMs is the number of multiprocessors that the algorithm was given, 0 if it needs none or chooses for itself.
	SMs int `json:"sms"`
	// Rate is the bound of a rank's senders together in GB/s, 0 if they sent as fast as they could.
	Rate float64 `json:"rate,omitempty"`
	// Bytes is the amount that a rank sends in equal parts to all ranks, its own part included, ascending.
	Bytes []int64 `json:"bytes"`
	// Microseconds is the time of each.
	Microseconds []float64 `json:"us"`
}

//go:embed table.json
var defaultTable []byte

// defaultTableDevice is the kind of device of defaultTable.
const defaultTableDevice = "cuda"

// ReadTable reads a table that Write or the tuner has written.
func ReadTable(r io.Reader) (*Table, error) { return curve.Read("alltoallv", r, (*Table).validate) }

// LoadTable reads a table from a file.
func LoadTable(path string) (*Table, error) { return curve.Load("alltoallv", path, ReadTable) }

// Write writes the table as JSON, a line a curve.
func (t *Table) Write(w io.Writer) error {
	return curve.Write("alltoallv", w, t.Origin, t.Device, t.Curves)
}

func (t *Table) validate() error {
	if t.Device == "" {
		return invalid("table: it names no device")
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
		if !known[c.Algorithm] || c.Ranks < 2 {
			return invalid("table: a curve of algorithm %q, %d ranks", c.Algorithm, c.Ranks)
		}
		if seen[k] {
			return invalid("table: two curves of %+v", k)
		}
		seen[k] = true
		m := c.measured()
		if err := m.Validate("bytes"); err != nil {
			return invalid("table: %+v: %v", k, err)
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

func (c *Curve) measured() curve.Measured {
	return curve.Measured{Setting: curve.Setting{SMs: c.SMs, Rate: c.Rate}, Sizes: c.Bytes, Microseconds: c.Microseconds}
}

// estimates are a table's times for one world and one bound of multiprocessors, in a form for fast look-ups.
type estimates struct {
	curves []estimate
}

// estimate is the best that an algorithm does, over all numbers of multiprocessors that are allowed.
type estimate struct {
	algorithm string
	staged    bool
	ranks     int
	points    curve.Points
}

// forWorld prepares the table for questions about a world.
func (t *Table) forWorld(ranks, maxSMs int) *estimates {
	if t == nil {
		return nil
	}
	e := &estimates{}
	near := curve.ForWorld(t.Curves, ranks, func(c Curve) int { return c.Ranks })
	for _, c := range near {
		if !slices.ContainsFunc(e.curves, func(o estimate) bool { return o.algorithm == c.Algorithm && o.staged == c.Staged }) {
			e.curves = append(e.curves, estimate{c.Algorithm, c.Staged, c.Ranks, best(near, c.Algorithm, c.Staged, maxSMs)})
		}
	}
	return e
}

// best merges the curves of one algorithm in one world into that of the best allowed number of multiprocessors at each size.
func best(world []Curve, algorithm string, staged bool, maxSMs int) curve.Points {
	var of []curve.Measured
	for _, c := range world {
		if c.Algorithm == algorithm && c.Staged == staged {
			of = append(of, c.measured())
		}
	}
	return curve.Best(of, world[0].Ranks, maxSMs)
}

// Estimate is the estimate of the Exchanger's table for a built-in algorithm: the microseconds of this traffic, by the busiest port
// that this rank can infer, and the number of multiprocessors to use, 0 for the algorithm's own choice. ok is false without a table,
// and if it has no times of the algorithm.
func (t *Traffic) Estimate(algorithm string) (us float64, sms int, ok bool) {
	us, s, ok := t.estimate(algorithm)
	return us, s.SMs, ok
}

// link is the load of the busiest port of all, as far as this rank can tell: it assumes that the rank which gets its largest message gets as
// much from all others.
func (t *Traffic) link() int64 { return max(t.SendTotal, t.RecvTotal, t.Largest*int64(t.Size-1)) }

func (t *Traffic) estimate(algorithm string) (us float64, s curve.Setting, ok bool) {
	if t.table == nil {
		return 0, curve.Setting{}, false
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
			us, s = c.points.At(t.log)
			return us, s, true
		}
	}
	return 0, curve.Setting{}, false
}
