// Kernels for tests and benchmarks: fill a message with values that nobody else has, and count the bytes that differ.
#include <stdint.h>

__device__ __forceinline__ uint8_t value(uint64_t seed, uint64_t i)
{
	uint64_t z = (seed + (i >> 3)) * 0x9e3779b97f4a7c15ull;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return static_cast<uint8_t>((z ^ (z >> 31)) >> (8 * (i & 7)));
}

struct message {
	uint8_t *p;
	uint64_t n, seed;
	unsigned long long *wrong;
};

extern "C" __global__ void fill(message m)
{
	uint8_t *p = m.p;
	uint64_t n = m.n, seed = m.seed;
	for (uint64_t i = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; i < n;
	     i += static_cast<uint64_t>(gridDim.x) * blockDim.x)
		p[i] = value(seed, i);
}

extern "C" __global__ void check(message m)
{
	const uint8_t *p = m.p;
	uint64_t n = m.n, seed = m.seed;
	unsigned long long bad = 0;
	for (uint64_t i = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; i < n;
	     i += static_cast<uint64_t>(gridDim.x) * blockDim.x)
		bad += p[i] != value(seed, i);
	if (bad != 0)
		atomicAdd(m.wrong, bad);
}

// spin keeps a stream busy: a slow consumer.
extern "C" __global__ void spin(uint64_t ns)
{
	uint64_t from, now;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
	do
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
	while (now - from < ns);
}

// The cost of a launch: kernels that do nothing, with few and with many bytes of arguments.
extern "C" __global__ void empty(message m)
{
	if (m.n == 1)
		m.p[0] = 0;
}

struct many {
	uint64_t word[344];
};

extern "C" __global__ void empty_many(const __grid_constant__ many m)
{
	if (m.word[1] == 1)
		*reinterpret_cast<uint64_t *>(m.word[0]) = m.word[200];
}
