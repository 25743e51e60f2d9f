// The receiving half of a dispatch of few tokens.
//
// few/dispatch.cuh calls this. It reads the notes and packets of this rank's state and writes the caller's outputs and
// the handle's state.
#pragma once

#include "../experts.cuh"
#include "wipe.cuh"

namespace sw {

// The receiving half of a dispatch.
template <typename Wire, bool by_expert> struct few_receiver {
	const sw_dispatch_args &a;
	taker &t;
	u64 epoch, own;
	u32 flag, row_flag, lane, n, wiped; // the token whose unused places are wiped
	wait &w;
	u32 lost;               // ranks of which the warp takes no more
	masks::patient without; // the rank that a wait is for, when it is masked
	int rows[2], slots[2]; // of choices lane and lane+32: the rows that the token goes to, or -1; where a token has
	                       // one, lane 0 has it

	__device__ __forceinline__ few_receiver(const sw_dispatch_args &a, taker &t, wait &w, u64 epoch, u32 wiped)
	    : a(a), t(t), epoch(epoch), own(own_segment(a.world)), flag(packet::flag(epoch)),
	      row_flag(Wire::flag(epoch)), lane(threadIdx.x & 31), n(a.world.size), wiped(wiped), w(w), lost(t.out)
	{
	}

	// The end of a wait of all lanes. False where one has given up, or ended without the rank.
	__device__ __forceinline__ bool came(bool good, u32 src)
	{
		if (__any_sync(~0u, without.gone)) {
			if (lane == 0)
				masks::lose(a, 1u << src);
			lost |= 1u << src;
			without = {};
			return false;
		}
		without.last = false;
		return !__any_sync(~0u, !good);
	}

	// Calls f with each row that the token goes to, and its slot.
	template <typename F> __device__ __forceinline__ void each_row(F f) const
	{
#pragma unroll
		for (u32 i = 0; i < 2; i++)
#pragma unroll 1
			for (u32 left = __ballot_sync(~0u, rows[i] >= 0); left != 0; left &= left - 1) {
				u32 from = __ffs(left) - 1;
				int row = __shfl_sync(~0u, rows[i], from), slot = __shfl_sync(~0u, slots[i], from);
				f(row, slot);
			}
	}

	// Puts the part of a row where it goes.
	__device__ __forceinline__ void write_rows(const Wire &x, u32 part) const
	{
		each_row([&](int row, int slot) {
			if (row < a.out.room)
				x.store(a.out.rows + static_cast<u64>(row) * a.wire_bytes, a.row_bytes, part, lane);
			if constexpr (Wire::scaled) {
				u32 block = Wire::block(a.row_bytes, part, lane);
				if (block != ~0u)
					write_scale(static_cast<u32>(row), static_cast<u32>(slot), block, x.scale);
			}
		});
	}

	// Puts the scale of a block where it goes. The last block's exponent has zeros up to the end of its word.
	__device__ __forceinline__ void write_scale(u32 row, u32 slot, u32 block, u32 scale) const
	{
		if ((a.mode & SW_DISPATCH_EXPONENTS) == 0) {
			*view<volatile u32>(row_scale(a, row, block, slot)) = scale;
			return;
		}
		volatile u8 *word = view<volatile u8>(row_scale(a, row, block / 4, slot));
		u32 blocks = (a.wire_bytes + 127) / 128;
		word[block % 4] = static_cast<u8>(scale);
#pragma unroll 1
		for (u32 i = block % 4 + 1; block + 1 == blocks && i < 4; i++)
			word[i] = 0;
	}

	// The scales that the sender's caller has given.
	__device__ __forceinline__ bool write_scales(u32 src, u64 note, packet v)
	{
#pragma unroll 1
		for (u32 begin = 0; begin < a.scale_words; begin += 96) {
			u32 word = begin + 3 * lane;
			bool good = true;
#pragma unroll 1
			while (word < a.scale_words && good && !v.has(flag))
				v = packet::get(note + 16 * (1 + a.top_k + word / 3)),
				good = v.has(flag) || without.more(a, w, src);
			if (!came(good, src))
				return false;
			each_row([&, v](int row, int slot) {
#pragma unroll
				for (u32 j = 0; j < 3; j++)
					if (word + j < a.scale_words)
						*view<volatile u32>(row_scale(a, static_cast<u32>(row), word + j,
						                              static_cast<u32>(slot))) = v.word(j);
			});
			v = {};
		}
		return true;
	}

	// The row of an output by token of row i of rank src.
	__device__ __forceinline__ u32 row_of(u32 src, u32 i) const
	{
		return ((a.mode & SW_DISPATCH_COMPACT) != 0 ? t.b.first[src] : src * a.max_tokens) + i;
	}

	// The note of the token in place p among those of its rank's part, which has row r where rows are by token.
	__device__ __forceinline__ void write_beside(u32 p, u32 r, u64 source, const u32 *number,
	                                             const float *weight) const
	{
#pragma unroll
		for (u32 i = 0; i < 2; i++) {
			u32 k = lane + 32 * i;
			u64 at = static_cast<u64>(r) * a.top_k + k;
			if (k >= a.top_k)
				continue;
			view<u64>(own + a.send.to_indices)[at] =
			    slots[i] < 0 ? ~0ull : numbered_choice(number[i], static_cast<u32>(slots[i]));
			if (a.send.to_weights != 0)
				view<float>(own + a.send.to_weights)[at] = weight[i];
			if (!by_expert)
				continue;
			state::spread(a)[at] = rows[i];
			if (rows[i] >= 0 && a.out.weights != 0)
				a.out.weights[rows[i]] = weight[i];
			if (rows[i] >= 0 && a.out.sources != 0)
				a.out.sources[rows[i]] = source;
		}
		if (lane != 0)
			return;
		state::sources(a)[p] = source;
		if (a.send.to_sources != 0)
			view<u64>(own + a.send.to_sources)[r] = source;
	}

	// Says that the token is there, to those who want to know.
	__device__ __forceinline__ void land() const
	{
		if (a.send.landed == 0)
			return;
		__syncwarp();
		count_landed(a, rows, slots);
	}

	// Takes parts from `part` to end of token k of rank src. False when a wait was given up. With `absent` true the
	// rank has no more tokens.
	__device__ __forceinline__ bool take(u32 src, u32 k, u32 part, u32 end, bool &absent)
	{
		u64 note = note_place(a, a.world.rank, src, k, epoch),
		    place = row_place(a, a.world.rank, src, k, epoch);
		Wire x;
		packet head, mine, more{}, scale{};
		bool good = true, comes = false, scales = !Wire::scaled && part == 0 && 3 * lane < a.scale_words;
		u32 used = Wire::used(a.row_bytes, part, lane);
#pragma unroll 1
		while (good) {
			head = packet::get(note);
			mine = packet::get(note + 16 * min(lane + 1, a.top_k));
			if (a.top_k > 32)
				more = packet::get(note + 16 * min(lane + 33, a.top_k));
			if (scales)
				scale = packet::get(note + 16 * (1 + a.top_k + lane));
			bool there = x.read_packets(place, part, used, lane, row_flag);
			comes = static_cast<int>(head.word(0)) >= 0;
			if (head.has(flag) &&
			    (!comes || (there && mine.has(flag) && (a.top_k <= 32 || more.has(flag)))))
				break;
			good = without.more(a, w, src);
		}
		if (!came(good, src))
			return false;
		absent = k >= head.word(1);
		if (!comes) {
			if (part == 0 && k == wiped)
				wipe(a, src, k, epoch, 16, a.state.note_stride, lane);
			return true;
		}
		u32 p = src * a.max_tokens + head.word(0), r = by_expert ? p : row_of(src, head.word(0)),
		    number[2] = {mine.word(1), more.word(1)};
		float weight[2] = {__uint_as_float(mine.word(2)), __uint_as_float(more.word(2))};
		slots[0] = lane < a.top_k ? static_cast<int>(mine.word(0)) : -1,
		slots[1] = lane + 32 < a.top_k ? static_cast<int>(more.word(0)) : -1;
#pragma unroll
		for (u32 i = 0; i < 2; i++)
			rows[i] = slots[i] < 0 || !by_expert
			              ? -1
			              : static_cast<int>(t.base[src * a.local + slots[i]] + number[i]);
		if (part == 0)
			write_beside(p, r, static_cast<u64>(k) << 32 | src, number, weight);
		if (!by_expert)
			rows[0] = lane == 0 ? static_cast<int>(r) : -1;
		return finish(x, src, note, scale, place, part, end);
	}

	// The same of row j of a rank, whose token and places are known from an earlier dispatch.
	__device__ __forceinline__ bool retake(u32 src, u32 j, u32 part, u32 end)
	{
		u32 p = src * a.max_tokens + j, k = static_cast<u32>(state::sources(a)[p] >> 32);
#pragma unroll
		for (u32 i = 0; i < 2; i++) {
			u64 at = static_cast<u64>(p) * a.top_k + lane + 32 * i;
			bool some = by_expert && lane + 32 * i < a.top_k;
			rows[i] = some ? state::spread(a)[at] : -1;
			slots[i] = some ? slot_in(state::indices(a)[at]) : -1;
		}
		if (!by_expert)
			rows[0] = lane == 0 ? static_cast<int>(row_of(src, j)) : -1;
		u64 place = row_place(a, a.world.rank, src, k, epoch);
		Wire x;
		return await(x, src, place, part) &&
		       finish(x, src, note_place(a, a.world.rank, src, k, epoch), {}, place, part, end);
	}

	__device__ __forceinline__ bool await(Wire &x, u32 src, u64 place, u32 part)
	{
		bool good = true;
		u32 used = Wire::used(a.row_bytes, part, lane);
#pragma unroll 1
		while (good && !x.read_packets(place, part, used, lane, row_flag))
			good = without.more(a, w, src);
		return came(good, src);
	}

	__device__ __forceinline__ bool finish(Wire &x, u32 src, u64 note, packet scale, u64 place, u32 part, u32 end)
	{
		if (part == 0 && !Wire::scaled && a.scale_words != 0 && !write_scales(src, note, scale))
			return false;
#pragma unroll 1
		for (;;) {
			write_rows(x, part);
			if (++part == end)
				break;
			if (!await(x, src, place, part))
				return false;
		}
		land();
		return true;
	}

	// Wipes what no rank sends with routing that is known. A warp.
	__device__ __forceinline__ void wipe_cached() const
	{
#pragma unroll 1
		for (u32 src = 0; src < n; src++) {
			u32 count = state::arrived(a)[src];
			bool comes = false;
#pragma unroll 1
			for (u32 i = lane; i < count; i += 32)
				comes |= state::sources(a)[src * a.max_tokens + i] >> 32 == wiped;
			if (!__any_sync(~0u, comes))
				wipe(a, src, wiped, epoch, 0, a.state.note_stride, lane);
		}
	}

	// All rows. The caller's count of rows that have landed wants them whole.
	__device__ __forceinline__ void run(bool cached)
	{
		u32 all = Wire::parts(a.row_bytes), parts = a.send.landed != 0 ? 1 : all;
		u64 through = 0; // ranks that have no more tokens
		const u32 *arrived = state::arrived(a);
		u32 busy = gridDim.x > 1 ? 1 : 0; // the first block looks after counts
		few_tasks tasks(busy, gridDim.x - busy);
#pragma unroll 1
		for (u32 task = tasks.first; task < a.max_tokens * n * parts; task += tasks.step) {
			u32 i = task / (n * parts), rest = task - i * n * parts, src = rest / parts,
			    part = rest - src * parts, end = a.send.landed != 0 ? all : part + 1;
			bool good = true, absent = false;
			if ((lost >> (src & 31) & 1) != 0) { // there are fewer then
				if (part == 0 && i == wiped)
					wipe(a, src, i, epoch, 0, a.state.note_stride, lane);
			} else if (cached) {
				if (i < arrived[src])
					good = retake(src, i, part, end);
			} else if ((through >> src & 1) == 0 || (part == 0 && i == wiped)) {
				good = take(src, i, part, end, absent);
				through |= static_cast<u64>(absent) << src;
			}
			if (!good && (lost >> (src & 31) & 1) == 0) {
				give_up(a.world, w.kind, src, epoch, false);
				return;
			}
		}
	}
};

} // namespace sw
