// Runs the kernels of MoE dispatch that can go on without ranks on a processor: layers of few tokens in which a rank
// dies, or is masked and comes back, in random worlds and random orders of their threads.
//
//	emulate SEED ROUNDS
#include "dispatch_threads.h"

#include "dispatch_masked.cu"

#include "dispatch.cu"
#include "results.cu"
#include "token_weights.cu"

#include "fibers.h"

#include "dispatch_worlds.h"

namespace {

constexpr int nowhere = -1;

// The slot for an expert of a token, where the call does without ranks.
int slot_without(const world &w, u32 rank, u32 token, int e, u32 out)
{
	u32 first = w.table[e], n = w.table[e + 1] - first;
	for (u32 i = 0; i < n; i++) {
		u32 s = w.table[w.experts + 1 + first + (rank + token + i) % n];
		if ((out >> rank_of(w, s) & 1) == 0)
			return static_cast<int>(s);
	}
	return nowhere;
}

int expert_in(const world &w, u32 slot) { return static_cast<int>(w.table[w.experts + 1 + w.slots + slot]); }

// A row of a rank's output as the rank can see it: src is -1 in padding. first and count are those of its group.
struct seen_row {
	u32 at, slot;
	int src, choice;
	u32 token;
};

// The rows that a rank's counts speak of.
std::vector<seen_row> seen_rows(const world &w, const batch &b, u32 rank)
{
	u64 own = w.segment(rank);
	const u32 *counts = &at<u32>(own + w.counts), *offsets = &at<u32>(own + w.counts + 1024),
		  *from = &at<u32>(own + w.counts + 2048);
	std::vector<seen_row> rows;
	auto add = [&](u32 r, u32 slot) {
		u64 source = at<u64>(own + w.row_sources + 8 * static_cast<u64>(r));
		seen_row q{r, slot, static_cast<int>(static_cast<u32>(source)), -1, static_cast<u32>(source >> 32)};
		if (!w.by_token() && q.src >= 0) { // rows of one token and slot come in the order of choices
			u32 same = 0;
			for (const seen_row &p : rows)
				same += p.slot == slot && p.src == q.src && p.token == q.token;
			for (u32 k = 0; k < w.top_k && q.choice < 0; k++)
				if (b.choice[q.src][q.token * w.top_k + k] == expert_in(w, w.first[rank] + slot) &&
				    same-- == 0)
					q.choice = static_cast<int>(k);
		}
		rows.push_back(q);
	};
	if (w.by_token()) {
		for (u32 src = 0; src < w.size; src++)
			for (u32 i = 0; i < from[src]; i++)
				add(src * w.max_tokens + i, 0);
		return rows;
	}
	for (u32 slot = 0; slot < w.local(rank); slot++)
		for (u32 i = 0; i < counts[slot]; i++)
			add(offsets[slot] + i, slot);
	return rows;
}

void make_seen_rows(world &w, const batch &b, u32 rank)
{
	memset(reinterpret_cast<void *>(w.segment(rank) + made_at(w)), 0xFF, w.most_rows * 2 * w.hidden); // NaN
	for (const seen_row &q : seen_rows(w, b, rank))
		for (u32 h = 0; q.src >= 0 && h < w.hidden; h++)
			at<u16>(w.segment(rank) + made_at(w) + 2 * (static_cast<u64>(q.at) * w.hidden + h)) =
			    static_cast<u16>(
				bf16_of(made(b, w, rank, {static_cast<u32>(q.src), q.token, q.choice, q.at}, h)));
}

// A row of a source on a rank: which choice of which token.
using arrived = std::set<std::pair<u32, int>>;

// The rows that src sends to a rank, in a call without the ranks of `out`.
arrived sent_to(const world &w, const batch &b, u32 src, u32 rank, u32 out)
{
	arrived rows;
	for (u32 t = 0; t < b.tokens[src]; t++)
		for (u32 k = 0; k < w.top_k; k++) {
			int e = b.choice[src][t * w.top_k + k],
			    slot = e < 0 ? nowhere : slot_without(w, src, t, e, out);
			if (slot >= 0 && rank_of(w, static_cast<u32>(slot)) == rank)
				rows.insert({t, w.by_token() ? -1 : static_cast<int>(k)});
		}
	return rows;
}

// Rows on the ranks of `here` that took part. Of the victim all rows have come, or none that a caller would see. ways
// gets whether each rank has sent its tokens as if the victim were not there.
bool right_rows_without(world &w, const batch &b, u32 victim, u32 here, std::vector<u32> &ways)
{
	ways.assign(w.size, 3); // bits of the ways that fit: 1 with the victim, 2 without
	for (u32 rank = 0; rank < w.size; rank++) {
		if ((here >> rank & 1) == 0)
			continue;
		u64 own = w.segment(rank);
		const u32 *from = &at<u32>(own + w.counts + 2048), *counts = &at<u32>(own + w.counts);
		std::vector<arrived> came(w.size);
		std::vector<u32> scales, sources(w.size);
		std::vector<u8> bytes;
		for (const seen_row &q : seen_rows(w, b, rank)) {
			const u8 *got = &at<u8>(own + w.rows + static_cast<u64>(q.at) * w.wire());
			const u32 *scale = &at<u32>(own + w.row_scales + 4 * static_cast<u64>(q.at) * w.scale_words());
			if (q.src < 0) {
				for (u32 i = 0; i < w.wire(); i++)
					CHECK("byte of a row that did not come", got[i], static_cast<u8>(0));
				for (u32 i = 0; i < w.scale_words(); i++)
					CHECK("scale of a row that did not come", scale[i], 0u);
				if (!w.by_token())
					CHECK("weight of a row that did not come",
					      at<float>(own + w.row_weights + 4 * static_cast<u64>(q.at)), 0.f);
				continue;
			}
			CHECK("choice of a row is known", !w.by_token() && q.choice < 0, false);
			came[q.src].insert({q.token, q.choice});
			sources[q.src]++;
			crossed(w, b, static_cast<u32>(q.src), q.token, bytes, scales);
			for (size_t i = 0; i < bytes.size(); i++)
				CHECK("byte of a row", got[i], bytes[i]);
			for (size_t i = 0; i < scales.size(); i++)
				CHECK("scale", scale[i], scales[i]);
			for (u32 k = 0; k < w.top_k; k++) {
				u32 i = q.token * w.top_k + k;
				u64 at_k = static_cast<u64>(q.at) * w.top_k + k;
				if (q.choice == static_cast<int>(k))
					CHECK("weight", at<float>(own + w.row_weights + 4 * static_cast<u64>(q.at)),
					      b.weight[q.src][i]);
				if (q.choice < 0 && at<i64>(own + w.row_indices + 8 * at_k) >= 0)
					CHECK("weight", at<float>(own + w.row_weights + 4 * at_k), b.weight[q.src][i]);
			}
		}
		for (u32 src = 0; src < w.size; src++) {
			CHECK("rows from a rank", from[src], sources[src]);
			if (src == victim && from[src] == 0)
				continue;
			ways[src] &= (came[src] == sent_to(w, b, src, rank, 0) ? 1 : 0) |
			             (came[src] == sent_to(w, b, src, rank, 1u << victim) ? 2 : 0);
			CHECK("rows of a rank are those that it has sent", ways[src] != 0, true);
		}
		for (u32 slot = 0; w.lands && slot < w.local(rank); slot++)
			CHECK("rows that have landed", at<u32>(own + w.counts + 3072 + 4 * slot), counts[slot]);
	}
	return true;
}

// The sums of ranks that took part: all tokens with what the victim made of them, or none.
bool right_sums_without(world &w, const batch &b, u32 victim, u32 here, const std::vector<u32> &ways,
                        const std::vector<std::vector<float>> &weights)
{
	for (u32 rank = 0; rank < w.size; rank++) {
		if ((here >> rank & 1) == 0)
			continue;
		u32 fits =
		    0; // ways that all tokens agree with: by what they did without, and whether the victim's rows came
		for (u32 way = 0; way < 3; way++) { // with the victim; to it, but not back; not to it
			if ((ways[rank] >> (way == 2 ? 1 : 0) & 1) == 0)
				continue;
			bool good = true;
			for (u32 t = 0; good && t < b.tokens[rank]; t++) {
				rows_t y(w.hidden), part(w.hidden);
				for (u32 i = 0; i < w.biases; i++)
					for (u32 h = 0; h < w.hidden; h++)
						y[h] += b.bias[i][rank][t * w.hidden + h];
				for (u32 r = 0; r < w.size; r++) {
					bool any = false, back = r != victim || way == 0;
					std::fill(part.begin(), part.end(), 0.f);
					for (u32 k = 0; k < w.top_k; k++) {
						int e = b.choice[rank][t * w.top_k + k],
						    slot = e < 0 ? nowhere
						                 : slot_without(w, rank, t, e,
						                                way == 2 ? 1u << victim : 0);
						bool there = slot >= 0 && rank_of(w, static_cast<u32>(slot)) == r;
						if (there || (slot < 0 && r == 0))
							good =
							    good &&
							    weights[rank][t * w.top_k + k] ==
								(there && back ? b.weight[rank][t * w.top_k + k] : 0);
						if (!there || !back || (w.by_token() && any))
							continue;
						any = true;
						row q{rank, t, w.by_token() ? -1 : static_cast<int>(k), 0};
						for (u32 h = 0; h < w.hidden; h++)
							part[h] +=
							    (w.by_token() ? 1 : b.weight[rank][t * w.top_k + k]) *
							    made(b, w, r, q, h);
					}
					if (w.float8_sums)
						cross_as_float8(part);
					for (u32 h = 0; any && h < w.hidden; h++)
						y[h] += w.float8_sums ? part[h] : bf16(part[h]);
				}
				for (u32 h = 0; good && h < w.hidden; h++)
					good = at<u16>(w.segment(rank) + sums_at(w) +
					               2 * (static_cast<u64>(t) * w.hidden + h)) ==
					       static_cast<u16>(bf16_of(y[h]));
			}
			fits |= static_cast<u32>(good) << way;
		}
		CHECK("sums of all tokens agree on the victim", fits != 0, true);
	}
	return true;
}

// A run of layers on one handle, in which one rank dies or is masked.
struct masked_layers {
	struct layer {
		batch b;
		std::vector<std::vector<float>> weights;
		memories rows, sums;
		u32 here = 0, back = 0; // ranks whose dispatch has ended well, and whose combine has
	};
	world w;
	u32 victim;
	bool dies;
	std::vector<layer> layers;
	std::vector<program> programs;
	std::vector<std::vector<size_t>> starts; // by rank and layer: its first launch
	std::vector<sw_mask_requests> requests;
	std::vector<emu::block *> beside; // of kernels next to the ranks' streams
	std::vector<std::deque<launched>> streams;
	std::vector<size_t> skipped; // launches that a stream does not come to
	enum { works, asks, joins } state = works;
	bool dead = false;
	u64 before; // what was decided before the victim asked

