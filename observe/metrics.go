package observe

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// metric is a family of OpenMetrics.
type metric struct {
	name, kind, unit, help string
	samples                func(r *Rank, add func(suffix string, value float64, labels ...string))
}

func metrics() []metric {
	return []metric{
		{"switchyard_calls", "counter", "", "Calls by operation and algorithm.", perOperation("_total", func(o *Operation) float64 { return float64(o.Calls) })},
		{"switchyard_failed_calls", "counter", "", "Calls that returned an error after they were launched.", perOperation("_total", func(o *Operation) float64 { return float64(o.Failed) })},
		{"switchyard_calls_in_flight", "gauge", "", "Calls on the host that have not ended.", perOperation("", func(o *Operation) float64 { return float64(o.InFlight) })},
		{"switchyard_payload_bytes", "counter", "bytes", "Length of this rank's inputs.", perOperation("_total", func(o *Operation) float64 { return float64(o.PayloadBytes) })},
		{"switchyard_call_duration_seconds", "histogram", "seconds", "Time from the start of a call on the host to its end.", durations},
		{"switchyard_sent_bytes", "counter", "bytes", "Bytes of exchanges to a rank, as their splits say.", perPeer("_total", func(p *Peer) (float64, bool) { return float64(p.SentBytes), true })},
		{"switchyard_received_bytes", "counter", "bytes", "Bytes of exchanges from a rank, as their splits say.", perPeer("_total", func(p *Peer) (float64, bool) { return float64(p.ReceivedBytes), true })},
		{"switchyard_peer_silence_seconds", "gauge", "seconds", "Time since the last sign of life of a rank's process.", perPeer("", func(p *Peer) (float64, bool) { return p.SilentSeconds, p.SilentSeconds >= 0 })},
		{"switchyard_waited_seconds", "counter", "seconds", "Time that calls on the host have waited for a rank.", waited},
		{"switchyard_waiting_seconds", "gauge", "seconds", "How long calls that wait now have waited, by the rank that they wait for.", func(r *Rank, add func(string, float64, ...string)) {
			longest := map[[2]string]float64{}
			var order [][2]string
			for _, w := range r.Waiting {
				key := [2]string{w.Operation, strconv.Itoa(w.For)}
				if _, ok := longest[key]; !ok {
					order = append(order, key)
				}
				longest[key] = max(longest[key], w.Seconds)
			}
			for _, key := range order {
				add("", longest[key], "operation", key[0], "peer", key[1])
			}
		}},
		{"switchyard_heap_reserved_bytes", "gauge", "bytes", "Memory of this rank's segments.", perDevice(func(h *Heap) int64 { return h.ReservedBytes })},
		{"switchyard_heap_used_bytes", "gauge", "bytes", "Memory of segments that is allocated.", perDevice(func(h *Heap) int64 { return h.UsedBytes })},
		{"switchyard_heap_peak_bytes", "gauge", "bytes", "The most that was allocated at a time.", perDevice(func(h *Heap) int64 { return h.PeakBytes })},
		{"switchyard_heap_largest_free_bytes", "gauge", "bytes", "The largest buffer that fits.", perDevice(func(h *Heap) int64 { return h.LargestFreeBytes })},
		{"switchyard_plan_cache_hits", "counter", "", "Exchanges whose splits were in the cache.", counter("plan_cache_hits")},
		{"switchyard_plan_cache_misses", "counter", "", "Exchanges that made a plan.", counter("plan_cache_misses")},
		{"switchyard_faults", "counter", "", "Failures of groups, by kind and by the rank to blame, -1 for none.", func(r *Rank, add func(string, float64, ...string)) {
			for _, f := range r.Faults {
				add("_total", float64(f.Count), "kind", f.Kind, "culprit", strconv.Itoa(f.Culprit))
			}
		}},
		{"switchyard_group_size", "gauge", "", "Ranks of the group that met.", func(r *Rank, add func(string, float64, ...string)) { add("", float64(r.Size)) }},
	}
}

func perOperation(suffix string, value func(o *Operation) float64) func(*Rank, func(string, float64, ...string)) {
	return func(r *Rank, add func(string, float64, ...string)) {
		for i := range r.Operations {
			o := &r.Operations[i]
			add(suffix, value(o), "operation", o.Operation, "algorithm", o.Algorithm)
		}
	}
}

