//go:build cgo && linux

package cuda

import (
	"os"
	"regexp"
	"strconv"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

func TestOperationTablesAgree(t *testing.T) {
	for o := range opCount {
		require.Equal(t, opNames[o], operationName(o), "operation %d", o)
	}
	require.Empty(t, operationName(opCount))
}

func TestCommandLayoutAgrees(t *testing.T) {
	l, w, function, grid, flags, argBytes := commandLayout()
	require.Equal(t, []uintptr{launchBytes, wordsBytes, 8, 16, 44, 52}, []uintptr{l, w, function, grid, flags, argBytes})
}

func TestUnknownOperationIsRefused(t *testing.T) {
	var a args
	require.Equal(t, codeBadCommand, invoke(nil, 0, opCount, &a, unsafe.Pointer(nil)))
}

// All interfaces that are asked for are those of CUDA 12.4, but for the ones that something else stands in for.
func TestEntryPointsAreThoseOfTheLeastDriver(t *testing.T) {
	text, err := os.ReadFile("swcuda.h")
	if err != nil {
		t.Skip("the sources are not next to the test binary")
	}
	later := map[string]int{}
	all := regexp.MustCompile(`\bX\((cu\w+), (\d+), `).FindAllStringSubmatch(string(text), -1)
	require.Greater(t, len(all), 70)
	for _, m := range all {
		version, err := strconv.Atoi(m[2])
		require.NoError(t, err)
		if version > leastVersion {
			later[m[1]] = version
		}
	}
	require.Equal(t, map[string]int{"cuMemcpyBatchAsync": 12080}, later, "single copies stand in for it")
}