	sw_mask &words(u32 rank) { return at<sw_mask>(w.segment(rank) + w.masks); }

	void make()
	{
		do
			w = random_world();
		while (!w.few || w.rows_by == compact || w.size < 2);
		w.late = w.keeps = w.told = false, w.room = 0;
		victim = draw(w.size), dies = draw(2) == 0;
		requests.resize(w.size), programs.resize(w.size), starts.resize(w.size), streams.resize(w.size),
		    skipped.assign(w.size, 0);
		w.requests = requests.data();
		layers.resize(4);
		for (layer &l : layers) {
			l.b = random_batch(w);
			l.weights.resize(w.size);
			for (u32 r = 0; r < w.size; r++) {
				program &p = programs[r];
				starts[r].push_back(p.size());
				l.weights[r].assign(l.b.tokens[r] * w.top_k, NAN);
				add_dispatch(w, l.b, r, false, draw(2) == 0, p);
				p.push_back(l.rows.keep(w, r));
				p.push_back(memories::by_caller(
				    [this, &l, r] { l.here |= 1u << r, make_seen_rows(w, l.b, r); }));
				add_combine(w, l.b, r, false, l.weights[r], p);
				p.push_back(l.sums.keep(w, r));
				p.push_back(memories::by_caller([&l, r] { l.back |= 1u << r; }));
			}
		}
	}

