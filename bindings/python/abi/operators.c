#define _GNU_SOURCE
#include "_cgo_export.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "torch.h"

// Calls that operators make only if nothing about their arguments is unusual. Else they answer this, nothing has
// happened, and Python makes the call, or refuses it in its own words.
#define UNUSUAL 255
#define AGAIN 1
// More ranks than this are unusual.
#define MOST_RANKS 128
// core.HostCounts of more numbers are, too.
#define MOST_NUMBERS 1024

// Of the CUDA driver, 0 where they succeed.
#define DRIVER_FUNCTIONS(F) \
	F(int, cuEventRecord, (void *event, void *stream)) \
	F(int, cuStreamWaitEvent, (void *stream, void *event, unsigned flags))

#define POINTER(result, name, arguments) static result(*name) arguments;
TORCH_FUNCTIONS(POINTER)
TORCH_GPU_FUNCTIONS(POINTER)
DRIVER_FUNCTIONS(POINTER)
#undef POINTER

static int32_t host, gpu, strided;
// torch's numbers of the types, in the order of SWITCHYARD_TYPES.
static int32_t types[7];
static atomic_bool forked;

static void fork_child(void) { atomic_store(&forked, true); }

// A tensor without gaps.
struct view {
	void *data;
	int64_t *sizes, dim, device; // -1 is the host
	int32_t dtype;
};

static bool view_of(torch_tensor x, struct view *v)
{
	int32_t kind, layout, device;
	bool contiguous;
	if (aoti_torch_get_layout(x, &layout) || layout != strided || aoti_torch_is_contiguous(x, &contiguous) ||
	    !contiguous || aoti_torch_get_device_type(x, &kind) || (kind != host && kind != gpu) ||
	    aoti_torch_get_device_index(x, &device) || aoti_torch_get_dtype(x, &v->dtype) ||
	    aoti_torch_get_dim(x, &v->dim) || aoti_torch_get_sizes(x, &v->sizes) ||
	    aoti_torch_get_data_ptr(x, &v->data))
		return false;
	v->device = kind == host ? -1 : device;
	return true;
}

// Whether a tensor has two dimensions, these and a type of SWITCHYARD_TYPES.
static bool is(const struct view *v, int64_t device, int64_t type, int64_t rows, int64_t columns)
{
	return v->device == device && v->dtype == types[type] && v->dim == 2 && v->sizes[0] == rows &&
	       v->sizes[1] == columns;
}

// Rows that GPUs move begin at multiples of 16.
static bool aligned(const struct view *v) { return v->device < 0 || ((uintptr_t)v->data & 15) == 0; }

static bool stream_of(int64_t device, uint64_t *stream)
{
	void *found = NULL;
	if (device >= 0 &&
	    (!aoti_torch_get_current_cuda_stream || aoti_torch_get_current_cuda_stream((int32_t)device, &found)))
		return false;
	*stream = (uint64_t)(uintptr_t)found;
	return true;
}

// The stream that a call of a place is made on. Nothing may be unusual about the rest of the call.
static bool place_stream(const struct switchyard_exchanges *at, uint64_t *stream)
{
	void *event = (void *)(uintptr_t)at->Event;
	if (!stream_of(at->Device, stream))
		return false;
	if (!event)
		return true;
	if (!cuEventRecord || !cuStreamWaitEvent || cuEventRecord(event, (void *)(uintptr_t)*stream) ||
	    cuStreamWaitEvent((void *)(uintptr_t)at->Stream, event, 0))
		return false;
	*stream = at->Stream;
	return true;
}

static torch_tensor undefined(void)
{
	torch_tensor x = NULL;
	(void)aoti_torch_new_uninitialized_tensor(&x);
	return x;
}

static void value(torch_list list, int64_t v) { (void)torch_list_push_back(list, (uint64_t)v); }

// The numbers of a list, whose sum is rows.
static bool numbers(torch_list list, size_t n, int64_t rows, int64_t *into)
{
	for (size_t i = 0; i < n; i++) {
		uint64_t v;
		if (torch_list_get_item(list, i, &v) || (int64_t)v < 0 || (int64_t)v > rows)
			return false;
		rows -= into[i] = (int64_t)v;
	}
	return rows == 0;
}

static bool complex_numbers(const struct view *v)
{
	return v->dtype == aoti_torch_dtype_complex32() || v->dtype == aoti_torch_dtype_complex64() ||
	       v->dtype == aoti_torch_dtype_complex128();
}

