package flight

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFallbacksAreCounted(t *testing.T) {
	r, unmet := New(1, 3), New(1, 3)
	reduce, gather := Fallback{"all_reduce", "gloo", "reduction"}, Fallback{"all_gather", "gloo", "tensor"}
	require.Empty(t, r.State(false).Fallbacks)
	for range 2 {
		unmet.FellBack(reduce)
		unmet.FellBack(gather)
	}
	r.FellBack(reduce)
	r.Was(unmet)
	require.Equal(t, map[Fallback]uint64{reduce: 3, gather: 2}, r.State(false).Fallbacks)
	require.Empty(t, unmet.State(false).Fallbacks)
	r.Was(unmet)
	require.Equal(t, map[Fallback]uint64{reduce: 3, gather: 2}, r.State(false).Fallbacks, "nothing counts twice")
}
