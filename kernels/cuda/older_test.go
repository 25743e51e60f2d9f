package cuda

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/cuda/internal/fatbin"
)

// cubin is what a driver's loader reads of machine code.
type cubin struct {
	osABI, abi byte
	machine    uint16 // 190 is NVIDIA's
	version    uint32 // of the file; with ABI 7 that of CUDA, 124 for 12.4
	sm         uint32
}

// read parses an ELF file's header, and lists its kernels. debug/elf refuses the file's version.
func read(t *testing.T, b []byte) (cubin, []string) {
	t.Helper()
	le := binary.LittleEndian
	require.Greater(t, len(b), 64)
	require.Equal(t, "\x7fELF\x02\x01", string(b[:6]), "64 bits, little endian")
	c := cubin{b[7], b[8], le.Uint16(b[18:]), le.Uint32(b[20:]), le.Uint32(b[48:]) & 0xff}
	if c.osABI == 0x41 {
		c.sm = le.Uint32(b[48:]) >> 8 & 0xff
	}
	sections, size, n, of := le.Uint64(b[40:]), uint64(le.Uint16(b[58:])), uint64(le.Uint16(b[60:])), uint64(le.Uint16(b[62:]))
	require.LessOrEqual(t, sections+n*size, uint64(len(b)))
	section := func(i uint64) []byte { return b[sections+i*size:][:size] }
	text := b[le.Uint64(section(of)[24:]):]
	var names []string
	for i := range n {
		name, _, _ := bytes.Cut(text[le.Uint32(section(i)):], []byte{0})
		if kernel, ok := strings.CutPrefix(string(name), ".text."); ok {
			names = append(names, kernel)
		}
	}
	slices.Sort(names)
	return c, names
}

// The machine code for older drivers is for the GPU that its name says, of the ABI that ptxas of CUDA 12.4 writes, for 10.0 that of 12.8, and has
// the same kernels for every GPU.
func TestOlderDriversHaveMachineCodeOfTheirABI(t *testing.T) {
	want := map[string]cubin{
		"sm_80":  {0x33, 7, 190, 124, 80},
		"sm_90a": {0x33, 7, 190, 124, 90},
		"sm_100": {0x41, 8, 190, 1, 100},
	}
	files, err := images.ReadDir(".")
	require.NoError(t, err)
	seen, total := 0, 0
	for _, file := range files {
		family, ok := strings.CutSuffix(file.Name(), ".fatbin")
		if !ok {
			continue
		}
		var kernels []string
		for _, o := range fatbin.Olders() {
			packed, err := images.ReadFile(o.File(family))
			require.NoError(t, err)
			b, err := imageOf(&o, family)
			require.NoError(t, err)
			c, names := read(t, b)
			require.Equal(t, want[o.Arch], c, o.File(family))
			require.NotEmpty(t, names, o.File(family))
			if kernels == nil {
				kernels = names
			}
			require.Equal(t, kernels, names, o.File(family))
			seen, total = seen+1, total+len(packed)
		}
	}
	require.NotZero(t, seen)
	t.Logf("%d files of %d bytes", seen, total)
}

// The engine loads what the driver does: an emulated driver of CUDA 12.4 or 12.8 refuses fatbins, and machine code that is not for its GPUs or of
// a later ABI.
func TestTheEngineLoadsWhatTheDriverDoes(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	_, settings := emulated.Device(t, 0)
	for _, c := range []struct {
		version, major int
		older          string // SWITCHYARD_OLDER_KERNELS
		elf            bool
		err            string
	}{
		{version: 13000, major: 8},
		{version: 13000, major: 9},
		{version: 13000, major: 10},
		{version: 13000, major: 12},
		{version: 12040, major: 8, elf: true},
		{version: 12040, major: 9, elf: true},
		{version: 12090, major: 9, elf: true},
		{version: 12080, major: 10, elf: true},
		{version: 13000, major: 9, older: "1", elf: true},
		{version: 13000, major: 10, older: "1", elf: true},
		{version: 12060, major: 10, err: "kernels: cuda engine: cuda:0 of compute capability 10: no kernels for a driver that implements CUDA 12.6: install NVIDIA's driver 570 or newer"},
		{version: 12090, major: 12, err: "kernels: cuda engine: cuda:0 of compute capability 12: no kernels for a driver that implements CUDA 12.9: install NVIDIA's driver 580 or newer"},
		{version: 13000, major: 9, older: "yes", err: `kernels: cuda engine: SWITCHYARD_OLDER_KERNELS is "yes", want 0 or 1`},
	} {
		t.Run(fmt.Sprintf("%d for %d, %q", c.version, c.major, c.older), func(t *testing.T) {
			emulated.Version(t, settings, c.version, c.major)
			t.Setenv("SWITCHYARD_OLDER_KERNELS", c.older)
			v, ctx := emulated.Device(t, 0)
			memory, err := ctx.MemAlloc(1 << 20)
			require.NoError(t, err)
			defer func() { require.NoError(t, ctx.MemFree(memory)) }()
			e, err := New(ctx, kernels.Space{Base: memory, Stride: 512 << 10, Size: 2}, 1, func() error { return nil })
			if c.err != "" {
				require.EqualError(t, err, c.err)
				return
			}
			require.NoError(t, err)
			before := emulated.ElfModules.Of(t, v)
			reductions := &kernels.ReduceBounds{Size: 2, Blocks: 1}
			reductions.DefaultSlots(reduceSlots, reduceStaging, maxReduceChunk, 4)
			exchanges := &kernels.ExchangeBounds{Size: 2}
			e.Defaults(exchanges)
			exchanges.Stripes = 4
			for _, f := range []kernels.Family{exchanges, reductions} {
				p, err := e.Open(f, kernels.HeaderBytes)
				require.NoError(t, err)
				require.NoError(t, p.Close())
			}
			require.NoError(t, e.Close())
			if loaded := emulated.ElfModules.Of(t, v) - before; c.elf {
				require.Equal(t, 2, loaded)
			} else {
				require.Zero(t, loaded)
			}
		})
	}
	t.Run("a fatbin on an older driver", func(t *testing.T) {
		emulated.Version(t, settings, 12090, 9)
		_, ctx := emulated.Device(t, 0)
		image, err := imageOf(nil, "results")
		require.NoError(t, err)
		_, err = ctx.LoadModule(image)
		require.ErrorIs(t, err, cuda.Code(209))
	})
}
