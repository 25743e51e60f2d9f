// Runs exchanges between ranks of several hosts on a processor, in random worlds and random orders of their threads:
// the kernels of the own host and those behind and before them, with queues, proxies and rails. Calls in a row of other
// splits, in arguments or in memory, two ranks that disagree, splits that reach outside, ranks or proxies that are
// missing, and aborts. Every byte is checked.
//
//	emulate SEED ROUNDS
#include "across_kernels.h"

#include "fibers.h"
#include "proxies.h"

namespace {

constexpr u64 words_at = 65536, block_at = words_at + 8192, poison = 0xA7;

// A part that reaches outside, as ranks are told of it: the numbers of ranks are those in the group.
struct refusal {
	u32 rank, part;
	bool sending;
	i64 bytes, offset;
};

// The splits of a call, by rank and other rank.
struct call {
	std::vector<std::vector<i64>> send, send_at, recv, recv_at;
	std::vector<bool> live;
	u32 liar, victim; // rank whose splits say something else of a rank of another host; the number of ranks: none
	bool lies_of_send;
	std::vector<refusal> refused; // at most one
};

struct rank_state {
	u64 calls = 0;
	u32 stage = 0; // kernels of the call so far
	std::vector<emu::block *> blocks;
	std::vector<i64> table;
	std::shared_ptr<sw_across_args> across;
	std::shared_ptr<sw_exchange_args> home;
	std::vector<u8> src, dst;
};

struct world {
	u32 hosts = 2 + draw(2), per_host = 1 + draw(2), size = hosts * per_host, far = size - per_host;
	u32 stripes = 1 + draw(2), slots = 1 + draw(2), ring_slots = 1 + draw(4), gives = 1 + draw(ring_slots);
	i64 packet_bytes = draw(2) == 0 ? 0 : 1000, slot_bytes = 128 * (1 + draw(8)), ring_bytes = 128 * (1 + draw(4));
	i64 room = 24 << 10;
	sw_exchange_block block = sw_lay_exchange_block(block_at, per_host, stripes, slots, slot_bytes, packet_bytes);
	std::vector<segments> homes{hosts};
	rails rail;
	std::vector<rank_state> ranks{size};
	std::vector<call> calls;

	world()
	{
		for (segments &h : homes)
			h.take(per_host, (block.end + 4095) / 4096 * 4096);
		u64 words = 128 * far;
		rail.lay(size, words, words + 2 * far * ring_slots * ring_bytes, ring_bytes);
		for (rank_state &r : ranks)
			r.src.resize(room + 16), r.dst.resize(room + 16);
	}

	u32 host(u32 r) const { return r / per_host; }
	u32 local(u32 r) const { return r % per_host; }
	u32 number(u32 r, u32 of) const // of rank `of` among the peers of rank r
	{
		return of < host(r) * per_host ? of : of - per_host;
	}
	sw_fault &fault(u32 r) { return homes[host(r)].faults[local(r)]; }
	u64 control(u32 r) { return homes[host(r)].segment(local(r)) + block.control; }

