// The part of an exchange that goes to ranks of other hosts, and comes from there.
//
// A message is cut into chunks for a ring (rings.cuh), the first of which begins with a head: the number of the call,
// the bytes of the message, those that its sender expects in return, and which splits it has refused. So both ends
// know what the other has in mind, counts stay on the GPU, and a receiver takes all chunks of a message whatever it
// thinks of it: rings go on from call to call.
//
// The kernel of the own host (alltoallv.cu) runs before, and counts calls. Half of the blocks send and half receive,
// one message after another: in an order in which who sends in a step meets who receives in it, and an earlier step
// waits for no later one.
#include "alltoallv/packets.cuh"
#include "rings.cuh"

namespace sw {

static_assert(sizeof(sw_across_args) <= 4096);

struct across_head {
	u64 call, sent, expected;
	u64 refuses; // whether its sender has refused its splits; then it has sent nothing
	refused_part part;

	// At the beginning of a chunk in a rail segment.
	__device__ __forceinline__ void store(u64 at) const
	{
		store16_relaxed_sys(at, call, sent);
		store16_relaxed_sys(at + 16, expected, refuses);
		store16_relaxed_sys(at + 32, part.bytes, part.offset);
		store16_relaxed_sys(at + 48, part.limit, part.whose);
	}

	__device__ __forceinline__ void load(u64 at)
	{
		pair64 v = load16_relaxed_sys(at), w = load16_relaxed_sys(at + 16), y = load16_relaxed_sys(at + 32),
		       z = load16_relaxed_sys(at + 48);
		call = v.a, sent = v.b, expected = w.a, refuses = w.b;
		part = {y.a, y.b, z.a, z.b};
	}
};

static_assert(sizeof(across_head) == SW_ACROSS_HEAD);

struct across {
	const sw_across_args &a;
	u64 epoch;

	__device__ __forceinline__ sw_across *words() const
	{
		return reinterpret_cast<sw_across *>(own_segment(a.world) + a.words);
	}

	__device__ __forceinline__ static u32 far(u32 rank) { return SW_FAR_RANK | rank; }

	// The entry for a rank in a row of the splits in device memory; otherwise is that of the arguments.
	__device__ __forceinline__ i64 split(u32 what, u32 rank, i64 otherwise) const
	{
		const i64 *table = reinterpret_cast<const i64 *>(a.splits);
		return table == nullptr ? otherwise : table[what * a.ranks + rank];
	}

	__device__ __forceinline__ u64 ring_bytes() const { return a.slot_count * static_cast<u64>(a.slot_bytes); }

	// The ring to a peer, or from it. Words come first, each on a line of a processor; then the slots of all peers,
	// and the sources of all.
	__device__ __forceinline__ sw_ring ring(u32 p, bool sends) const
	{
		u32 theirs = a.peers[p].theirs, slots_of = sends ? theirs : p, sources_of = sends ? p : theirs;
		u64 bulk = a.rings + 2 * a.count * 64;
		return {bulk + slots_of * ring_bytes(),
		        bulk + (a.count + sources_of) * ring_bytes(),
		        a.rings + 64 * slots_of,
		        a.rings + 64 * (a.count + sources_of),
		        reinterpret_cast<u64>(sends ? &words()->out[p] : &words()->in[p]),
		        a.slot_bytes,
		        a.slot_count,
		        a.gives,
		        a.peers[p].rank,
		        far(a.peers[p].rank)};
	}

	// Whether a rank of this host has refused its splits in this call; the record is then of that.
	__device__ __forceinline__ bool host_refuses(volatile sw_fault *&f) const
	{
		u32 kind = load32_relaxed_gpu(own_segment(a.world) + a.world.control + offsetof(sw_control, fault));
		f = reinterpret_cast<volatile sw_fault *>(a.world.fault);
		return kind == SW_FAULT_SPLITS && f->kind == SW_FAULT_SPLITS && f->epoch == epoch;
	}

	// The head of a message, but for its lengths. One thread.
	__device__ __forceinline__ across_head head() const
	{
		across_head h{};
		h.call = epoch;
		volatile sw_fault *f;
		if (host_refuses(f) && f->peer == a.world.rank) {
			u32 part = f->part;
			h.refuses = 1;
			h.part = {f->sent, f->expected, f->limit,
			          static_cast<u64>(f->sending) << 32 |
			              ((part & SW_FAR_RANK) != 0 ? part : far(a.home[part]))};
		}
		return h;
	}

