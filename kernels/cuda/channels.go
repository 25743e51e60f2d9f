package cuda

import "github.com/switchyard-moe/switchyard/kernels"

// Channels is the control block of one communicator: the same layout at the same Offset of every rank's segment.
//
// A message above PacketBytes is striped over Lanes. A lane is a message of its own, with its own signals and staging,
// served by one block of each rank, so that blocks never wait for each other.
type Channels struct {
	Offset int64
	Size   int // ranks
	Lanes  int
	// Slots is how many chunks of a lane may be under way through staging; SlotBytes is a chunk's size, a multiple of 128.
	Slots     int
	SlotBytes int64
	// PacketBytes bounds messages whose words carry their flag with them. It may be 0.
	PacketBytes int64
}

const controlBytes = 128

func (c *Channels) signals() int64 { return c.Offset + controlBytes }

func (c *Channels) credits() int64 {
	return c.signals() + 2*int64(c.Size)*int64(c.Lanes)*lineBytes
}

func (c *Channels) laneCredits() int64 { return c.credits() + int64(c.Size)*lineBytes }

func (c *Channels) packets() int64 {
	return kernels.AlignUp(c.laneCredits()+int64(c.Size)*int64(c.Lanes)*lineBytes, kernels.LineBytes)
}

func (c *Channels) packetStride() int64 {
	return packetHeaderBytes + (c.PacketBytes+packetGroupPayload-1)/packetGroupPayload*packetGroupBytes
}

func (c *Channels) slots() int64 { return c.packets() + 2*int64(c.Size)*c.packetStride() }

// ControlBytes is the part at the block's start that must be zero before the first call: all but the staging slots.
func (c *Channels) ControlBytes() int64 { return c.slots() - c.Offset }

// Bytes is the size of the block.
func (c *Channels) Bytes() int64 {
	return c.ControlBytes() + int64(c.Size)*int64(c.Lanes)*int64(c.Slots)*c.SlotBytes
}
