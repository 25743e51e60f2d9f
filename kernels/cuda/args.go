package cuda

import "github.com/switchyard-moe/switchyard/kernels"

//go:generate go run ./internal/genlayout -root ../..

// worldOf is the part of the arguments that all families share. control is the place of the communicator's struct sw_control, fault
// the address of its fault record.
func worldOf(space *kernels.Space, control int64, fault uintptr, timeoutNs int64) worldWords {
	return worldWords{
		base: uint64(space.Base), stride: uint64(space.Stride), segments: uint64(space.SegmentTable()),
		control: uint64(control), fault: uint64(fault), timeoutNs: uint64(timeoutNs),
		rank: uint32(space.Rank), size: uint32(space.Size),
	}
}

// addressOf is a buffer's address, 0 where there is none; placeOf its place.
func addressOf(b *kernels.Buffer) uint64 {
	if b.Bytes == 0 {
		return 0
	}
	return uint64(b.Ptr)
}

func placeOf(b *kernels.Buffer) uint64 {
	if b.Bytes == 0 {
		return 0
	}
	return uint64(b.Place)
}

// encodeExchange writes the arguments of an exchange into b, which has exchangeArgsBytes bytes.
func encodeExchange(b []byte, space *kernels.Space, fault uintptr, flags, interval uint32, senders int, c *channels, x *kernels.AllToAllV) {
	r, me := x.Routes, space.Rank
	a := exchangeArgs{
		world: worldOf(space, c.offset, fault, x.Timeout.Nanoseconds()),
		src:   uint64(x.Src.Ptr), dst: uint64(x.Dst.Ptr), dstOffset: x.Dst.PlaceOr(-1), splits: uint64(x.Splits.Ptr),
		block: c.block(), packetBytes: c.PacketBytes, slotBytes: c.SlotBytes, stripes: uint32(c.Stripes), slotCount: uint32(c.Slots),
		flags: flags, interval: interval, senders: uint32(senders),
		srcBytes: x.Src.Bytes, dstBytes: x.Dst.Bytes,
		ownBytes: r.SendBytes[me], ownSrc: r.SendOffsets[me], ownDst: r.RecvOffsets[me],
	}
	if peers := uint64(c.Size - 1); peers > 1 {
		a.inverse = uint32((1<<32 + peers - 1) / peers)
	}
	a.put(b)
	for i, to := range r.Order {
		from := r.ReverseOrder[i]
		putExchangeArgsSteps(b, i, stepWords{
			to: uint32(to), from: uint32(from),
			sendBytes: r.SendBytes[to], sendOffset: r.SendOffsets[to], recvBytes: r.RecvBytes[from], recvOffset: r.RecvOffsets[from],
		})
	}
}
