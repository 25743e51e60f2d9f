package observe

import (
	"cmp"
	"slices"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// fallbacks names operations of which torch's backends make calls, why, and on which ranks. Some such calls are no trouble: a program may
// gather an object now and then.
func (f *finder) fallbacks(before *State) {
	calls, ranks := map[Fallback]uint64{}, map[Fallback][]int{} // by fallbacks without a number
	for i := range f.ranks {
		r := &f.ranks[i]
		here, all := map[Fallback]uint64{}, made(r)
		for _, k := range r.Fallbacks {
			n := k.Calls
			k.Calls = 0
			here[k] = n
		}
		if was := f.past(before, r); was != nil {
			all -= made(was)
			for _, k := range was.Fallbacks {
				n := k.Calls
				k.Calls = 0
				here[k] -= n
			}
		}
		for k, n := range here {
			if n > 0 && float64(n) >= awayShare*float64(all) {
				calls[k] += n
				ranks[k] = append(ranks[k], r.Rank)
			}
		}
	}
	var order []Fallback
	for k := range calls {
		order = append(order, k)
	}
	slices.SortFunc(order, func(a, b Fallback) int {
		return cmp.Or(cmp.Compare(calls[b], calls[a]), cmp.Compare(a.Operation, b.Operation), cmp.Compare(a.Backend, b.Backend), cmp.Compare(a.Reason, b.Reason))
	})
	for _, k := range order {
		f.add("fallback", ranks[k], "%s: calls of %s fall back to %s, %d in all: %s", severalRanks(ranks[k]), k.Operation, k.Backend, calls[k], cmp.Or(flight.Reasons[k.Reason], k.Reason))
	}
}

// made is the number of a rank's calls, by any communicator.
func made(r *Rank) (n uint64) {
	for _, o := range r.Operations {
		n += o.Calls
	}
	for _, k := range r.Fallbacks {
		n += k.Calls
	}
	return n
}
