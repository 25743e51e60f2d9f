package main

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"sync"

	"github.com/switchyard-moe/switchyard/observe"
)

// metrics serves what the ranks observe: those of this process, or those of all processes, each asked by its socket. One that does not
// answer is left out.
func (f *front) metrics(w http.ResponseWriter, r *http.Request) {
	if !f.Procs {
		observe.Handler().ServeHTTP(w, r)
		return
	}
	ranks := f.condition().Ranks
	states := make([]observe.State, len(ranks))
	var all sync.WaitGroup
	for i, rank := range ranks {
		all.Go(func() {
			_ = observe.Ask(r.Context(), rank.Process, "/state", func(in io.Reader) error { return json.NewDecoder(in).Decode(&states[i]) })
		})
	}
	all.Wait()
	states = slices.DeleteFunc(states, func(s observe.State) bool { return s.Version == "" })
	w.Header().Set("Content-Type", "application/openmetrics-text; version=1.0.0; charset=utf-8")
	_ = observe.WriteMetrics(w, observe.Merge(states...), observe.OpenMetrics) // a client that has gone wants no answer
}
