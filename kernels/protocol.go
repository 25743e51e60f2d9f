package kernels

// Every segment of a symmetric heap begins with a header of HeaderBytes, zero when the heap is made. Its words:
const (
	HeaderBytes = 64 << 10

	AbortOffset    = 0   // 64-bit: non-zero makes every wait of this rank return
	SleepersOffset = 64  // 32-bit: threads of this rank that sleep on the doorbell (host engine)
	DoorbellOffset = 128 // 32-bit: grows when a peer has signalled a sleeping rank (host engine)
	CoreOffset     = 192 // 32-bit: the processor on which this rank last began to wait, plus 1 (host engine)
)

// LineBytes is the size and alignment of a signal or credit line: two cache lines, so that the adjacent-line prefetcher
// of one reader does not pull its neighbour's.
const LineBytes = 128

// Byte offsets of the words of a line.
const (
	LineSeq    = 0  // sequence number, written last with release
	LineTotal  = 8  // bytes of the whole message as the writer of the line knows it
	LineOffset = 16 // credits: where the chunk goes, from the start of the receiver's segment
	LineLen    = 24 // credits: bytes that may be written there
)

// chunkBits is how many bits of a sequence number count chunks within one call.
const chunkBits = 20

// MaxChunks is how many chunks one message can have in one call.
const MaxChunks = 1<<chunkBits - 2

// Refused is the LineLen of a credit that grants nothing because the two ranks disagree on the size of the message.
const Refused = ^uint64(0)

// Seq is the sequence number of chunk k of call e. Chunk 0 announces a message and carries no bytes.
func Seq(e uint64, k int) uint64 { return e<<chunkBits | uint64(k) }

// LastSeq is larger than every Seq of call e and smaller than every Seq of call e+1: a message is there as a whole.
func LastSeq(e uint64) uint64 { return e<<chunkBits | (1<<chunkBits - 1) }

// PacketFlag is the flag of the packet words of call e: 32 bits, and never zero, which is what words hold that no packet
// has reached yet. It comes again after 2^32-1 calls, with the other parity.
func PacketFlag(e uint64) uint64 { return e%(1<<32-1) + 1 }

// Space is a symmetric heap as a kernel of one rank sees it: the segment of rank p begins p*Stride bytes after the base.
type Space struct {
	// Mem is the whole reserved range on the host device, nil on others.
	Mem []byte
	// Base is the range's address on the device.
	Base uintptr
	// Stride is the distance of two ranks' segments in bytes.
	Stride     int64
	Rank, Size int
	// Bells wake the ranks' waiting goroutines, indexed by rank, where every rank lives in this process; nil otherwise.
	Bells []*Bell
}

// Segment is rank p's segment on the host device. Only the part the heap has committed may be touched.
func (s *Space) Segment(p int) []byte { return s.Mem[int64(p)*s.Stride : int64(p+1)*s.Stride] }

// Range is n bytes at off of rank p's segment on the host device.
func (s *Space) Range(p int, off, n int64) []byte {
	at := int64(p)*s.Stride + off
	return s.Mem[at : at+n : at+n]
}
