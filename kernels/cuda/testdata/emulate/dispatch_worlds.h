// Worlds of MoE dispatch: calls of their ranks, and what each should come to. Scenarios include this behind the
// kernels.
#pragma once

#include <deque>
#include <memory>
#include <set>

namespace {

using u16 = uint16_t;

constexpr u32 op_dispatch = 1, op_redispatch = 2, op_combine = 3, op_backward = 4, op_token_weights = 7;
constexpr u64 ticket = 9;
enum layout { flat, padded, compact, by_rank };

constexpr u8 others = 0x3c; // a byte that nobody may write

struct world : segments {
	u32 experts, top_k, max_tokens, hidden, slots;
	layout rows_by;
	bool float8, lands, float8_sums; // lands: the caller wants to know how many rows have landed; float8_sums:
	                                 // partial sums cross as float8
	bool few,
	    given; // few: by the kernels for few tokens; given: scales next to tokens, whose rows cross as they are
	u32 scales_are = 0, biases;           // scales_are: the mode of a launch says that too
	bool keeps;                           // calls go by a routing in memory of the caller
	bool late;                            // weights are given at the combine
	u64 room = 0;                         // rows of what the caller gets of an output, 0 where it wants none
	bool told;                            // the caller wants the numbers
	sw_mask_requests *requests = nullptr; // by rank, where calls go on without ranks
	bool shared = false;                  // other worlds have memory for rows in the same place
	std::vector<std::vector<u64>> kept;
	const i64 *wide = nullptr; // a rank's choices, in place of those of a batch
	i64 align = 1, capacity = 0, most_rows;
	u64 timeout_ns = u64{1} << 50;
	std::vector<u32> first, table; // slots before each rank; the placement
	sw_dispatch_block state;
	u64 staging, sums, weights, token_weights, scales, rows, row_scales, row_weights, row_indices, row_sources,
	    counts, masks, taken, taken_sources, taken_indices, numbers, callers_rows;

