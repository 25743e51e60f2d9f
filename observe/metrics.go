package observe

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// Family is metrics of one name.
type Family struct {
	// Name is without the ending _total of counters, and Kind is counter, gauge or histogram. Unit is in base units, empty where things are
	// counted.
	Name, Kind, Unit, Help string
	Samples                []Sample
}

// Sample is one metric. Labels are names and values in turn, of which rank and host come first.
type Sample struct {
	Labels []string
	Value  float64
	// Histogram is instead of a value where the family consists of histograms.
	Histogram *Histogram
	// Since is when counters and histograms began to count: Rank.Began.
	Since time.Time
}

// Histogram has in Below how many values were below each of Bounds, and in Count all of them, whose sum is Sum.
type Histogram struct {
	Bounds []float64
	Below  []uint64
	Count  uint64
	Sum    float64
}

// Families are the metrics of a state, also those without a sample.
func Families(s State) []Family {
	info := Family{Name: "switchyard_info", Kind: "gauge", Help: "The version of this process.", Samples: []Sample{{Labels: []string{"version", s.Version}, Value: 1}}}
	all := []Family{info}
	for _, m := range metrics() {
		f := Family{Name: m.name, Kind: m.kind, Unit: m.unit, Help: m.help}
		for i := range s.Ranks {
			r := &s.Ranks[i]
			if r.Passed {
				continue
			}
			of := []string{"rank", r.label(r.Rank), "host", strconv.Itoa(r.Host)}
			if r.GPU != "" {
				of = append(of, "gpu", r.GPU)
			}
			m.samples(r, func(k Sample) {
				k.Since, k.Labels = r.Began, append(of[:len(of):len(of)], k.Labels...)
				f.Samples = append(f.Samples, k)
			})
		}
		all = append(all, f)
	}
	return all
}

// label is a rank of the group that met as metrics name it: a number that stays when the group takes others in.
func (r *Rank) label(rank int) string { return strconv.Itoa(r.seat(rank)) }

// metric is how a family is read from a rank.
type metric struct {
	name, kind, unit, help string
	samples                func(r *Rank, add func(Sample))
}

// number is a sample that is one.
func number(value float64, labels ...string) Sample { return Sample{Labels: labels, Value: value} }

