package host

import "github.com/switchyard-moe/switchyard/kernels"

// ExchangeBlock is the control block of one communicator for exchanges: the same layout at the same Offset of every rank's
// segment. Methods return offsets from the start of a segment.
type ExchangeBlock struct {
	*kernels.ExchangeBounds
	Offset int64
}

// packetStride is the staging of one packet message: a header word and one word for every 4 bytes.
func (c *ExchangeBlock) packetStride() int64 {
	return kernels.AlignUp(8+2*kernels.AlignUp(c.PacketBytes, 4), kernels.LineBytes)
}

// Epoch is the word that counts this rank's calls, in its own segment.
func (c *ExchangeBlock) Epoch() int64 { return c.Offset }

// Complaints is the word that receivers of this rank's messages count up when one had another size than they expected, and
// no credit to refuse. It is in the sender's segment.
func (c *ExchangeBlock) Complaints() int64 { return c.Offset + 8 }

// Complaint is where dst tells its sender of such a message: the call, which comes last, and both sizes.
func (c *ExchangeBlock) Complaint(dst int) int64 { return c.Credit(dst, 1) + kernels.LineBytes/2 }

// Byte offsets of the words of a complaint, after the call.
const (
	complaintSent     = 8
	complaintExpected = 16
)

// Card is where a rank leaves word of how its memory is found, in its own segment: 4 words.
func (c *ExchangeBlock) Card() int64 { return c.Offset + kernels.LineBytes/2 }

// Signal is the line that src writes in its receiver's segment for calls of the parity. Two parities, because src may
// begin call e+1 while the receiver still reads the line of call e; it cannot begin e+2.
func (c *ExchangeBlock) Signal(parity uint64, src int) int64 {
	return c.Offset + kernels.LineBytes + (int64(parity&1)*int64(c.Size)+int64(src))*kernels.LineBytes
}

// Credit is the line that dst writes in its sender's segment for chunk k.
func (c *ExchangeBlock) Credit(dst, k int) int64 {
	return c.Signal(0, 2*c.Size) + (int64(dst)*int64(c.Slots)+int64(k%c.Slots))*kernels.LineBytes
}

// Taken is the word in which dst tells its sender how far it has read a message where the sender has it, as a sequence
// number: LastSeq when it is through.
func (c *ExchangeBlock) Taken(dst int) int64 { return c.Credit(dst, 1) + kernels.LineBytes/2 - 16 }

// Reading is the word that is not zero while dst reads so, where ranks share a process.
func (c *ExchangeBlock) Reading(dst int) int64 { return c.Taken(dst) + 8 }

// Packet is where packets from src land in calls of the parity.
func (c *ExchangeBlock) Packet(parity uint64, src int) int64 {
	return c.Credit(c.Size, 0) + (int64(parity&1)*int64(c.Size)+int64(src))*c.packetStride()
}

// Eager is where an eager message from src lands in calls of the parity.
func (c *ExchangeBlock) Eager(parity uint64, src int) int64 {
	return c.Packet(0, 2*c.Size) + (int64(parity&1)*int64(c.Size)+int64(src))*kernels.AlignUp(c.EagerBytes, kernels.LineBytes)
}

// Slot is where staged chunk k from src lands.
func (c *ExchangeBlock) Slot(src, k int) int64 {
	return c.Eager(0, 2*c.Size) + (int64(src)*int64(c.Slots)+int64(k%c.Slots))*c.SlotBytes
}

// Staging reports whether a credit's place is a slot rather than the receiver's output.
func (c *ExchangeBlock) Staging(at int64) bool { return at >= c.Slot(0, 0) && at < c.Slot(c.Size, 0) }

// Bytes is the size of the block.
func (c *ExchangeBlock) Bytes() int64 { return c.Slot(c.Size, 0) - c.Offset }

// ControlBytes is the size of the part at the block's start that must be zero before the first call: everything but the
// staging of eager messages and chunks.
func (c *ExchangeBlock) ControlBytes() int64 { return c.Eager(0, 0) - c.Offset }