// The answer of an operator whose call may still be under way.
static int64_t answer(int32_t code, uint64_t ticket) { return code == AGAIN ? (int64_t)(ticket << 8) | AGAIN : code; }

static int64_t exchange(torch_tensor to, torch_tensor from, torch_list received, torch_list sent,
                        const struct switchyard_exchanges *at)
{
	struct {
		struct switchyard_shape_head head;
		int64_t rows[2 * MOST_RANKS];
	} shape = {0};
	struct view out, in;
	size_t ranks = (size_t)at->Ranks, got, given;
	int64_t row;
	uint64_t stream, ticket = 0;
	if (atomic_load(&forked) || at->Ranks > MOST_RANKS || !view_of(to, &out) || !view_of(from, &in) ||
	    out.device != at->Device || in.device != at->Device || out.dtype != in.dtype || complex_numbers(&in) ||
	    in.dim < 1 || in.dim != out.dim)
		return UNUSUAL;
	row = (int64_t)aoti_torch_dtype_element_size(in.dtype);
	for (int64_t i = 1; i < in.dim; i++)
		if (in.sizes[i] != out.sizes[i] || __builtin_mul_overflow(row, in.sizes[i], &row))
			return UNUSUAL;
	if (row == 0 || torch_list_size(received, &got) || torch_list_size(sent, &given))
		return UNUSUAL;
	if (got == 0 && given == 0) {
		if (in.sizes[0] % at->Ranks || in.sizes[0] != out.sizes[0])
			return UNUSUAL;
		for (size_t i = 0; i < 2 * ranks; i++)
			shape.rows[i] = in.sizes[0] / at->Ranks;
	} else if (got != ranks || given != ranks || !numbers(sent, ranks, in.sizes[0], shape.rows) ||
	           !numbers(received, ranks, out.sizes[0], shape.rows + ranks) ||
	           shape.rows[at->Rank] != shape.rows[ranks + (size_t)at->Rank])
		return UNUSUAL;
	if (!place_stream(at, &stream))
		return UNUSUAL;
	if (at->Event)
		shape.head.MaxSMs = at->MaxSMs;
	shape.head.Row = row;
	shape.head.DstBytes = out.sizes[0] * row;
	shape.head.SrcBytes = in.sizes[0] * row;
	int32_t code = switchyard_all_to_all(at->Handle, stream, out.data, in.data, &shape.head, at->Wait, &ticket);
	return answer(code, ticket);
}

// switchyard::all_to_all
static void all_to_all(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
	(void)inputs, (void)outputs;
	torch_tensor to = (torch_tensor)stack[0], from = (torch_tensor)stack[1];
	torch_list received = (torch_list)stack[2], sent = (torch_list)stack[3];
	stack[0] = (uint64_t)exchange(to, from, received, sent, (const struct switchyard_exchanges *)stack[4]);
	(void)aoti_torch_delete_tensor_object(to);
	(void)aoti_torch_delete_tensor_object(from);
	(void)torch_delete_list(received);
	(void)torch_delete_list(sent);
}

// The memory of a reduction or a gather, and the stream that it is made on.
struct collective {
	void *to, *from;
	int64_t to_bytes, from_bytes;
	uint64_t stream;
};

static int64_t bytes_of(const struct view *v)
{
	uint64_t n = aoti_torch_dtype_element_size(v->dtype);
	for (int64_t i = 0; i < v->dim; i++)
		n *= (uint64_t)v->sizes[i];
	return (int64_t)n;
}

// How many of its input's bytes an output has.
enum extent { EQUAL, A_RANKS, OF_ALL };

static bool collective_of(torch_tensor to, torch_tensor from, enum extent extent, const struct switchyard_exchanges *at,
                          struct collective *c)
{
	struct view out, in;
	int64_t ranks = at->Ranks;
	if (atomic_load(&forked) || !view_of(to, &out) || !view_of(from, &in) || out.device != at->Device ||
	    in.device != at->Device || out.dtype != in.dtype || complex_numbers(&in))
		return false;
	c->to = out.data;
	c->from = in.data;
	c->to_bytes = bytes_of(&out);
	c->from_bytes = bytes_of(&in);
	if (extent == A_RANKS && (c->from_bytes % ranks || c->from_bytes / ranks != c->to_bytes))
		return false;
	if (extent == OF_ALL && (c->to_bytes % ranks || c->to_bytes / ranks != c->from_bytes))
		return false;
	return place_stream(at, &c->stream);
}

