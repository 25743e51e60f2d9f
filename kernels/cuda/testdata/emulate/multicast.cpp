// Runs the reductions by multicast on a processor, between reductions of the other kernels, in random worlds and random
// orders of threads, and checks every byte.
//
//	emulate SEED ROUNDS
#include "allreduce_kernels.h"

#define SW_MULTICAST_THREADS 224
#include "multicast.cu"

#include "fibers.h"

#define main emulate_allreduce
#include "allreduce.cpp"
#undef main

namespace {

constexpr u64 nowhere_near = u64{1} << 45; // nothing is mapped there
const world *multicast_ranks;

std::vector<u64> reached(u64 p)
{
	const world &w = *multicast_ranks;
	if (p < nowhere_near || p + 16 > nowhere_near + w.stride) {
		printf("multimem at %#llx, outside the segments\n", static_cast<unsigned long long>(p));
		exit(1);
	}
	std::vector<u64> all;
	for (u32 r = 0; r < w.size; r++)
		all.push_back(w.segment(r) + (p - nowhere_near));
	return all;
}

constexpr u32 any_multicast = SW_REDUCE_WARPS | SW_REDUCE_BLOCKS; // both: by packets

bool by_multicast(const call &c) { return (c.flags & any_multicast) != 0; }

void start_any(const world &w, u32 rank, const job &j, std::vector<emu::block *> &blocks)
{
	if (!by_multicast(j.c)) {
		start(w, rank, j, blocks);
		return;
	}
	auto m = std::make_shared<sw_multicast_args>(
	    sw_multicast_args{arguments(w, j.c, j.ranks[rank], rank), nowhere_near});
	auto kernel = j.c.packets                          ? allreduce_multicast_packets
	              : (j.c.flags & SW_REDUCE_WARPS) != 0 ? allreduce_multicast_warps
	                                                   : allreduce_multicast_blocks;
	for (u32 i = 0; i < j.c.blocks; i++)
		blocks.push_back(launch(rank, i, j.c.blocks, SW_MULTICAST_THREADS, 0, [m, kernel] { kernel(*m); }));
}

// Runs the ranks' calls, each at its own pace; done is called when a rank has ended one.
bool run_calls(world &w, std::vector<stream> &streams, const std::function<bool(u32, size_t)> &done = {},
               const std::function<void(u64)> &each_sweep = {})
{
	multicast_ranks = &w;
	emu::multicast = reached;
	std::vector<bool> running(w.size);
	auto go_on = [&](u32 r) {
		stream &s = streams[r];
		if (ended(s.blocks)) {
			if (running[r] && done && !done(r, s.next - 1))
				return at_work::stop;
			running[r] = s.next < s.jobs.size();
			if (running[r])
				start_any(w, r, *s.jobs[s.next++], s.blocks);
		}
		return s.blocks.empty() ? at_work::no : at_work::yes;
	};
	return run_ranks(w.size, go_on, [&](u32 rank) { return streams[rank].pace; }, each_sweep);
}

world multicast_world()
{
	u32 size = 2 + draw(draw(8) == 0 ? 6 : 3);
	return world(size, 3 + draw(4), 2 + draw(2), SW_TILE_BYTES * (1 + draw(2)), draw(2) == 0 ? 3000 : 20000,
	             1 << 19);
}

// A call that multicast can do. Slices have one length, or each its own; an all-gather of one slice is a broadcast.
// Buffers are at the same place on all ranks, or not; aligned, or not; slices are whole vectors, or not.
job multicast_job(const world &w)
{
	static const u32 types[] = {SW_TYPE_FLOAT32, SW_TYPE_FLOAT16, SW_TYPE_BFLOAT16,
	                            SW_TYPE_FLOAT64, SW_TYPE_INT32,   SW_TYPE_INT64};
	job j;
	call &c = j.c;
	c.collective = 1 + draw(3);
	c.packets = c.gathers() && draw(3) == 0;
	c.type = c.reduces() && !c.packets ? types[draw(6)] : draw(9);
	bool own = c.type == SW_TYPE_FLOAT32 || c.type == SW_TYPE_FLOAT64, integers = c.type <= SW_TYPE_INT64;
	c.op = SW_OP_SUM;
	if (c.reduces() && (c.packets || own) && draw(3) == 0)
		c.op = c.packets ? draw(5) : SW_OP_AVG;
	if (integers && c.op == SW_OP_AVG)
		c.op = SW_OP_MAX;
	c.flags = c.packets ? any_multicast | (c.reduces() ? SW_REDUCE_ONE_SHOT : 0)
	          : draw(2) ? SW_REDUCE_WARPS
	                    : SW_REDUCE_BLOCKS;
	c.interval = 0;
	c.blocks = 3 + draw(w.lines - 2);
	u32 es = element_bytes[c.type];
	bool whole = draw(2) != 0;
	u32 kind = draw(4), only = draw(w.size);
	i64 room = !c.packets    ? 90000 / (kind == 2 ? 1 : w.size)
	           : c.reduces() ? static_cast<i64>(w.block.packet_stride / 2) / w.size
	                         : static_cast<i64>(w.block.packet_stride / 2);
	i64 most = draw(5) == 0 ? 40 : room / es, equal = draw(static_cast<u32>(most + 1));
	c.bounds.assign(1, 0);
	for (u32 p = 0; p < w.size; p++) {
		i64 n = kind == 0 ? draw(static_cast<u32>(most + 1)) : kind == 2 && p != only ? 0 : equal;
		if (whole)
			n = n / (16 / es) * (16 / es);
		c.bounds.push_back(c.bounds.back() + n * es);
	}
	j.ranks.resize(w.size);
	u32 in_shift = draw(3) == 0 ? es * draw(16) : 0, out_shift = draw(3) == 0 ? es * draw(16) : 0;
	bool in_same = draw(3) != 0, out_same = draw(3) != 0, in_place = draw(4) == 0, far = draw(3) == 0;
	for (u32 r = 0; r < w.size; r++) {
		part &k = j.ranks[r];
		k.src_far = far && draw(2), k.dst_far = far && draw(2);
		k.src = w.heap + 256 + in_shift + (in_same ? 0 : 16 * draw(8));
		k.dst = (w.heap + 1024 + c.bytes()) / 256 * 256 + out_shift + (out_same ? 0 : 16 * draw(8));
		if (in_place)
			c.collective == SW_ALL_GATHER       ? k.src = k.dst + c.bounds[r]
			: c.collective == SW_REDUCE_SCATTER ? k.dst = k.src + c.bounds[r]
							    : k.dst = k.src;
		if (max(k.src, k.dst) + c.bytes() + 64 > w.stride) {
			printf("the world is too small\n");
			exit(1);
		}
	}
	return j;
}

// Whether a rank's output lies in its input, or the other way round.
bool in_place(const job &j, u32 r)
{
	const part &k = j.ranks[r];
	return k.src < k.dst + j.c.dst_bytes(r) && k.dst < k.src + j.c.src_bytes(r);
}

// Parts the buffers of a rank, so that a call can be made again from the same input.
void part_buffers(job &j, u32 r)
{
	part &k = j.ranks[r];
	if (in_place(j, r))
		k.dst = k.src + (j.c.bytes() + 511) / 256 * 256;
}

// A call in any way that there is with multicast: packets that gather are those of multicast.
job any_job(const world &w)
{
	if (draw(3) != 0)
		return multicast_job(w);
	for (;;)
		if (job j = random_job(w); !j.c.packets || !j.c.gathers())
			return j;
}

std::vector<stream> streams_of(const world &w, const job *j, u32 times)
{
	std::vector<stream> streams(w.size);
	for (stream &s : streams) {
		s.jobs.assign(times, j);
		s.pace = draw(2) ? 1 : 1 + draw(8);
	}
	return streams;
}

// Several calls, by multicast and not, in the same control block.
bool mixed()
{
	world w = multicast_world();
	for (u32 n = 1 + draw(3), i = 1; i <= n; i++) {
		job j = any_job(w);
		fill(w, j, i);
		std::vector<stream> streams = streams_of(w, &j, 1);
		std::vector<u8> whole = outcome(w, j);
		if (!run_calls(w, streams, [&](u32 r, size_t) { return no_faults(w) && right(w, j, whole, r); }))
			return false;
	}
	return true;
}

// The same call many times: a rank may be a call ahead of another. A rank that has ended one clears its output, which
// the next one writes, and changes its input, which no other rank may still read.
bool multicast_in_a_row()
{
	world w = multicast_world();
	job j = multicast_job(w);
	for (u32 r = 0; r < w.size; r++)
		part_buffers(j, r);
	fill(w, j, 1);
	std::vector<stream> streams = streams_of(w, &j, 2 + draw(4));
	std::vector<u8> whole = outcome(w, j);
	return run_calls(w, streams, [&](u32 r, size_t) {
		if (!no_faults(w) || !right(w, j, whole, r))
			return false;
		memset(reinterpret_cast<void *>(w.segment(r) + j.ranks[r].dst), poison, j.c.dst_bytes(r));
		memcpy(reinterpret_cast<void *>(w.segment(r) + j.ranks[r].src), j.inputs[r].data(), j.inputs[r].size());
		return true;
	});
}

// A rank calls something else, in length, operator or kernel: all hear of it, nothing is written, and the next call
// works.
bool multicast_disagreement()
{
	world w = multicast_world();
	job j = multicast_job(w), other = j;
	for (job *x : {&j, &other})
		for (part &k : x->ranks)
			k.timeout_ns = 200'000'000;
	u32 odd = draw(w.size), es = element_bytes[j.c.type];
	switch (draw(3)) {
	case 0:
		other.c.flags = j.c.flags == SW_REDUCE_WARPS ? SW_REDUCE_BLOCKS : SW_REDUCE_WARPS;
		other.c.packets = false;
		break;
	case 1:
		other.c.flags = 0, other.c.packets = false;
		other.ranks[odd].wrong = 2; // of the operator
		break;
	default:
		if (j.c.bytes() == 0)
			other.ranks[odd].wrong = 2;
		else
			other.ranks[odd].short_by = min(j.c.bytes() - j.c.bounds[w.size - 1], static_cast<i64>(es));
		if (other.ranks[odd].short_by == 0)
			other.ranks[odd].wrong = 2;
	}
	fill(w, j, 1);
	std::vector<stream> streams = streams_of(w, &j, 1);
	streams[odd].jobs = {&other};
	if (!run_calls(w, streams))
		return false;
	for (u32 r = 0; r < w.size; r++) {
		if (w.fault(r) != SW_FAULT_MISMATCH) {
			printf("rank %u has fault %u with rank %u\n", r, w.fault(r), w.faults[r].peer);
			return false;
		}
		w.faults[r] = {};
		at<sw_control>(w.segment(r) + w.block.control).fault = SW_FAULT_NONE;
		const u8 *out = reinterpret_cast<const u8 *>(w.segment(r) + j.ranks[r].dst);
		for (i64 i = 0; i < j.c.dst_bytes(r) && !in_place(j, r); i++)
			if (out[i] != poison) {
				printf("rank %u has an output\n", r);
				return false;
			}
	}
	job good = any_job(w);
	fill(w, good, 2);
	streams = streams_of(w, &good, 1);
	std::vector<u8> whole = outcome(w, good);
	return run_calls(w, streams, [&](u32 r, size_t) { return no_faults(w) && right(w, good, whole, r); });
}

// A reducer of a heap that has two, and its calls: always the same one, as a graph that is replayed has it.
struct reducer_of_two {
	world w; // its own control block
	job j;
	std::vector<u8> whole;
	std::vector<u32> calls; // that each rank has launched

