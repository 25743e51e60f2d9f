/* Arguments of the CUDA kernels and the words they share with Go. nvcc reads this file for the kernels and cgo for the
 * test that Go's encoding agrees with it. Offsets count bytes from the start of a rank's segment unless said otherwise. */
#ifndef SWITCHYARD_ARGS_H
#define SWITCHYARD_ARGS_H

#include <stdint.h>

enum {
	SW_MAX_RANKS = 64,

	/* A line: what one rank writes for another with one or two 16-byte stores. */
	SW_LINE_BYTES = 32,

	/* Packets: 16 bytes on the wire carry 12 bytes and a 32-bit flag. A group is what one warp moves: 4 packets a thread. */
	SW_PACKET_GROUP_PAYLOAD = 1536,
	SW_PACKET_GROUP_BYTES = 2048,
	SW_PACKET_HEADER_BYTES = 128, /* before the first group; its first packet carries the message's length */

	/* Threads of a block of the alltoallv kernel: some send, two warps watch what peers write, the others receive. */
	SW_SEND_THREADS = 384,
	SW_WATCH_THREADS = 64,
	SW_RECV_THREADS = 320,
	SW_PACKET_THREADS = 1024,
	SW_COPY_THREADS = 256,
	SW_OWN_THREADS = 512,

	/* What a block keeps in shared memory of a lane of the messages to and from a peer. */
	SW_ITEM_BYTES = 128,

	/* What one warp of them moves at a time. */
	SW_TILE_BYTES = 4096,

	/* The alias table in a rank's segment, and how a place names a row of it: kernels.AliasOffset and kernels.AliasShift. */
	SW_ALIAS_OFFSET = 8192,
	SW_ALIAS_SHIFT = 48,

	/* Messages below this take fewer lanes. Both ends must agree. */
	SW_LANE_MIN_BYTES = 16384,
};

/* Flags of an exchange. */
enum {
	SW_STAGED = 1, /* take messages in through staging even where peers could write dst */
	SW_MESH = 2,   /* every block begins with another peer */
};

/* Kinds of a fault. */
enum {
	SW_FAULT_NONE = 0,
	SW_FAULT_TIMEOUT = 1,  /* waited for peer for too long */
	SW_FAULT_ABORTED = 2,  /* saw the abort word */
	SW_FAULT_MISMATCH = 3, /* the two ends disagree on the size: sent and expected */
	SW_FAULT_SPLITS = 5,   /* splits in device memory reach past a buffer: sent holds the bytes, expected the offset */
	SW_FAULT_PLACE = 4,    /* the receiver of a copy wants it elsewhere: sent holds the caller's offset, expected the receiver's */
};

/* What a kernel that gave up left behind, in pinned host memory. kind is written last. */
struct sw_fault {
	uint32_t kind;
	uint32_t peer;
	uint64_t epoch;
	uint64_t sent, expected, limit;
	uint32_t sending; /* 1: this rank was sending to peer, 0: receiving */
	uint32_t pad;
};

/* The words of a control block that only its own rank touches. */
struct sw_control {
	uint64_t epoch;   /* calls so far */
	uint32_t readers; /* blocks of the running kernel that have read epoch */
	uint32_t fault;   /* kind of the first fault; later kernels return at once, except after a mismatch */
};

/* A step of an exchange: the rank that this rank sends to in it, the one it receives from, and what. What one warp needs lies
 * together, because a first access to a line of arguments takes as long as one to memory. */
struct sw_step {
	uint32_t to, from;
	int64_t send_bytes, send_offset;
	int64_t recv_bytes, recv_offset;
};

struct sw_exchange_args {
	uint64_t base;   /* this rank's segment lies at base + rank*stride, and so do all others where segments is 0 */
	uint64_t stride; /* distance of two ranks' segments */
	uint64_t src, dst;
	int64_t dst_offset; /* place of dst in this rank's segment, or -1: peers cannot write it */
	uint64_t splits;    /* address of int64 [4][size]: send bytes, send offsets, receive bytes, receive offsets by rank; 0: they are below */
	uint64_t fault;     /* address of a struct sw_fault */
	uint64_t timeout_ns;

	uint64_t control;
	uint64_t signals;      /* [2][size][lanes] lines: {seq, total}, and of a message through staging {seq of its end, seq} */
	uint64_t credits;      /* [size] lines: {seq, offset or SW_NOWHERE} {seq, total} */
	uint64_t lane_credits; /* [size][lanes] lines: {seq of the last chunk taken out of staging, 0} */
	uint64_t packets;      /* [2][size][packet_stride] */
	uint64_t packet_stride;
	int64_t packet_bytes; /* messages up to this are packets */
	uint64_t slots;       /* [size][lanes][slot_count][slot_bytes] */
	int64_t slot_bytes;

	uint32_t rank, size;
	uint32_t lanes, slot_count;
	uint32_t flags;
	uint32_t interval; /* cycles from one tile of a block to the next; 0: as they come */
	uint32_t inverse;  /* 2^32/(size-1), rounded up; 0 where size-1 < 2 */
	uint32_t senders;  /* blocks that send; as many more copy messages out of staging. 0: every block does both */

	int64_t src_bytes, dst_bytes; /* how long the buffers are; looked at where splits are not below */

	uint64_t segments; /* address of uint64 [size]: the ranks' segments; or 0 */

	int64_t own_bytes, own_src, own_dst; /* what stays on this rank */
	struct sw_step steps[SW_MAX_RANKS];  /* size-1 of them */
};

/* An exchange by the copy engines: where in each peer's segment this rank's message goes, as the host knows it. */
struct sw_copy_args {
	struct sw_exchange_args exchange;
	int64_t places[SW_MAX_RANKS];
};

#define SW_NOWHERE 0xffffffffffffffffull

#endif
