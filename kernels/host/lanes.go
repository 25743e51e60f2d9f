package host

import (
	"time"

	"github.com/switchyard-moe/switchyard/kernels"
)

// Lanes is the control block of one dispatcher: the same layout at the same Offset of every rank's segment. Methods
// return offsets from the start of a segment.
//
// Every kernel of a dispatcher is a call in two phases. In the first each rank writes a notice to every other rank: which
// call it is in, and where in its own segment rows may be written or read during this call. A notice is the credit, so
// buffers may be anywhere and move from call to call. A dispatch adds the number of rows that its writer has for every
// expert slot. Once a rank has all notices it knows every displacement of every rank, and whether any output would
// overflow: what follows from the notices is the same on all ranks. In the second phase each rank writes one done line to
// every other rank, after its last access to that rank's segment.
//
// Both phases happen between all pairs in every call, whatever it moves, also when the notices say that it cannot take
// place. So no rank can be more than one phase ahead of another, and each line needs to exist once: a rank that writes
// its notice of call e+1 has the done line of call e from everybody, which everybody wrote after reading its notice of
// call e.
type Lanes struct {
	Offset int64
	Size   int // ranks
	Slots  int // expert slots of all ranks together
	Twins  int // the most rows that one rank can have another make from rows it has sent
}

// Epoch is the word that counts this rank's calls, in its own segment.
func (l *Lanes) Epoch() int64 { return l.Offset }

// Notice is the line that src writes when it begins a call.
func (l *Lanes) Notice(src int) int64 {
	return l.Offset + kernels.LineBytes + int64(src)*kernels.LineBytes
}

// Done is the line that src writes when it is through with its receiver's segment.
func (l *Lanes) Done(src int) int64 { return l.Notice(l.Size + src) }

// Counts is where src says how many rows it has for each slot: Slots 32-bit numbers, valid with its notice.
func (l *Lanes) Counts(src int) int64 {
	return l.Done(l.Size) + int64(src)*kernels.AlignUp(4*int64(l.Slots), kernels.LineBytes)
}

// TwinList is where src lists rows to be made from rows it has sent: pairs of 32-bit row numbers, from and to, valid
// with its done line.
func (l *Lanes) TwinList(src int) int64 {
	return l.Counts(l.Size) + int64(src)*kernels.AlignUp(8*int64(l.Twins), kernels.LineBytes)
}

// Bytes is the size of the block.
func (l *Lanes) Bytes() int64 { return l.TwinList(l.Size) - l.Offset }

// ControlBytes is the size of the part at the block's start that must be zero before the first call.
func (l *Lanes) ControlBytes() int64 { return l.Counts(0) - l.Offset }

// Byte offsets of the words of a notice, after kernels.LineSeq.
const (
	NoticeCall  = 8  // CallWord of the call
	NoticeRead  = 16 // where rows may be read, from the start of the writer's segment
	NoticeWrite = 24 // where rows may be written
)

// Byte offset of the word of a done line, after kernels.LineSeq.
const DoneTwins = 8 // entries of the twin list

// Experts says how the output of a dispatch is laid out on every rank.
type Experts struct {
	// First[r] to First[r+1] are the slots of rank r; Expert[s] is the expert in slot s.
	First, Expert []int32
	// Rows is how many rows the output of one rank holds.
	Rows int64
	// Align is the multiple of rows at which each expert begins. Capacity, when it is not 0, is how many rows every
	// expert has instead.
	Align, Capacity int64
	Hidden          int
	DType           kernels.DType
}

// RowBytes is the size of a row.
func (x *Experts) RowBytes() int64 { return int64(x.Hidden) * x.DType.Size() }

// Span is how many rows an expert that gets n rows takes in the output.
func (x *Experts) Span(n int64) int64 {
	if x.Capacity > 0 {
		return x.Capacity
	}
	return kernels.AlignUp(n, x.Align)
}

// RoutedRow is one token's row at one of its experts.
type RoutedRow struct {
	Rank   int32 // whose output it is in
	Slot   int32 // of all ranks together
	Row    int32 // the Dispatch kernel turns its number among this rank's rows for the slot into its row in the output
	Choice int32 // which of the token's experts
	Weight float32
}

// Routing is where the tokens of one dispatch go. Combine and the backward kernels use it again.
type Routing struct {
	// Rows[First[t]:First[t+1]] are those of token t, ordered by rank and then by choice. There is one more First than
	// tokens.
	First []int32
	Rows  []RoutedRow
	// Counts is the number of rows for each slot. SendRows and SendTokens are those for each rank, and how many tokens
	// they belong to.
	Counts               []int32
	SendRows, SendTokens []int64

	// The Dispatch kernel sets the rest.

	// Call is the epoch of the dispatch; Err is why it failed.
	Call uint64
	Err  error
	// SlotRows and SlotFirst are the rows of each of this rank's slots and the first of them; OutRows is the length of
	// the output with padding.
	SlotRows, SlotFirst []int64
	OutRows             int64
	// RecvRows is how many of the rows came from each rank.
	RecvRows []int64
}

// Tokens is the number of tokens.
func (r *Routing) Tokens() int { return len(r.First) - 1 }

// Dispatch is one launch of the kernel that sends tokens to their experts. A token crosses to a rank once, into its
// first row there; the receiver makes its other rows from that one. The engine uses the struct until it calls Done.
type Dispatch struct {
	Lanes   *Lanes
	Experts *Experts
	Routing *Routing
	X       []byte // [tokens, hidden]
	Out     int64  // this rank's output, from the start of its segment
	Timeout time.Duration
	// Done, when set, is called once, after the last use of this struct, with the kernel's error.
	Done func(error)
}

// Combine is one launch of the kernel that brings rows back to their tokens: y[t] is the sum over ranks, ascending, of
// the sum over the token's choices on that rank, ascending, of weight times row, in float32 and rounded once. The
// backward of a dispatch is the same with all weights 1.
type Combine struct {
	Lanes   *Lanes
	Experts *Experts
	Routing *Routing
	Op      kernels.MoEOp // CombineOp or DispatchBackwardOp
	Y       []byte        // [tokens, hidden]
	Rows    []byte        // this rank's rows, laid out like the output of the dispatch
	// RowsAt is where peers read them, from the start of this rank's segment. Staged says that Rows is elsewhere and is
	// copied there first.
	RowsAt  int64
	Staged  bool
	Timeout time.Duration
	Done    func(error)
}

// CombineBackward is one launch of the kernel for the gradients of Combine: row gradients are weight times dy[t],
// padding is zero, and a weight's gradient is the inner product of its row and dy[t].
type CombineBackward struct {
	Lanes    *Lanes
	Experts  *Experts
	Routing  *Routing
	DY       []byte    // [tokens, hidden]
	DWeights []float32 // [tokens, choices]
	Rows     []byte    // this rank's rows, as Combine had them
	DRows    []byte    // their gradients
	// RowsAt and DRowsAt are where peers read and write them. The staged ones are elsewhere and are copied there first,
	// or from there last.
	RowsAt, DRowsAt         int64
	RowsStaged, DRowsStaged bool
	Timeout                 time.Duration
	Done                    func(error)
}
