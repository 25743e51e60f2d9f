// Runs the reductions' own source on a processor, in random worlds and random orders of its threads, and checks every
// byte.
//
//	emulate SEED ROUNDS
#include "allreduce_kernels.h"

#include "fibers.h"

#include <string>

namespace {

constexpr u32 element_bytes[] = {1, 4, 8, 2, 2, 4, 8, 1, 1}; // by data type

struct world : segments {
	u32 lines, slots, chunk_bytes;
	i64 packet_bytes;
	sw_reduce_block block;

	world(u32 size, u32 lines, u32 slots, u32 chunk_bytes, i64 packet_bytes, u64 room)
	    : lines(lines), slots(slots), chunk_bytes(chunk_bytes), packet_bytes(packet_bytes),
	      block(sw_lay_reduce_block(65536, size, lines, slots, chunk_bytes, packet_bytes))
	{
		heap = (block.end + 4095) / 4096 * 4096;
		take(size, heap + room);
	}
};

// A call, as all ranks make it.
struct call {
	u32 collective, type, op, flags, blocks, interval;
	bool packets;
	std::vector<i64> bounds; // in bytes

	i64 bytes() const { return bounds.back(); }
	bool reduces() const { return (collective & SW_REDUCE_SCATTER) != 0; }
	bool gathers() const { return (collective & SW_ALL_GATHER) != 0; }
	bool one_shot() const { return (flags & SW_REDUCE_ONE_SHOT) != 0; }
	i64 src_bytes(u32 r) const { return reduces() ? bytes() : bounds[r + 1] - bounds[r]; }
	i64 dst_bytes(u32 r) const { return gathers() ? bytes() : bounds[r + 1] - bounds[r]; }
};

// The part of a call that is one rank's own: where its buffers are, and whether peers can reach them.
struct part {
	u64 src = 0, dst = 0;                  // in its segment
	bool src_far = false, dst_far = false; // only through staging
	u64 timeout_ns = u64{1} << 50;
	i64 short_by = 0; // bytes that its last slice is too short
	u32 wrong = 0;    // bits of the call that differ
};

sw_reduce_args arguments(const world &w, const call &c, const part &k, u32 rank)
{
	sw_reduce_args a{};
	a.world = w.seen_by(rank, w.block.control, k.timeout_ns);
	a.src = w.segment(rank) + k.src, a.dst = w.segment(rank) + k.dst;
	a.src_place = k.src_far ? SW_NOWHERE : k.src, a.dst_place = k.dst_far ? SW_NOWHERE : k.dst;
	a.block = w.block;
	a.count =
	    static_cast<u64>(c.bytes()) / element_bytes[c.type] - static_cast<u64>(k.short_by) / element_bytes[c.type];
	a.call = (c.op | c.type << 8 | c.collective << 16 | c.flags << 24) ^ k.wrong;
	a.lines = w.lines, a.slots = w.slots, a.chunk_bytes = w.chunk_bytes, a.packet_bytes = w.packet_bytes,
	a.interval = c.interval;
	std::copy(c.bounds.begin(), c.bounds.end(), a.bounds);
	a.bounds[w.size] -= k.short_by;
	return a;
}

// ---- what must come out, by the plainest means

double wide(u32 type, const u8 *p)
{
	auto small = [&](int exponent_bits, int mantissa_bits, u32 bits) -> double {
		int e = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1)),
		    m = static_cast<int>(bits & ((1u << mantissa_bits) - 1));
		int bias = (1 << (exponent_bits - 1)) - 1;
		double size = e == 0 ? ldexp(m, 1 - bias - mantissa_bits)
		                     : ldexp(m + (1 << mantissa_bits), e - bias - mantissa_bits);
		return bits >> (exponent_bits + mantissa_bits) & 1 ? -size : size;
	};
	switch (type) {
	case SW_TYPE_FLOAT16:
		return small(5, 10, *reinterpret_cast<const uint16_t *>(p));
	case SW_TYPE_BFLOAT16:
		return small(8, 7, *reinterpret_cast<const uint16_t *>(p));
	case SW_TYPE_FLOAT8E4M3:
		return small(4, 3, *p);
	case SW_TYPE_FLOAT8E5M2:
		return small(5, 2, *p);
	case SW_TYPE_FLOAT32:
		return *reinterpret_cast<const float *>(p);
	default:
		return *reinterpret_cast<const double *>(p);
	}
}

