// A libucp that says it is of the next minor version, and else is the one that REAL_UCX names, which is given to the
// compiler. For amd64.
#include <dlfcn.h>
#include <stdlib.h>

#define ENTRIES(X) \
	X(ucp_init_version) \
	X(ucp_cleanup) \
	X(ucp_config_read) \
	X(ucp_config_modify) \
	X(ucp_config_release) \
	X(ucp_worker_create) \
	X(ucp_worker_destroy) \
	X(ucp_worker_progress) \
	X(ucp_worker_get_efd) \
	X(ucp_worker_arm) \
	X(ucp_worker_signal) \
	X(ucp_worker_get_address) \
	X(ucp_worker_release_address) \
	X(ucp_worker_set_am_recv_handler) \
	X(ucp_ep_create) \
	X(ucp_ep_close_nbx) \
	X(ucp_am_send_nbx) \
	X(ucp_am_recv_data_nbx) \
	X(ucp_request_check_status) \
	X(ucp_request_free) \
	X(ucs_status_string)

#define PASS(name) \
	static void *real_##name __attribute__((used)); \
	__asm__(".globl " #name "\n.type " #name ", @function\n" #name ":\n\tjmp *real_" #name "(%rip)\n");
ENTRIES(PASS)

static void (*version)(unsigned *, unsigned *, unsigned *);

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release)
{
	version(major, minor, release);
	++*minor;
}

__attribute__((constructor)) static void find(void)
{
	void *lib = dlopen(REAL_UCX, RTLD_NOW | RTLD_LOCAL);
	if (lib == NULL)
		abort();
#define FIND(name) real_##name = dlsym(lib, #name);
	ENTRIES(FIND)
	version = (void (*)(unsigned *, unsigned *, unsigned *))dlsym(lib, "ucp_get_version");
}
