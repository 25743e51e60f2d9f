package alltoallv

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/curve"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/cuda"
	"github.com/switchyard-moe/switchyard/kernels/host"
)

// gpu is what plans know of a GPU that a rank has for itself.
var gpu = kernels.Traits{Multiprocessors: true, CopyEngines: true}

// pick is what rank 0 of n GPUs chooses for splits.
func pick(t *testing.T, o Options, sp *Splits, inPlace bool) Decision {
	t.Helper()
	n := len(sp.Send)
	c, err := o.complete(n, new(cuda.Engine), device.CUDAKind)
	require.NoError(t, err)
	r, err := newRegistry(&o, 0, n, device.CUDAKind)
	require.NoError(t, err)
	r.traits = gpu
	var p plan
	require.NoError(t, p.build(sp, 0, n))
	k := planner{registry: r, bounds: &c}
	return k.explain(&p, inPlace)
}

func equal(n int, bytes int64, placed bool) *Splits {
	sp := &Splits{}
	for range n {
		sp.Send, sp.Recv = append(sp.Send, bytes/int64(n)), append(sp.Recv, bytes/int64(n))
		if placed {
			sp.PeerDispls = append(sp.PeerDispls, 0)
		}
	}
	return sp
}

func TestDefaultTableIsWellFormed(t *testing.T) {
	table, err := ReadTable(bytes.NewReader(defaultTable))
	require.NoError(t, err)
	require.Equal(t, "cuda", table.Device)
	require.NotEmpty(t, table.Origin)
	world := curve.ForWorld(table.Curves, 8, func(c Curve) int { return c.Ranks })
	for _, want := range []struct {
		algorithm string
		staged    bool
	}{{"packet", false}, {"ring", false}, {"ring", true}, {"copy", false}} {
		points := best(world, want.algorithm, want.staged, 16)
		require.NotEmpty(t, points, "%+v", want)
		for i := 1; i < len(points); i++ {
			require.GreaterOrEqual(t, points[i].US, points[i-1].US, "%+v: more bytes take less time", want)
		}
		last := points[len(points)-1]
		require.Less(t, math.Exp2(last.Size-last.US)/1e3, 400.0, "%+v: GB/s above the link's", want)
	}
}

func TestDefaultTableSelectsSensibly(t *testing.T) {
	const kib, mib = 1 << 10, 1 << 20
	for _, n := range []int{2, 3, 4, 5, 8, 16} {
		for _, staged := range []bool{false, true} {
			var sizes []string
			for bytes := int64(8 * kib); bytes <= 1<<30; bytes *= 2 {
				d := pick(t, Options{}, equal(n, bytes, true), !staged)
				require.LessOrEqual(t, d.SMs, 16)
				packets := int64(512 * kib)
				if n > 4 {
					packets = 255 * kib
				}
				if bytes/int64(n) <= packets {
					require.Equal(t, "packet", d.Algorithm, "%d ranks, %d bytes, staged %v", n, bytes, staged)
					require.Zero(t, d.SMs, "the packet kernel chooses for itself")
				} else {
					require.NotEqual(t, "packet", d.Algorithm)
				}
				if len(sizes) == 0 || sizes[len(sizes)-1] != d.Algorithm {
					sizes = append(sizes, d.Algorithm)
				}
			}
			// Small messages are packets, and what copy engines have taken they keep.
			for i, name := range sizes {
				if name == "packet" || name == "copy" {
					require.NotContains(t, sizes[i+1:], name, "%d ranks, staged %v: %v", n, staged, sizes)
				}
			}
			if staged {
				require.NotContains(t, sizes, "copy")
			} else if n >= 4 {
				require.Equal(t, "copy", sizes[len(sizes)-1], "%d ranks: %v", n, sizes)
			}
		}
		require.NotEqual(t, "copy", pick(t, Options{}, equal(n, 512*mib, false), true).Algorithm, "places are not known")
		d := pick(t, Options{NoSMs: true}, equal(n, 64*mib, true), true)
		require.Equal(t, "copy", d.Algorithm)
		require.Zero(t, d.SMs)
		require.Equal(t, 8, pick(t, Options{Algorithm: "copy"}, equal(n, 64*mib, true), true).SMs, "for what stays on the rank")
		require.Equal(t, 3, pick(t, Options{Algorithm: "copy", MaxSMs: 3}, equal(n, 64*mib, true), true).SMs)
		live := equal(n, 64*kib, false)
		live.wasLive = true
		d = pick(t, Options{}, live, true)
		require.NotContains(t, []string{"copy", "packet"}, d.Algorithm, "the kernel may find anything")
		require.Positive(t, d.SMs)
	}
	few := pick(t, Options{MaxSMs: 4}, equal(8, 256*mib, true), true)
	many := pick(t, Options{}, equal(8, 256*mib, true), true)
	require.Greater(t, estimateOf(t, few, "ring"), 2*estimateOf(t, many, "ring"), "a quarter of the multiprocessors")
	require.InDelta(t, estimateOf(t, few, "copy"), estimateOf(t, many, "copy"), 1e-6)
	require.LessOrEqual(t, pick(t, Options{MaxSMs: 4, Algorithm: "ring"}, equal(8, 256*mib, true), true).SMs, 4)
	require.Regexp(t, `multiprocessors at 3\d\d GB/s \(forced\)`, pick(t, Options{Algorithm: "ring"}, equal(8, 256*mib, true), true).String())
}

