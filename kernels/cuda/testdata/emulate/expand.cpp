// Runs the kernels between rows of tokens and rows of choices on a processor, with random choices and random orders of
// their threads, and compares every byte that they may write, and those around them.
//
//	emulate SEED ROUNDS
#include "../../internal/cuda/layout/expand.h"

#define SW_EXPAND_PLACE_THREADS 96
#define SW_EXPAND_THREADS 64

#include "expand.cu"

#include "fibers.h"

namespace {

constexpr u8 untouched = 0x5a;

// Memory at a multiple of 16, with bytes around it that nobody may write.
struct memory {
	std::vector<u8> bytes, want;
	u64 first = 0;

	explicit memory(u64 n, bool drawn = false) : bytes(n + 128, untouched)
	{
		first = (reinterpret_cast<u64>(bytes.data()) + 63) / 16 * 16 - reinterpret_cast<u64>(bytes.data());
		for (u64 i = 0; drawn && i < n; i++)
			bytes[first + i] = static_cast<u8>(draw(256));
		want = bytes;
	}
	u64 at() const { return reinterpret_cast<u64>(bytes.data()) + first; }
	template <typename T> T &of(u64 i) { return *reinterpret_cast<T *>(bytes.data() + first + i * sizeof(T)); }
	template <typename T> T &wants(u64 i) { return *reinterpret_cast<T *>(want.data() + first + i * sizeof(T)); }
	bool right(const char *what) const
	{
		for (u64 i = 0; i < bytes.size(); i++)
			if (bytes[i] != want[i]) {
				printf("%s: byte %lld is %u, want %u\n", what, static_cast<long long>(i - first),
				       bytes[i], want[i]);
				return false;
			}
		return true;
	}
};

// Runs blocks of a kernel until they have ended.
template <typename F> bool runs(u32 grid, u32 threads, F kernel)
{
	std::vector<emu::block *> blocks;
	bool begun = false;
	auto go_on = [&](u32) {
		for (u32 b = 0; b < grid && !begun; b++)
			blocks.push_back(launch(0, b, grid, threads, 0, kernel));
		begun = true;
		return blocks.empty() || ended(blocks) ? at_work::no : at_work::yes;
	};
	return run_ranks(1, go_on, [](u32) { return 1; }, {});
}

bool expands()
{
	u32 tokens = draw(4) == 0 ? 0 : draw(60), top_k = 1 + draw(draw(8) == 0 ? 40 : 6),
	    experts = 1 + draw(draw(4) == 0 ? 70 : 6), align = draw(2) == 0 ? 1 : 1 + draw(5),
	    row = 16 * (1 + draw(draw(8) == 0 ? 600 : 5)), scale = 4 * (1 + draw(40));
	bool scales = draw(2) == 0, weights = draw(2) == 0;
	memory indices(8ull * tokens * top_k), counts(4ull * experts), slots(4ull * tokens * top_k);
	for (u32 e = 0; e < experts; e++)
		counts.of<u32>(e) = 0;
	for (u32 i = 0; i < tokens * top_k; i++) {
		i64 e = indices.of<i64>(i) = draw(3) == 0 ? -1 : static_cast<i64>(draw(experts));
		if (e >= 0)
			counts.of<u32>(e)++;
	}
	std::vector<u32> next, end, room;
	u32 at = 0;
	for (u32 e = 0; e < experts; e++) {
		u32 n = counts.of<u32>(e);
		next.push_back(at), end.push_back(at + n);
		at += (n + align - 1) / align * align;
		room.push_back(at);
	}
	u32 length = draw(3) == 0 ? draw(at + 1) : at + draw(4);
	bool told = draw(2) == 0;
	memory rooms(8ull * (experts + 1));
	for (u32 e = 0; told && e <= experts; e++)
		rooms.wants<i64>(e) =
		    e == experts ? at > length : std::min(room[e], length) - std::min(e > 0 ? room[e - 1] : 0, length);
	memory rows(1ull * tokens * row, true), to_rows(1ull * length * row), from_scales(1ull * tokens * scale, true),
	    to_scales(1ull * length * scale), from_weights(4ull * tokens * top_k, true), to_weights(4ull * length);
	indices.want = indices.bytes, counts.want = counts.bytes;
	auto fill = [&](u32 slot, i64 token, u32 choice) { // token -1: padding
		for (u32 i = 0; i < row; i++)
			to_rows.wants<u8>(1ull * slot * row + i) = token < 0 ? 0 : rows.of<u8>(token * row + i);
		for (u32 i = 0; scales && i < scale; i++)
			to_scales.wants<u8>(1ull * slot * scale + i) =
			    token < 0 ? 0 : from_scales.of<u8>(token * scale + i);
		if (weights)
			to_weights.wants<u32>(slot) = token < 0 ? 0 : from_weights.of<u32>(choice);
	};
	for (u32 i = 0; i < tokens * top_k; i++) {
		i64 e = indices.of<i64>(i);
		u32 slot = e < 0 ? length : next[e]++;
		slots.wants<int>(i) = slot < length ? static_cast<int>(slot) : -1;
		if (slot < length)
			fill(slot, i / top_k, i);
	}
	for (u32 e = 0; e < experts; e++)
		for (u32 slot = end[e]; slot < room[e] && slot < length; slot++)
			fill(slot, -1, 0);
	sw_expand_args a{};
	a.indices = indices.at(), a.counts = counts.at(), a.slots = slots.at(), a.rows = rows.at(),
	a.to_rows = to_rows.at();
	a.scales = scales ? from_scales.at() : 0, a.to_scales = to_scales.at();
	a.weights = weights ? from_weights.at() : 0, a.to_weights = to_weights.at();
	a.rooms = told ? rooms.at() : 0;
	a.row_bytes = row, a.scale_bytes = scale, a.tokens = tokens, a.top_k = top_k, a.experts = experts,
	a.align = align, a.length = length;
	return runs(experts, SW_EXPAND_PLACE_THREADS, [&a] { expand_places(a); }) && slots.right("slots") &&
	       rooms.right("rooms") && runs(1 + draw(3), SW_EXPAND_THREADS, [&a] { expand_rows(a); }) &&
	       to_rows.right("rows") && to_scales.right("scales") && to_weights.right("weights") &&
	       slots.right("slots");
}

bool folds()
{
	u32 tokens = draw(20), top_k = 1 + draw(9), row = 16 * (1 + draw(draw(4) == 0 ? 200 : 5)),
	    length = 1 + draw(40);
	bool weights = draw(2) == 0;
	memory rows(1ull * length * row), slots(4ull * tokens * top_k), sums(1ull * tokens * row),
	    from_weights(4ull * length, true), to_weights(4ull * tokens * top_k);
	for (u32 i = 0; i < length * row / 2; i++)
		rows.of<uint16_t>(i) = static_cast<uint16_t>(bf16x2_of(static_cast<float>(draw(2001)) / 7 - 100, 0));
	std::vector<bool> some;
	for (u32 i = 0; i < tokens * top_k; i++) {
		int slot = slots.of<int>(i) = draw(3) == 0 ? -1 : static_cast<int>(draw(length + length / 8));
		some.push_back(slot >= 0 && static_cast<u32>(slot) < length);
		if (weights)
			to_weights.wants<u32>(i) = some[i] ? from_weights.of<u32>(slot) : 0;
	}
	for (u32 t = 0; t < tokens; t++)
		for (u32 i = 0; i < row / 2; i++) {
			float sum = 0;
			for (u32 k = 0; k < top_k; k++) {
				int slot = slots.of<int>(t * top_k + k);
				if (some[t * top_k + k])
					sum += __uint_as_float(static_cast<u32>(rows.of<uint16_t>(slot * (row / 2) + i))
					                       << 16);
			}
			sums.wants<uint16_t>(t * (row / 2) + i) = static_cast<uint16_t>(bf16x2_of(sum, 0));
		}
	sw_fold_args a{rows.at(), slots.at(), sums.at(), weights ? from_weights.at() : 0, to_weights.at(), row,
	               tokens,    top_k,      length};
	return runs(1 + draw(3), SW_EXPAND_THREADS, [&a] { fold_rows_bf16(a); }) && sums.right("sums") &&
	       to_weights.right("weights");
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words, {{"expands", expands}, {"folds", folds}}, [](u64 i) { return i % 2; });
}
