package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/dispatch"
)

// variant is one setting whose times make a curve of the selection table.
type variant struct {
	algorithm string
	staged    bool
	sms       int
	rate      float64
	limit     int64 // the largest message, 0 for any
	options   alltoallv.Options
	x         *alltoallv.Exchanger
}

// variants are all settings that are worth knowing. Packets land in staging wherever the output is, and pipelined is
// always staged; on GPUs direct does as pipelined where it must stage. Without packets the others are measured down to the smallest sizes, so that a table says from where on
// packets lose.
func variants(c config, n int) []*variant {
	sms := c.EachSMs
	packet := &variant{algorithm: "packet", limit: 4 << 10}
	all := []*variant{packet}
	if c.Device == "cuda" {
		packet.limit = 1 << 20
		all = append(all, &variant{algorithm: "copy"})
	} else {
		sms = []int{0}
		all = append(all, &variant{algorithm: "direct", staged: true})
	}
	packet.options.PacketBytes = packet.limit
	rates := c.TuneRates
	if c.Device != "cuda" {
		rates = []float64{0}
	}
	for _, k := range sms {
		all = append(all, &variant{algorithm: "direct", sms: k}, &variant{algorithm: "pipelined", sms: k, staged: true})
		for _, rate := range rates {
			all = append(all, &variant{algorithm: "ring", sms: k, rate: rate}, &variant{algorithm: "ring", sms: k, rate: rate, staged: true})
		}
	}
	for _, v := range all {
		v.options.Algorithm, v.options.EagerBytes = v.algorithm, c.Eager
		if c.Device != "cuda" {
			continue
		}
		if most := slices.Max(sms); most != alltoallv.DefaultMaxSMs { // which has as many again for staging
			v.options.MaxSMs = most
		}
		if v != packet {
			v.options.PacketBytes = -1
		}
		if v.sms > 0 {
			v.options.Table = only(n, v.sms, v.rate)
		}
	}
	return all
}

// only is a table that leaves nothing to choose but one number of multiprocessors, and one rate of rings.
func only(n, sms int, rate float64) *alltoallv.Table {
	t := &alltoallv.Table{Device: "cuda"}
	for _, staged := range [2]bool{false, true} {
		for _, name := range [...]string{"direct", "pipelined", "ring"} {
			c := alltoallv.Curve{Algorithm: name, Ranks: n, Staged: staged, SMs: sms, Bytes: []int64{1}, Microseconds: []float64{1}}
			if name == "ring" {
				c.Rate = rate
			}
			t.Curves = append(t.Curves, c)
		}
	}
	return t
}

// tuned are those that have tables.
var tuned = map[string]struct {
	calls  string
	onCUDA bool   // only there
	sms    string // the numbers of multiprocessors where nothing is said
}{
	"alltoallv": {"exchanges", false, "8,16"},
	"allreduce": {"reductions", true, "16,32,64,96"},
	"dispatch":  {"dispatches", true, "16,24,32,48,64,96"},
}

func tunedNames() string { return strings.Join(slices.Sorted(maps.Keys(tuned)), ", ") }

// benchTune times every variant at every size.
func benchTune(ctx context.Context, g *comm.Group, c config) ([]row, error) {
	c.Quick = true
	if g.Size() < 2 {
		return nil, errors.New("one rank has nothing to tune")
	}
	switch c.Of {
	case "allreduce":
		return tuneReductions(ctx, g, c)
	case "dispatch":
		return tuneDispatches(ctx, g, c)
	}
	return tuneExchanges(ctx, g, c)
}

