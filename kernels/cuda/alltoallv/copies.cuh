// The kernels around copies by the copy engines. The first grants and waits for credits, the copies follow in the
// stream, the last signals and waits for signals. Another tells between long copies that this rank is alive. Each has
// one block.
//
// Write this rank's credit and signal lines in the peers' segments and its packets; read those in its own.
#pragma once

#include "packets.cuh"
#include "receiving.cuh"

// Both kernels begin so.
__device__ __forceinline__ sw::call begin_copies(sw::gathered::store &steps, const sw_exchange_args &a)
{
	sw::gathered::fill(steps, a);
	sw::call now = sw::call::open(a.world);
	__syncthreads();
	return now;
}

extern "C" __global__ void __launch_bounds__(SW_COPY_THREADS, 1) alltoallv_open(const __grid_constant__ sw_copy_args c)
{
	using namespace sw;
	const sw_exchange_args &a = c.exchange;
	SW_SHARED(gathered::store, steps);
	call now = begin_copies(steps, a);
	gathered r{steps};
	u64 epoch = now.epoch();
	if (__any_sync(~0u, epoch == 0))
		return;
	if (threadIdx.x == 0)
		now.advance();
	if (a.world.size == 1)
		return;
	receiver in{a, r, epoch};
	in.grant(threadIdx.x, SW_COPY_THREADS);
	packets<gathered> x(a, r, threadIdx.x / 32, SW_COPY_THREADS / 32, threadIdx.x & 31);
	x.announce(epoch, last_complaints(a), threadIdx.x, SW_COPY_THREADS, by_copies);
	x.send(epoch);
#pragma unroll 1
	for (u32 i = threadIdx.x; i < a.world.size - 1; i += SW_COPY_THREADS) {
		u32 p = r[i].to;
		i64 n = r[i].send_bytes;
		if (n <= a.packet_bytes)
			continue;
		if (!credit::await(a, p, epoch))
			return;
		credit x = credit::look(a, p);
		if (!x.is_of(epoch))
			hear_why(a, p, epoch, true);
		else if (x.expected.b != static_cast<u64>(n))
			disagree(a, p, epoch, true, static_cast<u64>(n), x.expected.b);
		else if (x.place.b != static_cast<u64>(c.places[p]))
			give_up(a.world, SW_FAULT_PLACE, p, epoch, true, static_cast<u64>(c.places[p]), x.place.b);
	}
}

// Between copies, which say nothing of how far they are.
extern "C" __global__ void __launch_bounds__(32, 1) alltoallv_copied(const __grid_constant__ sw_copy_args c)
{
	using namespace sw;
	if (threadIdx.x == 0)
		tell_moved(moved_word(c.exchange.world, c.exchange.world.rank));
}

extern "C" __global__ void __launch_bounds__(SW_COPY_THREADS, 1) alltoallv_close(const __grid_constant__ sw_copy_args c)
{
	using namespace sw;
	const sw_exchange_args &a = c.exchange;
	SW_SHARED(gathered::store, steps);
	call now = begin_copies(steps, a);
	gathered r{steps};
	if (__any_sync(~0u, now.epoch() == 0) || a.world.size == 1)
		return;
	u64 epoch = now.epoch() - 1; // alltoallv_open has advanced it
	fence_acq_rel_sys();         // X4: the copies come before their signals
#pragma unroll 1
	for (u32 i = threadIdx.x; i < (a.world.size - 1) * a.stripes; i += SW_COPY_THREADS) {
		u32 p = r[i / a.stripes].to, stripe = i % a.stripes;
		i64 n = r[i / a.stripes].send_bytes;
		if (n > a.packet_bytes && stripe < stripes(a, n).count)
			stripe_line{a, epoch, signal_line(a, p, a.world.rank, stripe)}.signal(static_cast<u64>(n));
	}
	receiver in{a, r, epoch};
	for (u32 i = threadIdx.x; i < (a.world.size - 1) * a.stripes; i += SW_COPY_THREADS) {
		const sw_step &m = r[i / a.stripes];
		u32 stripe = i % a.stripes;
		if (m.recv_bytes > a.packet_bytes && stripe < stripes(a, m.recv_bytes).count)
			in.await({a, epoch, signal_line(a, a.world.rank, m.from, stripe)}, m.from, m.recv_bytes);
	}
	packets<gathered> x(a, r, threadIdx.x / 32, SW_COPY_THREADS / 32, threadIdx.x & 31);
	x.receive(epoch);
	hear_of_large(a, r, epoch, threadIdx.x, SW_COPY_THREADS);
}
