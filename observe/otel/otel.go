// Package otel gives what package observe knows to OpenTelemetry: a span for each call that makes a group or grows a heap, and all metrics, for
// example over OTLP.
//
// A program that has providers of its own passes them:
//
//	defer otel.Spans(provider.Tracer("my job"))()
//	reader := metric.NewPeriodicReader(exporter, metric.WithProducer(otel.Metrics()))
//
// One that has none calls [Export]. This package is a module of its own, so that programs without OpenTelemetry depend on nothing of it.
package otel

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/instrumentation"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/trace"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/observe"
)

// scope is the name under which metrics and, from Export, spans are sent.
const scope = "github.com/switchyard-moe/switchyard"

// Spans makes a span of t for each observe.Event of this process until stop is called: "switchyard join", "switchyard grow", "switchyard shrink"
// and "switchyard admit". It is a child of the span that the context of the call has, begins and ends with the call, and has the call's error.
// Its attributes are switchyard.group, switchyard.size, and as far as they are known switchyard.rank, switchyard.job, switchyard.epoch and
// switchyard.bytes.
func Spans(t trace.Tracer) (stop func()) {
	return observe.OnEvent(func(e observe.Event) {
		of := []attribute.KeyValue{attribute.String("switchyard.group", e.Group), attribute.Int("switchyard.size", e.Size)}
		if e.Rank >= 0 {
			of = append(of, attribute.Int("switchyard.rank", e.Rank))
		}
		if e.Job != "" {
			of = append(of, attribute.String("switchyard.job", e.Job), attribute.Int("switchyard.epoch", e.Epoch))
		}
		if e.Name == "grow" {
			of = append(of, attribute.Int64("switchyard.bytes", e.Bytes))
		}
		_, span := t.Start(e.Context, "switchyard "+e.Name, trace.WithTimestamp(e.Began), trace.WithAttributes(of...))
		if e.Err != nil {
			span.RecordError(e.Err, trace.WithTimestamp(e.Ended))
			span.SetStatus(codes.Error, e.Err.Error())
		}
		span.End(trace.WithTimestamp(e.Ended))
	})
}

// Metrics is a producer of the metrics of observe.Snapshot, for a reader of OpenTelemetry's SDK. They have the names of observe.Families, without
// the ending _total, which exporters to Prometheus add. Labels are attributes; times and bytes have the units s and By. Counters and histograms
// are cumulative. It may be given to several readers.
func Metrics() metric.Producer { return producer{observe.Snapshot} }

// Of is like Metrics for other states, such as what observe.Everybody tells. It is called once for each collection.
func Of(state func() observe.State) metric.Producer { return producer{state} }

type producer struct{ state func() observe.State }

// Produce is called by readers.
func (p producer) Produce(context.Context) ([]metricdata.ScopeMetrics, error) {
	s := p.state()
	all := metricdata.ScopeMetrics{Scope: instrumentation.Scope{Name: scope, Version: switchyard.Version}}
	for _, f := range observe.Families(s) {
		if len(f.Samples) > 0 {
			all.Metrics = append(all.Metrics, metricdata.Metrics{Name: f.Name, Description: f.Help, Unit: units[f.Unit], Data: data(&f, &s)})
		}
	}
	return []metricdata.ScopeMetrics{all}, nil
}

// units are OpenTelemetry's names of units.
var units = map[string]string{"seconds": "s", "bytes": "By"}

func data(f *observe.Family, s *observe.State) metricdata.Aggregation {
	if f.Kind == "histogram" {
		h := metricdata.Histogram[float64]{Temporality: metricdata.CumulativeTemporality}
		for _, k := range f.Samples {
			counts := make([]uint64, len(k.Histogram.Below)+1)
			last := uint64(0)
			for i, below := range k.Histogram.Below {
				counts[i], last = below-last, below
			}
			counts[len(counts)-1] = k.Histogram.Count - last
			h.DataPoints = append(h.DataPoints, metricdata.HistogramDataPoint[float64]{
				Attributes: attributes(k.Labels), StartTime: k.Since, Time: s.At,
				Count: k.Histogram.Count, Sum: k.Histogram.Sum, Bounds: k.Histogram.Bounds, BucketCounts: counts,
			})
		}
		return h
	}
	var points []metricdata.DataPoint[float64]
	for _, k := range f.Samples {
		points = append(points, metricdata.DataPoint[float64]{Attributes: attributes(k.Labels), StartTime: k.Since, Time: s.At, Value: k.Value})
	}
	if f.Kind == "counter" {
		return metricdata.Sum[float64]{DataPoints: points, Temporality: metricdata.CumulativeTemporality, IsMonotonic: true}
	}
	return metricdata.Gauge[float64]{DataPoints: points}
}

func attributes(labels []string) attribute.Set {
	all := make([]attribute.KeyValue, 0, len(labels)/2)
	for i := 0; i < len(labels); i += 2 {
		all = append(all, attribute.String(labels[i], labels[i+1]))
	}
	return attribute.NewSet(all...)
}
