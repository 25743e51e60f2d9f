package otel_test

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	collectormetrics "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	collectortrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	metrics "go.opentelemetry.io/proto/otlp/metrics/v1"
	"google.golang.org/protobuf/proto"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
	"github.com/switchyard-moe/switchyard/observe/otel"
)

// pair runs two ranks, which join at a socket, grow their heaps and make 3 exchanges of 8 bytes. then runs on each before it ends.
func pair(t *testing.T, ctx context.Context, then func(g *comm.Group)) {
	addr := "@switchyard-otel-" + strings.ReplaceAll(t.Name(), "/", "-")
	var all sync.WaitGroup
	failed := make(chan error, 2)
	for rank := range 2 {
		all.Go(func() {
			failed <- func() error {
				g, err := comm.Join(ctx, comm.Config{Rank: rank, Size: 2, Addr: addr, Name: "pair"})
				if err != nil {
					return err
				}
				defer g.Close()
				h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: 1 << 20})
				if err != nil {
					return err
				}
				x, err := alltoallv.New(ctx, h, alltoallv.Options{})
				if err != nil {
					return err
				}
				splits := &alltoallv.Splits{Send: []int64{8, 8}, Recv: []int64{8, 8}}
				for range 3 {
					if err := x.Exchange(nil, memory.Host(make([]byte, 16)), memory.Host(make([]byte, 16)), splits); err != nil {
						return err
					}
				}
				if err := h.Grow(ctx, 1<<30); err != nil {
					return err
				}
				if err := h.Grow(ctx, -1); !errors.Is(err, memory.ErrInvalid) {
					return err
				}
				if err := g.Barrier(ctx); err != nil {
					return err
				}
				then(g)
				if err := g.Barrier(ctx); err != nil {
					return err
				}
				return errors.Join(x.Close(ctx), h.Close(ctx))
			}()
		})
	}
	all.Wait()
	close(failed)
	for err := range failed {
		require.NoError(t, err)
	}
}

// A join and a growth are spans with the caller's span as parent; a growth that failed has its error.
func TestSpansOfCalls(t *testing.T) {
	seen := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(seen))
	tracer := provider.Tracer("test")
	stop := otel.Spans(tracer)
	ctx, parent := tracer.Start(t.Context(), "step")
	pair(t, ctx, func(*comm.Group) {})
	parent.End()
	stop()
	pair(t, ctx, func(*comm.Group) {}) // which nobody hears of
	by := map[string][]tracetest.SpanStub{}
	for _, s := range seen.GetSpans() {
		by[s.Name] = append(by[s.Name], s)
	}
	require.Len(t, by, 3)
	require.Len(t, by["step"], 1)
	require.Len(t, by["switchyard join"], 2)
	require.Len(t, by["switchyard grow"], 6, "also where New of an Exchanger grows the heap")
	failed := 0
	ranks := map[int64]bool{}
	for _, s := range append(by["switchyard join"], by["switchyard grow"]...) {
		require.Equal(t, by["step"][0].SpanContext.SpanID(), s.Parent.SpanID())
		require.False(t, s.EndTime.Before(s.StartTime))
		of := attribute.NewSet(s.Attributes...)
		group, _ := of.Value("switchyard.group")
		size, _ := of.Value("switchyard.size")
		rank, _ := of.Value("switchyard.rank")
		job, _ := of.Value("switchyard.job")
		require.Equal(t, []any{"pair", int64(2)}, []any{group.AsString(), size.AsInt64()})
		require.Len(t, job.AsString(), 16)
		ranks[rank.AsInt64()] = true
		if bytes, ok := of.Value("switchyard.bytes"); ok && bytes.AsInt64() < 0 {
			failed++
			require.Equal(t, codes.Error, s.Status.Code)
			require.Contains(t, s.Status.Description, "not a size")
			require.Len(t, s.Events, 1)
		} else {
			require.Equal(t, codes.Unset, s.Status.Code)
		}
	}
	require.Equal(t, 2, failed)
	require.Equal(t, map[int64]bool{0: true, 1: true}, ranks)
}

// All families of observe come through the SDK, with kinds, units, and the buckets of histograms apart.
func TestMetricsThroughTheSDK(t *testing.T) {
	reader := metric.NewManualReader(metric.WithProducer(otel.Metrics()))
	_ = metric.NewMeterProvider(metric.WithReader(reader))
	var once sync.Once
	pair(t, t.Context(), func(g *comm.Group) {
		if g.Rank() != 0 {
			return
		}
		once.Do(func() {
			var all metricdata.ResourceMetrics
			if err := reader.Collect(t.Context(), &all); err != nil {
				t.Error(err)
				return
			}
			check(t, &all)
		})
	})
}

