package observe

import (
	_ "embed"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"time"
)

//go:embed page.html
var page []byte

// Page serves a page that shows states once a second, and follows a job that shrinks and grows: who waits for whom, findings, traffic, calls,
// heaps, tokens by expert over time, GPUs and their links, faults. It is one file without a reference to others. A Go server mounts it at a path
// that ends in a slash, such as
//
//	http.Handle("/ranks/", observe.Page(func(*http.Request) (observe.State, error) { return observe.Snapshot(), nil }))
//
// It calls state once at a time; requests less than 100 ms apart get the same one. Findings and layers are those of the last second or two, or of the time since the last
// look. Every client that reaches the page sees the state: the server decides which clients do.
func Page(state func(*http.Request) (State, error)) http.Handler {
	w := &watch{state: state}
	return http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			out.Header().Set("Allow", "GET, HEAD")
			http.Error(out, "GET only", http.StatusMethodNotAllowed)
		case strings.HasSuffix(r.URL.Path, "/state"):
			s, err := w.recent(r)
			if err != nil {
				http.Error(out, err.Error(), http.StatusServiceUnavailable)
				return
			}
			out.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(out).Encode(s)
		case strings.HasSuffix(r.URL.Path, "/"):
			h := out.Header()
			h.Set("Content-Type", "text/html; charset=utf-8")
			h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'self'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'")
			h.Set("Referrer-Policy", "no-referrer")
			_, _ = out.Write(page)
		default:
			http.NotFound(out, r)
		}
	})
}

// changesOver is the least time from which the findings of a page are.
const changesOver = time.Second

// watch is what a page has seen.
type watch struct {
	state func(*http.Request) (State, error)

	mu          sync.Mutex
	asked       time.Time
	last        State // as it is shown
	older, base State // two states at least changesOver apart: the last one is shown since base
}

func (w *watch) recent(r *http.Request) (State, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.asked) < snapshotEvery {
		return w.last, nil
	}
	s, err := w.state(r)
	if err != nil {
		return s, err
	}
	if s.At.Sub(w.older.At) >= changesOver {
		w.base, w.older = w.older, s
	}
	if w.last = s; !w.base.At.IsZero() {
		w.last = s.Since(w.base)
	}
	w.asked = time.Now()
	return w.last, nil
}
