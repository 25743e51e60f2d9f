// A CUDA driver without GPUs, for tests of what talks to the driver: the part of the driver API that Switchyard uses,
// as a libcuda.so.1.
//
// Memory of a device is a memfd. An address that is mapped and accessible can be read and written by the process too,
// except one of a multicast object. Streams run their work at once, except kernels. The library is linked with what
// runs those (kernels/cuda/testdata/emulate/device.cpp), or they are launched and do nothing.
//
// An object, which is memory or a multicast object, lives as long as somebody refers to it: by a handle, a mapping, a
// bind, or a file descriptor that is open, in whatever process or message. A fabric handle is no reference. What the
// driver's documentation forbids is refused here; where it says that a call blocks until all devices have been added
// the call is refused too, since to have made it is a mistake that may hang.
//
// A test asks for counts by attributes of a device, and sets what it wants by those of a function (emulated.go has the
// numbers).
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

// Of what runs kernels, where there is something.
extern "C" {
__attribute__((weak)) void emu_enqueue(uint64_t stream, uint32_t device, const char *name, uint32_t grid,
                                       const void *args);
__attribute__((weak)) uint64_t emu_put(uint64_t stream);
__attribute__((weak)) int emu_ran(uint64_t stream, uint64_t n, int wait);
}

namespace {

using i32 = int32_t;
using u32 = uint32_t;
using u64 = uint64_t;

// Results.
enum {
	OK = 0,
	INVALID = 1,
	OUT_OF_MEMORY = 2,
	INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201,
	NO_BINARY = 209,
	ILLEGAL_STATE = 401,
	NOT_FOUND = 500,
	NOT_READY = 600,
	UNKNOWN = 999
};

constexpr i32 devices = 4;
constexpr u64 MiB = 1 << 20, GiB = u64{1} << 30;
constexpr u64 granule = 2 * MiB; // of memory
constexpr u64 least_multicast = 4 * MiB,
	      good_multicast = 16 * MiB; // of multicast objects: the smallest and the recommended
constexpr u64 device_capacity = 3 * GiB / 2, multicast_capacity = 3 * GiB / 2;
constexpr i32 posix_file = 1, fabric = 8;
constexpr u32 multiprocessors = 132, resident = 2; // blocks of any kernel that run at once on one of them

// What a test reads: attributes of a device from `counts` on.
constexpr i32 counts = 1 << 20;
enum {
	HANDLES,
	MAPPINGS,
	BINDS,
	FILES,
	MEMORY,
	MULTICAST,
	RESERVATIONS,
	OTHERS,
	MISTAKES,
	CALLS,
	FIRED,
	LAUNCHES,
	BLOCK_LAUNCHES,
	BLOCKS,
	ELF_MODULES
};

// What a test sets: attributes of this function.
constexpr u64 settings = 0xE000;
enum { FAIL, NO_MULTICAST, VERSION, MAJOR, NO_PEERS };

struct bind {
	i32 device;
	u64 at;
	struct object *memory;
	u64 from, bytes;
};

struct object {
	bool multicast = false;
	i32 device = 0; // of memory
	u64 bytes = 0;
	i32 kinds = 0; // of handles by which it can leave the process
	int file = -1;
	ino_t inode = 0;
	void *here = MAP_FAILED; // memory that is bound, for kernels
	u64 id = 0;
	u32 handles = 0, mappings = 0, binds = 0;
	u32 files = 0; // that have ever been exported: each has a lock on a byte of its own

