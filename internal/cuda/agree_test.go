//go:build cgo && linux

package cuda

import (
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
