package dispatch

import (
	"bytes"
	_ "embed"
	"io"
	"math"
	"slices"
	"sort"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/curve"
)

// Table holds measured times of dispatches and combines on GPUs, by which a Dispatcher takes its number of multiprocessors.
// `go run ./test/perf tune -of dispatch` writes one.
type Table struct {
	// Origin states the source of the figures.
	Origin string `json:"origin"`
	// Device is the kind of device: "cuda".
	Device string `json:"device"`
	// Curves are the measurements.
	Curves []Curve `json:"curves"`
}

// Curve is the time of a pair, a dispatch and its combine, with one number of multiprocessors, by the number of tokens.
type Curve struct {
	// LowLatency says that Options.LowLatency took effect, ByExpert that rows were by expert. Pairs by expert without LowLatency have no
	// curves: they run passes next to each other, whose multiprocessors the engine divides.
	LowLatency bool `json:"low_latency"`
	ByExpert   bool `json:"by_expert"`
	Ranks      int  `json:"ranks"`
	// SMs is the number of multiprocessors that both calls were given.
	SMs int `json:"sms"`
	// Tokens are those that each rank had, ascending.
	Tokens []int64 `json:"tokens"`
	// Microseconds is the time of each.
	Microseconds []float64 `json:"us"`
}

//go:embed table.json
var defaultTable []byte

// tableDevice is the kind of device of tables.
const tableDevice = "cuda"

// ReadTable reads a table that Write or the tuner has written.
func ReadTable(r io.Reader) (*Table, error) { return curve.Read("dispatch", r, (*Table).validate) }

// LoadTable reads a table from a file.
func LoadTable(path string) (*Table, error) { return curve.Load("dispatch", path, ReadTable) }

// Write writes the table as JSON, a line a curve.
func (t *Table) Write(w io.Writer) error {
	return curve.Write("dispatch", w, t.Origin, t.Device, t.Curves)
}

// builtinTable is the table of the package.
func builtinTable() (*Table, error) { return ReadTable(bytes.NewReader(defaultTable)) }

// validate refuses another device, and curves that cannot be.
func (t *Table) validate() error {
	if len(t.Curves) == 0 {
		return invalid("table: no curves")
	}
	if t.Device != tableDevice {
		return invalid("table: it is for device %q, want %q", t.Device, tableDevice)
	}
	type key struct {
		pairs
		ranks, sms int
	}
	seen := map[key]bool{}
	for _, c := range t.Curves {
		k := key{c.pairs(), c.Ranks, c.SMs}
		switch {
		case c.Ranks < 2 || c.SMs < 1:
			return invalid("table: a curve of %d ranks with %d multiprocessors, want at least 2 and 1", c.Ranks, c.SMs)
		case !c.LowLatency && c.ByExpert:
			return invalid("table: a curve of rows by expert without low latency: these calls divide the multiprocessors among passes by themselves")
		case seen[k]:
			return invalid("table: two curves of %v on %d ranks with %d multiprocessors", k.pairs, c.Ranks, c.SMs)
		}
		seen[k] = true
		m := c.measured()
		if err := m.Validate("tokens"); err != nil {
			return invalid("table: %v on %d ranks with %d multiprocessors: %v", k.pairs, c.Ranks, c.SMs, err)
		}
	}
	return nil
}

// pairs is a kind of dispatches and combines with curves of its own.
type pairs struct{ lowLatency, byExpert bool }

// String is like "low latency by rank".
func (p pairs) String() string {
	switch {
	case p.lowLatency && p.byExpert:
		return "low latency by expert"
	case p.lowLatency:
		return "low latency by rank"
	}
	return "rows by token"
}

func (c *Curve) pairs() pairs { return pairs{c.LowLatency, c.ByExpert} }

func (c *Curve) measured() curve.Measured {
	return curve.Measured{Setting: curve.Setting{SMs: c.SMs}, Sizes: c.Tokens, Microseconds: c.Microseconds}
}

// table is the table that a dispatcher on a device goes by, nil on the host.
func (o *Options) table(kind device.Kind) (*Table, error) {
	switch gpu := kind.String() == tableDevice; {
	case gpu && o.Table == nil:
		return builtinTable()
	case o.Table == nil:
		return nil, nil
	case !gpu:
		return nil, invalid("Options.Table is for GPUs, the heap is of the host")
	}
	return o.Table, o.Table.validate()
}

// step says how many multiprocessors calls take from a number of tokens on; 0 is the engine's choice.
type step struct{ tokens, sms int }

// steps are ascending by tokens.
type steps []step

// at is the number of multiprocessors for a call, 0 for the engine's choice.
func (s steps) at(tokens int) int {
	for i := len(s) - 1; i >= 0; i-- {
		if tokens >= s[i].tokens {
			return s[i].sms
		}
	}
	return 0
}

// steps are those of a kind of calls among a number of ranks: up to the most tokens that were measured the fastest number of multiprocessors,
// and none where nothing was.
func (t *Table) steps(of pairs, ranks int) (s steps) {
	var curves []curve.Measured
	var measured []int64
	for _, c := range t.Curves {
		if c.pairs() == of && c.Ranks == ranks {
			curves = append(curves, c.measured())
			measured = append(measured, c.Tokens...)
		}
	}
	if len(curves) == 0 {
		return nil
	}
	points := curve.Best(curves, ranks, math.MaxInt)
	fastest := func(tokens int64) int {
		_, setting := points.At(curve.Leaving(tokens, ranks))
		return setting.SMs
	}
	slices.Sort(measured)
	last := int64(0)
	for _, n := range slices.Compact(measured) {
		if sms := fastest(n); len(s) == 0 {
			s = append(s, step{0, sms})
		} else if sms != s[len(s)-1].sms { // somewhere behind the last that was measured
			more := sort.Search(int(n-last), func(k int) bool { return fastest(last+int64(k)) == sms })
			s = append(s, step{int(last) + more, sms})
		}
		last = n
	}
	return append(s, step{int(last) + 1, 0})
}