// switchyard::reduce
static void reduce(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
	(void)inputs, (void)outputs;
	torch_tensor x = (torch_tensor)stack[0];
	const int64_t dtype = (int64_t)stack[1], op = (int64_t)stack[2];
	const struct switchyard_exchanges *at = (const struct switchyard_exchanges *)stack[3];
	struct collective c;
	uint64_t ticket = 0;
	int32_t code = UNUSUAL;
	if (collective_of(x, x, EQUAL, at, &c))
		code =
		    switchyard_all_reduce(at->Handle, c.stream, c.to, c.from, c.to_bytes, dtype, op, at->Wait, &ticket);
	stack[0] = (uint64_t)answer(code, ticket);
	(void)aoti_torch_delete_tensor_object(x);
}

// switchyard::scatter
static void scatter(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
	(void)inputs, (void)outputs;
	torch_tensor to = (torch_tensor)stack[0], from = (torch_tensor)stack[1];
	const int64_t dtype = (int64_t)stack[2], op = (int64_t)stack[3];
	const struct switchyard_exchanges *at = (const struct switchyard_exchanges *)stack[4];
	struct collective c;
	uint64_t ticket = 0;
	int32_t code = UNUSUAL;
	if (collective_of(to, from, A_RANKS, at, &c))
		code = switchyard_reduce_scatter(at->Handle, c.stream, c.to, c.to_bytes, c.from, c.from_bytes, dtype,
		                                 op, at->Wait, &ticket);
	stack[0] = (uint64_t)answer(code, ticket);
	(void)aoti_torch_delete_tensor_object(to);
	(void)aoti_torch_delete_tensor_object(from);
}

// switchyard::gather
static void gather(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
	(void)inputs, (void)outputs;
	torch_tensor to = (torch_tensor)stack[0], from = (torch_tensor)stack[1];
	const struct switchyard_exchanges *at = (const struct switchyard_exchanges *)stack[2];
	struct collective c;
	uint64_t ticket = 0;
	int32_t code = UNUSUAL;
	if (collective_of(to, from, OF_ALL, at, &c))
		code = switchyard_all_gather(at->Handle, c.stream, c.to, c.to_bytes, c.from, c.from_bytes, at->Wait,
		                             &ticket);
	stack[0] = (uint64_t)answer(code, ticket);
	(void)aoti_torch_delete_tensor_object(to);
	(void)aoti_torch_delete_tensor_object(from);
}

static void forget(void *data, void *hold)
{
	(void)data;
	switchyard_unhold(hold);
}

// What a dispatch has made, in the order of what the operator returns behind the rows.
struct made {
	int64_t code, handle, hold, place, ticket;
};

static torch_tensor rows_of(const struct switchyard_dispatches *d, struct made *made, int64_t rows)
{
	const int64_t sizes[2] = {rows, d->Hidden}, strides[2] = {d->Hidden, 1};
	torch_tensor x;
	void *hold = switchyard_hold((uint64_t)made->handle);
	if (!hold)
		return undefined();
	made->hold = (int64_t)(intptr_t)hold;
	switchyard_share(hold);
	if (torch_from_blob((void *)(intptr_t)made->place, 2, sizes, strides, 0, types[d->RowType],
	                    d->Device < 0 ? host : gpu, (int32_t)d->Device, &x, strided, NULL, 0, forget, hold)) {
		switchyard_unhold(hold);
		return undefined();
	}
	return x;
}

static struct switchyard_buffer buffer(const struct view *v, int64_t bytes)
{
	return (struct switchyard_buffer){(uint64_t)(uintptr_t)v->data, bytes};
}

// The tokens of a dispatch, their choices, and weights where there are some. Nothing may be unusual about them.
static bool tokens_of(torch_tensor tokens, torch_tensor experts, torch_tensor weights,
                      const struct switchyard_dispatches *d, struct switchyard_dispatch_call *call)
{
	struct view x, idx, w;
	if (atomic_load(&forked) || d->Numbers > MOST_NUMBERS || !view_of(tokens, &x) || !view_of(experts, &idx) ||
	    x.dim < 1 || x.sizes[0] > d->MaxTokens || !is(&x, d->Device, d->TokenType, x.sizes[0], d->Hidden) ||
	    !aligned(&x) || !is(&idx, d->Device, d->IndexType, x.sizes[0], d->TopK))
		return false;
	if (weights) {
		if (!view_of(weights, &w) || !is(&w, d->Device, SWITCHYARD_FLOAT32, x.sizes[0], d->TopK))
			return false;
		call->Weights = buffer(&w, 4 * x.sizes[0] * d->TopK);
	}
	call->X = buffer(&x, x.sizes[0] * d->TokenBytes);
	call->Experts = buffer(&idx, x.sizes[0] * d->ChoiceBytes);
	return true;
}