func metrics() []metric {
	return []metric{
		{"switchyard_calls", "counter", "", "Calls by operation and algorithm.", perOperation(func(o *Operation) float64 { return float64(o.Calls) })},
		{"switchyard_failed_calls", "counter", "", "Calls that returned an error after they were launched.", perOperation(func(o *Operation) float64 { return float64(o.Failed) })},
		{"switchyard_calls_in_flight", "gauge", "", "Calls on the host that have not ended.", perOperation(func(o *Operation) float64 { return float64(o.InFlight) })},
		{"switchyard_payload_bytes", "counter", "bytes", "Length of this rank's inputs.", perOperation(func(o *Operation) float64 { return float64(o.PayloadBytes) })},
		{"switchyard_call_duration_seconds", "histogram", "seconds", "Time from the start of a call on the host to its end.", durations},
		{"switchyard_sent_bytes", "counter", "bytes", "Bytes to a rank: of exchanges, as their splits say, and of rows of dispatches.", perPeer(func(p *Peer) float64 { return float64(p.SentBytes) })},
		{"switchyard_received_bytes", "counter", "bytes", "Bytes from a rank: of exchanges, as their splits say, and of rows of dispatches.", perPeer(func(p *Peer) float64 { return float64(p.ReceivedBytes) })},
		{"switchyard_peer_silence_seconds", "gauge", "seconds", "Time since the last sign of life of a rank's process.", func(r *Rank, add func(Sample)) {
			for p := range r.Peers {
				if s := r.Peers[p].SilentSeconds; s >= 0 && p != r.Rank && (r.Members == nil || slices.Contains(r.Members, p)) {
					add(number(s, "peer", r.label(p)))
				}
			}
		}},
		{"switchyard_peer_timeout_seconds", "gauge", "seconds", "The silence after which a rank is lost.", func(r *Rank, add func(Sample)) {
			if r.PeerTimeoutSeconds > 0 {
				add(number(r.PeerTimeoutSeconds))
			}
		}},
		{"switchyard_waited_seconds", "counter", "seconds", "Time that calls on the host have waited for a rank.", waited},
		{"switchyard_waiting_seconds", "gauge", "seconds", "How long calls that wait now have waited, by the rank that they wait for.", func(r *Rank, add func(Sample)) {
			longest := map[[2]string]float64{}
			var order [][2]string
			for _, w := range r.Waiting {
				key := [2]string{w.Operation, r.label(w.For)}
				if _, ok := longest[key]; !ok {
					order = append(order, key)
				}
				longest[key] = max(longest[key], w.Seconds)
			}
			for _, key := range order {
				add(number(longest[key], "operation", key[0], "peer", key[1]))
			}
		}},
		{"switchyard_heap_reserved_bytes", "gauge", "bytes", "Memory of this rank's segments.", perDevice(func(h *Heap) int64 { return h.ReservedBytes })},
		{"switchyard_heap_used_bytes", "gauge", "bytes", "Memory of segments that is allocated.", perDevice(func(h *Heap) int64 { return h.UsedBytes })},
		{"switchyard_heap_free_bytes", "gauge", "bytes", "Memory of segments that is not allocated, in pieces.", perDevice(func(h *Heap) int64 { return h.FreeBytes })},
		{"switchyard_heap_peak_bytes", "gauge", "bytes", "The most that was allocated at a time.", perDevice(func(h *Heap) int64 { return h.PeakBytes })},
		{"switchyard_heap_largest_free_bytes", "gauge", "bytes", "The largest buffer that fits.", perDevice(func(h *Heap) int64 { return h.LargestFreeBytes })},
		{"switchyard_plan_cache_hits", "counter", "", "Exchanges whose splits were in the cache.", counter("plan_cache_hits")},
		{"switchyard_plan_cache_misses", "counter", "", "Exchanges that made a plan.", counter("plan_cache_misses")},
		{"switchyard_faults", "counter", "", "Failures of groups, by kind and by the rank to blame, -1 for none.", func(r *Rank, add func(Sample)) {
			for _, f := range r.Faults {
				add(number(float64(f.Count), "kind", f.Kind, "culprit", strconv.Itoa(f.Culprit)))
			}
		}},
		{"switchyard_fault_detection_seconds", "histogram", "seconds", "Time from the last sign of life of the rank to blame to the report of its fault.", spread(func(r *Rank) []Spread { return r.Detection })},
		{"switchyard_fault_recovery_seconds", "histogram", "seconds", "Time from the report of a fault to the first call that works again.", spread(func(r *Rank) []Spread { return r.Recovery })},
		{"switchyard_fallback_calls", "counter", "", "Calls that one of torch's backends has made in the place of Switchyard.", func(r *Rank, add func(Sample)) {
			for _, f := range r.Fallbacks {
				add(number(float64(f.Calls), "operation", f.Operation, "backend", f.Backend, "reason", f.Reason))
			}
		}},
		{"switchyard_staged_calls", "counter", "", "Calls whose messages went through staging, by reason.", func(r *Rank, add func(Sample)) {
			for _, o := range r.Operations {
				for _, reason := range slices.Sorted(maps.Keys(o.Staged)) {
					add(number(float64(o.Staged[reason]), "operation", o.Operation, "algorithm", o.Algorithm, "reason", reason))
				}
			}
		}},
		{"switchyard_expert_tokens", "counter", "", "Choices of this rank's tokens for an expert, in layers that have a name.", perLayer(func(_ *Rank, l *Layer, add func(float64, ...string)) {
			for e, n := range l.Tokens {
				add(float64(n), "expert", strconv.Itoa(e))
			}
		})},
		{"switchyard_routed_tokens", "counter", "", "Choices of this rank's tokens, by the rank of their expert.", perLayer(func(r *Rank, l *Layer, add func(float64, ...string)) {
			for p, n := range l.Routed {
				add(n, "peer", r.label(p))
			}
		})},
		{"switchyard_imbalance_ratio", "gauge", "", "Tokens of this rank that go to the busiest rank, over those that go to the mean one, since the start.", perLayer(func(_ *Rank, l *Layer, add func(float64, ...string)) {
			if l.Imbalance > 0 {
				add(l.Imbalance)
			}
		})},
		{"switchyard_overflows", "counter", "", "Dispatches that did not fit, by the rank that had no room.", perLayer(func(r *Rank, l *Layer, add func(float64, ...string)) {
			for p, n := range l.Overflows {
				add(float64(n), "peer", r.label(p))
			}
		})},
		{"switchyard_group_size", "gauge", "", "Ranks of the group now.", func(r *Rank, add func(Sample)) { add(number(float64(r.now()))) }},
		{"switchyard_group_epoch", "gauge", "", "How often the group has shrunk or taken ranks in since its ranks met first.", func(r *Rank, add func(Sample)) { add(number(float64(r.Epoch))) }},
	}
}

