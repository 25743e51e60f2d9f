package cuda

// Channels is the control block of one communicator: the same layout at the same Offset of every rank's segment.
//
// A message above PacketBytes is cut into at most so many Stripes. A stripe is a message of its own, with its own signals and
// staging, served by one block of each rank, so that blocks never wait for each other.
type Channels struct {
	Offset  int64
	Size    int // ranks
	Stripes int
	// Slots is how many chunks of a stripe may be under way through staging; SlotBytes is a chunk's size, a multiple of 128.
	Slots     int
	SlotBytes int64
	// PacketBytes bounds messages whose words carry their flag with them. It may be 0.
	PacketBytes int64
}

func (c *Channels) block() exchangeBlock {
	return layExchangeBlock(c.Offset, int64(c.Size), int64(c.Stripes), int64(c.Slots), c.SlotBytes, c.PacketBytes)
}

// ControlBytes is the part at the block's start that must be zero before the first call: all but the staging slots.
func (c *Channels) ControlBytes() int64 {
	b := c.block()
	return b.slots - c.Offset
}

// Bytes is the size of the block.
func (c *Channels) Bytes() int64 {
	b := c.block()
	return b.end - c.Offset
}