	// A rank of this host has refused what goes to another host: the kernel of this host cannot say which part. One
	// thread of the rank, once.
	__device__ __forceinline__ void hear_part() const
	{
		volatile sw_fault *f;
		if (!host_refuses(f) || f->peer >= a.world.size || f->peer == a.world.rank)
			return;
		u64 at = segment(a.world, f->peer) + a.words + offsetof(sw_across, refused);
		if (load_relaxed_sys(at) != epoch)
			return;
		pair64 v = load16_relaxed_sys(at + 16), w = load16_relaxed_sys(at + 32);
		f->sent = v.a;
		f->expected = v.b;
		f->limit = w.a;
		f->sending = static_cast<u32>(w.b >> 32);
		f->part = static_cast<u32>(w.b);
		__threadfence_system();
	}

	// All threads of a block send a message. at is theirs; false when it was given up.
	__device__ __forceinline__ bool send(u32 p, u64 &at, across_head &h) const
	{
		const sw_across_peer &m = a.peers[p];
		i64 bytes = split(0, m.rank, m.send_bytes);
		u64 from = a.src + split(1, m.rank, m.send_offset);
		sw_ring r = ring(p, true);
		ring_out out(a.world, a.rail, r, epoch);
		if (threadIdx.x == 0) {
			h = head();
			h.sent = h.refuses != 0 ? 0 : bytes;
			h.expected = split(2, m.rank, m.recv_bytes);
		}
		__syncthreads();
		bytes = static_cast<i64>(h.sent);
		u64 done = 0, lead = SW_ACROSS_HEAD;
		do {
			i64 n = min(bytes - static_cast<i64>(done), a.slot_bytes - static_cast<i64>(lead));
			if (threadIdx.x == 0) {
				at = out.await_slot();
				if (at != 0 && lead != 0)
					h.store(at);
			}
			__syncthreads();
			u64 to = at;
			if (to == 0)
				return false;
			move(to + lead, from + done, n, threadIdx.x / 32, SW_ACROSS_THREADS / 32, threadIdx.x & 31);
			__syncthreads();
			if (threadIdx.x == 0) {
				at = out.send(n + lead) ? 1 : 0;
				tell_moved(moved_word(a.world, a.world.rank));
			}
			__syncthreads();
			if (at == 0)
				return false;
			__syncthreads(); // all have read it
			done += n, lead = 0;
		} while (static_cast<i64>(done) < bytes);
		if (threadIdx.x == 0)
			out.keep();
		return true;
	}

	// Whether a message may be taken, by its head. A disagreement goes to the fault record. One thread.
	__device__ __forceinline__ bool agrees(const across_head &h, u32 rank, i64 sends, i64 expects) const
	{
		volatile sw_fault *f;
		if (h.call != epoch)
			give_up(a.world, SW_FAULT_ORDER, far(rank), epoch, false, h.call, epoch);
		else if (h.refuses != 0)
			h.part.record(a.world, far(rank), epoch);
		else if (host_refuses(f) && f->peer == a.world.rank)
			return false;
		else if (h.sent != static_cast<u64>(expects))
			give_up(a.world, SW_FAULT_MISMATCH, far(rank), epoch, false, h.sent, expects);
		else if (h.expected != static_cast<u64>(sends))
			give_up(a.world, SW_FAULT_MISMATCH, far(rank), epoch, true, sends, h.expected);
		else
			return true;
		return h.call == epoch && h.refuses == 0 && h.sent == static_cast<u64>(expects);
	}

