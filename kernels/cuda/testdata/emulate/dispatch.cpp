// Runs the kernels of MoE dispatch on a processor, in random worlds and random orders of their threads, and checks
// every number.
//
//	emulate SEED ROUNDS
#include "dispatch_threads.h"

#include "dispatch.cu"
#include "results.cu"
#include "token_weights.cu"

#include "fibers.h"

#include "dispatch_worlds.h"

#include <utility>

namespace {

// Layers in a row on one handle, each with its own tokens: dispatch, what experts make of it, combine and gradients;
// some dispatch or combine once more, other rows on the same ways. Nobody waits between them, and what a call has done
// with is overwritten at once.
bool layers_of(std::deque<world> &worlds, u32 count)
{
	struct layer {
		world *of;
		batch b, other;
		bool again, twice, halves, in_place, dropped; // dropped: nobody wants what the experts would make of it
		std::vector<std::vector<float>> weights, gradients;
		memories rows, other_rows, sums, other_sums, grads;
	};
	u32 size = worlds.front().size;
	std::vector<layer> layers(count);
	std::vector<program> programs(size);
	for (layer &l : layers) {
		world &w = worlds.size() == 1 ? worlds.front() : worlds[draw(worlds.size())];
		l.of = &w;
		l.b = random_batch(w), l.other = other_rows(l.b), l.again = draw(2) == 0, l.twice = draw(2) == 0,
		l.halves = draw(2) == 0, l.in_place = draw(2) == 0, l.dropped = draw(4) == 0;
		l.weights.resize(w.size), l.gradients.resize(w.size);
		for (u32 r = 0; r < w.size; r++) {
			program &p = programs[r];
			l.weights[r].assign(l.b.tokens[r] * w.top_k, NAN), l.gradients[r] = l.weights[r];
			auto make = [&](const batch &b) {
				p.push_back(memories::by_caller([&w, &b, r] { make_rows(w, b, r); }));
			};
			add_dispatch(w, l.b, r, false, l.halves, p);
			p.push_back(l.rows.keep(w, r));
			keep_routing(w, r, p);
			if (l.again) {
				add_dispatch(w, l.other, r, true, l.halves, p);
				p.push_back(l.other_rows.keep(w, r));
			}
			if (l.dropped)
				continue;
			make(l.b);
			add_combine(w, l.b, r, l.in_place, l.weights[r], p);
			make(l.other); // the rows are the caller's again
			p.push_back(l.sums.keep(w, r));
			if (l.twice) {
				add_combine(w, l.b, r, l.in_place, l.weights[r], p);
				p.push_back(l.other_sums.keep(w, r));
			}
			make(l.b);
			add_backward(w, l.b, r, l.gradients[r], p);
			p.push_back(l.grads.keep(w, r));
		}
	}
	if (!run(worlds.front(), programs) || !std::all_of(worlds.begin(), worlds.end(), no_faults))
		return false;
	for (const layer &l : layers) {
		world &w = *l.of;
		bool staged = !w.by_token() || w.float8_sums || !l.in_place || w.few;
		auto right = [&](const memories &m, auto check) { return m.restore(w), check(); };
		if (!right(l.rows, [&] { return right_rows(w, l.b); }) ||
		    (l.again && !right(l.other_rows, [&] { return right_rows(w, l.other); })))
			return false;
		if (l.dropped)
			continue;
		if (!right(l.sums, [&] { return right_sums(w, l.b, staged, l.weights); }) ||
		    !right(l.grads, [&] { return right_gradients(w, l.b, l.gradients); }))
			return false;
		if (l.twice && !right(l.other_sums, [&] { return right_sums(w, l.other, staged, l.weights); }))
			return false;
	}
	return true;
}

bool calls()
{
	std::deque<world> worlds;
	worlds.push_back(random_world());
	return layers_of(worlds, 3);
}

// The same on handles of different shapes that have memory for rows in the same place: what a call leaves there the
// next one overwrites, while slow ranks are still in the call before.
bool turns()
{
	std::deque<world> worlds = random_worlds(2 + draw(2));
	return layers_of(worlds, 5);
}

// Calls without tokens, as many as a handle has room for tokens: none is left in the places of few tokens, so none can
// be taken for a later one.
bool forgets()
{
	world w = random_world();
	while (!w.few || w.max_tokens > 12)
		w = random_world();
	std::vector<batch> batches(1 + w.max_tokens);
	std::vector<std::vector<float>> weights(w.size);
	std::vector<program> programs(w.size);
	for (batch &b : batches) {
		b = random_batch(w);
		if (&b != &batches[0])
			b.tokens.assign(w.size, 0);
		for (u32 r = 0; r < w.size; r++) {
			weights[r].resize(w.max_tokens * w.top_k);
			add_dispatch(w, b, r, false, draw(2) == 0, programs[r]);
			keep_routing(w, r, programs[r]);
			programs[r].push_back(memories::by_caller([&w, &b, r] { make_rows(w, b, r); }));
			add_combine(w, b, r, false, weights[r], programs[r]);
		}
	}
	if (!run(w, programs) || !no_faults(w))
		return false;
	for (u32 rank = 0; rank < w.size; rank++)
		for (u64 i = 0; i < 2 * w.staged(); i++) {
			u64 note = w.segment(rank) + w.state.notes + i * w.state.note_stride,
			    packets = w.segment(rank) + w.state.packets + i * w.state.packet_stride;
			for (u64 byte = 16; byte < w.state.note_stride;
			     byte += 4) // the first says in every call whether the token comes
				CHECK("a word of a note", at<u32>(note + byte), 0u);
			for (u64 byte = 0; byte < w.state.packet_stride; byte += 4)
				CHECK("a word of packets", at<u32>(packets + byte), 0u);
		}
	return true;
}

// Few bits of a call's number are in the flags of rows to experts, all of them in those of float8 sums on their way
// back, which lie at the same places after two combines of a routing. They are never taken for rows, whatever the
// numbers are. Their packets lie everywhere where those of such long float8 rows to experts do.
bool flags_come_again()
{
	world w = random_shape(2 + draw(3));
	while (!w.few || !w.float8 || !w.float8_sums || w.max_tokens > 8)
		w = random_shape(2 + draw(3));
	w.hidden = 1536;
	w = alone(std::move(w));
	batch b = random_batch(w), next = random_batch(w);
	std::vector<std::vector<float>> weights(w.size);
	std::vector<program> programs(w.size);
	for (u32 r = 0; r < w.size; r++) {
		weights[r].resize(w.max_tokens * w.top_k);
		at<sw_control>(w.segment(r) + w.state.control).epoch = 131064;
		add_dispatch(w, b, r, false, false, programs[r]);
		keep_routing(w, r, programs[r]);
		programs[r].push_back(memories::by_caller([&w, &b, r] { make_rows(w, b, r); }));
		add_combine(w, b, r, false, weights[r], programs[r]);
		add_combine(w, b, r, false, weights[r], programs[r]);
		add_dispatch(w, next, r, false, false, programs[r]);
	}
	return run(w, programs) && no_faults(w) && right_rows(w, next);
}

// A rank has a choice that is no expert, of 64 bits: all ranks say which, and what it is. The next call works.
bool no_expert()
{
	world w = random_world();
	batch b = random_batch(w), next = random_batch(w);
	u32 who = draw(w.size);
	while (b.tokens[who] == 0)
		b = random_batch(w);
	constexpr i64 wrong[] = {-2, -(1ll << 40), 1ll << 32, (1ll << 40) + 1, INT64_MAX, INT64_MIN};
	u32 at_choice = draw(b.tokens[who] * w.top_k);
	i64 value = draw(3) == 0 ? static_cast<i64>(w.experts) : wrong[draw(6)];
	std::vector<std::vector<i64>> wide;
	std::vector<program> programs(w.size), after(w.size);
	for (u32 r = 0; r < w.size; r++)
		wide.emplace_back(b.choice[r].begin(), b.choice[r].end());
	wide[who][at_choice] = value;
	for (u32 r = 0; r < w.size; r++) {
		w.wide = wide[r].data();
		add_dispatch(w, b, r, false, draw(2) == 0, programs[r]);
		if (w.in_place(r)) // who gets the memory when the call has failed
			programs[r].push_back(
			    {[&w, r] {
				     if (threadIdx.x == 0)
					     memset(reinterpret_cast<void *>(w.segment(r) + w.callers_rows), others,
					            w.most_rows * w.wire());
			     },
			     1, 32, 0, true});
		w.wide = nullptr;
		add_dispatch(w, next, r, false, draw(2) == 0, after[r]);
	}
	if (!run(w, programs))
		return false;
	for (u32 rank = 0; rank < w.size; rank++) {
		sw_fault &f = w.faults[rank];
		CHECK("kind of a fault", f.kind, u32{SW_FAULT_INDEX});
		CHECK("rank of a wrong choice", f.peer, who);
		CHECK("its token", f.sent, u64{at_choice / w.top_k});
		CHECK("its number", f.expected, u64{at_choice % w.top_k});
		CHECK("its value", static_cast<i64>(f.limit), value);
		if (w.told && w.by_token())
			CHECK("ticket of what did not come", at<u64>(w.segment(rank) + w.numbers), u64{0});
		for (u64 i = 0; i < w.room * w.top_k; i++)
			CHECK("index of what did not come", at<i64>(w.segment(rank) + w.taken_indices + 8 * i),
			      i64{-1});
		for (i64 i = 0; w.in_place(rank) && i < w.most_rows * w.wire(); i++)
			CHECK("byte of others", at<u8>(w.segment(rank) + w.callers_rows + i), others);
		f.kind = at<sw_control>(w.segment(rank) + w.state.control).fault = SW_FAULT_NONE; // as the host does
	}
	return run(w, after) && no_faults(w) && right_rows(w, next);
}

// The rows for a rank are more than its output has room for: all ranks say which, and how many. The next call works.
bool too_small()
{
	world w = random_world();
	batch b;
	std::vector<u32> rows, counts, offsets, from;
	do {
		while (w.rows_by != compact)
			w = random_world();
		b = random_batch(w), rows.clear();
		for (u32 r = 0; r < w.size; r++) {
			expected(w, b, r, counts, offsets, from);
			rows.push_back(offsets.back());
		}
	} while (*std::max_element(rows.begin(), rows.end()) == 0);
	u32 full = static_cast<u32>(std::max_element(rows.begin(), rows.end()) - rows.begin());
	batch next = random_batch(w);
	std::vector<program> programs(w.size), after(w.size);
	for (u32 r = 0; r < w.size; r++) {
		i64 most = std::exchange(w.most_rows, rows[full] - 1);
		add_dispatch(w, b, r, false, draw(2) == 0, programs[r]);
		w.most_rows = most;
		add_dispatch(w, next, r, false, draw(2) == 0, after[r]);
	}
	if (!run(w, programs))
		return false;
	for (u32 rank = 0; rank < w.size; rank++) {
		sw_fault &f = w.faults[rank];
		CHECK("kind of a fault", f.kind, u32{SW_FAULT_OVERFLOW});
		CHECK("rank without room", f.peer, full);
		CHECK("its rows", f.sent, u64{rows[full]});
		CHECK("its room", f.limit, u64{rows[full] - 1});
		if (w.told)
			CHECK("ticket of what did not come", at<u64>(w.segment(rank) + w.numbers), u64{0});
		f.kind = at<sw_control>(w.segment(rank) + w.state.control).fault = SW_FAULT_NONE; // as the host does
	}
	return run(w, after) && no_faults(w) && right_rows(w, next);
}

// A rank stays away, or the abort word is set: every wait ends, and says why.
bool end_of_waits(bool aborted)
{
	world w = random_world();
	while (w.size == 1)
		w = random_world();
	w.timeout_ns = aborted ? w.timeout_ns : 300'000;
	batch b = random_batch(w);
	u32 away = draw(w.size);
	std::vector<program> programs(w.size);
	for (u32 r = 0; r < w.size; r++)
		if (r != away)
			add_dispatch(w, b, r, false, draw(2) == 0, programs[r]);
	return run(w, programs, aborted ? abort_in(w) : nullptr) && gave_up(w, away, aborted);
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words,
	               {
			   {"calls", calls},
			   {"deadline", [] { return end_of_waits(false); }},
			   {"abort", [] { return end_of_waits(true); }},
			   {"forgets", forgets},
			   {"turns", turns},
			   {"no expert", no_expert},
			   {"flags", flags_come_again},
			   {"too small", too_small},
		       },
	               [](u64 i) {
			       return i % 56 == 30                   ? 7
		                      : i % 7 < 4                    ? 0
		                      : i % 28 == 13                 ? 5
		                      : i % 28 == 27                 ? 6
		                      : i % 14 == 11 || i % 14 == 12 ? 4
		                                                     : i % 7 - 3;
		       });
}
