// Runs messages between two ranks on a processor, in random orders of their threads. Ranks send each other messages of
// random sizes, tags and places, in batches and one by one, in orders that cannot lock; a rank does not come; a sender
// gives up while its receiver comes; ranks have different sizes for a message; there are more messages than boxes;
// receives take messages of any rank.
//
//	emulate SEED ROUNDS
#include "messages_kernels.h"

#include "fibers.h"

#include <array>
#include <map>

namespace {

constexpr u64 boxes = 4, eager = 1700, chunk = 8192, room = 44 << 10, reach_room = 128 << 10;

struct world : segments {
	sw_point_block points;
	sw_message_block block;
	u32 blocks;
	u64 sources, timeout_ns = u64{1} << 50;

	world(u32 ranks, u32 movers) : points(sw_lay_point_block(65536, ranks, 1)), blocks(movers)
	{
		block = sw_lay_message_block((points.end + 127) / 128 * 128, points.control, ranks, boxes, payload(),
		                             blocks, chunk);
		sources = (block.end + 4095) / 4096 * 4096;
		take(ranks, sources + reach_room);
	}
	static u64 payload()
	{
		return (eager + SW_PACKET_GROUP_PAYLOAD - 1) / SW_PACKET_GROUP_PAYLOAD * SW_PACKET_GROUP_BYTES;
	}

	// Forgets a fault, as the host does once it has told of it, and returns its kind.
	u32 clear(u32 rank)
	{
		u32 kind = faults[rank].kind;
		faults[rank].kind = SW_FAULT_NONE;
		for (u32 p = 0; p < size; p++)
			at<u32>(segment(rank) + points.control + p * SW_CONTROL_ALIGN + offsetof(sw_control, fault)) =
			    0;
		at<u32>(segment(rank) + block.anyone + offsetof(sw_control, fault)) = 0;
		return kind;
	}
};

u8 value(u64 key, u64 i) { return static_cast<u8>((key * 0x9e3779b97f4a7c15 + (i + 1) * 0xbf58476d1ce4e5b9) >> 40); }

// One message, and both ends' memory.
struct letter {
	u32 src, dst;
	u64 tag, key, bytes, expected;
	bool reach;
	std::vector<u8> from, to;
	u64 shift, place = 0;
	u64 sender = ~u64{0}; // whose message a receive has taken

