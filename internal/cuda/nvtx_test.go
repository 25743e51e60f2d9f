//go:build cgo && linux

package cuda

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// profiler is a library as a profiler injects it: it writes down the ranges that it is told of.
const profiler = `
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*function)(void);
typedef struct { size_t bytes; int (*table)(int, function ***, unsigned int *); } callbacks;
typedef struct { size_t bytes; uint32_t version, reserved; void (*set)(uint32_t); } info;

static uint64_t ranges;
static FILE *out;

typedef struct {
	uint16_t version, size;
	uint32_t category;
	int32_t color_kind;
	uint32_t color;
	int32_t payload_kind, reserved;
	union { int64_t number; double real; } payload;
	int32_t message_kind;
	union { const char *ascii; const wchar_t *wide; } message;
} attributes;

static uint64_t start(const attributes *a)
{
	if (a->version != 3 || a->size != 48 || a->size != sizeof *a || a->message_kind != 1)
		abort();
	fprintf(out, "start %lu %s", ++ranges, a->message.ascii);
	if (a->payload_kind == 2)
		fprintf(out, ", %ld", a->payload.number);
	fprintf(out, "\n");
	fflush(out);
	return ranges;
}
static void end(uint64_t range) { fprintf(out, "end %lu\n", range); fflush(out); }

int InitializeInjectionNvtx2(const void *(*export)(uint32_t))
{
	function **table;
	unsigned int size;
	const callbacks *c = export(1);
	const info *i = export(3);
	if (export(2) != NULL || c->bytes != sizeof *c || i->bytes != sizeof *i || i->version != 3 || c->table(2, &table, &size) != 0)
		return 0;
	i->set(3);
	if (c->table(1, &table, &size) != 1 || size != 16 || table[0] != NULL || table[size] != NULL)
		return 0;
	out = fopen(getenv("RANGES"), "w");
	*table[4] = (function)start;
	*table[7] = (function)end;
	*table[15] = NULL;
	return 1;
}
`

// A process that a profiler runs shows its ranges there. The profiler is one in 50 lines; the process is this test again.
func TestRanges(t *testing.T) {
	if proctest.Again() {
		outer := StartRange("outer", 4096)
		inner := StartRange(strings.Repeat("x", 200), -1)
		done := make(chan struct{})
		go func() { defer close(done); outer.End() }()
		<-done
		inner.End()
		return
	}
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler to make a profiler with")
	}
	dir := t.TempDir()
	source, lib, said := filepath.Join(dir, "profiler.c"), filepath.Join(dir, "profiler.so"), filepath.Join(dir, "ranges")
	require.NoError(t, os.WriteFile(source, []byte(profiler), 0o600))
	out, err := exec.Command(cc, "-shared", "-fPIC", "-o", lib, source).CombinedOutput()
	require.NoError(t, err, string(out))
	run := func(environ ...string) string {
		require.NoError(t, os.WriteFile(said, nil, 0o600))
		p := proctest.Start(t, proctest.Spec{Env: append(environ, "RANGES="+said)})
		require.NoError(t, errors.Join(proctest.Failures([]*proctest.Process{p})...))
		got, err := os.ReadFile(said)
		require.NoError(t, err)
		return string(got)
	}
	require.Equal(t, "start 1 switchyard: outer, 4096\nstart 2 switchyard: "+strings.Repeat("x", 115)+"\nend 1\nend 2\n", run("SWITCHYARD_NVTX=1", "NVTX_INJECTION64_PATH="+lib))
	require.Empty(t, run("SWITCHYARD_NVTX=", "NVTX_INJECTION64_PATH="+lib), "nobody asked")
	require.Empty(t, run("SWITCHYARD_NVTX=1", "NVTX_INJECTION64_PATH="), "no profiler")
	require.Empty(t, run("SWITCHYARD_NVTX=1", "NVTX_INJECTION64_PATH=/nowhere.so"), "a profiler that is not there")
}

func BenchmarkRangeOff(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		StartRange("all_to_all", 1).End()
	}
}
