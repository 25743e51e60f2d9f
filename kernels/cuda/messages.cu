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
		receive(m, b);
	else
		send(m, b);
	if (threadIdx.x == 0)
		dismiss(m, b);
}
