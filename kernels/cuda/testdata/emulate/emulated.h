// The kernels' primitives and the words of CUDA C++ for one processor. Every thread of every block of every rank is a
// fiber; they take turns at each access to memory that others write, at barriers and at warp operations. main.cpp draws
// the order.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__ inline // the compiler leaves out kernels that nobody launches
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define SW_SHARED(type, name) type &name = *emu::shared<type, __LINE__>()
#define SW_DYNAMIC_SHARED(name) uint64_t *name = emu::current->block->dynamic.data()
#define SW_DYNAMIC_LINES(name) SW_DYNAMIC_SHARED(name)
#define threadIdx (emu::index{emu::current->thread})
#define blockIdx (emu::index{emu::current->block->id})
#define blockDim (emu::index{emu::current->block->threads})
#define gridDim (emu::index{emu::current->block->grid})
#define clock() emu::clock_now()

namespace emu {

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

struct index {
	u32 x;
};

struct block;

struct fiber {
	void *stack_pointer;
	char *stack;
	u32 thread;
	emu::block *block;
	bool done;
};

// Threads that meet: those of a warp or a block, or a given number.
struct meeting {
	u64 rounds = 0;
	u32 here = 0;
};

struct warp {
	meeting met;
	u32 alive = 32;
	u64 values[2][32]; // of two rounds: a lane may be at the next while others read this one
};

struct block {
	u32 rank, id, threads, grid;
	std::vector<fiber> fibers;
	std::vector<emu::warp> warps;
	meeting met;
	u32 alive;
	u64 any[2] = {0, 0}; // of __syncthreads_or, by round
	std::map<u32, meeting> named;
	std::vector<u64> dynamic;
	std::map<int, void *> statics;
	std::function<void()> kernel;
	u32 asleep = 0;               // sweeps that it sits out
	const bool *before = nullptr; // whether the launch before this one in its stream has ended
	bool released = false;        // the launch behind this one may begin
};

inline fiber *current;
inline void *scheduler;
inline u64 time_ns = 1000;
inline std::mt19937_64 dice;

inline u32 draw(u32 n) { return static_cast<u32>(dice() % n); }

extern "C" void emu_switch(void **from, void *to);

// Bulk copies that are under way. They happen at any time, in any order; some take long.
struct bulk {
	const fiber *by; // of a store
	u64 group;
	u64 *arrived; // of a load: where its bytes are counted
	u8 *to;
	const u8 *from;
	u32 bytes;
	bool slow = draw(8) == 0;
	std::vector<u8> read; // what a store has read, once it has
};
inline std::vector<bulk> under_way;
inline std::map<const fiber *, u64> groups; // that a thread has committed

inline void finish_bulk(size_t i)
{
	bulk b = std::move(under_way[i]);
	if (i + 1 != under_way.size())
		under_way[i] = std::move(under_way.back());
	under_way.pop_back();
	memcpy(b.to, b.read.empty() ? b.from : b.read.data(), b.bytes);
	if (b.arrived != nullptr)
		*b.arrived += b.bytes;
}

// Lets others go on.
inline void yield()
{
	if (!under_way.empty() && draw(16) == 0)
		if (u32 i = draw(static_cast<u32>(under_way.size())); !under_way[i].slow || draw(200) == 0)
			finish_bulk(i);
	emu_switch(&current->stack_pointer, scheduler);
}
inline void yield_seldom()
{
	if (draw(64) == 0)
		yield();
}

inline u32 clock_now()
{
	yield();
	return static_cast<u32>(2 * time_ns);
}

template <typename T, int line> T *shared()
{
	void *&p = current->block->statics[line];
	if (p == nullptr) {
		p = malloc(sizeof(T));
		memset(p, 0xEE, sizeof(T)); // as a block may find it
	}
	return static_cast<T *>(p);
}

inline void meet(meeting &m, u32 all)
{
	u64 round = m.rounds;
	if (++m.here == all) {
		m.here = 0;
		m.rounds++;
	}
	while (m.rounds == round)
		yield();
}

// Every lane brings a value and reads those of all.
template <typename T> const u64 *gather(T mine)
{
	emu::warp &w = current->block->warps[current->thread / 32];
	u64 *values = w.values[w.met.rounds & 1];
	values[current->thread & 31] = 0;
	memcpy(&values[current->thread & 31], &mine, sizeof(mine));
	meet(w.met, w.alive);
	return values;
}

template <typename T> T lane_of(const u64 *values, u32 lane)
{
	T v;
	memcpy(&v, &values[lane & 31], sizeof(v));
	return v;
}

} // namespace emu

