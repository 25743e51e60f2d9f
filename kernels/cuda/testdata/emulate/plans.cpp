// Runs plans on a processor, in random worlds and random orders of their threads: calls in a row of several plans, with
// buffers in reach of peers or not, of one memory or two, through slots of any size. An output is what the collective
// says, whatever is written to the rank's buffers once its call has ended.
//
//	emulate SEED ROUNDS
#include "plans_kernels.h"

#include "fibers.h"

namespace {

// A plan under construction: the steps of each rank, and the words that name what they read.
struct book {
	u32 ranks, chunks, scratch = 0;
	u32 input, output;  // blocks
	bool reduces, same; // same: source and destination have the same length
	std::vector<std::vector<sw_plan_step>> steps;
	std::vector<std::vector<u32>> words;
	std::map<std::vector<u32>, u32> signals; // by source, destination and semaphore
	std::map<std::vector<u32>, u32> waits;

	book(u32 n, u32 in, u32 out, bool r, u32 c)
	    : ranks(n), chunks(c), input(in), output(out), reduces(r), same(in == out)
	{
		steps.resize(n), words.resize(n);
	}

	static u32 place(u32 buffer, u32 rank, u32 chunk)
	{
		return buffer << SW_PLAN_PLACE_BUFFER | rank << SW_PLAN_PLACE_RANK | chunk;
	}

	// Which chunk of a block is moved.
	void move(u32 rank, u32 chunk, u32 to, const std::vector<u32> &from)
	{
		sw_plan_step s{};
		s.kind = from.size() > 1 ? SW_PLAN_REDUCE : SW_PLAN_COPY;
		s.to = to, s.first = static_cast<u32>(words[rank].size()), s.rows = static_cast<u32>(from.size()),
		s.chunk = chunk % chunks;
		words[rank].insert(words[rank].end(), from.begin(), from.end());
		steps[rank].push_back(s);
	}
	// A reduction with the elements of all ranks.
	void finish(u32 rank, u32 chunk, u32 to, const std::vector<u32> &from)
	{
		move(rank, chunk, to, from);
		steps[rank].back().last = 1;
	}
	void flag(u32 rank, u32 kind, u32 peer, u32 semaphore)
	{
		sw_plan_step s{};
		s.kind = kind, s.peer = peer, s.semaphore = semaphore;
		bool out = kind == SW_PLAN_SIGNAL;
		s.number = ++(out ? signals : waits)[{out ? rank : peer, out ? peer : rank, semaphore}];
		steps[rank].push_back(s);
	}
	void signal(u32 rank, u32 peer, u32 semaphore = 0) { flag(rank, SW_PLAN_SIGNAL, peer, semaphore); }
	void await(u32 rank, u32 peer, u32 semaphore = 0) { flag(rank, SW_PLAN_WAIT, peer, semaphore); }

	book done()
	{
		for (u32 r = 0; r < ranks; r++)
			for (sw_plan_step &s : steps[r])
				if (s.kind == SW_PLAN_SIGNAL || s.kind == SW_PLAN_WAIT) {
					bool out = s.kind == SW_PLAN_SIGNAL;
					s.total = signals[{out ? r : s.peer, out ? s.peer : r, s.semaphore}];
				}
		return *this;
	}

