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

	/* Threads of a block of the alltoallv kernel: some send, one warp watches over them, the others receive. */
	SW_SEND_THREADS = 512,
	SW_PILOT_THREADS = 32,
	SW_BULK_THREADS = 32,
	SW_RECV_THREADS = 192,
	SW_PACKET_THREADS = 1024,
	SW_COPY_THREADS = 256,

	/* Tiles of shared memory between the bulk copy engine's loads and stores: how many, of what size, how many loads run
	 * ahead of their stores, and how many stores may be under way. */
	SW_BULK_STAGES = 13,
	SW_BULK_BYTES = 16384,
	SW_BULK_AHEAD = 4,
	SW_BULK_STORES = 8,

	/* Messages below this take fewer lanes. Both ends must agree. */
	SW_LANE_MIN_BYTES = 16384,
};

/* Flags of an exchange. */
enum {
	SW_STAGED = 1, /* take messages in through staging even where peers could write dst */
	SW_MESH = 2,   /* every block begins with another peer */
	SW_BULK = 8,   /* move aligned messages with the bulk copy engine (sm_90 and later) */
	SW_PACED = 4,  /* begin step i+1 when the message of step i has arrived but for `slack` chunks */
};

/* Kinds of a fault. */
enum {
	SW_FAULT_NONE = 0,
	SW_FAULT_TIMEOUT = 1,  /* waited for peer for too long */
	SW_FAULT_ABORTED = 2,  /* saw the abort word */
	SW_FAULT_MISMATCH = 3, /* the two ends disagree on the size: sent and expected */
	SW_FAULT_PLACE = 4,    /* the receiver of a copy wants it elsewhere: sent holds the caller's offset, expected the receiver's */
};

/* What a kernel that gave up left behind, in pinned host memory. kind is written last. */
struct sw_fault {
	uint32_t kind;
	uint32_t peer;
	uint64_t epoch;
	uint64_t sent, expected;
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
	uint64_t base;   /* address of rank 0's segment */
	uint64_t stride; /* distance of two ranks' segments */
	uint64_t src, dst;
	int64_t dst_offset; /* place of dst in this rank's segment, or -1: peers cannot write it */
	uint64_t splits;    /* address of int64 [4][size]: send bytes, send offsets, receive bytes, receive offsets by rank; 0: they are below */
	uint64_t fault;     /* address of a struct sw_fault */
	uint64_t timeout_ns;

	uint64_t control;
	uint64_t signals;      /* [2][size][lanes] lines: {seq, total} {seq of the last chunk that has left, 0} */
	uint64_t credits;      /* [size] lines: {seq, offset or SW_NOWHERE} {seq, total} */
	uint64_t lane_credits; /* [size][lanes] lines: {seq of the last chunk taken out of staging, 0} */
	uint64_t packets;      /* [2][size][packet_stride] */
	uint64_t packet_stride;
	int64_t packet_bytes; /* messages up to this are packets */
	uint64_t slots;       /* [size][lanes][slot_count][slot_bytes] */
	int64_t slot_bytes;   /* also the size of a chunk where messages are written in place */

	uint32_t rank, size;
	uint32_t lanes, slot_count;
	uint32_t flags;
	uint32_t slack;
	uint32_t inverse; /* 2^32/(size-1), rounded up; 0 where size-1 < 2 */
	uint32_t pad;

	int64_t own_bytes, own_src, own_dst; /* what stays on this rank */
	struct sw_step steps[SW_MAX_RANKS];  /* size-1 of them */
};

/* An exchange by the copy engines: where in each peer's segment this rank's message goes, as the host knows it. */
struct sw_copy_args {
	struct sw_exchange_args exchange;
	int64_t places[SW_MAX_RANKS];
};

/* A copy by multiprocessors. */
struct sw_move_args {
	uint64_t dst, src;
	int64_t bytes;
};

#define SW_NOWHERE 0xffffffffffffffffull

#endif
