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

// Page serves a page that shows states once a second, and follows a job that shrinks and grows: waits, traffic, calls, heaps, faults. It is one
// file without a reference to others. A Go server mounts it at a path that ends in a slash, such as
//
//	http.Handle("/ranks/", observe.Page(func(*http.Request) (observe.State, error) { return observe.Snapshot(), nil }))
//
// Requests less than 100 ms apart get the same state. Whoever reaches the page sees the state: what a server shows to whom is for it to say.
func Page(state func(*http.Request) (State, error)) http.Handler {
	var mu sync.Mutex
	var last State
	var asked time.Time
	recent := func(r *http.Request) (State, error) {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(asked) < snapshotEvery {
			return last, nil
		}
		s, err := state(r)
		if err == nil {
			last, asked = s, time.Now()
		}
		return s, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "GET only", http.StatusMethodNotAllowed)
		case strings.HasSuffix(r.URL.Path, "/state"):
			s, err := recent(r)
			if err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(s)
		case strings.HasSuffix(r.URL.Path, "/"):
			h := w.Header()
			h.Set("Content-Type", "text/html; charset=utf-8")
			h.Set("Content-Security-Policy", "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'")
			h.Set("Referrer-Policy", "no-referrer")
			_, _ = w.Write(page)
		default:
			http.NotFound(w, r)
		}
	})
}
