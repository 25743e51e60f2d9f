// Messages between two ranks. A launch has a messenger for each rank and direction, so none waits for another:
//
//	messenger  what its blocks do together
//	sending    the leader of one that sends
//	receiving  the leader of one that receives
//
// Launches of one rank and direction follow each other.
#include "messages/receiving.cuh"
#include "messages/sending.cuh"

extern "C" __global__ void __launch_bounds__(SW_MESSAGE_THREADS)
    p2p_messages(const __grid_constant__ sw_messages_args a)
{
	using namespace sw;
	await_stream();
	release_stream();
	messenger m(a);
	if (m.block > 0) {
		follow(m);
		return;
	}
	SW_SHARED(leader_board, b);
	if (m.receives)
		receive<false>(m, b);
	else
		send<false>(m, b);
	if (threadIdx.x == 0)
		dismiss(m, b);
}

// The same where all messages fit into boxes and none is received from any rank. It is a kernel of its own, because
// what a small message costs is the instructions that are fetched for it.
extern "C" __global__ void __launch_bounds__(SW_FEW_MESSAGE_THREADS)
    p2p_few_messages(const __grid_constant__ sw_messages_args a)
{
	using namespace sw;
	await_stream();
	release_stream();
	messenger m(a);
	SW_SHARED(leader_board, b);
	if (m.receives)
		receive<true>(m, b);
	else
		send<true>(m, b);
}
