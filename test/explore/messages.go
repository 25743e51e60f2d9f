package explore

import "fmt"

// MessagesBug is a mistake that Messages can make.
type MessagesBug uint8

// The mistakes.
const (
	NoMessagesBug MessagesBug = iota
	// MessagesWithdrawUnfenced has a sender look for a claim without a fence behind its withdrawal.
	MessagesWithdrawUnfenced
	// MessagesClaimUnfenced has a receiver look for a withdrawal without a fence behind its claim.
	MessagesClaimUnfenced
	// MessagesWithdrawUnseen withdraws a message without a look for a claim.
	MessagesWithdrawUnseen
	// MessagesClaimUnseen reads a message without a look for a withdrawal.
	MessagesClaimUnseen
	// MessagesNoSecondOffer does not offer a message again that was claimed during its withdrawal.
	MessagesNoSecondOffer
	// MessagesHeaderFirst posts a header without a fence behind the bytes.
	MessagesHeaderFirst
	// MessagesTakenUnread says that a message is taken before it has been read.
	MessagesTakenUnread
	// MessagesNoRoom posts a message without waiting for its box.
	MessagesNoRoom
	// MessagesRoomUnseen posts a message in a box whose last one is over without having taken note of that: the next answer replaces its own.
	MessagesRoomUnseen
	// MessagesOneFlag marks headers with a flag that is the same for all numbers.
	MessagesOneFlag
)

// MessagesWorld is messages of one rank to another, which receives them by their tags.
type MessagesWorld struct {
	Tags   []int // of the messages, in the order in which they are sent
	Wants  []int // tags, in the order in which they are received
	Boxes  int
	GiveUp bool // the sender may give up each message once
}

// Messages is how a large message travels between GPUs (kernels/cuda/messages).
//
// A sender waits for a box, writes the bytes, and behind a fence a header of two halves that have the message's number as their flag. The
// receiver claims a message, reads it where it lies, and says that it is taken: then its sender may write the bytes again. A sender that
// gives up says that it withdraws the message, and looks whether it has been claimed. A receiver that has claimed it looks whether it is being
// withdrawn. Each does so behind a fence, so at least one sees the other, and both come to the same end: a claimed message is offered again.
//
// Stores become visible late and in any order, except those to one place; a fence waits until all are. Loads happen in their order.
type Messages struct {
	w   MessagesWorld
	bug MessagesBug

	// Places in a state. Memory begins at mem: the bytes of each message, then of each box both halves of its header, its state and its answer.
	posted, status, n, ended, done, tag, place, read, delivered, mem, buffers, width int
}

// The ranks, whose next actions lie first in a state.
const (
	sender = iota
	receiver
)

// The actions of a sender, from when it begins one.
const (
	sendIdle uint64 = iota
	sendFence
	sendHeader
	sendPlace
	withdrawFence
	withdrawLook
)

// The actions of a receiver.
const (
	receiveHeader uint64 = iota
	receivePlace
	receiveState
	receiveClaim
	receiveFence
	receiveLook
	receiveRead
	receiveTake
)

// How far a message is for its sender.
const (
	messageOpen     uint64 = iota + 1
	messageInsisted        // claimed when it was to be withdrawn
	messageTaken
	messageWithdrawn
)

// A state or an answer is one of these in front of which stands the number of its message.
const (
	stateWithdrawal = 1
	stateOffered    = 2
	stateGone       = 3
	answerClaimed   = 1
	answerTaken     = 2
	messageBits     = 2
)

const (
	rewritten    = 99 // bytes that their sender has written again
	pendingRoom  = 9  // stores of a rank that are not visible yet
	pendingWords = 1 + 2*pendingRoom
)

// The moves. Others are those of the receiver.
const (
	messagesPost     Move = (iota + 1) << 8 // the sender, as are the next
	messagesGoOn                            // what it has begun
	messagesTaken                           // and the message
	messagesGiveUp                          // and the message
	messagesReceive                         // the receiver's next action
	messagesAgain                           // it has seen a withdrawal and looks from the start, and the message
	messagesVisible                         // a store: rank and place
	messagesMoveKind Move = 0xff00
)