func perOperation(value func(o *Operation) float64) func(*Rank, func(Sample)) {
	return func(r *Rank, add func(Sample)) {
		for i := range r.Operations {
			o := &r.Operations[i]
			add(number(value(o), "operation", o.Operation, "algorithm", o.Algorithm))
		}
	}
}

func perPeer(value func(p *Peer) float64) func(*Rank, func(Sample)) {
	return func(r *Rank, add func(Sample)) {
		for p := range r.Peers {
			if p != r.Rank {
				add(number(value(&r.Peers[p]), "peer", r.label(p)))
			}
		}
	}
}

// perDevice adds up the heaps of a device.
func perDevice(value func(h *Heap) int64) func(*Rank, func(Sample)) {
	return func(r *Rank, add func(Sample)) {
		sums := map[string]int64{}
		var order []string
		for i := range r.Heaps {
			d := r.Heaps[i].Device
			if _, ok := sums[d]; !ok {
				order = append(order, d)
			}
			sums[d] += value(&r.Heaps[i])
		}
		for _, d := range order {
			add(number(float64(sums[d]), "device", d))
		}
	}
}

// perLayer labels the samples of a layer by its name, if it has one.
func perLayer(samples func(r *Rank, l *Layer, add func(value float64, labels ...string))) func(*Rank, func(Sample)) {
	return func(r *Rank, add func(Sample)) {
		for i := range r.Layers {
			l := &r.Layers[i]
			var of []string
			if l.Layer != "" {
				of = []string{"layer", l.Layer}
			}
			samples(r, l, func(value float64, labels ...string) { add(number(value, append(of[:len(of):len(of)], labels...)...)) })
		}
	}
}

// waited has a sample for every peer of an operation that has waited for one: a rank that nobody waits for counts in a median.
func waited(r *Rank, add func(Sample)) {
	seconds := map[string][]float64{}
	var order []string
	for _, w := range r.Waited {
		if seconds[w.Operation] == nil {
			seconds[w.Operation] = make([]float64, r.Size)
			order = append(order, w.Operation)
		}
		seconds[w.Operation][w.Peer] += w.Seconds
	}
	slices.Sort(order)
	for _, op := range order {
		for peer, s := range seconds[op] {
			if peer != r.Rank {
				add(number(s, "operation", op, "peer", r.label(peer)))
			}
		}
	}
}

func counter(name string) func(*Rank, func(Sample)) {
	return func(r *Rank, add func(Sample)) {
		if n, ok := r.Counters[name]; ok {
			add(number(float64(n)))
		}
	}
}

