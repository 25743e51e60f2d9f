package explore

import "fmt"

// Half is half of a call of dispatch or combine on a handle, as all ranks make it.
type Half struct {
	Handle  int
	Combine bool // or a dispatch
	Receive bool // the second half
}

// String is like "combine receive of handle 1".
func (h Half) String() string {
	call, half := "dispatch", "send"
	if h.Combine {
		call = "combine"
	}
	if h.Receive {
		half = "receive"
	}
	return fmt.Sprintf("%s %s of handle %d", call, half, h.Handle)
}

// HalvesBug is a mistake that Halves can make.
type HalvesBug uint8

// The mistakes.
const (
	NoHalvesBug HalvesBug = iota
	// OneNotice has one notice for each pair of ranks, not one for each parity of calls.
	OneNotice
	// OneDone has one done line for each pair of ranks, not one for each handle.
	OneDone
	// DoneBeforeRows signals before it writes.
	DoneBeforeRows
	// RowsBeforeNotice writes before it knows that the receiver is in the call.
	RowsBeforeNotice
	// ReadersNotAwaited ends a combine when its own reads have ended.
	ReadersNotAwaited
)

// Halves is the protocol of the host engine's dispatch and combine (kernels/host/dispatch_block.go): every rank runs the same halves of
// calls. Ranks number their handles differently.
//
// A first half writes a notice to every peer, waits for theirs and reads them; a dispatch then writes its rows and a done line
// to every peer. The second half of a dispatch waits for the done lines and uses the rows. That of a combine reads the peers'
// rows, and then exchanges done lines.
type Halves struct {
	ranks, handles int
	bug            HalvesBug
	programs       [][]instruction
}

type action uint8

const (
	clearRows    action = iota // the user is through with the handle's rows
	showRows                   // the rows of a combine are there
	hideRows                   // and are changed
	writeNotice                // all of it but
	signalNotice               // its number
	awaitNotice
	readNotice
	writeRows
	signalDone
	awaitDone
	useRows
	readShown
)

var actionNames = [...]string{
	"clears its rows", "shows its rows", "changes its rows", "writes the notice to", "signals the notice to", "has the signal of a notice from", "reads the notice from",
	"writes rows to", "signals done to", "has the done line of", "uses the rows from", "reads the rows of",
}

type instruction struct {
	action action
	peer   int
	handle int
	call   uint64
}

// NewHalves makes the system of n ranks. Each handle's halves come in order: send before receive, a dispatch first.
func NewHalves(n int, program []Half, bug HalvesBug) *Halves {
	h := &Halves{ranks: n, bug: bug, programs: make([][]instruction, n)}
	for _, half := range program {
		h.handles = max(h.handles, half.Handle+1)
	}
	for rank := range n {
		calls, call := make([]uint64, h.handles), uint64(0)
		for _, half := range program {
			if !half.Receive {
				call++
				calls[half.Handle] = call
			}
			h.programs[rank] = append(h.programs[rank], h.half(rank, half, calls[half.Handle])...)
		}
	}
	return h
}

// half is what a rank does in a half.
func (h *Halves) half(rank int, half Half, call uint64) (code []instruction) {
	own := func(a action) { code = append(code, instruction{a, rank, half.Handle, call}) }
	each := func(actions ...action) {
		for i := 1; i < h.ranks; i++ {
			for _, a := range actions {
				code = append(code, instruction{a, (rank + i) % h.ranks, half.Handle, call})
			}
		}
	}
	meet := func() {
		each(writeNotice, signalNotice)
		each(awaitNotice, readNotice)
	}
	switch {
	case !half.Combine && !half.Receive:
		own(clearRows)
		if h.bug == RowsBeforeNotice {
			each(writeRows)
			meet()
			each(signalDone)
			break
		}
		meet()
		if h.bug == DoneBeforeRows {
			each(signalDone, writeRows)
		} else {
			each(writeRows, signalDone)
		}
	case !half.Combine:
		each(awaitDone, useRows)
	case !half.Receive:
		own(showRows)
		meet()
	default:
		each(readShown)
		each(signalDone)
		if h.bug != ReadersNotAwaited {
			each(awaitDone)
		}
		own(hideRows)
	}
	return code
}