	u32 inputs() const { return input * chunks; }
	u32 outputs() const { return output * chunks; }
};

constexpr u32 in = SW_PLAN_INPUT, out = SW_PLAN_OUTPUT, extra = SW_PLAN_SCRATCH, most_chunks = 8;

// Every rank puts its input to all others, and combines what came.
book one_shot(u32 n)
{
	book b(n, 1, 1, true, 1 + draw(2));
	b.scratch = n * b.chunks;
	for (u32 r = 0; r < n; r++) {
		for (u32 i = 1; i < n; i++) {
			u32 p = (r + i) % n;
			for (u32 c = 0; c < b.chunks; c++)
				b.move(r, c, book::place(extra, p, r * b.chunks + c), {book::place(in, r, c)});
			b.signal(r, p);
		}
		for (u32 i = 1; i < n; i++)
			b.await(r, (r + i) % n);
		for (u32 c = 0; c < b.chunks; c++) {
			std::vector<u32> from;
			for (u32 p = 0; p < n; p++)
				from.push_back(p == r ? book::place(in, r, c)
				                      : book::place(extra, r, p * b.chunks + c));
			b.finish(r, c, book::place(out, r, c), from);
		}
	}
	return b.done();
}

// Partial results go around, and then results, which land in outputs.
book ring(u32 n)
{
	book b(n, 1, 1, true, n);
	b.scratch = n - 1;
	for (u32 r = 0; r < n; r++) {
		u32 next = (r + 1) % n, last = (r + n - 1) % n;
		auto chunk = [&](u32 back) { return (r + 2 * n - back) % n; };
		for (u32 s = 0; s + 1 < n; s++) {
			b.move(r, chunk(s), book::place(extra, next, s), {book::place(s == 0 ? in : out, r, chunk(s))});
			b.signal(r, next), b.await(r, last);
			auto from = {book::place(extra, r, s), book::place(in, r, chunk(s + 1))};
			s + 2 == n ? b.finish(r, chunk(s + 1), book::place(out, r, chunk(s + 1)), from)
				   : b.move(r, chunk(s + 1), book::place(out, r, chunk(s + 1)), from);
		}
		for (u32 s = 0; s + 1 < n; s++) {
			u32 c = chunk(s + n - 1);
			b.move(r, c, book::place(out, next, c), {book::place(out, r, c)});
			b.signal(r, next), b.await(r, last);
		}
	}
	return b.done();
}

// Every rank reads its slice at all others.
book reading(u32 n)
{
	book b(n, n, 1, true, 1 + draw(2));
	for (u32 r = 0; r < n; r++) {
		for (u32 c = 0; c < b.chunks; c++) {
			std::vector<u32> from;
			for (u32 p = 0; p < n; p++)
				from.push_back(book::place(in, p, r * b.chunks + c));
			b.finish(r, c, book::place(out, r, c), from);
		}
		for (u32 i = 1; i < n; i++)
			b.signal(r, (r + i) % n, 2);
		for (u32 i = 1; i < n; i++)
			b.await(r, (r + i) % n, 2);
	}
	return b.done();
}

// Slices go around.
book gather(u32 n)
{
	book b(n, 1, n, false, 1 + draw(2));
	for (u32 r = 0; r < n; r++) {
		for (u32 c = 0; c < b.chunks; c++)
			b.move(r, c, book::place(out, r, r * b.chunks + c), {book::place(in, r, c)});
		for (u32 s = 0; s + 1 < n; s++) {
			u32 slice = (r + n - s) % n;
			for (u32 c = slice * b.chunks; c < (slice + 1) * b.chunks; c++)
				b.move(r, c, book::place(out, (r + 1) % n, c), {book::place(out, r, c)});
			b.signal(r, (r + 1) % n), b.await(r, (r + n - 1) % n);
		}
	}
	return b.done();
}

// Every rank puts each slice to its rank.
book to_all(u32 n)
{
	book b(n, n, n, false, 1);
	for (u32 r = 0; r < n; r++) {
		for (u32 i = 1; i < n; i++) {
			u32 p = (r + i) % n;
			b.move(r, 0, book::place(out, p, r), {book::place(in, r, p)});
			b.signal(r, p, 1);
		}
		b.move(r, 0, book::place(out, r, r), {book::place(in, r, r)});
		for (u32 i = 1; i < n; i++)
			b.await(r, (r + i) % n, 1);
	}
	return b.done();
}

constexpr u32 semaphores = 4; // the last is for parts

// The buffers of a rank in a call. Each call has its own.
struct part {
	u64 src, dst; // in its segment
	bool src_far, dst_far;
};

struct job {
	const book *b;
	u32 index; // of the book
	u32 type, op, blocks;
	i64 elements; // of a block
	std::vector<part> ranks;

	u32 size() const { return type == SW_TYPE_UINT8 ? 1 : 4; }
	i64 bytes(u32 of) const { return of * elements * size(); }
	bool in_place(u32 r) const
	{
		const part &k = ranks[r];
		return k.src < k.dst + static_cast<u64>(bytes(b->output)) &&
		       k.dst < k.src + static_cast<u64>(bytes(b->input));
	}
};

struct world : segments {
	u32 lines;
	i64 slot_bytes;
	std::vector<book> books;
	std::vector<job> jobs;
	std::vector<std::vector<u64>> programs; // by book and rank: where it lies
	sw_reduce_block reduce;
	sw_plan_block block;
	u64 next;

