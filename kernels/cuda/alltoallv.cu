// The variable-size all-to-all: its kernels. Two speak one protocol: `alltoallv_packet` for calls in which every
// message of this rank is a packet, `alltoallv` for all others; which one a peer runs does not matter. Their parts are
// in alltoallv/, one idea a file:
//
//	steps      what is moved
//	packets    small messages, whose words carry their flag
//	stripes    how a large message is cut, and where its words lie
//	board      what the warps of a block tell one another
//	sending    the sending half of a block
//	receiving  the receiving half
//	refusal    splits in device memory that reach past a buffer
//	watching   the warps between peers and the two halves
//	copies     the kernels around copy engines
#include "alltoallv/packets.cuh"
#include "alltoallv/sending.cuh"
#include "alltoallv/receiving.cuh"
#include "alltoallv/watching.cuh"
#include "alltoallv/refusal.cuh"

extern "C" __global__ void __launch_bounds__(SW_PACKET_THREADS, 1)
    alltoallv_packet(const __grid_constant__ sw_exchange_args a)
{
	using namespace sw;
	direct r{a};
	u32 warps = gridDim.x * (SW_PACKET_THREADS / 32), lane = threadIdx.x & 31;
	// neighbouring warps of the grid lie in different blocks, so that few groups use many multiprocessors
	u32 warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
	packets<direct> x(a, r, warp, warps, lane);
	packets<direct>::ahead ahead{0, 0, false};
	if (a.world.size > 1)
		ahead = x.look_ahead();
	call now = call::open(a.world);
	pair64 last = warp < a.world.size - 1 ? last_complaints(a) : pair64{0, 0}; // come with the number
	x.preload(ahead);
	u64 epoch = now.epoch();
	if (__any_sync(~0u, epoch == 0)) // a fault may be written just now
		return;
	if (a.world.size > 1) {
		if (lane == 0)
			x.announce(epoch, last, warp, warps);
		x.send(epoch);
	}
	__syncthreads(); // every warp has read the number
	now.advance_by_last();
	release_stream();
	copy_own(a, r, warps - 1 - warp, warps, lane); // first by the warps that have sent least
	if (a.world.size > 1)
		x.receive(epoch);
}

extern "C" __global__ void __launch_bounds__(SW_SEND_THREADS + SW_WATCH_THREADS + SW_RECV_THREADS, 1)
    alltoallv(const __grid_constant__ sw_exchange_args a)
{
	using namespace sw;
	SW_DYNAMIC_SHARED(memory);
	SW_SHARED(gathered::store, steps);
	SW_SHARED(board, b);
	if (threadIdx.x == 0)
		b.packets = 0;
	bool outside = gathered::fill(steps, a);
	__syncthreads();
	if (a.world.size > 1)
		b.make(a, {steps}, memory, items(a));
	call now = call::open(a.world); // all that is above goes on while the kernel before runs
	gathered r{steps};
	u64 epoch = now.epoch();
	u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, warps = blockDim.x / 32 * gridDim.x;
	receiver in{a, r, epoch};
	bool grants = blockIdx.x == 0 && warp == send_warps + 1;
	if (grants && a.splits == 0 &&
	    epoch != 0) // the sooner the better; splits from device memory are to be looked at by all threads first
		in.grant(lane, 32);
	if (__syncthreads_or(outside || epoch == 0)) { // for all or none: warps of a block wait for one another
		if (__syncthreads_or(epoch == 0))
			return;
		now.advance_by_last();
		if (blockIdx.x == 0)
			refuse(steps, a, epoch);
		return;
	}
	now.advance_by_last();
	release_stream();
	packets<gathered> x(a, r, warp * alike(a) + among_alike(a), alike(a) * send_warps, lane);
	bool sends = blockIdx.x < alike(a), receives = a.senders == 0 || !sends;
	if (a.world.size == 1) {
		copy_own(a, r, x.warp, warps, lane);
		return;
	}
	bool staged = through_staging(a);
	if (warp < send_warps && sends) {
		if ((b.packets & 1) != 0)
			x.send(epoch);
		sender out{a, r, epoch, b, warp, lane};
		out.run();
	} else if (warp == send_warps) {
		if (blockIdx.x == 0)
			x.announce(epoch, last_complaints(a), lane, 32);
		if (sends)
			send_watch(a, r, epoch, b, lane).run();
	} else if (warp == send_warps + 1) {
		if (grants && a.splits != 0)
			in.grant(lane, 32);
		if (staged && receives)
			recv_watch(a, r, epoch, b, lane).run(in);
		if (blockIdx.x == 0)
			hear_of_large(a, r, epoch, lane, 32);
	} else if (!receives) {
		if (warp < send_warps + 2 + tellers)
			teller(a, r, epoch, b, lane, warp - send_warps - 2).run();
	} else {
		if (warp > send_warps)
			warp -= send_warps + recv_warps + 2 - takers(a);
		if (staged) {
			in.take_staged(b, warp, lane);
		} else {
			in.copy_own_beside(warp, lane);
			in.await_in_place(b, warp * 32 + lane, SW_RECV_THREADS);
		}
	}
	if ((b.packets & 2) != 0) {
		x.warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
		x.warps = warps;
		x.receive(epoch);
	}
}

// What stays on this rank, beside copies by the copy engines.
extern "C" __global__ void __launch_bounds__(SW_OWN_THREADS, 1)
    alltoallv_own(const __grid_constant__ sw_exchange_args a)
{
	using namespace sw;
	constexpr u32 warps = SW_OWN_THREADS / 32;
	copy_own(a, direct{a}, threadIdx.x / 32 * gridDim.x + blockIdx.x, warps * gridDim.x, threadIdx.x & 31);
}

#include "alltoallv/copies.cuh"