	letter(u32 s, u32 d, u64 t, u64 k, u64 n)
	    : src(s), dst(d), tag(t), key(k), bytes(n), expected(n), reach(draw(2) != 0)
	{
		shift = draw(2) != 0 ? 16 * draw(3) : draw(40);
		from.resize(n + 64), to.assign(n + 4096 + 128, 0xAA);
	}
	// Puts the source into the heap where it reaches, at *used, which moves on.
	void settle(const world &w, u64 *used)
	{
		if (reach && *used + bytes + 64 <= reach_room) {
			place = w.sources + *used + shift;
			*used += (bytes + shift + 127) / 128 * 128;
		} else
			reach = false;
		fill(w);
	}
	u64 address(const world &w) const
	{
		return reach ? w.segment(src) + place : reinterpret_cast<u64>(from.data()) + shift;
	}
	void fill(const world &w)
	{
		for (u64 i = 0; i < bytes; i++)
			at<u8>(address(w) + i) = value(key, i);
	}
	// Overwrites the source, as a sender may when its send is over.
	void spoil(const world &w)
	{
		for (u64 i = 0; i < bytes; i++)
			at<u8>(address(w) + i) = 0x55;
	}
	bool came() const
	{
		for (u64 i = 0; i < bytes; i++)
			if (to[shift + i] != value(key, i)) {
				printf("byte %llu of %llu from rank %u to rank %u, tag %llu\n",
				       static_cast<unsigned long long>(i), static_cast<unsigned long long>(bytes), src,
				       dst, static_cast<unsigned long long>(tag));
				return false;
			}
		return true;
	}
};
using letters = std::vector<letter *>;

u64 size_of_message()
{
	switch (draw(5)) {
	case 0:
		return draw(4) * 48;
	case 1:
		return 1 + draw(eager);
	case 2:
		return eager + draw(3);
	case 3:
		return eager + 1 + draw(9000);
	}
	return 4096 * (1 + draw(9));
}

// One launch: its messages, and whether this rank receives each.
struct batch {
	std::vector<std::pair<letter *, bool>> list;
};

std::vector<emu::block *> start(const world &w, u32 r, const batch &b)
{
	auto a = std::make_shared<sw_messages_args>();
	memset(a.get(), 0, sizeof(*a));
	a->world = w.seen_by(r, w.points.control, w.timeout_ns), a->block = w.block;
	a->eager_bytes = eager, a->staging_bytes = chunk, a->payload_bytes = world::payload();
	a->boxes = boxes, a->blocks = w.blocks;
	u32 grid = 0;
	bool few = true;
	auto group = [&](u32 receives, u32 peer) {
		bool large = false;
		u32 first = a->count;
		for (auto [l, in] : b.list) {
			u32 p = in ? l->src : l->dst;
			if (in != (receives != 0) || (p != peer && peer != SW_ANY_RANK))
				continue;
			u64 n = in ? l->expected : l->bytes;
			u64 place = in ? reinterpret_cast<u64>(&l->sender) : l->reach ? l->place : SW_NOWHERE;
			a->entries[a->count++] = {l->tag,
			                          in ? reinterpret_cast<u64>(l->to.data()) + l->shift : l->address(w),
			                          place, static_cast<i64>(n), p};
			large = large || n > eager;
		}
		if (a->count > first) {
			a->groups[a->group_count++] = {peer, receives, first, grid};
			grid += large ? 1 + draw(w.blocks) : 1;
			few = few && !large;
		}
	};
	bool any = false;
	for (auto [l, in] : b.list)
		any = any || (in && l->src == SW_ANY_RANK);
	for (u32 p = 0; p < w.size; p++)
		group(0, p);
	for (u32 p = 0; p < w.size && !any; p++)
		group(1, p);
	if (any)
		group(1, SW_ANY_RANK);
	few = few && !any && draw(4) != 0;
	std::vector<emu::block *> all;
	for (u32 id = 0; id < grid; id++)
		if (few)
			all.push_back(launch(r, id, grid, SW_FEW_MESSAGE_THREADS, 0, [a] { p2p_few_messages(*a); }));
		else
			all.push_back(launch(r, id, grid, SW_MESSAGE_THREADS, 0, [a] { p2p_messages(*a); }));
	return all;
}

// A stream of a rank.
struct stream {
	std::vector<batch> launches;
	size_t at = 0;
	std::vector<emu::block *> blocks;

