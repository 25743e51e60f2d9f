// The leader of a rank's sends to another: it posts messages while there are boxes, and ends when all large ones are
// taken. Small ones are the receiver's once they are written.
#pragma once

#include "messenger.cuh"

namespace sw {

// Of the leader's first thread. Of few messages none is large.
template <bool few> struct sending {
	const messenger &m;
	leader_board &b; // its numbers are of large messages that are posted, until they are over
	u64 *numbers;
	u64 sent = 0;
	u32 posted = 0, open = 0, end = 0;
	u64 read = 0;            // bits by entry: of open messages, those that their receivers read here
	u32 why = SW_FAULT_NONE; // it leaves
	u32 late = 0;            // the entry of which it tells then
	bool leaves = false;
	sw_world leaving; // of waits for what is claimed then: no other fault ends them

	__device__ __forceinline__ sending(const messenger &m_, leader_board &b_)
	    : m(m_), b(b_), numbers(b_.numbers), leaving(m_.world)
	{
		leaving.control = m.a.block.control + m.world.rank * SW_CONTROL_ALIGN;
	}

	// Once. The loads are on their way at the same time.
	__device__ __forceinline__ void begin()
	{
		static_assert(offsetof(sw_message_counters, heard) == offsetof(sw_message_counters, sent) + 8);
		u64 at = m.here + m.a.block.complaints + m.peer * 2 * SW_LINE_BYTES;
		if constexpr (!few)
			b.item = load_relaxed_sys(m.items()), b.alone = false;
		pair64 counted = load16_relaxed_sys(m.counter(offsetof(sw_message_counters, sent)));
		pair64 complaint = load16_acquire_sys(at);
		sent = counted.a, end = m.count;
		if (complaint.a > counted.b) {
			tell_complaint(at, complaint);
			end = 0;
		}
	}

	// A small message, with whose sender it was over, had another size than its receiver expected.
	__device__ __noinline__ void tell_complaint(u64 at, pair64 which) const
	{
		pair64 sizes;
		for (;;) { // another one may come
			sizes = load16_acquire_sys(at + SW_LINE_BYTES);
			pair64 again = load16_acquire_sys(at);
			if (again.a == which.a)
				break;
			which = again;
		}
		store_relaxed_sys(m.counter(offsetof(sw_message_counters, heard)), which.a);
		m.fail(SW_FAULT_MISMATCH, which.a, which.b, sizes.a, sizes.b);
	}

	__device__ __forceinline__ u64 answer(u64 n) const
	{
		return m.here + m.of_box(m.a.block.answers, m.peer, n, 16);
	}
	__device__ __forceinline__ u64 state(u64 n) const
	{
		return m.there + m.of_box(m.a.block.states, m.world.rank, n, 8);
	}

	// Whether the message that had the box of number n before is over, and no longer among those that are open: the
	// next answer in the box takes the place of its own.
	__device__ __forceinline__ bool room(u64 n) const
	{
		if (n <= m.a.boxes)
			return true;
		u64 before = n - m.a.boxes;
		for (u32 i = 0; open > 0 && i < posted; i++)
			if (numbers[i] == before)
				return false;
		u64 box = m.box_of(n), over = before << SW_ANSWER_BITS | SW_ANSWER_TAKEN;
		if (box < boxes_seen && b.answers[box] >= over)
			return true;
		return load16_acquire_sys(answer(n)).a >= over ||
		       load_relaxed_sys(m.here + m.of_box(m.a.block.freed, m.peer, n, 8)) == before;
	}

	__device__ __forceinline__ void put_header(u64 n, const sw_message_entry &e) const
	{
		u64 at = m.there + m.of_box(m.a.block.headers, m.world.rank, n, SW_LINE_BYTES);
		u64 bytes = static_cast<u64>(e.bytes);
		u32 flag = packet::flag(n);
		packet::put(at, flag, e.tag, static_cast<u32>(bytes));
		packet::put(at + 16, flag, e.place, static_cast<u32>(bytes >> 32) | m.blocks << 16);
	}

	__device__ __forceinline__ void over(u32 i)
	{
		numbers[i] = 0;
		read &= ~(1ull << i);
		open--;
	}

	__device__ __forceinline__ void withdrawn(u32 i)
	{
		u64 n = numbers[i];
		store_relaxed_sys(state(n), n << SW_ANSWER_BITS | SW_STATE_GONE);
		store_relaxed_sys(m.here + m.of_box(m.a.block.freed, m.peer, n, 8), n);
		over(i);
	}

	// Looks at the answer to an open message. True when its chunks are to be pushed.
	__device__ __forceinline__ bool look(u32 i, task &t)
	{
		u64 n = numbers[i];
		pair64 v = load16_acquire_sys(answer(n));
		if (v.a >> SW_ANSWER_BITS != n)
			return false;
		const sw_message_entry &e = m.entry(i);
		switch (v.a & ((1 << SW_ANSWER_BITS) - 1)) {
		case SW_ANSWER_TAKEN:
			over(i);
			return false;
		case SW_ANSWER_REFUSED:
			m.fail(v.b == SW_NOWHERE ? SW_FAULT_TIMEOUT : SW_FAULT_MISMATCH, n, e.tag, e.bytes, v.b);
			over(i);
			return false;
		}
		u32 stripes = static_cast<u32>(v.b & 255);
		if (stripes == 0) {
			read |= 1ull << i;
			return false;
		}
		t = {deed::push, i, n, v.b >> 8, 0, stripes, m.peer, posted == end && open == 1};
		return true;
	}

	// Leaves: a message that is not claimed is withdrawn. Of this word and the claim, both behind a fence, at least
	// one is seen by the other rank: then the message is claimed.
	__device__ __noinline__ void leave(u32 kind)
	{
		bool at_once = leaves || kind == SW_FAULT_ABORTED;
		for (u32 i = posted; i-- > 0;)
			if (numbers[i] != 0)
				late = i;
		if (posted < end && open == 0)
			late = posted;
		if (!leaves)
			why = kind;
		leaves = true, end = posted;
		for (u32 i = 0; i < posted; i++) {
			u64 n = numbers[i];
			if (n == 0)
				continue;
			if (!at_once) {
				store_relaxed_sys(state(n), n << SW_ANSWER_BITS | SW_STATE_WITHDRAWAL);
				__threadfence_system();
				if (load16_acquire_sys(answer(n)).a >> SW_ANSWER_BITS == n) {
					store_relaxed_sys(state(n), n << SW_ANSWER_BITS | SW_STATE_OFFERED);
					continue;
				}
			}
			withdrawn(i);
		}
	}

	__device__ __noinline__ task next()
	{
		task t{deed::end, 0, 0, 0, 0, 0, m.peer, true};
		wait w;
		for (;;) {
			while (posted < end && room(sent + 1)) {
				u32 i = posted++;
				const sw_message_entry &e = m.entry(i);
				u64 n = ++sent;
				store_relaxed_sys(m.counter(offsetof(sw_message_counters, sent)), n);
				if (few || e.bytes <= m.a.eager_bytes) {
					put_header(n, e);
					return {deed::write, i, n, 0, 0, 0, m.peer, false};
				}
				if constexpr (!few) {
					fence_acq_rel_sys();
					put_header(n, e);
					numbers[i] = n;
					open++;
					w = wait();
				}
			}
			u32 before = open;
			if constexpr (!few) {
				for (u32 i = 0; i < posted && open > 0; i++)
					if (numbers[i] != 0 && look(i, t))
						return t;
				if (posted == end && static_cast<u32>(__popcll(read)) == open)
					dismiss(m, b); // while the receivers read
			}
			if (posted == end && open == 0) {
				if (leaves)
					m.fail(why, 0, m.entry(late).tag, m.entry(late).bytes, 0);
				return t;
			}
			if (open < before)
				w = wait();
			if (!w.slow(!few && leaves ? leaving : m.world)) {
				leave(w.kind);
				w = wait();
			}
		}
	}
};

template <bool few> __device__ __forceinline__ void send(const messenger &m, leader_board &b)
{
	sending<few> s(m, b); // of the first thread
	for (u32 i = threadIdx.x; i < m.count; i += leader_threads<few>)
		b.numbers[i] = 0;
	for (u32 i = threadIdx.x; i < m.a.boxes && i < boxes_seen; i += leader_threads<few>)
		b.answers[i] = load16_acquire_sys(s.answer(i)).a;
	if (threadIdx.x == 0)
		s.begin();
	__syncthreads();
	for (;;) {
		if (threadIdx.x == 0)
			b.now = s.next();
		__syncthreads();
		task t = b.now;
		__syncthreads();
		if (t.what == deed::end)
			return;
		if (few || t.what == deed::write) {
			write_small<few>(m, t);
			continue;
		}
		if constexpr (!few) {
			const sw_message_entry &e = m.entry(t.entry);
			bool good =
			    carry_together(m, b, {t.what, e.address, 0, e.bytes, t.claim, t.stripes, t.peer, t.last});
			if (threadIdx.x == 0 && good)
				s.over(t.entry);
			else if (threadIdx.x == 0)
				s.withdrawn(t.entry);
		}
	}
}

} // namespace sw
