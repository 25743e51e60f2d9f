// Runs the all-to-all's own source on a processor, in random worlds and random orders of its threads, and checks every
// byte.
//
//	emulate SEED ROUNDS
#include "../../internal/cuda/layout/args.h"

// Blocks have fewer threads than on a GPU, so that a run is short.
#define SW_SEND_THREADS 96
#define SW_RECV_THREADS 96
#define SW_PACKET_THREADS 128
#define SW_COPY_THREADS 64

#include "alltoallv.cu"

#include "fibers.h"

namespace {

// ---- a world and its calls

struct world : segments {
	u32 stripes, slots;
	i64 slot_bytes, packet_bytes;
	sw_exchange_block block;

	world(u32 size, u32 stripes, u32 slots, i64 slot_bytes, i64 packet_bytes, u64 room)
	    : stripes(stripes), slots(slots), slot_bytes(slot_bytes), packet_bytes(packet_bytes),
	      block(sw_lay_exchange_block(65536, size, stripes, slots, slot_bytes, packet_bytes))
	{
		heap = (block.end + 4095) / 4096 * 4096;
		take(size, heap + room);
	}
};

// A call of one rank; only sizes have to agree.
struct part {
	bool staged = false, mesh = false, table = false;
	bool copies = false; // by copy engines
	u32 blocks = 1, interval = 0;
	bool apart = false;                            // blocks of their own copy messages out of staging
	std::vector<i64> send, send_at, recv, recv_at; // by rank
	u64 timeout_ns = u64{1} << 50;
};

struct call {
	std::vector<part> ranks;
	i64 src, dst;
};

template <typename Size, typename Pad> call make_call(const world &w, Size size, Pad pad)
{
	call c;
	c.ranks.resize(w.size);
	std::vector<std::vector<i64>> m(w.size, std::vector<i64>(w.size));
	for (auto &row : m)
		for (i64 &n : row)
			n = size();
	i64 most = 0;
	for (u32 r = 0; r < w.size; r++) {
		part &k = c.ranks[r];
		i64 from = 0, to = 0;
		for (u32 p = 0; p < w.size; p++) {
			from += pad();
			to += pad();
			k.send.push_back(m[r][p]), k.send_at.push_back(from);
			k.recv.push_back(m[p][r]), k.recv_at.push_back(to);
			from += m[r][p];
			to += m[p][r];
		}
		most = max(most, max(from, to));
	}
	c.src = static_cast<i64>(w.heap);
	c.dst = (c.src + most + 64 + 255) / 256 * 256;
	if (static_cast<u64>(c.dst + most + 64) > w.stride) {
		printf("the world is too small\n");
		exit(1);
	}
	return c;
}

sw_exchange_args arguments(world &w, const call &c, u32 rank, std::vector<i64> &table)
{
	const part &k = c.ranks[rank];
	sw_exchange_args a{};
	a.world = w.seen_by(rank, w.block.control, k.timeout_ns);
	a.src = w.segment(rank) + c.src, a.dst = w.segment(rank) + c.dst;
	a.dst_offset = k.staged ? -1 : c.dst;
	a.block = w.block;
	a.packet_bytes = w.packet_bytes, a.slot_bytes = w.slot_bytes;
	a.stripes = w.stripes, a.slot_count = w.slots;
	a.flags = k.mesh ? SW_FLAG_MESH : 0;
	a.interval = k.interval;
	a.senders = k.apart && k.staged ? k.blocks : 0;
	if (w.size > 2)
		a.inverse = static_cast<u32>(((u64{1} << 32) + w.size - 2) / (w.size - 1));
	a.src_bytes = a.dst_bytes = static_cast<i64>(w.stride) - c.dst;
	if (k.table) { // what the arguments say is then of no account
		for (auto *v : {&k.send, &k.send_at, &k.recv, &k.recv_at})
			table.insert(table.end(), v->begin(), v->end());
		a.splits = reinterpret_cast<u64>(table.data());
	} else {
		a.own_bytes = k.send[rank], a.own_src = k.send_at[rank], a.own_dst = k.recv_at[rank];
	}
	std::vector<u32> to_in_step; // any order
	for (u32 i = 0; i + 1 < w.size; i++)
		to_in_step.insert(to_in_step.begin() + draw(i + 1), (rank + 1 + i) % w.size);
	for (u32 i = 0; i + 1 < w.size; i++) {
		u32 to = to_in_step[i], from = (rank + w.size - 1 - i) % w.size;
		a.steps[i] = {to, from, 0, 0, 0, 0};
		if (!k.table)
			a.steps[i] = {to, from, k.send[to], k.send_at[to], k.recv[from], k.recv_at[from]};
	}
	return a;
}

u8 value(u64 call, u32 from, u32 to, i64 i)
{
	u64 z = (call * 1000003 + from * 131 + to * 17 + 1) * 0x9e3779b97f4a7c15 +
	        static_cast<u64>(i >> 3) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 29) * 0x94d049bb133111eb;
	return static_cast<u8>((z ^ z >> 32) >> (8 * (i & 7)));
}