	// All threads of a block take a message. at, h and take are theirs; false when it was given up.
	__device__ __forceinline__ bool receive(u32 p, u64 &at, across_head &h, u32 &take) const
	{
		const sw_across_peer &m = a.peers[p];
		u64 to = a.dst + split(3, m.rank, m.recv_offset);
		sw_ring r = ring(p, false);
		ring_in in(a.world, a.rail, r, epoch);
		u64 done = 0, lead = SW_ACROSS_HEAD;
		do {
			if (threadIdx.x == 0) {
				at = in.await_chunk();
				if (at != 0 && lead != 0) {
					h.load(at);
					take = agrees(h, m.rank, split(0, m.rank, m.send_bytes),
					              split(2, m.rank, m.recv_bytes));
				}
			}
			__syncthreads();
			u64 from = at;
			if (from == 0)
				return false;
			i64 n = min(static_cast<i64>(h.sent - done), a.slot_bytes - static_cast<i64>(lead));
			if (take != 0)
				move(to + done, from + lead, n, threadIdx.x / 32, SW_ACROSS_THREADS / 32,
				     threadIdx.x & 31);
			done += n, lead = 0;
			__syncthreads();
			if (threadIdx.x == 0) {
				at = in.give_back() ? 1 : 0;
				tell_moved(moved_word(a.world, a.world.rank));
			}
			__syncthreads();
			if (at == 0)
				return false;
			__syncthreads(); // all have read it
		} while (done < h.sent);
		if (threadIdx.x == 0)
			in.keep();
		__syncthreads(); // all have read the head
		return true;
	}
};

} // namespace sw

extern "C" __global__ void __launch_bounds__(SW_ACROSS_THREADS, 1)
    alltoallv_across(const __grid_constant__ sw_across_args a)
{
	using namespace sw;
	SW_SHARED(u64, at);
	SW_SHARED(across_head, head);
	SW_SHARED(u32, take);
	call now = call::look(a.world);
	across x{a, now.begun()};
	if (now.begins()) { // else a kernel before has failed
		u32 half = gridDim.x / 2, mine = blockIdx.x % half;
		bool sends = blockIdx.x < half;
		if (blockIdx.x == 0 && threadIdx.x == 0)
			x.hear_part();
		for (u32 i = mine; i < a.count; i += half)
			if (sends ? !x.send(a.to[i], at, head) : !x.receive(a.from[i], at, head, take))
				break;
	}
	__syncthreads();
	if (threadIdx.x == 0 && add_acq_rel_gpu(&x.words()->ended, 1) == gridDim.x - 1) {
		x.words()->ended = 0;
		put_queue{a.rail.queue}.end_kernel();
	}
}

// Makes splits for the kernel of the own host of those in device memory, and refuses them where a part of another host
// reaches past a buffer: a length below 0 then has that kernel tell the ranks of this host. One block, in front of that
// kernel.
extern "C" __global__ void __launch_bounds__(SW_ACROSS_HOME_THREADS, 1)
    alltoallv_home(const __grid_constant__ sw_across_args a)
{
	using namespace sw;
	SW_SHARED(u32, first); // of the parts that reach past a buffer
	call now = call::look(a.world);
	u64 epoch = now.epoch();
	across x{a, epoch};
	u32 t = threadIdx.x;
	i64 *splits = x.words()->splits;
	if (t == 0)
		first = ~0u;
	__syncthreads();
	for (u32 i = t; i < 4 * a.world.size; i += blockDim.x)
		splits[i] = x.split(i / a.world.size, a.home[i % a.world.size], 0);
	for (u32 i = t; i < 2 * a.count; i += blockDim.x) {
		u32 row = i % 2 * 2, rank = a.peers[i / 2].rank;
		if (gathered::past(x.split(row, rank, 0), x.split(row + 1, rank, 0),
		                   row == 0 ? a.src_bytes : a.dst_bytes))
			atomicMin(&first, i);
	}
	__syncthreads();
	if (t != 0 || first == ~0u || epoch == 0)
		return;
	u32 row = first % 2 * 2, rank = a.peers[first / 2].rank;
	u64 sending = row == 0;
	refused_part part{static_cast<u64>(x.split(row, rank, 0)), static_cast<u64>(x.split(row + 1, rank, 0)),
	                  static_cast<u64>(row == 0 ? a.src_bytes : a.dst_bytes), sending << 32 | across::far(rank)};
	part.record(a.world, a.world.rank, epoch);
	u64 told = reinterpret_cast<u64>(x.words()->refused);
	part.store(told);
	store_relaxed_sys(told, epoch);
	splits[a.world.rank] = -1;
}
