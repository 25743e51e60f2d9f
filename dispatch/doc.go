// Package dispatch carries the tokens of a mixture-of-experts layer to their experts, on whatever rank those are, and
// back.
//
// A [Dispatcher] is made once, by all ranks together, over a symmetric heap. Per layer and step there is then one
// [Dispatcher.Dispatch], whose [Handle] holds the rows that this rank's experts got, and one
// [Dispatcher.Combine], which sums the experts' rows for every token:
//
//	d, err := dispatch.New(ctx, heap, dispatch.Options{Experts: 8, TopK: 2, Hidden: 1024})
//	h, err := d.Dispatch(stream, dispatch.Tokens{X: x, Experts: experts, Weights: weights})
//	grouped matrix products of h.Rows(), with h.Counts() and h.Offsets()
//	err = d.Combine(stream, y, h.Rows(), h, dispatch.CombineOptions{})
//	h.Release()
//
// Everything is a [memory.View] on the heap's device: the device needs nothing of the host, so calls can be captured in a graph
// and replayed with other tokens. A host that wants to know how many rows came asks [Handle.HostCounts].
//
// For training, [Dispatcher.CombineBackward] and [Dispatcher.DispatchBackward] go the same ways in reverse with the same
// handle, and give the gradients of the rows, the routing weights and the tokens. [Dispatcher.Redispatch] sends other rows the same
// ways. No token is ever dropped: what does not fit is an [OverflowError] on every rank.
//
// # Layouts
//
// Options.Layout says how the rows lie that a rank gets. A token that chose several experts of a rank crosses to it once in all
// of them. In the expert-major layouts ([Flat], [Padded], [Slab]) it then becomes one row for each choice; an expert that was
// chosen twice gets it twice. In the token-major ones ([TokenMajor], [RankPadded]) it stays one row, with [Handle.Indices] and
// [Handle.Weights] beside it; the caller applies the experts and hands back one row a token.
//
// The order of rows follows from the routing alone: by the rank they come from, then by token, then by choice. [Handle.Sources]
// says where each came from.
//
// # Types
//
// Tokens are float32, bfloat16 or float16, or float8 (e4m3) with scales. Scales are given beside the tokens or made by
// Options.Quantize, for each 128 elements or for a whole row, as float32 or as powers of two. The rule: with a the largest
// magnitude of the block, at least 1e-4, the scale is a/448, and an element becomes x*(448/a), every step rounded to float32,
// then rounded to nearest even. As a power of two the scale is the least that is not below a/448, and an element becomes
// x/scale. A NaN or an infinity makes its whole block NaN.
//
// # Sums
//
// The sums of Combine and DispatchBackward have the same bits in every run and on every device:
//
//   - On the rank of the experts, p = 0 + w1*row1 + w2*row2 + ... in float32, over the token's choices there in ascending
//     order. Every product and every sum is rounded on its own. p is rounded to Options.CombineDType, which is what crosses.
//     (For one's own rank, too. With Options.Float8Combine p is quantized instead, by the rule above with float32 scales for
//     each 128 elements.)
//   - On the rank of the token, y = 0 + p0 + p1 + ... in float32, over the ranks in ascending order, then the biases; rounded
//     once.
//
// In token-major layouts the caller's row is p. Gradients of weights are inner products in float32, in the order that
// kernels.DotChains states.
//
// # Halves and overlap
//
// DispatchSend and DispatchReceive are the halves of Dispatch, CombineSend and CombineReceive those of Combine. Compute may run
// between them, and calls with other handles: two micro-batches can take turns. On the host device the first half of any call
// waits until all ranks have begun it.
//
// Inside a layer, [Handle.Landed] says how many rows of each expert are there, so that a kernel can begin with the experts that
// are complete; and CombineOptions.Ready lets rows go back as a kernel makes them. Both are 32-bit counters that are added to
// with release semantics after the rows they count, and read with acquire semantics before them; on a GPU at system scope,
// since peers take part.
//
// # How a token travels on the host device
//
// Calls do no host communication and, once warm, allocate nothing. First every rank tells
// every other in one small message how many rows it has for each expert and where its own output lies in this call. From
// these each rank computes every displacement of all ranks, so it puts each token where it belongs,
// straight into the other rank's output, and then signals once; the
// receiver makes the token's other rows. On the way back, expert ranks say where their rows are, and token ranks read and sum
// them. Package kernels has the description that all engines read.
//
// # How a token travels on a GPU
//
// Each call is a few kernels on the caller's stream. The host waits for nothing, so calls can be captured in a CUDA graph; the routing is
// read when the graph runs. Nothing is compared on the host either: a choice that is no expert, or rows that do not fit, is found by
// the kernels, which then move nothing. The error comes from the next call, or from [Dispatcher.Fault] once the stream has run.
// [Handle.HostCounts] gives the counts without a wait for the stream's later work.
//
// A token crosses once to a rank. In token-major layouts it lands in the output; by expert it lands in staging, and a
// pass over the rank's own memory makes its rows. Options.LowLatency takes kernels for few tokens.
//
// [New] refuses rows that are no multiple of 16 bytes on GPUs. Before each dispatch all ranks have released the
// same handles, in whatever order.
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
// Which of them a token goes to depends on its number and its rank only. [Balance] proposes a placement from the load that
// [Dispatcher.Counters] has counted, and [Dispatcher.SetPlacement] applies it.
package dispatch
