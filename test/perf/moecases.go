package main

import (
	"fmt"
	"regexp"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
)

// moeCase is one dispatcher with what is timed on it.
type moeCase struct {
	moeShape
	o     dispatch.Options
	types string
	calls []string // of dispatch, combine, pair
	modes []string // of graph, eager
	sms   int      // Options.MaxSMs; all of them where it is allSMs
}

const allSMs = -1

var (
	everyCall = []string{"dispatch", "combine", "pair"}
	rowTypes  = []struct {
		name string
		o    dispatch.Options
	}{
		{"fp8 given", dispatch.Options{DType: kernels.Float8E4M3}},
		{"fp8 quantised", dispatch.Options{DType: kernels.BFloat16, Quantize: true}},
		{"bf16", dispatch.Options{DType: kernels.BFloat16}},
	}
)

// bf16 is the place of bfloat16 in rowTypes.
const bf16 = 2

func newMoECase(s moeShape, layout dispatch.Layout, low bool, types int) moeCase {
	o := rowTypes[types].o
	o.Experts, o.TopK, o.Hidden, o.MaxTokens = s.Experts, s.TopK, s.Hidden, s.Tokens
	o.Layout, o.LowLatency, o.CombineDType, o.Handles = layout, low, kernels.BFloat16, 2
	if layout == dispatch.Flat {
		o.Align = 1
	}
	return moeCase{moeShape: s, o: o, types: rowTypes[types].name}
}

// callsPerGraph is how many calls are timed together.
func (c *moeCase) callsPerGraph() int {
	if c.o.LowLatency {
		return callsPerGraph
	}
	return callsPerGraph / 2
}

// casesOf are the cases that a run measures: those whose names match, each with every number of multiprocessors that is asked for.
func casesOf(c config) (cases []moeCase, err error) {
	only, err := regexp.Compile(c.Only)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	table, err := c.dispatchTable()
	if err != nil {
		return nil, err
	}
	known := make(map[string]bool)
	for _, k := range moeCases(c.All) {
		k.o.Table = table
		own := c.EachSMs
		if len(own) == 0 {
			own = []int{k.sms}
		}
		for _, k.sms = range own {
			if name := k.name(); only.MatchString(name) && !known[name] {
				known[name] = true
				cases = append(cases, k)
			}
		}
	}
	return cases, nil
}

// dispatchTable is the table of the flag, nil without.
func (c *config) dispatchTable() (*dispatch.Table, error) {
	if c.Table == "" {
		return nil, nil
	}
	return dispatch.LoadTable(c.Table)
}

// moeCases are the rows of the table; all adds those that vary shapes, skew and multiprocessors.
func moeCases(all bool) (cases []moeCase) {
	many, few := moeShape{Tokens: 4096, Hidden: 7168, Experts: 256, TopK: 8}, moeShape{Tokens: 128, Hidden: 7168, Experts: 256, TopK: 8}
	graph, both := []string{"graph"}, []string{"graph", "eager"}
	add := func(s moeShape, layout dispatch.Layout, sms int, calls, modes []string, low bool, types ...int) {
		for _, i := range types {
			k := newMoECase(s, layout, low, i)
			k.calls, k.modes, k.sms = calls, modes, sms
			cases = append(cases, k)
		}
	}
	for _, layout := range []dispatch.Layout{dispatch.RankPadded, dispatch.TokenMajor} {
		for _, sms := range []int{24, allSMs} {
			add(many, layout, sms, everyCall, graph, false, 0, 1, 2)
		}
	}
	for _, sms := range []int{0, allSMs} {
		add(many, dispatch.Flat, sms, everyCall, graph, false, 0, 1, 2)
	}
	for _, tokens := range []int{128, 16} {
		few.Tokens = tokens
		for _, layout := range []dispatch.Layout{dispatch.RankPadded, dispatch.Slab} {
			add(few, layout, 0, everyCall, both, true, 1)
		}
		add(few, dispatch.RankPadded, 0, everyCall, graph, true, 0, 2)
	}
	if !all {
		return cases
	}
	for _, hidden := range []int{2880, 4096, 5120} {
		s := many
		s.Hidden = hidden
		add(s, dispatch.RankPadded, 24, everyCall, graph, false, 1, 2)
		add(s, dispatch.Flat, 0, []string{"pair"}, graph, false, 1, 2)
	}
	for _, top := range [][2]int{{4, 128}, {2, 8}} {
		s := many
		s.TopK, s.Experts = top[0], top[1]
		add(s, dispatch.RankPadded, 24, everyCall, graph, false, 1, 2)
		add(s, dispatch.Flat, 0, []string{"pair"}, graph, false, 1, 2)
	}
	skewed := many
	skewed.Zipf = true
	for _, layout := range []dispatch.Layout{dispatch.RankPadded, dispatch.TokenMajor, dispatch.Flat} {
		add(skewed, layout, 0, everyCall, graph, false, 1, 2)
	}
	for _, skew := range []struct {
		maxVio float64
		spares int
	}{{.2, 0}, {1, 0}, {4, 0}, {.2, 16}, {1, 16}, {4, 16}} {
		s := many
		s.MaxVio, s.Spares = skew.maxVio, skew.spares
		for _, layout := range []dispatch.Layout{dispatch.RankPadded, dispatch.Flat} {
			add(s, layout, 0, []string{"pair"}, graph, false, 1, 2)
		}
	}
	for _, sms := range []int{8, 16, 32, 48, 64, 96} {
		add(many, dispatch.RankPadded, sms, everyCall, graph, false, 0, 1, 2)
		add(many, dispatch.Flat, sms, []string{"pair"}, graph, false, 1, 2)
	}
	for _, tokens := range []int{1024, 2048, 8192} {
		s := many
		s.Tokens = tokens
		add(s, dispatch.RankPadded, 24, everyCall, graph, false, 1, 2)
	}
	for _, tokens := range []int{1, 8, 32, 64, 256, 512, 1024} {
		few.Tokens = tokens
		add(few, dispatch.RankPadded, 0, everyCall, graph, true, 1)
		add(few, dispatch.Slab, 0, everyCall, graph, true, 1)
	}
	return cases
}

// name is what -only looks at.
func (c *moeCase) name() string {
	how := "throughput"
	if c.o.LowLatency {
		how = "low latency"
	}
	return fmt.Sprintf("%s, %s, %v, %d tokens, hidden %d, %s, %s", how, c.types, c.o.Layout, c.Tokens, c.Hidden, c.routing(), c.multiprocessors())
}

func (c *moeCase) routing() string {
	kind := "uniform"
	switch {
	case c.Zipf:
		kind = "zipf"
	case c.MaxVio > 0:
		kind = fmt.Sprintf("lognormal %g", c.MaxVio)
	}
	if c.Spares > 0 {
		kind += fmt.Sprintf(", %d copies", c.Spares)
	}
	return fmt.Sprintf("top-%d of %d %s", c.TopK, c.Experts, kind)
}

func (c *moeCase) multiprocessors() string {
	switch c.sms {
	case 0:
		return "default SMs"
	case allSMs:
		return "all SMs"
	}
	return fmt.Sprintf("%d SMs", c.sms)
}