// tuneExchanges times one exchange of equal parts at a time.
func tuneExchanges(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	c.Splits = "uniform"
	matrices, err := matricesOf(c, g.Size())
	if err != nil {
		return nil, err
	}
	all := variants(c, g.Size())
	r, err := newRig(ctx, g, c, matrices, len(all))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	defer func() {
		for _, v := range all {
			if v.x != nil {
				err = errors.Join(err, v.x.Close(ctx))
			}
		}
	}()
	for _, v := range all {
		if v.x, err = alltoallv.New(ctx, r.heap(), v.options); err != nil {
			return nil, fmt.Errorf("%s: %w", v.algorithm, err)
		}
	}
	for i, m := range matrices {
		if err := r.load(m); err != nil {
			return nil, err
		}
		for _, v := range all {
			if v.limit > 0 && m[0][0] > v.limit {
				continue
			}
			us, err := r.time(ctx, v.x, v.staged, c.Sizes[i])
			if err != nil {
				return nil, fmt.Errorf("%s, %d multiprocessors, staged %v, %d bytes: %w", v.algorithm, v.sms, v.staged, c.Sizes[i], err)
			}
			line := newRow(c, g.Size(), c.Splits, m, us, v.algorithm, c.Sizes[i])
			line.Staged, line.SMs, line.Rate = v.staged, v.sms, v.rate
			rows = append(rows, line)
		}
	}
	if g.Rank() != 0 {
		return nil, nil
	}
	return rows, nil
}

// tableOf makes curves of rows.
func tableOf(rows []row, origin string) *alltoallv.Table {
	t := &alltoallv.Table{Origin: origin, Device: rows[0].Device}
	for _, r := range rows {
		i := slices.IndexFunc(t.Curves, func(c alltoallv.Curve) bool {
			return c.Algorithm == r.Algorithm && c.Ranks == r.Ranks && c.Staged == r.Staged && c.SMs == r.SMs && c.Rate == r.Rate
		})
		if i < 0 {
			i = len(t.Curves)
			t.Curves = append(t.Curves, alltoallv.Curve{Algorithm: r.Algorithm, Ranks: r.Ranks, Staged: r.Staged, SMs: r.SMs, Rate: r.Rate})
		}
		t.Curves[i].Bytes = append(t.Curves[i].Bytes, r.BytesPerRank)
		t.Curves[i].Microseconds = append(t.Curves[i].Microseconds, hundredths(r.US))
	}
	return t
}

func hundredths(us float64) float64 { return float64(int64(us*100+.5)) / 100 }

// writeTable writes the table that rows make, after reading it back as its user would.
func writeTable(path string, rows []row, origin string) error {
	var b strings.Builder
	write, read := tableOf(rows, origin).Write, func(r io.Reader) error {
		_, err := alltoallv.ReadTable(r)
		return err
	}
	switch {
	case rows[0].MoE != nil:
		write, read = dispatchTable(rows, origin).Write, func(r io.Reader) error {
			_, err := dispatch.ReadTable(r)
			return err
		}
	case rows[0].Collective != "":
		write, read = reductionTable(rows, origin).Write, func(r io.Reader) error {
			_, err := allreduce.ReadTable(r)
			return err
		}
	}
	if err := write(&b); err != nil {
		return err
	}
	if err := read(strings.NewReader(b.String())); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(b.String()), 0o666)
}

// printCurves writes what was measured for people: a line a curve, microseconds by size.
func printCurves(rows []row) {
	name := func(r row) string {
		name := r.Algorithm
		switch {
		case r.MoE != nil:
			name = r.MoE.Layout
			if r.MoE.LowLatency {
				name += ", low latency"
			}
		case r.Collective != "":
			name = r.Collective + ", " + name
		}
		if r.SMs > 0 {
			name += fmt.Sprintf(" on %d", r.SMs)
		}
		if r.Rate > 0 {
			name += fmt.Sprintf(" at %g", r.Rate)
		}
		if r.Staged {
			name += ", staged"
		}
		return name
	}
	fmt.Printf("\ntune, %d ranks, device %s, microseconds", rows[0].Ranks, rows[0].Device)
	var names []string
	for _, r := range rows {
		if !slices.Contains(names, name(r)) {
			names = append(names, name(r))
		}
	}
	for _, n := range names {
		fmt.Printf("\n%-40s", n)
		for _, r := range rows {
			if name(r) == n {
				size := strings.ReplaceAll(human(r.BytesPerRank), " ", "")
				if r.MoE != nil {
					size = fmt.Sprint(r.MoE.Tokens)
				}
				fmt.Printf("  %s %.1f", size, r.US)
			}
		}
	}
	fmt.Println()
}
