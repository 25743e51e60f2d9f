package cuda

//lint:file-ignore U1000 kernels use what Go does not

import "structs"

// Transfers between two ranks.
const (
	pointThreads = 256 // of a block that copies
	pointWaiters = 32  // of the one block of a signal or a wait, of which one does something
)

// pointBlock is where the words of a control block for transfers lie. All of it must be zero before the first launch.
type pointBlock struct {
	_ structs.HostLayout

	control  place // struct sw_control [size], one for each peer, so that a fault with one holds up no other; controlAlign bytes each
	signals  place // [size][semaphores] lines: {signals of the rank so far}, written by that rank
	sent     place // [size][semaphores] words: this rank's signals to the rank so far
	consumed place // [size][semaphores] words: the rank's signals that have been consumed
	end      place // the offset behind the block
}

// layPointBlock lays the block out from offset on.
func layPointBlock(offset, size, semaphores int64) (b pointBlock) {
	at := offset
	b.control, at = at, at+size*controlAlign
	b.signals, at = at, at+size*semaphores*lineBytes
	b.sent, at = at, at+size*semaphores*8
	b.consumed, at = at, at+size*semaphores*8
	b.end = at
	return b
}

// pointArgs is one launch of a transfer.
type pointArgs struct {
	_ structs.HostLayout

	world worldWords // control is that of peer
	block pointBlock

	dst        uint64 // of a put or a get: addresses here
	src        uint64
	bytes      int64
	peer       uint32
	semaphore  uint32 // of a signal or a wait
	semaphores uint32
	_          uint32
}