	sw_mask_args arguments(u32 rank)
	{
		sw_mask_args a{};
		a.world = w.seen_by(rank, w.state.control, w.timeout_ns);
		a.masks = w.masks, a.rank = victim, a.bits = 1ull << victim, a.control = w.state.control;
		return a;
	}

	// A rank's host masks the victim, as kernels/cuda/dispatch_mask.go does.
	void mask(u32 rank, bool tells)
	{
		sw_mask_requests &q = requests[rank];
		q.ended |= dies ? 1u << victim : 0;
		q.number[victim]++, q.total++;
		if (!tells)
			return;
		sw_mask_args a = arguments(rank);
		a.number = q.number[victim], a.total = q.total, a.bits |= dies ? a.bits << SW_MASK_ENDED : 0;
		beside.push_back(launch(rank, 0, 1, 32, 0, [a] { dispatch_mask(a); }));
	}

	// Whether all ranks have taken the victim in, and none masks it: a mask while it is taken in can be missed.
	bool taken_in()
	{
		for (u32 r = 0; r < w.size; r++)
			if ((words(r).mask >> victim & 1) != 0)
				return false;
		return ended(beside);
	}

	void die()
	{
		dead = true;
		for (launched &l : streams[victim])
			for (emu::block *b : l.blocks)
				retire(b);
		streams[victim].clear();
	}

