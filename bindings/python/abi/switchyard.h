// The C ABI of Switchyard. The comments of the functions are in the Go files of this folder.
#ifndef SWITCHYARD_H
#define SWITCHYARD_H

#include <stdint.h>

// An error's text and the rank it is about belong to the thread that made the failing call, until its next one fails.
const char *switchyard_last_error(void);
int32_t switchyard_last_error_rank(void);

// core.Detail of that error.
struct switchyard_detail {
	int64_t Earlier, Rank, Token, Choice, Expert;
};
void switchyard_last_error_detail(struct switchyard_detail *out);

// What several tensors hold together: the handle of a dispatch, which is released when the last of its
// users has gone. It begins with the handle, and is NULL where there is no memory for it. Its first user is who calls
// switchyard_hold, until switchyard_unhold.
void *switchyard_hold(uint64_t handle);
void switchyard_share(void *hold); // by one user more
void switchyard_unhold(void *hold);

// Fresh memory of the host is about to be written, all of it. The system hands out what is large in large pages then,
// if it does so where it is asked: torch gets results of 32 MiB and more anew each time, and pages of 4 KiB take longer
// than what is written to them.
void switchyard_large(uint64_t addr, int64_t bytes);

// Calls of tensors as operators of torch: switchyard::all_to_all, dispatch_rows, combine_rows, and the last two with
// weights, dispatch_weighted and combine_weighted; deliver_rows is a dispatch whose results are copied. The first call
// registers them, and any call returns the name of what torch has not, NULL where nothing is missing. They go by the
// structures below, whose address each gets, and which live as long as there are calls. They answer what the functions
// do that they call; AGAIN has the ticket in the higher bits, and 255 says that their arguments are not as usual, and
// that nothing was done.
const char *switchyard_operators(void);

// How operators number types.
#define SWITCHYARD_TYPES "float32 bfloat16 float16 float8_e4m3fn int32 int64 uint8"
#define SWITCHYARD_FLOAT32 0
#define SWITCHYARD_INT32 4
#define SWITCHYARD_UINT8 6

// Exchanges of a place. Device is -1 for the host, and calls wait there for Wait microseconds. With an Event, a
// CUevent, calls on a GPU are enqueued on the CUstream Stream in place of torch's current one, behind what that has:
// the event is recorded there and waited for. An exchange takes at most MaxSMs multiprocessors then.
struct switchyard_exchanges {
	uint64_t Handle;
	int64_t Device, Ranks, Rank, Wait;
	uint64_t Stream, Event;
	int64_t MaxSMs;
};

// Dispatches and combines of a dispatcher. On the host, calls wait for Wait microseconds, and a dispatch returns that
// many Numbers as switchyard_deliver has them. Of the Told words of the caller that a dispatch leaves its numbers in,
// those of this rank's Experts begin with the third.
struct switchyard_dispatches {
	uint64_t Handle;
	int64_t Device, Hidden, TopK, MaxTokens, MaxRows, TokenType, RowType, SumType, IndexType, ScaleType, TokenBytes,
	    SumBytes, ChoiceBytes, ScaleBytes, Experts, Told, Numbers, Wait;
};

// A part of a result that is a tensor of its own: its type, the extent behind the rows, -1 for none, and the bytes of
// each row, 0 for a part that the dispatcher has not.
struct switchyard_part {
	int64_t Type, Width, Bytes;
};

// Dispatches whose results are copied to fresh memory of torch. Parts are rows, scales, indices and weights. Lists lie
// behind the routing: where each begins, and its bytes, for sources those of each row. Tokens come with scales of
// ScaleType. With Whole a result whose length nobody says has all rows that there is room for, else as many as came.
struct switchyard_deliveries {
	struct switchyard_dispatches Of;
	struct switchyard_part Parts[4];
	int64_t RoutingBytes, Counts, CountBytes, Offsets, OffsetBytes, Ranks, RankBytes, Sources, SourceBytes, Whole;
};

// How a tensor lies in memory: its address, DLPack's numbers for the device and the type, and its extents. It is row by
// row, without gaps.
struct switchyard_tensor {
	int64_t data, kind, device, code, bits, ndim, shape[2];
};

// A DLPack description (DLManagedTensor) of a tensor, NULL where there is no memory for it. Who takes the capsule that
// it is put in calls its deleter, which may be after all of Python has gone. The tensor is a user of the hold, if there
// is one.
void *switchyard_describe(const struct switchyard_tensor *tensor, void *hold);

// How many pools for torch's allocator a process can have. Pool k is asked by switchyard_pool_alloc_k and
// switchyard_pool_free_k, which have the types that torch.cuda.memory.CUDAPluggableAllocator wants:
// void *alloc(ssize_t size, int device, void *stream) and void free(void *p, ssize_t size, int device, void *stream).
#define SWITCHYARD_POOLS 16

// What calls take by their address. The names of the fields are those of the structures of package core, which say what
// they mean.
struct switchyard_buffer {
	uint64_t Addr;
	int64_t Bytes;
};

// core.ShapeHead. Behind it there are, for each rank, the rows to send; for each the rows to receive; and where Placed
// is not 0, for each the row of its destination where this rank's rows begin.
struct switchyard_shape_head {
	int64_t Row, DstBytes, SrcBytes, Live, Placed, MaxSMs, CopySMs, NoSMs;
};

// core.DispatchCall. Made and Rows are results.
struct switchyard_dispatch_call {
	struct switchyard_buffer X, Scales, Experts, Weights, Numbers;
	uint64_t Handle;
	int64_t Half;
	uint64_t Made;
	uint64_t Rows;
};

// core.CombineCall.
struct switchyard_combine_call {
	struct switchyard_buffer Y, Rows, Weights, SumWeights, Bias[2], Ready, TokenWeights;
	uint64_t Handle;
	uint64_t Routing;
	int64_t Backward, Weighting, Half, Release;
};

// core.ResultCall. Made is a result.
struct switchyard_result_call {
	struct switchyard_buffer Rows, Scales, Indices, Weights, Sources, Counts, Offsets, RankCounts, Routing, From,
	    To;
	uint64_t Handle;
	int64_t Length, Release;
	uint64_t Made;
};

// core.ExpandCall, and its inverse, core.FoldCall.
struct switchyard_expand_call {
	struct switchyard_buffer Indices, Counts, Slots, Rooms, Rows, ToRows, Scales, ToScales, Weights, ToWeights;
	int64_t Align, Length;
};
struct switchyard_fold_call {
	struct switchyard_buffer Rows, Slots, Sums, Weights, ToWeights;
	int64_t Type;
};

// core.RouteCall. Made and Rows are results.
struct switchyard_route_call {
	uint64_t Routing;
	uint64_t Made;
	uint64_t Rows;
};

// core.MessageCall.
struct switchyard_message_call {
	struct switchyard_buffer Buffer;
	int64_t Receive, Peer;
	uint64_t Tag;
};

// core.TransferCall.
struct switchyard_transfer_call {
	struct switchyard_buffer Mine, At;
	int64_t Kind, Peer, Semaphore;
};

// core.BackwardCall.
struct switchyard_backward_call {
	struct switchyard_buffer DRows, DWeights, DY, Rows, Weights;
	uint64_t Handle;
	int64_t Weighting;
};

// For the Go side.
void switchyard_set_error(const char *text, uint64_t n, int32_t rank, const struct switchyard_detail *detail);

#endif
