package device

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda"
)

// oldDriver is a library that opens and says what the environment has for its version. Every other entry point succeeds and does nothing.
const oldDriver = `
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static int32_t nothing(void) { return 0; }
static int32_t version(int32_t *v) { *v = atoi(getenv("OLD_DRIVER")); return 0; }
int32_t cuGetProcAddress_v2(const char *name, void **fn, int32_t of, uint64_t flags, int32_t *found)
{
	*found = 0;
	*fn = strcmp(name, "cuDriverGetVersion") == 0 ? (void *)version : (void *)nothing;
	return 0;
}
`

// A driver that is too old is told from none, in one sentence with both versions and the cure.
func TestCUDARefusesADriverThatIsTooOld(t *testing.T) {
	const wants = "cuda: the driver implements CUDA 12.3, and the kernels need 12.4: install NVIDIA's driver 550 or newer"
	switch os.Getenv("OLD_DRIVER") {
	case "12030":
		_, err := CUDA(0)
		require.EqualError(t, err, "device: cuda:0: "+wants)
		require.NotErrorIs(t, err, ErrUnavailable)
		_, err = CUDACount()
		require.EqualError(t, err, "device: count GPUs: "+wants)
		return
	case "12040":
		_, err := CUDACount()
		require.NoError(t, err)
		return
	}
	if _, err := CUDACount(); errors.Is(err, cuda.ErrNotBuilt) {
		t.Skip(err)
	}
	dir := t.TempDir()
	source := filepath.Join(dir, "driver.c")
	require.NoError(t, os.WriteFile(source, []byte(oldDriver), 0o666))
	out, err := exec.Command("cc", "-shared", "-fPIC", "-o", filepath.Join(dir, "libcuda.so.1"), source).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip("needs a C compiler")
	}
	require.NoError(t, err, "%s", out)
	for _, version := range []string{"12030", "12040"} {
		c := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1")
		c.Env = append(os.Environ(), "OLD_DRIVER="+version, "LD_LIBRARY_PATH="+dir)
		out, err := c.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
}