// The state: how far each rank is; then by receiver and sender the notices (content and number, for two parities), and by
// receiver, handle and sender the done lines and the rows; then the rows that each rank shows in each handle.

func (h *Halves) notice(to, from int, call uint64, number int) int {
	parity := int(call & 1)
	if h.bug == OneNotice {
		parity = 0
	}
	return h.ranks + ((to*h.ranks+from)*2+parity)*2 + number
}

// memory is the number that a rank gives to a handle.
func (h *Halves) memory(rank, handle int) int { return (handle + rank) % h.handles }

func (h *Halves) perHandle(block, to, handle, from int) int {
	at := h.notice(h.ranks-1, h.ranks-1, 1, 1) + 2
	return at + ((block*h.ranks+to)*h.handles+h.memory(to, handle))*h.ranks + from
}

func (h *Halves) done(to, handle, from int) int {
	if h.bug == OneDone {
		handle = 0
	}
	return h.perHandle(0, to, handle, from)
}

func (h *Halves) rows(to, handle, from int) int { return h.perHandle(1, to, handle, from) }

func (h *Halves) shown(rank, handle int) int { return h.perHandle(2, rank, handle, 0) }

// Start is all zero.
func (h *Halves) Start() []uint64 { return make([]uint64, h.perHandle(3, 0, 0, 0)+h.handles*h.ranks) }

// Moves lists the ranks that can go on.
func (h *Halves) Moves(s []uint64, moves []Move) []Move {
	for rank := range h.ranks {
		if s[rank] == uint64(len(h.programs[rank])) {
			continue
		}
		switch i := h.programs[rank][s[rank]]; {
		case i.action == awaitNotice && s[h.notice(rank, i.peer, i.call, 1)] < i.call:
		case i.action == awaitDone && s[h.done(rank, i.handle, i.peer)] < i.call:
		default:
			moves = append(moves, Move(rank))
		}
	}
	return moves
}

// Apply lets a rank do its next action.
func (h *Halves) Apply(s []uint64, m Move) error {
	rank := int(m)
	i := h.programs[rank][s[rank]]
	s[rank]++
	expect := func(at int, what string) error {
		if s[at] != i.call {
			return fmt.Errorf("rank %d finds %s of rank %d of call %d in call %d", rank, what, i.peer, s[at], i.call)
		}
		return nil
	}
	switch i.action {
	case clearRows:
		for p := range h.ranks {
			s[h.rows(rank, i.handle, p)] = 0
		}
	case showRows:
		s[h.shown(rank, i.handle)] = i.call
	case hideRows:
		s[h.shown(rank, i.handle)] = 0
	case writeNotice:
		s[h.notice(i.peer, rank, i.call, 0)] = i.call
	case signalNotice:
		s[h.notice(i.peer, rank, i.call, 1)] = i.call
	case readNotice:
		return expect(h.notice(rank, i.peer, i.call, 0), "the notice")
	case writeRows:
		s[h.rows(i.peer, i.handle, rank)] = i.call
	case signalDone:
		s[h.done(i.peer, i.handle, rank)] = i.call
	case useRows:
		return expect(h.rows(rank, i.handle, i.peer), "the rows")
	case readShown:
		return expect(h.shown(i.peer, i.handle), "the rows shown")
	}
	return nil
}

// Describe names the rank's next action.
func (h *Halves) Describe(s []uint64, m Move) Step {
	i := h.programs[m][s[m]]
	action := fmt.Sprintf("%s (call %d, handle %d)", actionNames[i.action], i.call, i.handle)
	if i.peer != int(m) {
		action = fmt.Sprintf("%s rank %d (call %d, handle %d)", actionNames[i.action], i.peer, i.call, i.handle)
	}
	return Step{Rank: int(m), Action: action}
}

// End wants every rank to be through.
func (h *Halves) End(s []uint64) error {
	for rank := range h.ranks {
		if n := len(h.programs[rank]); s[rank] != uint64(n) {
			i := h.programs[rank][s[rank]]
			return fmt.Errorf("rank %d never %s rank %d in call %d", rank, actionNames[i.action], i.peer, i.call)
		}
	}
	return nil
}