func estimateOf(t *testing.T, d Decision, algorithm string) float64 {
	t.Helper()
	for _, c := range d.Candidates {
		if c.Algorithm == algorithm {
			return c.Microseconds
		}
	}
	t.Fatalf("no candidate %q", algorithm)
	return 0
}

func TestTableInterpolates(t *testing.T) {
	curve := func(sms int, bytes []int64, us ...float64) Curve {
		return Curve{Algorithm: "ring", Ranks: 2, SMs: sms, Bytes: bytes, Microseconds: us}
	}
	staged := curve(8, []int64{2}, 1)
	staged.Staged = true
	// Half of the bytes cross the link: 1000 bytes a rank are 500.
	table := &Table{Device: "cuda", Curves: []Curve{staged, curve(8, []int64{1000, 4000, 16000}, 10, 20, 80), curve(16, []int64{1000, 4000, 16000}, 11, 19.9, 40)}}
	require.NoError(t, table.validate())
	ask := func(maxSMs int, link int64) (float64, int) {
		us, sms, ok := (&Traffic{SendTotal: link / 2, RecvTotal: link, InPlace: true, table: table.forWorld(2, maxSMs), log: math.Log2(float64(link))}).Estimate("ring")
		require.True(t, ok)
		return us, sms
	}
	for _, c := range []struct {
		maxSMs int
		link   int64
		us     float64
		sms    int
	}{
		{16, 1, 10, 8},       // below the first
		{16, 500, 10, 8},     // fewer multiprocessors, faster
		{16, 2000, 20, 8},    // half a percent is not worth eight more
		{16, 8000, 40, 16},   // twice as fast
		{16, 1000, 14.14, 8}, // the middle in logarithms
		{16, 80000, 400, 16}, // above the last, the rate stays
		{8, 8000, 80, 8},     // a bound
		{64, 8000, 40, 16},   // no more than measured
		{4, 8000, 160, 4},    // less than measured: slower by as much
	} {
		us, sms := ask(c.maxSMs, c.link)
		require.InDelta(t, c.us, us, 0.01*c.us, "%+v", c)
		require.Equal(t, c.sms, sms, "%+v", c)
	}
	_, _, ok := (&Traffic{InPlace: true, table: table.forWorld(2, 16)}).Estimate("copy")
	require.False(t, ok)
	require.Equal(t, 2, table.forWorld(7, 16).curves[0].ranks, "the largest where none is larger")
}

func TestMoreMultiprocessorsCopyOutOfStagingUnlessThereIsABound(t *testing.T) {
	const mib = 1 << 20
	d := pick(t, Options{}, equal(8, 32*mib, false), false)
	require.Equal(t, []int{16, 16}, []int{d.SMs, d.CopySMs})
	require.Contains(t, d.String(), "output through staging by 16 more multiprocessors")
	require.Equal(t, 16, pick(t, Options{Algorithm: "pipelined"}, equal(8, 32*mib, false), true).CopySMs)
	alone := pick(t, Options{MaxSMs: 16}, equal(4, 128*mib, false), false)
	require.Zero(t, alone.CopySMs)
	require.Equal(t, 355., alone.Rate)
	require.Greater(t, pick(t, Options{}, equal(4, 128*mib, false), false).Rate, alone.Rate)
	require.Zero(t, pick(t, Options{}, equal(8, 8192, false), false).CopySMs, "packets")
}

func TestARingIsHeldToARateWhereTheTableSaysSoAndItsStepsAreEven(t *testing.T) {
	const mib = 1 << 20
	d := pick(t, Options{}, equal(8, 32*mib, false), true)
	require.Equal(t, "ring", d.Algorithm)
	require.InDelta(t, 355, d.Rate, 15)
	require.Contains(t, d.String(), fmt.Sprintf("on 16 multiprocessors at %g GB/s", d.Rate))
	require.Zero(t, pick(t, Options{MaxSMs: 4}, equal(8, 32*mib, false), true).Rate, "so few offer less than that")
	require.Zero(t, d.CopySMs)
	skewed := equal(8, 32*mib, false)
	skewed.Recv[3] *= 2
	require.Zero(t, pick(t, Options{}, skewed, true).Rate)
	require.Zero(t, pick(t, Options{}, equal(8, mib, false), true).Rate, "packets")
}

