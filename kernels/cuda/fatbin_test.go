package cuda

import (
	"bytes"
	"encoding/binary"
	"io/fs"
	"testing"

	"github.com/stretchr/testify/require"
)

// An image is one entry of a fatbin, as its header tells of it.
type image struct {
	kind         uint16 // machine code or PTX
	minor, major uint16 // of PTX's language; of machine code, minor is the version of the ELF file's ABI
	arch         uint32 // 80 for 8.0
	zstd         bool   // how it is compressed
}

const (
	ptx         = 1
	machineCode = 2
)

// entries are those of a fatbin.
func entries(t *testing.T, b []byte) []image {
	t.Helper()
	le := binary.LittleEndian
	require.Greater(t, len(b), 16)
	require.Equal(t, uint32(0xba55ed50), le.Uint32(b))
	require.EqualValues(t, len(b)-16, le.Uint64(b[8:]))
	var all []image
	for b = b[16:]; len(b) > 0; {
		require.Greater(t, len(b), 48)
		header, size := uint64(le.Uint32(b[4:])), le.Uint64(b[8:])
		require.Less(t, header+4, uint64(len(b)))
		require.LessOrEqual(t, header+size, uint64(len(b)))
		all = append(all, image{le.Uint16(b), le.Uint16(b[24:]), le.Uint16(b[26:]), le.Uint32(b[28:]),
			bytes.HasPrefix(b[header:], []byte{0x28, 0xb5, 0x2f, 0xfd})})
		b = b[header+size:]
	}
	return all
}

// The headers of the fatbins, which a driver's loader reads, are as docs/measured/2026-11-24-older-drivers.md says. They ask for CUDA 13.0, which
// driver 580 implements: the assembler of CUDA 12.4 writes version 7 of the ABI, and knows PTX up to 8.4. Older drivers load older/.
func TestFatbinsNeedTheDriverOfThePage(t *testing.T) {
	files, err := fs.Glob(images, "*.fatbin")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, f := range files {
		b, err := images.ReadFile(f)
		require.NoError(t, err)
		require.Equal(t, []image{
			{machineCode, 8, 1, 80, true},
			{machineCode, 8, 1, 90, true},
			{machineCode, 8, 1, 100, true},
			{ptx, 0, 9, 100, true},
		}, entries(t, b), f)
	}
}