// Rounds to a small float by search: the nearest of its values, of two the even one; what lies beyond the last half
// place is left out, since the tests' numbers are small.
void narrow(u32 type, float f, u8 *to)
{
	u32 count = element_bytes[type] == 1 ? 128 : type == SW_TYPE_FLOAT16 ? 0x7c00 : 0x7f80;
	if (type == SW_TYPE_FLOAT8E4M3)
		count = 127;
	if (type == SW_TYPE_FLOAT8E5M2)
		count = 124;
	u32 low = 0, high = count - 1; // values rise with their bits
	double size = fabs(static_cast<double>(f));
	auto value = [&](u32 bits) {
		u8 b[2] = {static_cast<u8>(bits), static_cast<u8>(bits >> 8)};
		return wide(type, b);
	};
	while (low < high) { // the greatest that is not above size
		u32 middle = (low + high + 1) / 2;
		if (value(middle) <= size)
			low = middle;
		else
			high = middle - 1;
	}
	if (low + 1 < count) {
		double below = size - value(low), above = value(low + 1) - size;
		if (above < below || (above == below && (low & 1) != 0))
			low++;
	}
	if (std::signbit(f))
		low |= element_bytes[type] == 1 ? 0x80 : 0x8000;
	memcpy(to, &low, element_bytes[type]);
}

template <typename T> T folded(u32 op, T a, T b)
{
	switch (op) {
	case SW_OP_MIN:
		return b < a ? b : a;
	case SW_OP_MAX:
		return b > a ? b : a;
	case SW_OP_PROD:
		return static_cast<T>(a * b);
	default:
		return static_cast<T>(a + b);
	}
}

template <typename T> void fold_own(u32 op, const std::vector<const u8 *> &rows, u8 *to)
{
	T v = *reinterpret_cast<const T *>(rows[0]);
	for (size_t r = 1; r < rows.size(); r++)
		v = folded(op, v, *reinterpret_cast<const T *>(rows[r]));
	if (op == SW_OP_AVG)
		v = static_cast<T>(v / static_cast<T>(rows.size()));
	memcpy(to, &v, sizeof(v));
}

void fold_one(u32 type, u32 op, const std::vector<const u8 *> &rows, u8 *to)
{
	switch (type) {
	case SW_TYPE_UINT8:
		return fold_own<u8>(op, rows, to);
	case SW_TYPE_INT32:
		return fold_own<u32>(op, rows, to); // the tests' numbers are not negative, but wrap
	case SW_TYPE_INT64:
		return fold_own<u64>(op, rows, to);
	case SW_TYPE_FLOAT64:
		return fold_own<double>(op, rows, to);
	case SW_TYPE_FLOAT32:
		return fold_own<float>(op, rows, to);
	}
	float v = static_cast<float>(wide(type, rows[0]));
	for (size_t r = 1; r < rows.size(); r++)
		v = folded(op, v, static_cast<float>(wide(type, rows[r])));
	if (op == SW_OP_AVG)
		v /= static_cast<float>(rows.size());
	narrow(type, v, to);
}

// Element i of what a rank brings to a call.
void value(u64 number, u32 type, u32 rank, i64 i, u8 *to)
{
	u64 z = (number * 1000003 + rank * 131 + 1) * 0x9e3779b97f4a7c15 + static_cast<u64>(i) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 29) * 0x94d049bb133111eb;
	z ^= z >> 32;
	float small = static_cast<float>(static_cast<int>(z % 4001) - 2000) / 512.0f;
	switch (type) {
	case SW_TYPE_UINT8:
		*to = static_cast<u8>(z);
		return;
	case SW_TYPE_INT32: {
		u32 v = static_cast<u32>(z) & 0x7fffffff;
		memcpy(to, &v, 4);
		return;
	}
	case SW_TYPE_INT64:
		z &= ~0ull >> 1;
		memcpy(to, &z, 8);
		return;
	case SW_TYPE_FLOAT32:
		small += static_cast<float>(z >> 40) * 1e-9f;
		memcpy(to, &small, 4);
		return;
	case SW_TYPE_FLOAT64: {
		double v = small + static_cast<double>(z) * 1e-25;
		memcpy(to, &v, 8);
		return;
	}
	}
	narrow(type, small, to);
}

constexpr u8 poison = 0xA7;

struct job {
	call c;
	std::vector<part> ranks;
	std::vector<std::vector<u8>> inputs;
};