	explicit world(u32 ranks) : lines(1 + draw(3)), slot_bytes(SW_PLAN_GRAIN * lines * (1 + draw(3)) + 16 * draw(2))
	{
		books = {one_shot(ranks), ring(ranks), reading(ranks), gather(ranks), to_all(ranks)};
		reduce = sw_lay_reduce_block(65536, ranks, lines, 2, SW_TILE_BYTES, 100);
		u64 most = 0;
		for (const book &b : books) {
			programs.emplace_back(ranks, most);
			u64 bytes = 0;
			for (u32 r = 0; r < ranks; r++)
				bytes = max(bytes, b.steps[r].size() * sizeof(sw_plan_step) + 4 * b.words[r].size());
			most += (bytes + 7) / 8 * 8;
		}
		block = sw_lay_plan_block(reduce.end, ranks, semaphores, lines, most, ranks * 2, ranks * 2,
		                          ranks * most_chunks, slot_bytes);
		next = (block.end + 4095) / 4096 * 4096;
	}

	// Gives the ranks their memory, once the calls have buffers.
	void begin()
	{
		take(static_cast<u32>(books[0].ranks), (next + 4095) / 4096 * 4096);
		for (u32 r = 0; r < size; r++) {
			u8 *slots = reinterpret_cast<u8 *>(segment(r) + block.inputs);
			std::fill(slots, slots + (block.end - block.inputs), 0x5A);
			for (size_t i = 0; i < books.size(); i++) {
				const auto &steps = books[i].steps[r];
				u64 to = segment(r) + block.programs + programs[i][r];
				memcpy(reinterpret_cast<void *>(to), steps.data(), steps.size() * sizeof(steps[0]));
				memcpy(reinterpret_cast<void *>(to + steps.size() * sizeof(steps[0])),
				       books[i].words[r].data(), 4 * books[i].words[r].size());
			}
		}
	}
};

// Element i of what a rank brings to a call. Floats are small whole numbers that any number of ranks divides.
u32 value(u64 number, const job &j, u32 rank, i64 i)
{
	u32 z = static_cast<u32>(
	    ((number * 1000003 + rank * 131 + 1) * 0x9e3779b97f4a7c15 + static_cast<u64>(i) * 0xbf58476d1ce4e5b9) >>
	    32);
	z = z * 0x85ebca6b ^ z >> 13;
	if (j.type == SW_TYPE_FLOAT32)
		return __float_as_uint(static_cast<float>(z % 1000 * 60));
	return j.type == SW_TYPE_UINT8 ? z & 0xff : z & 0x7fffffff;
}

u32 combined(const job &j, u32 a, u32 b)
{
	if (j.type == SW_TYPE_FLOAT32)
		return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
	return j.op == SW_OP_MIN ? min(a, b) : j.op == SW_OP_MAX ? max(a, b) : j.op == SW_OP_SUM ? a + b : a * b;
}

// Element i of a rank's output.
u32 outcome(u64 number, const job &j, u32 rank, i64 i)
{
	const book &b = *j.b;
	i64 block = i / max(j.elements, static_cast<i64>(1)), in_block = i - block * j.elements;
	if (!b.reduces)
		return value(number, j, static_cast<u32>(block),
		             b.input == 1 ? in_block : rank * j.elements + in_block);
	i64 of = b.input == 1 ? i : rank * j.elements + i;
	u32 v = value(number, j, 0, of);
	for (u32 p = 1; p < b.ranks; p++)
		v = combined(j, v, value(number, j, p, of));
	if (j.op == SW_OP_AVG)
		v = __float_as_uint(__uint_as_float(v) / static_cast<float>(b.ranks));
	return v;
}

void put(u64 at, u32 size, i64 i, u32 v) { memcpy(reinterpret_cast<void *>(at + i * size), &v, size); }

void add_job(world &w)
{
	job j;
	j.index = draw(static_cast<u32>(w.books.size()));
	j.b = &w.books[j.index];
	const book &b = *j.b;
	constexpr u32 types[] = {SW_TYPE_UINT8, SW_TYPE_INT32, SW_TYPE_FLOAT32},
		      ops[] = {SW_OP_SUM, SW_OP_MIN, SW_OP_MAX, SW_OP_PROD};
	j.type = types[draw(3)];
	j.op = b.reduces ? ops[draw(4)] : SW_OP_SUM;
	if (j.type == SW_TYPE_FLOAT32)
		j.op = b.reduces && draw(2) != 0 ? SW_OP_AVG : SW_OP_SUM;
	j.blocks = 1 + draw(w.lines);
	j.elements = draw(8) == 0 ? draw(3) : draw(3) == 0 ? 32 * draw(60) : draw(2400 / j.size());
	u64 longest = static_cast<u64>(max(j.bytes(b.input), j.bytes(b.output)));
	for (u32 r = 0; r < b.ranks; r++) {
		part k{w.next + 256 + j.size() * draw(16), 0, draw(2) != 0, draw(2) != 0};
		k.dst = w.next + 512 + longest + (draw(2) != 0 ? 16 * draw(3) : j.size() * draw(16));
		if (draw(3) == 0) { // of one memory
			k.dst = k.src;
			if (!b.same)
				(b.input < b.output ? k.src : k.dst) += r * j.bytes(1);
		}
		j.ranks.push_back(k);
	}
	w.next += 2 * longest + 2048;
	w.jobs.push_back(j);
}

void fill(world &w)
{
	for (size_t n = 0; n < w.jobs.size(); n++)
		for (u32 r = 0; r < w.size; r++) {
			const job &j = w.jobs[n];
			for (i64 i = 0; i < j.b->input * j.elements; i++)
				put(w.segment(r) + j.ranks[r].src, j.size(), i, value(n + 1, j, r, i));
		}
}

sw_plan_args arguments(const world &w, const job &j, u32 rank, u64 timeout_ns)
{
	const book &b = *j.b;
	const part &k = j.ranks[rank];
	sw_plan_args a{};
	a.reduce.world = w.seen_by(rank, w.reduce.control, timeout_ns);
	a.reduce.src = w.segment(rank) + k.src, a.reduce.dst = w.segment(rank) + k.dst;
	a.reduce.src_place = k.src_far ? SW_NOWHERE : k.src;
	a.reduce.dst_place = k.dst_far || j.in_place(rank) ? SW_NOWHERE : k.dst;
	a.reduce.block = w.reduce, a.reduce.lines = w.lines;
	u32 collective = !b.reduces ? SW_ALL_GATHER : b.same ? SW_REDUCE_SCATTER | SW_ALL_GATHER : SW_REDUCE_SCATTER;
	a.reduce.call = j.op | j.type << 8 | collective << 16 | static_cast<u32>(SW_REDUCE_PLANNED) << 24;
	a.reduce.count = static_cast<u64>(j.elements);
	a.block = w.block, a.program = w.block.programs + w.programs[j.index][rank];
	a.slot_bytes = w.slot_bytes, a.block_bytes = j.bytes(1), a.each = j.elements / b.chunks;
	a.steps = static_cast<u32>(b.steps[rank].size()), a.semaphores = semaphores, a.chunks = b.chunks;
	a.longer = static_cast<u32>(j.elements % b.chunks), a.inputs = b.inputs(), a.outputs = b.outputs();
	a.scratch = b.scratch, a.size = j.size();
	return a;
}

std::vector<emu::block *> start(const job &j, u32 rank, const sw_plan_args &a)
{
	std::vector<emu::block *> blocks;
	for (u32 i = 0; i < j.blocks; i++)
		blocks.push_back(launch(rank, i, j.blocks, SW_PLAN_THREADS, 0, [a] { plans(a); }));
	return blocks;
}

// A rank has ended a call: its output is there, its input as it was, and others are through with both.
bool right(const world &w, u64 number, u32 r)
{
	const job &j = w.jobs[number - 1];
	const part &k = j.ranks[r];
	i64 n = j.b->output * j.elements;
	for (i64 i = 0; i < n; i++) {
		u32 got = 0;
		memcpy(&got, reinterpret_cast<const void *>(w.segment(r) + k.dst + i * j.size()), j.size());
		u32 want = outcome(number, j, r, i) & (j.size() == 1 ? 0xff : ~0u);
		if (got != want) {
			printf(
			    "plan %u, rank %u of %u, call %llu: element %lld of %lld is %#x instead of %#x; type %u, op %u, %u blocks, in %s, out %s%s\n",
			    j.index, r, w.size, static_cast<unsigned long long>(number), static_cast<long long>(i),
			    static_cast<long long>(n), got, want, j.type, j.op, j.blocks, k.src_far ? "slots" : "place",
			    k.dst_far ? "slots" : "place", j.in_place(r) ? ", of one memory" : "");
			return false;
		}
	}
	for (i64 i = 0; i < j.b->input * j.elements && !j.in_place(r); i++) {
		u32 got = 0, want = value(number, j, r, i) & (j.size() == 1 ? 0xff : ~0u);
		memcpy(&got, reinterpret_cast<const void *>(w.segment(r) + k.src + i * j.size()), j.size());
		if (got != want)
			return wrong(r, number, static_cast<u64>(i), r);
	}
	memset(reinterpret_cast<void *>(w.segment(r) + k.src), 0xA7, j.bytes(j.b->input));
	memset(reinterpret_cast<void *>(w.segment(r) + k.dst), 0xA7, n * j.size());
	return true;
}

// Calls in a row: a rank may be a call ahead of another.
bool calls()
{
	world w(2 + draw(3));
	for (u32 n = 1 + draw(4); n > 0; n--)
		add_job(w);
	w.begin();
	fill(w);
	trouble t(w.size, draw(8) == 0);
	return make_calls(
	    w, t, w.jobs.size(),
	    [&](u32 r, u64 number) {
		    const job &j = w.jobs[number - 1];
		    return start(j, r, arguments(w, j, r, t.timeout_ns));
	    },
	    [&](u32 r, u64 number) { return w.fault(r) != SW_FAULT_NONE || right(w, number, r); });
}

// All ranks come, and are told to give up at any time: a rank has given up, or its output is there.
bool interrupted()
{
	world w(2 + draw(3));
	add_job(w);
	w.begin();
	fill(w);
	std::vector<std::vector<emu::block *>> blocks(w.size);
	for (u32 r = 0; r < w.size; r++)
		blocks[r] = start(w.jobs[0], r, arguments(w, w.jobs[0], r, u64{1} << 50));
	auto go_on = [&](u32 r) {
		if (blocks[r].empty())
			return at_work::no;
		if (!ended(blocks[r]))
			return at_work::yes;
		return w.fault(r) == SW_FAULT_ABORTED || (w.fault(r) == SW_FAULT_NONE && right(w, 1, r))
		           ? at_work::no
		           : at_work::stop;
	};
	return run_ranks(w.size, go_on, [](u32 rank) { return 1 + 2 * rank; }, abort_in(w));
}

// A rank calls something else: all hear of it before an output is written, nobody hangs, and the next call works.
bool disagreement()
{
	world w(2 + draw(3));
	add_job(w), add_job(w);
	w.begin();
	fill(w);
	u32 odd = draw(w.size), how = draw(w.lines == 1 ? 2 : 3);
	std::vector<std::vector<u8>> before(w.size);
	auto bytes = [&](u32 r) {
		const u8 *p = reinterpret_cast<const u8 *>(w.segment(r) + w.jobs[0].ranks[r].dst);
		return std::vector<u8>(p, p + w.jobs[0].bytes(w.jobs[0].b->output));
	};
	for (u32 r = 0; r < w.size; r++)
		before[r] = bytes(r);
	for (u32 number = 1; number <= 2; number++) {
		std::vector<std::vector<emu::block *>> blocks(w.size);
		for (u32 r = 0; r < w.size; r++) {
			job j = w.jobs[number - 1];
			sw_plan_args a = arguments(w, j, r, 200'000'000);
			if (number == 1 && r == odd) {
				a.reduce.count += how == 0 ? 1 : 0;
				a.reduce.call ^= how == 1 ? static_cast<u32>(SW_REDUCE_PLANNED) << 24 : 0;
				if (how == 2)
					j.blocks = j.blocks % w.lines + 1;
			}
			blocks[r] = start(j, r, a);
		}
		bool fine = run_ranks(
		    w.size, [&](u32 r) { return blocks[r].empty() || ended(blocks[r]) ? at_work::no : at_work::yes; },
		    [](u32 rank) { return 1 + rank; }, nullptr);
		for (u32 r = 0; fine && r < w.size; r++) {
			if (number == 2) {
				fine = w.fault(r) == SW_FAULT_NONE && right(w, 2, r);
				continue;
			}
			if (w.fault(r) != SW_FAULT_MISMATCH || bytes(r) != before[r]) {
				printf("rank %u of %u, of which rank %u differs: fault %u, output %s\n", r, w.size, odd,
				       w.fault(r), bytes(r) != before[r] ? "written" : "as before");
				return false;
			}
			w.faults[r] = {};
			at<sw_control>(w.segment(r) + w.reduce.control).fault = SW_FAULT_NONE;
		}
		if (!fine)
			return false;
	}
	return true;
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words, {{"calls", calls}, {"disagreement", disagreement}, {"interrupted", interrupted}},
	               [](u64 i) { return i % 8 < 6 ? 0 : i % 8 - 5; });
}