// NewMessages makes the system.
func NewMessages(w MessagesWorld, bug MessagesBug) *Messages {
	m := &Messages{w: w, bug: bug}
	at := 2
	take := func(n int) int { at += n; return at - n }
	m.posted, m.status = take(1), take(len(w.Tags))
	m.n, m.ended, m.done = take(1), take(1), take(1)
	m.tag, m.place, m.read, m.delivered = take(1), take(1), take(1), take(len(w.Wants))
	m.mem = take(len(w.Tags) + 4*w.Boxes)
	m.buffers = take(2 * pendingWords)
	m.width = at
	return m
}

// Start is all zero, and the receiver looks for message 1.
func (m *Messages) Start() []uint64 {
	s := make([]uint64, m.width)
	s[m.n] = 1
	return s
}

// Places of memory. Messages have numbers from 1.
func (m *Messages) bytes(n uint64) uint64 { return uint64(m.mem) + n - 1 }
func (m *Messages) box(n uint64, what int) uint64 {
	return uint64(m.mem+len(m.w.Tags)) + 4*((n-1)%uint64(m.w.Boxes)) + uint64(what)
}
func (m *Messages) first(n uint64) uint64  { return m.box(n, 0) } // half of the header: flag and tag
func (m *Messages) second(n uint64) uint64 { return m.box(n, 1) } // flag and place
func (m *Messages) state(n uint64) uint64  { return m.box(n, 2) }
func (m *Messages) answer(n uint64) uint64 { return m.box(n, 3) }

// store has a rank store a value, which is not visible yet.
func (m *Messages) store(s []uint64, rank int, at, v uint64) {
	b := s[m.buffers+rank*pendingWords:]
	b[1+2*b[0]], b[2+2*b[0]] = at, v
	b[0]++
}

// fenced says that all stores of a rank are visible.
func (m *Messages) fenced(s []uint64, rank int) bool { return s[m.buffers+rank*pendingWords] == 0 }

// half is a half of a header of message n.
func (m *Messages) half(n, v uint64) uint64 {
	if m.bug == MessagesOneFlag {
		n = 1
	}
	return n<<8 | v
}

// has says that a half is of message n.
func (m *Messages) has(half, n uint64) bool { return half>>8 == m.half(n, 0)>>8 }

func (m *Messages) gone(s []uint64, n uint64) bool {
	v := s[m.state(n)]
	return v>>messageBits > n || v == n<<messageBits|stateGone
}

// room says that the box of message n is free: the sender has seen that the message before in it is over.
func (m *Messages) room(s []uint64, n uint64) bool {
	if n <= uint64(m.w.Boxes) || m.bug == MessagesNoRoom {
		return true
	}
	before := n - uint64(m.w.Boxes)
	return s[m.status+int(before)-1] >= messageTaken || m.bug == MessagesRoomUnseen && s[m.answer(n)] == before<<messageBits|answerTaken
}

// low is the first message that the receiver is not through with.
func (m *Messages) low(s []uint64) (n uint64) {
	for n = 1; s[m.ended]>>n&1 != 0; n++ {
	}
	return n
}

// end has the receiver be through with message n, and look from the start.
func (m *Messages) end(s []uint64, n uint64) {
	s[m.ended] |= 1 << n
	s[receiver], s[m.n] = receiveHeader, m.low(s)
}

