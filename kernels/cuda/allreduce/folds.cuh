// Folds: a warp combines the same bytes of several rows, in the order of ranks, and stores the result in several
// places.
//
// The reducing warps of the exchange through memory call this. Reads the rows and writes the targets that its table
// names, in this rank's segment or in peers'; order comes from the caller.
#pragma once

#include "../tiles.cuh"
#include "elements.cuh"

namespace sw {

// Rows and targets of this rank's slice. A row or target in staging has a place of its own for each chunk.
struct fold_table {
	u64 from[SW_MAX_RANKS], to[SW_MAX_RANKS];
	u64 from_staged, to_staged; // a bit a row or target
	u32 rows, targets;
	u32 aligned; // all of them, to 16 bytes
	u32 type, op;
	u64 moved; // moved_word
	ending end;

	__device__ __forceinline__ u64 row(u32 i, i64 at, i64 slot_at) const
	{
		return from[i] + static_cast<u64>(from_staged >> i & 1 ? slot_at : at);
	}
	__device__ __forceinline__ u64 target(u32 i, i64 at, i64 slot_at) const
	{
		return to[i] + static_cast<u64>(to_staged >> i & 1 ? slot_at : at);
	}
};

// The share of one warp in a fold: tiles first, first+step, ... of `bytes` bytes from offset `at` of the slice on, or
// slot_at of staging.
struct fold_run {
	i64 at, slot_at, bytes;
	u32 first, step, lane;
	pace when;     // of whole tiles
	u32 crossings; // of a tile
};

// Up to 16 bytes at any address.
__device__ __forceinline__ uint4 load_piece(u64 p, u32 n)
{
	if (n == 16 && (p & 15) == 0)
		return load_vector(p);
	u32 w[4] = {0, 0, 0, 0};
	if (n == 16 && (p & 3) == 0) {
#pragma unroll
		for (int i = 0; i < 4; i++)
			w[i] = *reinterpret_cast<const volatile u32 *>(p + 4 * i);
	} else {
#pragma unroll
		for (u32 i = 0; i < 16; i++)
			if (i < n)
				w[i / 4] |= static_cast<u32>(load_byte(p + i)) << (8 * (i & 3));
	}
	return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ void store_piece(u64 p, u32 n, uint4 v)
{
	if (n == 16 && (p & 15) == 0) {
		store_vector(p, v);
		return;
	}
	u32 w[4] = {v.x, v.y, v.z, v.w};
	if (n == 16 && (p & 3) == 0) {
#pragma unroll
		for (int i = 0; i < 4; i++)
			*reinterpret_cast<volatile u32 *>(p + 4 * i) = w[i];
	} else {
#pragma unroll
		for (u32 i = 0; i < 16; i++)
			if (i < n)
				store_byte(p + i, static_cast<u8>(w[i / 4] >> (8 * (i & 3))));
	}
}

// Sums of whole tiles, aligned. `wide` rows are in flight at a time, 16 vectors of a thread together; less than 8 are
// all that there are.
template <typename E, int wide> __device__ __noinline__ void fold_sums(const fold_table &t, const fold_run &f)
{
	constexpr int each = 16 / wide;
	pace when = f.when;
#pragma unroll 1
	for (i64 tile = f.first * tile_bytes; tile + tile_bytes <= f.bytes; tile += f.step * tile_bytes) {
		when.next(f.crossings, f.lane);
		tell_tile(t.moved, static_cast<u32>(tile / tile_bytes), f.lane);
#pragma unroll 1
		for (i64 o = tile + 16 * f.lane; o < tile + tile_bytes; o += 512 * each) {
			typename E::value a[each][E::per];
			u32 first = 0;
			do {
				uint4 v[wide][each];
#pragma unroll
				for (int r = 0; r < wide; r++) {
					bool on = wide == 2 || first + r < t.rows;
					u64 p = t.row(on ? first + r : 0, f.at + o, f.slot_at + o);
#pragma unroll
					for (int k = 0; k < each; k++)
						v[r][k] = wide == 2 ? load_vector(p + 512 * k)
						                    : load_vector_if(on, p + 512 * k);
				}
#pragma unroll
				for (int k = 0; k < each; k++) {
					if (wide < 8 || first == 0)
						E::widen(a[k], v[0][k]);
					else
						combine<E, true>(a[k], v[0][k], SW_OP_SUM);
#pragma unroll
					for (int r = 1; r < wide; r++)
						if (wide == 2 || first + r < t.rows)
							combine<E, true>(a[k], v[r][k], SW_OP_SUM);
				}
				first += wide;
			} while (wide == 8 && first < t.rows);
			uint4 out[each];
#pragma unroll
			for (int k = 0; k < each; k++)
				out[k] = result<E>(a[k], t.end);
#pragma unroll 1
			for (u32 i = 0; i < t.targets; i++) {
				u64 p = t.target(i, f.at + o, f.slot_at + o);
#pragma unroll
				for (int k = 0; k < each; k++)
					store_vector(p + 512 * k, out[k]);
			}
		}
	}
}

// Whole tiles, aligned, of any type and operator: row after row.
template <typename E> __device__ __noinline__ void fold_rows(const fold_table &t, const fold_run &f)
{
	constexpr int each = E::per == 16 ? 2 : 4;
#pragma unroll 1
	for (i64 tile = f.first * tile_bytes; tile + tile_bytes <= f.bytes; tile += f.step * tile_bytes) {
		tell_tile(t.moved, static_cast<u32>(tile / tile_bytes), f.lane);
#pragma unroll 1
		for (i64 o = tile + 16 * f.lane; o < tile + tile_bytes; o += 512 * each) {
			typename E::value a[each][E::per];
#pragma unroll 1
			for (u32 r = 0; r < t.rows; r++) {
				u64 p = t.row(r, f.at + o, f.slot_at + o);
				uint4 v[each];
#pragma unroll
				for (int k = 0; k < each; k++)
					v[k] = load_vector(p + 512 * k);
#pragma unroll
				for (int k = 0; k < each; k++) {
					if (r == 0)
						E::widen(a[k], v[k]);
					else
						combine<E, false>(a[k], v[k], t.op);
				}
			}
#pragma unroll
			for (int k = 0; k < each; k++) {
				uint4 out = result<E>(a[k], t.end);
#pragma unroll 1
				for (u32 i = 0; i < t.targets; i++)
					store_vector(t.target(i, f.at + o, f.slot_at + o) + 512 * k, out);
			}
		}
	}
}

// Tiles of any alignment, and of those that are aligned the last one, which is not whole.
template <typename E> __device__ __noinline__ void fold_odd(const fold_table &t, const fold_run &f)
{
	i64 whole = t.aligned != 0 ? f.bytes / tile_bytes * tile_bytes : 0;
#pragma unroll 1
	for (i64 tile = f.first * tile_bytes; tile < f.bytes; tile += f.step * tile_bytes) {
		i64 end = min(tile + tile_bytes, f.bytes);
		if (tile < whole)
			continue;
		tell_tile(t.moved, static_cast<u32>(tile / tile_bytes), f.lane);
#pragma unroll 1
		for (i64 o = tile + 16 * f.lane; o < end; o += 512) {
			u32 n = static_cast<u32>(min(static_cast<i64>(16), end - o));
			typename E::value a[E::per];
			E::widen(a, load_piece(t.row(0, f.at + o, f.slot_at + o), n));
#pragma unroll 1
			for (u32 r = 1; r < t.rows; r++)
				combine<E, false>(a, load_piece(t.row(r, f.at + o, f.slot_at + o), n), t.op);
			uint4 out = result<E>(a, t.end);
#pragma unroll 1
			for (u32 i = 0; i < t.targets; i++)
				store_piece(t.target(i, f.at + o, f.slot_at + o), n, out);
		}
	}
}

// One row: nothing is combined, so bits go as they are.
__device__ __noinline__ void hand_out(const fold_table &t, const fold_run &f)
{
	pace when = f.when;
#pragma unroll 1
	for (i64 tile = f.first * tile_bytes; tile < f.bytes; tile += f.step * tile_bytes) {
		when.next(f.crossings, f.lane);
		tell_tile(t.moved, static_cast<u32>(tile / tile_bytes), f.lane);
		i64 end = min(tile + tile_bytes, f.bytes), o = tile + 16 * f.lane;
		if (t.aligned == 0 || end != tile + tile_bytes) {
#pragma unroll 1
			for (; o < end; o += 512) {
				u32 n = static_cast<u32>(min(static_cast<i64>(16), end - o));
				uint4 v = load_piece(t.row(0, f.at + o, f.slot_at + o), n);
#pragma unroll 1
				for (u32 i = 0; i < t.targets; i++)
					store_piece(t.target(i, f.at + o, f.slot_at + o), n, v);
			}
			continue;
		}
		u64 from = t.row(0, f.at + o, f.slot_at + o);
		uint4 v[8];
#pragma unroll
		for (int k = 0; k < 8; k++)
			v[k] = load_vector(from + 512 * k);
#pragma unroll 1
		for (u32 i = 0; i < t.targets; i++) {
			u64 p = t.target(i, f.at + o, f.slot_at + o);
#pragma unroll
			for (int k = 0; k < 8; k++)
				store_vector(p + 512 * k, v[k]);
		}
	}
}

template <u32 type> __device__ __forceinline__ void fold_type(const fold_table &t, const fold_run &f)
{
	if (t.aligned != 0)
		fold_rows<element<type>>(t, f);
	fold_odd<element<type>>(t, f);
}

// Sums of the types of gradients have folds of their own, for 2, up to 4 and more rows.
template <u32 type> __device__ __forceinline__ void fold_fast(const fold_table &t, const fold_run &f)
{
	using E = element<type>;
	if (t.aligned != 0) {
		if (t.op > SW_OP_AVG)
			fold_rows<E>(t, f);
		else if (t.rows == 2)
			fold_sums<E, 2>(t, f);
		else if (t.rows <= 4)
			fold_sums<E, 4>(t, f);
		else
			fold_sums<E, 8>(t, f);
	}
	if (t.aligned == 0 || f.bytes % tile_bytes != 0)
		fold_odd<E>(t, f);
}

__device__ __forceinline__ void fold(const fold_table &t, const fold_run &f)
{
	if (t.rows == 1) {
		hand_out(t, f);
		return;
	}
	switch (t.type) {
	case SW_TYPE_FLOAT16:
		fold_fast<SW_TYPE_FLOAT16>(t, f);
		break;
	case SW_TYPE_BFLOAT16:
		fold_fast<SW_TYPE_BFLOAT16>(t, f);
		break;
	case SW_TYPE_FLOAT32:
		fold_fast<SW_TYPE_FLOAT32>(t, f);
		break;
	case SW_TYPE_UINT8:
		fold_type<SW_TYPE_UINT8>(t, f);
		break;
	case SW_TYPE_INT32:
		fold_type<SW_TYPE_INT32>(t, f);
		break;
	case SW_TYPE_INT64:
		fold_type<SW_TYPE_INT64>(t, f);
		break;
	case SW_TYPE_FLOAT64:
		fold_type<SW_TYPE_FLOAT64>(t, f);
		break;
	case SW_TYPE_FLOAT8E4M3:
		fold_type<SW_TYPE_FLOAT8E4M3>(t, f);
		break;
	default:
		fold_type<SW_TYPE_FLOAT8E5M2>(t, f);
	}
}

} // namespace sw