constexpr u8 poison = 0xA7;

void prepare(world &w, const call &c, u64 number)
{
	for (u32 r = 0; r < w.size; r++) {
		u8 *src = reinterpret_cast<u8 *>(w.segment(r) + c.src);
		for (u32 p = 0; p < w.size; p++)
			for (i64 i = 0; i < c.ranks[r].send[p]; i++)
				src[c.ranks[r].send_at[p] + i] = value(number, r, p, i);
		memset(reinterpret_cast<void *>(w.segment(r) + c.dst), poison, w.stride - c.dst);
	}
}

bool right(world &w, const call &c, u64 number)
{
	for (u32 r = 0; r < w.size; r++) {
		std::vector<u8> want(w.stride - c.dst, poison);
		for (u32 p = 0; p < w.size; p++)
			for (i64 i = 0; i < c.ranks[r].recv[p]; i++)
				want[c.ranks[r].recv_at[p] + i] = value(number, p, r, i);
		const u8 *got = reinterpret_cast<const u8 *>(w.segment(r) + c.dst);
		for (size_t i = 0; i < want.size(); i++)
			if (got[i] != want[i]) {
				printf("rank %u, byte %zu of the output: %#x instead of %#x\n", r, i, got[i], want[i]);
				return false;
			}
	}
	return true;
}

// ---- running

// The calls of one rank, which follow one another as in a stream.
struct stream {
	std::vector<const call *> calls;
	size_t next = 0;
	std::vector<emu::block *> blocks;
	const call *copying = nullptr; // alltoallv_open is running or has run
	u32 pace = 1;                  // runs in about one sweep of this number
};

// The kernel before the copies, or the one after them.
void start_copies(world &w, u32 rank, const call &c, bool open, std::vector<emu::block *> &blocks)
{
	std::vector<i64> none;
	auto a = std::make_shared<sw_copy_args>();
	a->exchange = arguments(w, c, rank, none);
	for (u32 p = 0; p < w.size; p++)
		a->places[p] = c.dst + c.ranks[p].recv_at[rank];
	blocks.push_back(
	    launch(rank, 0, 1, SW_COPY_THREADS, 0, [a, open] { open ? alltoallv_open(*a) : alltoallv_close(*a); }));
}

void copy_messages(world &w, u32 rank, const call &c)
{
	const part &k = c.ranks[rank];
	for (u32 p = 0; p < w.size; p++)
		if (p == rank || k.send[p] > w.packet_bytes)
			memcpy(reinterpret_cast<void *>(w.segment(p) + c.dst + c.ranks[p].recv_at[rank]),
			       reinterpret_cast<void *>(w.segment(rank) + c.src + k.send_at[p]),
			       static_cast<size_t>(k.send[p]));
}