	u32 team = 0; // devices of a multicast object
	std::set<i32> added;
	std::vector<bind> bound;
};

struct mapping {
	u64 bytes;
	object *what;
	std::set<i32> access;
};

struct ipc_handle {
	u64 words[8];
};

struct reservation {
	u64 bytes;
};

struct plain { // cuMemAlloc, cuMemHostAlloc
	u64 bytes;
	i32 device; // -1: of the host
	u64 id;
};

std::mutex lock;
u64 last_id = 0x1000;
std::set<object *> objects;
std::map<u64, object *> handles;
std::map<u64, reservation> reservations;
std::map<u64, mapping> mappings;
std::map<u64, plain> plains;
std::map<u64, i32> others; // streams, events and modules, by device
std::map<u64, std::string> functions;
struct mark {
	u64 stream, put;
};
std::map<u64, mark> marks; // by event
i32 retained[devices];
i32 fail_in[devices], calls[devices], fired[devices];
i32 mistakes = 0, launches = 0, block_launches = 0, blocks = 0, elf_modules = 0;
bool no_multicast = false, no_peers = false;
i32 version = 13000, major_capability = 9; // CUDA's, and of all devices
thread_local std::vector<u64> current;     // contexts

u64 context_of(i32 device) { return 0xC000 + static_cast<u64>(device); }
i32 device_of(u64 context)
{
	return context >= 0xC000 && context < 0xC000 + devices ? static_cast<i32>(context - 0xC000) : -1;
}
i32 here() { return current.empty() ? -1 : device_of(current.back()); }

// How many of the object's exported descriptors are open: the system releases a lock when the last duplicate is closed.
u32 open_files(const object &o)
{
	u32 n = 0;
	for (u32 k = 0; k < o.files; k++) {
		struct flock f{};
		f.l_type = F_WRLCK, f.l_whence = SEEK_SET, f.l_start = k, f.l_len = 1;
		if (fcntl(o.file, F_OFD_GETLK, &f) == 0 && f.l_type != F_UNLCK)
			n++;
	}
	return n;
}

// Objects that nobody refers to go.
void sweep()
{
	for (bool again = true; again;) {
		again = false;
		for (object *o : objects)
			if (o->handles == 0 && o->mappings == 0 && o->binds == 0 && open_files(*o) == 0) {
				if (!o->bound.empty()) {
					fprintf(stderr, "emulated driver: a multicast object went with %zu binds\n",
					        o->bound.size());
					mistakes++;
				}
				for (bind &b : o->bound)
					b.memory->binds--;
				close(o->file);
				if (o->here != MAP_FAILED)
					munmap(o->here, o->bytes);
				objects.erase(o);
				delete o;
				again = true;
				break;
			}
	}
}

object *object_of(u64 handle)
{
	auto i = handles.find(handle);
	return i == handles.end() ? nullptr : i->second;
}

u64 handle_to(object *o)
{
	o->handles++;
	handles[++last_id] = o;
	return last_id;
}

// Whether the launches of a stream so far, or up to a number, have run.
u64 put_of(u64 stream) { return emu_put != nullptr ? emu_put(stream) : 0; }
bool ran(u64 stream, u64 n, bool wait) { return emu_ran == nullptr || emu_ran(stream, n, wait) != 0; }
void drain(u64 stream) { ran(stream, put_of(stream), true); }

// Every call of a device begins here. True: the test wants it to fail.
bool injected(i32 device)
{
	if (device < 0 || device >= devices)
		return false;
	calls[device]++;
	if (fail_in[device] == 0 || --fail_in[device] > 0)
		return false;
	fired[device] = 1;
	return true;
}

// A call of the driver on a device. What gives something back does so even where it is to fail.
#define CALL(device) \
	std::lock_guard<std::mutex> guard(lock); \
	[[maybe_unused]] const bool unlucky = injected(device); \
	sweep()
#define CALL_OR_FAIL(device) \
	CALL(device); \
	if (unlucky) \
	return UNKNOWN

bool multiple(u64 v, u64 of) { return v % of == 0; }

// The mapping that holds [at, at+n) as a whole, and where that begins in it.
mapping *mapped(u64 at, u64 n, u64 *from)
{
	auto i = mappings.upper_bound(at);
	if (i == mappings.begin())
		return nullptr;
	--i;
	if (at + n > i->first + i->second.bytes)
		return nullptr;
	*from = at - i->first;
	return &i->second;
}

// Whether a copy may touch n bytes at an address: memory of a device that has been mapped must be accessible here.
bool accessible(u64 at, u64 n)
{
	auto r = reservations.upper_bound(at);
	if (r == reservations.begin() || (--r, at >= r->first + r->second.bytes))
		return true; // none of ours
	for (u64 end = at + n; at < end;) {
		u64 from = 0;
		mapping *m = mapped(at, 1, &from);
		if (m == nullptr || m->what->multicast || m->access.count(here()) == 0)
			return false;
		at += m->bytes - from;
	}
	return true;
}

// Writes the same to the memory of all devices of a multicast mapping, which must have memory there.
bool broadcast(u64 at, const void *src, u64 n)
{
	u64 from = 0;
	mapping *m = mapped(at, n, &from);
	if (m == nullptr || !m->what->multicast || m->access.count(here()) == 0)
		return false;
	u32 reached = 0;
	for (bind &b : m->what->bound)
		if (from >= b.at && from + n <= b.at + b.bytes) {
			if (pwrite(b.memory->file, src, n, static_cast<off_t>(b.from + from - b.at)) !=
			    static_cast<ssize_t>(n))
				return false;
			reached++;
		}
	return reached == m->what->team;
}

bool is_multicast(u64 at)
{
	u64 from = 0;
	mapping *m = mapped(at, 1, &from);
	return m != nullptr && m->what->multicast;
}

struct memory_prop { // CUmemAllocationProp
	i32 type, kinds, location, device;
	void *win32;
	unsigned char flags[8];
};

struct multicast_prop { // CUmulticastObjectProp
	u32 team;
	size_t bytes;
	unsigned long long kinds, flags;
};

struct access_desc { // CUmemAccessDesc
	i32 location, device, flags;
};

struct launch_config { // CUlaunchConfig
	u32 grid[3], block[3], shared_bytes;
	u64 stream;
};

object *new_object(u64 bytes, i32 kinds, bool multicast)
{
	auto *o = new object;
	o->multicast = multicast, o->bytes = bytes, o->kinds = kinds, o->id = ++last_id;
	o->file = memfd_create(multicast ? "emulated-multicast" : "emulated-memory", MFD_CLOEXEC);
	struct stat st{};
	if (o->file < 0 || (!multicast && ftruncate(o->file, static_cast<off_t>(bytes)) != 0) ||
	    fstat(o->file, &st) != 0) {
		perror("emulated driver: memfd");
		abort();
	}
	o->inode = st.st_ino;
	objects.insert(o);
	return o;
}

u64 in_use(bool multicast, i32 device)
{
	u64 n = 0;
	for (object *o : objects)
		if (o->multicast == multicast && (multicast || o->device == device))
			n += o->bytes;
	return n;
}

i32 count_of(i32 which, i32 device)
{
	i32 n = 0;
	switch (which) {
	case HANDLES:
		return static_cast<i32>(handles.size());
	case MAPPINGS:
		return static_cast<i32>(mappings.size());
	case BINDS:
		for (object *o : objects)
			n += static_cast<i32>(o->bound.size());
		return n;
	case FILES:
		for (object *o : objects)
			n += static_cast<i32>(open_files(*o));
		return n;
	case MEMORY:
		for (auto &p : plains)
			n += p.second.device == device ? 1 : 0;
		return n + static_cast<i32>(in_use(false, device) / MiB);
	case MULTICAST:
		return static_cast<i32>(in_use(true, device) / MiB);
	case RESERVATIONS:
		return static_cast<i32>(reservations.size());
	case OTHERS:
		for (auto &o : others)
			n += o.second == device ? 1 : 0;
		for (auto &p : plains)
			n += p.second.device < 0 ? 1 : 0;
		return n + retained[device];
	case MISTAKES:
		return mistakes;
	case CALLS:
		return calls[device];
	case FIRED:
		return fired[device];
	case LAUNCHES:
		return launches;
	case BLOCK_LAUNCHES:
		return block_launches;
	case ELF_MODULES:
		return elf_modules;
	default:
		return blocks;
	}
}

// Whether a driver of this version loads the image: fatbins by nvcc 13.0 from CUDA 13.0 on; ELF files for the devices'
// architecture, of the ABI that ptxas of CUDA 12.4 writes or, from 12.8 on, of that which it writes for 10.0.
i32 loads(const unsigned char *image)
{
	u32 magic, elf_flags;
	memcpy(&magic, image, sizeof magic);
	if (magic == 0xba55ed50)
		return version >= 13000 ? OK : NO_BINARY;
	if (magic != 0x464c457f)
		return INVALID;
	memcpy(&elf_flags, image + 48, sizeof elf_flags);
	bool later = image[7] == 0x41;
	u32 sm = later ? elf_flags >> 8 & 0xff : elf_flags & 0xff;
	bool known = later ? version >= 12080 && image[8] <= 8 : image[7] == 0x33 && image[8] <= 7;
	return known && sm / 10 == static_cast<u32>(major_capability) ? OK : NO_BINARY;
}

i32 release_other(u64 what) { return others.erase(what) != 0 ? OK : INVALID; }

} // namespace