// Scales of tokens. Nothing may be unusual about them.
static bool scales_of(torch_tensor scales, const struct switchyard_dispatches *d, struct switchyard_dispatch_call *call)
{
	struct view s;
	if (!view_of(scales, &s) || s.device != d->Device || s.dtype != types[d->ScaleType] || s.dim != 2 ||
	    s.sizes[0] * d->TokenBytes != call->X.Bytes || bytes_of(&s) != s.sizes[0] * d->ScaleBytes)
		return false;
	call->Scales = buffer(&s, bytes_of(&s));
	return true;
}

// The tensors that a dispatch has besides its tokens and their choices, and whether it is a first half.
enum { WEIGHTS = 1, SCALES = 2, HALF = 4 };

// Makes a dispatch. It is said whether there is one, which has ended on the host.
static bool make(const struct switchyard_dispatches *d, uint64_t stream, struct switchyard_dispatch_call *call,
                 struct made *made, int64_t *counts)
{
	uint64_t ticket = 0;
	if (d->Device >= 0)
		made->code = switchyard_dispatch(d->Handle, stream, call, 0, NULL);
	else
		made->code = switchyard_deliver(d->Handle, 0, call, NULL, d->Wait, &ticket, counts, d->Numbers);
	made->handle = (int64_t)call->Made;
	made->place = (int64_t)call->Rows;
	made->ticket = (int64_t)ticket;
	if (made->code != 0 && made->code != AGAIN && call->Made) {
		(void)switchyard_release(call->Made);
		made->handle = 0;
	}
	return made->code == 0;
}

static torch_tensor send(const torch_tensor *given, int64_t how, const struct switchyard_dispatches *d,
                         struct made *made, int64_t *counts)
{
	const bool first = (how & HALF) != 0;
	struct switchyard_dispatch_call call = {.Half = first};
	uint64_t stream;
	made->code = UNUSUAL;
	if ((first && d->Device < 0) || !tokens_of(given[0], given[1], how & WEIGHTS ? given[2] : NULL, d, &call) ||
	    (how & SCALES && !scales_of(given[3], d, &call)) || !stream_of(d->Device, &stream) ||
	    !make(d, stream, &call, made, counts))
		return undefined();
	return rows_of(d, made, d->Device < 0 ? counts[0] : d->MaxRows);
}

// What a dispatch has made, and its numbers, as the operator returns them.
static uint64_t list_of(const struct made *made, const struct switchyard_dispatches *d, const int64_t *counts)
{
	torch_list list = NULL;
	(void)torch_new_list_reserve_size(sizeof *made / 8 + (size_t)d->Numbers, &list);
	for (size_t i = 0; i < sizeof *made / 8; i++)
		value(list, ((const int64_t *)made)[i]);
	for (int64_t i = 0; made->code == 0 && i < d->Numbers; i++)
		value(list, counts[i]);
	return (uint64_t)list;
}

// switchyard::dispatch_rows, with weights switchyard::dispatch_weighted, and with scales switchyard::dispatch_scaled
static void dispatch_rows(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
	(void)outputs;
	const uint64_t tensors = inputs - 2; // of which the call has those that how says
	const struct switchyard_dispatches *d = (const struct switchyard_dispatches *)stack[tensors + 1];
	struct made made = {0};
	int64_t counts[MOST_NUMBERS];
	torch_tensor given[4] = {NULL};
	memcpy(given, stack, tensors * sizeof *given);
	stack[0] = (uint64_t)send(given, (int64_t)stack[tensors], d, &made, counts);
	stack[1] = list_of(&made, d, counts);
	for (uint64_t i = 0; i < tensors; i++)
		(void)aoti_torch_delete_tensor_object(given[i]);
}