	// Whether it goes on; done gets the launch that has ended.
	template <typename Done> at_work go_on(const world &w, u32 r, Done done)
	{
		if (!blocks.empty()) {
			if (!ended(blocks))
				return at_work::yes;
			if (!done(launches[at - 1]))
				return at_work::stop;
		}
		if (at == launches.size())
			return at_work::no;
		blocks = start(w, r, launches[at++]);
		return at_work::yes;
	}
};

// A rank's rounds. One begins when the rank's streams are through with the one before.
struct rank_state {
	std::vector<std::array<std::vector<batch>, 2>> rounds;
	size_t round = 0;
	stream streams[2];
};

// Another order, in which messages of one pair and tag keep theirs.
letters another_order(letters list)
{
	for (size_t i = list.size(); i > 1; i--) {
		size_t j = draw(static_cast<u32>(i));
		bool free = true;
		for (size_t k = j + 1; k < i && free; k++)
			free = list[k]->src != list[j]->src || list[k]->dst != list[j]->dst ||
			       list[k]->tag != list[j]->tag;
		if (free)
			std::rotate(list.begin() + static_cast<long>(j), list.begin() + static_cast<long>(j) + 1,
			            list.begin() + static_cast<long>(i));
	}
	return list;
}

bool model()
{
	world w(2 + draw(2), 1 + draw(3));
	u32 away = draw(4) == 0 ? draw(w.size) : w.size;
	bool aborted = draw(2) != 0;
	if (away < w.size && !aborted)
		w.timeout_ns = 500'000;
	std::vector<letter> all;
	std::vector<u64> used(w.size);
	std::vector<rank_state> ranks(w.size);
	all.reserve(64);
	for (u32 round = 0, rounds = 1 + draw(3); round < rounds; round++) {
		letters now;
		for (u32 i = 0, n = 1 + draw(6); i < n; i++) {
			u32 s = draw(w.size), d = (s + 1 + draw(w.size - 1)) % w.size;
			if (away < w.size && i + 2 >= n)
				s = away, d = (away + 1 + (i & 1) % (w.size - 1)) % w.size; // the others wait for it
			u64 in_pair = 0;
			for (letter *l : now)
				in_pair += l->src == s && l->dst == d;
			if (in_pair == boxes)
				continue;
			all.emplace_back(s, d, draw(2), all.size() + 1, size_of_message());
			all.back().settle(w, &used[s]);
			now.push_back(&all.back());
		}
		bool one_by_one = draw(3) == 0;
		for (u32 r = 0; r < w.size; r++) {
			std::array<std::vector<batch>, 2> launches; // of sends or of both, and of receives
			bool singly[2] = {one_by_one, one_by_one || draw(2) != 0}, both = draw(2) != 0;
			for (u32 in = 0; in < 2; in++)
				for (letter *l : one_by_one ? now : another_order(now))
					if ((in != 0 ? l->dst : l->src) == r) {
						auto &to = launches[both && !singly[in] ? 0 : in];
						if (singly[in] || to.empty())
							to.emplace_back();
						to.back().list.push_back({l, in != 0});
					}
			ranks[r].rounds.push_back(launches);
		}
	}
	auto go_on = [&](u32 r) {
		rank_state &m = ranks[r];
		if (r == away)
			return at_work::no;
		auto done = [&](const batch &b) {
			for (auto [l, receives] : b.list) {
				if (w.fault(r) != SW_FAULT_NONE)
					continue;
				if (receives && (l->sender != l->src || !l->came()))
					return false;
				if (!receives)
					l->spoil(w);
			}
			return true;
		};
		bool busy = false;
		for (stream &s : m.streams) {
			if (w.fault(r) != SW_FAULT_NONE)
				s.launches.resize(s.at);
			at_work now = s.go_on(w, r, done);
			if (now == at_work::stop)
				return now;
			busy = busy || now == at_work::yes;
		}
		if (!busy && m.round < m.rounds.size() && w.fault(r) == SW_FAULT_NONE) {
			for (u32 i = 0; i < 2; i++)
				m.streams[i] = {m.rounds[m.round][i], 0, {}};
			m.round++;
			busy = true;
		}
		return busy ? at_work::yes : at_work::no;
	};
	auto each_sweep = away < w.size && aborted ? abort_in(w) : std::function<void(u64)>{};
	if (!run_ranks(w.size, go_on, [](u32 rank) { return 1 + rank; }, each_sweep))
		return false;
	for (u32 r = 0; r < w.size; r++)
		if (away == w.size && w.fault(r) != SW_FAULT_NONE) {
			printf("rank %u has fault %u\n", r, w.fault(r));
			return false;
		}
	return true;
}

// A sender is told to give up, as by the fault of another launch, while its receiver comes. The ranks agree on what has
// become of the message: it is sent again until the receiver has it, and no receive fails.
bool leaving()
{
	world w(2, 1 + draw(2));
	u64 wanted = 2 + draw(8), sent = 0, received = 0, number = 0, sweeps = 0, give_up_at = 0, come_at = 0;
	std::vector<letter> out;
	out.reserve(400);
	letter in(0, 1, 3, 0, 2 * 4096);
	in.shift = 0;
	std::vector<emu::block *> blocks[2];
	auto say = [&](u64 key) {
		out.emplace_back(0, 1, 3, key, 2 * 4096);
		out.back().shift = 0, out.back().reach = true, out.back().place = w.sources;
		out.back().fill(w);
	};
	auto go_on = [&](u32 r) {
		if (!blocks[r].empty()) {
			if (!ended(blocks[r]))
				return at_work::yes;
			u32 kind = w.clear(r);
			if (kind != SW_FAULT_NONE) {
				printf("rank %u has fault %u\n", r, kind);
				return at_work::stop;
			}
			u64 state = at<u64>(w.segment(1) + w.block.states + number % boxes * 8);
			if (r == 1) {
				in.key = received++;
				if (!in.came())
					return at_work::stop;
			} else {
				out.back().spoil(w);
				sent += state != (number << SW_ANSWER_BITS | SW_STATE_GONE);
			}
		}
		if ((r == 0 ? sent : received) == wanted || number == 300)
			return at_work::no;
		if (r == 0 && sent == received) { // the receiver comes once for each
			number++;
			say(sent);
			give_up_at = sweeps + 1 + draw(1200);
			if (come_at <= sweeps)
				come_at = sweeps + draw(2500);
			blocks[0] = start(w, 0, {{{&out.back(), false}}});
		} else if (r == 1 && sent == received && number > 0 && sweeps >= come_at)
			blocks[1] = start(w, 1, {{{&in, true}}});
		return at_work::yes;
	};
	auto each_sweep = [&](u64 sweep) {
		sweeps = sweep;
		if (sweep == give_up_at)
			at<u32>(w.segment(0) + w.points.control + SW_CONTROL_ALIGN + offsetof(sw_control, fault)) =
			    SW_FAULT_TIMEOUT;
	};
	if (!run_ranks(2, go_on, [](u32) { return 1; }, each_sweep))
		return false;
	if (sent != received)
		printf("%llu sends went well, and %llu receives\n", static_cast<unsigned long long>(sent),
		       static_cast<unsigned long long>(received));
	return sent == received;
}

// A rank sends more messages in one batch than there are boxes.
bool one_crowd()
{
	world w(2, 1 + draw(3));
	std::vector<letter> all;
	u64 used = 0, n = boxes + 1 + draw(2 * boxes);
	all.reserve(n);
	batch out, in;
	for (u64 i = 0; i < n; i++) {
		all.emplace_back(0, 1, 0, i + 1, draw(4) == 0 ? draw(eager) : eager + 1 + draw(3000));
		all.back().settle(w, &used);
		out.list.push_back({&all.back(), false});
		in.list.push_back({&all.back(), true});
	}
	std::vector<emu::block *> blocks[2];
	bool begun[2] = {false, false};
	auto go_on = [&](u32 r) {
		if (!begun[r]) {
			begun[r] = true;
			blocks[r] = start(w, r, r == 0 ? out : in);
			return at_work::yes;
		}
		if (!blocks[r].empty() && !ended(blocks[r]))
			return at_work::yes;
		if (w.clear(r) != SW_FAULT_NONE)
			return at_work::stop;
		for (letter &l : all) {
			if (r == 0)
				l.spoil(w);
			else if (!l.came())
				return at_work::stop;
		}
		return at_work::no;
	};
	return run_ranks(2, go_on, [](u32) { return 1; }, {});
}

bool crowd()
{
	for (u32 i = 0; i < 10; i++)
		if (!one_crowd())
			return false;
	return true;
}

// Ranks have different sizes for some messages: both learn of it, and the others come. The sender of a small one learns
// of it from its next send, which has then sent nothing.
bool sizes()
{
	world w(2, 1 + draw(2));
	std::vector<letter> all;
	std::vector<u64> used(2);
	all.reserve(8);
	for (u64 i = 0; i < 6; i++) {
		all.emplace_back(0, 1, draw(2), i + 1, size_of_message());
		all.back().settle(w, &used[0]);
		if (draw(2) == 0)
			all.back().expected += 1 + draw(4000);
	}
	std::vector<emu::block *> blocks[2];
	size_t at[2] = {0, 0};
	letter *untold = nullptr, *told = nullptr; // of which the sender's launch learns
	auto go_on = [&](u32 r) {
		if (!blocks[r].empty()) {
			if (!ended(blocks[r]))
				return at_work::yes;
			letter &l = all[at[r]];
			letter *wrong = l.expected != l.bytes && (r == 1 || l.bytes > eager) ? &l : nullptr;
			bool again = r == 0 && told != nullptr;
			if (again)
				wrong = told;
			sw_fault f = w.faults[r];
			u32 kind = w.clear(r);
			if (kind != (wrong != nullptr ? SW_FAULT_MISMATCH : SW_FAULT_NONE) ||
			    (wrong != nullptr && (f.sent != wrong->bytes || f.expected != wrong->expected ||
			                          f.limit != wrong->tag || f.part != SW_MESSAGE_FAULT))) {
				printf("rank %u has fault %u: %llu bytes, %llu\n", r, kind,
				       static_cast<unsigned long long>(f.sent),
				       static_cast<unsigned long long>(f.expected));
				return at_work::stop;
			}
			if (r == 1 && wrong == nullptr && !l.came())
				return at_work::stop;
			if (r == 1 && wrong != nullptr && l.bytes <= eager)
				untold = &l;
			at[r] += again ? 0 : 1;
		}
		if (at[r] == all.size())
			return at_work::no;
		if (r == 0 && at[0] == at[1])
			told = untold, untold = nullptr;
		if (r == 1 || at[0] == at[1])
			blocks[r] = start(w, r, {{{&all[at[r]], r == 1}}});
		return at_work::yes;
	};
	return run_ranks(2, go_on, [](u32) { return 1; }, {});
}

// Launches of the ranks, each rank's one after the other. Before one begins, ready says whether it may.
bool run_lists(world &w, std::vector<std::vector<batch>> lists, const std::function<bool(u32, size_t)> &ready,
               const std::function<void(u64)> &each_sweep = {})
{
	std::vector<size_t> at(w.size);
	std::vector<std::vector<emu::block *>> blocks(w.size);
	auto go_on = [&](u32 r) {
		if (!blocks[r].empty()) {
			if (!ended(blocks[r]))
				return at_work::yes;
			for (auto [l, receives] : lists[r][at[r] - 1].list)
				if (!receives)
					l->spoil(w);
		}
		if (at[r] == lists[r].size() || w.fault(r) != SW_FAULT_NONE)
			return at_work::no;
		if (ready(r, at[r]))
			blocks[r] = start(w, r, lists[r][at[r]++]);
		return at_work::yes;
	};
	return run_ranks(w.size, go_on, [](u32 rank) { return 1 + rank; }, each_sweep);
}

bool at_once(u32, size_t) { return true; }

bool faultless(const world &w)
{
	for (u32 r = 0; r < w.size; r++)
		if (w.fault(r) != SW_FAULT_NONE) {
			printf("rank %u has fault %u\n", r, w.fault(r));
			return false;
		}
	return true;
}

// Rank 0 takes the messages of the others, the first of some ranks by receives from these, the others from any rank.
// Messages of one rank and tag go to receives in their order. Rank 0 sends as well.
bool mixture()
{
	world w(2 + draw(3), 1 + draw(3));
	std::vector<letter> out, in;
	std::vector<u64> used(w.size);
	std::vector<std::vector<batch>> lists(w.size);
	out.reserve(64), in.reserve(64);
	u64 sizes[2] = {size_of_message(), size_of_message()};
	std::map<std::pair<u32, u64>, std::vector<u64>> keys; // of messages of a rank and tag, in their order
	std::vector<letter> orders[2];                        // receives of a tag
	batch back;
	for (u32 p = 1; p < w.size; p++) {
		batch all;
		u64 of_tag[2] = {0, 0};
		for (u64 i = 0, n = draw(boxes + 1); i < n; i++) {
			u64 tag = draw(2);
			out.emplace_back(p, 0, tag, out.size() + 1, sizes[tag]);
			out.back().settle(w, &used[p]);
			keys[{p, tag}].push_back(out.back().key);
			all.list.push_back({&out.back(), false});
			of_tag[tag]++;
		}
		for (u64 tag = 0; tag < 2; tag++)
			for (u64 i = 0, n = draw(static_cast<u32>(of_tag[tag] + 1)); i < of_tag[tag]; i++)
				if (i < n)
					orders[tag].insert(orders[tag].begin(), letter(p, 0, tag, 0, sizes[tag]));
				else
					orders[tag].push_back(letter(SW_ANY_RANK, 0, tag, 0, sizes[tag]));
		out.emplace_back(0, p, 7, out.size() + 1, size_of_message());
		out.back().settle(w, &used[0]);
		back.list.push_back({&out.back(), false});
		in.push_back(letter(0, p, 7, 0, out.back().bytes));
		keys[{0, 7 + p}].push_back(out.back().key);
		all.list.push_back({&in.back(), true});
		lists[p] = {all};
	}
	size_t others = in.size();
	bool one_by_one = draw(3) == 0;
	lists[0].push_back(back);
	for (size_t at[2] = {0, 0}; at[0] < orders[0].size() || at[1] < orders[1].size();) {
		u32 tag = draw(2);
		if (at[tag] == orders[tag].size())
			continue;
		in.push_back(orders[tag][at[tag]++]);
		if (one_by_one || draw(4) == 0)
			lists[0].emplace_back();
		lists[0].back().list.push_back({&in.back(), true});
	}
	if (!run_lists(w, lists, at_once) || !faultless(w))
		return false;
	for (size_t i = 0; i < in.size(); i++) {
		letter &l = in[i];
		u64 tag = i < others ? 7 + l.dst : l.tag;
		auto &left = keys[{static_cast<u32>(l.sender), tag}];
		if (left.empty() || (l.src != SW_ANY_RANK && l.src != l.sender)) {
			printf("receive %zu, of rank %u, has taken from rank %llu\n", i, l.src,
			       static_cast<unsigned long long>(l.sender));
			return false;
		}
		l.key = left.front();
		left.erase(left.begin());
		if (!l.came())
			return false;
	}
	return true;
}

// All messages are there before rank 0 receives the first: it takes one of each rank in turn.
bool in_turn()
{
	world w(3 + draw(2), 1);
	std::vector<letter> out, in;
	std::vector<u64> used(w.size);
	std::vector<std::vector<batch>> lists(w.size);
	out.reserve(64), in.reserve(64);
	u64 others = w.size - 1, each = 1 + draw(boxes);
	for (u32 p = 1; p < w.size; p++) {
		lists[p].emplace_back();
		for (u64 i = 0; i < each; i++) {
			out.emplace_back(p, 0, 0, out.size() + 1, 100);
			out.back().settle(w, &used[p]);
			lists[p][0].list.push_back({&out.back(), false});
		}
	}
	for (u64 i = 0; i < others * each; i++) {
		in.push_back(letter(SW_ANY_RANK, 0, 0, 0, 100));
		if (lists[0].empty() || draw(2) == 0)
			lists[0].emplace_back();
		lists[0].back().list.push_back({&in.back(), true});
	}
	u64 begun = 0;
	auto all_sent = [&](u32 r, size_t at) {
		begun += r != 0 ? 1 : 0;
		return r != 0 || at > 0 || (begun == others && running.empty());
	};
	if (!run_lists(w, lists, all_sent) || !faultless(w))
		return false;
	for (u64 i = others; i < in.size(); i++)
		if (in[i].sender != in[i - others].sender) {
			printf(
			    "receive %llu has taken from rank %llu, and the one of the round before from rank %llu\n",
			    static_cast<unsigned long long>(i), static_cast<unsigned long long>(in[i].sender),
			    static_cast<unsigned long long>(in[i - others].sender));
			return false;
		}
	return true;
}

// Nobody sends to rank 0. Its receive from any rank gives up once all ranks are silent, not before, or when it is told
// to, and leaves a message that comes later for the next one.
bool silence()
{
	world w(3, 1);
	std::vector<u64> used(w.size);
	letter in(SW_ANY_RANK, 0, 5, 0, 100), next(SW_ANY_RANK, 0, 5, 1, 100), out(2, 0, 5, 1, 100);
	out.settle(w, &used[2]);
	u64 until = draw(100'000), now = 0, when = draw(20'000);
	bool aborted = draw(3) == 0;
	w.timeout_ns = aborted ? u64{1} << 50 : 200'000; // 4,000 sweeps
	auto each_sweep = [&](u64 sweep) {
		now = sweep;
		if (sweep < until && sweep % 100 == 0) // rank 1 moves bytes of other messages
			at<u64>(w.segment(1) + w.points.control + SW_CONTROL_ALIGN + offsetof(sw_control, moved)) =
			    sweep + 1;
		if (aborted && sweep == when)
			end_waits(w, false);
	};
	if (!run_lists(w, {{{{{&in, true}}}}, {}, {}}, at_once, each_sweep))
		return false;
	sw_fault f = w.faults[0];
	if (w.fault(0) != (aborted ? SW_FAULT_ABORTED : SW_FAULT_TIMEOUT) || f.peer != SW_ANY_RANK || f.limit != 5 ||
	    f.sent != 100 || f.part != SW_MESSAGE_FAULT || (!aborted && now < until + 3'000)) {
		printf("fault %u of rank %u after %llu sweeps, rank 1 was heard until %llu\n", f.kind, f.peer,
		       static_cast<unsigned long long>(now), static_cast<unsigned long long>(until));
		return false;
	}
	if (aborted)
		return true;
	w.clear(0);
	w.timeout_ns = u64{1} << 50;
	return run_lists(w, {{{{{&next, true}}}}, {}, {{{{&out, false}}}}}, at_once) && faultless(w) &&
	       next.sender == 2 && next.came();
}

bool from_any()
{
	switch (draw(4)) {
	case 0:
		return in_turn();
	case 1:
		return silence();
	}
	return mixture();
}

} // namespace

int main(int count, char **words)
{
	return run_all(
	    count, words,
	    {{"messages", model}, {"leaving", leaving}, {"sizes", sizes}, {"crowd", crowd}, {"from any", from_any}},
	    [](u64 i) { return i % 16 == 15                                  ? 3
		               : i % 16 == 3 || i % 16 == 11 || i % 16 == 13 ? 4
		                                                             : i % 3; });
}
