package cuda

import (
	"encoding/binary"

	"github.com/switchyard-moe/switchyard/kernels"
)

// What args.h declares. A test compares every number with the header.
const (
	maxRanks           = 64
	lineBytes          = 32
	packetGroupPayload = 1536
	packetGroupBytes   = 2048
	packetHeaderBytes  = 128
	sendThreads        = 384
	watchThreads       = 64
	recvThreads        = 320
	tileBytes          = 4096
	itemBytes          = 128
	packetThreads      = 1024
	copyThreads        = 256
	ownThreads         = 512
	laneMinBytes       = 16384

	flagStaged = 1
	flagMesh   = 2

	faultTimeout  = 1
	faultAborted  = 2
	faultMismatch = 3
	faultPlace    = 4
	faultSplits   = 5

	faultBytes   = 48
	faultKind    = 0
	faultPeer    = 4
	faultEpoch   = 8
	faultSent    = 16
	faultExpect  = 24
	faultLimit   = 32
	faultSending = 40

	controlFault = 12 // of struct sw_control

	argsBytes     = 2776
	copyArgsBytes = argsBytes + 8*maxRanks
	argsDstOffset = 32
	argsSplits    = 40
	argsFault     = 48
	argsControl   = 64
	argsPackets   = 96
	argsSlotBytes = 128
	argsRank      = 136
	argsFlags     = 152
	argsSenders   = 164
	argsSegments  = 184
	argsOwn       = 192
	argsSteps     = 216
	stepBytes     = 40
	stepSend      = 8
	stepRecv      = 24
)

// exchangeArgs encodes struct sw_exchange_args into b, which has argsBytes bytes.
func exchangeArgs(b []byte, space *kernels.Space, fault uintptr, flags, interval uint32, senders int, c *channels, x *kernels.AllToAllV) {
	r := x.Routes
	at := 0
	word := func(v uint64) {
		binary.LittleEndian.PutUint64(b[at:], v)
		at += 8
	}
	word(uint64(space.Base))
	word(uint64(space.Stride))
	word(uint64(x.Src.Addr))
	word(uint64(x.Dst.Addr))
	word(uint64(x.Dst.Place))
	word(uint64(x.Splits.Addr))
	word(uint64(fault))
	word(uint64(x.Timeout.Nanoseconds()))
	word(uint64(c.offset))
	word(uint64(c.signals()))
	word(uint64(c.credits()))
	word(uint64(c.laneCredits()))
	word(uint64(c.packets()))
	word(uint64(c.packetStride()))
	word(uint64(c.PacketBytes))
	word(uint64(c.slots()))
	word(uint64(c.SlotBytes))
	var inverse uint32
	if peers := uint64(c.Size - 1); peers > 1 {
		inverse = uint32((1<<32 + peers - 1) / peers)
	}
	for _, v := range [8]uint32{uint32(space.Rank), uint32(c.Size), uint32(c.Stripes), uint32(c.Slots), flags, interval, inverse, uint32(senders)} {
		binary.LittleEndian.PutUint32(b[at:], v)
		at += 4
	}
	word(uint64(x.Src.Len))
	word(uint64(x.Dst.Len))
	word(uint64(space.SegmentTable()))
	me := space.Rank
	word(uint64(r.SendBytes[me]))
	word(uint64(r.SendOffsets[me]))
	word(uint64(r.RecvOffsets[me]))
	for i, to := range r.Order {
		from := r.ReverseOrder[i]
		word(uint64(from)<<32 | uint64(to))
		word(uint64(r.SendBytes[to]))
		word(uint64(r.SendOffsets[to]))
		word(uint64(r.RecvBytes[from]))
		word(uint64(r.RecvOffsets[from]))
	}
}