// Fresh memory for the numbers of a dispatch, and the part of it that has the choices of each expert.
static bool numbers_of(const struct switchyard_dispatches *d, torch_tensor *counts, struct switchyard_buffer *all)
{
	const int64_t one = 1;
	torch_tensor words;
	void *data;
	if (aoti_torch_empty_strided(1, &d->Told, &one, types[SWITCHYARD_INT32], d->Device < 0 ? host : gpu,
	                             (int32_t)d->Device, &words))
		return false;
	bool good = !aoti_torch_get_data_ptr(words, &data) &&
	            !aoti_torch__reinterpret_tensor(words, 1, &d->Experts, &one, 2, counts);
	if (good)
		*all = (struct switchyard_buffer){(uint64_t)(uintptr_t)data, 4 * d->Told};
	(void)aoti_torch_delete_tensor_object(words); // the part holds its memory
	return good;
}

// The choices of each expert in a dispatch whose rows stay where they are. A hold on another one ends before.
static torch_tensor lend(torch_tensor tokens, torch_tensor experts, void *hold, bool first,
                         const struct switchyard_dispatches *d, struct made *made, int64_t *numbers)
{
	struct switchyard_dispatch_call call = {.Half = first};
	torch_tensor counts;
	uint64_t stream;
	made->code = UNUSUAL;
	if ((first && d->Device < 0) || !tokens_of(tokens, experts, NULL, d, &call) || !stream_of(d->Device, &stream) ||
	    !numbers_of(d, &counts, &call.Numbers))
		return undefined();
	if (hold)
		switchyard_unhold(hold);
	if (make(d, stream, &call, made, numbers))
		made->hold = (int64_t)(intptr_t)switchyard_hold((uint64_t)made->handle);
	return counts;
}

// switchyard::dispatch_lent
static void dispatch_lent(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
	(void)inputs, (void)outputs;
	torch_tensor x = (torch_tensor)stack[0], experts = (torch_tensor)stack[1];
	const struct switchyard_dispatches *d = (const struct switchyard_dispatches *)stack[4];
	struct made made = {0};
	int64_t numbers[MOST_NUMBERS];
	stack[0] = (uint64_t)lend(x, experts, (void *)(intptr_t)stack[2], stack[3] != 0, d, &made, numbers);
	stack[1] = list_of(&made, d, numbers);
	(void)aoti_torch_delete_tensor_object(x);
	(void)aoti_torch_delete_tensor_object(experts);
}

// What a delivery has made, in the order of what the operator returns behind the tensors.
struct left {
	int64_t code, handle, ticket, routing, at, copy, length;
};

// The tensors of a result: switchyard_deliveries' parts, then the memory of its routing.
#define PARTS 4
#define TENSORS (PARTS + 1)

// Routings begin at multiples of this, and so do the lists behind them. torch begins memory of GPUs there.
#define ALIGN 128

