// go:build cgo && linux

#define _GNU_SOURCE
#include "swucx.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
	OK = 0,
	IN_PROGRESS = 1,
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
	MAX_WINDOWS = 4096,
};

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
	X(ucp_request_free, void, (void *))

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
	struct early *early; // that have landed before others
	int64_t signal;
	uint64_t seq; // of the last that was sent, or that the word tells of
	uint32_t peer;
} stream;

typedef struct early {
	struct early *next;
	uint64_t seq;
} early;

typedef struct {
	swu_rail *rail;
	void *ep;
	int failed;
} peer;

typedef struct {
	swu_rail *rail;
	head h;
} sending;

typedef struct {
	swu_rail *rail;
	stream *s;
	uint64_t seq;
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
	swu_counts counts;
};

#define FAIL(...) \
	do { \
		snprintf(why, why_len, __VA_ARGS__); \
		return -1; \
	} while (0)

static int is_error(const void *p) { return (uintptr_t)p >= (uintptr_t)-100; }

static stream *find(stream **table, uint32_t peer, int64_t signal)
{
	stream **at = &table[((uint64_t)signal / 8 * 31 + peer) % BUCKETS];
	for (stream *s = *at; s != NULL; s = s->next)
		if (s->peer == peer && s->signal == signal)
			return s;
	stream *s = calloc(1, sizeof *s);
	if (s == NULL)
		return NULL;
	s->peer = peer, s->signal = signal, s->next = *at;
	return *at = s;
}

static int is_open(const swu_rail *r, int64_t off, int64_t n)
{
	for (int i = 0; i < r->window_count; i++) {
		int64_t from = r->windows[i].off, to = from + r->windows[i].n;
		if (off >= from && off <= to && n <= to - off)
			return 1;
	}
	return 0;
}

// publish raises the word once all puts up to seq have landed.
static void publish(swu_rail *r, stream *s, uint64_t seq)
{
	r->counts.landed++;
	if (seq != s->seq + 1) {
		early *e = malloc(sizeof *e);
		if (e == NULL)
			abort();
		e->seq = seq, e->next = s->early, s->early = e;
		return;
	}
	s->seq = seq;
	for (early **at = &s->early; *at != NULL;) {
		early *e = *at;
		if (e->seq != s->seq + 1) {
			at = &e->next;
			continue;
		}
		s->seq = e->seq;
		*at = e->next;
		free(e);
		at = &s->early;
	}
	__atomic_store_n((uint64_t *)(r->segment + s->signal), s->seq, __ATOMIC_SEQ_CST);
}

static void on_landed(void *request, int8_t status, size_t length, void *arg)
{
	landing *l = arg;
	swu_rail *r = l->rail;
	(void)length;
	if (status == OK)
		publish(r, l->s, l->seq);
	else
		r->peers[l->s->peer].failed = 1, r->counts.failures++;
	free(l);
	if (request != NULL)
		r->ucp_request_free(request);
}

static int8_t on_put(void *arg, const void *header, size_t header_length, void *data, size_t length,
                     const uint64_t *recv_attr)
{
	swu_rail *r = arg;
	head h;
	if (r->closing)
		return OK;
	if (header_length != sizeof h)
		goto refuse;
	memcpy(&h, header, sizeof h);
	if (h.key != r->key || h.zero != 0 || h.from >= r->size || h.from == r->rank || h.n < 0 ||
	    (uint64_t)h.n != length || h.place < 0 || h.signal < 0 || h.signal % 8 != 0 || !is_open(r, h.signal, 8) ||
	    (h.n > 0 && !is_open(r, h.place, h.n)))
		goto refuse;
	stream *s = find(r->got, h.from, h.signal);
	if (s == NULL || h.seq <= s->seq)
		goto refuse;
	if (!(*recv_attr & RECV_RNDV)) {
		memcpy(r->segment + h.place, data, h.n);
		publish(r, s, h.seq);
		return OK;
	}
	landing *l = malloc(sizeof *l);
	if (l == NULL)
		goto refuse;
	*l = (landing){r, s, h.seq};
	swu_request_param p = {.mask = OP_CALLBACK | OP_USER_DATA, .cb.recv = on_landed, .user_data = l};
	void *q = r->ucp_am_recv_data_nbx(r->worker, data, r->segment + h.place, h.n, &p);
	if (q == NULL)
		on_landed(NULL, OK, h.n, l);
	else if (is_error(q))
		on_landed(NULL, -1, 0, l);
	return IN_PROGRESS;
refuse:
	r->counts.refused++;
	return OK;
}

