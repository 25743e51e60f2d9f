// swucx.h: what this package uses of UCX (libucp 1.13 or newer), which is opened at run time. The structures are those
// of ucp.h, as far as their first fields; a mask says which fields count, and the library reads no others. A test
// compares them with the header.
#ifndef SWUCX_H
#define SWUCX_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
	uint64_t mask;
	uint64_t features;
	char rest[112];
} swu_params;

typedef struct {
	uint64_t mask;
	int32_t thread_mode;
	char rest[308];
} swu_worker_params;

typedef struct {
	uint64_t mask;
	const void *address;
	int32_t err_mode;
	void (*err_handler)(void *arg, void *ep, int8_t status);
	void *err_arg;
	char rest[216];
} swu_ep_params;

typedef struct {
	uint64_t mask;
	uint32_t id;
	uint32_t flags;
	int8_t (*cb)(void *arg, const void *header, size_t header_length, void *data, size_t length,
	             const uint64_t *recv_attr);
	void *arg;
} swu_am_handler;

typedef struct {
	uint32_t mask;
	uint32_t flags;
	void *request;
	union {
		void (*send)(void *request, int8_t status, void *user_data);
		void (*recv)(void *request, int8_t status, size_t length, void *user_data);
	} cb;
	uint64_t datatype;
	void *user_data;
	char rest[88];
} swu_request_param;

// A rail is not safe for several threads: its caller locks.
typedef struct swu_rail swu_rail;

typedef struct {
	uint64_t landed;   // puts
	uint64_t refused;  // messages
	uint64_t sending;  // puts whose memory is still read
	uint64_t begun;    // puts of this rank so far
	uint64_t left;     // of those, from the first on, the ones whose memory is read no more
	uint64_t failures; // of connections
} swu_counts;

// Functions return 0 or a text in why.
// swu_open makes a rail over these devices, UCX's own choice where there are none. port is where it listens for TCP.
// It returns -2 where another port may help.
int swu_open(swu_rail **out, uint32_t rank, uint32_t size, uint64_t key, void *segment, int64_t bytes,
             const char *devices, unsigned port, char *why, size_t why_len);
int swu_version(const swu_rail *r, unsigned *major, unsigned *minor);
int swu_efd(const swu_rail *r);
int swu_address(swu_rail *r, void *out, size_t room, size_t *n, char *why, size_t why_len);
int swu_connect(swu_rail *r, uint32_t peer, const void *address, char *why, size_t why_len);
// swu_met says whether the connection with a peer stands; 1 also for one with which nobody has connected it. swu_settle
// gives all those that have begun this many nanoseconds to stand, and returns 0 if one does not: UCX 1.13.1 aborts the
// process that closes it then (wireup_ep.c: pending_count == 0). Nothing lands any more.
int swu_met(const swu_rail *r, uint32_t peer);
int swu_settle(swu_rail *r, int64_t within);
int swu_window(swu_rail *r, int64_t off, int64_t n);
int swu_put(swu_rail *r, uint32_t peer, int64_t place, const void *src, int64_t n, int64_t signal, char *why,
            size_t why_len);
void swu_forget(swu_rail *r, int64_t from, int64_t to);
const char *swu_failed(const swu_rail *r, uint32_t peer); // how a connection has failed, NULL for one that has not
unsigned swu_progress(swu_rail *r);
int swu_arm(swu_rail *r); // 1: there is something to do
void swu_wake(swu_rail *r);
void swu_counted(const swu_rail *r, swu_counts *out);
void swu_close(swu_rail *r);

#endif