static int64_t up(int64_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

static bool fresh(int64_t dim, const int64_t *sizes, int64_t type, int64_t device, torch_tensor *x, uint64_t *at)
{
	const int64_t strides[2] = {dim == 2 ? sizes[1] : 1, 1};
	void *data;
	if (aoti_torch_empty_strided(dim, sizes, strides, types[type], device < 0 ? host : gpu, (int32_t)device, x)) {
		*x = NULL;
		return false;
	}
	if (aoti_torch_get_data_ptr(*x, &data))
		return false;
	*at = (uint64_t)(uintptr_t)data;
	return true;
}

// Fresh memory for a result of a length, and for a copy of the choices of its tokens where there are some.
static bool room(const struct switchyard_deliveries *of, const struct switchyard_buffer *choices, struct left *left,
                 torch_tensor *made, struct switchyard_result_call *r)
{
	struct switchyard_buffer *const into[PARTS] = {&r->Rows, &r->Scales, &r->Indices, &r->Weights};
	const int64_t length = left->length, device = of->Of.Device;
	uint64_t at;
	for (int i = 0; i < PARTS; i++) {
		const struct switchyard_part *part = &of->Parts[i];
		const int64_t sizes[2] = {length, part->Width};
		if (!part->Bytes)
			continue;
		if (!fresh(part->Width < 0 ? 1 : 2, sizes, part->Type, device, &made[i], &into[i]->Addr))
			return false;
		into[i]->Bytes = length * part->Bytes;
	}
	if (device < 0)
		switchyard_large(r->Rows.Addr, r->Rows.Bytes);
	left->copy = up(of->Sources + length * of->SourceBytes);
	const int64_t size = left->copy + choices->Bytes + (device < 0 ? ALIGN - 1 : 0);
	if (!fresh(1, &size, SWITCHYARD_UINT8, device, &made[PARTS], &at))
		return false;
	at = (uint64_t)up((int64_t)at);
	left->at = (int64_t)at;
	r->Sources = (struct switchyard_buffer){at + (uint64_t)of->Sources, length * of->SourceBytes};
	r->Counts = (struct switchyard_buffer){at + (uint64_t)of->Counts, of->CountBytes};
	r->Offsets = (struct switchyard_buffer){at + (uint64_t)of->Offsets, of->OffsetBytes};
	r->RankCounts = (struct switchyard_buffer){at + (uint64_t)of->Ranks, of->RankBytes};
	r->Routing = (struct switchyard_buffer){at, of->RoutingBytes};
	r->From = *choices;
	r->To = (struct switchyard_buffer){at + (uint64_t)left->copy, choices->Bytes};
	r->Length = length;
	r->Release = 1;
	return true;
}

// Makes a dispatch of tokens, scales, choices and weights, and copies its result. The host waits for counts where it
// has no stream, or where nobody says how long the result is. It returns how many. Where memory lacks, or counts are
// late, behind the dispatch, the rest of the call is Python's.
static int64_t deliver(const torch_tensor *given, bool copies, const struct switchyard_deliveries *of,
                       struct left *left, torch_tensor *made, int64_t *counts)
{
	const struct switchyard_dispatches *d = &of->Of;
	struct switchyard_dispatch_call call = {0};
	struct switchyard_result_call r = {0};
	const bool known = left->length >= 0;
	const int64_t numbers = d->Device < 0 || !known ? d->Numbers : 0;
	struct view scales, weights;
	uint64_t stream, ticket = 0;
	left->code = UNUSUAL;
	if (!view_of(given[1], &scales) || !view_of(given[3], &weights) ||
	    !tokens_of(given[0], given[2], weights.dim == 1 ? NULL : given[3], d, &call))
		return 0;
	if (scales.dim != 1 && !scales_of(given[1], d, &call))
		return 0;
	const struct switchyard_buffer choices = copies ? call.Experts : (struct switchyard_buffer){0};
	if (!stream_of(d->Device, &stream) || (known && !room(of, &choices, left, made, &r)))
		return 0;
	left->code = switchyard_deliver(d->Handle, stream, &call, known ? &r : NULL, d->Wait, &ticket, counts, numbers);
	if (left->code == 0 && !known) {
		left->length = of->Whole ? d->MaxRows : counts[0];
		r.Handle = call.Made;
		if (!room(of, &choices, left, made, &r))
			left->code = AGAIN;
		else if ((left->code = switchyard_results(d->Handle, stream, &r)) == 0)
			call.Made = 0;
	}
	if (left->code != 0 && left->code != AGAIN && call.Made) {
		(void)switchyard_release(call.Made);
		call.Made = 0;
	}
	left->handle = (int64_t)call.Made;
	left->ticket = (int64_t)ticket;
	left->routing = (int64_t)r.Made;
	return left->code == 0 ? numbers : 0;
}

// switchyard::deliver_rows. Scales and weights of one dimension are none.
static void deliver_rows(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
	(void)inputs, (void)outputs;
	torch_tensor given[4], made[TENSORS] = {0};
	struct left left = {.length = (int64_t)stack[4]};
	int64_t counts[MOST_NUMBERS];
	torch_list list = NULL;
	memcpy(given, stack, sizeof given);
	const int64_t told =
	    deliver(given, stack[5] != 0, (const struct switchyard_deliveries *)stack[6], &left, made, counts);
	for (size_t i = 0; i < TENSORS; i++) {
		if (made[i] && left.code) {
			(void)aoti_torch_delete_tensor_object(made[i]);
			made[i] = NULL;
		}
		stack[i] = (uint64_t)(made[i] ? made[i] : undefined());
	}
	(void)torch_new_list_reserve_size(sizeof left / 8 + (size_t)told, &list);
	for (size_t i = 0; i < sizeof left / 8; i++)
		value(list, ((const int64_t *)&left)[i]);
	for (int64_t i = 0; i < told; i++)
		value(list, counts[i]);
	stack[TENSORS] = (uint64_t)list;
	for (size_t i = 0; i < sizeof given / sizeof *given; i++)
		(void)aoti_torch_delete_tensor_object(given[i]);
}

// What a combine goes by, in the order of the operator's arguments behind its tensors.
struct way {
	int64_t dispatches, handle, routing, tokens, came, weighting, release, first;
};

// How many rows for sums a tensor has, whatever its extents before the last are; -1 for one that has other things.
static int64_t rows_in(const struct view *v, const struct switchyard_dispatches *d)
{
	uint64_t n = 1;
	if (v->device != d->Device || v->dtype != types[d->SumType] || v->dim < 2 || v->sizes[v->dim - 1] != d->Hidden)
		return -1;
	for (int64_t i = 0; i < v->dim - 1; i++)
		n *= (uint64_t)v->sizes[i];
	return (int64_t)n;
}

// Whether a combine of n rows has as many as there is room for, or as came. Of a dispatch on a GPU the library asks
// each time: another replay of its graph has brought other rows.
static bool all_rows(int64_t n, const struct way *by, const struct switchyard_dispatches *d)
{
	int64_t came = -1;
	if (n == d->MaxRows || n == by->came)
		return true;
	return by->handle && n < d->MaxRows &&
	       !switchyard_counts((uint64_t)by->handle, 0, &came, NULL, 0, NULL, -1, NULL, 0) && n == came;
}

// Sums of rows, in a tensor of the caller or in a fresh one.
static int64_t bring(torch_tensor from, torch_tensor weights, torch_tensor out, const struct way *by,
                     torch_tensor *fresh)
{
	const struct switchyard_dispatches *d = (const struct switchyard_dispatches *)(intptr_t)by->dispatches;
	const int64_t sizes[2] = {by->tokens, d->Hidden}, strides[2] = {d->Hidden, 1};
	struct switchyard_combine_call call = {.Half = by->first};
	struct view rows, w, y;
	uint64_t stream, ticket = 0;
	int64_t n;
	if (atomic_load(&forked) || (by->first && d->Device < 0) || !view_of(from, &rows) ||
	    (n = rows_in(&rows, d)) < 0 || !all_rows(n, by, d) || !aligned(&rows) || !stream_of(d->Device, &stream))
		return UNUSUAL;
	if (weights) {
		if (!view_of(weights, &w) || !is(&w, d->Device, SWITCHYARD_FLOAT32, by->tokens, d->TopK))
			return UNUSUAL;
		call.TokenWeights = buffer(&w, 4 * by->tokens * d->TopK);
	}
	if (out) {
		if (!view_of(out, &y) || !is(&y, d->Device, d->SumType, by->tokens, d->Hidden) || !aligned(&y))
			return UNUSUAL;
	} else if (aoti_torch_empty_strided(2, sizes, strides, types[d->SumType], d->Device < 0 ? host : gpu,
	                                    (int32_t)d->Device, fresh) ||
	           aoti_torch_get_data_ptr(*fresh, &y.data)) {
		return UNUSUAL;
	}
	call.Y = buffer(&y, by->tokens * d->SumBytes);
	call.Rows = buffer(&rows, n * d->SumBytes);
	call.Handle = (uint64_t)by->handle;
	call.Routing = (uint64_t)by->routing;
	call.Weighting = by->weighting;
	call.Release = by->release;
	int32_t code = switchyard_combine(d->Handle, stream, &call, d->Device < 0 ? d->Wait : 0, &ticket);
	return answer(code, ticket);
}

// switchyard::combine_rows, with weights of tokens switchyard::combine_weighted, and with a tensor for the sums, too,
// switchyard::combine_into, which returns no other
static void combine(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
	const uint64_t tensors = inputs - sizeof(struct way) / 8;
	torch_tensor given[3] = {NULL}, fresh = NULL;
	struct way by;
	memcpy(given, stack, tensors * sizeof *given);
	memcpy(&by, stack + tensors, sizeof by);
	stack[outputs - 1] = (uint64_t)bring(given[0], given[1], given[2], &by, &fresh);
	if (!given[2])
		stack[0] = (uint64_t)(fresh ? fresh : undefined());
	for (uint64_t i = 0; i < tensors; i++)
		(void)aoti_torch_delete_tensor_object(given[i]);
}

#define WAY "int dispatches, int handle, int routing, int tokens, int came, int weighting, int release, int first) -> "

static const struct {
	const char *name, *schema;
	torch_kernel *kernel;
} OPERATORS[] = {
    {"all_to_all", "all_to_all(Tensor(a!) output, Tensor input, int[] received, int[] sent, int exchanges) -> int",
     all_to_all},
    {"reduce", "reduce(Tensor(a!) tensor, int dtype, int op, int exchanges) -> int", reduce},
    {"scatter", "scatter(Tensor(a!) output, Tensor input, int dtype, int op, int exchanges) -> int", scatter},
    {"gather", "gather(Tensor(a!) output, Tensor input, int exchanges) -> int", gather},
    {"dispatch_rows", "dispatch_rows(Tensor x, Tensor experts, int how, int dispatches) -> (Tensor, int[])",
     dispatch_rows},
    {"dispatch_weighted",
     "dispatch_weighted(Tensor x, Tensor experts, Tensor weights, int how, int dispatches) -> (Tensor, int[])",
     dispatch_rows},
    {"dispatch_scaled",
     "dispatch_scaled(Tensor x, Tensor experts, Tensor weights, Tensor scales, int how, int dispatches) -> "
     "(Tensor, int[])",
     dispatch_rows},
    {"dispatch_lent", "dispatch_lent(Tensor x, Tensor experts, int hold, int first, int dispatches) -> (Tensor, int[])",
     dispatch_lent},
    {"deliver_rows",
     "deliver_rows(Tensor x, Tensor scales, Tensor experts, Tensor weights, int length, int copies, int deliveries) -> "
     "(Tensor, Tensor, Tensor, Tensor, Tensor, int[])",
     deliver_rows},
    {"combine_rows", "combine_rows(Tensor rows, " WAY "(Tensor, int)", combine},
    {"combine_weighted", "combine_weighted(Tensor rows, Tensor weights, " WAY "(Tensor, int)", combine},
    {"combine_into", "combine_into(Tensor rows, Tensor weights, Tensor(a!) out, " WAY "int", combine},
};

// The library of torch's that is loaded under a name, or its first function that is missing.
static const char *found(void *torch, void *cuda, void *driver)
{
#define FIND(result, name, arguments) \
	if (!(*(void **)&name = dlsym(torch, #name))) \
		return #name;
	TORCH_FUNCTIONS(FIND)
#undef FIND
#define FIND(result, name, arguments) *(void **)&name = cuda ? dlsym(cuda, #name) : NULL;
	TORCH_GPU_FUNCTIONS(FIND)
#undef FIND
#define FIND(result, name, arguments) *(void **)&name = driver ? dlsym(driver, #name) : NULL;
	DRIVER_FUNCTIONS(FIND)
#undef FIND
	return NULL;
}

static const char *failed;
static void enter(void)
{
	static const char *const KEYS[] = {"CPU", "CUDA"};
	void *torch = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_NOW);
	torch_library all;
	void *cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_NOW);
	failed = torch ? found(torch, cuda, cuda ? dlopen("libcuda.so.1", RTLD_NOW) : NULL) : "libtorch_cpu.so";
	if (failed)
		return;
	host = aoti_torch_device_type_cpu();
	gpu = aoti_torch_device_type_cuda();
	strided = aoti_torch_layout_strided();
	const int32_t known[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
	                         aoti_torch_dtype_float16(), aoti_torch_dtype_float8_e4m3fn(),
	                         aoti_torch_dtype_int32(),   aoti_torch_dtype_int64(),
	                         aoti_torch_dtype_uint8()};
	memcpy(types, known, sizeof types);
	failed = "aoti_torch_library_def";
	if (pthread_atfork(NULL, NULL, fork_child) ||
	    aoti_torch_library_init_fragment("switchyard", "operators.c", 1, &all))
		return;
	for (size_t i = 0; i < sizeof OPERATORS / sizeof *OPERATORS; i++)
		if (aoti_torch_library_def(all, OPERATORS[i].schema))
			return;
	for (size_t k = 0; k < sizeof KEYS / sizeof *KEYS; k++) {
		torch_library of;
		if (aoti_torch_library_init_impl("switchyard", KEYS[k], "operators.c", 1, &of))
			return;
		for (size_t i = 0; i < sizeof OPERATORS / sizeof *OPERATORS; i++)
			if (torch_library_impl(of, OPERATORS[i].name, OPERATORS[i].kernel, TORCH_ABI))
				return;
	}
	failed = NULL;
}

const char *switchyard_operators(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	(void)pthread_once(&once, enter);
	return failed;
}
