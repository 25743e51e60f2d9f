// The leader of a rank's receives from another, or from all: it finds the first message of a tag that a receive waits
// for, and answers it.
#pragma once

#include "messenger.cuh"

namespace sw {

// Of the leader's first thread. Of few messages none is large, and none from any rank.
template <bool few> struct receiving {
	messenger &m;
	leader_board &b;
	u64 *numbers; // not 0 when a receive is over
	u32 left;
	u32 first = 0;        // of the receives that are not over: the wait is for this one
	sw_world waited;      // whose faults and silence end it
	bool anyones = false; // that receive is from any rank
	u32 quiet = 0;        // how many looks in a row have seen that no rank has moved bytes,
	u64 moved = 0;        // what they saw,
	u64 since = 0;        // and the time of the last
	u32 turn = 0;         // the rank at which a receive from any looks first

	__device__ __forceinline__ receiving(messenger &m_, leader_board &b_)
	    : m(m_), b(b_), numbers(b_.numbers), left(m_.count), waited(m_.world)
	{
	}

	// Once.
	__device__ __forceinline__ void begin()
	{
		if constexpr (!few)
			b.item = load_relaxed_sys(m.items()), b.alone = false;
		if (!few && m.turns)
			turn = static_cast<u32>(load_relaxed_sys(turns()));
	}

	// The place of the words low and early of a rank.
	__device__ __forceinline__ u64 counted(u32 rank) const
	{
		static_assert(offsetof(sw_message_counters, early) == offsetof(sw_message_counters, low) + 8);
		return m.counter(offsetof(sw_message_counters, low), rank);
	}
	__device__ __forceinline__ u64 turns() const
	{
		return m.counter(offsetof(sw_message_counters, turn), m.world.rank);
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
		u64 low = b.low[m.peer], early = b.early[m.peer];
		if (n != low)
			early++;
		else
			for (low++; early > 0 && load_relaxed_sys(ended(low)) >= low; early--)
				low++;
		store16_relaxed_sys(counted(m.peer), low, early);
		b.low[m.peer] = low, b.early[m.peer] = early;
	}

	// The same of a message that nobody has received.
	__device__ __noinline__ void pass(u64 n) { end(n); }

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

	// Whether a receive that is not over is for a message of the peer with this tag.
	__device__ __forceinline__ bool fits(u32 entry, u64 tag) const
	{
		const sw_message_entry &e = m.entry(entry);
		return numbers[entry] == 0 && e.tag == tag && (few || e.peer == m.peer || e.peer == SW_ANY_RANK);
	}

	// The first message of the peer that a receive waits for: its number, or 0. Messages come in the order of their
	// numbers.
	__device__ __forceinline__ u64 find(u32 &entry, letter &l)
	{
		for (u64 n = b.low[m.peer]; n < b.low[m.peer] + m.a.boxes; n++) {
			u64 at = m.here + m.of_box(m.a.block.headers, m.peer, n, SW_LINE_BYTES);
			u64 last = load_relaxed_sys(ended(n)); // these loads are on their way at the same time
			packet p = packet::get(at), q = packet::get(at + 16);
			u64 now = load_acquire_sys(state(n));
			if (last >= n)
				continue;
			if (gone(n, now)) {
				pass(n);
				n = b.low[m.peer] - 1; // from the start
				continue;
			}
			u32 flag = packet::flag(n);
			if (!p.has(flag) || !q.has(flag))
				return 0;
			l = {p.low(), static_cast<u64>(q.word(2) & 0xffff) << 32 | p.word(2), q.low(), q.word(2) >> 16};
			for (entry = 0; entry < m.count; entry++)
				if (fits(entry, l.tag))
					return n;
		}
		return 0;
	}

	// The same of any rank, to which the messenger has turned then. The rank of the last message comes last.
	__device__ __forceinline__ u64 look(u32 &entry, letter &l)
	{
		if constexpr (few)
			return find(entry, l);
		u64 n = 0;
		for (u32 k = 0, ranks = m.turns ? m.world.size : 1; n == 0 && k < ranks; k++) {
			if (m.turns) {
				u32 rank = turn + k < ranks ? turn + k : turn + k - ranks;
				if (rank == m.world.rank)
					continue;
				m.turn_to(rank);
			}
			n = find(entry, l);
		}
		if (n != 0 && m.turns) {
			turn = m.peer + 1 < m.world.size ? m.peer + 1 : 0;
			store_relaxed_sys(turns(), turn);
		}
		return n;
	}

	// Finds for which receive this rank waits, if any is left.
	__device__ __forceinline__ void wait_for_first()
	{
		while (first < m.count && numbers[first] != 0)
			first++;
		if (few || first == m.count)
			return;
		anyones = m.entry(first).peer == SW_ANY_RANK;
		waited.control = m.control_of(m.entry(first).peer);
		waited.timeout_ns = anyones ? ~0ull : m.world.timeout_ns;
		quiet = 0, since = 0;
	}

	// Goes on waiting, unless that is over. The silence of all ranks ends a receive from any, once it has looked
	// for a message again.
	__device__ __forceinline__ bool patient(wait &w)
	{
		if constexpr (few)
			return w.slow(m.world);
		if (quiet == moved_looks) {
			w.kind = SW_FAULT_TIMEOUT;
			return false;
		}
		if (!w.slow(waited))
			return false;
		if (!anyones || !w.looked())
			return true;
		u64 t = now_ns(), now = 0;
		if (since == 0)
			since = t;
		if (t - since <= m.world.timeout_ns / moved_looks)
			return true;
		since = t;
		for (u32 p = 0; p < m.world.size; p++)
			if (p != m.world.rank)
				now += load_relaxed_sys(segment(m.world, p) + m.control_of(p) +
				                        offsetof(sw_control, moved));
		quiet = now == moved ? quiet + 1 : 0;
		moved = now;
		return true;
	}

	// Answers a message that could be withdrawn. False when it has been.
	__device__ __forceinline__ bool answers(u64 n, u64 what, u64 more)
	{
		tell(n, what, more);
		__threadfence_system();
		wait w;
		u64 now;
		while ((now = load_acquire_sys(state(n))) == (n << SW_ANSWER_BITS | SW_STATE_WITHDRAWAL))
			if (!w.slow(m.world))
				return false;
		return !gone(n, now);
	}

	// The ranks have different sizes for a message.
	__device__ __noinline__ void refuse(u32 i, u64 n, letter l)
	{
		u64 expected = static_cast<u64>(m.entry(i).bytes);
		if (l.bytes <= static_cast<u64>(m.a.eager_bytes)) { // its sender is done with it
			u64 at = m.there + m.a.block.complaints + m.world.rank * 2 * SW_LINE_BYTES;
			store16_relaxed_sys(at + SW_LINE_BYTES, l.bytes, expected);
			fence_acq_rel_sys();
			store16_relaxed_sys(at, n, l.tag);
			tell(n, SW_ANSWER_REFUSED, expected);
		} else if (!answers(n, SW_ANSWER_REFUSED, expected)) {
			pass(n);
			return;
		}
		pass(n);
		m.fail(SW_FAULT_MISMATCH, n, l.tag, l.bytes, expected);
		over(i, n);
	}

	// The address of a message at its sender, 0 where this rank does not reach it: its sender has told no place, or
	// one of memory that it has shared with this rank, which does not have that open.
	__device__ __forceinline__ u64 read_at(u64 place) const
	{
		if (place == SW_NOWHERE)
			return 0;
		u64 at = m.there + resolve(m.world, m.peer, place), offset = place & ((1ull << SW_ALIAS_SHIFT) - 1);
		return place >> 62 == 1 && at == offset ? 0 : at; // without an address in the alias table
	}

	__device__ __forceinline__ void over(u32 i, u64 n)
	{
		numbers[i] = n;
		left--;
	}

	__device__ __noinline__ task next()
	{
		wait w;
		wait_for_first();
		while (left > 0) {
			u32 i = 0;
			letter l{0, 0, 0, 0};
			u64 n = look(i, l);
			if (n == 0) {
				if (patient(w))
					continue;
				const sw_message_entry &e = m.entry(first);
				give_up(waited, w.kind, e.peer, 0, false, e.bytes, 0, e.tag, SW_MESSAGE_FAULT);
				break;
			}
			if (l.bytes != static_cast<u64>(m.entry(i).bytes)) {
				refuse(i, n, l);
				wait_for_first();
				continue;
			}
			if (few || l.bytes <= static_cast<u64>(m.a.eager_bytes))
				return {deed::read, i, n, 0, 0, 0, m.peer, false};
			if constexpr (!few) {
				u64 claims = m.counter(offsetof(sw_message_counters, claims));
				u64 claim = load_relaxed_sys(claims) + 1;
				u64 from = read_at(l.place);
				u32 stripes = from != 0             ? 0 // nothing is pushed
				              : m.blocks < l.blocks ? m.blocks
				                                    : l.blocks;
				store_relaxed_sys(claims, claim);
				if (!answers(n, SW_ANSWER_CLAIMED, claim << 8 | stripes)) {
					pass(n);
					continue;
				}
				if (from == 0)
					return {deed::drain, i, n, claim, 0, stripes, m.peer, left == 1};
				return {deed::pull, i, n, claim, from, m.blocks, m.peer, left == 1};
			}
		}
		return {deed::end, 0, 0, 0, 0, 0, m.peer, true};
	}

	// A message has been carried, or not. One whose sender has given up meanwhile may be anything.
	__device__ __forceinline__ void carried(const task &t, bool good)
	{
		const sw_message_entry &e = m.entry(t.entry);
		if (!few && good && t.what != deed::read && gone(t.number, load_acquire_sys(state(t.number)))) {
			m.fail(SW_FAULT_TIMEOUT, t.number, e.tag, e.bytes, 1);
			good = false;
		}
		if (good && e.place != 0)
			store_relaxed_sys(e.place, m.peer);
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

template <bool few> __device__ __forceinline__ void receive(messenger &m, leader_board &b)
{
	for (u32 i = threadIdx.x; i < m.count; i += leader_threads<few>)
		b.numbers[i] = 0;
	receiving<few> r(m, b); // of the first thread
	if (threadIdx.x == 0)
		r.begin();
	for (u32 p = threadIdx.x; p < m.world.size; p += leader_threads<few>) {
		pair64 counted = load16_relaxed_sys(r.counted(p));
		b.low[p] = counted.a != 0 ? counted.a : 1, b.early[p] = counted.b;
	}
	__syncthreads();
	for (;;) {
		if (threadIdx.x == 0)
			b.now = r.next();
		__syncthreads();
		task t = b.now;
		__syncthreads();
		if (t.what == deed::end)
			return;
		if (!few && m.turns)
			m.turn_to(t.peer);
		const sw_message_entry &e = m.entry(t.entry);
		bool good = false;
		if (few || t.what == deed::read)
			good = !__syncthreads_or(!read_small<few>(m, t));
		else if constexpr (!few)
			good = carry_together(m, b,
			                      {t.what, e.address, t.from, e.bytes, t.claim, t.stripes, t.peer, t.last});
		if (threadIdx.x == 0)
			r.carried(t, good);
	}
}

} // namespace sw