struct uint4 {
	uint32_t x, y, z, w;
};

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline void __syncwarp() { emu::gather(0); }
template <typename T> T __shfl_sync(uint32_t, T v, uint32_t lane) { return emu::lane_of<T>(emu::gather(v), lane); }
inline uint32_t __ballot_sync(uint32_t, bool v)
{
	const uint64_t *all = emu::gather<uint64_t>(v);
	uint32_t bits = 0;
	for (uint32_t i = 0; i < 32; i++)
		bits |= static_cast<uint32_t>(all[i] & 1) << i;
	return bits;
}
inline bool __any_sync(uint32_t mask, bool v) { return __ballot_sync(mask, v) != 0; }
inline uint32_t __reduce_max_sync(uint32_t, uint32_t v)
{
	const uint64_t *all = emu::gather<uint64_t>(v);
	uint32_t most = 0;
	for (uint32_t i = 0; i < 32; i++)
		most = all[i] > most ? static_cast<uint32_t>(all[i]) : most;
	return most;
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t v)
{
	const uint64_t *all = emu::gather<uint64_t>(v);
	uint32_t sum = 0;
	for (uint32_t i = 0; i < 32; i++)
		sum += static_cast<uint32_t>(all[i]);
	return sum;
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t v)
{
	const uint64_t *all = emu::gather<uint64_t>(v);
	uint32_t bits = 0;
	for (uint32_t i = 0; i < 32; i++)
		bits |= static_cast<uint32_t>(all[i]);
	return bits;
}