	// Splits of a call, with gaps between parts.
	call draw_call(bool disagree)
	{
		call c;
		i64 most = draw(3) == 0 ? 0 : room / (size + 1) - 40;
		auto gap = [] { return static_cast<i64>(draw(2) ? 16 * draw(2) : draw(30)); };
		c.send.assign(size, std::vector<i64>(size));
		c.send_at = c.recv = c.recv_at = c.send;
		for (u32 s = 0; s < size; s++)
			for (u32 d = 0; d < size; d++) {
				i64 n = most == 0 ? draw(200) : draw(most) >> (3 * draw(3));
				c.send[s][d] = c.recv[d][s] = draw(5) == 0 ? 0 : min(n, room / size - 64);
			}
		for (u32 r = 0; r < size; r++) {
			i64 from = 0, to = 0;
			for (u32 p = 0; p < size; p++) {
				c.send_at[r][p] = from += gap(), c.recv_at[r][p] = to += gap();
				from += c.send[r][p], to += c.recv[r][p];
			}
			c.live.push_back(draw(2) == 0);
		}
		c.liar = c.victim = size;
		if (!disagree)
			return c;
		u32 r = draw(size), p = draw(size);
		bool sends = draw(2);
		auto &bytes = sends ? c.send : c.recv;
		if (draw(2) == 0 && host(r) != host(p)) {
			c.liar = r, c.victim = p, c.lies_of_send = sends;
			bytes[r][p] = bytes[r][p] != 0 && draw(2) ? bytes[r][p] - 1 : bytes[r][p] + 1 + draw(20);
		} else {
			c.live[r] = true;
			i64 n = draw(2) ? -1 - static_cast<i64>(draw(5)) : room + 1 + draw(100);
			i64 &offset = sends ? c.send_at[r][p] : c.recv_at[r][p];
			if (r == p || draw(2))
				offset = room - bytes[r][p] + 1 + draw(9);
			else
				bytes[r][p] = n;
			c.refused.push_back({r, p, sends, bytes[r][p], offset});
		}
		return c;
	}

	u8 value(u64 k, u32 from, u32 to, i64 i) const
	{
		u64 z = (k * 1000003 + from * 131 + to * 17 + 1) * 0x9e3779b97f4a7c15 + i * 0xbf58476d1ce4e5b9;
		return static_cast<u8>(z >> 41);
	}

	// The arguments of a call of one rank, whose buffers are filled.
	void prepare(u32 rank, u64 k, u64 timeout_ns)
	{
		const call &c = calls[k - 1];
		rank_state &m = ranks[rank];
		segments &h = homes[host(rank)];
		std::fill(m.dst.begin(), m.dst.end(), static_cast<u8>(poison));
		for (u32 p = 0; p < size; p++)
			for (i64 i = 0, at = c.send_at[rank][p]; i < c.send[rank][p] && at >= 0 && at + i < room; i++)
				m.src[at + i] = value(k, rank, p, i);
		m.across = std::make_shared<sw_across_args>();
		sw_across_args &a = *m.across;
		a.world = h.seen_by(local(rank), block.control, timeout_ns);
		u64 words = h.segment(local(rank)) + words_at;
		a.rail = rail.seen_by(rank, words + offsetof(sw_across, next));
		a.src = reinterpret_cast<u64>(m.src.data()), a.dst = reinterpret_cast<u64>(m.dst.data());
		a.src_bytes = a.dst_bytes = room;
		a.words = words_at, a.rings = 0;
		a.slot_bytes = ring_bytes, a.slot_count = ring_slots, a.gives = gives;
		a.ranks = size, a.me = rank, a.count = far;
		m.table.clear();
		if (c.live[rank]) {
			for (auto *v : {&c.send, &c.send_at, &c.recv, &c.recv_at})
				m.table.insert(m.table.end(), (*v)[rank].begin(), (*v)[rank].end());
			a.splits = reinterpret_cast<u64>(m.table.data());
		}
		for (u32 i = 0; i < per_host; i++)
			a.home[i] = host(rank) * per_host + i;
		u32 to = 0, from = 0;
		for (u32 i = 1; i < size; i++) {
			u32 p = (rank + i) % size, q = (rank + size - i) % size;
			if (host(p) != host(rank)) {
				a.to[to++] = number(rank, p);
				sw_across_peer &x = a.peers[number(rank, p)];
				x = {p, number(p, rank), 0, 0, 0, 0};
				if (!c.live[rank])
					x = {p,
					     number(p, rank),
					     c.send[rank][p],
					     c.send_at[rank][p],
					     c.recv[rank][p],
					     c.recv_at[rank][p]};
			}
			if (host(q) != host(rank))
				a.from[from++] = number(rank, q);
		}
		m.home = std::make_shared<sw_exchange_args>();
		sw_exchange_args &e = *m.home;
		e.world = a.world, e.src = a.src, e.dst = a.dst, e.dst_offset = -1, e.block = block;
		e.packet_bytes = packet_bytes, e.slot_bytes = slot_bytes, e.stripes = stripes, e.slot_count = slots;
		e.src_bytes = e.dst_bytes = room;
		if (c.live[rank]) {
			e.splits = words + offsetof(sw_across, splits);
		} else {
			e.own_bytes = c.send[rank][rank], e.own_src = c.send_at[rank][rank],
			e.own_dst = c.recv_at[rank][rank];
		}
		for (u32 i = 1; i < per_host; i++) {
			u32 p = (local(rank) + i) % per_host, q = (local(rank) + per_host - i) % per_host,
			    x = host(rank) * per_host + p, y = host(rank) * per_host + q;
			e.steps[i - 1] = {p, q, 0, 0, 0, 0};
			if (!c.live[rank])
				e.steps[i - 1] = {
				    p, q, c.send[rank][x], c.send_at[rank][x], c.recv[rank][y], c.recv_at[rank][y]};
		}
	}