void fill(world &w, job &j, u64 number)
{
	u32 es = element_bytes[j.c.type];
	j.inputs.assign(w.size, {});
	for (u32 r = 0; r < w.size; r++) {
		part &k = j.ranks[r];
		auto &in = j.inputs[r];
		in.resize(j.c.src_bytes(r));
		for (i64 i = 0; i * es < static_cast<i64>(in.size()); i++)
			value(number, j.c.type, r, i, &in[i * es]);
		memset(reinterpret_cast<void *>(w.segment(r) + w.heap), poison, w.stride - w.heap);
		memcpy(reinterpret_cast<void *>(w.segment(r) + k.src), in.data(), in.size());
	}
}

// The result of all ranks' outputs together.
std::vector<u8> outcome(const world &w, const job &j)
{
	const call &c = j.c;
	u32 es = element_bytes[c.type];
	std::vector<u8> whole(c.bytes());
	for (u32 p = 0; p < w.size; p++)
		for (i64 at = c.bounds[p]; at < c.bounds[p + 1]; at += es) {
			if (!c.reduces()) {
				memcpy(&whole[at], &j.inputs[p][at - c.bounds[p]], es);
				continue;
			}
			std::vector<const u8 *> rows;
			for (u32 r = 0; r < w.size; r++)
				rows.push_back(&j.inputs[r][at]);
			fold_one(c.type, c.op, rows, &whole[at]);
		}
	return whole;
}

// A rank has ended a call: its output is complete, and what is then written to its input, here poison, is of no account
// to others.
bool right(const world &w, const job &j, const std::vector<u8> &whole, u32 r)
{
	const call &c = j.c;
	const part &k = j.ranks[r];
	std::vector<u8> want(w.stride - w.heap, poison);
	memcpy(&want[k.src - w.heap], j.inputs[r].data(), j.inputs[r].size());
	memcpy(&want[k.dst - w.heap], whole.data() + (c.gathers() ? 0 : c.bounds[r]), c.dst_bytes(r));
	const u8 *got = reinterpret_cast<const u8 *>(w.segment(r) + w.heap);
	for (size_t i = 0; i < want.size(); i++)
		if (got[i] != want[i]) {
			printf(
			    "rank %u of %u, byte %zu (output from %llu, %lld bytes): %#x instead of %#x; %s, collective %u, type %u, op %u, flags %u, %u blocks, in %s, out %s\n",
			    r, w.size, i, static_cast<unsigned long long>(k.dst - w.heap),
			    static_cast<long long>(c.dst_bytes(r)), got[i], want[i], c.packets ? "packets" : "memory",
			    c.collective, c.type, c.op, c.flags, c.blocks, k.src_far ? "staged" : "direct",
			    k.dst_far ? "staged" : "direct");
			return false;
		}
	bool in_place = k.src < k.dst + c.dst_bytes(r) && k.dst < k.src + c.src_bytes(r);
	if (!in_place)
		memset(reinterpret_cast<void *>(w.segment(r) + k.src), poison, c.src_bytes(r));
	return true;
}

struct stream {
	std::vector<const job *> jobs;
	size_t next = 0;
	std::vector<emu::block *> blocks;
	u32 pace = 1;
};

void start(const world &w, u32 rank, const job &j, std::vector<emu::block *> &blocks)
{
	auto a = std::make_shared<sw_reduce_args>(arguments(w, j.c, j.ranks[rank], rank));
	bool packets = j.c.packets;
	for (u32 i = 0; i < j.c.blocks; i++)
		blocks.push_back(launch(rank, i, j.c.blocks, packets ? SW_REDUCE_PACKET_THREADS : SW_REDUCE_THREADS, 0,
		                        [a, packets] { packets ? allreduce_packet(*a) : allreduce(*a); }));
}

// last, when there is one, is called when a rank has ended its last call.
bool run(world &w, std::vector<stream> &streams, const std::function<bool(u32)> &last = {},
         const std::function<void(u64)> &each_sweep = {})
{
	std::vector<bool> checked(w.size);
	auto go_on = [&](u32 r) {
		stream &s = streams[r];
		if (ended(s.blocks)) {
			if (s.next < s.jobs.size()) {
				start(w, r, *s.jobs[s.next++], s.blocks);
			} else if (last && !checked[r]) {
				if (!last(r))
					return at_work::stop;
				checked[r] = true;
			}
		}
		return s.blocks.empty() ? at_work::no : at_work::yes;
	};
	return run_ranks(w.size, go_on, [&](u32 rank) { return streams[rank].pace; }, each_sweep);
}