void start(world &w, u32 rank, const call &c, std::vector<emu::block *> &blocks)
{
	const part &k = c.ranks[rank];
	bool large = k.table;
	for (u32 p = 0; p < w.size; p++)
		large = large || p != rank && max(k.send[p], k.recv[p]) > w.packet_bytes;
	auto table = std::make_shared<std::vector<i64>>();
	auto a = std::make_shared<sw_exchange_args>(arguments(w, c, rank, *table));
	u32 grid = large ? k.blocks : 2,
	    threads = large ? SW_SEND_THREADS + SW_WATCH_THREADS + SW_RECV_THREADS : SW_PACKET_THREADS;
	u32 items = (w.size - 1) * ((w.stripes + grid - 1) / grid), takers = SW_RECV_THREADS / 32;
	if (large && a->senders != 0)
		grid *= 2, takers += SW_SEND_THREADS / 32;
	size_t bytes = items * (SW_ITEM_BYTES + 8 * w.slots + 4 * (3 + takers));
	for (u32 i = 0; i < grid; i++)
		blocks.push_back(launch(rank, i, grid, threads, bytes,
		                        [a, table, large] { large ? alltoallv(*a) : alltoallv_packet(*a); }));
}

bool run(world &w, std::vector<stream> &streams, const std::function<void(u64)> &each_sweep = {})
{
	auto go_on = [&](u32 r) {
		stream &s = streams[r];
		if (ended(s.blocks)) {
			if (s.copying != nullptr) {
				copy_messages(w, r, *s.copying);
				start_copies(w, r, *s.copying, false, s.blocks);
				s.copying = nullptr;
			} else if (s.next < s.calls.size()) {
				const call &c = *s.calls[s.next++];
				if (c.ranks[r].copies)
					start_copies(w, r, *(s.copying = &c), true, s.blocks);
				else
					start(w, r, c, s.blocks);
			}
		}
		return s.blocks.empty() ? at_work::no : at_work::yes;
	};
	return run_ranks(w.size, go_on, [&](u32 rank) { return streams[rank].pace; }, each_sweep);
}

world random_world(u64 room)
{
	u32 size = 2 + draw(3), stripes = 1 + draw(3), slots = 1 + draw(3);
	return world(size, stripes, slots, 128 * (1 + draw(64)), draw(3) == 0 ? 0 : 1000 + draw(3000), room);
}

void vary(const world &w, part &k)
{
	k.staged = draw(2), k.mesh = draw(2), k.table = draw(4) == 0;
	k.blocks = 1 + draw(w.stripes);
	k.interval = draw(3) == 0 ? draw(300) : 0;
	k.apart = draw(2);
}

call random_call(const world &w)
{
	u32 kind = draw(4);
	call c = make_call(
	    w,
	    [&]() -> i64 {
		    switch (kind) {
		    case 0:
			    return draw(5) == 0 ? 0 : draw(200);
		    case 1:
			    return draw(60000) >> (4 * draw(3));
		    case 2:
			    return 16 * draw(3000);
		    default:
			    return 20000 + draw(100);
		    }
	    },
	    [] { return static_cast<i64>(draw(2) ? 16 * draw(3) : draw(40)); });
	for (part &k : c.ranks)
		vary(w, k);
	return c;
}

// Several calls in a row, each rank in its own way and at its own pace.
bool exchanges()
{
	world w = random_world(2 << 20);
	call first = random_call(w);
	prepare(w, first, 1);
	u32 times = 1 + draw(4);
	std::vector<call> calls(times, first);
	std::vector<stream> streams(w.size);
	for (call &c : calls) {
		for (part &k : c.ranks)
			vary(w, k);
		if (draw(3) == 0) // their outputs must be writable by peers
			for (part &k : c.ranks) {
				k.staged = false;
				k.copies = !k.table;
			}
	}
	for (stream &s : streams) {
		for (const call &c : calls)
			s.calls.push_back(&c);
		s.pace = draw(2) ? 1 : 1 + draw(8);
	}
	if (!run(w, streams))
		return false;
	for (u32 r = 0; r < w.size; r++)
		if (w.fault(r) != SW_FAULT_NONE) {
			printf("rank %u: fault %u with rank %u\n", r, w.fault(r), w.faults[r].peer);
			return false;
		}
	return right(w, first, 1);
}

