package kernels

import (
	"log/slog"
	"sync/atomic"
)

// Every segment of a symmetric heap begins with a header of HeaderBytes, zero when the heap is made. Its words:
const (
	HeaderBytes = 64 << 10

	AbortOffset = 0 // 64-bit: non-zero makes every wait of this rank return

	EngineOffset   = 64   // up to SegmentsOffset: words of the engine's own
	SegmentsOffset = 4096 // on GPUs, where segments lie anywhere: Size 64-bit addresses of the ranks' segments
	AliasOffset    = 8192 // on GPUs, AliasRows rows of Size 64-bit addresses: registered memory by rank; then ShareRows of memory of one rank for one other
)

// A place is where memory lies in a rank's segment. A registration on a GPU has places of its own: bit 62, a row of the alias
// table from bit AliasShift on, and the offset in what was registered. Its memory can lie anywhere.
const (
	AliasPlace = 1 << 62
	AliasShift = 48
	maxAliases = 256
	maxShares  = 64
)

// AliasRows is how many rows the alias table of size ranks has: 256, above 28 ranks as many as the header holds.
func AliasRows(size int) int { return min(maxAliases, (HeaderBytes-AliasOffset)/(8*size)) }

// ShareRows is how many rows follow them for memory that a rank has shared with one other: 64, above 22 ranks as many as there is room for,
// and none from 28 on. In the table of rank r, column p of these is memory of rank p, in the row that p has chosen.
func ShareRows(size int) int {
	return min(maxShares, (HeaderBytes-AliasOffset)/(8*size)-AliasRows(size))
}

// LineBytes is the size and alignment of a signal or credit line: two cache lines, so that the adjacent-line prefetcher
// of one reader does not pull its neighbour's.
const LineBytes = 128

// chunkBits is how many bits of a sequence number count chunks within one call.
const chunkBits = 20

// MaxChunks is how many chunks one message can have in one call.
const MaxChunks = 1<<chunkBits - 2

// Seq is the sequence number of chunk k of call e. Chunk 0 announces a message and carries no bytes.
func Seq(e uint64, k int) uint64 { return e<<chunkBits | uint64(k) }

// LastSeq is larger than every Seq of call e and smaller than every Seq of call e+1: a message is there as a whole.
func LastSeq(e uint64) uint64 { return e<<chunkBits | (1<<chunkBits - 1) }

// Space is a symmetric heap as a kernel of one rank sees it. The segment of rank p begins p*Stride bytes after the base, unless
// Segments is set.
type Space struct {
	// Mem is the whole reserved range on the host device, nil on others.
	Mem []byte
	// Base is the range's address on the device. This rank's segment is always at Base+Rank*Stride.
	Base uintptr
	// Segments are the addresses of the ranks' segments on a device where they do not lie at equal distances; nil where they do.
	Segments []uintptr
	// Multicast is the address at which kernels reach what lies at the beginning of all ranks' segments at once, and at equal distances from
	// it what lies at other places of the pool. Only multimem instructions may be used there. It is 0 without multicast.
	Multicast uintptr
	// Aliases are the addresses of registered memory on GPUs, nil elsewhere.
	Aliases *Aliases
	// Stride is the distance of two ranks' segments in bytes.
	Stride     int64
	Rank, Size int
	// Ranks are the numbers of the space's ranks in the group, where there are several hosts and a space for each; nil where they are the same.
	Ranks []int
	// Host is the number of this host in the group.
	Host int
	// Log hears who waits for whom, at level info. nil is silent.
	Log *slog.Logger
	// AwaitedBy is the call of the control plane in which a peer waits for this rank, in words, and its number, 0 for none. nil: not known.
	AwaitedBy func(peer int) (call string, seq uint64)
	// Left reports whether a peer has left the group in good order, and ReportLeft fails the group because this rank waits for it. nil: not known.
	Left       func(peer int) bool
	ReportLeft func(peer int)
}

// Name is the number in the group of rank p of the space.
func (s *Space) Name(p int) int {
	if s.Ranks == nil {
		return p
	}
	return s.Ranks[p]
}

// Instead is what AwaitedBy says, or that it is not known.
func (s *Space) Instead(peer int) (call string, seq uint64) {
	if s.AwaitedBy == nil {
		return "", 0
	}
	return s.AwaitedBy(peer)
}

// Addr is the address of a place of rank p, in this process. The place of a registration that is gone has none.
func (s *Space) Addr(p int, place int64) uintptr {
	if place>>62 == AliasPlace>>62 {
		row := s.Aliases.Row(int(place &^ AliasPlace >> AliasShift))
		if row == nil {
			return 0
		}
		return row[p] + uintptr(place&(1<<AliasShift-1))
	}
	if s.Segments != nil {
		return s.Segments[p] + uintptr(place)
	}
	return s.Base + uintptr(int64(p)*s.Stride+place)
}

// SegmentTable is the address of Segments in device memory, 0 where they are nil.
func (s *Space) SegmentTable() uintptr {
	if s.Segments == nil {
		return 0
	}
	return s.Addr(s.Rank, SegmentsOffset)
}

// Aliases is the alias table as the host sees it. Rows may be looked up while others are set.
type Aliases struct {
	rows [maxAliases]atomic.Pointer[[]uintptr]
}

// Row is the addresses by rank of one registration, nil when there is none. It is not to be changed.
func (a *Aliases) Row(i int) []uintptr {
	if i >= len(a.rows) {
		return nil
	}
	if p := a.rows[i].Load(); p != nil {
		return *p
	}
	return nil
}

// Set fills a row, or empties it with nil.
func (a *Aliases) Set(i int, row []uintptr) { a.rows[i].Store(&row) }

// Segment is rank p's segment on the host device. Only the part the heap has committed may be touched.
func (s *Space) Segment(p int) []byte { return s.Mem[int64(p)*s.Stride : int64(p+1)*s.Stride] }

// Range is n bytes at off of rank p's segment on the host device.
func (s *Space) Range(p int, off, n int64) []byte {
	at := int64(p)*s.Stride + off
	return s.Mem[at : at+n : at+n]
}