	// The next kernel of a rank's call. False when there is none.
	bool start(u32 rank)
	{
		rank_state &m = ranks[rank];
		const call &c = calls[m.calls - 1];
		if (m.stage == 0 && !c.live[rank])
			m.stage = 1;
		switch (m.stage++) {
		case 0:
			m.blocks.push_back(
			    launch(rank, 0, 1, SW_ACROSS_HOME_THREADS, 0, [a = m.across] { alltoallv_home(*a); }));
			return true;
		case 1: {
			bool large = c.live[rank];
			for (u32 p = host(rank) * per_host; p < (host(rank) + 1) * per_host; p++)
				large = large || (p != rank && max(c.send[rank][p], c.recv[rank][p]) > packet_bytes);
			u32 grid = 1 + draw(stripes), threads = SW_SEND_THREADS + SW_WATCH_THREADS + SW_RECV_THREADS;
			if (!large)
				threads = SW_PACKET_THREADS;
			size_t bytes = per_host * ((stripes + grid - 1) / grid) *
			               (SW_ITEM_BYTES + 8 * slots + 4 * (3 + SW_RECV_THREADS / 32));
			for (u32 i = 0; i < grid; i++)
				m.blocks.push_back(launch(rank, i, grid, threads, bytes, [a = m.home, large] {
					large ? alltoallv(*a) : alltoallv_packet(*a);
				}));
			return true;
		}
		case 2: {
			u32 half = 1 + draw(min(far, 2u));
			for (u32 i = 0; i < 2 * half; i++)
				m.blocks.push_back(launch(rank, i, 2 * half, SW_ACROSS_THREADS, 0,
				                          [a = m.across] { alltoallv_across(*a); }));
			return true;
		}
		}
		m.stage = 0;
		return false;
	}

	bool complain(u32 rank, const char *what)
	{
		sw_fault &f = fault(rank);
		printf("rank %u, call %llu: %s; its fault is %u, rank %#x, %lld %lld %lld, sending %u, part %#x\n",
		       rank, static_cast<unsigned long long>(ranks[rank].calls), what, f.kind, f.peer,
		       static_cast<long long>(f.sent), static_cast<long long>(f.expected),
		       static_cast<long long>(f.limit), f.sending, f.part);
		return false;
	}

	u32 in_group(u32 rank, u32 named) const
	{
		return (named & SW_FAR_RANK) != 0 ? named & ~SW_FAR_RANK : host(rank) * per_host + named;
	}

