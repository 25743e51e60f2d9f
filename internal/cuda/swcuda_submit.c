// clang-format off
//go:build cgo && linux
// clang-format on

/* The commands of a batch, in one crossing from Go. */
#include "swcuda_context.h"

#include <string.h>

static sw_result launch(sw_driver *d, const sw_cmd_launch *c, sw_handle stream)
{
	NEED(cuLaunchKernelEx);
	sw_launch_attribute attrs[4];
	sw_launch_config cfg;
	uint32_t n = 0;
	memset(&cfg, 0, sizeof cfg);
	for (int i = 0; i < 3; i++) {
		cfg.grid[i] = c->grid[i];
		cfg.block[i] = c->block[i];
	}
	cfg.shared_bytes = c->shared_bytes;
	cfg.stream = stream;
	cfg.attrs = attrs;
	if (c->flags & SW_LAUNCH_COOPERATIVE) {
		memset(&attrs[n], 0, sizeof attrs[n]);
		attrs[n].id = 2;
		attrs[n++].value.i32 = 1;
	}
	if (c->flags & SW_LAUNCH_PROGRAMMATIC) {
		memset(&attrs[n], 0, sizeof attrs[n]);
		attrs[n].id = 6;
		attrs[n++].value.i32 = 1;
	}
	if (c->flags & SW_LAUNCH_REMOTE_DOMAIN) {
		memset(&attrs[n], 0, sizeof attrs[n]);
		attrs[n].id = 10;
		attrs[n++].value.i32 = 1;
	}
	if (c->cluster > 1) {
		memset(&attrs[n], 0, sizeof attrs[n]);
		attrs[n].id = 4;
		attrs[n].value.dim.x = c->cluster;
		attrs[n].value.dim.y = attrs[n].value.dim.z = 1;
		n++;
	}
	cfg.attr_count = n;
	/* one parameter, a struct */
	void *params[] = {(void *)(c + 1)};
	return d->cuLaunchKernelEx(&cfg, HANDLE(c->function), c->arg_bytes != 0 ? params : NULL, NULL);
}

static sw_result copies(sw_driver *d, const sw_cmd_words *c, sw_handle stream)
{
	uint64_t *list = (uint64_t *)((char *)(uintptr_t)c + sizeof(sw_cmd) + 2 * sizeof(uint64_t));
	uint64_t n = c->a;
	if (sizeof(sw_cmd) + (2 + 3 * n) * 8 > c->cmd.bytes)
		return SW_BAD_COMMAND;
	if (d->cuMemcpyBatchAsync == NULL || stream == NULL || n < 2 || (c->b & 1) == 0) {
		NEED(cuMemcpyAsync);
		for (uint64_t i = 0; i < n; i++) {
			sw_result r = d->cuMemcpyAsync(list[i], list[n + i], list[2 * n + i], stream);
			if (r != 0)
				return r;
		}
		return 0;
	}
	sw_memcpy_attributes attr;
	size_t index = 0, failed = 0;
	memset(&attr, 0, sizeof attr);
	attr.src_access_order = 1;
	attr.flags = 1;
	return d->cuMemcpyBatchAsync(list, list + n, (size_t *)(list + 2 * n), n, &attr, &index, 1, &failed, stream);
}

static sw_result command(sw_driver *d, const sw_cmd *c, sw_handle stream)
{
	const sw_cmd_words *w = (const sw_cmd_words *)c;
	if (c->kind == SW_CMD_LAUNCH) {
		const sw_cmd_launch *l = (const sw_cmd_launch *)c;
		if (c->bytes < sizeof *l || c->bytes - sizeof *l < l->arg_bytes)
			return SW_BAD_COMMAND;
		return launch(d, l, stream);
	}
	if (c->bytes < sizeof(sw_cmd_words))
		return SW_BAD_COMMAND;
	switch (c->kind) {
	case SW_CMD_COPY:
		NEED(cuMemcpyAsync);
		return d->cuMemcpyAsync(w->a, w->b, w->c, stream);
	case SW_CMD_COPIES:
		return copies(d, w, stream);
	case SW_CMD_SET:
		NEED(cuMemsetD8Async);
		return d->cuMemsetD8Async(w->a, (uint8_t)w->b, w->c, stream);
	case SW_CMD_WAIT_VALUE:
		NEED(cuStreamWaitValue64);
		return d->cuStreamWaitValue64(stream, w->a, w->b, (uint32_t)w->c);
	case SW_CMD_WRITE_VALUE:
		NEED(cuStreamWriteValue64);
		return d->cuStreamWriteValue64(stream, w->a, w->b, (uint32_t)w->c);
	case SW_CMD_RECORD:
		NEED(cuEventRecord);
		return d->cuEventRecord(HANDLE(w->a), stream);
	case SW_CMD_WAIT_EVENT:
		NEED(cuStreamWaitEvent);
		return d->cuStreamWaitEvent(stream, HANDLE(w->a), 0);
	}
	return SW_BAD_COMMAND;
}

sw_result sw_submit(sw_driver *d, uint64_t ctx, const uint64_t *streams, int32_t stream_count, const void *commands,
                    int64_t bytes, int64_t *at)
{
	int pushed;
	int64_t pos = 0;
	*at = 0;
	sw_result r = sw_enter(d, ctx, &pushed);
	if (r != 0)
		return r;
	while (r == 0 && pos < bytes) {
		const sw_cmd *c = (const sw_cmd *)((const char *)commands + pos);
		*at = pos;
		if (bytes - pos < (int64_t)sizeof *c || c->bytes < sizeof *c || c->bytes % 8 != 0 ||
		    bytes - pos < (int64_t)c->bytes || c->stream >= stream_count) {
			r = SW_BAD_COMMAND;
			break;
		}
		r = command(d, c, HANDLE(streams[c->stream]));
		pos += c->bytes;
	}
	sw_leave(d, pushed);
	return r;
}
