package cuda

import "github.com/switchyard-moe/switchyard/kernels"

// channels is the control block of one communicator for exchanges: the same layout at the same offset of every rank's segment.
//
// A message above PacketBytes is cut into Stripes. A stripe is a message of its own, with its own signals and staging,
// served by one block of each rank, so that blocks never wait for each other.
type channels struct {
	kernels.Channels
	offset int64
}

const controlLine = 128

func (c *channels) signals() int64 { return c.offset + controlLine }

func (c *channels) credits() int64 {
	return c.signals() + 2*int64(c.Size)*int64(c.Stripes)*lineBytes
}

func (c *channels) laneCredits() int64 { return c.credits() + int64(c.Size)*lineBytes }

func (c *channels) packets() int64 {
	return kernels.AlignUp(c.laneCredits()+int64(c.Size)*int64(c.Stripes)*lineBytes, kernels.LineBytes)
}

func (c *channels) packetStride() int64 {
	return packetHeaderBytes + (c.PacketBytes+packetGroupPayload-1)/packetGroupPayload*packetGroupBytes
}

func (c *channels) slots() int64 { return c.packets() + 2*int64(c.Size)*c.packetStride() }

// controlBytes is the part at the block's start that must be zero before the first call: all but the staging slots.
func (c *channels) controlBytes() int64 { return c.slots() - c.offset }

// bytes is the size of the block.
func (c *channels) bytes() int64 {
	return c.controlBytes() + int64(c.Size)*int64(c.Stripes)*int64(c.Slots)*c.SlotBytes
}