	bool by_token() const { return rows_by == compact || rows_by == by_rank; }
	// Whether a dispatch puts its rows where the caller wants a copy.
	bool straight() const { return few && room != 0; }
	// Whether peers write a rank's rows to memory of its caller.
	bool in_place(u32 rank) const { return rows_by == compact && !few && (hidden / 8 + rank) % 3 == 0; }
	u64 rows_at(u32 rank) const { return in_place(rank) ? callers_rows : rows; }
	// How many rows have room there.
	u64 room_at(u32 rank) const { return in_place(rank) && room != 0 ? room : most_rows; }
	u32 local(u32 r) const { return first[r + 1] - first[r]; }
	u32 wire() const { return float8 ? hidden : 2 * hidden; }
	u32 partial() const
	{
		return float8_sums ? (hidden + SW_DISPATCH_STRETCH - 1) / SW_DISPATCH_STRETCH * float8_sum::scales +
		                         (hidden + 15) / 16 * 16
		                   : 2 * hidden;
	}
	u32 scale_words() const
	{
		u32 blocks = float8 || given ? (hidden + 127) / 128 : 0;
		return scales_are == SW_DISPATCH_EXPONENTS ? (blocks + 3) / 4 : blocks;
	}
	u64 note_bytes() const
	{
		u32 words = max(scale_words(), by_token() ? 0 : top_k);
		return (16 * (1 + top_k + (words + 2) / 3) + 127) / 128 * 128;
	}
	u64 packet_bytes() const // rows of float8 take less
	{
		return max((2 * hidden + SW_DISPATCH_DENSE_PART - 1) / SW_DISPATCH_DENSE_PART * 4096,
		           (2 * hidden + SW_DISPATCH_PLAIN_PART - 1) / SW_DISPATCH_PLAIN_PART * 2048);
	}
	u32 staged() const { return size * max_tokens; }
};

// Its segments come later.
world random_shape(u32 size)
{
	world w;
	w.size = size, w.experts = 1 + draw(9), w.top_k = 1 + draw(4), w.max_tokens = 1 + draw(70),
	w.hidden = 8 * (1 + draw(draw(4) == 0 ? 150 : 40));
	if (draw(8) == 0) // more choices than a warp has lanes
		w.top_k = 30 + draw(10), w.max_tokens = 1 + draw(6), w.hidden = 8 * (1 + draw(20));
	w.rows_by = static_cast<layout>(draw(4)), w.float8 = draw(3) == 0, w.lands = !w.by_token() && draw(2) == 0,
	w.float8_sums = draw(3) == 0;
	if (w.float8)
		w.hidden = (w.hidden + 15) / 16 * 16;
	w.few = w.rows_by == compact ? w.hidden / 8 % 2 == 0 : draw(2) == 0, w.given = !w.float8 && draw(4) == 0;
	if (w.float8 && draw(2) == 0)
		w.scales_are = draw(2) == 0 ? SW_DISPATCH_EXPONENTS : SW_DISPATCH_POWERS;
	w.biases = draw(3);
	// some experts have copies
	std::vector<std::vector<u32>> at(w.size), copies(w.experts);
	for (u32 e = 0; e < w.experts; e++)
		for (u32 n = 1 + draw(2), r = draw(w.size); n > 0 && (copies[e].empty() || w.size > 1);
		     n--, r = (r + 1) % w.size) {
			at[r].push_back(e);
			copies[e].push_back(r);
		}
	w.first.push_back(0);
	std::vector<u32> expert;
	for (u32 r = 0; r < w.size; r++) {
		expert.insert(expert.end(), at[r].begin(), at[r].end());
		w.first.push_back(static_cast<u32>(expert.size()));
	}
	w.slots = static_cast<u32>(expert.size());
	std::vector<u32> order;
	for (u32 e = 0; e < w.experts; e++) {
		w.table.push_back(static_cast<u32>(order.size()));
		for (u32 s = 0; s < w.slots; s++)
			if (expert[s] == e)
				order.push_back(s);
	}
	w.table.push_back(static_cast<u32>(order.size()));
	w.table.insert(w.table.end(), order.begin(), order.end());
	w.table.insert(w.table.end(), expert.begin(), expert.end());
	u32 most_local = 0;
	for (u32 r = 0; r < w.size; r++)
		most_local = max(most_local, w.local(r));
	i64 all = w.staged();
	if (w.rows_by == flat)
		w.align = 1 + draw(4), w.most_rows = all * w.top_k + most_local * w.align;
	else if (w.rows_by == padded)
		w.capacity = all * w.top_k, w.most_rows = w.capacity * most_local;
	else
		w.most_rows = all;
	w.keeps = draw(2) == 0;
	w.late = !w.by_token() && draw(3) == 0;
	// Nothing is drawn for these, so that worlds without them stay those of their seeds.
	w.room = w.by_token() && w.hidden % 3 == 0 ? 1 + (w.hidden + w.max_tokens) % w.most_rows : 0;
	w.told = w.max_tokens % 2 == 0;
	return w;
}

// Gives out places one behind the other.
struct places_from {
	u64 place;
	u64 take(u64 n)
	{
		u64 p = (place + 255) / 256 * 256;
		place = p + n;
		return p;
	}
};

// A world's state and words.
void lay_words(world &w, places_from &p)
{
	i64 all = w.staged();
	w.state =
	    sw_lay_dispatch_block(p.take(0), w.size, w.slots, w.max_tokens, w.top_k, w.few || !w.by_token() ? all : 0,
	                          w.by_token() ? 0 : all, w.few ? w.note_bytes() : 0, w.few ? w.packet_bytes() : 0);
	p.place = w.state.end;
	w.counts = p.take(4096);
	w.masks = p.take(sizeof(sw_mask));
	w.kept.resize(w.size);
	for (auto &k : w.kept)
		k.resize((w.state.wiped - w.state.arrived) / 8);
}

// The output, and what is on its way.
void lay_rows(world &w, places_from &p)
{
	i64 all = w.staged();
	w.staging = p.take(all * 2 * w.hidden), w.scales = p.take(4 * all * w.scale_words()),
	w.sums = p.take(all * w.partial()), w.weights = p.take(4 * all * w.top_k),
	w.token_weights = p.take(4 * all * w.top_k);
	w.rows = p.take(w.most_rows * 2 * w.hidden), w.row_scales = p.take(4 * w.most_rows * w.scale_words()),
	w.row_weights = p.take(4 * w.most_rows * w.top_k);
	w.row_indices = p.take(8 * w.most_rows * w.top_k), w.row_sources = p.take(8 * w.most_rows);
}

// The caller's own memory.
void lay_heap(world &w, places_from &p)
{
	w.heap = p.take(4 * static_cast<u64>(w.most_rows + w.max_tokens) * 2 * w.hidden + 4096);
	w.taken = p.take(w.room * w.wire()), w.taken_sources = p.take(8 * w.room),
	w.taken_indices = p.take(8 * w.room * w.top_k);
	w.numbers = p.take(4096);
	w.callers_rows = p.take(w.most_rows * w.wire());
}

// With memory of its own.
world alone(world w)
{
	places_from p{65536};
	lay_words(w, p), lay_rows(w, p), lay_heap(w, p);
	w.take(w.size, (p.place + 4095) / 4096 * 4096);
	return w;
}

world random_world() { return alone(random_shape(1 + draw(4))); }

// Worlds that take turns with the same memory for rows: each has words of its own.
std::deque<world> random_worlds(u32 count)
{
	u32 size = 1 + draw(4);
	std::deque<world> worlds;
	places_from p{65536};
	for (u32 i = 0; i < count; i++) {
		worlds.push_back(random_shape(size));
		worlds.back().shared = true;
		lay_words(worlds.back(), p);
	}
	u64 rows = p.take(0);
	for (world &w : worlds) {
		places_from here{rows};
		lay_rows(w, here);
		p.place = max(p.place, here.place);
	}
	for (world &w : worlds)
		lay_heap(w, p);
	for (world &w : worlds)
		if (&w == &worlds.front())
			w.take(size, (p.place + 4095) / 4096 * 4096);
		else
			w.stride = worlds.front().stride, w.base = worlds.front().base, w.faults.resize(size);
	return worlds;
}

using rows_t = std::vector<float>;

// The input of all ranks.
struct batch {
	std::vector<u32> tokens;
	std::vector<std::vector<int>> choice;
	std::vector<rows_t> weight, late, x, dy, scale; // late: the weights of a combine
	std::vector<std::vector<u16>> narrow_x, narrow_dy;
	std::vector<rows_t> bias[2];
	std::vector<std::vector<u16>> narrow_bias[2];
};

float bf16(float f) { return __uint_as_float(bf16_of(f) << 16); }
float some_float() { return bf16((static_cast<float>(draw(2001)) - 1000) / 64); }

batch random_batch(const world &w)
{
	batch b;
	for (u32 r = 0; r < w.size; r++) {
		u32 t = draw(4) == 0 ? 0 : draw(w.max_tokens + 1);
		b.tokens.push_back(t);
		std::vector<int> c(t * w.top_k);
		for (int &e : c)
			e = draw(5) == 0 ? -1 : static_cast<int>(draw(w.experts));
		b.choice.push_back(c);
		auto fill = [&](u32 n) {
			rows_t v(n);
			for (float &f : v)
				f = some_float();
			return v;
		};
		b.weight.push_back(fill(t * w.top_k)), b.late.push_back(fill(t * w.top_k)),
		    b.x.push_back(fill(t * w.hidden)), b.dy.push_back(fill(t * w.hidden)),
		    b.scale.push_back(fill(t * w.scale_words()));
		auto narrow = [](const rows_t &v) {
			std::vector<u16> n;
			for (float f : v)
				n.push_back(static_cast<u16>(bf16_of(f)));
			return n;
		};
		b.narrow_x.push_back(narrow(b.x.back())), b.narrow_dy.push_back(narrow(b.dy.back()));
		for (u32 i = 0; i < w.biases; i++)
			b.bias[i].push_back(fill(t * w.hidden)), b.narrow_bias[i].push_back(narrow(b.bias[i].back()));
	}
	return b;
}

u32 slot_of(const world &w, u32 rank, u32 token, int e)
{
	u32 first = w.table[e], n = w.table[e + 1] - first;
	return w.table[w.experts + 1 + first + (rank + token) % n];
}
u32 rank_of(const world &w, u32 slot)
{
	u32 r = 0;
	while (slot >= w.first[r + 1])
		r++;
	return r;
}

struct row {
	u32 src, token;
	int choice; // -1 where a token has one row
	u32 at;     // in the output
};

// The rows that a rank should get.
std::vector<row> expected(const world &w, const batch &b, u32 rank, std::vector<u32> &counts, std::vector<u32> &offsets,
                          std::vector<u32> &from)
{
	std::vector<row> rows;
	counts.assign(w.local(rank), 0), from.assign(w.size, 0), offsets.clear();
	for (u32 s = 0; s < w.size; s++)
		for (u32 t = 0; t < b.tokens[s]; t++) {
			bool any = false;
			for (u32 k = 0; k < w.top_k; k++) {
				int e = b.choice[s][t * w.top_k + k];
				if (e >= 0 && rank_of(w, slot_of(w, s, t, e)) == rank)
					any = true, counts[slot_of(w, s, t, e) - w.first[rank]]++,
					from[s] += !w.by_token();
			}
			from[s] += any && w.by_token();
		}
	u32 at = 0;
	if (w.by_token()) {
		for (u32 s = 0; s < w.size; s++) {
			offsets.push_back(at);
			u32 i = at;
			for (u32 t = 0; t < b.tokens[s]; t++) {
				bool any = false;
				for (u32 k = 0; k < w.top_k; k++) {
					int e = b.choice[s][t * w.top_k + k];
					any |= e >= 0 && rank_of(w, slot_of(w, s, t, e)) == rank;
				}
				if (any)
					rows.push_back({s, t, -1, i++});
			}
			at += w.rows_by == by_rank ? w.max_tokens : from[s];
		}
		offsets.push_back(at);
		return rows;
	}
	for (u32 i = 0; i < w.local(rank); i++) {
		offsets.push_back(at);
		u32 n = at;
		for (u32 s = 0; s < w.size; s++)
			for (u32 t = 0; t < b.tokens[s]; t++)
				for (u32 k = 0; k < w.top_k; k++) {
					int e = b.choice[s][t * w.top_k + k];
					if (e >= 0 && slot_of(w, s, t, e) == w.first[rank] + i)
						rows.push_back({s, t, static_cast<int>(k), n++});
				}
		at += w.capacity != 0 ? static_cast<u32>(w.capacity)
		                      : static_cast<u32>((counts[i] + w.align - 1) / w.align * w.align);
	}
	// by source: from counts rows that crossed
	offsets.push_back(at);
	return rows;
}

// Memory at an address, as pointers of arguments.
struct memory {
	u64 address;
	template <typename T> operator T *() const { return reinterpret_cast<T *>(address); }
};

sw_dispatch_args arguments(world &w, const batch &b, u32 rank, u32 op)
{
	sw_dispatch_args a{};
	u64 own = w.segment(rank);
	a.world = w.seen_by(rank, w.state.control, w.timeout_ns);
	a.state = w.state;
	if (w.keeps && op != op_dispatch) { // as dispatchBlock.moveRouting does
		u64 by = reinterpret_cast<u64>(w.kept[rank].data()) - own - w.state.arrived;
		for (auto *at : {&a.state.arrived, &a.state.places, &a.state.who, &a.state.spread, &a.state.indices,
		                 &a.state.weights, &a.state.sources})
			*at += by;
	}
	a.send.choices = reinterpret_cast<u64>(b.choice[rank].data()), a.send.weights = b.weight[rank].data();
	a.table = w.table.data();
	a.out.rows = own + w.rows, a.out.scales = own + w.row_scales, a.out.weights = memory{own + w.row_weights},
	a.out.sources = memory{own + w.row_sources};
	a.out.counts = memory{own + w.counts}, a.out.offsets = memory{own + w.counts + 1024},
	a.out.rank_counts = memory{own + w.counts + 2048}, a.send.landed = memory{w.lands ? own + w.counts + 3072 : 0};
	a.send.mapped = w.told && op == op_dispatch ? own + w.numbers : 0, a.send.ticket = w.by_token() ? ticket : 0;
	a.out.most = a.out.room = w.most_rows, a.out.align = w.align, a.out.capacity = w.capacity,
	a.send.offset_base = w.rows_by == by_rank ? w.max_tokens : 0;
	if (w.requests != nullptr)
		a.masks = w.masks, a.requests = reinterpret_cast<u64>(&w.requests[rank]);
	a.op = op, a.mode = SW_DISPATCH_SEND | SW_DISPATCH_RECEIVE, a.tokens = b.tokens[rank], a.top_k = w.top_k,
	a.max_tokens = w.max_tokens, a.experts = w.experts;
	a.slots = w.slots, a.local = w.local(rank), a.send.index_bytes = 4;
	if (w.wide != nullptr)
		a.send.choices = reinterpret_cast<u64>(w.wide), a.send.index_bytes = 8;
	for (u32 r = 0; r <= w.size; r++)
		a.first[r] = w.first[r];
	return a;
}

struct launch_of {
	std::function<void()> kernel;
	u32 blocks, threads;
	size_t shared;
	bool waits = false; // for all that comes before it in its stream, as what comes behind waits for it
};
using program = std::vector<launch_of>; // of one rank, in order

template <typename F> launch_of with(F f, const sw_dispatch_args &a, u32 blocks, u32 threads, size_t shared = 0)
{
	return {[f, a] { f(a); }, blocks, threads, shared};
}

void send(world &w, sw_dispatch_args &a, u32 row_bytes, bool float8, program &p)
{
	a.row_bytes = row_bytes, a.wire_bytes = float8 ? row_bytes / 2 : row_bytes;
	u32 blocks = 1 + draw(3);
	a.send.share = (a.tokens + blocks - 1) / blocks, a.movers = 1 + draw(2), a.depth = 1 + draw(3);
	a.part = float8 || draw(2) == 0 ? row_bytes : (row_bytes / 2 + 15) / 16 * 16,
	a.parts = (row_bytes + a.part - 1) / a.part;
	a.interval = draw(3) * 2000;
	size_t shared = a.movers * (a.depth * a.part + (float8 ? SW_DISPATCH_SCALES : 0)) +
	                4 * (w.size * (a.send.share + (a.send.share + 31) / 32) + 2 * w.slots);
	p.push_back(float8 ? with(dispatch_rows_bf16, a, blocks, SW_DISPATCH_THREADS, shared)
	                   : with(dispatch_rows, a, blocks, SW_DISPATCH_THREADS, shared));
}

void to_staging(world &w, sw_dispatch_args &a)
{
	a.mode |= SW_DISPATCH_BY_EXPERT;
	a.send.to_rows = w.staging, a.send.to_scales = w.scales, a.send.to_indices = w.state.indices,
	a.send.to_weights = w.state.weights, a.send.to_sources = w.state.sources;
}

void add_take(world &w, sw_dispatch_args &a, u32 rank, program &p)
{
	a.mode |= SW_DISPATCH_ZERO;
	a.part = draw(2) == 0 ? a.wire_bytes : (a.wire_bytes / 2 + 15) / 16 * 16,
	a.parts = (a.wire_bytes + a.part - 1) / a.part, a.movers = 1 + draw(SW_DISPATCH_PASS_THREADS / 32);
	p.push_back(with(experts_take, a, 1 + draw(3), SW_DISPATCH_PASS_THREADS, taker::front(a) + a.movers * a.part));
}

// Calls f with the arguments of a call of few tokens, or of each of its halves.
template <typename F> void each_half(const sw_dispatch_args &a, bool halves, F f)
{
	for (u32 without : halves ? std::vector<u32>{SW_DISPATCH_RECEIVE, SW_DISPATCH_SEND} : std::vector<u32>{0}) {
		sw_dispatch_args h = a;
		h.mode &= ~without;
		f(h);
	}
}

// The copy of what a dispatch has left: of rows and indices.
sw_result_args results_of(const world &w, u32 rank)
{
	u64 own = w.segment(rank);
	sw_result_args r{};
	r.fault = own + w.state.control + offsetof(sw_control, fault), r.rows = own + w.counts + 1024 + 4 * w.size;
	auto add = [&](u64 to, u64 from, u64 row, bool fills) {
		sw_result_part &p = r.parts[r.count++];
		p.to = own + to, p.from = own + from, p.row = row, p.bytes = p.pitch = w.room * row, p.columns = 1;
		p.fills = fills, p.behind = ~0u;
	};
	if (!w.straight() && !w.in_place(rank))
		add(w.taken, w.rows, w.wire(), false);
	add(w.taken_sources, w.row_sources, 8, false);
	add(w.taken_indices, w.row_indices, 8 * w.top_k, true);
	return r;
}

void copy_what_is_left(const world &w, u32 rank, program &p)
{
	if (w.room == 0)
		return;
	sw_result_args r = results_of(w, rank);
	p.push_back({[r] { copy_results(r); }, 1 + draw(3), SW_RESULT_THREADS, 0});
}

void dispatch_of_few(world &w, sw_dispatch_args a, u32 rank, bool halves, program &p)
{
	u32 tables = w.by_token() ? 1 : SW_DISPATCH_FEW_THREADS / 32;
	size_t shared = std::max<size_t>(4 * tables * w.slots + 6 * a.tokens * a.top_k, taker::front(a));
	a.row_bytes = 2 * w.hidden, a.wire_bytes = w.wire();
	a.mode |= SW_DISPATCH_ZERO;
	auto kernel = w.by_token() ? (w.float8 ? dispatch_few_bf16 : dispatch_few)
	              : w.float8   ? dispatch_few_by_expert_bf16
	                           : dispatch_few_by_expert;
	each_half(a, halves, [&](const sw_dispatch_args &h) {
		u32 blocks = draw(3) == 0 ? 2 * SW_DISPATCH_FEW_PUBLISHER + draw(2) : 1 + draw(4);
		p.push_back(with(kernel, h, blocks, SW_DISPATCH_FEW_THREADS, shared));
	});
	copy_what_is_left(w, rank, p);
}

void add_dispatch(world &w, const batch &b, u32 rank, bool again, bool halves, program &p)
{
	sw_dispatch_args a = arguments(w, b, rank, again ? op_redispatch : op_dispatch);
	a.send.x = reinterpret_cast<u64>(b.narrow_x[rank].data());
	a.mode |= again ? SW_DISPATCH_CACHED : 0;
	a.mode |= w.scales_are;
	a.scale_words = w.scale_words(), a.send.scale_block = 128,
	a.send.scales = reinterpret_cast<const u32 *>(b.scale[rank].data());
	if (w.by_token()) {
		a.mode |= w.rows_by == compact ? SW_DISPATCH_COMPACT : 0;
		a.send.to_rows = w.rows_at(rank), a.send.to_scales = w.row_scales, a.send.to_indices = w.row_indices,
		a.send.to_weights = w.row_weights, a.send.to_sources = w.row_sources;
		if (w.straight())
			a.out.rows = w.segment(rank) + w.taken, a.out.room = w.room;
		if (w.in_place(rank))
			a.out.room = w.room_at(rank), memset(reinterpret_cast<void *>(w.segment(rank) + w.callers_rows),
			                                     others, w.most_rows * w.wire());
		if (w.few)
			return dispatch_of_few(w, a, rank, halves, p);
		if (halves)
			a.mode &= ~SW_DISPATCH_RECEIVE;
		bool beside = !halves && w.room != 0 && w.rows_by == compact && !w.in_place(rank);
		bool told = !halves && a.send.mapped != 0 && (!beside || w.hidden / 8 % 2 == 0) &&
		            (rank + w.hidden / 16) % 3 != 0; // ranks may differ
		a.mode |= (told ? SW_DISPATCH_TOLD : 0) | (beside ? SW_DISPATCH_BESIDE : 0);
		sw_dispatch_args s = a;
		s.send.mapped = told ? 0 : a.send.mapped;
		send(w, s, 2 * w.hidden, w.float8, p);
		if (told)
			p.push_back(with(dispatch_counts, a, 1, SW_DISPATCH_COUNTS_THREADS));
		if (halves)
			p.push_back(with(dispatch_receive, a, 1, SW_DISPATCH_THREADS));
		if (!beside)
			return copy_what_is_left(w, rank, p);
		sw_take_result_args t{a, results_of(w, rank), 1, 2}; // rows and sources
		p.push_back({[t] { take_results(t); }, 1 + draw(3), SW_TAKE_RESULT_THREADS, 0});
		return;
	}
	to_staging(w, a);
	if (w.few)
		return dispatch_of_few(w, a, rank, halves, p);
	if (!halves && draw(2) == 0)
		a.mode |= SW_DISPATCH_BESIDE;
	a.mode &= ~SW_DISPATCH_RECEIVE;
	send(w, a, 2 * w.hidden, w.float8, p);
	add_take(w, a, rank, p);
}

void sum(world &w, sw_dispatch_args &a, program &p)
{
	u32 whole = w.float8_sums ? float8_sum::stretch : 16, least = draw(2) == 0 ? a.wire_bytes : a.wire_bytes / 2;
	a.movers = SW_DISPATCH_SUM_THREADS / 32, a.depth = 1 + draw(3), a.part = (least + whole - 1) / whole * whole,
	a.parts = (a.wire_bytes + a.part - 1) / a.part;
	a.interval = draw(2) * 100;
	p.push_back(with(w.float8_sums ? combine_rows_bf16_float8 : combine_rows_bf16, a, 1 + draw(3),
	                 SW_DISPATCH_SUM_THREADS, a.movers * a.depth * w.size * a.part));
}

void pass(sw_dispatch_args &a, bool float8, program &p)
{
	a.part = SW_DISPATCH_PASS_PART * ((a.mode & SW_DISPATCH_BY_EXPERT) != 0 ? 1 : 1 + draw(3));
	a.parts = (a.row_bytes + a.part - 1) / a.part;
	p.push_back(
	    with(float8 ? experts_sum_bf16_float8 : experts_sum_bf16, a, 1 + draw(3), SW_DISPATCH_SUM_PASS_THREADS));
}

// The addresses of the rows that a rank's experts made, and of the sums.
u64 made_at(const world &w) { return w.heap; }
u64 sums_at(const world &w) { return (w.heap + w.most_rows * 2 * w.hidden + 255) / 256 * 256; }
u64 grads_at(const world &w) { return (sums_at(w) + w.max_tokens * 2 * w.hidden + 255) / 256 * 256; }

// A rank's rows are kept until its next call looks, unless others want the memory.
u32 keeps_rows(const world &w) { return w.shared ? 0 : SW_DISPATCH_KEEP; }

void add_combine(world &w, const batch &b, u32 rank, bool in_place, std::vector<float> &weights, program &p)
{
	bool halves = draw(2) == 0;
	sw_dispatch_args a = arguments(w, b, rank, op_combine);
	a.row_bytes = 2 * w.hidden, a.wire_bytes = w.partial(), a.sum.y = w.segment(rank) + sums_at(w),
	a.sum.window = SW_DISPATCH_WINDOW;
	if (w.biases > 0)
		a.sum.bias0 = reinterpret_cast<u64>(b.narrow_bias[0][rank].data());
	if (w.biases > 1)
		a.sum.bias1 = reinterpret_cast<u64>(b.narrow_bias[1][rank].data());
	if (w.late && w.few) {
		a.op = op_token_weights, a.send.weights = b.late[rank].data();
	} else if (w.late) {
		sw_dispatch_args t = a;
		t.op = op_token_weights, t.state.weights = a.state.weights = w.token_weights,
		t.send.weights = b.late[rank].data();
		p.push_back(with(token_weights, t, 1 + draw(3), SW_TOKEN_WEIGHTS_THREADS));
	}
	bool staged = !w.by_token() || w.float8_sums || !in_place;
	a.mode |= w.by_token() || w.shared ? 0 : SW_DISPATCH_FREE; // as kernels/cuda/dispatch_combine.go has it
	if (w.few) {
		a.out.rows = w.segment(rank) + made_at(w), a.sum.weights = weights.data(),
		a.sum.from_weights = w.weights;
		a.mode |= w.by_token() || w.late ? 0 : SW_DISPATCH_WEIGH;
		a.mode |= w.rows_by == compact ? SW_DISPATCH_COMPACT : 0;
		auto kernel = w.by_token()    ? (w.float8_sums ? combine_few_bf16_float8 : combine_few_bf16)
		              : w.late        ? (w.float8_sums ? combine_few_late_bf16_float8 : combine_few_late_bf16)
		              : w.float8_sums ? combine_few_by_expert_bf16_float8
		                              : combine_few_by_expert_bf16;
		each_half(a, halves, [&](const sw_dispatch_args &h) {
			p.push_back(with(kernel, h, 1 + draw(3), SW_DISPATCH_FEW_SUM_THREADS));
		});
		return;
	}
	a.sum.from_rows = staged ? w.sums : made_at(w);
	if (staged) {
		a.mode |= keeps_rows(w);
		a.sum.weights = weights.data();
		a.sum.from_weights = w.weights;
		if (!halves && draw(2) == 0)
			a.mode |= SW_DISPATCH_BESIDE;
		if (w.by_token() && !w.float8_sums && !halves && draw(2) == 0)
			a.sum.own = w.segment(rank) + made_at(w);
		sw_dispatch_args s = a;
		s.sum.y = 0, s.out.rows = w.segment(rank) + made_at(w), s.out.weights = a.out.weights;
		s.mode |= (w.rows_by == compact ? SW_DISPATCH_COMPACT : 0) |
		          (w.by_token() ? 0 : SW_DISPATCH_BY_EXPERT | SW_DISPATCH_WEIGH);
		pass(s, w.float8_sums, p);
	}
	if (halves) {
		p.push_back(with(combine_begin, a, 1, SW_MAX_RANKS));
		a.mode &= ~SW_DISPATCH_SEND;
	}
	sum(w, a, p);
}

void add_backward(world &w, const batch &b, u32 rank, std::vector<float> &weights, program &p)
{
	sw_dispatch_args a = arguments(w, b, rank, op_backward);
	a.send.x = reinterpret_cast<u64>(b.narrow_dy[rank].data());
	to_staging(w, a);
	a.mode |= SW_DISPATCH_CACHED;
	send(w, a, 2 * w.hidden, false, p);
	p.push_back(with(dispatch_receive, a, 1, SW_DISPATCH_THREADS));
	u64 own = w.segment(rank);
	if (w.by_token()) {
		a.out.rows = own + w.staging, a.sum.y = own + grads_at(w),
		a.mode = (a.mode & ~SW_DISPATCH_BY_EXPERT) | (w.rows_by == compact ? SW_DISPATCH_COMPACT : 0);
		pass(a, false, p);
		return;
	}
	a.out.rows = own + made_at(w), a.sum.y = own + grads_at(w), a.out.weights = 0, a.sum.from_weights = w.weights,
	a.mode |= SW_DISPATCH_WEIGH | SW_DISPATCH_ZERO;
	p.push_back(with(experts_spread_bf16, a, 1 + draw(2), SW_DISPATCH_PASS_THREADS));
	a.mode = SW_DISPATCH_SEND | SW_DISPATCH_RECEIVE | keeps_rows(w), a.sum.weights = weights.data(),
	a.row_bytes = 0;
	p.push_back(with(combine_weights, a, 1 + draw(2), SW_DISPATCH_FEW_SUM_THREADS));
}

// A launch of a rank's stream that is under way or over.
struct launched {
	std::vector<emu::block *> blocks;
	bool over = false;
};

// Runs the ranks' programs, each a stream. A launch may begin when all blocks of the one before have let it.
bool run(world &w, std::vector<program> &programs, const std::function<void(u64)> &each_sweep = {})
{
	std::vector<std::deque<launched>> streams(w.size);
	std::vector<u32> pace(w.size, 1);
	if (draw(3) == 0)
		pace[draw(w.size)] = 1 + draw(20);
	auto go_on = [&](u32 r) {
		std::deque<launched> &s = streams[r];
		bool idle = true;
		for (launched &l : s) {
			l.over = l.over || ended(l.blocks);
			idle = idle && l.over;
		}
		size_t next = s.size();
		auto may_begin = [&] {
			if (idle || programs[r][next].waits || programs[r][next - 1].waits)
				return idle;
			return std::all_of(s.back().blocks.begin(), s.back().blocks.end(),
			                   [](emu::block *b) { return b->released || b->alive == 0; });
		};
		if (next < programs[r].size() && may_begin()) {
			const launch_of &l = programs[r][next];
			s.emplace_back();
			for (u32 i = 0; i < l.blocks; i++) {
				s.back().blocks.push_back(launch(r, i, l.blocks, l.threads, l.shared + 128, l.kernel));
				s.back().blocks.back()->before = next == 0 ? nullptr : &s[next - 1].over;
			}
			idle = false;
		}
		return idle ? at_work::no : at_work::yes;
	};
	return run_ranks(w.size, go_on, [&](u32 r) { return pace[r]; }, each_sweep);
}

bool no_faults(const world &w)
{
	for (u32 r = 0; r < w.size; r++)
		if (w.fault(r) != 0) {
			printf("rank %u has fault %u: peer %u, %llu, %llu, %llu\n", r, w.fault(r), w.faults[r].peer,
			       static_cast<unsigned long long>(w.faults[r].sent),
			       static_cast<unsigned long long>(w.faults[r].expected),
			       static_cast<unsigned long long>(w.faults[r].limit));
			return false;
		}
	return true;
}

#define CHECK(what, got, want) \
	do { \
		auto got_ = (got); \
		decltype(got_) want_ = (want); \
		if (!(got_ == want_)) { \
			printf("%s: %.9g instead of %.9g (layout %d, rank %u)\n", what, static_cast<double>(got_), \
			       static_cast<double>(want_), w.rows_by, rank); \
			return false; \
		} \
	} while (0)

// A token as it crosses: bytes and scales.
void crossed(const world &w, const batch &b, u32 src, u32 token, std::vector<u8> &bytes, std::vector<u32> &scales)
{
	const float *x = &b.x[src][token * w.hidden];
	bytes.clear(), scales.clear();
	for (u32 h = 0; h < w.hidden; h += 128) {
		float most = 1e-4f;
		u32 n = min(128u, w.hidden - h);
		for (u32 i = 0; i < n; i++)
			most = fmaxf(most, fabsf(x[h + i]));
		float scale = most / 448, factor = 448 / most;
		if (w.scales_are != 0) {
			int e;
			if (frexpf(scale, &e) == 0.5f)
				e--;
			scale = ldexpf(1, e), factor = ldexpf(1, -e);
		}
		for (u32 i = 0; i < n; i++) {
			if (w.float8) {
				bytes.push_back(static_cast<u8>(e4m3_of_float(x[h + i] * factor)));
				continue;
			}
			u32 v = bf16_of(x[h + i]);
			bytes.push_back(static_cast<u8>(v)), bytes.push_back(static_cast<u8>(v >> 8));
		}
		u32 bits = __float_as_uint(scale), block = h / 128;
		if (w.scales_are == SW_DISPATCH_EXPONENTS && block % 4 != 0)
			scales.back() |= bits >> 23 << 8 * (block % 4);
		else if (w.float8)
			scales.push_back(w.scales_are == SW_DISPATCH_EXPONENTS ? bits >> 23 : bits);
		else if (w.given)
			scales.push_back(__float_as_uint(b.scale[src][token * w.scale_words() + h / 128]));
	}
}

bool right_rows(world &w, const batch &b)
{
	for (u32 rank = 0; rank < w.size; rank++) {
		std::vector<u32> counts, offsets, from, scales;
		std::vector<u8> bytes;
		std::vector<row> rows = expected(w, b, rank, counts, offsets, from);
		u64 own = w.segment(rank);
		const u32 *c = &at<u32>(own + w.counts), *o = &at<u32>(own + w.counts + 1024),
			  *f = &at<u32>(own + w.counts + 2048);
		for (size_t i = 0; i < counts.size(); i++) {
			CHECK("count", c[i], counts[i]);
			if (w.lands)
				CHECK("rows that have landed", at<u32>(own + w.counts + 3072 + 4 * i), counts[i]);
		}
		for (size_t i = 0; i < offsets.size(); i++)
			CHECK("offset", o[i], offsets[i]);
		for (u32 s = 0; s < w.size; s++)
			CHECK("rows from a rank", f[s], from[s]);
		if (w.told) {
			std::vector<u32> numbers = counts;
			CHECK("ticket", at<u64>(own + w.numbers), w.by_token() ? ticket : u64{0});
			numbers.insert(numbers.end(), offsets.begin(), offsets.end());
			numbers.insert(numbers.end(), from.begin(), from.end());
			for (size_t i = 0; i < numbers.size(); i++)
				CHECK("number for the caller", at<u32>(own + w.numbers + 8 + 4 * i), numbers[i]);
		}
		for (u64 i = offsets.back() * w.top_k; i < w.room * w.top_k; i++)
			CHECK("index behind what came", at<i64>(own + w.taken_indices + 8 * i), i64{-1});
		for (const row &q : rows) {
			crossed(w, b, q.src, q.token, bytes, scales);
			for (size_t i = 0; q.at < w.room && !w.in_place(rank) && i < bytes.size(); i++)
				CHECK("byte of a row that was taken",
				      at<u8>(own + w.taken + static_cast<u64>(q.at) * w.wire() + i), bytes[i]);
			const u8 *got = &at<u8>(own + w.rows_at(rank) + static_cast<u64>(q.at) * w.wire());
			for (size_t i = 0; !w.straight() && i < bytes.size(); i++)
				CHECK("byte of a row", got[i], q.at < w.room_at(rank) ? bytes[i] : others);
			for (size_t i = 0; i < scales.size(); i++)
				CHECK("scale",
				      at<u32>(own + w.row_scales + 4 * (static_cast<u64>(q.at) * w.scale_words() + i)),
				      scales[i]);
			if (q.at < w.room)
				CHECK("source that was taken",
				      at<u64>(own + w.taken_sources + 8 * static_cast<u64>(q.at)),
				      static_cast<u64>(q.token) << 32 | q.src);
			CHECK("source", at<u64>(own + w.row_sources + 8 * static_cast<u64>(q.at)),
			      static_cast<u64>(q.token) << 32 | q.src);
			for (u32 k = 0; k < w.top_k; k++) {
				u32 i = q.token * w.top_k + k;
				int e = b.choice[q.src][i];
				bool here = e >= 0 && rank_of(w, slot_of(w, q.src, q.token, e)) == rank;
				if (q.choice == static_cast<int>(k))
					CHECK("weight", at<float>(own + w.row_weights + 4 * static_cast<u64>(q.at)),
					      b.weight[q.src][i]);
				if (q.choice >= 0)
					continue;
				u64 at_k = static_cast<u64>(q.at) * w.top_k + k;
				CHECK("weight", at<float>(own + w.row_weights + 4 * at_k),
				      here ? b.weight[q.src][i] : 0);
				i64 index = here ? static_cast<i64>(slot_of(w, q.src, q.token, e) - w.first[rank]) : -1;
				CHECK("index", at<i64>(own + w.row_indices + 8 * at_k), index);
				if (q.at < w.room)
					CHECK("index that was taken", at<i64>(own + w.taken_indices + 8 * at_k), index);
			}
		}
	}
	return true;
}

// The result of a rank's experts for a row.
float made(const batch &b, const world &w, u32 rank, const row &q, u32 h)
{
	return bf16(b.x[q.src][q.token * w.hidden + h] * (1 + static_cast<float>(rank + q.choice + 1) / 4));
}

void make_rows(world &w, const batch &b, u32 rank)
{
	std::vector<u32> counts, offsets, from;
	memset(reinterpret_cast<void *>(w.segment(rank) + made_at(w)), 0xFF, w.most_rows * 2 * w.hidden); // NaN
	for (const row &q : expected(w, b, rank, counts, offsets, from))
		for (u32 h = 0; h < w.hidden; h++)
			at<u16>(w.segment(rank) + made_at(w) + 2 * (static_cast<u64>(q.at) * w.hidden + h)) =
			    static_cast<u16>(bf16_of(made(b, w, rank, q, h)));
}

// The value of a partial sum that has crossed as float8.
void cross_as_float8(rows_t &v)
{
	for (size_t first = 0; first < v.size(); first += 128) {
		size_t end = std::min(first + 128, v.size());
		float most = 1e-4f;
		for (size_t i = first; i < end; i++)
			most = fmaxf(most, fabsf(v[i]));
		for (size_t i = first; i < end; i++)
			v[i] = e4m3_to_float(e4m3_of_float(v[i] * (448 / most))) * (most / 448);
	}
}

bool right_sums(world &w, const batch &b, bool staged, const std::vector<std::vector<float>> &weights)
{
	for (u32 rank = 0; rank < w.size; rank++)
		for (u32 t = 0; t < b.tokens[rank]; t++) {
			rows_t y(w.hidden), part(w.hidden);
			for (u32 i = 0; i < w.biases; i++)
				for (u32 h = 0; h < w.hidden; h++)
					y[h] += b.bias[i][rank][t * w.hidden + h];
			for (u32 r = 0; r < w.size; r++) {
				bool any = false;
				std::fill(part.begin(), part.end(), 0.f);
				for (u32 k = 0; k < w.top_k; k++) {
					int e = b.choice[rank][t * w.top_k + k];
					if (e < 0 || rank_of(w, slot_of(w, rank, t, e)) != r || (w.by_token() && any))
						continue;
					any = true;
					row q{rank, t, w.by_token() ? -1 : static_cast<int>(k), 0};
					for (u32 h = 0; h < w.hidden; h++)
						part[h] += w.by_token()
						               ? made(b, w, r, q, h)
						               : (w.late ? b.late : b.weight)[rank][t * w.top_k + k] *
						                     made(b, w, r, q, h);
				}
				if (w.float8_sums)
					cross_as_float8(part);
				for (u32 h = 0; any && h < w.hidden; h++)
					y[h] += w.float8_sums ? part[h] : bf16(part[h]);
			}
			for (u32 h = 0; h < w.hidden; h++)
				CHECK("sum",
				      at<u16>(w.segment(rank) + sums_at(w) + 2 * (static_cast<u64>(t) * w.hidden + h)),
				      static_cast<u16>(bf16_of(y[h])));
			for (u32 k = 0; staged && k < w.top_k; k++)
				CHECK("weight that came back", weights[rank][t * w.top_k + k],
				      b.choice[rank][t * w.top_k + k] < 0 ? 0 : b.weight[rank][t * w.top_k + k]);
		}
	return true;
}

bool right_gradients(world &w, const batch &b, const std::vector<std::vector<float>> &weights)
{
	std::vector<u32> counts, offsets, from;
	for (u32 rank = 0; rank < w.size; rank++)
		for (const row &q : expected(w, b, rank, counts, offsets, from)) {
			float chain[256] = {},
			      factor = q.choice < 0 ? 1 : b.weight[q.src][q.token * w.top_k + q.choice];
			for (u32 h = 0; h < w.hidden; h++) {
				float dy = b.dy[q.src][q.token * w.hidden + h];
				CHECK("gradient of a row",
				      at<u16>(w.segment(rank) + grads_at(w) +
				              2 * (static_cast<u64>(q.at) * w.hidden + h)),
				      static_cast<u16>(bf16_of(factor * dy)));
				chain[h % 256] += made(b, w, rank, q, h) * dy;
			}
			for (u32 by : {4, 2, 1, 128, 64, 32, 16, 8})
				for (u32 i = 0; i + by < 256; i++)
					chain[i] += chain[i + by];
			if (q.choice >= 0)
				CHECK("gradient of a weight", weights[q.src][q.token * w.top_k + q.choice], chain[0]);
		}
	return true;
}

// The contents of the ranks' memory at some place of their streams, behind the handle's state.
struct memories {
	std::vector<std::vector<u8>> of;