extern "C" {

i32 emu_cuInit(u32) { return OK; }

i32 emu_cuGetErrorName(i32 r, const char **name)
{
	switch (r) {
	case OK:
		*name = "CUDA_SUCCESS";
		break;
	case INVALID:
		*name = "CUDA_ERROR_INVALID_VALUE";
		break;
	case OUT_OF_MEMORY:
		*name = "CUDA_ERROR_OUT_OF_MEMORY";
		break;
	case ILLEGAL_STATE:
		*name = "CUDA_ERROR_ILLEGAL_STATE";
		break;
	default:
		*name = "CUDA_ERROR_UNKNOWN";
	}
	return OK;
}

i32 emu_cuDriverGetVersion(i32 *v) { return *v = version, OK; }
i32 emu_cuDeviceGetCount(i32 *n) { return *n = devices, OK; }

i32 emu_cuDeviceGet(i32 *d, i32 ordinal)
{
	if (ordinal < 0 || ordinal >= devices)
		return INVALID_DEVICE;
	return *d = ordinal, OK;
}

i32 emu_cuDeviceGetName(char *to, i32 n, i32) { return snprintf(to, static_cast<size_t>(n), "emulated"), OK; }

i32 emu_cuDeviceGetUuid(void *to, i32 device)
{
	CALL_OR_FAIL(device);
	memset(to, 0xE0 + device, 16);
	return OK;
}

i32 emu_cuDeviceGetAttribute(i32 *v, i32 which, i32 device)
{
	if (which >= counts) {
		std::lock_guard<std::mutex> guard(lock);
		sweep();
		return *v = count_of(which - counts, device), OK;
	}
	CALL_OR_FAIL(device);
	static const std::map<i32, i32> values = {
	    {1, 1024}, {13, 1980000}, {16, multiprocessors}, {38, 50 << 20}, {39, 2048}, {40, 3},  {41, 1},
	    {76, 0},   {95, 1},       {97, 227 << 10},       {102, 1},       {103, 1},   {122, 1}, {128, 1}};
	if (which == 75)
		return *v = major_capability, OK;
	if (which == 132)
		return *v = !no_multicast, OK;
	auto i = values.find(which);
	if (i == values.end())
		return INVALID;
	return *v = i->second, OK;
}

i32 emu_cuDeviceCanAccessPeer(i32 *yes, i32 device, i32)
{
	CALL_OR_FAIL(device);
	return *yes = !no_peers, OK;
}

i32 emu_cuDevicePrimaryCtxRetain(u64 *c, i32 device)
{
	CALL_OR_FAIL(device);
	retained[device]++;
	return *c = context_of(device), OK;
}

i32 emu_cuDevicePrimaryCtxRelease(i32 device)
{
	CALL(device);
	if (retained[device]-- == 0)
		return INVALID_CONTEXT;
	return unlucky ? UNKNOWN : OK;
}

i32 emu_cuCtxGetCurrent(u64 *c) { return *c = current.empty() ? 0 : current.back(), OK; }

i32 emu_cuCtxPushCurrent(u64 c)
{
	i32 device = device_of(c);
	std::lock_guard<std::mutex> guard(lock);
	if (device < 0 || retained[device] == 0)
		return INVALID_CONTEXT;
	current.push_back(c);
	return OK;
}

i32 emu_cuCtxPopCurrent(u64 *c)
{
	if (current.empty())
		return INVALID_CONTEXT;
	*c = current.back();
	current.pop_back();
	return OK;
}

i32 emu_cuCtxSynchronize()
{
	std::vector<u64> streams;
	{
		CALL_OR_FAIL(here());
		for (auto &o : others)
			if (o.second == here())
				streams.push_back(o.first);
	}
	for (u64 s : streams)
		drain(s);
	return OK;
}

i32 emu_cuCtxEnablePeerAccess(u64, u32)
{
	CALL_OR_FAIL(here());
	return OK;
}

i32 emu_cuCtxGetStreamPriorityRange(i32 *least, i32 *greatest)
{
	CALL_OR_FAIL(here());
	return *least = 0, *greatest = -5, OK;
}

i32 emu_cuStreamCreateWithPriority(u64 *s, u32, i32)
{
	CALL_OR_FAIL(here());
	others[++last_id] = here();
	return *s = last_id, OK;
}

i32 emu_cuStreamDestroy(u64 s)
{
	drain(s);
	CALL(here());
	i32 r = release_other(s);
	return unlucky ? UNKNOWN : r;
}

i32 emu_cuStreamSynchronize(u64 s)
{
	drain(s);
	CALL_OR_FAIL(here());
	return OK;
}

i32 emu_cuStreamWaitEvent(u64, u64 e, u32)
{
	mark m{};
	{
		CALL_OR_FAIL(here());
		m = marks[e];
	}
	ran(m.stream, m.put, true);
	return OK;
}

i32 emu_cuStreamIsCapturing(u64, i32 *yes)
{
	CALL_OR_FAIL(here());
	return *yes = 0, OK;
}

i32 emu_cuStreamGetCtx(u64 s, u64 *c)
{
	CALL_OR_FAIL(here());
	auto i = others.find(s);
	return *c = context_of(i == others.end() ? here() : i->second), OK;
}

i32 emu_cuStreamWriteValue64(u64 s, u64 at, u64 value, u32)
{
	drain(s);
	CALL_OR_FAIL(here());
	if (!accessible(at, 8))
		return INVALID;
	__atomic_store_n(reinterpret_cast<u64 *>(at), value, __ATOMIC_RELEASE);
	return OK;
}

i32 emu_cuThreadExchangeStreamCaptureMode(i32 *) { return OK; }

i32 emu_cuEventCreate(u64 *e, u32)
{
	CALL_OR_FAIL(here());
	others[++last_id] = here();
	return *e = last_id, OK;
}

i32 emu_cuEventDestroy(u64 e)
{
	CALL(here());
	i32 r = release_other(e);
	return unlucky ? UNKNOWN : r;
}

i32 emu_cuEventRecord(u64 e, u64 s)
{
	CALL_OR_FAIL(here());
	marks[e] = {s, put_of(s)};
	return OK;
}

i32 emu_cuEventQuery(u64 e)
{
	CALL_OR_FAIL(here());
	return ran(marks[e].stream, marks[e].put, false) ? OK : NOT_READY;
}

i32 emu_cuEventSynchronize(u64 e) { return emu_cuStreamWaitEvent(0, e, 0); }

i32 emu_cuMemGetInfo(size_t *available, size_t *total)
{
	CALL_OR_FAIL(here());
	return *total = device_capacity, *available = device_capacity - in_use(false, here()), OK;
}

i32 emu_cuMemAlloc(u64 *at, size_t n)
{
	CALL_OR_FAIL(here());
	*at = reinterpret_cast<u64>(aligned_alloc(4096, (n + 4095) / 4096 * 4096));
	plains[*at] = {n, here(), ++last_id};
	return OK;
}

i32 emu_cuMemFree(u64 p)
{
	CALL(here());
	if (plains.erase(p) == 0)
		return INVALID;
	free(reinterpret_cast<void *>(p));
	return unlucky ? UNKNOWN : OK;
}

i32 emu_cuMemHostAlloc(void **p, size_t n, u32)
{
	CALL_OR_FAIL(here());
	*p = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
	plains[reinterpret_cast<u64>(*p)] = {n, -1, ++last_id};
	return OK;
}

i32 emu_cuMemFreeHost(void *p)
{
	CALL(here());
	if (plains.erase(reinterpret_cast<u64>(p)) == 0)
		return INVALID;
	free(p);
	return unlucky ? UNKNOWN : OK;
}

i32 emu_cuMemHostGetDevicePointer(u64 *at, void *p, u32)
{
	CALL_OR_FAIL(here());
	return *at = reinterpret_cast<u64>(p), OK;
}

i32 emu_cuMemcpyAsync(u64 dst, u64 src, size_t n, u64 s)
{
	drain(s);
	CALL_OR_FAIL(here());
	if (!accessible(dst, n) || !accessible(src, n))
		return INVALID;
	memmove(reinterpret_cast<void *>(dst), reinterpret_cast<void *>(src), n);
	return OK;
}

// A copy of memory that is not pinned waits for its stream inside the driver, and holds up those of all other streams.
std::mutex pageable;

i32 emu_cuMemcpyHtoDAsync(u64 dst, const void *src, size_t n, u64 s)
{
	std::lock_guard one{pageable};
	drain(s);
	CALL_OR_FAIL(here());
	if (is_multicast(dst))
		return broadcast(dst, src, n) ? OK : INVALID;
	if (!accessible(dst, n))
		return INVALID;
	memcpy(reinterpret_cast<void *>(dst), src, n);
	return OK;
}

i32 emu_cuMemcpyDtoHAsync(void *dst, u64 src, size_t n, u64 s)
{
	std::lock_guard one{pageable};
	drain(s);
	CALL_OR_FAIL(here());
	if (!accessible(src, n))
		return INVALID;
	memcpy(dst, reinterpret_cast<void *>(src), n);
	return OK;
}

i32 emu_cuMemsetD8Async(u64 dst, unsigned char v, size_t n, u64 s)
{
	drain(s);
	CALL_OR_FAIL(here());
	if (!accessible(dst, n))
		return INVALID;
	u64 from = 0;
	mapping *m = mapped(dst, n, &from);
	if (v != 0 || m == nullptr) {
		memset(reinterpret_cast<void *>(dst), v, n);
	} else if (fallocate(m->what->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(from),
	                     static_cast<off_t>(n)) != 0) {
		return UNKNOWN;
	}
	return OK;
}

// The allocation of cuMemAlloc that an address is in, or null.
std::pair<const u64, plain> *allocation(u64 at)
{
	auto i = plains.upper_bound(at);
	if (i == plains.begin() || at >= (--i)->first + i->second.bytes || i->second.device < 0)
		return nullptr;
	return &*i;
}

i32 emu_cuPointerGetAttributes(u32 n, i32 *kinds, void **to, u64 at)
{
	CALL_OR_FAIL(here());
	u64 from = 0;
	mapping *m = mapped(at, 1, &from);
	std::pair<const u64, plain> *p = allocation(at);
	for (u32 i = 0; i < n; i++) {
		u64 v = 0;
		if (p != nullptr)
			switch (kinds[i]) {
			case 2:
				v = 2; // memory of a device
				break;
			case 9:
				v = static_cast<u64>(p->second.device);
				break;
			case 7:
				v = p->second.id;
				break;
			case 11:
				v = p->first;
				break;
			case 12:
				v = p->second.bytes;
				break;
			case 10:
				v = 1; // CUDA IPC
				break;
			}
		if (m != nullptr)
			switch (kinds[i]) {
			case 2:
				v = 2; // memory of a device
				break;
			case 9:
				v = static_cast<u64>(m->what->device);
				break;
			case 7:
				v = m->what->id;
				break;
			case 11:
				v = at - from;
				break;
			case 12:
				v = m->bytes;
				break;
			case 14:
				v = static_cast<u64>(m->what->kinds);
				break;
			}
		memcpy(to[i], &v, 8);
	}
	return OK;
}

i32 emu_cuMemGetAddressRange(u64 *base, size_t *n, u64 at)
{
	CALL_OR_FAIL(here());
	u64 from = 0;
	mapping *m = mapped(at, 1, &from);
	if (auto *p = allocation(at); p != nullptr)
		return *base = p->first, *n = p->second.bytes, OK;
	if (m == nullptr)
		return NOT_FOUND;
	return *base = at - from, *n = m->bytes, OK;
}

i32 emu_cuIpcGetMemHandle(ipc_handle *h, u64 at)
{
	CALL_OR_FAIL(here());
	auto *p = allocation(at);
	if (p == nullptr)
		return INVALID;
	return *h = {{p->second.id}}, OK;
}

// What another process has exported; there is none, and a process cannot open what it has exported itself.
i32 emu_cuIpcOpenMemHandle(u64 *, ipc_handle, u32)
{
	CALL_OR_FAIL(here());
	return INVALID_CONTEXT;
}

i32 emu_cuMemAddressReserve(u64 *at, size_t n, size_t align, u64, u64)
{
	CALL_OR_FAIL(here());
	if (n == 0 || !multiple(n, granule))
		return INVALID;
	align = align < granule ? granule : align;
	auto *p = static_cast<char *>(
	    mmap(nullptr, n + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
	if (p == MAP_FAILED)
		return OUT_OF_MEMORY;
	u64 begin = reinterpret_cast<u64>(p), first = (begin + align - 1) / align * align;
	if (first > begin)
		munmap(p, first - begin);
	if (first + n < begin + n + align)
		munmap(reinterpret_cast<void *>(first + n), begin + align - first);
	reservations[first] = {n};
	return *at = first, OK;
}

i32 emu_cuMemAddressFree(u64 at, size_t n)
{
	CALL(here());
	auto i = reservations.find(at);
	if (i == reservations.end() || i->second.bytes != n)
		return INVALID;
	auto m = mappings.lower_bound(at);
	if (m != mappings.end() && m->first < at + n)
		return INVALID;
	munmap(reinterpret_cast<void *>(at), n);
	reservations.erase(i);
	return unlucky ? UNKNOWN : OK;
}

i32 emu_cuMemCreate(u64 *h, size_t n, const memory_prop *p, u64)
{
	CALL_OR_FAIL(here());
	if (n == 0 || !multiple(n, granule) || p->type != 1 || p->location != 1 || p->device < 0 ||
	    p->device >= devices)
		return INVALID;
	if (in_use(false, p->device) + n > device_capacity)
		return OUT_OF_MEMORY;
	object *o = new_object(n, p->kinds, false);
	o->device = p->device;
	return *h = handle_to(o), OK;
}

i32 emu_cuMemRelease(u64 h)
{
	CALL(here());
	object *o = object_of(h);
	if (o == nullptr)
		return INVALID;
	handles.erase(h);
	o->handles--;
	sweep();
	return unlucky ? UNKNOWN : OK;
}

i32 emu_cuMemMap(u64 at, size_t n, size_t from, u64 h, u64)
{
	CALL_OR_FAIL(here());
	object *o = object_of(h);
	u64 unit = o != nullptr && o->multicast ? least_multicast : granule;
	auto r = reservations.upper_bound(at);
	if (o == nullptr || from != 0 || n == 0 || !multiple(n, unit) || !multiple(at, unit) || n > o->bytes ||
	    r == reservations.begin())
		return INVALID;
	if (o->multicast && n != o->bytes) // the driver maps parts; Switchyard should not
		return INVALID;
	--r;
	auto next = mappings.lower_bound(at);
	u64 ignored = 0;
	if (at + n > r->first + r->second.bytes || (next != mappings.end() && next->first < at + n) ||
	    mapped(at, 1, &ignored) != nullptr)
		return INVALID;
	if (o->multicast && o->added.size() < o->team)
		return ILLEGAL_STATE;
	if (!o->multicast &&
	    mmap(reinterpret_cast<void *>(at), n, PROT_NONE, MAP_SHARED | MAP_FIXED, o->file, 0) == MAP_FAILED)
		return OUT_OF_MEMORY;
	mappings[at] = {n, o, {}};
	o->mappings++;
	return OK;
}

i32 emu_cuMemUnmap(u64 at, size_t n)
{
	CALL(here());
	auto i = mappings.find(at);
	if (i == mappings.end() || i->second.bytes != n)
		return INVALID;
	mmap(reinterpret_cast<void *>(at), n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
	     0);
	i->second.what->mappings--;
	mappings.erase(i);
	sweep();
	return unlucky ? UNKNOWN : OK;
}

i32 emu_cuMemSetAccess(u64 at, size_t n, const access_desc *a, size_t count)
{
	CALL_OR_FAIL(here());
	auto i = mappings.find(at);
	if (i == mappings.end() || i->second.bytes != n)
		return INVALID;
	mapping &m = i->second;
	for (size_t k = 0; k < count; k++) {
		if (a[k].location != 1 || a[k].flags != 3 || a[k].device < 0 || a[k].device >= devices)
			return INVALID;
		m.access.insert(a[k].device);
	}
	if (!m.what->multicast)
		mprotect(reinterpret_cast<void *>(at), n, PROT_READ | PROT_WRITE);
	return OK;
}

i32 emu_cuMemExportToShareableHandle(void *to, u64 h, i32 kind, u64)
{
	CALL_OR_FAIL(here());
	object *o = object_of(h);
	if (o == nullptr || (o->kinds & kind) == 0)
		return INVALID;
	if (kind == fabric) {
		memset(to, 0xFA, 64);
		memcpy(to, &o->id, 8);
		return OK;
	}
	std::string path = "/proc/self/fd/" + std::to_string(o->file);
	int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
	struct flock f{};
	f.l_type = F_WRLCK, f.l_whence = SEEK_SET, f.l_start = o->files++, f.l_len = 1;
	if (fd < 0 || fcntl(fd, F_OFD_SETLK, &f) != 0) {
		perror("emulated driver: export");
		abort();
	}
	return memcpy(to, &fd, sizeof(fd)), OK;
}

i32 emu_cuMemImportFromShareableHandle(u64 *h, void *from, i32 kind)
{
	CALL_OR_FAIL(here());
	object *found = nullptr;
	if (kind == fabric) {
		u64 id = 0;
		memcpy(&id, from, 8);
		for (object *o : objects)
			if (o->id == id && (o->kinds & fabric) != 0)
				found = o;
	} else {
		struct stat st{};
		if (fstat(static_cast<int>(reinterpret_cast<u64>(from)), &st) == 0)
			for (object *o : objects)
				if (o->inode == st.st_ino && open_files(*o) > 0)
					found = o;
	}
	if (found == nullptr)
		return INVALID;
	return *h = handle_to(found), OK;
}

i32 emu_cuMemGetAllocationGranularity(size_t *n, const memory_prop *, i32)
{
	CALL_OR_FAIL(here());
	return *n = granule, OK;
}

i32 emu_cuMemRetainAllocationHandle(u64 *h, void *at)
{
	CALL_OR_FAIL(here());
	u64 from = 0;
	mapping *m = mapped(reinterpret_cast<u64>(at), 1, &from);
	if (m == nullptr)
		return INVALID;
	return *h = handle_to(m->what), OK;
}

i32 emu_cuMulticastCreate(u64 *h, const multicast_prop *p)
{
	CALL_OR_FAIL(here());
	if (p->team == 0 || p->team > devices || p->bytes == 0 || !multiple(p->bytes, least_multicast) || p->flags != 0)
		return INVALID;
	if (in_use(true, 0) + p->bytes > multicast_capacity)
		return OUT_OF_MEMORY;
	object *o = new_object(p->bytes, static_cast<i32>(p->kinds), true);
	o->team = p->team;
	return *h = handle_to(o), OK;
}

i32 emu_cuMulticastAddDevice(u64 h, i32 device)
{
	usleep(static_cast<useconds_t>(500 * (device & 1))); // so that a rank is late that others should wait for
	CALL_OR_FAIL(here());
	object *o = object_of(h);
	if (o == nullptr || !o->multicast || device < 0 || device >= devices || o->added.size() == o->team ||
	    !o->added.insert(device).second)
		return INVALID;
	return OK;
}

i32 emu_cuMulticastBindMem(u64 h, size_t at, u64 memory, size_t from, size_t n, u64 flags)
{
	CALL_OR_FAIL(here());
	object *o = object_of(h), *m = object_of(memory);
	if (o == nullptr || m == nullptr || !o->multicast || m->multicast || flags != 0 || n == 0)
		return INVALID;
	if (o->added.size() < o->team)
		return ILLEGAL_STATE;
	if (!multiple(at, least_multicast) || !multiple(from, least_multicast) || !multiple(n, least_multicast))
		return INVALID;
	if (at > o->bytes || n > o->bytes - at || from > m->bytes || n > m->bytes - from || m->kinds == 0 ||
	    o->added.count(m->device) == 0)
		return INVALID;
	for (bind &b : o->bound)
		if (b.device == m->device && at < b.at + b.bytes && b.at < at + n)
			return INVALID;
	if (emu_enqueue != nullptr && m->here == MAP_FAILED)
		m->here = mmap(nullptr, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->file, 0);
	o->bound.push_back({m->device, at, m, from, n});
	m->binds++;
	return OK;
}

i32 emu_cuMulticastUnbind(u64 h, i32 device, size_t at, size_t n)
{
	CALL(here());
	object *o = object_of(h);
	if (o == nullptr || !o->multicast)
		return INVALID;
	for (size_t i = 0; i < o->bound.size(); i++) {
		bind b = o->bound[i];
		if (b.device == device && b.at == at && b.bytes == n) {
			o->bound.erase(o->bound.begin() + static_cast<std::ptrdiff_t>(i));
			b.memory->binds--;
			sweep();
			return unlucky ? UNKNOWN : OK;
		}
	}
	mistakes++;
	fprintf(stderr, "emulated driver: device %d has no bind of %zu bytes at %zu\n", device, n, at);
	return INVALID;
}

i32 emu_cuMulticastGetGranularity(size_t *n, const multicast_prop *p, i32 recommended)
{
	CALL_OR_FAIL(here());
	if (p->team == 0 || p->flags != 0)
		return INVALID;
	return *n = recommended != 0 ? good_multicast : least_multicast, OK;
}

i32 emu_cuModuleLoadData(u64 *m, const void *image)
{
	CALL_OR_FAIL(here());
	auto bytes = static_cast<const unsigned char *>(image);
	if (i32 r = loads(bytes); r != OK)
		return r;
	elf_modules += bytes[0] == 0x7f ? 1 : 0;
	others[++last_id] = here();
	return *m = last_id, OK;
}

i32 emu_cuModuleUnload(u64 m)
{
	CALL(here());
	i32 r = release_other(m);
	return unlucky ? UNKNOWN : r;
}

i32 emu_cuModuleGetFunction(u64 *f, u64, const char *name)
{
	CALL_OR_FAIL(here());
	functions[++last_id] = name;
	return *f = last_id, OK;
}

i32 emu_cuFuncLoad(u64)
{
	CALL_OR_FAIL(here());
	return OK;
}

i32 emu_cuFuncGetAttribute(i32 *v, i32, u64)
{
	CALL_OR_FAIL(here());
	return *v = 0, OK;
}

i32 emu_cuFuncSetAttribute(u64 f, i32 which, i32 value)
{
	if (f == settings) {
		std::lock_guard<std::mutex> guard(lock);
		if (which == NO_MULTICAST)
			no_multicast = value != 0;
		else if (which == NO_PEERS)
			no_peers = value != 0;
		else if (which == VERSION)
			version = value;
		else if (which == MAJOR)
			major_capability = value;
		else if (i32 d = here(); d >= 0)
			fail_in[d] = value, calls[d] = fired[d] = 0;
		return OK;
	}
	CALL_OR_FAIL(here());
	return OK;
}

i32 emu_cuOccupancyMaxActiveBlocksPerMultiprocessor(i32 *n, u64, i32, size_t)
{
	CALL_OR_FAIL(here());
	return *n = resident, OK;
}

i32 emu_cuLaunchKernelEx(const launch_config *config, u64 f, void **params, void **)
{
	CALL_OR_FAIL(here());
	auto i = functions.find(f);
	if (i == functions.end())
		return INVALID;
	if (config->grid[0] > multiprocessors * resident) { // blocks that wait for each other would wait for ever
		mistakes++;
		fprintf(stderr, "emulated driver: %u blocks of %s\n", config->grid[0], i->second.c_str());
	}
	blocks += static_cast<i32>(config->grid[0]);
	launches += i->second.find("multicast") != std::string::npos ? 1 : 0;
	block_launches += i->second.find("multicast_blocks") != std::string::npos ? 1 : 0;
	if (emu_enqueue != nullptr)
		emu_enqueue(config->stream, static_cast<u32>(here()), i->second.c_str(), config->grid[0], params[0]);
	return OK;
}

// Where the memory behind a multicast address is, by device: all devices of the object must have some.
u32 emu_multicast(u64 p, u64 *to, u32 room)
{
	std::lock_guard<std::mutex> guard(lock);
	u64 from = 0;
	mapping *m = mapped(p, 1, &from);
	if (m == nullptr || !m->what->multicast || m->access.empty())
		return 0;
	u32 n = 0;
	for (i32 device : m->what->added)
		for (bind &b : m->what->bound)
			if (b.device == device && from >= b.at && from < b.at + b.bytes && n < room)
				to[n++] = reinterpret_cast<u64>(b.memory->here) + b.from + from - b.at;
	return n == m->what->team ? n : 0;
}

i32 cuGetProcAddress_v2(const char *name, void **fn, i32 of, u64, i32 *found)
{
	static const std::map<std::string, void *> table = {
#define ENTRY(name) {#name, reinterpret_cast<void *>(emu_##name)}
	    ENTRY(cuInit),
	    ENTRY(cuGetErrorName),
	    ENTRY(cuDriverGetVersion),
	    ENTRY(cuDeviceGetCount),
	    ENTRY(cuDeviceGet),
	    ENTRY(cuDeviceGetName),
	    ENTRY(cuDeviceGetUuid),
	    ENTRY(cuDeviceGetAttribute),
	    ENTRY(cuDeviceCanAccessPeer),
	    ENTRY(cuDevicePrimaryCtxRetain),
	    ENTRY(cuDevicePrimaryCtxRelease),
	    ENTRY(cuCtxGetCurrent),
	    ENTRY(cuCtxPushCurrent),
	    ENTRY(cuCtxPopCurrent),
	    ENTRY(cuCtxSynchronize),
	    ENTRY(cuCtxEnablePeerAccess),
	    ENTRY(cuCtxGetStreamPriorityRange),
	    ENTRY(cuStreamCreateWithPriority),
	    ENTRY(cuStreamDestroy),
	    ENTRY(cuStreamSynchronize),
	    ENTRY(cuStreamWaitEvent),
	    ENTRY(cuStreamIsCapturing),
	    ENTRY(cuStreamGetCtx),
	    ENTRY(cuStreamWriteValue64),
	    ENTRY(cuThreadExchangeStreamCaptureMode),
	    ENTRY(cuEventCreate),
	    ENTRY(cuEventDestroy),
	    ENTRY(cuEventRecord),
	    ENTRY(cuEventQuery),
	    ENTRY(cuEventSynchronize),
	    ENTRY(cuMemGetInfo),
	    ENTRY(cuMemAlloc),
	    ENTRY(cuMemFree),
	    ENTRY(cuMemHostAlloc),
	    ENTRY(cuMemFreeHost),
	    ENTRY(cuMemHostGetDevicePointer),
	    ENTRY(cuMemcpyAsync),
	    ENTRY(cuMemcpyHtoDAsync),
	    ENTRY(cuMemcpyDtoHAsync),
	    ENTRY(cuMemsetD8Async),
	    ENTRY(cuPointerGetAttributes),
	    ENTRY(cuMemGetAddressRange),
	    ENTRY(cuIpcGetMemHandle),
	    ENTRY(cuIpcOpenMemHandle),
	    ENTRY(cuMemAddressReserve),
	    ENTRY(cuMemAddressFree),
	    ENTRY(cuMemCreate),
	    ENTRY(cuMemRelease),
	    ENTRY(cuMemMap),
	    ENTRY(cuMemUnmap),
	    ENTRY(cuMemSetAccess),
	    ENTRY(cuMemExportToShareableHandle),
	    ENTRY(cuMemImportFromShareableHandle),
	    ENTRY(cuMemGetAllocationGranularity),
	    ENTRY(cuMemRetainAllocationHandle),
	    ENTRY(cuMulticastCreate),
	    ENTRY(cuMulticastAddDevice),
	    ENTRY(cuMulticastBindMem),
	    ENTRY(cuMulticastUnbind),
	    ENTRY(cuMulticastGetGranularity),
	    ENTRY(cuModuleLoadData),
	    ENTRY(cuModuleUnload),
	    ENTRY(cuModuleGetFunction),
	    ENTRY(cuFuncLoad),
	    ENTRY(cuFuncGetAttribute),
	    ENTRY(cuFuncSetAttribute),
	    ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor),
	    ENTRY(cuLaunchKernelEx),
	};
	auto i = table.find(name);
	if (of > version) {
		*found = 2; // CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
		return *fn = nullptr, OK;
	}
	if (i == table.end()) {
		*found = 1; // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
		return *fn = nullptr, OK;
	}
	return *found = 0, *fn = i->second, OK;
}

} // extern "C"
