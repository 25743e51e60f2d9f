// Package dispatch carries the tokens of a mixture-of-experts layer to their experts, on whatever rank those are, and
// back.
//
// A [Dispatcher] is made once, by all ranks together, over a symmetric heap. Per layer and step there is then one
// [Dispatcher.Dispatch], whose [Handle] holds the rows that this rank's experts got, sorted by expert, and one
// [Dispatcher.Combine], which sums the experts' rows for every token:
//
//	d, err := dispatch.New(ctx, heap, dispatch.Options{Experts: 8, TopK: 2, Hidden: 1024})
//	h, err := d.Dispatch(nil, x, idx, weights)
//	for i, expert := range h.LocalExperts() {
//		first, n := h.Offsets()[i], h.Counts()[i] // rows of h.Rows()
//	}
//	err = d.Combine(nil, y, h.Rows(), h)
//	h.Release()
//
// For training, [Dispatcher.CombineBackward] and [Dispatcher.DispatchBackward] go the same ways in reverse with the same
// handle, and give the gradients of the rows, the routing weights and the tokens. No token is ever dropped: what does not
// fit is an [OverflowError] on every rank.
//
// # How a token travels
//
// The calls do no host communication and, once warm, allocate nothing. In the first phase of a dispatch every rank tells
// every other in one small message how many rows it has for each expert and where its own output lies in this call. From
// these each rank computes every displacement of all ranks, so in the second phase it puts each token where it belongs,
// straight into the other rank's output, and then signals once. A token with several experts on a rank crosses once; the
// receiver makes the other rows. On the way back, expert ranks say where their rows are, and token ranks read and sum
// them. Package kernels has the details.
//
// # Memory
//
// A handle's output has room for the worst case unless Options say otherwise, and comes from the heap when the Dispatcher
// is made, [Options].Handles of them. Rows given to Combine and the backward calls are best in the symmetric heap too: in
// place in the output, or in buffers of [Dispatcher.MaxRows] rows from Heap.Alloc. Peers then reach them where they are.
// Others are copied to or from staging.
//
// # Experts on several ranks
//
// A [Placement] puts experts on ranks, contiguously by default. It may put an expert on more than one to spread its load.
// Which of them a token goes to depends on its number and its rank only.
package dispatch