	// Keeps a rank's, on its stream.
	launch_of keep(const world &w, u32 rank)
	{
		of.resize(w.size);
		return by_caller([this, &w, rank] {
			const u8 *from = &at<u8>(w.segment(rank));
			of[rank].assign(from + w.state.end, from + w.stride);
		});
	}

	void restore(world &w) const
	{
		for (u32 r = 0; r < w.size; r++)
			memcpy(&at<u8>(w.segment(r) + w.state.end), of[r].data(), of[r].size());
	}

	static launch_of by_caller(std::function<void()> f)
	{
		return {[f] {
				if (threadIdx.x == 0)
					f();
			},
		        1, 32, 0, true};
	}
};

// The caller's copy of the routing, on a rank's stream. The state has it no more.
void keep_routing(world &w, u32 rank, program &p)
{
	if (!w.keeps)
		return;
	p.push_back(memories::by_caller([&w, rank] {
		void *from = reinterpret_cast<void *>(w.segment(rank) + w.state.arrived);
		memcpy(w.kept[rank].data(), from, 8 * w.kept[rank].size());
		memset(from, 0, 8 * w.kept[rank].size());
	}));
}

// The same tokens with the same experts, but other rows.
batch other_rows(const batch &b)
{
	batch o = b;
	std::swap(o.x, o.dy), std::swap(o.narrow_x, o.narrow_dy);
	for (rows_t &v : o.scale)
		for (float &f : v)
			f = -f;
	return o;
}

} // namespace
