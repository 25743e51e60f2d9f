package cuda

import "github.com/switchyard-moe/switchyard/kernels"

// channels is the control block of one communicator for exchanges: the same layout at the same offset of every rank's segment.
//
// A message above PacketBytes is cut into at most so many Stripes. A stripe is a message of its own, with its own signals and
// staging, served by one block of each rank, so that blocks never wait for each other.
type channels struct {
	*kernels.Channels
	offset int64
}

func (c *channels) block() exchangeBlock {
	return layExchangeBlock(c.offset, int64(c.Size), int64(c.Stripes), int64(c.Slots), c.SlotBytes, c.PacketBytes)
}

// controlBytes is the part at the block's start that must be zero before the first call: all but the staging slots.
func (c *channels) controlBytes() int64 {
	b := c.block()
	return b.slots - c.offset
}

// bytes is the size of the block.
func (c *channels) bytes() int64 {
	b := c.block()
	return b.end - c.offset
}
