package allreduce

import (
	"bytes"
	_ "embed"
	"io"
	"math"

	"github.com/switchyard-moe/switchyard/internal/curve"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Table holds measured times of reductions on GPUs, by which a Reducer selects. `go run ./test/perf tune -of allreduce` writes one; the
// package has one for H200-class machines, which is the default.
type Table struct {
	// Origin states the source of the figures.
	Origin string `json:"origin"`
	// Device is the kind of device: "cuda".
	Device string `json:"device"`
	// Curves are the measurements. Every number of ranks has a curve of two-shot for each collective.
	Curves []Curve `json:"curves"`
}

// Curve is the time of one collective by one algorithm in one setting, by the amount of data.
type Curve struct {
	// Collective is all-reduce, reduce-scatter or all-gather. A broadcast has the times of an all-gather.
	Collective string `json:"collective"`
	// Algorithm is one-shot packet, two-shot packet, two-shot, for all-gathers two-shot pull (ranks read the others' slices), and for
	// reductions two-shot push (ranks write their input into the others' staging).
	Algorithm string `json:"algorithm"`
	Ranks     int    `json:"ranks"`
	// SMs is the number of multiprocessors that a call took, 0 if the number followed from the bytes.
	SMs int `json:"sms"`
	// Rate is the bound of a rank's reads and writes of the others' memory in GB/s, 0 if they went as fast as they could.
	Rate float64 `json:"rate,omitempty"`
	// Bytes are those of all slices together, ascending.
	Bytes []int64 `json:"bytes"`
	// Microseconds is the time of each.
	Microseconds []float64 `json:"us"`
}

//go:embed table.json
var defaultTable []byte

// tableDevice is the kind of device of tables.
const tableDevice = "cuda"

// ReadTable reads a table that Write or the tuner has written.
func ReadTable(r io.Reader) (*Table, error) { return curve.Read("allreduce", r, (*Table).validate) }

// LoadTable reads a table from a file.
func LoadTable(path string) (*Table, error) { return curve.Load("allreduce", path, ReadTable) }

// Write writes the table as JSON, a line a curve.
func (t *Table) Write(w io.Writer) error {
	return curve.Write("allreduce", w, t.Origin, t.Device, t.Curves)
}

// collectives are those with curves in tables.
var collectives = []kernels.Collective{kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather}

func (t *Table) validate() error {
	if t.Device != tableDevice {
		return invalid("table: it is for device %q, want %q", t.Device, tableDevice)
	}
	type key struct {
		course
		ranks, sms int
		rate       float64
	}
	type reach struct {
		collective kernels.Collective
		ranks      int
	}
	seen, whole, worlds := map[key]bool{}, map[reach]bool{}, map[int]bool{} // whole: has a curve of what can do any call
	for _, c := range t.Curves {
		of, known := c.course()
		if !known || c.Ranks < 2 {
			return invalid("table: a curve of %q by %q on %d ranks", c.Collective, c.Algorithm, c.Ranks)
		}
		k := key{of, c.Ranks, c.SMs, c.Rate}
		if seen[k] {
			return invalid("table: two curves of %s by %s on %d ranks with %d multiprocessors at %v GB/s", c.Collective, c.Algorithm, c.Ranks, c.SMs, c.Rate)
		}
		seen[k], worlds[c.Ranks] = true, true
		if of.way == throughMemory {
			whole[reach{of.collective, c.Ranks}] = true
		}
		m := c.measured()
		if err := m.Validate("bytes"); err != nil {
			return invalid("table: %s by %s on %d ranks: %v", c.Collective, c.Algorithm, c.Ranks, err)
		}
	}
	if len(worlds) == 0 {
		return invalid("table: no curves")
	}
	for ranks := range worlds {
		for _, coll := range collectives {
			if !whole[reach{coll, ranks}] {
				return invalid("table: nothing that does any %v of %d ranks", coll, ranks)
			}
		}
	}
	return nil
}

func (c *Curve) measured() curve.Measured {
	return curve.Measured{Setting: curve.Setting{SMs: c.SMs, Rate: c.Rate}, Sizes: c.Bytes, Microseconds: c.Microseconds}
}

// course is one kind of call with times in a table.
type course struct {
	collective kernels.Collective
	way        way
}

// course is the course of the curve; known is false if its names are unknown.
func (c *Curve) course() (of course, known bool) {
	for _, coll := range collectives {
		for _, w := range gpuWays {
			if w.serves(coll) && c.Collective == coll.String() && c.Algorithm == w.String() {
				return course{coll, w}, true
			}
		}
	}
	return course{}, false
}

// estimates are a table's times for one world and one bound of multiprocessors.
type estimates map[course]curve.Points

// forWorld prepares the table for questions about a world.
func (t *Table) forWorld(ranks, maxSMs int) estimates {
	if t == nil {
		return nil
	}
	near := curve.ForWorld(t.Curves, ranks, func(c Curve) int { return c.Ranks })
	of := map[course][]curve.Measured{}
	for _, c := range near {
		k, _ := c.course()
		of[k] = append(of[k], c.measured())
	}
	e := estimates{}
	for k, curves := range of {
		e[k] = curve.Best(curves, near[0].Ranks, maxSMs)
	}
	return e
}

// of is the time of a call and the setting for it; ok is false if the table has no times of the way.
func (e estimates) of(r *kernels.Reduction, w way) (us float64, s curve.Setting, ok bool) {
	coll := r.Call.Collective
	if coll == kernels.Broadcast {
		coll = kernels.AllGather
	}
	p := e[course{coll, w}]
	if p == nil {
		return 0, s, false
	}
	us, s = p.At(math.Log2(float64(max(linkBytes(r), 1))))
	return us, s, true
}

// linkBytes is what a rank gets from its peers in one half of a call.
func linkBytes(r *kernels.Reduction) int64 {
	return int64(r.Family.Size-1) * r.Longest() * r.Call.DType.Size()
}

// builtinTable is the table of the package.
func builtinTable() (*Table, error) { return ReadTable(bytes.NewReader(defaultTable)) }