func durations(r *Rank, add func(Sample)) {
	for i := range r.Operations {
		o := &r.Operations[i]
		if o.Timed == 0 {
			continue
		}
		add(histogram(o.Buckets, flight.Shortest, o.Timed, o.Seconds, "operation", o.Operation, "algorithm", o.Algorithm))
	}
}

func spread(of func(r *Rank) []Spread) func(*Rank, func(Sample)) {
	return func(r *Rank, add func(Sample)) {
		for _, s := range of(r) {
			add(histogram(s.Buckets, flight.SpreadShortest, s.Count, s.Seconds, "kind", s.Kind))
		}
	}
}

// histogram is one whose first bucket ends at shortest, and every other one at twice the end of the one before. The last has all others.
func histogram(buckets []uint64, shortest time.Duration, count uint64, seconds float64, labels ...string) Sample {
	h := &Histogram{Count: count, Sum: seconds}
	var below uint64
	for b, n := range buckets[:max(0, len(buckets)-1)] {
		below += n
		h.Bounds, h.Below = append(h.Bounds, (shortest<<b).Seconds()), append(h.Below, below)
	}
	return Sample{Labels: labels, Histogram: h}
}

var escaped = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

// Format is a text format of metrics.
type Format int

// The formats.
const (
	OpenMetrics    Format = iota // 1.0
	PrometheusText               // 0.0.4, which node_exporter's textfile collector reads
)

// WriteMetrics writes the families of a state.
func WriteMetrics(w io.Writer, s State, f Format) error {
	var b bytes.Buffer
	for _, m := range Families(s) {
		name, kind, suffix := m.Name, m.Kind, ""
		if kind == "counter" {
			suffix = "_total"
		}
		switch {
		case f == PrometheusText:
			name += suffix
		case name == "switchyard_info":
			name, kind = "switchyard", "info"
		}
		fmt.Fprintf(&b, "# TYPE %s %s\n", name, kind)
		if m.Unit != "" && f == OpenMetrics {
			fmt.Fprintf(&b, "# UNIT %s %s\n", name, m.Unit)
		}
		fmt.Fprintf(&b, "# HELP %s %s\n", name, m.Help)
		for _, k := range m.Samples {
			if k.Histogram == nil {
				line(&b, m.Name+suffix, k.Value, k.Labels)
				continue
			}
			for i, le := range k.Histogram.Bounds {
				line(&b, m.Name+"_bucket", float64(k.Histogram.Below[i]), k.Labels, "le", strconv.FormatFloat(le, 'g', -1, 64))
			}
			line(&b, m.Name+"_bucket", float64(k.Histogram.Count), k.Labels, "le", "+Inf")
			line(&b, m.Name+"_count", float64(k.Histogram.Count), k.Labels)
			line(&b, m.Name+"_sum", k.Histogram.Sum, k.Labels)
		}
	}
	if f == OpenMetrics {
		b.WriteString("# EOF\n")
	}
	_, err := w.Write(b.Bytes())
	return err
}

// line writes a sample.
func line(b *bytes.Buffer, name string, value float64, labels []string, more ...string) {
	b.WriteString(name)
	separator := byte('{')
	for _, l := range [2][]string{labels, more} {
		for i := 0; i < len(l); i += 2 {
			b.WriteByte(separator)
			separator = ','
			fmt.Fprintf(b, `%s="%s"`, l[i], escaped.Replace(l[i+1]))
		}
	}
	fmt.Fprintf(b, "} %s\n", strconv.FormatFloat(value, 'g', -1, 64))
}

// writeFile replaces a file for node_exporter, which never sees half of it.
func writeFile(path string) error {
	return whole(path, 0o644, func(w io.Writer) error { return WriteMetrics(w, Snapshot(), PrometheusText) })
}

// fileEvery is the time between two writes of the file of metrics.
const fileEvery = 10 * time.Second