func TestSkewedCallsAreJudgedByTheBusiestPort(t *testing.T) {
	const mib = 1 << 20
	zipf := func(n int, bytes int64) *Splits { // of rank 0; the last one gets most
		sp := equal(n, 0, true)
		var sum float64
		for k := range n {
			sum += 1 / float64(k+1)
		}
		for k := range n {
			sp.Send[k] = int64(float64(bytes) / sum / float64(n-k))
			sp.Recv[k] = sp.Send[0]
		}
		return sp
	}
	for _, n := range []int{4, 8} {
		for bytes := int64(8 << 10); bytes <= 512<<10; bytes *= 4 {
			require.Equal(t, "packet", pick(t, Options{}, zipf(n, bytes), true).Algorithm, "%d bytes, %d ranks", bytes, n)
		}
		require.Equal(t, "ring", pick(t, Options{}, zipf(n, 32*mib), true).Algorithm, "%d ranks", n)
		require.Equal(t, "copy", pick(t, Options{}, zipf(n, 128*mib), true).Algorithm, "%d ranks", n)
	}
	d := pick(t, Options{}, zipf(4, 128*mib), true)
	require.InDelta(t, 536, estimateOf(t, d, "ring"), 20, "as measured")
	require.InDelta(t, 516, estimateOf(t, d, "copy"), 20, "as measured")
}

func TestTableIsWrittenAndRead(t *testing.T) {
	table, err := ReadTable(bytes.NewReader(defaultTable))
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "table.json")
	f, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, table.Write(f))
	require.NoError(t, f.Close())
	again, err := LoadTable(path)
	require.NoError(t, err)
	require.Equal(t, table, again)
	require.Equal(t, curve.Digest(table), curve.Digest(again))
	again.Curves[0].Microseconds[0]++
	require.NotEqual(t, curve.Digest(table), curve.Digest(again))
	_, err = LoadTable(path + ".none")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestF3_BadTablesAreRefused(t *testing.T) {
	good := `{"algorithm":"pipelined","ranks":2,"staged":true,"sms":8,"bytes":[1,2],"us":[1,2]}`
	for text, says := range map[string]string{
		`{`: "EOF",
		`{"device":"cuda","curves":[],"colour":1}`:                       "colour",
		`{"curves":[` + good + `]}`:                                      `no device`,
		`{"device":"cuda","curves":[]}`:                                  "no curves",
		`{"device":"cuda","curves":[` + good + "," + good + `]}`:         "two curves",
		strings.Replace(wrap(good), `"ranks":2`, `"ranks":1`, 1):         "1 ranks",
		strings.Replace(wrap(good), "pipelined", "fastest", 1):           "fastest",
		strings.Replace(wrap(good), "pipelined", "ring", 1):              "staged false",
		strings.Replace(wrap(good), `"us":[1,2]`, `"us":[1]`, 1):         "2 sizes and 1 times",
		strings.Replace(wrap(good), `"us":[1,2]`, `"us":[1,0]`, 1):       "0 us",
		strings.Replace(wrap(good), `"bytes":[1,2]`, `"bytes":[2,2]`, 1): "2 bytes at place 1",
	} {
		_, err := ReadTable(strings.NewReader(text))
		require.Error(t, err, text)
		require.ErrorContains(t, err, says)
	}
	table, err := ReadTable(strings.NewReader(wrap(good)))
	require.NoError(t, err)
	o := Options{Table: table}
	_, err = o.complete(2, new(host.Engine), device.HostKind)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, `is for device "cuda"`)
}

func wrap(curve string) string { return `{"device":"cuda","curves":[` + curve + `]}` }

func TestHostTakesATable(t *testing.T) {
	table, err := ReadTable(strings.NewReader(`{"device":"host","curves":[
		{"algorithm":"ring","ranks":2,"staged":false,"sms":0,"bytes":[1],"us":[1]},
		{"algorithm":"pipelined","ranks":2,"staged":true,"sms":0,"bytes":[1],"us":[2]}]}`))
	require.NoError(t, err)
	o := Options{Table: table}
	c, err := o.complete(2, new(host.Engine), device.HostKind)
	require.NoError(t, err)
	r, err := newRegistry(&o, 0, 2, device.HostKind)
	require.NoError(t, err)
	p := plan{routes: [2]kernels.Routes{}}
	require.NoError(t, p.build(equal(2, 1<<20, false), 0, 2))
	r.choose(&p, 1, &c, 0)
	require.Equal(t, "ring", p.chosen[1].Algorithm)
	r.choose(&p, 0, &c, 0)
	require.Equal(t, "pipelined", p.chosen[0].Algorithm)
}
