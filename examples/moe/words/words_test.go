package words

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFold(t *testing.T) {
	require.Equal(t, []string{"aaa bb", "cc", "", "ddddddd", "d"}, Fold("aaa bb cc\n\ndddddddd", 7))
	require.Equal(t, []string{"a", "b"}, Fold("ab", 0))
}
