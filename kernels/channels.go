package kernels

// Channels is the control block of one communicator: the same layout at the same Offset of every rank's segment. Methods
// return offsets from the start of a segment.
type Channels struct {
	Offset int64
	Size   int // ranks
	// Slots is how many chunks of a message may be under way to a rank through staging; SlotBytes is a chunk's size.
	Slots     int
	SlotBytes int64
	// EagerBytes bounds messages that land in staging without a credit. It is 0 where a communicator has no such staging.
	EagerBytes int64
	// PacketBytes bounds messages whose words carry their flag with them.
	PacketBytes int64
}

// AlignUp is the least multiple of a that is not below n.
func AlignUp(n, a int64) int64 { return (n + a - 1) / a * a }

// packetStride is the staging of one packet message: a header word and one word for every 4 bytes.
func (c *Channels) packetStride() int64 { return AlignUp(8+2*AlignUp(c.PacketBytes, 4), LineBytes) }

// Epoch is the word that counts this rank's calls, in its own segment.
func (c *Channels) Epoch() int64 { return c.Offset }

// Card is where a rank leaves word of how its memory is found, in its own segment: 4 words.
func (c *Channels) Card() int64 { return c.Offset + LineBytes/2 }

// Signal is the line that src writes in its receiver's segment for calls of the parity. Two parities, because src may
// begin call e+1 while the receiver still reads the line of call e; it cannot begin e+2.
func (c *Channels) Signal(parity uint64, src int) int64 {
	return c.Offset + LineBytes + (int64(parity&1)*int64(c.Size)+int64(src))*LineBytes
}

// Credit is the line that dst writes in its sender's segment for chunk k.
func (c *Channels) Credit(dst, k int) int64 {
	return c.Signal(0, 2*c.Size) + (int64(dst)*int64(c.Slots)+int64(k%c.Slots))*LineBytes
}

// Taken is the word in which dst tells its sender how far it has read a message where the sender has it, as a sequence
// number: LastSeq when it is through.
func (c *Channels) Taken(dst int) int64 { return c.Credit(dst, 1) + LineBytes/2 - 16 }

// Reading is the word that is not zero while dst reads so, where ranks share a process.
func (c *Channels) Reading(dst int) int64 { return c.Taken(dst) + 8 }

// Packet is where packets from src land in calls of the parity.
func (c *Channels) Packet(parity uint64, src int) int64 {
	return c.Credit(c.Size, 0) + (int64(parity&1)*int64(c.Size)+int64(src))*c.packetStride()
}

// Eager is where an eager message from src lands in calls of the parity.
func (c *Channels) Eager(parity uint64, src int) int64 {
	return c.Packet(0, 2*c.Size) + (int64(parity&1)*int64(c.Size)+int64(src))*AlignUp(c.EagerBytes, LineBytes)
}

// Slot is where staged chunk k from src lands.
func (c *Channels) Slot(src, k int) int64 {
	return c.Eager(0, 2*c.Size) + (int64(src)*int64(c.Slots)+int64(k%c.Slots))*c.SlotBytes
}

// Staging reports whether a credit's place is a slot rather than the receiver's output.
func (c *Channels) Staging(at int64) bool { return at >= c.Slot(0, 0) && at < c.Slot(c.Size, 0) }

// Bytes is the size of the block.
func (c *Channels) Bytes() int64 { return c.Slot(c.Size, 0) - c.Offset }

// ControlBytes is the size of the part at the block's start that must be zero before the first call: everything but the
// staging of eager messages and chunks.
func (c *Channels) ControlBytes() int64 { return c.Eager(0, 0) - c.Offset }

// Mode is how one message travels. It depends on the message's size and on the Channels alone, which both ends share.
type Mode uint8

// The modes.
const (
	PacketMode Mode = iota // each word carries its flag
	EagerMode              // into staging, no credit
	CreditMode             // the receiver says where
)

// String is the mode's name in reports.
func (m Mode) String() string { return [...]string{"packet", "eager", "credit"}[m] }

// Mode of a message of n bytes. Without packets and eager staging an empty message is eager.
func (c *Channels) Mode(n int64) Mode {
	switch {
	case c.PacketBytes > 0 && n <= c.PacketBytes:
		return PacketMode
	case n <= c.EagerBytes:
		return EagerMode
	default:
		return CreditMode
	}
}
