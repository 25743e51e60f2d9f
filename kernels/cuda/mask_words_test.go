package cuda

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
)

// The host reads and writes single words of a struct sw_mask at these places.
func TestPlacesOfMaskWords(t *testing.T) {
	words := reflect.TypeFor[maskWords]()
	require.EqualValues(t, maskBytes, words.Size())
	for name, at := range map[string]uintptr{"mask": maskAt, "asks": asksAt, "taken": takenAt} {
		f, found := words.FieldByName(name)
		require.True(t, found)
		require.Equal(t, at, f.Offset, name)
	}
}
