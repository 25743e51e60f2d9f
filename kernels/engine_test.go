package kernels_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/kernels"
)

// Buffers overlap that share a byte; one without bytes shares none.
func TestBuffersThatShareAByteOverlap(t *testing.T) {
	whole := kernels.Buffer{Ptr: 64, Bytes: 32}
	for _, c := range []struct {
		other kernels.Buffer
		want  bool
	}{
		{whole, true},
		{kernels.Buffer{Ptr: 72, Bytes: 8}, true},
		{kernels.Buffer{Ptr: 95, Bytes: 8}, true},
		{kernels.Buffer{Ptr: 96, Bytes: 8}, false},
		{kernels.Buffer{Ptr: 57, Bytes: 8}, true},
		{kernels.Buffer{Ptr: 56, Bytes: 8}, false},
		{kernels.Buffer{Ptr: 72}, false},
		{kernels.Buffer{}, false},
	} {
		require.Equal(t, c.want, whole.Overlaps(&c.other), "%+v", c.other)
		require.Equal(t, c.want, c.other.Overlaps(&whole), "%+v", c.other)
	}
}
