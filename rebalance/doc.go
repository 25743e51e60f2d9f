// Package rebalance keeps ranks equally busy. It measures the load of experts over a window of steps, proposes a placement, moves the
// weights of experts to their new ranks by exchanges, and gives the dispatcher the new placement.
//
// All ranks make a [Loop] together, and call [Loop.Step] between two steps of their job:
//
//	l, err := rebalance.New(ctx, heap, d, []memory.View{w1, w2}, rebalance.Options{Window: 500})
//	for step := range steps {
//		... dispatches and combines of the step, whose handles are released
//		change, err := l.Step(ctx, stream)
//		if change.Moved() { the caller's own tables by expert slot follow d.Placement() }
//	}
//
// The placement is that of [dispatch.Balance]: groups of experts stay on a host, and expert slots beyond the number of experts hold copies of
// the busiest, where the dispatcher was made with a placement that has copies. Ranks of a host then change parts, so that as many experts
// as possible stay where they are.
//
// Results do not depend on where an expert is, but for the order in which a combine adds the partial sums of ranks (see package dispatch):
// with two choices a token they have the same bits. Copies of an expert that are trained need the sum of their gradients, which is the
// caller's.
package rebalance
