// Times the reductions' own source on the GPUs of one process, a thread each, and checks every element.
//
//	nvcc -std=c++20 -O3 -arch=sm_90a -o allreduce_bench kernels/cuda/testdata/bench/allreduce.cu
//	./allreduce_bench [-ranks 2] [-max-mib 512] [-sizes 8K,1M] [-only words of a row's name] [-blocks 8,16,32]
//[-rates 0,350] [-chunk-kib 64] [-slots 4]
//	                  [-samples 15] [-eager] [-brief] [-list]
//
// A row is a collective, the bytes of its larger buffer, an algorithm, a number of blocks and the GB/s to which they
// are held together, 0 where they are not. us is the median over the samples of the slowest rank's time for a call of
// bfloat16 sums in a CUDA graph of 20 calls (5 from 128 MiB on). GB/s is what a link carries in a direction, if every
// byte crosses once. At the end comes the fastest row of each size and algorithm; -brief leaves out the others.
#include "../../allreduce.cu"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#define CHECK(x) \
	do { \
		cudaError_t e_ = (x); \
		if (e_ != cudaSuccess) { \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
			exit(1); \
		} \
	} while (0)

using sw::i64;
using sw::u32;
using sw::u64;

// Element i of a rank's input: a multiple of 1/64, so that bfloat16 rounds sums of it.
__host__ __device__ float value(u32 rank, u64 i)
{
	u32 z = static_cast<u32>(i) * 2654435761u ^ (rank + 1) * 0x9e3779b9u;
	z ^= z >> 15;
	z *= 0x85ebca6bu;
	z ^= z >> 13;
	return static_cast<float>(static_cast<int>(z & 255) - 128) / 64;
}

__global__ void fill(unsigned short *p, u64 first, u64 n, u32 rank)
{
	for (u64 i = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; i < n;
	     i += static_cast<u64>(gridDim.x) * blockDim.x)
		p[i] = static_cast<unsigned short>(sw::bf16x2_of(value(rank, first + i), 0));
}

// Counts elements that are not the sum over ranks, or, where sums is false, rank's own.
__global__ void check(const unsigned short *p, u64 first, u64 n, u32 ranks, int only, unsigned long long *wrong)
{
	unsigned long long bad = 0;
	for (u64 i = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; i < n;
	     i += static_cast<u64>(gridDim.x) * blockDim.x) {
		float sum = value(only < 0 ? 0 : only, first + i);
		for (u32 r = 1; only < 0 && r < ranks; r++)
			sum += value(r, first + i);
		bad += p[i] != static_cast<unsigned short>(sw::bf16x2_of(sum, 0));
	}
	if (bad != 0)
		atomicAdd(wrong, bad);
}

struct options {
	u32 ranks = 2, slots = 4, chunk = 64 << 10;
	i64 most = 512ll << 20, packet_bytes = 4 << 20;
	std::string only;
	std::vector<u32> blocks, rates{0};
	std::vector<i64> sizes;
	int samples = 15;
	bool eager = false, brief = false, list = false;
};

struct rank_state {
	int device;
	char *segment;
	sw_fault *fault;
	unsigned long long *wrong;
	cudaStream_t s;
	cudaEvent_t begin, end;
	cudaGraphExec_t graph = nullptr;
	float us = 0;
};

struct row {
	const char *name;
	u32 collective, flags;
	bool packets, far_src, far_dst, in_place; // far: only through staging
	i64 from, to;                             // bytes
};

constexpr i64 KiB = 1024, MiB = 1024 * KiB;
constexpr u32 lines = 132;
const u32 AR = SW_REDUCE_SCATTER | SW_ALL_GATHER, RS = SW_REDUCE_SCATTER, AG = SW_ALL_GATHER;

