package host

import "github.com/switchyard-moe/switchyard/kernels"

// ReduceBlock is the control block of one communicator for reductions: the same layout at the same Offset of every rank's
// segment. Methods return offsets from the start of a segment.
type ReduceBlock struct {
	*kernels.ReduceBounds
	Offset int64
}

// Byte offsets of the words of an entry line, next to LineSeq. They are written before the line's first sequence number of
// a call and stay for the whole call.
const (
	entryCount = 8  // elements of the whole call
	entryCall  = 16 // collective, data type and operator
	entryShape = 24 // digest of slices that Count does not imply
	entrySrc   = 32 // 1 + offset of the writer's input in its segment, 0 when it pushes the input into staging
	entryDst   = 40 // 1 + offset of the writer's output in its segment, 0 when it fetches results itself
)

// Epoch is the word that counts this rank's calls, in its own segment.
func (c *ReduceBlock) Epoch() int64 { return c.Offset }

// Failed is a word in this rank's own segment: 1 once a call has failed half-way. Later launches return at once.
func (c *ReduceBlock) Failed() int64 { return c.Offset + 8 }

// Entry is the line that src writes in a peer's segment for calls of the parity: what it calls, where its buffers are, and
// how far the peer may go. Two parities, because after a one-shot call src may begin call e+1 while the peer still reads
// the line of call e; it cannot begin e+2.
func (c *ReduceBlock) Entry(parity uint64, src int) int64 {
	return c.Offset + kernels.LineBytes + (int64(parity&1)*int64(c.Size)+int64(src))*kernels.LineBytes
}

// Progress is the line that src writes in a peer's segment when it has consumed what the peer offered: in two-shot, when
// the result of a chunk is there as well. src can write it for call e+1 only after the peer has begun e+1.
func (c *ReduceBlock) Progress(src int) int64 {
	return c.Entry(0, 2*c.Size) + int64(src)*kernels.LineBytes
}

// Push is where the data of src lands in one-shot calls of the parity.
func (c *ReduceBlock) Push(parity uint64, src int) int64 {
	return c.Progress(c.Size) + (int64(parity&1)*int64(c.Size)+int64(src))*kernels.AlignUp(c.OneShotBytes, kernels.LineBytes)
}

// Slot is where chunk k from src lands.
func (c *ReduceBlock) Slot(src, k int) int64 {
	return c.Push(0, 2*c.Size) + (int64(src)*int64(c.Slots)+int64(k%c.Slots))*c.SlotBytes
}

// Result is where this rank leaves chunk k of its reduced slice for peers that fetch it.
func (c *ReduceBlock) Result(k int) int64 {
	return c.Slot(c.Size, 0) + int64(k%c.Slots)*c.SlotBytes
}

// Bytes is the size of the block.
func (c *ReduceBlock) Bytes() int64 {
	return c.Slot(c.Size+1, 0) - c.Offset
}

// ControlBytes is the size of the part at the block's start that must be zero before the first call.
func (c *ReduceBlock) ControlBytes() int64 { return c.Push(0, 0) - c.Offset }
