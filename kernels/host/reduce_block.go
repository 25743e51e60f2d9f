package host

import (
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
)

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

// Semaphore is the word in which src counts its signals for plans, in its peer's segment. The one behind the last of the plans lets ranks go
// on to the next part of a call.
func (c *ReduceBlock) Semaphore(src, n int) int64 {
	return c.Progress(c.Size) + int64(src*c.semaphores()+n)*kernels.LineBytes
}

// Consumed is the word in which a rank counts the signals of a semaphore that it has consumed, in its own segment.
func (c *ReduceBlock) Consumed(src, n int) int64 { return c.Semaphore(src, n) + 8 }

// semaphores is how many there are from a rank to another.
func (c *ReduceBlock) semaphores() int {
	if c.Plans.SlotBytes == 0 {
		return 0
	}
	return c.Plans.Semaphores + 1
}

// Push is where the data of src lands in one-shot calls of the parity.
func (c *ReduceBlock) Push(parity uint64, src int) int64 {
	return c.Semaphore(c.Size, 0) + (int64(parity&1)*int64(c.Size)+int64(src))*kernels.AlignUp(c.OneShotBytes, kernels.LineBytes)
}

// Slot is where chunk k from src lands.
func (c *ReduceBlock) Slot(src, k int) int64 {
	return c.Push(0, 2*c.Size) + (int64(src)*int64(c.Slots)+int64(k%c.Slots))*c.SlotBytes
}

// Result is where this rank leaves chunk k of its reduced slice for peers that fetch it.
func (c *ReduceBlock) Result(k int) int64 {
	return c.Slot(c.Size, 0) + int64(k%c.Slots)*c.SlotBytes
}

// PlanSlot is where a chunk of a plan's buffer lies that is not the user's own.
func (c *ReduceBlock) PlanSlot(b plan.Buffer, chunk int) int64 {
	for before := range b {
		chunk += c.Plans.Chunks[before]
	}
	return c.Slot(c.Size+1, 0) + int64(chunk)*c.Plans.SlotBytes
}

// Bytes is the size of the block.
func (c *ReduceBlock) Bytes() int64 { return c.PlanSlot(plan.Buffers, 0) - c.Offset }

// ControlBytes is the size of the part at the block's start that must be zero before the first call.
func (c *ReduceBlock) ControlBytes() int64 { return c.Push(0, 0) - c.Offset }
