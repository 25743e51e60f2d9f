#include "switchyard.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

// Go makes this a library with static thread-local storage, of which a process that loads it late has only some hundred
// bytes left. So the text hangs on a pthread key and not on a __thread variable.
struct failure {
	int32_t rank;
	struct switchyard_detail detail;
	char text[4096];
};

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int have_key;

static void make_key(void) { have_key = pthread_key_create(&key, free) == 0; }

static struct failure *mine(void)
{
	pthread_once(&once, make_key);
	return have_key ? pthread_getspecific(key) : NULL;
}

const char *switchyard_last_error(void)
{
	struct failure *f = mine();
	return f ? f->text : "";
}

int32_t switchyard_last_error_rank(void)
{
	struct failure *f = mine();
	return f ? f->rank : -1;
}

void switchyard_last_error_detail(struct switchyard_detail *out)
{
	struct failure *f = mine();
	*out = f ? f->detail : (struct switchyard_detail){.Rank = -1};
}

void switchyard_set_error(const char *text, uint64_t n, int32_t rank, const struct switchyard_detail *detail)
{
	struct failure *f = mine();
	if (!f) {
		f = have_key ? calloc(1, sizeof *f) : NULL;
		if (!f || pthread_setspecific(key, f) != 0) {
			free(f);
			return;
		}
	}
	if (n > sizeof f->text - 1)
		n = sizeof f->text - 1;
	memcpy(f->text, text, n);
	f->text[n] = 0;
	f->rank = rank;
	f->detail = *detail;
}