const row rows[] = {
    {"one-shot packet", AR, SW_REDUCE_ONE_SHOT, true, false, false, false, 0, 2 * MiB},
    {"one-shot packet, in place", AR, SW_REDUCE_ONE_SHOT, true, false, false, true, 0, 2 * MiB},
    {"two-shot packet", AR, 0, true, false, false, false, 0, 8 * MiB},
    {"two-shot direct", AR, 0, false, false, false, false, 128 * KiB, 1024 * MiB},
    {"two-shot direct, in place", AR, 0, false, false, false, true, 128 * KiB, 1024 * MiB},
    {"two-shot pushed", AR, 0, false, true, false, false, 128 * KiB, 1024 * MiB},
    {"two-shot staged", AR, 0, false, true, true, false, 128 * KiB, 1024 * MiB},
    {"reduce-scatter packet", RS, 0, true, false, false, false, 0, 4 * MiB},
    {"reduce-scatter direct", RS, 0, false, false, false, false, 128 * KiB, 1024 * MiB},
    {"reduce-scatter staged", RS, 0, false, true, true, false, 128 * KiB, 1024 * MiB},
    {"all-gather packet", AG, 0, true, false, false, false, 0, 4 * MiB},
    {"all-gather push", AG, 0, false, false, false, false, 128 * KiB, 1024 * MiB},
    {"all-gather pull", AG, SW_REDUCE_PULL, false, false, false, false, 128 * KiB, 1024 * MiB},
    {"all-gather staged", AG, 0, false, true, true, false, 128 * KiB, 1024 * MiB},
};

struct bench {
	options o;
	std::vector<rank_state> ranks;
	sw_reduce_block block;
	u64 src, dst; // places
	u64 base, stride;
	double cycles; // a nanosecond
	std::barrier<> meet;

	bench(const options &o) : o(o), meet(o.ranks)
	{
		int devices;
		CHECK(cudaGetDeviceCount(&devices));
		block = sw_lay_reduce_block(65536, o.ranks, lines, o.slots, o.chunk, o.packet_bytes);
		src = (block.end + 4095) / 4096 * 4096;
		dst = src + o.most;
		ranks.resize(o.ranks);
		for (u32 r = 0; r < o.ranks; r++) {
			rank_state &k = ranks[r];
			k.device = static_cast<int>(r) % devices;
			CHECK(cudaSetDevice(k.device));
			for (int d = 0; d < devices; d++)
				if (d != k.device) {
					cudaError_t e = cudaDeviceEnablePeerAccess(d, 0);
					if (e == cudaErrorPeerAccessAlreadyEnabled)
						cudaGetLastError();
					else
						CHECK(e);
				}
			CHECK(cudaMalloc(&k.wrong, sizeof(*k.wrong)));
			CHECK(cudaHostAlloc(&k.fault, sizeof(sw_fault), cudaHostAllocMapped));
			CHECK(cudaStreamCreateWithFlags(&k.s, cudaStreamNonBlocking));
			CHECK(cudaEventCreate(&k.begin));
			CHECK(cudaEventCreate(&k.end));
		}
		int khz;
		CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
		cycles = khz / 1e6;
		map_segments();
		clear();
	}

