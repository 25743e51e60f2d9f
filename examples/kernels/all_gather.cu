// An all-gather of one's own: every rank writes its part into the outputs of all others. out is symmetric memory.
#include "switchyard.cuh"

struct all_gather_args {
	const switchyard::communicator *world;
	uint64_t *out;      // the parts of all ranks, at the same place of every rank's heap
	const uint64_t *in; // this rank's part, in any memory
	uint64_t count;     // words of a part
};

extern "C" __global__ void all_gather(const all_gather_args a)
{
	switchyard::call call(a.world);
	if (!call.begun())
		return;
	uint32_t begins = 2 * blockIdx.x, written = begins + 1; // signals of this block and of its like on other ranks
	for (uint32_t i = 0; i < call.size(); i++)
		call.signal(i, begins); // what lies in my output has been used
	for (uint32_t i = 0; i < call.size(); i++) {
		uint32_t peer = (call.rank() + i) % call.size();
		if (!call.wait(peer, begins))
			return;
		uint64_t *part = call.at(peer, a.out) + call.rank() * a.count;
		for (uint64_t k = blockIdx.x * blockDim.x + threadIdx.x; k < a.count; k += gridDim.x * blockDim.x)
			part[k] = a.in[k];
		call.signal(peer, written);
	}
	for (uint32_t i = 0; i < call.size(); i++)
		if (!call.wait(i, written))
			return;
}
