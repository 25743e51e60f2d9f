// clang-format off
//go:build cgo && linux
// clang-format on

#define _GNU_SOURCE
#include "swucx_rail.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void on_failure(void *arg, void *ep, int8_t status)
{
	peer *p = arg;
	(void)ep;
	p->failed = status;
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
	// A put of 256 KiB is one segment: in UCX's 8 KiB each takes calls of the system at both ends, and a copy more
	// to put them together.
	setenv("UCX_TCP_TX_SEG_SIZE", "272k", 0);
	setenv("UCX_TCP_RX_SEG_SIZE", "272k", 0);
	// Else a connection is waited for in a call of the system, for two minutes where packets are lost.
	setenv("UCX_TCP_CONN_NB", "y", 0);
}

// failed says in why what UCX's status means, and which variables may be its cause. It returns -1.
static int failed(const swu_rail *r, const char *what, int8_t status, char *why, size_t why_len)
{
	const char *tls = getenv("UCX_TLS"), *devices = getenv("UCX_NET_DEVICES");
	int n = snprintf(why, why_len, "%s: %s", what, r->ucs_status_string(status));
	if ((status != NO_DEVICE && status != UNREACHABLE) || n < 0 || (size_t)n >= why_len)
		return -1;
	why += n, why_len -= n;
	if (tls == NULL && devices == NULL)
		snprintf(why, why_len, ": UCX finds no network that both ranks are on");
	else
		snprintf(
		    why, why_len,
		    ", with%s%s%s%s%s: every rank needs a transport and a device that others are reached by, such as UCX_TLS=tcp",
		    tls != NULL ? " UCX_TLS=" : "", tls != NULL ? tls : "",
		    tls != NULL && devices != NULL ? " and" : "", devices != NULL ? " UCX_NET_DEVICES=" : "",
		    devices != NULL ? devices : "");
	return -1;
}

static int open_worker(swu_rail *r, const char *devices, char *why, size_t why_len)
{
	void *config = NULL;
	if (r->ucp_config_read(NULL, NULL, &config) != OK)
		FAIL("ucp_config_read failed");
	// Larger messages shake hands, which waits behind bulk data: that is worth its while for fewer copies of many
	// bytes.
	r->ucp_config_modify(config, "RNDV_THRESH", "1m");
	// UCX 1.13.1 aborts the process when a peer goes while it sends to it without a copy over TCP (uct_iface.h:
	// comp->count > 0): in 6 of 40 runs of the test that closes an end. 1.22.0 does not. Those between were not
	// tried.
	if (r->major == 1 && r->minor < 22)
		r->ucp_config_modify(config, "ZCOPY_THRESH", "inf");
	if (devices != NULL)
		r->ucp_config_modify(config, "NET_DEVICES", devices);
	swu_params p = {.mask = PARAM_FEATURES, .features = FEATURE_AM | FEATURE_WAKEUP};
	int8_t status = r->ucp_init_version(1, 13, &p, config, &r->context);
	r->ucp_config_release(config);
	if (status != OK)
		return failed(r, "ucp_init", status, why, why_len);
	swu_worker_params wp = {.mask = WORKER_THREAD_MODE, .thread_mode = THREAD_SERIALIZED};
	if ((status = r->ucp_worker_create(r->context, &wp, &r->worker)) != OK)
		return 2 * failed(r, "ucp_worker_create", status, why, why_len);
	if ((status = r->ucp_worker_get_efd(r->worker, &r->efd)) != OK)
		return failed(r, "ucp_worker_get_efd", status, why, why_len);
	swu_am_handler h = {.mask = HANDLER_ID | HANDLER_CB | HANDLER_ARG, .id = AM_PUT, .cb = swu_on_put, .arg = r};
	if ((status = r->ucp_worker_set_am_recv_handler(r->worker, &h)) != OK)
		return failed(r, "ucp_worker_set_am_recv_handler", status, why, why_len);
	return 0;
}

int swu_open(swu_rail **out, uint32_t rank, uint32_t size, uint64_t key, void *segment, int64_t bytes,
             const char *devices, unsigned port, char *why, size_t why_len)
{
	*out = NULL;
	quiet();
	// It stays when the last rail closes: a libucs that is loaded again where the variables ask for its log reads
	// what it had before.
	void *lib = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	if (lib == NULL) {
		const char *e = dlerror();
		FAIL("%s (Debian: libucx0, PyPI: libucx-cu12)", e != NULL ? e : "libucp.so.0 cannot be opened");
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
	// UCX takes this one from the environment alone. The caller lets one thread at a time in here.
	const char *range = "UCX_TCP_PORT_RANGE", *was = getenv(range);
	char *before = was != NULL ? strdup(was) : NULL, own[32];
	snprintf(own, sizeof own, "%u-%u", port, port);
	setenv(range, own, 1);
	int opened = open_worker(r, devices, why, why_len);
	if (before != NULL)
		setenv(range, before, 1);
	else
		unsetenv(range);
	free(before);
	if (opened != 0) {
		swu_close(r);
		return opened;
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
		return failed(r, "ucp_worker_get_address", status, why, why_len);
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
		return failed(r, "ucp_ep_create", status, why, why_len);
	}
	return swu_put(r, to, 0, NULL, 0, GREETING, why, why_len);
}

int swu_met(const swu_rail *r, uint32_t to)
{
	const peer *p = &r->peers[to];
	return p->ep == NULL || (p->heard && p->greeted);
}

// now is a clock in nanoseconds.
static int64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int swu_settle(swu_rail *r, int64_t within)
{
	int64_t began = now();
	r->closing = 1;
	for (uint32_t i = 0; i < r->size; i++)
		while (!swu_met(r, i)) {
			if (r->peers[i].failed != OK || now() - began >= within)
				return 0;
			r->ucp_worker_progress(r->worker);
		}
	return 1;
}

const char *swu_failed(const swu_rail *r, uint32_t to)
{
	return r->peers[to].failed != OK ? r->ucs_status_string(r->peers[to].failed) : NULL;
}

unsigned swu_progress(swu_rail *r) { return r->ucp_worker_progress(r->worker); }
int swu_arm(swu_rail *r) { return r->ucp_worker_arm(r->worker) != OK; }
void swu_wake(swu_rail *r) { r->ucp_worker_signal(r->worker); }
void swu_counted(const swu_rail *r, swu_counts *out) { *out = r->counts; }

// close_eps ends all connections by force, which completes what is under way on them. It takes a second at most.
static void close_eps(swu_rail *r)
{
	swu_request_param force = {.mask = OP_FLAGS, .flags = CLOSE_FORCE};
	int64_t end = now() + 1000000000;
	for (uint32_t i = 0; i < r->size; i++) {
		if (r->peers[i].ep == NULL)
			continue;
		void *q = r->ucp_ep_close_nbx(r->peers[i].ep, &force);
		r->peers[i].ep = NULL;
		if (q == NULL || is_error(q))
			continue;
		while (r->ucp_request_check_status(q) == IN_PROGRESS && now() < end)
			r->ucp_worker_progress(r->worker);
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
	swu_forget(r, INT64_MIN, INT64_MAX);
	while (r->oldest != NULL) { // what has not been completed
		sending *s = r->oldest;
		r->oldest = s->next;
		free(s);
	}
	dlclose(r->lib);
	free(r->peers);
	free(r);
}
