package alltoallv

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

// Counts cross a socket with Options.Validate. Every message of a peer is an error or a sound value, never a panic.
func FuzzCompareCounts(f *testing.F) {
	a, err := json.Marshal(counts{Send: []int64{1, 2}, Recv: []int64{1, 3}, Elem: 4})
	require.NoError(f, err)
	b, err := json.Marshal(counts{Send: []int64{3, 5}, Recv: []int64{2, 5}, Elem: 4})
	require.NoError(f, err)
	require.NoError(f, compareCounts([]string{string(a), string(b)}))
	f.Add(a, b)
	f.Add(a, []byte(`{"Send":[1],"Recv":[1,2,3]}`))
	f.Add([]byte("[]"), []byte("null"))
	f.Fuzz(func(_ *testing.T, a, b []byte) { _ = compareCounts([]string{string(a), string(b)}) })
}