// Two ranks disagree on a size: both hear of it, the sender of a packet in its next call, nobody hangs, and the calls
// behind it work, which some begin while others are in this one.
bool disagreement()
{
	world w = random_world(2 << 20);
	call bad = random_call(w);
	u32 from = draw(w.size), to = (from + 1 + draw(w.size - 1)) % w.size;
	for (part &k : bad.ranks)
		k.timeout_ns = 200'000'000;
	bad.ranks[from].send[to] /= 1 + draw(3);
	i64 sent = bad.ranks[from].send[to];
	if (sent == bad.ranks[to].recv[from])
		bad.ranks[to].recv[from] = 0;
	i64 expected = bad.ranks[to].recv[from];
	if (sent == expected)
		return true;
	call good = random_call(w);
	u32 heard[2] = {}; // how often from has heard of it, and to
	auto go_on = [&](std::vector<const call *> calls) {
		std::vector<stream> streams(w.size);
		for (stream &s : streams) {
			s.calls = calls;
			s.pace = draw(2) ? 1 : 1 + draw(8);
		}
		if (!run(w, streams))
			return false;
		for (u32 r = 0; r < w.size; r++) {
			const sw_fault &f = w.faults[r];
			bool told = f.kind == SW_FAULT_MISMATCH && f.epoch == 1 && f.peer == from + to - r &&
			            static_cast<i64>(f.sent) == sent && static_cast<i64>(f.expected) == expected;
			if (f.kind != SW_FAULT_NONE && (!told || r != from && r != to)) {
				printf("%u sent %lld to %u, which expected %lld: rank %u has fault %u with rank %u\n",
				       from, static_cast<long long>(sent), to, static_cast<long long>(expected), r,
				       f.kind, f.peer);
				return false;
			}
			if (told)
				heard[r == to]++;
			w.faults[r] = {};
			at<sw_control>(w.segment(r) + w.block.control).fault = SW_FAULT_NONE;
		}
		return true;
	};
	auto have_heard = [&](u32 sender) {
		if (heard[0] == sender && heard[1] == 1)
			return true;
		printf("%u sent %lld to %u, which expected %lld: they have heard of it %u and %u times\n", from,
		       static_cast<long long>(sent), to, static_cast<long long>(expected), heard[0], heard[1]);
		return false;
	};
	std::vector<const call *> first{&bad};
	bool apart = draw(2); // the calls do not overlap
	if (!apart && draw(3) == 0)
		first.push_back(&bad); // the record holds the first
	if (!apart)
		first.push_back(&good);
	if (!go_on(first) || !have_heard(apart && sent <= static_cast<i64>(w.packet_bytes) ? 0 : 1))
		return false;
	if (!go_on({&good}) || !have_heard(1))
		return false;
	prepare(w, good, 2);
	return go_on({&good}) && right(w, good, 2) && have_heard(1);
}

// A rank stays away, or the abort word is set: every wait ends, and says why.
bool end_of_waits(bool aborted)
{
	world w = random_world(2 << 20);
	call c = random_call(w);
	for (part &k : c.ranks)
		k.timeout_ns = aborted ? u64{1} << 50 : 300'000;
	std::vector<stream> streams(w.size);
	u32 away = draw(w.size);
	for (u32 r = 0; r < w.size; r++)
		if (r != away)
			streams[r].calls.push_back(&c);
	return run(w, streams, aborted ? abort_in(w) : nullptr) && gave_up(w, away, aborted);
}

