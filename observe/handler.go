package observe

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"time"
)

// Handler serves GET and HEAD: the metrics at any path, the [State] as JSON at paths that end in /state, and a [Dump] at those that end in
// /dump. Requests less than 100 ms apart get the same snapshot, and those for dumps less than 500 ms apart wait for one that they share.
func Handler() http.Handler {
	h := &handler{dumps: dumps{pace: newPace(dumpEvery)}}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "GET only", http.StatusMethodNotAllowed)
			return
		}
		format, kind := accepted(r)
		answer := func(s State, b *bytes.Buffer) error { return WriteMetrics(b, s, format) }
		switch {
		case strings.HasSuffix(r.URL.Path, "/state"):
			kind, answer = "application/json", func(s State, b *bytes.Buffer) error { return json.NewEncoder(b).Encode(s) }
		case strings.HasSuffix(r.URL.Path, "/dump"):
			w.Header().Set("Content-Type", "application/jsonl")
			_, _ = w.Write(h.dumps.get(r.Context()))
			return
		}
		w.Header().Set("Content-Type", kind)
		_, _ = w.Write(h.get(kind, answer))
	})
}

// accepted is the format of metrics that a request accepts, and its type.
func accepted(r *http.Request) (f Format, kind string) {
	if strings.Contains(r.Header.Get("Accept"), "application/openmetrics-text") {
		return OpenMetrics, "application/openmetrics-text; version=1.0.0; charset=utf-8"
	}
	return PrometheusText, "text/plain; version=0.0.4; charset=utf-8"
}

// ServeMetrics answers a request with the metrics of a state, in the format that the request accepts, as [Handler] does with those of this
// process.
func ServeMetrics(w http.ResponseWriter, r *http.Request, s State) {
	format, kind := accepted(r)
	w.Header().Set("Content-Type", kind)
	_ = WriteMetrics(w, s, format) // a client that has gone wants no answer
}

// handler keeps the last snapshot and what was made of it, by type.
type handler struct {
	mu    sync.Mutex
	state State
	made  map[string][]byte
	dumps dumps
}

func (h *handler) get(kind string, make func(s State, b *bytes.Buffer) error) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(h.state.At) > snapshotEvery {
		h.state, h.made = Snapshot(), map[string][]byte{}
	}
	if h.made[kind] == nil {
		var b bytes.Buffer
		_ = make(h.state, &b) // a buffer takes all
		h.made[kind] = b.Bytes()
	}
	return h.made[kind]
}

// dumps are made for all that wait for one.
type dumps struct {
	pace *pace
	last []byte // made at pace.last

	mu      sync.Mutex
	waiting int
}

// get is a dump that was begun after it was asked for, or nothing for a client that has gone.
func (d *dumps) get(ctx context.Context) []byte {
	asked := time.Now()
	d.count(1)
	defer d.count(-1)
	select {
	case d.pace.turn <- struct{}{}:
	case <-ctx.Done():
		return nil
	}
	defer d.pace.end()
	if d.last != nil && d.pace.last.After(asked) {
		return d.last
	}
	if !d.pace.pause(ctx) {
		return nil
	}
	var b bytes.Buffer
	_ = Dump(&b) // a buffer takes all
	d.last = b.Bytes()
	return d.last
}

// count counts those who wait. The last one lets go of the dump.
func (d *dumps) count(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waiting += n; d.waiting == 0 {
		d.last = nil
	}
}
