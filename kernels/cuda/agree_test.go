package cuda

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda/layout"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/cuda/internal/fatbin"
)

func TestFatbinsAreBuiltFromTheseSources(t *testing.T) {
	m, err := fatbin.Parse(manifestText)
	require.NoError(t, err)
	sources, err := fatbin.Sources(os.DirFS("../.."))
	if err != nil || len(sources) == 0 {
		t.Skip("the sources are not beside the test binary")
	}
	const run = "run `make kernels` and commit what it writes"
	require.Equal(t, sources, m.Sources, run)
	require.Equal(t, fatbin.Flags(), m.Flags, run)
	require.Equal(t, fatbin.Sum(alltoallvImage), m.Families["alltoallv"].SHA256, run)
	require.Equal(t, fatbin.Sum(verifyImage), m.Families["verify"].SHA256, run)
	require.Len(t, m.Families, len(fatbin.Families()))
}

func TestArgumentsAgreeWithTheHeader(t *testing.T) {
	header := layout.Of()
	if header == nil {
		t.Skip("built without cgo")
	}
	require.Equal(t, map[string]int{
		"maxRanks": maxRanks, "lineBytes": lineBytes, "packetGroupPayload": packetGroupPayload, "packetGroupBytes": packetGroupBytes,
		"packetHeaderBytes": packetHeaderBytes, "sendThreads": sendThreads, "recvThreads": recvThreads, "packetThreads": packetThreads,
		"watchThreads": watchThreads, "itemBytes": itemBytes, "tileBytes": tileBytes, "copyThreads": copyThreads, "ownThreads": ownThreads, "laneMinBytes": laneMinBytes,
		"aliasOffset": kernels.AliasOffset, "aliasShift": kernels.AliasShift,
		"flagStaged": flagStaged, "flagMesh": flagMesh,
		"faultTimeout": faultTimeout, "faultAborted": faultAborted, "faultMismatch": faultMismatch, "faultPlace": faultPlace, "faultSplits": faultSplits, "faultLimit": faultLimit, "copyArgsBytes": copyArgsBytes,
		"faultBytes": faultBytes, "faultKind": faultKind, "faultPeer": faultPeer, "faultEpoch": faultEpoch, "faultSent": faultSent,
		"faultExpect": faultExpect, "faultSending": faultSending, "controlFault": controlFault,
		"argsBytes": argsBytes, "argsSegments": argsSegments, "argsDstOffset": argsDstOffset, "argsSplits": argsSplits, "argsFault": argsFault,
		"argsControl": argsControl, "argsPackets": argsPackets, "argsSlotBytes": argsSlotBytes, "argsRank": argsRank,
		"argsFlags": argsFlags, "argsSenders": argsSenders, "argsOwn": argsOwn, "argsSteps": argsSteps, "stepBytes": stepBytes, "stepSend": stepSend, "stepRecv": stepRecv,
	}, header)
}

func TestArgumentsAreEncodedInPlace(t *testing.T) {
	c := &channels{kernels.Channels{Size: 2, Stripes: 4, Slots: 2, SlotBytes: 256, PacketBytes: 100}, 4096}
	x := &kernels.AllToAllV{
		Src: kernels.Buffer{Addr: 11}, Dst: kernels.Buffer{Addr: 12, Place: -1}, Launched: kernels.Launched{Timeout: time.Second},
		Routes: &kernels.Routes{
			SendBytes: []int64{1, 2}, SendOffsets: []int64{3, 4}, RecvBytes: []int64{5, 6}, RecvOffsets: []int64{7, 8},
			Order: []int32{0}, ReverseOrder: []int32{0},
		},
	}
	b := make([]byte, argsBytes)
	space := &kernels.Space{Base: 9, Stride: 10, Rank: 1, Size: 2, Segments: []uintptr{14, 19}}
	exchangeArgs(b, space, 13, flagMesh, 15, 16, c, x)
	require.EqualValues(t, 0xff, b[argsDstOffset+7])
	require.EqualValues(t, 13, b[argsFault])
	require.EqualValues(t, 0x10, b[argsControl+1])
	require.EqualValues(t, 1, b[argsSlotBytes+1])
	require.EqualValues(t, 1, b[argsRank])
	require.EqualValues(t, []byte{flagMesh, 15, 16}, []byte{b[argsFlags], b[argsFlags+4], b[argsSenders]})
	require.EqualValues(t, []byte{19, kernels.SegmentsOffset >> 8}, b[argsSegments:argsSegments+2])
	require.EqualValues(t, []byte{2, 4, 8}, []byte{b[argsOwn], b[argsOwn+8], b[argsOwn+16]})
	require.EqualValues(t, []byte{0, 0}, []byte{b[argsSteps], b[argsSteps+4]})
	require.EqualValues(t, []byte{1, 3}, []byte{b[argsSteps+stepSend], b[argsSteps+stepSend+8]})
	require.EqualValues(t, []byte{5, 7}, []byte{b[argsSteps+stepRecv], b[argsSteps+stepRecv+8]})
	require.Zero(t, testing.AllocsPerRun(10, func() { exchangeArgs(b, space, 13, flagMesh, 15, 16, c, x) }))
}

func TestChannelsDoNotOverlap(t *testing.T) {
	c := &channels{kernels.Channels{Size: 8, Stripes: 16, Slots: 4, SlotBytes: 1 << 17, PacketBytes: 1 << 16}, 1 << 16}
	at := []int64{c.offset, c.signals(), c.credits(), c.laneCredits(), c.packets(), c.slots(), c.offset + c.bytes()}
	require.IsIncreasing(t, at)
	for _, v := range at {
		require.Zero(t, v%lineBytes)
	}
	require.Zero(t, c.packets()%128)
	require.Zero(t, c.slots()%128)
	require.Equal(t, c.controlBytes(), c.slots()-c.offset)
}
