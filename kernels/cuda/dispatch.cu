// MoE dispatch and combine: the kernels. Rows cross by token: a token once to a rank, however many of its experts are
// there. Where the caller wants them by expert, passes over a rank's own memory come behind a dispatch and before a
// combine. Few tokens take one kernel each way. Their parts are in dispatch/, one idea a file:
//
//	numbers       rows of numbers: sums, rounding, float8 with scales
//	signals       what ranks tell each other about a call
//	state         typed views of a handle's state
//	masks         calls that go on without ranks
//	routing       where tokens go
//	padding       rows that belong to no token
//	landing       how many rows have landed, for callers that watch
//	rows/         many tokens on their way to ranks
//	few/          few tokens, both ways
//	sums          rows on their way back
//	reduce_rows   the kernel that reads and sums them
//	experts       between rows by token and rows by expert
//	partial_sums  the pass that makes what peers read
//	gradients     the pass that spreads gradients
//
// A call with a handle is counted in its struct sw_control by the kernel of its first half. A kernel that gives up
// leaves a fault and returns.
#include "dispatch/experts.cuh"
#include "dispatch/few/kernels.cuh"
#include "dispatch/gradients.cuh"
#include "dispatch/partial_sums.cuh"
#include "dispatch/reduce_rows.cuh"
#include "dispatch/rows/counts.cuh"
#include "dispatch/rows/send.cuh"

#define SW_DISPATCH_ROWS(name, quantiser) \
	extern "C" __global__ void __launch_bounds__(SW_DISPATCH_THREADS, 1) \
	    name(const __grid_constant__ sw_dispatch_args a) \
	{ \
		using namespace sw; \
		SW_DYNAMIC_LINES(memory); \
		SW_SHARED(rows_board, b); \
		send_rows<quantiser>(a, b, reinterpret_cast<u8 *>(memory)); \
	}

SW_DISPATCH_ROWS(dispatch_rows, as_they_are)
SW_DISPATCH_ROWS(dispatch_rows_f32, to_float8<kind::f32>)
SW_DISPATCH_ROWS(dispatch_rows_bf16, to_float8<kind::bf16>)
SW_DISPATCH_ROWS(dispatch_rows_f16, to_float8<kind::f16>)

// Float8: partial sums cross as float8.
#define SW_COMBINE(suffix, type, float8) \
	extern "C" __global__ void __launch_bounds__(SW_DISPATCH_SUM_THREADS, 1) \
	    combine_rows_##suffix(const __grid_constant__ sw_dispatch_args a) \
	{ \
		using namespace sw; \
		SW_DYNAMIC_LINES(memory); \
		SW_SHARED(combine_board, b); \
		combine_rows<type, float8>(a, b, reinterpret_cast<u8 *>(memory)); \
	} \
	extern "C" __global__ void __launch_bounds__(SW_DISPATCH_SUM_PASS_THREADS, 1) \
	    experts_sum_##suffix(const __grid_constant__ sw_dispatch_args a) \
	{ \
		using namespace sw; \
		SW_SHARED(pass_board, b); \
		make_partials<type, float8>(a, b); \
	}

SW_COMBINE(f32, kind::f32, false)
SW_COMBINE(bf16, kind::bf16, false)
SW_COMBINE(f16, kind::f16, false)
SW_COMBINE(f32_float8, kind::f32, true)
SW_COMBINE(bf16_float8, kind::bf16, true)
SW_COMBINE(f16_float8, kind::f16, true)

// Few tokens by expert whose weights come in the call, which no call that goes on without ranks has.
#define SW_COMBINE_FEW_LATE(suffix, type, float8) \
	extern "C" __global__ void __launch_bounds__(SW_DISPATCH_FEW_SUM_THREADS, 1) \
	    combine_few_late_##suffix(const __grid_constant__ sw_dispatch_args a) \
	{ \
		using namespace sw; \
		SW_SHARED(u32, shared); \
		few_combine<type, float8, true, true>(a, &shared); \
	}

SW_COMBINE_FEW_LATE(f32, kind::f32, false)
SW_COMBINE_FEW_LATE(bf16, kind::bf16, false)
SW_COMBINE_FEW_LATE(f16, kind::f16, false)
SW_COMBINE_FEW_LATE(f32_float8, kind::f32, true)
SW_COMBINE_FEW_LATE(bf16_float8, kind::bf16, true)
SW_COMBINE_FEW_LATE(f16_float8, kind::f16, true)

