package host

import "github.com/switchyard-moe/switchyard/kernels"

// PointBlock is the control block of one communicator for transfers between two ranks: the same layout at the same Offset of every rank's
// segment. Methods return offsets from the start of a segment.
//
// For each rank src there are, in its receiver's segment:
//
//   - a line for each semaphore;
//   - boxes of messages: a line that describes one, and room for the bytes of a small one;
//   - lines in which src says how many it has posted, and how far staging is filled, and two buffers of staging.
type PointBlock struct {
	*kernels.PointBounds
	Offset int64
}

// Calls is the word that counts this rank's launches. It names the communicator to the engine; the ranks' numbers need not agree.
func (c *PointBlock) Calls() int64 { return c.Offset }

// Card is where a rank leaves word of how its memory is found, in its own segment: 4 words.
func (c *PointBlock) Card() int64 { return c.Offset + kernels.LineBytes/2 }

// Signals is the word that src adds to in its peer's segment.
func (c *PointBlock) Signals(src, semaphore int) int64 {
	return c.Offset + kernels.LineBytes*int64(1+src*c.Semaphores+semaphore)
}

// Consumed is the word in which a rank counts the signals of src that it has consumed, in its own segment.
func (c *PointBlock) Consumed(src, semaphore int) int64 { return c.Signals(src, semaphore) + 8 }

// The lines of a pair.
const (
	postedLine  = iota // written by src: the number of its last message
	stagingLine        // the words of staging
	wantedLine         // written by the receiver: the message of src that it waits for
	pairLines
)

func (c *PointBlock) line(src, which int) int64 {
	return c.Signals(c.Size, 0) + kernels.LineBytes*int64(src*pairLines+which)
}

// Posted is the word in which src says the number of its last message.
func (c *PointBlock) Posted(src int) int64 { return c.line(src, postedLine) }

// Complaints is the word that receivers of this rank's messages count up when the sender of one was done with it and it had another size than
// they expected. It lies in the sender's segment, in a line that dst writes.
func (c *PointBlock) Complaints(dst int) int64 { return c.line(dst, wantedLine) + wantedComplaints }

// Byte offsets of the words of the line of what is wanted.
const (
	wantedCount      = 0 // receives that wait for the rank
	wantedTag        = 8 // of the last of them that found nothing when it came
	wantedBytes      = 16
	wantedReads      = 24 // 1 when the receiver reads the rank's memory
	wantedComplaints = 64 // Complaints
)

// Wanted is the line in which a rank says what it waits for from src, in its own segment.
func (c *PointBlock) Wanted(src int) int64 { return c.line(src, wantedLine) }

// Byte offsets of the words of the line of staging.
const (
	stagingOwner   = 0  // number of the message whose chunks these are
	stagingFilled  = 8  // turn and chunk, by the sender
	stagingDrained = 64 // turn and chunk, by the receiver
)

// chunkBits is how many bits of those count the chunks of one message.
const chunkBits = 24

// Staging is the line of staging from src.
func (c *PointBlock) Staging(src int) int64 { return c.line(src, stagingLine) }

// Byte offsets of the words of a box. The state comes last.
const (
	boxState    = 0
	boxTag      = 8
	boxExtent   = 16
	boxSource   = 24 // where the message lies at its sender, 0 when it is in the box
	boxExpected = 32 // its extent as the receiver has it, where they disagree
)

// mismatch is the error of a message of this extent that is received as another.
func (x extent) mismatch(src, dst int, number, tag uint64, expected extent) error {
	return &kernels.MessageMismatchError{Src: src, Dst: dst, Number: number, Tag: tag, Sent: uint64(x.bytes()), Expected: uint64(expected.bytes()),
		SentElements: x.elements(), ExpectedElements: expected.elements()}
}

// The states of a message. The word has the number of the message above them, so it only grows. Sender and receiver both change it, from what
// they have seen to something later.
const (
	offered      = 1 + iota // the receiver may claim it
	held                    // the sender copies it aside
	offeredAgain            // it lies there
	claimed                 // the receiver reads it
	wantsStaging            // the receiver cannot read it, and wants it through staging
	withdrawn               // the sender or the receiver has given up; this and what follows are ends
	taken                   // the receiver has it
	disagreed               // the receiver expects another size, or other elements
	phaseBits    = 4
	phaseMask    = 1<<phaseBits - 1
)

func stateOf(number, phase uint64) uint64 { return number<<phaseBits | phase }

func (c *PointBlock) boxStride() int64 {
	return kernels.LineBytes + kernels.AlignUp(c.EagerBytes, kernels.LineBytes)
}

// Box is one of src's.
func (c *PointBlock) Box(src, box int) int64 {
	return c.line(c.Size, 0) + c.boxStride()*int64(src*c.Boxes+box)
}

// Payload is the room of a box.
func (c *PointBlock) Payload(src, box int) int64 { return c.Box(src, box) + kernels.LineBytes }

// Buffer is where chunk k of a message from src lands in staging.
func (c *PointBlock) Buffer(src int, k uint64) int64 {
	return c.Box(c.Size, 0) + c.StagingBytes*int64(2*src+int(k&1))
}

// Bytes is the size of the block.
func (c *PointBlock) Bytes() int64 { return c.Buffer(c.Size, 0) - c.Offset }

// ControlBytes is the size of the part at the block's start that must be zero before the first launch: all but staging.
func (c *PointBlock) ControlBytes() int64 { return c.Box(c.Size, 0) - c.Offset }
