// The leader of a rank's receives from another: it finds the first message of a tag that a receive waits for, and
// answers it.
#pragma once

#include "messenger.cuh"

namespace sw {

// Of the leader's first thread.
struct receiving {
	const messenger &m;
	u64 *numbers; // not 0 when a receive is over
	u64 low;      // this rank is through with all messages before it
	u32 left;

	__device__ __forceinline__ receiving(const messenger &m_, u64 *numbers_)
	    : m(m_), numbers(numbers_), left(m_.count)
	{
		low = load_relaxed_sys(m.counter(offsetof(sw_message_counters, low)));
		if (low == 0)
			low = 1;
	}

	__device__ __forceinline__ u64 ended(u64 n) const { return m.here + m.of_box(m.a.block.ended, m.peer, n, 8); }
	__device__ __forceinline__ u64 state(u64 n) const { return m.here + m.of_box(m.a.block.states, m.peer, n, 8); }
	__device__ __forceinline__ u64 answer(u64 n) const
	{
		return m.there + m.of_box(m.a.block.answers, m.world.rank, n, 16);
	}
	__device__ __forceinline__ void tell(u64 n, u64 what, u64 more) const
	{
		store16_relaxed_sys(answer(n), n << SW_ANSWER_BITS | what, more);
	}

	// This rank is through with a message.
	__device__ __forceinline__ void end(u64 n)
	{
		store_relaxed_sys(ended(n), n);
		u64 before = low;
		while (load_relaxed_sys(ended(low)) >= low)
			low++;
		if (low != before)
			store_relaxed_sys(m.counter(offsetof(sw_message_counters, low)), low);
	}

	// Whether a message that this rank is not through with has been withdrawn: then its box may have another.
	static __device__ __forceinline__ bool gone(u64 n, u64 state)
	{
		return state >> SW_ANSWER_BITS > n || state == (n << SW_ANSWER_BITS | SW_STATE_GONE);
	}

	// A header, read.
	struct letter {
		u64 tag, bytes, place;
		u32 blocks;
	};

	// The first message that a receive waits for: its number, or 0. Messages come in the order of their numbers.
	__device__ __forceinline__ u64 find(u32 &entry, letter &l)
	{
		for (u64 n = low; n < low + m.a.boxes; n++) {
			u64 at = m.here + m.of_box(m.a.block.headers, m.peer, n, SW_LINE_BYTES);
			u64 last = load_relaxed_sys(ended(n)); // these loads are on their way at the same time
			packet p = packet::get(at), q = packet::get(at + 16);
			u64 now = load_acquire_sys(state(n));
			if (last >= n)
				continue;
			if (gone(n, now)) {
				end(n);
				n = low - 1; // from the start
				continue;
			}
			u32 flag = packet::flag(n);
			if (!p.has(flag) || !q.has(flag))
				return 0;
			l = {p.low(), static_cast<u64>(q.word(2) & 0xffff) << 32 | p.word(2), q.low(), q.word(2) >> 16};
			for (entry = 0; entry < m.count; entry++)
				if (numbers[entry] == 0 && m.entry(entry).tag == l.tag)
					return n;
		}
		return 0;
	}

	// Answers a message that could be withdrawn. False when it has been.
	__device__ __forceinline__ bool answers(u64 n, u64 what, u64 more)
	{
		tell(n, what, more);
		__threadfence_system();
		wait w;
		while (load_acquire_sys(state(n)) == (n << SW_ANSWER_BITS | SW_STATE_WITHDRAWAL))
			if (!w.slow(m.world))
				return false;
		return !gone(n, load_acquire_sys(state(n)));
	}

	// The ranks have different sizes for a message.
	__device__ __forceinline__ void refuse(u32 i, u64 n, const letter &l)
	{
		u64 expected = static_cast<u64>(m.entry(i).bytes);
		if (l.bytes <= static_cast<u64>(m.a.eager_bytes)) { // its sender is done with it
			u64 at = m.there + m.a.block.complaints + m.world.rank * 2 * SW_LINE_BYTES;
			store16_relaxed_sys(at + SW_LINE_BYTES, l.bytes, expected);
			fence_acq_rel_sys();
			store16_relaxed_sys(at, n, l.tag);
			tell(n, SW_ANSWER_REFUSED, expected);
		} else if (!answers(n, SW_ANSWER_REFUSED, expected)) {
			end(n);
			return;
		}
		end(n);
		m.fail(SW_FAULT_MISMATCH, n, l.tag, l.bytes, expected);
		over(i, n);
	}

	__device__ __forceinline__ void over(u32 i, u64 n)
	{
		numbers[i] = n;
		left--;
	}

	__device__ __noinline__ task next()
	{
		wait w;
		while (left > 0) {
			u32 i = 0;
			letter l{0, 0, 0, 0};
			u64 n = find(i, l);
			if (n == 0) {
				if (w.slow(m.world))
					continue;
				for (i = 0; numbers[i] != 0; i++)
					;
				m.fail(w.kind, 0, m.entry(i).tag, m.entry(i).bytes, 0);
				break;
			}
			if (l.bytes != static_cast<u64>(m.entry(i).bytes)) {
				refuse(i, n, l);
				continue;
			}
			if (l.bytes <= static_cast<u64>(m.a.eager_bytes))
				return {deed::read, i, n, 0, 0, 0};
			u64 claims = m.counter(offsetof(sw_message_counters, claims));
			u64 claim = load_relaxed_sys(claims) + 1;
			u32 stripes = m.blocks < l.blocks ? m.blocks : l.blocks;
			store_relaxed_sys(claims, claim);
			if (!answers(n, SW_ANSWER_CLAIMED, claim << 8 | stripes)) {
				end(n);
				continue;
			}
			if (l.place == SW_NOWHERE)
				return {deed::drain, i, n, claim, 0, stripes};
			return {deed::pull, i, n, claim, m.there + resolve(m.world, m.peer, l.place), m.blocks};
		}
		return {deed::end, 0, 0, 0, 0, 0};
	}

	// A message has been carried, or not. One whose sender has given up meanwhile may be anything.
	__device__ __forceinline__ void carried(const task &t, bool good)
	{
		const sw_message_entry &e = m.entry(t.entry);
		if (good && t.what != deed::read && gone(t.number, load_acquire_sys(state(t.number)))) {
			m.fail(SW_FAULT_TIMEOUT, t.number, e.tag, e.bytes, 1);
			good = false;
		}
		if (good)
			tell(t.number, SW_ANSWER_TAKEN, 0);
		else
			tell(t.number, SW_ANSWER_REFUSED, SW_NOWHERE);
		end(t.number);
		over(t.entry, t.number);
		if (!good)
			left = 0;
	}
};

__device__ __forceinline__ void receive(const messenger &m, leader_board &b)
{
	for (u32 i = threadIdx.x; i < m.count; i += SW_MESSAGE_THREADS)
		b.numbers[i] = 0;
	__syncthreads();
	receiving r(m, b.numbers); // of the first thread
	for (;;) {
		if (threadIdx.x == 0)
			b.now = r.next();
		__syncthreads();
		task t = b.now;
		__syncthreads();
		if (t.what == deed::end)
			return;
		const sw_message_entry &e = m.entry(t.entry);
		bool good;
		if (t.what == deed::read)
			good = !__syncthreads_or(!read_small(m, t));
		else
			good = carry_together(m, {t.what, e.address, t.from, e.bytes, t.claim, t.stripes});
		if (threadIdx.x == 0)
			r.carried(t, good);
	}
}

} // namespace sw