world random_world(u64 room)
{
	u32 size = 2 + draw(draw(8) == 0 ? 8 : 4);
	return world(size, 1 + draw(3), 1 + draw(3), SW_TILE_BYTES * (1 + draw(3)), draw(2) == 0 ? 3000 : 20000, room);
}

job random_job(const world &w)
{
	job j;
	call &c = j.c;
	c.collective = 1 + draw(3);
	c.type = draw(3) == 0 ? SW_TYPE_BFLOAT16 : draw(9);
	bool whole = c.type == SW_TYPE_UINT8 || c.type == SW_TYPE_INT32 || c.type == SW_TYPE_INT64;
	c.op = draw(2) == 0 ? SW_OP_SUM : draw(5);
	if ((whole && c.op == SW_OP_AVG) || !c.reduces())
		c.op = SW_OP_SUM;
	c.flags = 0;
	c.packets = draw(3) == 0;
	c.blocks = 1 + draw(w.lines);
	c.interval = draw(2) ? 0 : 1 + draw(2000);
	u32 es = element_bytes[c.type];
	i64 most = c.packets ? w.packet_bytes / es / (c.collective == 3 ? w.size : 1) : 12000 / w.size * 8 / es;
	c.bounds = {0};
	u32 kind = draw(3);
	i64 equal = draw(static_cast<u32>(most) + 1);
	for (u32 p = 0; p < w.size; p++) {
		i64 n = kind == 0 ? equal : kind == 1 ? draw(static_cast<u32>(most) + 1) : draw(40);
		if (draw(2) && kind == 0)
			n = n / (16 / min(es, 16u)) * (16 / min(es, 16u));
		c.bounds.push_back(c.bounds.back() + n * es);
	}
	bool once = c.packets && c.collective == 3 && draw(3) == 0 && c.bytes() <= w.packet_bytes;
	c.flags = once ? SW_REDUCE_ONE_SHOT : c.collective == SW_ALL_GATHER && draw(2) ? SW_REDUCE_PULL : 0;
	j.ranks.resize(w.size);
	u32 shift = draw(2) ? 0 : es * draw(16);
	for (u32 r = 0; r < w.size; r++) {
		part &k = j.ranks[r];
		k.src_far = draw(2), k.dst_far = draw(2);
		u64 at = w.heap + 256 + shift + (draw(4) == 0 ? es * draw(16) : 0);
		k.src = at;
		k.dst = (at + c.bytes() + 511) / 256 * 256 + shift + (draw(4) == 0 ? es * draw(16) : 0);
		if (draw(3) == 0) // in place
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

bool no_faults(const world &w)
{
	for (u32 r = 0; r < w.size; r++)
		if (w.fault(r) != SW_FAULT_NONE) {
			printf("rank %u: fault %u with rank %u\n", r, w.fault(r), w.faults[r].peer);
			return false;
		}
	return true;
}

// Several calls in a row, each rank in its own way and at its own pace; what the last one leaves is checked.
bool reductions()
{
	world w = random_world(1 << 19);
	std::vector<job> jobs;
	for (u32 n = 1 + draw(3); n > 0; n--)
		jobs.push_back(random_job(w));
	for (size_t i = 0; i < jobs.size(); i++) { // calls of unlike kinds meet in the same control block
		fill(w, jobs[i], i + 1);
		std::vector<stream> streams(w.size);
		for (stream &s : streams) {
			s.jobs.push_back(&jobs[i]);
			s.pace = draw(2) ? 1 : 1 + draw(8);
		}
		std::vector<u8> whole = outcome(w, jobs[i]);
		if (!run(w, streams, [&](u32 r) { return no_faults(w) && right(w, jobs[i], whole, r); }))
			return false;
	}
	return true;
}

// The same call many times, from the same input: a rank may be a call ahead of another.
bool in_a_row()
{
	world w = random_world(1 << 19);
	job j = random_job(w);
	for (u32 r = 0; r < w.size; r++) // inputs stay as they are
		j.ranks[r].dst = (j.ranks[r].src + j.c.bytes() + 511) / 256 * 256;
	fill(w, j, 1);
	std::vector<stream> streams(w.size);
	u32 times = 2 + draw(3);
	for (stream &s : streams) {
		s.jobs.assign(times, &j);
		s.pace = draw(2) ? 1 : 1 + draw(8);
	}
	std::vector<u8> whole = outcome(w, j);
	return run(w, streams, [&](u32 r) { return no_faults(w) && right(w, j, whole, r); });
}

// A rank calls something else: all hear of it, nobody hangs, and the next call works.
bool disagreement()
{
	world w = random_world(1 << 19);
	job j = random_job(w);
	for (part &k : j.ranks)
		k.timeout_ns = 200'000'000;
	part &k = j.ranks[draw(w.size)];
	u32 es = element_bytes[j.c.type];
	i64 last = (j.c.bounds[w.size] - j.c.bounds[w.size - 1]) / es;
	if (last > 0 && draw(3) != 0)
		k.short_by = (last + 1) / 2 * es;
	else
		k.wrong = 1; // of the operator
	fill(w, j, 1);
	std::vector<stream> streams(w.size);
	for (stream &s : streams)
		s.jobs.push_back(&j);
	if (!run(w, streams))
		return false;
	for (u32 r = 0; r < w.size; r++) {
		if (w.fault(r) != SW_FAULT_MISMATCH) {
			printf("rank %u has fault %u with rank %u\n", r, w.fault(r), w.faults[r].peer);
			return false;
		}
		if (j.c.reduces() && j.ranks[r].src != j.ranks[r].dst) {
			const u8 *out = reinterpret_cast<const u8 *>(w.segment(r) + j.ranks[r].dst);
			for (i64 i = 0; i < j.c.dst_bytes(r); i++)
				if (out[i] != poison && j.ranks[r].dst > j.ranks[r].src + j.c.bytes()) {
					printf("rank %u has written its output, kind %d\n", r, j.c.packets);
					return false;
				}
		}
		w.faults[r] = {};
		at<sw_control>(w.segment(r) + w.block.control).fault = SW_FAULT_NONE;
	}
	job good = random_job(w);
	fill(w, good, 2);
	std::vector<stream> again(w.size);
	for (stream &s : again)
		s.jobs.push_back(&good);
	std::vector<u8> whole = outcome(w, good);
	return run(w, again, [&](u32 r) { return no_faults(w) && right(w, good, whole, r); });
}

// A rank stays away, or the abort word is set: every wait ends, and says why.
bool end_of_waits(bool aborted)
{
	world w = random_world(1 << 19);
	job j = random_job(w);
	for (part &k : j.ranks)
		k.timeout_ns = aborted ? u64{1} << 50 : 300'000;
	fill(w, j, 1);
	std::vector<stream> streams(w.size);
	u32 away = draw(w.size);
	for (u32 r = 0; r < w.size; r++)
		if (r != away)
			streams[r].jobs.push_back(&j);
	return run(w, streams, {}, aborted ? abort_in(w) : nullptr) && gave_up(w, away, aborted);
}

// One rank's slice takes four times as long as the deadline to reduce, at a rate, and signals at its end.
bool slow_slice()
{
	world w(2, 1, 1 + draw(3), SW_TILE_BYTES, 3000, 1 << 20);
	job j;
	u32 slow = draw(2);
	i64 first = slow == 0 ? 160'000 : 4000;
	j.c = {SW_REDUCE_SCATTER | SW_ALL_GATHER, SW_TYPE_FLOAT32, SW_OP_SUM, 0, 1, 24'000, false, {0, first, 164'000}};
	part k;
	k.src = w.heap + 256, k.dst = w.heap + 256 + 196'608;
	k.timeout_ns = 240'000;
	j.ranks.assign(2, k);
	fill(w, j, 1);
	std::vector<stream> streams(w.size);
	for (stream &s : streams)
		s.jobs = {&j};
	std::vector<u8> whole = outcome(w, j);
	return run(w, streams, [&](u32 r) { return no_faults(w) && right(w, j, whole, r); });
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words,
	               {
			   {"reductions", reductions},
			   {"in a row", in_a_row},
			   {"disagreement", disagreement},
			   {"deadline", [] { return end_of_waits(false); }},
			   {"abort", [] { return end_of_waits(true); }},
			   {"a slow slice", slow_slice},
		       },
	               [](u64 i) { return i % 64 == 15 ? 5
		                          : i % 8 < 4  ? 0
		                                       : i % 8 - 3; });
}
