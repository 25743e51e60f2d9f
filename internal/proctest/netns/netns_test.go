package netns

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// A namespace that New or Mend has returned reaches the others at once, also while many come and go.
func TestNamespacesReachEachOther(t *testing.T) {
	for range 8 {
		t.Run("net", func(t *testing.T) {
			t.Parallel()
			net, err := New(3)
			if errors.Is(err, ErrUnavailable) {
				t.Skip(err)
			}
			require.NoError(t, err)
			defer net.Close()
			reach := func() {
				for _, s := range net.Spaces[1:] {
					requireUp(t, s)
				}
			}
			reach()
			require.NoError(t, net.Spaces[1].Cut())
			require.NoError(t, net.Spaces[1].Mend())
			reach()
		})
	}
}

func requireUp(t *testing.T, s *Namespace) {
	t.Helper()
	state, err := os.ReadFile(s.port)
	require.NoError(t, err)
	require.Equal(t, "3\n", string(state), "%s: 3 is forwarding", s.Device)
}
