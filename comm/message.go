package comm

// kind says what a message is for. The values are part of the protocol.
type kind uint8

const (
	kindData   kind = 1  // a rank's part in a collective call
	kindFail   kind = 2  // the group has failed: who is to blame, and why
	kindLeave  kind = 3  // the sender has closed its end of the group
	kindShrink kind = 4  // a round of the agreement on who survives
	kindBeat   kind = 5  // the sender is alive
	kindBye    kind = 6  // the sender has closed all its groups; end of stream follows
	kindAsk    kind = 7  // whom does the receiver wait for?
	kindAnswer kind = 8  // whom the sender waits for
	kindRelay  kind = 9  // a message that is passed on between hosts
	kindLost   kind = 10 // the sender, first of its host, knows of a lost rank

	kindReplace  kind = 11 // a process is in a lost rank's place: connect with it
	kindReplaced kind = 12 // the sender has, or could not; and to the process, that all have
	kindPast     kind = 13 // a rank's part in a collective call of the past

	kindWord     kind = 14 // a word of one rank for another
	kindRecall   kind = 15 // the sender takes words back that the receiver has not taken
	kindRecalled kind = 16 // the sender has dropped them, or there were none
)

// opcode names a collective call, so that ranks which call different things
// at the same place learn it. The values are part of the protocol.
type opcode uint8

const (
	opNone        opcode = 0
	opBarrier     opcode = 1
	opAllGather   opcode = 2
	opShare       opcode = 3
	opExchangeFDs opcode = 4
	opSplit       opcode = 5
	opJoin        opcode = 6
	opAdmit       opcode = 7
	opLast               = opAdmit
)

func (o opcode) String() string {
	switch o {
	case opBarrier:
		return "barrier"
	case opAllGather:
		return "all-gather"
	case opShare:
		return "share"
	case opExchangeFDs:
		return "exchange fds"
	case opSplit:
		return "split"
	case opJoin:
		return "join"
	case opAdmit:
		return "admit"
	default:
		return "unknown call"
	}
}

// message is what ranks tell one another. Within a process it is handed over
// as it is; a socket link encodes it as frames (see wire.go).
type message struct {
	kind kind
	op   opcode
	gid  uint64
	seq  uint64 // kindData: the call; kindShrink: the round; kindAsk, kindAnswer: the asker's number of it; kindWord, kindRecall, kindRecalled: Mail and topic
	data []byte // kindData: the part; kindShrink: the gone ranks; kindAnswer: the awaited ranks
	fds  []int  // kindData, kindWord: owned by the message
	val  any    // kindData, within a process only

	// poison replaces the data of a rank that could not take part properly.
	// The others get it as an error instead of waiting for ever.
	poison string
	// untaken says that it is this rank which could not take its part in: the
	// sender has done its own.
	untaken bool

	decided bool     // kindShrink: data is the decision
	fail    *failure // kindFail, kindLost
}

// frame is the header and the payload of m, in one piece. The header's length is the caller's to set.
func (m *message) frame() (header, []byte) {
	h := header{kind: m.kind, op: m.op, gid: m.gid, seq: m.seq}
	switch {
	case m.poison != "":
		h.flags = flagPoison
		return h, []byte(clip(m.poison, maxText))
	case m.fail != nil:
		return h, encodeFail(m.fail)
	case m.decided:
		h.flags = flagDecided
	}
	return h, m.data
}

// unframe finds in the data of a message what its header says that it is.
func (m *message) unframe(h header) (err error) {
	switch {
	case h.flags&flagPoison != 0:
		m.poison, m.data = string(m.data), nil
	case h.kind == kindShrink:
		m.decided = h.flags&flagDecided != 0
	case h.kind == kindFail, h.kind == kindLost:
		m.fail, err = decodeFail(m.data)
		m.data = nil
	}
	return err
}

// drop releases what a message owns when nobody will take it.
func (m *message) drop() {
	closeFDs(m.fds)
	m.fds = nil
}