static void on_sent(void *request, int8_t status, void *arg)
{
	sending *s = arg;
	swu_rail *r = s->rail;
	(void)status; // a peer that is gone is noticed by its error handler
	r->counts.sending--;
	free(s);
	if (request != NULL)
		r->ucp_request_free(request);
}

static void on_failure(void *arg, void *ep, int8_t status)
{
	peer *p = arg;
	(void)ep, (void)status;
	p->failed = 1;
	p->rail->counts.failures++;
}

// UCX would take over the signals that Go handles, print to standard output, and patch the calls that map memory, which
// Go makes without it.
static void quiet(void)
{
	setenv("UCX_ERROR_SIGNALS", "", 0);
	setenv("UCX_HANDLE_ERRORS", "none", 0);
	setenv("UCX_LOG_LEVEL", "fatal", 0);
	setenv("UCX_MEM_EVENTS", "no", 0);
}

static int open_worker(swu_rail *r, char *why, size_t why_len)
{
	void *config = NULL;
	if (r->ucp_config_read(NULL, NULL, &config) != OK)
		FAIL("ucp_config_read failed");
	// Larger messages shake hands, which waits behind bulk data.
	r->ucp_config_modify(config, "RNDV_THRESH", "256k");
	// UCX 1.13.1 aborts the process when a peer goes while it sends to it without a copy over TCP (uct_iface.h:
	// comp->count > 0): in 6 of 40 runs of the test that closes an end. 1.22.0 does not. Those between were not
	// tried.
	if (r->major == 1 && r->minor < 22)
		r->ucp_config_modify(config, "ZCOPY_THRESH", "inf");
	swu_params p = {.mask = PARAM_FEATURES, .features = FEATURE_AM | FEATURE_WAKEUP};
	int8_t status = r->ucp_init_version(1, 13, &p, config, &r->context);
	r->ucp_config_release(config);
	if (status != OK)
		FAIL("ucp_init: status %d", status);
	swu_worker_params wp = {.mask = WORKER_THREAD_MODE, .thread_mode = THREAD_SERIALIZED};
	if ((status = r->ucp_worker_create(r->context, &wp, &r->worker)) != OK)
		FAIL("ucp_worker_create: status %d", status);
	if ((status = r->ucp_worker_get_efd(r->worker, &r->efd)) != OK)
		FAIL("ucp_worker_get_efd: status %d", status);
	swu_am_handler h = {.mask = HANDLER_ID | HANDLER_CB | HANDLER_ARG, .id = AM_PUT, .cb = on_put, .arg = r};
	if ((status = r->ucp_worker_set_am_recv_handler(r->worker, &h)) != OK)
		FAIL("ucp_worker_set_am_recv_handler: status %d", status);
	return 0;
}

