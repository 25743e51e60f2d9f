// Package dispatch carries the tokens of a mixture-of-experts layer to their experts, on whatever rank those are, and
// back.
//
// All ranks make a [Dispatcher] together, once, over a symmetric heap. In each layer and step they call [Dispatcher.Dispatch], whose
// [Handle] holds the rows that this rank's experts got, and [Dispatcher.Combine], which sums the experts' rows for every token:
//
//	d, err := dispatch.New(ctx, heap, dispatch.Options{Experts: 8, TopK: 2, Hidden: 1024})
//	h, err := d.Dispatch(stream, dispatch.Tokens{X: x, Experts: experts, Weights: weights})
//	grouped matrix products of h.Rows(), with h.Counts() and h.Offsets()
//	err = d.Combine(stream, y, h.Rows(), h, dispatch.CombineOptions{})
//	h.Release()
//
// All arguments are a [memory.View] on the heap's device, which needs no values from the host. So calls can be captured in a graph and
// replayed with other tokens. [Handle.HostCounts] tells the host how many rows came.
//
// For training, [Dispatcher.CombineBackward] and [Dispatcher.DispatchBackward] follow the routes of the handle in reverse, and give
// the gradients of the rows, the routing weights and the tokens. [Dispatcher.Redispatch] sends new rows along the same routes. A
// dispatch drops no token: if rows do not fit, every rank gets an [OverflowError].
//
// # Layouts
//
// Options.Layout is the order of the rows that a rank gets. In all layouts a token that chose several experts of a rank crosses to it
// once. In the expert-major ones ([Flat], [Padded], [Slab]) it then becomes one row for each choice; an expert that was chosen
// twice gets it twice. In the token-major ones ([TokenMajor], [RankPadded]) it stays one row, described by [Handle.Indices] and
// [Handle.Weights]; the caller applies the experts and returns one row a token.
//
// The order of rows follows from the routing alone: by the rank they come from, then by token, then by choice. [Handle.Sources]
// has the origin of each row.
//
// # Types
//
// Tokens are float32, bfloat16 or float16, or float8 (e4m3) with scales. The caller gives scales with the tokens, or Options.Quantize
// makes them, for each 128 elements or for a whole row, as float32 or as powers of two. The rule: with a the largest
// magnitude of the block, at least 1e-4, the scale is a/448, and an element becomes x*(448/a), every step rounded to float32,
// then rounded to nearest even. As a power of two the scale is the least that is not below a/448, and an element becomes
// x/scale. A NaN or an infinity makes its whole block NaN.
//
// # Sums
//
// The sums of Combine and DispatchBackward have the same bits in every run and on every device:
//
//   - On the rank of the experts, p = 0 + w1*row1 + w2*row2 + ... in float32, over the token's choices there in ascending
//     order. Every product and every sum is rounded on its own. p is rounded to Options.CombineDType and crosses so.
//     (This holds on the token's own rank too. With Options.Float8Combine p is quantized instead, by the rule above with float32 scales for
//     each 128 elements.)
//   - On the rank of the token, y = 0 + biases + p0 + p1 + ... in float32, over the ranks in ascending order; rounded
//     once. On several hosts there is a sum for each host first, over its ranks, which is rounded or quantized as p is; y is
//     the sum of these, over the hosts in ascending order.
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
// Inside a layer, [Handle.Landed] counts the rows of each expert that have arrived, so a kernel can begin with the experts that are
// complete; with CombineOptions.Ready rows go back while a kernel makes them. Both are 32-bit counters. A writer adds to them with
// release semantics after the rows, and a reader reads them with acquire semantics before the rows; on a GPU at system scope,
// since peers take part.
//
// # How a token travels on the host device
//
// Calls talk to no socket and, once warm, allocate nothing. Every rank first tells every other in one small message how many rows it
// has for each expert and where its own output lies in this call. From these messages each rank computes every displacement of
// all ranks. So it writes each token straight into the other rank's output, and then signals once; the receiver makes the token's
// other rows. On the way back, expert ranks say where their rows are, and token ranks read and sum them. Package kernels has the
// description that all engines read.
//
// # How a token travels on a GPU
//
// Each call is at most four kernels on the caller's stream. The host does not wait, so calls can be captured in a CUDA graph, which reads the
// routing when it runs. The host compares nothing either: the kernels find a choice that is no expert, or rows that do not fit. The
// outputs of that call are then undefined, and the next call returns the error, or [Dispatcher.Fault] once the stream has run.
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
// New takes the outputs of [Options].Handles handles from the heap, each with room for the worst case unless Options bound it. Rows
// for Combine and the backward calls are best in the symmetric heap too: in the output itself, or in buffers of
// [Dispatcher.MaxRows] rows from Heap.Alloc. Peers then reach them in place; others are copied to or from staging.
//
// Dispatchers of several shapes can have that memory in common, as much as the largest of them wants: see [Shared].
//
// # Routings without outputs
//
// [Handle.Keep] copies the routing of a dispatch to memory of the caller, of [Dispatcher.RoutingBytes]. The [Routing] needs no output, so the
// handle can be released. [Dispatcher.Route] returns a handle that goes by it, for combines, gradients, or other rows of the same
// tokens, which come into an output of their own. Any number of routings can be alive, and a rank drops one whenever it likes: only
// handles, between Route or Dispatch and Release, are taken and given back by all ranks alike.
//
// [Handle.CopyTo] copies the rows and what lies next to them too, to memory of any size, with one launch. Then nothing is left in the handle that
// the caller needs.
//
// # Experts on several ranks
//
// A [Placement] puts experts on ranks, contiguously by default. It may put an expert on several ranks to spread its load. The
// number and the rank of a token decide which copy it goes to. [Balance] proposes a placement from the load that
// [Dispatcher.Counters] has counted, and [Dispatcher.SetPlacement] applies it.
package dispatch
