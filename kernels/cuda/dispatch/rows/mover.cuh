// A warp that moves rows of many tokens, as they are or as float8, by bulk copies through places of its own in shared
// memory.
//
// rows/send.cuh calls this. It reads the caller's tokens and writes rows of peers' outputs or staging, and the scales
// that it makes.
#pragma once

#include "sender.cuh"

namespace sw {

// A warp that moves. Part k of it is part k*movers+warp of the block's tokens; each of its places in shared memory
// carries every depth-th of them.
template <typename Quantiser> struct mover {
	const sw_dispatch_args &a;
	rows_sender &r;
	u8 *ring; // of this warp
	u32 *scales;
	arrivals *full;

	__device__ __forceinline__ mover(const sw_dispatch_args &a, rows_sender &r, u8 *memory)
	    : a(a), r(r), ring(memory + static_cast<u64>(r.warp) * a.depth * a.part),
	      scales(reinterpret_cast<u32 *>(memory + static_cast<u64>(a.movers) * a.depth * a.part) +
	             r.warp * (SW_DISPATCH_SCALES / 4)),
	      full(r.b.full + r.warp * a.depth)
	{
	}

	__device__ __forceinline__ u32 tasks() const { return r.mine.count * a.parts; }

	__device__ __forceinline__ void load(u32 k)
	{
		u32 task = r.warp + k * a.movers;
		if (task >= tasks())
			return;
		u32 t = task / a.parts, at = (task - t * a.parts) * a.part, bytes = min(a.part, a.row_bytes - at),
		    place = k % a.depth;
		full[place].expect(bytes);
		bulk_load_once(ring + place * a.part, a.send.x + static_cast<u64>(r.mine.first + t) * a.row_bytes + at,
		               bytes, full + place);
	}

	__device__ __forceinline__ void begin()
	{
		if (r.lane == 0)
#pragma unroll 1
			for (u32 k = 0; k < a.depth; k++)
				load(k);
	}

	// With good false what has been loaded is awaited only.
	__device__ __forceinline__ void run(bool good)
	{
		u32 n = a.world.size, due = static_cast<u32>(clock()) +
		                            (r.warp * gridDim.x + blockIdx.x) * (a.interval / (a.movers * gridDim.x));
		u64 there = good && r.lane < n ? r.b.output[r.lane] : 0;
		u32 room = good && r.lane < n ? r.b.room[r.lane] : 0;
		u32 k = 0;
#pragma unroll 1
		for (u32 task = r.warp; task < tasks(); task += a.movers, k++) {
			u32 t = task / a.parts, at = (task - t * a.parts) * a.part,
			    bytes = min(a.part, a.row_bytes - at), place = k % a.depth;
			u8 *row = ring + place * a.part;
			full[place].await(k / a.depth);
			if (!good) {
				if (k + 1 >= a.depth)
					return;
				continue;
			}
			int to = r.lane < n ? r.s.place[t * n + r.lane] : -1;
			Quantiser::apply(a, r, row, bytes, at, t, scales);
			if (a.interval != 0) {
#pragma unroll 1
				while (static_cast<int>(due - static_cast<u32>(clock())) > 0)
					;
				due += a.interval * __popc(__ballot_sync(~0u, to >= 0 && r.lane != a.world.rank));
			}
#pragma unroll 1
			for (u32 d = r.lane; d < n; d += 32) {
				int p = d == r.lane ? to : r.s.place[t * n + d];
				if (static_cast<u32>(p) < (d == r.lane ? room : r.b.room[d])) // not -1
					bulk_store((d == r.lane ? there : r.b.output[d]) +
					               static_cast<u64>(p) * a.wire_bytes + Quantiser::out(at),
					           row, Quantiser::out(bytes));
			}
			bulk_commit();
			// the place before this one is free when its stores have read it
			if (a.depth == 1)
				bulk_await_read<0>();
			else
				bulk_await_read<1>();
			constexpr u32 behind = 4; // parts that may be on their way
			bool reports = k >= behind && r.progresses();
			if (reports) {
				bulk_await_written<behind>();
				fence_bulk();
			}
			__syncwarp();
			if (reports && r.lane == 0)
				store_release_cta(&r.b.moved[r.warp], k + 1 - behind);
			if (r.lane == 0 && (a.depth == 1 || k > 0))
				load(a.depth == 1 ? k + 1 : k - 1 + a.depth);
		}
		bulk_await();
		fence_bulk();
		__syncwarp();
		if (r.lane == 0)
			store_release_cta(&r.b.moved[r.warp], tasks());
	}
};

struct as_they_are {
	static constexpr bool makes_scales = false;
	static __device__ __forceinline__ u32 out(u32 bytes) { return bytes; }
	static __device__ __forceinline__ void apply(const sw_dispatch_args &, rows_sender &, u8 *, u32, u32, u32,
	                                             u32 *)
	{
	}
};

template <kind type> struct to_float8 {
	static constexpr bool makes_scales = true;
	static __device__ __forceinline__ u32 out(u32 bytes) { return bytes / numbers<type>::size; }
	static __device__ __forceinline__ void apply(const sw_dispatch_args &a, rows_sender &r, u8 *row, u32 bytes,
	                                             u32 at, u32 t, u32 *scales)
	{
		bool exponents = (a.mode & SW_DISPATCH_EXPONENTS) != 0;
		quantise<type>(row, bytes, scales, a.send.scale_block == 128 ? 128 : 0, a.mode, r.lane);
		u32 blocks = (out(bytes) + a.send.scale_block - 1) / a.send.scale_block,
		    words = exponents ? (blocks + 3) / 4 : blocks, first = out(at) / a.send.scale_block;
#pragma unroll 1
		for (u32 d = 0; d < a.world.size; d++) {
			int p = r.s.place[t * a.world.size + d];
			if (p < 0)
				continue;
			u64 there = segment(a.world, d);
#pragma unroll 1
			for (u32 i = r.lane; i < words; i += 32)
				*view<u32>(r.scale_place(there, p, first + i)) =
				    scale_word(scales, i, blocks, exponents);
		}
		fence_bulk();
		__syncwarp();
	}
};

} // namespace sw
