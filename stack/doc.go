// Package stack opens what an expert-parallel worker has on a group of ranks, heap, exchanger, reducer and dispatcher, and opens it
// again when the group has changed.
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
// When a process has been started in the place of the one that was lost, all let it in at a step boundary:
//
//	old = s.Group
//	larger, err := old.Admit(ctx, 1, cfg)   // the newcomer: comm.Join with Config.Late, then stack.Open
//	s, err = s.Reopen(ctx, larger)
//	old.Close()
//
// [Stack.Moves] then says which experts' parameters have to be sent to whom, and which are lost.
package stack