func check(t *testing.T, all *metricdata.ResourceMetrics) {
	by := map[string]metricdata.Metrics{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			by[m.Name] = m
		}
	}
	for _, f := range observe.Families(observe.Snapshot()) {
		if _, ok := by[f.Name]; !ok && len(f.Samples) > 0 {
			t.Errorf("%s is missing", f.Name)
		}
	}
	calls, ok := by["switchyard_calls"].Data.(metricdata.Sum[float64])
	if !ok || !calls.IsMonotonic || calls.Temporality != metricdata.CumulativeTemporality || len(calls.DataPoints) != 2 {
		t.Fatalf("calls are %+v", by["switchyard_calls"].Data)
	}
	for _, p := range calls.DataPoints {
		if op, _ := p.Attributes.Value("operation"); op.AsString() != "alltoallv" || p.Value != 3 || p.StartTime.IsZero() || p.Time.Before(p.StartTime) {
			t.Errorf("a point of calls is %+v", p)
		}
	}
	if by["switchyard_sent_bytes"].Unit != "By" || by["switchyard_waited_seconds"].Unit != "" && by["switchyard_waited_seconds"].Unit != "s" {
		t.Errorf("units are %q and %q", by["switchyard_sent_bytes"].Unit, by["switchyard_waited_seconds"].Unit)
	}
	took, ok := by["switchyard_call_duration_seconds"].Data.(metricdata.Histogram[float64])
	if !ok || len(took.DataPoints) != 2 {
		t.Fatalf("durations are %+v", by["switchyard_call_duration_seconds"].Data)
	}
	for _, p := range took.DataPoints {
		sum := uint64(0)
		for _, n := range p.BucketCounts {
			sum += n
		}
		if sum != 3 || p.Count != 3 || len(p.BucketCounts) != len(p.Bounds)+1 || p.Sum <= 0 {
			t.Errorf("a histogram is %+v", p)
		}
	}
	if _, ok := by["switchyard_heap_used_bytes"].Data.(metricdata.Gauge[float64]); !ok {
		t.Errorf("memory is %+v", by["switchyard_heap_used_bytes"].Data)
	}
}

// receiver is an OTLP receiver that keeps what it gets.
type receiver struct {
	mu      sync.Mutex
	spans   map[string]int
	metrics map[string]*metrics.Metric
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	in := io.Reader(req.Body)
	if req.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(in)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		in = z
	}
	b, err := io.ReadAll(in)
	var spans collectortrace.ExportTraceServiceRequest
	var points collectormetrics.ExportMetricsServiceRequest
	switch {
	case err != nil:
	case req.URL.Path == "/v1/traces":
		err = proto.Unmarshal(b, &spans)
	case req.URL.Path == "/v1/metrics":
		err = proto.Unmarshal(b, &points)
	default:
		err = errors.New(req.URL.Path)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rs := range spans.GetResourceSpans() {
		for _, ss := range rs.GetScopeSpans() {
			for _, s := range ss.GetSpans() {
				r.spans[s.GetName()]++
			}
		}
	}
	for _, rm := range points.GetResourceMetrics() {
		for _, sm := range rm.GetScopeMetrics() {
			for _, m := range sm.GetMetrics() {
				r.metrics[m.GetName()] = m
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// Export reaches a receiver of OTLP that the environment names, and sends what is left when it ends.
func TestExportOverOTLP(t *testing.T) {
	r := &receiver{spans: map[string]int{}, metrics: map[string]*metrics.Metric{}}
	server := httptest.NewServer(r)
	defer server.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.URL)
	end, err := otel.Export(t.Context())
	require.NoError(t, err)
	var once sync.Once
	pair(t, t.Context(), func(g *comm.Group) {
		if g.Rank() == 0 {
			once.Do(func() { err = end(t.Context()) }) // while ranks are there
		}
	})
	require.NoError(t, err)
	r.mu.Lock()
	defer r.mu.Unlock()
	require.Equal(t, map[string]int{"switchyard join": 2, "switchyard grow": 6}, r.spans)
	sum := r.metrics["switchyard_calls"].GetSum()
	require.True(t, sum.GetIsMonotonic())
	require.Len(t, sum.GetDataPoints(), 2)
	require.Equal(t, 3.0, sum.GetDataPoints()[0].GetAsDouble())
	require.Len(t, r.metrics["switchyard_call_duration_seconds"].GetHistogram().GetDataPoints(), 2)
}

// A receiver that is not there is no error of a rank's calls, and the end of an export has its context's bound.
func TestAReceiverThatIsNotThere(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	end, err := otel.Export(t.Context())
	require.NoError(t, err)
	pair(t, t.Context(), func(*comm.Group) {})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorContains(t, end(ctx), "otel: end export: ")
}
