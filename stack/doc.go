// Package stack opens the objects that an expert-parallel worker has on a group of ranks, heap, exchanger, reducer, endpoint and
// dispatcher, and opens them again when the group has changed.
//
// A worker makes its stack once:
//
//	s, err := stack.Open(ctx, group, device.Host(), stack.Options{Reducer: &allreduce.Options{}, Dispatcher: &dispatch.Options{...}})
//
// When a rank is lost, every call of the stack returns an error that names it. The survivors shrink the group and go on:
//
//	old := s.Group
//	smaller, err := old.Shrink(ctx)         // or Shrink(ctx, rank), to leave out one that lives but hangs
//	s, err = s.Reopen(ctx, smaller)         // closes the old stack
//	old.Close()
//
// When a new process replaces the lost one, all ranks admit it at a step boundary:
//
//	old = s.Group
//	larger, err := old.Admit(ctx, 1, cfg)   // the newcomer: comm.Join with Config.Late, then stack.Open
//	s, err = s.Reopen(ctx, larger)
//	old.Close()
//
// [Stack.Moves] then lists the experts whose parameters some rank needs, and the ranks that have them.
package stack