	u64 at(u32 rank, u64 place) const { return w.segment(rank) + place; }

	// Its buffers in the heap lie behind those of the other.
	void bring(u64 behind, u64 number)
	{
		const call &c = j.c;
		u32 es = element_bytes[c.type];
		j.inputs.assign(w.size, {});
		calls.assign(w.size, 0);
		for (u32 r = 0; r < w.size; r++) {
			part &k = j.ranks[r];
			part_buffers(j, r);
			k.src += behind, k.dst += behind;
			j.inputs[r].resize(c.src_bytes(r));
			for (i64 i = 0; i * es < c.src_bytes(r); i++)
				value(number, c.type, r, i, &j.inputs[r][i * es]);
			renew(r);
		}
		whole = outcome(w, j);
	}

	// As it is before a call.
	void renew(u32 r) const
	{
		const part &k = j.ranks[r];
		memset(reinterpret_cast<void *>(at(r, k.dst)), poison, j.c.dst_bytes(r));
		memcpy(reinterpret_cast<void *>(at(r, k.src)), j.inputs[r].data(), j.inputs[r].size());
	}

	bool left_right(u32 r) const
	{
		if (!no_faults(w))
			return false;
		const u8 *want = whole.data() + (j.c.gathers() ? 0 : j.c.bounds[r]);
		if (memcmp(reinterpret_cast<void *>(at(r, j.ranks[r].dst)), want, j.c.dst_bytes(r)) == 0)
			return true;
		printf("rank %u has another output in call %u of one of two reducers\n", r, calls[r]);
		return false;
	}
};

// Two reducers on one heap, with calls in turn on one stream, or each on a stream of its own, at the same time and in
// different orders on the ranks. They share the segments and the multicast addresses, and nothing else.
bool two_reducers()
{
	world first = multicast_world();
	u64 room = first.stride - first.heap, control = (first.block.end + 4095) / 4096 * 4096;
	world w(first.size, first.lines, first.slots, first.chunk_bytes, first.packet_bytes, control + 2 * room);
	reducer_of_two two[2] = {{w, {}, {}, {}}, {w, {}, {}, {}}};
	for (reducer_of_two &x : two)
		x.w.memory.clear(), x.j = multicast_job(first); // whose heap begins where w's begins
	two[1].w.block = sw_lay_reduce_block(w.heap, w.size, w.lines, w.slots, w.chunk_bytes, w.packet_bytes);
	two[0].bring(control, 1), two[1].bring(control + room, 2);

	multicast_ranks = &w;
	emu::multicast = reached;
	bool in_turn = draw(2) != 0;
	u32 most = 2 + draw(3);
	std::vector<u32> turns; // of the stream, the same on all ranks
	for (u32 i = 0; i < 2 * most; i++)
		turns.push_back(draw(3) == 0 ? draw(2) : i % 2);
	std::vector<size_t> turn(w.size);
	std::vector<std::vector<emu::block *>> blocks[2];
	blocks[0].resize(w.size), blocks[1].resize(w.size);
	auto go_on = [&](u32 r) {
		for (u32 k = 0; k < 2; k++)
			if (!blocks[k][r].empty() && ended(blocks[k][r])) {
				if (!two[k].left_right(r))
					return at_work::stop;
				two[k].renew(r);
			}
		for (u32 k = 0; k < 2; k++) {
			bool next = in_turn ? blocks[0][r].empty() && blocks[1][r].empty() && turn[r] < turns.size() &&
			                          turns[turn[r]] == k
			                    : blocks[k][r].empty() && two[k].calls[r] < most && draw(8) == 0;
			if (next) {
				turn[r]++, two[k].calls[r]++;
				start_any(two[k].w, r, two[k].j, blocks[k][r]);
			}
		}
		bool through = in_turn ? turn[r] == turns.size() : two[0].calls[r] == most && two[1].calls[r] == most;
		return through && blocks[0][r].empty() && blocks[1][r].empty() ? at_work::no : at_work::yes;
	};
	return run_ranks(w.size, go_on, [](u32 rank) { return 1 + rank % 2; }, {});
}

bool multicast_end_of_waits(bool aborted)
{
	world w = multicast_world();
	job j = multicast_job(w);
	for (part &k : j.ranks)
		k.timeout_ns = aborted ? u64{1} << 50 : 300'000;
	fill(w, j, 1);
	std::vector<stream> streams = streams_of(w, &j, 1);
	u32 away = draw(w.size);
	streams[away].jobs.clear();
	return run_calls(w, streams, {}, aborted ? abort_in(w) : nullptr) && gave_up(w, away, aborted);
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words,
	               {
			   {"mixed", mixed},
			   {"in a row", multicast_in_a_row},
			   {"disagreement", multicast_disagreement},
			   {"deadline", [] { return multicast_end_of_waits(false); }},
			   {"abort", [] { return multicast_end_of_waits(true); }},
			   {"two reducers", two_reducers},
		       },
	               [](u64 i) { return i % 9 < 3   ? 0
		                          : i % 9 < 5 ? 1
		                                      : i % 9 - 3; });
}
