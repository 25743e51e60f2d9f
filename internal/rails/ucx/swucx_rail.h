// The types of a rail, which the C files of this package share.
#ifndef SWUCX_RAIL_H
#define SWUCX_RAIL_H

#include "swucx.h"

#include <stdint.h>

enum {
	OK = 0,
	IN_PROGRESS = 1,
	UNREACHABLE = -6,
	NO_DEVICE = -14,
	BUSY = -15,

	FEATURE_WAKEUP = 1 << 4,
	FEATURE_AM = 1 << 6,
	PARAM_FEATURES = 1 << 0,
	WORKER_THREAD_MODE = 1 << 0,
	THREAD_SERIALIZED = 1,
	EP_ADDRESS = 1 << 0,
	EP_ERR_MODE = 1 << 1,
	EP_ERR_HANDLER = 1 << 2,
	ERR_MODE_PEER = 1,
	HANDLER_ID = 1 << 0,
	HANDLER_CB = 1 << 2,
	HANDLER_ARG = 1 << 3,
	OP_CALLBACK = 1 << 1,
	OP_USER_DATA = 1 << 2,
	OP_FLAGS = 1 << 4,
	CLOSE_FORCE = 1 << 0,
	RECV_RNDV = 1 << 17,

	AM_PUT = 7,
	GREETING = -8, // in place of a word: the put says that its rank has connected
	MAX_WINDOWS = 4096,
};

// The last is of libucs, which libucp brings along.
#define ENTRIES(X) \
	X(ucp_init_version, int8_t, (unsigned, unsigned, const swu_params *, const void *, void **)) \
	X(ucp_cleanup, void, (void *)) \
	X(ucp_config_read, int8_t, (const char *, const char *, void **)) \
	X(ucp_config_modify, int8_t, (void *, const char *, const char *)) \
	X(ucp_config_release, void, (void *)) \
	X(ucp_get_version, void, (unsigned *, unsigned *, unsigned *)) \
	X(ucp_worker_create, int8_t, (void *, const swu_worker_params *, void **)) \
	X(ucp_worker_destroy, void, (void *)) \
	X(ucp_worker_progress, unsigned, (void *)) \
	X(ucp_worker_get_efd, int8_t, (void *, int *)) \
	X(ucp_worker_arm, int8_t, (void *)) \
	X(ucp_worker_signal, int8_t, (void *)) \
	X(ucp_worker_get_address, int8_t, (void *, void **, size_t *)) \
	X(ucp_worker_release_address, void, (void *, void *)) \
	X(ucp_worker_set_am_recv_handler, int8_t, (void *, const swu_am_handler *)) \
	X(ucp_ep_create, int8_t, (void *, const swu_ep_params *, void **)) \
	X(ucp_ep_close_nbx, void *, (void *, const swu_request_param *)) \
	X(ucp_am_send_nbx, void *, \
	  (void *, unsigned, const void *, size_t, const void *, size_t, const swu_request_param *)) \
	X(ucp_am_recv_data_nbx, void *, (void *, void *, void *, size_t, const swu_request_param *)) \
	X(ucp_request_check_status, int8_t, (void *)) \
	X(ucp_request_free, void, (void *)) \
	X(ucs_status_string, const char *, (int8_t))

// The header that travels in front of the bytes of a put.
typedef struct {
	uint64_t key;
	uint32_t from, zero;
	int64_t place, n, signal;
	uint64_t seq; // of the puts of this rank that name the word
} head;

// A stream is the puts of one rank that name one word.
typedef struct stream {
	struct stream *next;
	struct landing *landings; // that land, or have landed before others
	int64_t signal;
	uint64_t seq; // of the last that was sent, or that the word tells of
	uint32_t peer;
} stream;

typedef struct {
	swu_rail *rail;
	void *ep;
	int8_t failed; // how its connection did, else OK
	int heard;     // its greeting has come,
	int greeted;   // and this rank's to it has left
} peer;

typedef struct sending {
	struct sending *next; // that began after it
	swu_rail *rail;
	peer *to;
	head h;
	int left;
} sending;

typedef struct landing {
	struct landing *next;
	swu_rail *rail;
	stream *s;
	uint64_t seq;
	int landed;
} landing;

enum { BUCKETS = 1024 };

struct swu_rail {
	void *lib;
#define DECLARE(name, result, params) result(*name) params;
	ENTRIES(DECLARE)
#undef DECLARE
	void *context, *worker;
	int efd, closing;
	unsigned major, minor;
	uint32_t rank, size;
	uint64_t key;
	char *segment;
	int64_t bytes;
	struct {
		int64_t off, n;
	} windows[MAX_WINDOWS];
	int window_count;
	peer *peers;
	stream *sent[BUCKETS], *got[BUCKETS];
	sending *oldest, *newest; // puts that have not left, or have before an older one
	swu_counts counts;
};

#define FAIL(...) \
	do { \
		snprintf(why, why_len, __VA_ARGS__); \
		return -1; \
	} while (0)

// status_of is the status that an error in place of a request is.
static inline int8_t status_of(const void *p) { return (int8_t)(intptr_t)p; }

static inline int is_error(const void *p) { return (uintptr_t)p >= (uintptr_t)-100; }

// swu_on_put takes in a put that has come.
int8_t swu_on_put(void *arg, const void *header, size_t header_length, void *data, size_t length,
                  const uint64_t *recv_attr);

#endif