int swu_open(swu_rail **out, uint32_t rank, uint32_t size, uint64_t key, void *segment, int64_t bytes, char *why,
             size_t why_len)
{
	*out = NULL;
	quiet();
	void *lib = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
	if (lib == NULL) {
		const char *e = dlerror();
		FAIL("%s", e != NULL ? e : "libucp.so.0 cannot be opened");
	}
	swu_rail *r = calloc(1, sizeof *r);
	if (r == NULL || (r->peers = calloc(size, sizeof *r->peers)) == NULL) {
		free(r);
		dlclose(lib);
		FAIL("out of memory");
	}
	r->lib = lib, r->rank = rank, r->size = size, r->key = key, r->segment = segment, r->bytes = bytes, r->efd = -1;
	const char *missing = NULL;
#define LOAD(name, result, params) \
	if ((*(void **)&r->name = dlsym(lib, #name)) == NULL) \
		missing = #name;
	ENTRIES(LOAD)
#undef LOAD
	if (missing != NULL) {
		snprintf(why, why_len, "libucp.so.0 has no %s (older than UCX 1.13)", missing);
		swu_close(r);
		return -1;
	}
	unsigned release;
	r->ucp_get_version(&r->major, &r->minor, &release);
	if (open_worker(r, why, why_len) != 0) {
		swu_close(r);
		return -1;
	}
	*out = r;
	return 0;
}

int swu_version(const swu_rail *r, unsigned *major, unsigned *minor)
{
	*major = r->major, *minor = r->minor;
	return 0;
}

int swu_efd(const swu_rail *r) { return r->efd; }

int swu_address(swu_rail *r, void *out, size_t room, size_t *n, char *why, size_t why_len)
{
	void *a = NULL;
	int8_t status = r->ucp_worker_get_address(r->worker, &a, n);
	if (status != OK)
		FAIL("ucp_worker_get_address: status %d", status);
	if (*n <= room)
		memcpy(out, a, *n);
	r->ucp_worker_release_address(r->worker, a);
	if (*n > room)
		FAIL("an address of %zu bytes, at most %zu", *n, room);
	return 0;
}

int swu_connect(swu_rail *r, uint32_t to, const void *address, char *why, size_t why_len)
{
	peer *p = &r->peers[to];
	if (p->ep != NULL)
		FAIL("rank %u is connected already", to);
	p->rail = r;
	swu_ep_params ep = {.mask = EP_ADDRESS | EP_ERR_MODE | EP_ERR_HANDLER,
	                    .address = address,
	                    .err_mode = ERR_MODE_PEER,
	                    .err_handler = on_failure,
	                    .err_arg = p};
	int8_t status = r->ucp_ep_create(r->worker, &ep, &p->ep);
	if (status != OK) {
		p->ep = NULL;
		FAIL("ucp_ep_create: status %d", status);
	}
	return 0;
}

int swu_window(swu_rail *r, int64_t off, int64_t n)
{
	if (r->window_count == MAX_WINDOWS)
		return -1;
	int last = r->window_count - 1;
	if (last >= 0 && r->windows[last].off + r->windows[last].n == off) {
		r->windows[last].n += n;
		return 0;
	}
	r->windows[r->window_count].off = off;
	r->windows[r->window_count++].n = n;
	return 0;
}

int swu_put(swu_rail *r, uint32_t to, int64_t place, const void *src, int64_t n, int64_t signal, char *why,
            size_t why_len)
{
	peer *p = &r->peers[to];
	if (p->ep == NULL)
		FAIL("rank %u is not connected", to);
	stream *s = find(r->sent, to, signal);
	sending *q = malloc(sizeof *q);
	if (s == NULL || q == NULL) {
		free(q);
		FAIL("out of memory");
	}
	*q = (sending){r, {.key = r->key, .from = r->rank, .place = place, .n = n, .signal = signal, .seq = ++s->seq}};
	swu_request_param op = {.mask = OP_CALLBACK | OP_USER_DATA, .cb.send = on_sent, .user_data = q};
	r->counts.sending++;
	void *request = r->ucp_am_send_nbx(p->ep, AM_PUT, &q->h, sizeof q->h, src, n, &op);
	if (request == NULL)
		on_sent(NULL, OK, q);
	else if (is_error(request)) {
		on_sent(NULL, -1, q);
		p->failed = 1;
	}
	return 0;
}

int swu_failed(const swu_rail *r, uint32_t to) { return r->peers[to].failed; }
unsigned swu_progress(swu_rail *r) { return r->ucp_worker_progress(r->worker); }
int swu_arm(swu_rail *r) { return r->ucp_worker_arm(r->worker) != OK; }
void swu_wake(swu_rail *r) { r->ucp_worker_signal(r->worker); }
void swu_counted(const swu_rail *r, swu_counts *out) { *out = r->counts; }

// drop ends the streams of words from one place to before another.
static void drop(stream **table, int64_t from, int64_t to)
{
	for (int i = 0; i < BUCKETS; i++)
		for (stream **at = &table[i]; *at != NULL;) {
			stream *s = *at;
			if (s->signal < from || s->signal >= to) {
				at = &s->next;
				continue;
			}
			*at = s->next;
			while (s->early != NULL) {
				early *e = s->early;
				s->early = e->next;
				free(e);
			}
			free(s);
		}
}

void swu_forget(swu_rail *r, int64_t from, int64_t to)
{
	drop(r->sent, from, to);
	drop(r->got, from, to);
}

// close_eps ends all connections by force, which completes what is under way on them. It takes a second at most.
static void close_eps(swu_rail *r)
{
	swu_request_param force = {.mask = OP_FLAGS, .flags = CLOSE_FORCE};
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	time_t end = t.tv_sec + 1;
	for (uint32_t i = 0; i < r->size; i++) {
		if (r->peers[i].ep == NULL)
			continue;
		void *q = r->ucp_ep_close_nbx(r->peers[i].ep, &force);
		r->peers[i].ep = NULL;
		if (q == NULL || is_error(q))
			continue;
		while (r->ucp_request_check_status(q) == IN_PROGRESS && t.tv_sec <= end) {
			r->ucp_worker_progress(r->worker);
			clock_gettime(CLOCK_MONOTONIC, &t);
		}
		r->ucp_request_free(q);
	}
}

void swu_close(swu_rail *r)
{
	if (r == NULL)
		return;
	r->closing = 1;
	if (r->worker != NULL) {
		close_eps(r);
		r->ucp_worker_destroy(r->worker);
	}
	if (r->context != NULL)
		r->ucp_cleanup(r->context);
	drop(r->sent, INT64_MIN, INT64_MAX);
	drop(r->got, INT64_MIN, INT64_MAX);
	dlclose(r->lib);
	free(r->peers);
	free(r);
}