#define SW_SPREAD(suffix, type) \
	extern "C" __global__ void __launch_bounds__(SW_DISPATCH_PASS_THREADS) \
	    experts_spread_##suffix(const __grid_constant__ sw_dispatch_args a) \
	{ \
		using namespace sw; \
		SW_SHARED(staged_rows, staged); \
		spread_gradients<type>(a, staged); \
	}

SW_SPREAD(f32, kind::f32)
SW_SPREAD(bf16, kind::bf16)
SW_SPREAD(f16, kind::f16)

// The first half of a combine by itself: tells the peers where the rows are.
extern "C" __global__ void __launch_bounds__(SW_MAX_RANKS, 1) combine_begin(const __grid_constant__ sw_dispatch_args a)
{
	using namespace sw;
	call now = call::open(a.world);
	u64 epoch = now.epoch();
	if (epoch == 0)
		return;
	if (threadIdx.x < a.world.size && threadIdx.x != a.world.rank)
		signal_begin(a, threadIdx.x, epoch, 0);
	__syncthreads();
	if (threadIdx.x == 0)
		now.advance();
}

extern "C" __global__ void __launch_bounds__(SW_DISPATCH_FEW_SUM_THREADS, 1)
    combine_weights(const __grid_constant__ sw_dispatch_args a)
{
	using namespace sw;
	SW_SHARED(combine_board, b);
	combine_beside(a, b);
}

// The second half of a token-major dispatch by itself. One block.
extern "C" __global__ void __launch_bounds__(SW_DISPATCH_THREADS, 1)
    dispatch_receive(const __grid_constant__ sw_dispatch_args a)
{
	using namespace sw;
	SW_SHARED(receive_board, b);
	call now = call::open(a.world);
	if (!now.begins())
		return;
	rows_receiver{a, b.sum, now.begun()}.finish((a.mode & SW_DISPATCH_CACHED) != 0);
}

// Counts of a token-major dispatch for the host, while the kernel before it sends. This kernel counts the call. One
// block.
extern "C" __global__ void __launch_bounds__(SW_DISPATCH_COUNTS_THREADS, 1)
    dispatch_counts(const __grid_constant__ sw_dispatch_args a)
{
	using namespace sw;
	SW_SHARED(counts_board, b);
	call now = call::look(a.world);
	u64 epoch = now.epoch();
	if (now.begins()) {
		if (now.advance_by_last())
			fence_acq_rel_sys(); // for a kernel that begins behind this one's release
		counts_teller{a, b, epoch}.run();
	}
	release_stream();
	await_stream(); // what comes behind this kernel comes behind that one
}

// Rows from staging to their experts: the second half of an expert-major dispatch. With SW_DISPATCH_BESIDE it begins
// while the kernel before it runs, which sends.
extern "C" __global__ void __launch_bounds__(SW_DISPATCH_PASS_THREADS, 1)
    experts_take(const __grid_constant__ sw_dispatch_args a)
{
	using namespace sw;
	SW_DYNAMIC_LINES(memory);
	SW_SHARED(take_board, b);
	bool beside = (a.mode & SW_DISPATCH_BESIDE) != 0;
	call now = beside ? call::look(a.world) : call::open(a.world);
	u64 epoch = beside ? now.epoch() : now.begun();
	if (threadIdx.x < SW_MAX_RANKS)
		b.sum[threadIdx.x] = 0;
	if (threadIdx.x < a.movers)
		b.full[threadIdx.x].init();
	fence_bulk();
	bool good = now.begins();
	if (good && beside)
		now.advance_by_last();
	taker t(a, b, reinterpret_cast<u8 *>(memory), epoch);
	good = good && t.prepare();
	if (!good && blockIdx.x == 0)
		taker::tell_none(a);
	good = good && t.copy_as_they_come();
	if (!__syncthreads_or(!good) && blockIdx.x == 0) {
		good = !__syncthreads_or(!rows_receiver{a, b.sum, epoch}.await(threadIdx.x, blockDim.x));
		if (good && threadIdx.x < t.n && !t.cached)
			state::arrived(a)[threadIdx.x] = b.sum[threadIdx.x];
	}
	bulk_await();
	release_stream();
	if (beside)
		await_stream(); // what comes behind this kernel comes behind that one
}
