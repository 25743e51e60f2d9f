package host

import "github.com/switchyard-moe/switchyard/kernels"

// dispatchBlock is how this engine uses the control block and the handles' State and Staging of one dispatcher. Methods return offsets
// from the start of a segment.
//
// The Send half of every call is a meeting: each rank writes a notice to every other, which says what call it is in and where
// in its own segment rows may be written or read, and waits for the notices of all. A dispatch adds how many rows its writer
// has for every slot and every rank. So each rank then knows every displacement of every rank, and whether an output would
// overflow; what follows from the notices is the same on all ranks. Rows are written in the Send half of a dispatch and read in
// the Receive half of a combine. A rank that is through with a peer's memory writes a done line into the peer's handle, and Receive
// ends when all have come.
//
// Two parities of notices are enough: a rank writes that of call e+2 when it has all notices of call e+1, which their writers
// wrote after they had read all of call e. A done line exists once for each handle: whoever writes that of the handle's next
// call has the receiver's notice of it, which the receiver writes after it has seen the line of this one.
//
// Dispatchers that share memory have their calls counted together, and their notices in one place (kernels.DispatchShared.Words): ranks in calls
// of different ones hear of it in their notices.
type dispatchBlock struct {
	control   int64 // epoch and notices
	masksAt   int64 // with Masks
	wordsEnd  int64
	countsAt  int64
	n, slots  int
	twins     int64 // the most rows that one rank can have another make from rows it has sent
	rowBytes  int64 // of all rows of a combine,
	weight    int64 // and of all their weights
	readyAt   int64 // in State
	keptAt    int64 // the routing, in State
	stateSize int64
	beyond    beyondBlock // nothing on one host
}

func newDispatchBlock(m *kernels.DispatchBounds, offset int64) dispatchBlock {
	l := dispatchBlock{control: offset, n: m.Ranks, slots: m.Slots()}
	if m.Shared != nil {
		l.control = m.Shared.Words.Place
	}
	if !m.Layout.ByToken() {
		l.twins = int64(m.MaxTokens) * int64(m.TopK-1)
	}
	l.rowBytes = kernels.AlignUp(m.Rows*m.SumBytes(), kernels.LineBytes)
	l.weight = kernels.AlignUp(m.Rows*int64(m.WeightsPerRow())*4, kernels.LineBytes)
	l.readyAt = int64(l.n) * kernels.LineBytes
	l.keptAt = kernels.AlignUp(l.readyAt+8*int64(max(m.MostLocal(), m.Ranks)), kernels.LineBytes)
	l.stateSize = l.keptAt + keptBytes(m)
	if m.Hosts != nil {
		l.beyond = newBeyondBlock(m)
	}
	l.masksAt = l.beyondLine(l.n)
	if l.wordsEnd = l.masksAt; m.Masks {
		l.wordsEnd += kernels.AlignUp(8*int64(l.n), kernels.LineBytes)
	}
	if l.countsAt = l.wordsEnd; m.Shared != nil {
		l.countsAt = offset
	}
	return l
}

func (l *dispatchBlock) layout(m *kernels.DispatchBounds) kernels.Layout {
	words := l.wordsEnd - l.control
	bytes, zero, common := words+l.inbox(l.beyond.hosts)-l.countsAt, words, int64(0)
	if m.Shared != nil {
		bytes, zero, common = bytes-words, 0, words
	}
	return kernels.Layout{
		Bytes: bytes, Zero: zero, Common: common,
		State: l.stateSize, Staging: l.twinBytes()*int64(l.n) + 2*l.rowBytes + 2*l.weight + l.beyond.returns,
		Routing: l.keptAt, RoutingBytes: l.stateSize - l.keptAt,
	}
}

// epoch is the word that counts this rank's calls, in its own segment.
func (l *dispatchBlock) epoch() int64 { return l.control }

// notice is the line that src writes when it begins a call.
func (l *dispatchBlock) notice(epoch uint64, src int) int64 {
	return l.control + kernels.LineBytes + (int64(epoch&1)*int64(l.n)+int64(src))*kernels.LineBytes
}

// counts is where src says how many rows it has for each slot and, in a token-major layout, for each rank: 32-bit numbers,
// valid with its notice.
func (l *dispatchBlock) counts(epoch uint64, src int) int64 {
	return l.countsAt + (int64(epoch&1)*int64(l.n)+int64(src))*kernels.AlignUp(4*int64(l.slots+l.n), kernels.LineBytes)
}

// noticeWords is how many words a notice has behind LineSeq. Its places are the writer's.
const noticeWords = 7

// The flags of a notice.
const (
	flagReady   = 1 << iota // rows may be read only when the writer's ready words say so
	flagAsks                // for the weights of its tokens' rows
	flagHasNone             // its rows have no weights, which would take writeWeights bytes
	flagTerm    = 8         // where the writer's term begins, with Masks
)

// Why a rank refuses, in place of the dispatch in its call word, and what the next words are then.
const (
	refusedShort = iota // bytes that are there, bytes that are needed
	refusedIndex        // token, expert, choice
)

// done is the line of a handle's State that src writes when it is through with the handle's rows, or with those that a combine
// shows.
func (l *dispatchBlock) done(h *kernels.DispatchHandle, src int) int64 {
	return h.State.Place + int64(src)*kernels.LineBytes
}

// doneTwins is the byte offset, in a done line, of the number of entries of the twin list.
const doneTwins = 8

// ready is the word of a handle's State that reaches the sequence number of a combine when the rows of a group may be read.
func (l *dispatchBlock) ready(h *kernels.DispatchHandle, group int) int64 {
	return h.State.Place + l.readyAt + 8*int64(group)
}

func (l *dispatchBlock) twinBytes() int64 { return kernels.AlignUp(8*l.twins, kernels.LineBytes) }

// twinList is where src lists rows to be made from rows it has sent: pairs of 32-bit row numbers, from and to, valid
// with its done line.
func (l *dispatchBlock) twinList(h *kernels.DispatchHandle, src int) int64 {
	return h.Staging.Place + int64(src)*l.twinBytes()
}

// rows is staging for rows that peers read (0) or write (1).
func (l *dispatchBlock) rows(h *kernels.DispatchHandle, which int) int64 {
	return l.twinList(h, l.n) + int64(which)*l.rowBytes
}

// weights is staging for the rows' weights.
func (l *dispatchBlock) weights(h *kernels.DispatchHandle, which int) int64 {
	return l.rows(h, 2) + int64(which)*l.weight
}