	// Whether a call has left a rank what it should.
	bool right(u32 rank)
	{
		const call &c = calls[ranks[rank].calls - 1];
		sw_fault &f = fault(rank);
		if (!c.refused.empty()) {
			const refusal &x = c.refused[0];
			if (f.kind != SW_FAULT_SPLITS || f.epoch != ranks[rank].calls ||
			    in_group(rank, f.peer) != x.rank || in_group(rank, f.part) != x.part ||
			    f.sending != static_cast<u32>(x.sending) || static_cast<i64>(f.sent) != x.bytes ||
			    static_cast<i64>(f.expected) != x.offset || static_cast<i64>(f.limit) != room)
				return complain(rank, "splits were refused");
			return true;
		}
		u32 unsure = size; // whose part may hold any bytes
		if (rank == c.liar || rank == c.victim) {
			u32 other = rank == c.liar ? c.victim : c.liar;
			bool sends = (rank == c.liar) == c.lies_of_send;
			u32 from = sends ? rank : other, to = sends ? other : rank;
			if (f.kind != SW_FAULT_MISMATCH || f.peer != (SW_FAR_RANK | other) ||
			    f.sending != static_cast<u32>(sends) || static_cast<i64>(f.sent) != c.send[from][to] ||
			    static_cast<i64>(f.expected) != c.recv[to][from])
				return complain(rank, "two ranks disagree");
			unsure = sends ? size : other;
		} else if (f.kind != SW_FAULT_NONE) {
			return complain(rank, "a fault");
		}
		const std::vector<u8> &got = ranks[rank].dst;
		std::vector<u8> want(got.size(), static_cast<u8>(poison));
		for (u32 p = 0; p < size; p++)
			for (i64 i = c.recv_at[rank][p]; i < c.recv_at[rank][p] + c.recv[rank][p]; i++)
				want[i] =
				    p == unsure ? got[i] : value(ranks[rank].calls, p, rank, i - c.recv_at[rank][p]);
		if (want != got)
			return complain(rank, "other bytes");
		return true;
	}

	// Forgets an error of one call, as the host does.
	void clear(u32 rank)
	{
		fault(rank).kind = SW_FAULT_NONE;
		at<u32>(control(rank) + offsetof(sw_control, fault)) = SW_FAULT_NONE;
	}
};

bool run()
{
	world w;
	u64 calls = 1 + draw(4);
	bool aborted = draw(2) != 0;
	u32 away = draw(4) == 0 ? draw(w.size) : w.size;
	bool proxy_only = away < w.size && draw(2) != 0; // its kernels come
	u64 timeout_ns = away == w.size || aborted ? u64{1} << 50 : 500'000, when = draw(3000);
	for (u64 k = 0; k < calls; k++)
		w.calls.push_back(w.draw_call(away == w.size && draw(3) == 0));
	auto go_on = [&](u32 r) {
		rank_state &m = w.ranks[r];
		if (w.rail.broken)
			return at_work::stop;
		if (!ended(m.blocks))
			return at_work::yes;
		if (m.stage != 0) {
			if (w.start(r))
				return at_work::yes;
			if (away == w.size) {
				for (rank_state &o : w.ranks)
					if (o.calls < m.calls) {
						w.complain(r, "the call ends before all have begun it");
						return at_work::stop;
					}
				if (!w.right(r))
					return at_work::stop;
				w.clear(r);
			}
		}
		if (m.calls == calls || w.fault(r).kind != SW_FAULT_NONE || (r == away && !proxy_only))
			return at_work::no;
		w.prepare(r, ++m.calls, timeout_ns);
		w.start(r);
		return at_work::yes;
	};
	auto each_sweep = [&](u64 sweep) {
		for (u32 r = 0; r < w.size; r++) {
			if (away < w.size && aborted && sweep == when)
				w.fault(r).stop = 1;
			if (r != away && draw(3) != 0)
				w.rail.proxy(r);
		}
	};
	if (!run_ranks(w.size, go_on, [](u32 rank) { return 1 + rank; }, each_sweep) || w.rail.broken)
		return false;
	for (u32 r = 0; r < w.size; r++) {
		if (away == w.size) {
			if (w.rail.ran(r) != calls)
				return w.complain(r, "kernels have not said that they end");
			continue;
		}
		// the host of a rank whose proxy is away may need nothing of it
		if (r != away && (!proxy_only || w.host(r) != w.host(away)) &&
		    w.fault(r).kind != (aborted ? SW_FAULT_ABORTED : SW_FAULT_TIMEOUT))
			return w.complain(r, "a rank was away");
	}
	return true;
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words, {{"across", run}}, [](u64) { return 0; });
}