// Moves lists what the two ranks can do, and which stores can become visible.
func (m *Messages) Moves(s []uint64, moves []Move) []Move {
	count := uint64(len(m.w.Tags))
	switch {
	case s[m.buffers] > pendingRoom-2: // until one is visible
	case s[sender] == sendFence && !m.fenced(s, sender) && m.bug != MessagesHeaderFirst:
	case s[sender]&0xff == withdrawFence && !m.fenced(s, sender) && m.bug != MessagesWithdrawUnfenced:
	case s[sender] != sendIdle:
		moves = append(moves, messagesGoOn)
	default:
		if n := s[m.posted] + 1; n <= count && m.room(s, n) {
			moves = append(moves, messagesPost)
		}
		for n := uint64(1); n <= s[m.posted]; n++ {
			status := s[m.status+int(n)-1]
			if status == messageOpen && m.w.GiveUp {
				moves = append(moves, messagesGiveUp|Move(n))
			}
			if status <= messageInsisted && s[m.answer(n)] == n<<messageBits|answerTaken {
				moves = append(moves, messagesTaken|Move(n))
			}
		}
	}
	if m.canReceive(s) {
		moves = append(moves, messagesReceive)
	}
	for n := m.low(s); s[receiver] == receiveHeader && n < min(s[m.n], count+1); n++ {
		if s[m.ended]>>n&1 == 0 && m.gone(s, n) {
			moves = append(moves, messagesAgain|Move(n))
		}
	}
	for rank := range 2 {
		b := s[m.buffers+rank*pendingWords:]
	stores:
		for i := range b[0] {
			for k := range i {
				if b[1+2*k] == b[1+2*i] {
					continue stores
				}
			}
			moves = append(moves, messagesVisible|Move(rank)<<4|Move(i))
		}
	}
	return moves
}

func (m *Messages) canReceive(s []uint64) bool {
	n := s[m.n]
	switch s[receiver] {
	case receiveHeader:
		return s[m.done] < uint64(len(m.w.Wants)) && n <= uint64(len(m.w.Tags)) && n < m.low(s)+uint64(m.w.Boxes) &&
			(m.has(s[m.first(n)], n) || m.gone(s, n))
	case receivePlace:
		return m.has(s[m.second(n)], n) || m.gone(s, n)
	case receiveFence:
		return m.fenced(s, receiver) || m.bug == MessagesClaimUnfenced
	case receiveLook:
		return s[m.state(n)] != n<<messageBits|stateWithdrawal || m.bug == MessagesClaimUnseen
	}
	return true
}

// Apply makes a move.
func (m *Messages) Apply(s []uint64, move Move) error {
	n := uint64(move & 0xff)
	switch move & messagesMoveKind {
	case messagesPost:
		m.store(s, sender, m.bytes(s[m.posted]+1), s[m.posted]+1)
		s[sender] = sendFence
	case messagesGoOn:
		m.goOn(s)
	case messagesTaken:
		s[m.status+int(n)-1] = messageTaken
		m.store(s, sender, m.bytes(n), rewritten)
	case messagesGiveUp:
		m.store(s, sender, m.state(n), n<<messageBits|stateWithdrawal)
		s[sender] = withdrawFence | n<<8
	case messagesReceive:
		return m.receive(s)
	case messagesAgain:
		m.end(s, n)
	case messagesVisible:
		b := s[m.buffers+int(n>>4)*pendingWords:][:pendingWords]
		i := n & 15
		s[b[1+2*i]] = b[2+2*i]
		copy(b[1+2*i:], b[3+2*i:])
		b[0]--
		b[1+2*b[0]], b[2+2*b[0]] = 0, 0
	}
	return nil
}

// goOn is the sender's next action for what it has begun.
func (m *Messages) goOn(s []uint64) {
	next := s[m.posted] + 1 // is being posted
	n := s[sender] >> 8     // is being withdrawn
	switch s[sender] & 0xff {
	case sendFence:
		s[sender] = sendHeader
	case sendHeader:
		m.store(s, sender, m.first(next), m.half(next, uint64(m.w.Tags[next-1])))
		s[sender] = sendPlace
	case sendPlace:
		m.store(s, sender, m.second(next), m.half(next, next))
		s[m.posted], s[m.status+int(next)-1], s[sender] = next, messageOpen, sendIdle
	case withdrawFence:
		s[sender] = withdrawLook | n<<8
	case withdrawLook:
		s[sender] = sendIdle
		if s[m.answer(n)]>>messageBits == n && m.bug != MessagesWithdrawUnseen {
			s[m.status+int(n)-1] = messageInsisted
			if m.bug != MessagesNoSecondOffer {
				m.store(s, sender, m.state(n), n<<messageBits|stateOffered)
			}
			return
		}
		s[m.status+int(n)-1] = messageWithdrawn
		m.store(s, sender, m.state(n), n<<messageBits|stateGone)
		m.store(s, sender, m.bytes(n), rewritten)
	}
}

