// Splits in device memory that reach past a buffer: their rank refuses them and tells all its peers, so that none of
// them waits for what does not come, and the next call works.
//
// The first block of the exchange kernel runs it in place of everything else. Writes the headers of this rank's packets
// and its credit lines in the peers' segments, and the fault record; reads the peers' headers and signal lines in its
// own.
#pragma once

#include "stripes.cuh"
#include "packets.cuh"

namespace sw {

// The first of the parts that reach past a buffer.
__device__ __noinline__ refused_part find_refused(const gathered::store &s, const sw_exchange_args &a)
{
	refused_part x{};
	bool found = false;
	auto look = [&](u32 peer, bool sending, i64 bytes, i64 offset, i64 limit) {
		if (!found && gathered::past(bytes, offset, limit)) {
			found = true;
			x = {static_cast<u64>(bytes), static_cast<u64>(offset), static_cast<u64>(limit),
			     static_cast<u64>(sending) << 32 | peer};
		}
	};
#pragma unroll 1
	for (u32 i = 0; i < a.world.size - 1; i++) {
		const sw_step &m = s.steps[i];
		look(m.to, true, m.send_bytes, m.send_offset, a.src_bytes);
		look(m.from, false, m.recv_bytes, m.recv_offset, a.dst_bytes);
	}
	look(a.world.rank, true, s.own[0], s.own[1], a.src_bytes);
	look(a.world.rank, false, s.own[0], s.own[2], a.dst_bytes);
	return x;
}

// Tells the peers, in place of a message and of a credit.
__device__ __forceinline__ void tell_refusal(const gathered::store &s, const sw_exchange_args &a, u64 epoch,
                                             const refused_part &x)
{
	u32 earlier = complains(last_complaints(a), epoch);
#pragma unroll 1
	for (u32 i = threadIdx.x; i < a.world.size - 1; i += blockDim.x) {
		u32 p = s.steps[i].to;
		u64 place = packet_place(a, epoch, p, a.world.rank);
		x.store(place);
		fence_acq_rel_sys(); // whoever sees what follows sees that
		packet::put(place, packet::flag(epoch), refused, earlier);
		credit::signal(a, p, epoch, SW_NOWHERE, refused);
	}
}

// Waits until all peers have begun the call: none of them reads what this rank wrote for the one before last (X3). Copy
// engines cannot be held up, so their ends are awaited too.
__device__ __forceinline__ void await_peers(const gathered::store &s, const sw_exchange_args &a, u64 epoch)
{
	u32 flag = packet::flag(epoch);
#pragma unroll 1
	for (u32 i = threadIdx.x; i < a.world.size - 1; i += blockDim.x) {
		u32 p = s.steps[i].from;
		u64 place = packet_place(a, epoch, a.world.rank, p);
		stripe_line line{a, epoch, signal_line(a, a.world.rank, p, 0)};
		packet header;
		wait w;
		auto come = [&] {
			header = packet::get(place);
			bool copied =
			    (header.word(2) & by_copies) != 0 && header.low() > static_cast<u64>(a.packet_bytes);
			return header.has(flag) && (!copied || line.look().a >= last_seq(epoch));
		};
		if (!await(w, a.world, p, epoch, false, come))
			return;
		hear(a, header, p, epoch);
	}
}

// All threads of a block.
__device__ __noinline__ void refuse(const gathered::store &s, const sw_exchange_args &a, u64 epoch)
{
	refused_part x = find_refused(s, a);
	if (threadIdx.x == 0)
		x.record(a.world, a.world.rank, epoch);
	tell_refusal(s, a, epoch, x);
	await_peers(s, a, epoch);
}

} // namespace sw