	template <typename F> static F driver(const char *name)
	{
		void *f = nullptr;
		cudaDriverEntryPointQueryResult found;
		CHECK(cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &found));
		if (f == nullptr) {
			fprintf(stderr, "the driver has no %s\n", name);
			exit(1);
		}
		return reinterpret_cast<F>(f);
	}

	static void must(CUresult r, const char *what)
	{
		if (r != CUDA_SUCCESS) {
			fprintf(stderr, "%s: error %d\n", what, static_cast<int>(r));
			exit(1);
		}
	}

	// One range of addresses, a segment a rank, as memory.Heap makes it.
	void map_segments()
	{
		auto reserve = driver<CUresult (*)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)>(
		    "cuMemAddressReserve");
		auto create = driver<CUresult (*)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
		                                  unsigned long long)>("cuMemCreate");
		auto map =
		    driver<CUresult (*)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)>(
			"cuMemMap");
		auto access =
		    driver<CUresult (*)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)>("cuMemSetAccess");
		constexpr u64 page = 2 << 20;
		stride = (dst + o.most + page - 1) / page * page;
		CUdeviceptr all;
		must(reserve(&all, stride * o.ranks, page, 0, 0), "cuMemAddressReserve");
		base = all;
		std::vector<CUmemAccessDesc> who;
		for (rank_state &k : ranks)
			if (std::none_of(who.begin(), who.end(), [&](auto &d) { return d.location.id == k.device; }))
				who.push_back(
				    {{CU_MEM_LOCATION_TYPE_DEVICE, k.device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
		for (u32 r = 0; r < o.ranks; r++) {
			CUmemAllocationProp p{};
			p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
			p.location = {CU_MEM_LOCATION_TYPE_DEVICE, ranks[r].device};
			CUmemGenericAllocationHandle h;
			must(create(&h, stride, &p, 0), "cuMemCreate");
			must(map(all + r * stride, stride, 0, h, 0), "cuMemMap");
			must(access(all + r * stride, stride, who.data(), who.size()), "cuMemSetAccess");
			ranks[r].segment = reinterpret_cast<char *>(all + r * stride);
		}
	}

	void clear()
	{
		for (rank_state &k : ranks) {
			CHECK(cudaSetDevice(k.device));
			CHECK(cudaDeviceSynchronize());
			CHECK(cudaMemset(k.segment, 0, block.input_slots));
			memset(k.fault, 0, sizeof(*k.fault));
			CHECK(cudaDeviceSynchronize());
		}
	}

	std::vector<i64> bounds(i64 bytes) const
	{
		std::vector<i64> b{0};
		for (u32 p = 1; p <= o.ranks; p++)
			b.push_back(p == o.ranks ? bytes
			                         : std::min(bytes, (bytes + o.ranks - 1) / o.ranks * p / 128 * 128));
		return b;
	}

	sw_reduce_args arguments(const row &w, i64 bytes, u32 r, u32 blocks, u32 rate) const
	{
		sw_reduce_args a{};
		std::vector<i64> b = bounds(bytes);
		const rank_state &k = ranks[r];
		u64 segment = reinterpret_cast<u64>(k.segment);
		a.world = {
		    base,          stride, 0,      static_cast<u64>(block.control), reinterpret_cast<u64>(k.fault),
		    2'000'000'000, r,      o.ranks};
		u64 to = dst;
		u64 from = src;
		if (w.in_place)
			from = dst;
		a.src = segment + from, a.dst = segment + to;
		a.src_place = w.far_src ? SW_NOWHERE : from, a.dst_place = w.far_dst ? SW_NOWHERE : to;
		a.block = block;
		a.count = bytes / 2;
		a.call = SW_OP_SUM | SW_TYPE_BFLOAT16 << 8 | w.collective << 16 | w.flags << 24;
		a.lines = lines, a.slots = o.slots, a.chunk_bytes = o.chunk, a.packet_bytes = o.packet_bytes;
		if (rate != 0)
			a.interval = static_cast<u32>(static_cast<double>(SW_TILE_BYTES) * blocks / rate * cycles);
		std::copy(b.begin(), b.end(), a.bounds);
		return a;
	}

	void call(const row &w, i64 bytes, u32 r, u32 blocks, u32 rate)
	{
		sw_reduce_args a = arguments(w, bytes, r, blocks, rate);
		cudaLaunchConfig_t c{};
		cudaLaunchAttribute at[2];
		c.gridDim = dim3(blocks), c.blockDim = dim3(w.packets ? SW_REDUCE_PACKET_THREADS : SW_REDUCE_THREADS),
		c.stream = ranks[r].s, c.attrs = at;
		at[0].id = cudaLaunchAttributeMemSyncDomain;
		at[0].val.memSyncDomain = cudaLaunchMemSyncDomainRemote;
		at[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
		at[1].val.programmaticStreamSerializationAllowed = 1;
		c.numAttrs = 2;
		CHECK(cudaLaunchKernelEx(&c, w.packets ? allreduce_packet : allreduce, a));
	}

	// Prepares one rank's buffers; all ranks do it before any calls.
	void prepare(const row &w, i64 bytes, u32 r)
	{
		rank_state &k = ranks[r];
		std::vector<i64> b = bounds(bytes);
		bool whole = (w.collective & RS) != 0;
		u64 first = whole ? 0 : b[r] / 2, n = (whole ? bytes : b[r + 1] - b[r]) / 2;
		CHECK(cudaMemsetAsync(k.segment + dst, 0xA7, bytes, k.s));
		fill<<<264, 512, 0, k.s>>>(reinterpret_cast<unsigned short *>(k.segment + (w.in_place ? dst : src)),
		                           first, n, r);
		CHECK(cudaGetLastError());
		CHECK(cudaStreamSynchronize(k.s));
	}

	u64 verify(const row &w, i64 bytes, u32 r)
	{
		rank_state &k = ranks[r];
		std::vector<i64> b = bounds(bytes);
		auto *out = reinterpret_cast<unsigned short *>(k.segment + dst);
		CHECK(cudaMemsetAsync(k.wrong, 0, sizeof(*k.wrong), k.s));
		if (w.collective == AG) {
			for (u32 p = 0; p < o.ranks; p++)
				check<<<264, 512, 0, k.s>>>(out + b[p] / 2, b[p] / 2, (b[p + 1] - b[p]) / 2, o.ranks,
				                            static_cast<int>(p), k.wrong);
		} else {
			u64 first = w.collective == RS ? b[r] / 2 : 0,
			    n = (w.collective == RS ? b[r + 1] - b[r] : bytes) / 2;
			check<<<264, 512, 0, k.s>>>(out, first, n, o.ranks, -1, k.wrong);
		}
		CHECK(cudaGetLastError());
		unsigned long long wrong;
		CHECK(cudaMemcpyAsync(&wrong, k.wrong, sizeof(wrong), cudaMemcpyDeviceToHost, k.s));
		CHECK(cudaStreamSynchronize(k.s));
		return wrong;
	}

	// Bytes that a link carries in a direction.
	double carried(const row &w, i64 bytes) const
	{
		return static_cast<double>(bytes) * (o.ranks - 1) / o.ranks * (w.collective == AR ? 2 : 1);
	}

	// One rank's part of a row. The time is in ranks[r].us, median of the slowest rank on rank 0.
	void run(const row &w, i64 bytes, u32 blocks, u32 rate, u32 r, float &us, std::vector<u64> &wrong)
	{
		rank_state &k = ranks[r];
		CHECK(cudaSetDevice(k.device));
		int calls = bytes >= 128 * MiB ? 5 : 20;
		prepare(w, bytes, r);
		meet.arrive_and_wait();
		call(w, bytes, r, blocks, rate);
		CHECK(cudaStreamSynchronize(k.s));
		meet.arrive_and_wait();
		wrong[r] = verify(w, bytes, r);
		meet.arrive_and_wait();
		cudaGraph_t g;
		cudaGraphExec_t x = nullptr;
		if (!o.eager) {
			CHECK(cudaStreamBeginCapture(k.s, cudaStreamCaptureModeRelaxed));
			for (int i = 0; i < calls; i++)
				call(w, bytes, r, blocks, rate);
			CHECK(cudaStreamEndCapture(k.s, &g));
			CHECK(cudaGraphInstantiate(&x, g, 0));
			CHECK(cudaGraphUpload(x, k.s));
			CHECK(cudaStreamSynchronize(k.s));
		}
		std::vector<float> samples;
		for (int sample = 0; sample < o.samples + 3; sample++) {
			meet.arrive_and_wait();
			CHECK(cudaEventRecord(k.begin, k.s));
			if (x != nullptr)
				CHECK(cudaGraphLaunch(x, k.s));
			else
				for (int i = 0; i < calls; i++)
					call(w, bytes, r, blocks, rate);
			CHECK(cudaEventRecord(k.end, k.s));
			CHECK(cudaStreamSynchronize(k.s));
			float ms;
			CHECK(cudaEventElapsedTime(&ms, k.begin, k.end));
			k.us = ms * 1000 / static_cast<float>(calls);
			meet.arrive_and_wait();
			if (r == 0 && sample >= 3) {
				float slowest = 0;
				for (rank_state &p : ranks)
					slowest = std::max(slowest, p.us);
				samples.push_back(slowest);
			}
		}
		// in place the graph has summed sums; out of place every call has left the same
		if (!w.in_place)
			wrong[r] += verify(w, bytes, r);
		if (r == 0) {
			std::sort(samples.begin(), samples.end());
			us = samples[samples.size() / 2];
		}
		if (x != nullptr) {
			CHECK(cudaGraphExecDestroy(x));
			CHECK(cudaGraphDestroy(g));
		}
	}
};

const char *collective_name(u32 c) { return c == AR ? "all-reduce" : c == RS ? "reduce-scatter" : "all-gather"; }

int main(int count, char **words)
{
	options o;
	for (int i = 1; i < count; i++) {
		std::string w = words[i];
		auto next = [&] { return i + 1 < count ? words[++i] : ""; };
		if (w == "-ranks")
			o.ranks = atoi(next());
		else if (w == "-max-mib")
			o.most = atoll(next()) * MiB;
		else if (w == "-only")
			o.only = next();
		else if (w == "-chunk-kib")
			o.chunk = atoi(next()) << 10;
		else if (w == "-slots")
			o.slots = atoi(next());
		else if (w == "-eager")
			o.eager = true;
		else if (w == "-brief")
			o.brief = true;
		else if (w == "-samples")
			o.samples = atoi(next());
		else if (w == "-rates") {
			o.rates.clear();
			for (char *p = strtok(const_cast<char *>(next()), ","); p != nullptr; p = strtok(nullptr, ","))
				o.rates.push_back(atoi(p));
		} else if (w == "-sizes")
			for (char *p = strtok(const_cast<char *>(next()), ","); p != nullptr; p = strtok(nullptr, ","))
				o.sizes.push_back(atoll(p) * (strchr(p, 'M') != nullptr   ? MiB
				                              : strchr(p, 'K') != nullptr ? KiB
				                                                          : 1));
		else if (w == "-list")
			o.list = true;
		else if (w == "-blocks")
			for (char *p = strtok(const_cast<char *>(next()), ","); p != nullptr; p = strtok(nullptr, ","))
				o.blocks.push_back(atoi(p));
		else {
			fprintf(stderr, "unknown option %s\n", w.c_str());
			return 2;
		}
	}
	if (o.list) {
		for (const row &w : rows)
			printf("%s\n", w.name);
		return 0;
	}
	bench b(o);
	struct best {
		float us, rate;
		std::string what;
	};
	std::map<std::tuple<u32, i64, std::string>, best> fastest;
	int failures = 0;
	if (o.sizes.empty())
		o.sizes = {8 * KiB, 32 * KiB, 128 * KiB, 512 * KiB, 1 * MiB,  2 * MiB,
		           4 * MiB, 8 * MiB,  32 * MiB,  128 * MiB, 512 * MiB};
	if (!o.brief)
		printf("%-14s %10s  %-26s %6s %5s %9s %7s\n", "collective", "bytes", "algorithm", "blocks", "rate",
		       "us", "GB/s");
	for (i64 bytes : o.sizes)
		for (const row &w : rows) {
			if (bytes > o.most || bytes < w.from || bytes > w.to ||
			    (!o.only.empty() && std::string(w.name).find(o.only) == std::string::npos))
				continue;
			i64 message =
			    (w.flags & SW_REDUCE_ONE_SHOT) != 0 ? bytes : (bytes + o.ranks - 1) / o.ranks + 128;
			if (w.packets && message > o.packet_bytes)
				continue;
			std::vector<u32> blocks = o.blocks;
			if (blocks.empty())
				blocks = w.packets ? (bytes <= 32 * KiB ? std::vector<u32>{2, 4, 8, 16}
				                                        : std::vector<u32>{16, 32, 48, 64, 96, 128})
				                   : std::vector<u32>{16, 24, 32, 48, 64, 96, 132};
			for (u32 n : blocks)
				for (u32 rate : w.packets ? std::vector<u32>{0} : o.rates) {
					float us = 0;
					std::vector<u64> wrong(o.ranks, 0);
					std::vector<std::thread> threads;
					for (u32 r = 0; r < o.ranks; r++)
						threads.emplace_back(
						    [&, r] { b.run(w, bytes, n, rate, r, us, wrong); });
					for (auto &t : threads)
						t.join();
					u64 bad = 0;
					std::string fault;
					for (u32 r = 0; r < o.ranks; r++) {
						bad += wrong[r];
						const sw_fault &f = *b.ranks[r].fault;
						if (f.kind != SW_FAULT_NONE)
							fault += " rank " + std::to_string(r) + ": fault " +
							         std::to_string(f.kind) + " with rank " +
							         std::to_string(f.peer) + " in call " +
							         std::to_string(f.epoch);
					}
					if (!o.brief || bad != 0 || !fault.empty())
						printf("%-14s %10lld  %-26s %6u %5u %9.2f %7.1f%s%s\n",
						       collective_name(w.collective), static_cast<long long>(bytes),
						       w.name, n, rate, us, b.carried(w, bytes) / us / 1e3,
						       bad != 0
						           ? ("  WRONG: " + std::to_string(bad) + " elements").c_str()
						           : "",
						       fault.c_str());
					fflush(stdout);
					if (bad != 0 || !fault.empty()) {
						failures++;
						b.clear();
						continue;
					}
					best &f = fastest[{w.collective, bytes, w.name}];
					if (f.us == 0 || us < f.us)
						f = {us, static_cast<float>(b.carried(w, bytes) / us / 1e3),
						     std::to_string(n) + " blocks" +
						         (rate != 0 ? " at " + std::to_string(rate) + " GB/s" : "")};
				}
		}
	printf("\nfastest\n");
	for (auto &[key, f] : fastest)
		printf("%-14s %10lld %9.2f us %7.1f GB/s  %s, %s\n", collective_name(std::get<0>(key)),
		       static_cast<long long>(std::get<1>(key)), f.us, f.rate, std::get<2>(key).c_str(),
		       f.what.c_str());
	return failures != 0;
}
