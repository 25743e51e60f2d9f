// Package prom is a collector of client_golang for programs that have a registry of it: a scrape of that registry has Switchyard's metrics too.
//
//	prometheus.MustRegister(prom.New())
//
// The metrics, their labels and their values are those of [observe.WriteMetrics]. A program without client_golang needs no package but observe:
// [observe.Handler], or SWITCHYARD_METRICS. This package is a module of its own, so that those programs do not depend on client_golang.
package prom

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/switchyard-moe/switchyard/observe"
)

// Collector is a prometheus.Collector of the ranks of this process. It is for one registry or several, from any goroutine, also while calls
// hang.
type Collector struct {
	state func() observe.State
}

// New makes a Collector of what observe.Snapshot has at the time of a scrape.
func New() *Collector { return Of(observe.Snapshot) }

// Of makes a Collector of other states, such as what observe.Everybody tells of all processes of this user. It is called once a scrape.
func Of(state func() observe.State) *Collector { return &Collector{state: state} }

// Describe sends nothing: which labels there are depends on what ranks do. A registry takes such a collector as one that it does not check
// beforehand, and checks each scrape.
func (*Collector) Describe(chan<- *prometheus.Desc) {}

// Collect sends the metrics of a state. A sample that client_golang refuses, because a label is no UTF-8, makes the scrape report an error with
// its name, next to all others.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	for _, f := range observe.Families(c.state()) {
		name, kind := f.Name, prometheus.GaugeValue
		if f.Kind == "counter" {
			name, kind = name+"_total", prometheus.CounterValue
		}
		for _, s := range f.Samples {
			to <- metric(name, prometheus.NewDesc(name, f.Help, nil, labels(s.Labels)), kind, s)
		}
	}
}

// labels are those of a sample by name.
func labels(of []string) prometheus.Labels {
	by := make(prometheus.Labels, len(of)/2)
	for i := 0; i < len(of); i += 2 {
		by[of[i]] = of[i+1]
	}
	return by
}

func metric(name string, desc *prometheus.Desc, kind prometheus.ValueType, s observe.Sample) prometheus.Metric {
	var m prometheus.Metric
	var err error
	if h := s.Histogram; h != nil {
		below := make(map[float64]uint64, len(h.Bounds))
		for i, le := range h.Bounds {
			below[le] = h.Below[i]
		}
		m, err = prometheus.NewConstHistogram(desc, h.Count, h.Sum, below)
	} else {
		m, err = prometheus.NewConstMetric(desc, kind, s.Value)
	}
	if err != nil {
		err = fmt.Errorf("prom: metric %s: %w", name, err)
		return prometheus.NewInvalidMetric(prometheus.NewInvalidDesc(err), err)
	}
	return m
}