// receive is the receiver's next action.
func (m *Messages) receive(s []uint64) error {
	n, pc := s[m.n], s[receiver]
	s[receiver]++
	switch pc {
	case receiveHeader:
		s[m.tag] = s[m.first(n)] & 0xff
	case receivePlace:
		s[m.place] = s[m.second(n)] & 0xff
	case receiveState:
		if m.gone(s, n) {
			m.end(s, n)
		} else if s[m.tag] != uint64(m.w.Wants[s[m.done]]) {
			for s[m.n]++; s[m.ended]>>s[m.n]&1 != 0; s[m.n]++ {
			}
			s[receiver] = receiveHeader
		}
	case receiveClaim:
		m.store(s, receiver, m.answer(n), n<<messageBits|answerClaimed)
	case receiveLook:
		if m.gone(s, n) && m.bug != MessagesClaimUnseen {
			m.end(s, n)
		} else if m.bug == MessagesTakenUnread {
			m.store(s, receiver, m.answer(n), n<<messageBits|answerTaken)
		}
	case receiveRead:
		s[m.read] = s[m.bytes(s[m.place])]
	case receiveTake:
		if s[m.read] != n {
			return fmt.Errorf("message %d has arrived with the bytes of %d", n, s[m.read])
		}
		if m.bug != MessagesTakenUnread {
			m.store(s, receiver, m.answer(n), n<<messageBits|answerTaken)
		}
		s[m.delivered+int(s[m.done])] = n
		s[m.done]++
		m.end(s, n)
	}
	return nil
}

// Describe says what the move does.
func (m *Messages) Describe(s []uint64, move Move) Step {
	n := int(move & 0xff)
	step := func(rank int, format string, args ...any) Step { return Step{rank, fmt.Sprintf(format, args...)} }
	switch move & messagesMoveKind {
	case messagesPost:
		return step(sender, "writes the bytes of message %d", s[m.posted]+1)
	case messagesGoOn:
		return step(sender, "%s", [...]string{"", "fences", "writes the tag of a header", "writes the place of a header", "fences",
			"looks for a claim"}[s[sender]&0xff])
	case messagesTaken:
		return step(sender, "sees that message %d is taken", n)
	case messagesGiveUp:
		return step(sender, "begins to withdraw message %d", n)
	case messagesAgain:
		return step(receiver, "sees that message %d was withdrawn", n)
	case messagesVisible:
		b := s[m.buffers+n>>4*pendingWords:]
		return step(n>>4, "has its store of %d to word %d seen", b[2+2*(n&15)], int(b[1+2*(n&15)])-m.mem)
	}
	return step(receiver, "%s message %d", [...]string{"sees the tag of", "sees the place of", "sees the state of", "claims",
		"fences behind its claim of", "looks for a withdrawal of", "reads", "takes"}[s[receiver]], s[m.n])
}

// End wants every message to be over, those that were taken to have been received in the order of their tags, and no others.
func (m *Messages) End(s []uint64) error {
	if s[sender] != sendIdle || s[receiver] != receiveHeader || s[m.posted] != uint64(len(m.w.Tags)) {
		return fmt.Errorf("the sender stops at %d, with %d messages posted, the receiver at %d of message %d", s[sender], s[m.posted], s[receiver], s[m.n])
	}
	var last [256]uint64
	got := map[uint64]bool{}
	for _, n := range s[m.delivered : m.delivered+int(s[m.done])] {
		tag := m.w.Tags[n-1]
		if n <= last[tag] {
			return fmt.Errorf("message %d has arrived after message %d", n, last[tag])
		}
		last[tag], got[n] = n, true
	}
	for i, status := range s[m.status : m.status+len(m.w.Tags)] {
		n := uint64(i + 1)
		switch {
		case status < messageTaken:
			return fmt.Errorf("message %d is not over", n)
		case (status == messageTaken) != got[n]:
			return fmt.Errorf("message %d: the sender has it as taken: %v, the receiver: %v", n, status == messageTaken, got[n])
		case !m.w.GiveUp && !got[n]:
			return fmt.Errorf("message %d has not arrived", n)
		}
	}
	return nil
}