inline bool __syncthreads_or(bool v)
{
	emu::block &b = *emu::current->block;
	uint64_t round = b.met.rounds;
	b.any[round & 1] |= v;
	if (b.met.here + 1 == b.alive)
		b.any[(round + 1) & 1] = 0;
	emu::meet(b.met, b.alive);
	return b.any[round & 1] != 0;
}
inline void __syncthreads() { __syncthreads_or(false); }
inline void __threadfence_system() {}
inline void __nanosleep(uint32_t) { emu::yield(); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __popcll(uint64_t v) { return __builtin_popcountll(v); }
inline int __ffs(uint32_t v) { return __builtin_ffs(static_cast<int>(v)); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by)
{
	return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
inline long long __double_as_longlong(double d) { return __builtin_bit_cast(long long, d); }
inline double __longlong_as_double(long long i) { return __builtin_bit_cast(double, i); }
template <typename T> T __ldg(const T *p) { return *p; }
template <typename T, typename U> T atomicAdd(T *p, U v)
{
	T before = *p;
	*p += static_cast<T>(v);
	return before;
}
template <typename T, typename U> T atomicExch(T *p, U v)
{
	T before = *p;
	*p = static_cast<T>(v);
	return before;
}
template <typename T, typename U, typename V> T atomicCAS(T *p, U expected, V v)
{
	T before = *p;
	if (before == static_cast<T>(expected))
		*p = static_cast<T>(v);
	return before;
}
template <typename T, typename U> T atomicOr(T *p, U v)
{
	T before = *p;
	*p |= static_cast<T>(v);
	return before;
}
inline int __ffsll(uint64_t v) { return __builtin_ffsll(static_cast<long long>(v)); }
inline uint32_t __float_as_uint(float f) { return __builtin_bit_cast(uint32_t, f); }
inline float __uint_as_float(uint32_t u) { return __builtin_bit_cast(float, u); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <typename T> T __shfl_xor_sync(uint32_t mask, T v, uint32_t by)
{
	return __shfl_sync(mask, v, (emu::current->thread & 31) ^ by);
}
template <typename T> T __shfl_down_sync(uint32_t mask, T v, uint32_t by)
{
	uint32_t from = (emu::current->thread & 31) + by;
	return __shfl_sync(mask, v, from < 32 ? from : emu::current->thread & 31);
}
inline uint32_t __match_any_sync(uint32_t, int v)
{
	const uint64_t *all = emu::gather<int64_t>(v);
	uint32_t bits = 0;
	for (uint32_t i = 0; i < 32; i++)
		bits |= (static_cast<int64_t>(all[i]) == v ? 1u : 0u) << i;
	return bits;
}
inline void __threadfence() {}
template <typename T, typename U> T atomicMin(T *p, U v)
{
	T before = *p;
	*p = before < static_cast<T>(v) ? before : static_cast<T>(v);
	return before;
}
template <typename T, typename U> T atomicMax(T *p, U v)
{
	T before = *p;
	*p = before > static_cast<T>(v) ? before : static_cast<T>(v);
	return before;
}
template <typename T, typename U> T atomicAnd(T *p, U v)
{
	T before = *p;
	*p &= static_cast<T>(v);
	return before;
}
template <typename T, typename U> T atomicAdd_system(T *p, U v) { return atomicAdd(p, v); }
template <typename T, typename U> T atomicOr_system(T *p, U v)
{
	emu::yield();
	return atomicOr(p, v);
}
template <typename T, typename U> T atomicAnd_system(T *p, U v)
{
	emu::yield();
	return atomicAnd(p, v);
}
template <typename T, typename U, typename V> T atomicCAS_system(T *p, U expected, V v)
{
	emu::yield();
	return atomicCAS(p, expected, v);
}
struct uint2 {
	uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
template <typename A, typename B> auto min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B> auto max(A a, B b) { return a > b ? a : b; }

#include "float8.cuh"

namespace sw {

template <typename T> T &at(u64 p) { return *reinterpret_cast<T *>(p); }

template <typename T> T read(u64 p)
{
	emu::yield();
	return at<T>(p);
}

inline pair64 load16_relaxed_sys(u64 p) { return read<pair64>(p); }
inline pair64 load16_acquire_sys(u64 p) { return read<pair64>(p); }
inline u64 load_relaxed_sys(u64 p) { return read<u64>(p); }
inline u64 load_acquire_sys(u64 p) { return read<u64>(p); }
inline u32 load32_relaxed_gpu(u64 p) { return read<u32>(p); }
inline void store16_relaxed_sys(u64 p, u64 a, u64 b)
{
	at<pair64>(p) = {a, b};
	emu::yield_seldom();
}
inline void store_relaxed_sys(u64 p, u64 v)
{
	at<u64>(p) = v;
	emu::yield_seldom();
}
inline void fence_acq_rel_sys() { emu::yield(); }
inline u64 now_ns() { return emu::time_ns; }
inline void await_stream()
{
	const bool *before = emu::current->block->before;
	while (before != nullptr && !*before)
		emu::yield();
}
inline void release_stream()
{
	emu::current->block->released = true;
	emu::yield();
}

template <typename T> T atom_acquire_cta(T *p)
{
	emu::yield();
	return *p;
}
inline u64 load_acquire_cta(const u64 *p)
{
	emu::yield();
	return *p;
}
template <typename T> void store_release_cta(T *p, T v)
{
	emu::yield();
	*p = v;
}

template <typename T> void store_relaxed_cta(T *p, T v) { store_release_cta(p, v); }

struct reports {
	u32 warps, count; // in the place of the device's 64 bits

	void expect(u32 n)
	{
		warps = n;
		count = 0;
	}
	void report() { count++; }
	bool all(u32 n)
	{
		emu::yield();
		u32 phase = count / warps;
		if (phase != n && phase != n + 1) { // the device compares parities and would be wrong
			printf("a barrier object was asked for phase %u in phase %u\n", n, phase);
			exit(1);
		}
		return phase == n + 1;
	}
};

inline void part_sync(u32 id, u32 threads) { emu::meet(emu::current->block->named[id], threads); }

// A GPU faults where a vector does not lie at a multiple of its size; a processor does not mind.
template <typename T> T &vector_at(u64 p)
{
	if (p % sizeof(T) != 0) {
		printf("a vector of %zu bytes at %#llx\n", sizeof(T), static_cast<unsigned long long>(p));
		exit(1);
	}
	return at<T>(p);
}
inline uint4 load_vector(u64 p) { return vector_at<uint4>(p); }
inline void store_vector(u64 p, uint4 v)
{
	vector_at<uint4>(p) = v;
	emu::yield_seldom();
}
inline uint4 load_vector_if(bool on, u64 p) { return on ? vector_at<uint4>(p) : uint4{0, 0, 0, 0}; }
inline void store_vector_if(bool on, u64 p, uint4 v)
{
	if (on)
		store_vector(p, v);
}
inline u32 zero_of_lane() { return 0; }
inline u32 add_acq_rel_gpu(u32 *p, u32 n) { return atomicAdd(p, n); }

inline u32 load32_acquire_sys(u64 p) { return read<u32>(p); }
inline void store_vector2(u64 p, uint2 v)
{
	vector_at<uint2>(p) = v;
	emu::yield_seldom();
}

struct arrivals {
	u32 phases; // that have been expected
	u32 bytes;  // of the last
	u64 came;   // bytes in all

	u64 before;
	void init() { phases = bytes = 0, came = before = 0; }
	void expect(u32 n)
	{
		before += bytes;
		phases++, bytes = n;
	}
	void await(u32 n)
	{
		while (phases != n + 1 || came < before + bytes) {
			if (phases > n + 1) {
				printf("a bulk copy's phase %u is awaited in phase %u\n", n, phases - 1);
				exit(1);
			}
			emu::yield();
		}
	}
};

inline void bulk_load(void *to, u64 from, u32 bytes, arrivals *a)
{
	if (bytes % 16 != 0 || from % 16 != 0 || reinterpret_cast<u64>(to) % 16 != 0) {
		printf("a bulk load of %u bytes from %#llx to %p\n", bytes, static_cast<unsigned long long>(from), to);
		exit(1);
	}
	emu::under_way.push_back(
	    {nullptr, 0, &a->came, static_cast<u8 *>(to), reinterpret_cast<const u8 *>(from), bytes});
}
inline void bulk_load_once(void *to, u64 from, u32 bytes, arrivals *a) { bulk_load(to, from, bytes, a); }
inline void bulk_store(u64 to, const void *from, u32 bytes)
{
	if (bytes % 16 != 0 || to % 16 != 0 || reinterpret_cast<u64>(from) % 16 != 0) {
		printf("a bulk store of %u bytes to %#llx from %p\n", bytes, static_cast<unsigned long long>(to), from);
		exit(1);
	}
	emu::under_way.push_back({emu::current, emu::groups[emu::current], nullptr, reinterpret_cast<u8 *>(to),
	                          static_cast<const u8 *>(from), bytes});
}
inline void bulk_commit() { emu::groups[emu::current]++; }
template <int but> void bulk_await_read()
{
	for (emu::bulk &b : emu::under_way)
		if (b.by == emu::current && b.group + but < emu::groups[emu::current] && b.read.empty())
			b.read.assign(b.from, b.from + b.bytes);
}
template <int but> void bulk_await_written()
{
	for (size_t i = 0; i < emu::under_way.size();)
		if (emu::under_way[i].by == emu::current && emu::under_way[i].group + but < emu::groups[emu::current])
			emu::finish_bulk(i);
		else
			i++;
}
inline void bulk_await() { bulk_await_written<0>(); }
inline void fence_bulk() {}

// Conversions by their definition: the nearest of all values, of two that are equally near the even one.
inline float float_of_f16(u32 bits)
{
	int exponent = static_cast<int>(bits >> 10 & 31);
	float size = exponent == 31  ? ((bits & 0x3ff) != 0 ? NAN : INFINITY)
	             : exponent == 0 ? ldexpf(static_cast<float>(bits & 0x3ff), -24)
	                             : ldexpf(static_cast<float>(1024 + (bits & 0x3ff)), exponent - 25);
	return (bits & 0x8000) != 0 ? -size : size;
}
inline u32 f16_of(float f)
{
	u32 sign = __float_as_uint(f) >> 16 & 0x8000;
	if (f != f)
		return sign | 0x7fff;
	double size = fabs(static_cast<double>(f));
	if (size >= 65520)
		return sign | 0x7c00;
	int exponent = -14;
	if (size >= ldexp(1, -14))
		exponent = ilogb(size);
	double place = ldexp(1, exponent - 10), mantissa = nearbyint(size / place);
	return sign | static_cast<u32>((exponent + 14) * 1024 + mantissa);
}
inline u32 bf16_of(float f)
{
	u32 b = __float_as_uint(f);
	return f != f ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline u32 bf16x2_of(float low, float high) { return bf16_of(low) | bf16_of(high) << 16; }
inline u32 f16x2_of(float low, float high) { return f16_of(low) | f16_of(high) << 16; }
inline void floats_of_e4m3x2(u32 pair, float &low, float &high)
{
	low = e4m3_to_float(pair & 0xff), high = e4m3_to_float(pair >> 8 & 0xff);
}
inline u32 e4m3x2_of(float low, float high) { return e4m3_of_float(low) | e4m3_of_float(high) << 8; }
inline u32 max_u16x2(u32 a, u32 b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }

} // namespace sw