	// The victim, once its kernels have found that it is masked.
	at_work come_back(bool idle)
	{
		sw_control &c = at<sw_control>(w.segment(victim) + w.state.control);
		u64 taken = words(0).taken;
		u32 ahead = masks::call_of(taken) - static_cast<u32>(c.epoch);
		switch (state) {
		case works:
			if (!idle)
				return at_work::yes;
			w.faults[victim].kind = SW_FAULT_NONE;
			before = taken, words(victim).asks = 1, state = asks;
			break;
		case asks:
			if (taken != before && static_cast<int>(ahead) >= 0 &&
			    (masks::in_of(taken) >> victim & 1) != 0) {
				sw_mask_args a = arguments(victim);
				a.epoch = c.epoch + ahead;
				a.bits = ~static_cast<u64>(masks::out_of(taken)) & ((1ull << w.size) - 1);
				size_t next = a.epoch / 2;
				skipped[victim] =
				    (next < layers.size() ? starts[victim][next] : programs[victim].size()) -
				    streams[victim].size();
				beside.push_back(launch(victim, 0, 1, 32, 0, [a] { dispatch_unmask(a); }));
				state = joins;
			}
			break;
		case joins:
			if (beside.back()->alive == 0)
				state = works;
			return at_work::yes;
		}
		return at_work::no; // the others go on
	}

	at_work go_on(u32 r)
	{
		if (r == victim && dead)
			return at_work::no;
		std::deque<launched> &s = streams[r];
		bool idle = true;
		for (launched &l : s) {
			l.over = l.over || ended(l.blocks);
			idle = idle && l.over;
		}
		if (r == victim && (w.fault(r) == SW_FAULT_MASKED || state != works))
			return come_back(idle);
		size_t next = s.size() + skipped[r];
		if (next < programs[r].size() &&
		    (idle || (!programs[r][next].waits && !programs[r][next - 1].waits &&
		              std::all_of(
				  s.back().blocks.begin(), s.back().blocks.end(),
				  [](emu::block *b) { return b->released || b->alive == 0; })))) {
			const launch_of &l = programs[r][next];
			s.emplace_back();
			for (u32 i = 0; i < l.blocks; i++) {
				s.back().blocks.push_back(launch(r, i, l.blocks, l.threads, l.shared + 128, l.kernel));
				s.back().blocks.back()->before = s.size() == 1 ? nullptr : &s[s.size() - 2].over;
			}
			idle = false;
		}
		return idle ? at_work::no : at_work::yes;
	}

	void tell()
	{
		printf("%u of %u %s, state %d\n", victim, w.size, dies ? "died" : "was masked", state);
		for (u32 r = 0; r < w.size; r++) {
			const sw_control &c = at<sw_control>(w.segment(r) + w.state.control);
			const sw_mask &m = words(r);
			printf(
			    "rank %u: call %llu, fault %u, mask %llx, asks %llu, taken %llx, without %llx, lost %x, %zu of %zu launches\n",
			    r, static_cast<unsigned long long>(c.epoch), c.fault,
			    static_cast<unsigned long long>(m.mask), static_cast<unsigned long long>(m.asks),
			    static_cast<unsigned long long>(m.taken), static_cast<unsigned long long>(m.call), m.lost,
			    streams[r].size() + skipped[r], programs[r].size());
		}
	}

	bool run()
	{
		make();
		u64 when = draw(12000);
		std::vector<u64> known;
		for (u32 r = 0; r < w.size; r++)
			known.push_back(when + draw(2000));
		u32 teller = draw(w.size), again = draw(4);
		if (dies && teller == victim)
			teller = (teller + 1) % w.size;
		bool good = run_ranks(
		    w.size, [&](u32 r) { return go_on(r); }, [](u32) { return 1u; },
		    [&](u64 sweep) {
			    if (sweep == when && dies)
				    die();
			    for (u32 r = 0; r < w.size; r++)
				    if (sweep == known[r] && (dies ? r != victim : r == teller))
					    mask(r, !dies || (r == teller && draw(2) == 0));
			    if (!dies && again > 0 && state == works && sweep > when + 2000 && sweep % 4000 == 0 &&
			        taken_in())
				    again--, mask(draw(w.size), true);
		    });
		for (emu::block *b : beside)
			retire(b);
		if (!good) {
			tell();
			return false;
		}
		for (u32 r = 0; r < w.size; r++)
			if (w.fault(r) != 0 && !(r == victim && (dead || w.fault(r) == SW_FAULT_MASKED))) {
				printf("rank %u of %u has fault %u without %u\n", r, w.size, w.fault(r), victim);
				return false;
			}
		u32 others = ((1u << w.size) - 1) & ~(1u << victim);
		for (layer &l : layers) {
			u32 rank = 0;
			std::vector<u32> ways;
			CHECK("all others are through a dispatch", l.here & others, others);
			CHECK("all others are through a combine", l.back & others, others);
			l.rows.restore(w);
			if (!right_rows_without(w, l.b, victim, l.here, ways))
				return false;
			l.sums.restore(w);
			if (!right_sums_without(w, l.b, victim, l.back, ways, l.weights))
				return false;
		}
		return true;
	}
};

bool masks_of_a_rank() { return std::make_unique<masked_layers>()->run(); }

} // namespace

int main(int count, char **words)
{
	return run_all(count, words, {{"masks", masks_of_a_rank}}, [](u64) { return 0; });
}
