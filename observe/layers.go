package observe

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// Layer is where dispatches of a layer have sent tokens: those of one rank, or in a State those of all of its ranks. A token counts once for each
// of its choices.
type Layer struct {
	Job string `json:"job,omitempty"` // in a State
	// Layer is dispatch.Options.Layer. Dispatchers without it are one layer without a name, of which Tokens and Owners are not told.
	Layer string `json:"layer"`
	// Tokens are counted by expert, Owners are the ranks that have each expert now.
	Tokens []uint64 `json:"tokens,omitempty"`
	Owners [][]int  `json:"owners,omitempty"`
	// Routed are the tokens by the rank that had their expert; copies of an expert share them. A dispatcher on a GPU is not in it, nor in
	// Tokens, before Dispatcher.Counters is called, and then as that has found it.
	Routed []float64 `json:"routed,omitempty"`
	// Imbalance is the most of Routed over its mean, 0 where that is not known.
	Imbalance float64 `json:"imbalance"`
	// Overflows counts dispatches that did not fit, by the rank that had no room. All ranks count the same ones; in a State they are those of the
	// rank that has counted most.
	Overflows []uint64 `json:"overflows,omitempty"`
}

func layersOf(all []flight.Layer) (layers []Layer) {
	for _, l := range all {
		if l.Routed == nil && l.Overflows == nil && l.Name == "" {
			continue
		}
		k := Layer{Layer: l.Name, Tokens: l.Tokens, Owners: l.Owners, Routed: l.Routed, Overflows: l.Overflows}
		k.weigh(len(k.Routed))
		layers = append(layers, k)
	}
	slices.SortFunc(layers, func(a, b Layer) int { return cmp.Compare(a.Layer, b.Layer) })
	return layers
}

// weigh computes the imbalance among ranks.
func (l *Layer) weigh(ranks int) {
	var most, total float64
	for _, n := range l.Routed {
		most, total = max(most, n), total+n
	}
	if l.Imbalance = 0; total > 0 {
		l.Imbalance = most / total * float64(ranks)
	}
}

// choicesOf are the choices of all layers, by rank.
func choicesOf(layers []Layer) (all []float64) {
	for i := range layers {
		for p, n := range layers[i].Routed {
			for len(all) <= p {
				all = append(all, 0)
			}
			all[p] += n
		}
	}
	return all
}

// layers are those of all ranks. before is an earlier state of the same ranks, from which they count; nil is their beginning.
func (s *State) layers(before *State) (all []Layer) {
	for i := range s.Ranks {
		r := &s.Ranks[i]
		var was *Rank
		if before != nil {
			was = before.past(r)
		}
		for k := range r.Layers {
			l := &r.Layers[k]
			var old Layer
			if was != nil {
				if at := slices.IndexFunc(was.Layers, func(o Layer) bool { return o.Layer == l.Layer }); at >= 0 {
					old = was.Layers[at]
				}
			}
			at := slices.IndexFunc(all, func(o Layer) bool { return o.Job == r.Job && o.Layer == l.Layer })
			if at < 0 {
				at = len(all)
				all = append(all, Layer{Job: r.Job, Layer: l.Layer})
			}
			all[at].add(l, &old)
		}
	}
	for i := range all {
		l := &all[i]
		l.weigh(s.size(l))
	}
	return all
}

// size is the number of ranks among which the mean of a layer is.
func (s *State) size(l *Layer) int {
	for i := range s.Ranks {
		if s.Ranks[i].Job == l.Job {
			return s.Ranks[i].now()
		}
	}
	return len(l.Routed)
}

// add adds what a rank has counted since it had counted old.
func (l *Layer) add(m, old *Layer) {
	if m.Owners != nil {
		l.Owners = m.Owners
	}
	l.Tokens = plus(l.Tokens, m.Tokens, old.Tokens)
	l.Routed = plus(l.Routed, m.Routed, old.Routed)
	for p, n := range plus(nil, m.Overflows, old.Overflows) {
		for len(l.Overflows) <= p {
			l.Overflows = append(l.Overflows, 0)
		}
		l.Overflows[p] = max(l.Overflows[p], n)
	}
}

// plus adds to a what b has more than was. A rank that counts anew had less.
func plus[N uint64 | float64](a, b, was []N) []N {
	for i, n := range b {
		if i < len(was) && was[i] <= n {
			n -= was[i]
		}
		if i >= len(a) {
			a = append(a, 0)
		}
		a[i] += n
	}
	return a
}

// notes has a line for each layer, and one for each operation, algorithm and reason of calls that went through staging.
func (s State) notes(w io.Writer, several bool) {
	for i := range s.Layers {
		if l := &s.Layers[i]; l.Imbalance > 0 || len(l.Overflows) > 0 {
			if several {
				fmt.Fprintf(w, "job %s: ", s.jobName(l.Job))
			}
			fmt.Fprintln(w, l.words())
		}
	}
	type key struct{ job, operation, algorithm, reason string }
	calls := map[key]uint64{}
	for i := range s.Ranks {
		for _, o := range s.Ranks[i].Operations {
			for reason, n := range o.Staged {
				calls[key{s.Ranks[i].Job, o.Operation, o.Algorithm, reason}] += n
			}
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(calls), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.job, b.job), cmp.Compare(a.operation, b.operation), cmp.Compare(a.algorithm, b.algorithm), cmp.Compare(a.reason, b.reason))
	}) {
		if several {
			fmt.Fprintf(w, "job %s: ", s.jobName(k.job))
		}
		fmt.Fprintf(w, "%d calls of %s (%s) went through staging: %s\n", calls[k], k.operation, k.algorithm, flight.Stagings[k.reason])
	}
}

// busiest is the number of experts that a line names.
const busiest = 3

// words are like "layer 7: rank 2 gets 1.8 times the tokens of the mean rank; most go to experts 5 (31%), 2 (20%) and 0 (12%)".
func (l *Layer) words() string {
	name := "layer " + l.Layer
	if l.Layer == "" {
		name = "dispatches"
	}
	var all []string
	if l.Imbalance > 0 {
		most := slices.Index(l.Routed, slices.Max(l.Routed))
		all = append(all, fmt.Sprintf("rank %d gets %.2f times the tokens of the mean rank", most, l.Imbalance))
	}
	var total uint64
	for _, n := range l.Tokens {
		total += n
	}
	if total > 0 {
		order := make([]int, len(l.Tokens))
		for e := range order {
			order[e] = e
		}
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(l.Tokens[b], l.Tokens[a]) })
		var experts []string
		for _, e := range order[:min(busiest, len(order))] {
			experts = append(experts, fmt.Sprintf("%d (%.0f%%)", e, 100*float64(l.Tokens[e])/float64(total)))
		}
		all = append(all, fmt.Sprintf("of %d experts these get most: %s", len(l.Tokens), strings.Join(experts, ", ")))
	}
	for p, n := range l.Overflows {
		if n > 0 {
			all = append(all, fmt.Sprintf("%d dispatches did not fit on rank %d", n, p))
		}
	}
	return name + ": " + strings.Join(all, "; ")
}