func perPeer(suffix string, value func(p *Peer) (float64, bool)) func(*Rank, func(string, float64, ...string)) {
	return func(r *Rank, add func(string, float64, ...string)) {
		for p := range r.Peers {
			if v, known := value(&r.Peers[p]); known && p != r.Rank {
				add(suffix, v, "peer", strconv.Itoa(p))
			}
		}
	}
}

// perDevice adds up the heaps of a device.
func perDevice(value func(h *Heap) int64) func(*Rank, func(string, float64, ...string)) {
	return func(r *Rank, add func(string, float64, ...string)) {
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
			add("", float64(sums[d]), "device", d)
		}
	}
}

// waited has a sample for every peer of an operation that has waited for one: a rank that nobody waits for counts in a median.
func waited(r *Rank, add func(string, float64, ...string)) {
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
				add("_total", s, "operation", op, "peer", strconv.Itoa(peer))
			}
		}
	}
}

func counter(name string) func(*Rank, func(string, float64, ...string)) {
	return func(r *Rank, add func(string, float64, ...string)) {
		if n, ok := r.Counters[name]; ok {
			add("_total", float64(n))
		}
	}
}

func durations(r *Rank, add func(string, float64, ...string)) {
	for i := range r.Operations {
		o := &r.Operations[i]
		if o.Timed == 0 {
			continue
		}
		var below uint64
		for b, n := range o.Buckets {
			le := "+Inf"
			if b < len(o.Buckets)-1 {
				le = strconv.FormatFloat((flight.Shortest << b).Seconds(), 'g', -1, 64)
			}
			below += n
			add("_bucket", float64(below), "operation", o.Operation, "algorithm", o.Algorithm, "le", le)
		}
		add("_count", float64(o.Timed), "operation", o.Operation, "algorithm", o.Algorithm)
		add("_sum", o.Seconds, "operation", o.Operation, "algorithm", o.Algorithm)
	}
}

var escaped = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

// Format is a text format of metrics.
type Format int

// The formats.
const (
	OpenMetrics    Format = iota // 1.0
	PrometheusText               // 0.0.4, which node_exporter's textfile collector reads
)

// WriteMetrics writes a state. Every sample has the labels rank and host.
func WriteMetrics(w io.Writer, s State, f Format) error {
	var b bytes.Buffer
	head := func(name, kind, unit, help string) {
		switch {
		case f == PrometheusText && kind == "counter":
			name += "_total"
		case f == PrometheusText && kind == "info":
			name, kind = name+"_info", "gauge"
		}
		fmt.Fprintf(&b, "# TYPE %s %s\n", name, kind)
		if unit != "" && f == OpenMetrics {
			fmt.Fprintf(&b, "# UNIT %s %s\n", name, unit)
		}
		fmt.Fprintf(&b, "# HELP %s %s\n", name, help)
	}
	head("switchyard", "info", "", "The version of this process.")
	fmt.Fprintf(&b, "switchyard_info{version=\"%s\"} 1\n", escaped.Replace(s.Version))
	for _, m := range metrics() {
		head(m.name, m.kind, m.unit, m.help)
		for i := range s.Ranks {
			r := &s.Ranks[i]
			m.samples(r, func(suffix string, value float64, labels ...string) {
				fmt.Fprintf(&b, `%s%s{rank="%d",host="%d"`, m.name, suffix, r.Rank, r.Host)
				for i := 0; i < len(labels); i += 2 {
					fmt.Fprintf(&b, `,%s="%s"`, labels[i], escaped.Replace(labels[i+1]))
				}
				fmt.Fprintf(&b, "} %s\n", strconv.FormatFloat(value, 'g', -1, 64))
			})
		}
	}
	if f == OpenMetrics {
		b.WriteString("# EOF\n")
	}
	_, err := w.Write(b.Bytes())
	return err
}

// writeFile replaces a file for node_exporter, which never sees half of it.
func writeFile(path string) error {
	var b bytes.Buffer
	if err := WriteMetrics(&b, Snapshot(), PrometheusText); err != nil {
		return err
	}
	next := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := os.WriteFile(next, b.Bytes(), 0o644); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// fileEvery is the time between two writes of the file of metrics.
const fileEvery = 10 * time.Second
