package cuda

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/cuda/layout"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/cuda/internal/fatbin"
	shared "github.com/switchyard-moe/switchyard/kernels/cuda/internal/layout"
)

func TestFatbinsAreBuiltFromTheseSources(t *testing.T) {
	root := os.DirFS("../..")
	tree, err := fatbin.Tree(root)
	if err != nil || len(tree) == 0 {
		t.Skip("the sources are not next to the test binary")
	}
	text, err := os.ReadFile("manifest.json")
	require.NoError(t, err)
	m, err := fatbin.Parse(text)
	require.NoError(t, err)
	targets, err := fatbin.Targets(root, m.NVCC)
	require.NoError(t, err)
	families, err := fatbin.Families(os.DirFS("."))
	require.NoError(t, err)
	require.Len(t, targets, len(families)*(1+len(fatbin.Olders())))
	const run = "run `make kernels` and commit what it writes"
	want := map[string]fatbin.File{}
	for _, target := range targets {
		image, err := images.ReadFile(target.File)
		require.NoError(t, err, run)
		want[target.File] = fatbin.FileOf(target.Inputs, image)
	}
	require.Equal(t, want, m.Files, run)
	embedded := 0
	require.NoError(t, fs.WalkDir(images, ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			embedded++
			require.Contains(t, want, name, run)
		}
		return err
	}))
	require.Len(t, want, embedded)
}

// described is what the sources of this package say that kernels share with it.
func described(t *testing.T) *shared.Layout {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command")
	}
	if _, err := os.Stat("args.go"); err != nil {
		t.Skip("the sources are not next to the test binary")
	}
	l, err := shared.Read("../..")
	require.NoError(t, err)
	return l
}

func TestTheHeaderIsWrittenFromTheseSources(t *testing.T) {
	files, err := described(t).Files()
	require.NoError(t, err)
	for name, text := range files {
		b, err := os.ReadFile(filepath.Join("../..", name))
		if errors.Is(err, fs.ErrNotExist) {
			t.Skip("the sources are not next to the test binary")
		}
		require.NoError(t, err)
		require.Equal(t, text, string(b), "%s: run `make kernels` and commit what it writes", name)
	}
}

func TestTheCompilerLaysStructsOutAsDescribed(t *testing.T) {
	header := layout.Of()
	if header == nil {
		t.Skip("built without cgo")
	}
	at := described(t).Offsets()
	require.Equal(t, at, header)
	require.Equal(t, at["control.fault"], controlFault)
}

func TestArgumentsOfAnExchange(t *testing.T) {
	at := described(t).Offsets()
	c := newExchanges(&kernels.ExchangeBounds{Size: 2, Stripes: 4, Slots: 2, SlotBytes: 256, PacketBytes: 100}, 4096)
	x := &kernels.AllToAllV{
		Src: kernels.Buffer{Ptr: 11, Bytes: 18}, Dst: kernels.Buffer{Ptr: 12, Bytes: 20}, Splits: kernels.Buffer{Ptr: 17},
		Routes: &kernels.Routes{
			SendBytes: []int64{1, 2}, SendOffsets: []int64{3, 4}, RecvBytes: []int64{5, 6}, RecvOffsets: []int64{7, 8},
			Order: []int32{0}, ReverseOrder: []int32{0},
		},
	}
	var a exchangeArgs
	world := worldOf(&kernels.Space{Base: 9, Stride: 10, Rank: 1, Size: 2, Segments: []uintptr{14, 19}}, c.offset, 13, time.Second)
	a.fill(world, flagMesh, 15, 16, c, x)
	b := cuda.BytesOf(&a)
	block := c.block()
	for field, want := range map[string]uint64{
		"world.base": 9, "world.stride": 10, "world.segments": 19 + kernels.SegmentsOffset, "world.control": 4096, "world.fault": 13, "world.timeout_ns": 1e9,
		"exchange_args.src": 11, "exchange_args.dst": 12, "exchange_args.dst_offset": math.MaxUint64, "exchange_args.splits": 17,
		"exchange_args.packet_bytes": 100, "exchange_args.slot_bytes": 256, "exchange_args.src_bytes": 18, "exchange_args.dst_bytes": 20,
		"exchange_args.own_bytes": 2, "exchange_args.own_src": 4, "exchange_args.own_dst": 8,
	} {
		require.Contains(t, at, field)
		require.Equal(t, want, binary.LittleEndian.Uint64(b[at[field]:]), field)
	}
	for field, want := range map[string]uint32{
		"world.rank": 1, "world.size": 2, "exchange_args.stripes": 4, "exchange_args.slot_count": 2, "exchange_args.flags": flagMesh,
		"exchange_args.interval": 15, "exchange_args.inverse": 0, "exchange_args.senders": 16,
	} {
		require.Contains(t, at, field)
		require.Equal(t, want, binary.LittleEndian.Uint32(b[at[field]:]), field)
	}
	for i, want := range []int64{block.packetStride, block.control, block.signals, block.credits, block.complaints, block.stripeCredits, block.packets, block.slots, block.end} {
		require.EqualValues(t, want, binary.LittleEndian.Uint64(b[at["exchange_args.block"]+8*i:]))
	}
	steps := b[at["exchange_args.steps"]:]
	require.Zero(t, binary.LittleEndian.Uint64(steps))
	for i, want := range []uint64{1, 3, 5, 7} {
		require.Equal(t, want, binary.LittleEndian.Uint64(steps[at["step.send_bytes"]+8*i:]))
	}
	require.Zero(t, testing.AllocsPerRun(10, func() { a.fill(world, flagMesh, 15, 16, c, x) }))
}

func TestPartsOfAnExchangeBlockDoNotOverlap(t *testing.T) {
	c := newExchanges(&kernels.ExchangeBounds{Size: 8, Stripes: 16, Slots: 4, SlotBytes: 1 << 17, PacketBytes: 1 << 16}, 1<<16)
	b := c.block()
	at := []int64{b.control, b.signals, b.credits, b.stripeCredits, b.packets, b.slots, b.end}
	require.IsIncreasing(t, at)
	for _, v := range at {
		require.Zero(t, v%lineBytes)
	}
	require.Equal(t, c.offset, b.control)
	require.Zero(t, b.packets%128)
	require.Zero(t, b.slots%128)
	require.Equal(t, b.signals+2*8*16*lineBytes, b.credits)
	require.Equal(t, b.packets+2*8*b.packetStride, b.slots)
	require.Equal(t, kernels.Layout{Bytes: b.end - c.offset, Zero: b.slots - c.offset}, c.layout())
}
