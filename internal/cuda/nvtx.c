// clang-format off
//go:build cgo && linux
// clang-format on

/*
 * NVTX has no library of its own: a profiler names one in NVTX_INJECTION64_PATH, and who has ranges to show opens it
 * and hands it tables of function pointers, which it fills. The numbers below are those of NVTX 3's interface.
 */
#include "nvtx.h"

#include <dlfcn.h>
#include <string.h>

typedef void (*function)(void);
/* attributes of a range: version 3, and those of its fields that have a kind */
struct attributes {
	uint16_t version, size;
	uint32_t category;
	int32_t color_kind;
	uint32_t color;
	int32_t payload_kind, reserved;
	int64_t payload;
	int32_t message_kind;
	const char *message;
};

enum { PAYLOAD_INT64 = 2, MESSAGE_ASCII = 1 };

typedef uint64_t (*range_start)(const struct attributes *);
typedef void (*range_end)(uint64_t);

enum { CALLBACKS = 1, VERSION_INFO = 3 };                /* export tables */
enum { CORE = 1 };                                       /* the module with ranges */
enum { RANGE_START = 4, RANGE_END = 7, CORE_SIZE = 16 }; /* places in its table */

static function functions[CORE_SIZE];
static function *core[CORE_SIZE + 1]; /* ends with a null pointer, and begins with one */

static int module_table(int module, function ***table, unsigned int *size)
{
	if (module != CORE)
		return 0;
	if (table != NULL)
		*table = core;
	if (size != NULL)
		*size = CORE_SIZE;
	return 1;
}

static void set_version(uint32_t version) { (void)version; }

static const struct {
	size_t bytes;
	int (*module_table)(int, function ***, unsigned int *);
} callbacks = {sizeof callbacks, module_table};

static const struct {
	size_t bytes;
	uint32_t version, reserved;
	void (*set_version)(uint32_t);
} version_info = {sizeof version_info, 3, 0, set_version};

static const void *export_table(uint32_t id)
{
	return id == CALLBACKS ? (const void *)&callbacks : id == VERSION_INFO ? (const void *)&version_info : NULL;
}

int sw_nvtx_open(const char *path)
{
	void *lib = dlopen(path, RTLD_LAZY);
	if (lib == NULL)
		return 0;
	int (*initialize)(const void *(*)(uint32_t)) =
	    (int (*)(const void *(*)(uint32_t)))dlsym(lib, "InitializeInjectionNvtx2");
	for (int i = 1; i < CORE_SIZE; i++)
		core[i] = &functions[i];
	if (initialize == NULL || initialize(export_table) == 0 || functions[RANGE_START] == NULL ||
	    functions[RANGE_END] == NULL) {
		memset(functions, 0, sizeof functions);
		dlclose(lib);
		return 0;
	}
	return 1;
}

uint64_t sw_nvtx_start(const char *name, size_t n, int64_t bytes)
{
	char text[128] = "switchyard: ";
	const size_t at = strlen(text), room = sizeof text - 1 - at;
	memcpy(text + at, name, n < room ? n : room);
	const struct attributes a = {
	    .version = 3,
	    .size = sizeof a,
	    .payload_kind = bytes < 0 ? 0 : PAYLOAD_INT64,
	    .payload = bytes,
	    .message_kind = MESSAGE_ASCII,
	    .message = text,
	};
	return ((range_start)functions[RANGE_START])(&a);
}

void sw_nvtx_end(uint64_t range) { ((range_end)functions[RANGE_END])(range); }
