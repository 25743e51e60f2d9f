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

	// The warp's first packet is loaded while the kernel before runs, and while the call's number comes.
	packets<direct>::ahead ahead{0, 0, false};
	if (a.world.size > 1)
		ahead = x.look_ahead();
	call now = call::open(a.world);
	pair64 last = warp < a.world.size - 1 ? last_complaints(a) : pair64{0, 0}; // come with the number
	x.preload(ahead);
	u64 epoch = now.epoch();
	if (__any_sync(~0u, epoch == 0)) // a fault may be written just now
		return;

	// Headers and packets go out.
	if (a.world.size > 1) {
		if (lane == 0)
			x.announce(epoch, last, warp, warps);
		x.send(epoch);
	}

	// The next kernel may begin, and what stays here is copied while packets come.
	__syncthreads(); // every warp has read the number
	now.advance_by_last();
	release_stream();
	copy_own(a, r, warps - 1 - warp, warps, lane); // first by the warps that have sent least
	if (a.world.size > 1)
		x.receive(epoch);
}

namespace sw {

// The work of a warp of the exchange kernel. A block sends, or takes messages in, or both (sw_exchange_args.senders).
enum class role { sender, send_watcher, recv_watcher, teller, receiver };

__device__ __forceinline__ role role_of(u32 warp, bool sends, bool receives)
{
	if (warp == send_warps)
		return role::send_watcher;
	if (warp == send_warps + 1)
		return role::recv_watcher;
	if (warp < send_warps ? !sends : receives)
		return role::receiver;
	return warp < send_warps || warp >= send_warps + 2 + tellers ? role::sender : role::teller;
}

} // namespace sw

extern "C" __global__ void __launch_bounds__(SW_SEND_THREADS + SW_WATCH_THREADS + SW_RECV_THREADS, 1)
    alltoallv(const __grid_constant__ sw_exchange_args a)
{
	using namespace sw;
	SW_DYNAMIC_SHARED(memory);
	SW_SHARED(gathered::store, steps);
	SW_SHARED(board, b);

	// The threads make the board while the kernel before runs.
	if (threadIdx.x == 0)
		b.packets = 0;
	bool outside = gathered::fill(steps, a);
	__syncthreads();
	if (a.world.size > 1)
		b.make(a, {steps}, memory, items(a));
	call now = call::open(a.world);
	gathered r{steps};
	u64 epoch = now.epoch();
	u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, warps = blockDim.x / 32 * gridDim.x;

	// Credits go out as soon as the call has a number. All threads look at splits from device memory first.
	receiver in{a, r, epoch};
	bool grants = blockIdx.x == 0 && warp == send_warps + 1;
	if (grants && a.splits == 0 && epoch != 0)
		in.grant(lane, 32);

	// After a fault the call does nothing; with splits that reach past a buffer it only tells the peers.
	if (__syncthreads_or(outside || epoch == 0)) { // for all or none: warps of a block wait for one another
		if (__syncthreads_or(epoch == 0))
			return;
		now.advance_by_last();
		if (blockIdx.x == 0)
			refuse(steps, a, epoch);
		return;
	}

	// The next kernel may begin.
	now.advance_by_last();
	release_stream();
	packets<gathered> x(a, r, warp * alike(a) + among_alike(a), alike(a) * send_warps, lane);
	bool sends = blockIdx.x < alike(a), receives = a.senders == 0 || !sends;
	if (a.world.size == 1) {
		copy_own(a, r, x.warp, warps, lane);
		return;
	}

	// Each warp does its part.
	role mine = role_of(warp, sends, receives);
	bool staged = through_staging(a);
	if (mine == role::sender) {
		if (warp < send_warps && (b.packets & 1) != 0)
			x.send(epoch);
		sender out{a, r, epoch, b, warp < send_warps ? warp : warp - 2 - tellers, lane};
		out.run();
	} else if (mine == role::send_watcher) {
		if (blockIdx.x == 0)
			x.announce(epoch, last_complaints(a), lane, 32);
		if (sends)
			send_watch(a, r, epoch, b, lane).run();
	} else if (mine == role::recv_watcher) {
		if (grants && a.splits != 0)
			in.grant(lane, 32);
		if (staged && receives)
			recv_watch(a, r, epoch, b, lane).run(in);
		if (blockIdx.x == 0)
			hear_of_large(a, r, epoch, lane, 32);
	} else if (mine == role::teller) {
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

	// All warps share the packets that come.
	if ((b.packets & 2) != 0) {
		x.warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
		x.warps = warps;
		x.receive(epoch);
	}
}

// Copies what stays on this rank, while copy engines move the rest.
extern "C" __global__ void __launch_bounds__(SW_OWN_THREADS, 1)
    alltoallv_own(const __grid_constant__ sw_exchange_args a)
{
	using namespace sw;
	constexpr u32 warps = SW_OWN_THREADS / 32;
	copy_own(a, direct{a}, threadIdx.x / 32 * gridDim.x + blockIdx.x, warps * gridDim.x, threadIdx.x & 31);
}

#include "alltoallv/copies.cuh"
