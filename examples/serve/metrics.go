package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/observe"
)

// observed is what the ranks do: those of this process, or those of all processes of this host, each asked by its socket. One that does not
// answer is named.
func (f *front) observed(ctx context.Context) observe.State {
	if !f.Procs {
		return observe.Snapshot()
	}
	ranks := slices.DeleteFunc(f.condition().Ranks, func(r at) bool { return r.Host > 0 })
	states := make([]observe.State, len(ranks))
	var all sync.WaitGroup
	for i, rank := range ranks {
		all.Go(func() {
			if err := observe.Ask(ctx, rank.Process, "/state", func(in io.Reader) error { return json.NewDecoder(in).Decode(&states[i]) }); err != nil {
				states[i] = observe.State{Version: switchyard.Version, Silent: []observe.Silent{{Pid: rank.Process, Rank: -1, Error: err.Error()}}}
			}
		})
	}
	all.Wait()
	return observe.Merge(slices.Insert(states, 0, observe.State{Version: switchyard.Version, At: time.Now()})...)
}

// metrics serves what the ranks observe.
func (f *front) metrics(w http.ResponseWriter, r *http.Request) {
	if !f.Procs {
		observe.Handler().ServeHTTP(w, r)
		return
	}
	observe.ServeMetrics(w, r, f.observed(r.Context()))
}

// status is the same as a table: who waits for whom, and what is wrong.
func (f *front) status(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	f.observed(r.Context()).Table(w)
}

// page is the same in a browser, once a second.
func (f *front) page() http.Handler {
	return observe.Page(func(r *http.Request) (observe.State, error) { return f.observed(r.Context()), nil })
}