// A message in place takes four times as long as the deadline. Its receiver waits for it, and a third rank, in the next
// call, for the receiver.
bool slow_message()
{
	world w(3, 1 + draw(2), 1 + draw(3), 128 * (1 + draw(64)), draw(2) * 1000, 2 << 20);
	call c = make_call(w, [] { return draw(4) == 0 ? 0 : 2000 + draw(8000); }, [] { return 16 * draw(3); });
	u32 from = draw(3), to = (from + 1 + draw(2)) % 3;
	c.ranks[from].send[to] = c.ranks[to].recv[from] = 160'000;
	c.src = static_cast<i64>(w.heap), c.dst = c.src + (1 << 20);
	for (part &k : c.ranks) {
		i64 send_at = 0, recv_at = 0;
		for (u32 p = 0; p < w.size; p++) { // the long message moves what lies behind it
			k.send_at[p] = send_at, k.recv_at[p] = recv_at;
			send_at += (k.send[p] + 15) / 16 * 16, recv_at += (k.recv[p] + 15) / 16 * 16;
		}
		k.blocks = 1 + draw(w.stripes);
		k.timeout_ns = 240'000;
	}
	c.ranks[from].blocks = 1;
	c.ranks[from].interval = 48'000; // 24 us a tile, of which there are 40
	prepare(w, c, 1);
	std::vector<stream> streams(w.size);
	for (stream &s : streams)
		s.calls = {&c, &c};
	if (!run(w, streams))
		return false;
	for (u32 r = 0; r < w.size; r++)
		if (w.fault(r) != SW_FAULT_NONE) {
			printf("rank %u: fault %u with rank %u\n", r, w.fault(r), w.faults[r].peer);
			return false;
		}
	return right(w, c, 1);
}

// Splits in device memory that reach past a buffer, between calls that are right: all ranks hear whose they are and
// which, nobody waits for its deadline, nothing of the rank that has refused is written once its call is over, and the
// next call works.
bool outside()
{
	world w = random_world(2 << 20);
	call good = random_call(w), bad = good;
	prepare(w, good, 1);
	u32 who = draw(w.size);
	bool copies = draw(2);
	for (call *c : {&good, &bad})
		for (part &k : c->ranks) {
			vary(w, k);
			if (copies) // all outputs must be writable by peers
				k.staged = false, k.copies = !k.table;
		}
	part &k = bad.ranks[who];
	k.table = true, k.copies = false;
	std::vector<i64> *words[] = {&k.send, &k.send_at, &k.recv, &k.recv_at};
	u32 which = draw(copies ? 3 : 4), peer = draw(w.size); // where copy engines write, the caller knows
	if (which == 2 && peer == who)
		which = 0; // what stays on the rank is told by its send
	i64 wrong = (*words[which])[peer] = draw(2) ? -1 : i64{1} << 40;
	std::vector<stream> streams(w.size);
	for (stream &s : streams) {
		s.calls = {&good, &bad, &good, &good};
		s.pace = draw(2) ? 1 : 1 + draw(8);
	}
	if (!run(w, streams))
		return false;
	for (u32 r = 0; r < w.size; r++) {
		const sw_fault &f = w.faults[r];
		if (f.kind != SW_FAULT_SPLITS || f.peer != who || f.epoch != 2 || f.part != peer ||
		    f.sending != (which < 2) || static_cast<i64>(which % 2 == 0 ? f.sent : f.expected) != wrong) {
			printf(
			    "rank %u refused %lld for %u: rank %u has fault %u with rank %u, part %u, %llu at %llu, call %llu\n",
			    who, static_cast<long long>(wrong), peer, r, f.kind, f.peer, f.part,
			    static_cast<unsigned long long>(f.sent), static_cast<unsigned long long>(f.expected),
			    static_cast<unsigned long long>(f.epoch));
			return false;
		}
	}
	return right(w, good, 1);
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words,
	               {
			   {"exchanges", exchanges},
			   {"disagreement", disagreement},
			   {"deadline", [] { return end_of_waits(false); }},
			   {"abort", [] { return end_of_waits(true); }},
			   {"splits outside", outside},
			   {"a slow message", slow_message},
		       },
	               [](u64 i) { return i % 64 == 15 ? 5
		                          : i % 8 < 4  ? 0
		                                       : i % 8 - 3; });
}
