// The header on a GPU: the blocks of one kernel write rows, those of another, launched behind it on a second stream,
// wait for them, change them and say so; those of a third, launched before both, wait for that. `nvcc words.cu &&
// ./a.out`.
#include "switchyard_device.cuh"

#include <cstdio>

constexpr uint32_t tiles = 64, rows = 128, columns = 1024, experts = 8;

__global__ void write(uint32_t *x, uint32_t *have, const int32_t *expert_of, uint32_t round)
{
	for (uint32_t t = blockIdx.x; t < tiles; t += gridDim.x) {
		for (uint32_t i = threadIdx.x; i < rows * columns; i += blockDim.x)
			x[t * rows * columns + i] = t * rows * columns + i + round;
		switchyard::rows_done(have, expert_of, t, rows);
	}
}

__global__ void change(const uint32_t *x, uint32_t *y, switchyard::words landed, uint32_t *ready, uint32_t *bad)
{
	for (uint32_t t = blockIdx.x; t < tiles; t += gridDim.x) {
		if (!switchyard::wait_rows(landed, t)) {
			atomicAdd(bad, 1);
			return;
		}
		for (uint32_t i = threadIdx.x; i < rows * columns; i += blockDim.x)
			y[t * rows * columns + i] = 2 * x[t * rows * columns + i];
		switchyard::rows_done(ready, landed.word_of, t, rows);
	}
}

__global__ void check(const uint32_t *y, switchyard::words back, uint32_t *bad, uint32_t round)
{
	for (uint32_t t = gridDim.x - 1 - blockIdx.x; t < tiles; t += gridDim.x) {
		if (!switchyard::wait_rows(back, t)) {
			atomicAdd(bad, 1);
			return;
		}
		for (uint32_t i = threadIdx.x; i < rows * columns; i += blockDim.x)
			if (y[t * rows * columns + i] != 2 * (t * rows * columns + i + round))
				atomicAdd(bad, 1);
	}
}

#define must(call) \
	if (cudaError_t e = call; e != cudaSuccess) { \
		std::printf("%s: %s\n", #call, cudaGetErrorString(e)); \
		return 1; \
	}

int main()
{
	uint32_t *x, *y, *words, *want, *bad;
	int32_t *expert_of;
	must(cudaMalloc(&x, tiles * rows * columns * 4));
	must(cudaMalloc(&y, tiles * rows * columns * 4));
	must(cudaMalloc(&words, 2 * tiles * 4));
	must(cudaMallocManaged(&want, tiles * 4));
	must(cudaMallocManaged(&bad, 4));
	must(cudaMallocManaged(&expert_of, tiles * 4));
	cudaStream_t s[3];
	for (auto &one : s)
		must(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
	cudaFuncAttributes loaded; // before any of them runs: see the header
	must(cudaFuncGetAttributes(&loaded, write));
	must(cudaFuncGetAttributes(&loaded, change));
	must(cudaFuncGetAttributes(&loaded, check));
	*bad = 0;
	for (uint32_t round = 0; round < 40; round++) {
		bool by_tile = round % 2 == 1;
		for (uint32_t t = 0; t < tiles; t++) {
			expert_of[t] = t * experts / tiles;
			want[t] = by_tile ? rows : rows * tiles / experts;
		}
		must(cudaMemset(words, 0, 2 * tiles * 4));
		must(cudaDeviceSynchronize());
		const int32_t *word_of = by_tile ? nullptr : expert_of;
		check<<<16, 256, 0, s[0]>>>(y, {words + tiles, want, word_of}, bad, round);
		change<<<16, 256, 0, s[1]>>>(x, y, {words, want, word_of}, words + tiles, bad);
		write<<<16, 256, 0, s[2]>>>(x, words, word_of, round);
		must(cudaDeviceSynchronize());
	}
	std::printf("%u bad\n", *bad);
	return *bad != 0;
}
