package otel

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// Export sends the spans and metrics of this process over OTLP by HTTP, until the function that it returns is called, which sends what is left.
// OpenTelemetry's variables say where to and how: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS, OTEL_METRIC_EXPORT_INTERVAL,
// OTEL_SERVICE_NAME and others. Without them it sends to localhost, port 4318, metrics once a minute. A receiver that does not answer is no error
// of Export and holds up no call of a rank, which only puts its span into a queue. ctx bounds Export, and the context of end what it sends.
func Export(ctx context.Context) (end func(context.Context) error, err error) {
	spans, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("otel: export spans: %w", err)
	}
	metrics, err := otlpmetrichttp.New(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("otel: export metrics: %w", err), spans.Shutdown(ctx))
	}
	tracer := sdktrace.NewTracerProvider(sdktrace.WithBatcher(spans))
	meter := metric.NewMeterProvider(metric.WithReader(metric.NewPeriodicReader(metrics, metric.WithProducer(Metrics()))))
	stop := Spans(tracer.Tracer(scope))
	return func(ctx context.Context) error {
		stop()
		if err := errors.Join(tracer.Shutdown(ctx), meter.Shutdown(ctx)); err != nil {
			return fmt.Errorf("otel: end export: %w", err)
		}
		return nil
	}, nil
}
