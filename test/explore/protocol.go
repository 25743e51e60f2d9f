package explore

import (
	"errors"
	"slices"
)

// The defects that the search finds in a protocol.
var (
	ErrDeadlock = errors.New("deadlock")
	ErrData     = errors.New("wrong data in an output")
	ErrLate     = errors.New("write to an output that the user has back")
	ErrWild     = errors.New("write outside every message")
	ErrCredit   = errors.New("a credit that was not meant")
	ErrCount    = errors.New("a count mismatch that is none")
	ErrAhead    = errors.New("a rank two calls ahead")
)

// Options say what Protocol explores.
type Options struct {
	Bug Bug
	// Relaxed lets plain stores (data, packet words, the fields of a line) become visible later and in any order, until
	// the rank's next release store. Otherwise memory is sequentially consistent.
	Relaxed bool
	// Concurrent has every rank serve each half of each pair on a thread of its own, as the blocks of a GPU may. Otherwise
	// a rank is one thread: it begins all halves in the order of its routes, then serves whatever is ready, in any order,
	// and stays with a chunk until it is done.
	Concurrent bool
	// Lines makes writing or reading a whole line one action; the data stay apart. It is for larger worlds, and means
	// nothing where memory is Relaxed.
	Lines bool
	// Pull has receivers read the messages that would go through slots where their senders have them, as ranks of the host
	// engine do.
	Pull bool
	// Quits lets rank 0 give up between two chunks in any call. It may write to its source then and has its output back.
	// The others may wait for it for ever, but who finishes a call must have the right data.
	Quits bool
}

// Protocol is the exchange protocol of kernels as a System.
//
// A message consists of units of 4 bytes, each put and copied by an action of its own and with a value unique to call,
// source, destination and place. Outputs are poisoned before the first call and after each check; a check is an action
// that may come any time after the call. The user overwrites the source as soon as the call returns.
type Protocol struct {
	w     *Workload
	o     Options
	ranks int
	// Memory: the words of all segments that the programs use.
	cells  map[place]int32
	names  []place
	output [][]int32 // by rank: the cells of its outputs in all calls
	calls  [][]program
	width  int // of a rank's part of the state
}

type place struct {
	rank int
	off  int64
}

// unit is the size of what a rank puts with one action.
const unit = 4

const (
	poison = 0xbad0bad0 // in outputs before they are written
	junk   = 0x0ddba115 // in sources after the call
)

// value is unit i of a message.
func value(call, src, dst, i int) uint64 {
	return 1<<31 | uint64(call)<<24 | uint64(src)<<16 | uint64(dst)<<8 | uint64(i)
}

type opKind uint8

const (
	opStore  opKind = iota // cell = val
	opPut                  // cell = val, data from the source
	opAwait                // blocks until cell >= val, or == val
	opCredit               // the place of the next puts = cell, when the lengths at aux match
	opExpect               // cell must be val
	opTake                 // blocks until the packet word in cell has flag val, then to = its data
	opCopy                 // to = cell
	opPull                 // to = val if its source, which is from's, still holds it
	opBegin                // enters the call
	opCheck                // the user looks at the output
	opQuit                 // the call fails, the user writes to the source and poisons the output
)

// op is one atomic action, or a part of one.
type op struct {
	kind    opKind
	equal   bool // opAwait
	plain   bool // stores: may become visible later
	granted bool // opPut: cell is relative to the place of the credit of this thread
	fused   bool // happens together with the op before it
	cell    int32
	to      int32
	val     uint64
	aux     [2]uint64 // opCredit: bytes of the chunk and of the message that the sender expects
	from    int       // opCredit and granted puts: the receiver
	off     int64     // granted puts: bytes after the place
	what    string
}

// program is one call of one rank: pre, then the halves in any order, then the return to the user, then post.
type program struct {
	pre, post []op
	quit      []op // gives up
	// sends are in the order of the routes, recvs in the reverse order. A receive may run when fewer than window receives
	// come between it and the first one that is not done.
	sends, recvs [][]op
	window       int
	want         map[int32]uint64 // outputs that are not poison
}

func (p *program) half(i int) []op {
	if i < len(p.sends) {
		return p.sends[i]
	}
	return p.recvs[i-len(p.sends)]
}

// NewProtocol derives the programs of a workload's ranks, of which there can be 2 to 5. Messages are whole units.
func NewProtocol(w *Workload, o Options) *Protocol {
	if o.Relaxed {
		o.Lines = false // a line does not become visible as a whole
	}
	p := &Protocol{w: w, o: o, ranks: w.Block.Size, cells: map[place]int32{}}
	p.output = make([][]int32, p.ranks)
	for rank := range p.ranks {
		for _, c := range w.Calls {
			for src, n := range c.Routes[rank].RecvBytes {
				for i := int64(0); i < n && src != rank; i += unit {
					p.output[rank] = append(p.output[rank], p.cell(rank, c.Output[rank]+c.Routes[rank].RecvOffsets[src]+i))
				}
			}
		}
		slices.Sort(p.output[rank])
		p.output[rank] = slices.Compact(p.output[rank])
	}
	for rank := range p.ranks {
		var calls []program
		met := 0
		for call := range w.Calls {
			b := builder{p: p, me: rank, call: call}
			calls = append(calls, b.build(&met))
		}
		p.calls = append(p.calls, calls)
	}
	p.width = 2 + (p.ranks - 1)
	if o.Relaxed {
		p.width += pendingMax
	}
	return p
}

func (p *Protocol) cell(rank int, off int64) int32 {
	at := place{rank, off}
	c, ok := p.cells[at]
	if !ok {
		c = int32(len(p.names))
		p.cells[at] = c
		p.names = append(p.names, at)
	}
	return c
}
