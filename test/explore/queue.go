package explore

import "fmt"

// QueueBug is a mistake that Queue can make.
type QueueBug uint8

// The mistakes.
const (
	NoQueueBug QueueBug = iota
	// QueueNumberFirst stores the number of a descriptor before the rest of it.
	QueueNumberFirst
	// QueueLaps writes a descriptor without waiting for its slot.
	QueueLaps
	// QueueDoneTwice has the proxy count a descriptor twice among those that are done.
	QueueDoneTwice
	// QueueDoneUnread has the proxy count a descriptor as done before it has read it.
	QueueDoneUnread
	// QueueGivesTwice has a receiver give a slot back twice.
	QueueGivesTwice
	// QueueGivesUnread has a receiver give a slot back before it has read it.
	QueueGivesUnread
	// QueueSignalBeforePut raises the word before all bytes of the put are there.
	QueueSignalBeforePut
	// QueueNewestCounts sets the word to the number of the put that has landed, also if an earlier one has not.
	QueueNewestCounts
)

// QueueWorld is a rank whose blocks send chunks to another host through one queue, each by a ring of its own.
type QueueWorld struct {
	Blocks, Chunks int // Chunks is of each block
	Slots          int // of a ring
	Descriptors    int // that the queue has room for
}

// Queue is the queue from kernels to their proxy, and the rings over it (kernels/cuda/queue.cuh, rings.cuh).
//
// A block waits for a slot that its receiver has given back, fills its own, takes the next number of the queue, waits until the descriptor that
// had its room is done, and writes a descriptor and last its number. The proxy reads descriptors in the order of numbers, their bytes leave
// in any order, and it tells up to which all have left. Puts land in any order, bytes in two halves, and a block's word counts them in its order.
// The receiver reads a chunk and gives the slot back.
type Queue struct {
	w   QueueWorld
	bug QueueBug

	// Places in a state, which begins with how far each block is.
	numbers, next, done, read, descriptors, sources, puts, places, words, received, giving, given, width int
}

// The actions of a block for a chunk.
const (
	queueFill = iota // once there is a slot
	queueTake
	queueFirst  // once there is a descriptor: one half of it
	queueSecond // and the other,
	queueNumber // and the number
	queueActs
)

// The states of a put, in front of its block, its chunk and its bytes.
const (
	queueNone uint64 = iota
	queueRead        // by the proxy
	queueLeft
	queueHalf
	queueLanded
	queuePutWords = 4
)

// The moves: a block's number is its next action.
const (
	queueReads   Move = (iota + 1) << 8 // the proxy
	queueTells                          // the proxy, what is done
	queueGoes                           // and the put
	queueReceive                        // and the block, whose receiver reads a chunk
	queueGive                           // and the block, of which a slot is given back
	queueKind    Move = 0xff00
)

// NewQueue makes the system.
func NewQueue(w QueueWorld, bug QueueBug) *Queue {
	q := &Queue{w: w, bug: bug}
	at := w.Blocks
	take := func(n int) int { at += n; return at - n }
	q.numbers, q.next, q.done, q.read = take(w.Blocks), take(1), take(1), take(1)
	q.descriptors, q.sources = take(3*w.Descriptors), take(w.Blocks*w.Slots)
	q.puts, q.places, q.words = take(queuePutWords*w.Blocks*w.Chunks), take(2*w.Blocks*w.Slots), take(w.Blocks)
	q.received, q.giving, q.given = take(w.Blocks), take(w.Blocks), take(w.Blocks)
	q.width = at
	return q
}

// Start is all zero.
func (q *Queue) Start() []uint64 { return make([]uint64, q.width) }

func (q *Queue) put(i int) int { return q.puts + queuePutWords*i }

// slot is the index of a block's chunk among the slots of all blocks.
func (q *Queue) slot(block, chunk int) int { return block*q.w.Slots + chunk%q.w.Slots }

// Moves lists what blocks, the proxy, the network and receivers can do.
func (q *Queue) Moves(s []uint64, moves []Move) []Move {
	for b := range q.w.Blocks {
		if q.canAct(s, b) {
			moves = append(moves, Move(b))
		}
		if c := s[q.received+b]; s[q.words+b] > c && c < uint64(q.w.Chunks) {
			moves = append(moves, queueReceive|Move(b))
		}
		if s[q.giving+b] > 0 {
			moves = append(moves, queueGive|Move(b))
		}
	}
	if n := s[q.read]; n < uint64(q.w.Blocks*q.w.Chunks) && s[q.descriptors+3*int(n)%(3*q.w.Descriptors)+2] == n+1 {
		moves = append(moves, queueReads)
	}
	if q.left(s) > s[q.done] {
		moves = append(moves, queueTells)
	}
	for i := range q.w.Blocks * q.w.Chunks {
		if state := s[q.put(i)]; state != queueNone && state != queueLanded {
			moves = append(moves, queueGoes|Move(i))
		}
	}
	return moves
}

// left is how many descriptors the proxy may tell of.
func (q *Queue) left(s []uint64) (n uint64) {
	for n < s[q.read] && s[q.put(int(n))] >= queueLeft {
		n++
	}
	switch {
	case q.bug == QueueDoneTwice && n > 0:
		n++
	case q.bug == QueueDoneUnread:
		n = min(s[q.next], s[q.read]+1)
	}
	return n
}

func (q *Queue) canAct(s []uint64, b int) bool {
	if s[b] == uint64(queueActs*q.w.Chunks) {
		return false
	}
	switch chunk := s[b] / queueActs; s[b] % queueActs {
	case queueFill:
		return chunk < s[q.given+b]+uint64(q.w.Slots)
	case queueFirst:
		return q.bug == QueueLaps || s[q.numbers+b] <= s[q.done]+uint64(q.w.Descriptors)
	}
	return true
}

// Apply makes a move.
func (q *Queue) Apply(s []uint64, m Move) error {
	of := int(m &^ queueKind)
	switch m & queueKind {
	case queueReads:
		return q.reads(s)
	case queueTells:
		s[q.done] = q.left(s)
	case queueGoes:
		q.goes(s, of)
	case queueReceive:
		return q.receive(s, of)
	case queueGive:
		s[q.giving+of]--
		s[q.given+of]++
	default:
		q.act(s, of)
	}
	return nil
}

func (q *Queue) act(s []uint64, b int) {
	chunk, act := int(s[b]/queueActs), int(s[b]%queueActs)
	if q.bug == QueueNumberFirst && act >= queueFirst {
		act = queueFirst + (act-queueFirst+2)%3
	}
	number := s[q.numbers+b]
	at := 0
	if number > 0 {
		at = q.descriptors + 3*(int(number-1)%q.w.Descriptors)
	}
	s[b]++
	switch act {
	case queueFill:
		s[q.sources+q.slot(b, chunk)] = uint64(chunk + 1)
	case queueTake:
		s[q.next]++
		s[q.numbers+b] = s[q.next]
	case queueFirst:
		s[at] = uint64(b)
	case queueSecond:
		s[at+1] = uint64(chunk)
	case queueNumber:
		s[at+2] = number
	}
}

// reads takes in the next descriptor. It must be that of the block that has its number.
func (q *Queue) reads(s []uint64) error {
	n := int(s[q.read])
	d, p := s[q.descriptors+3*(n%q.w.Descriptors):], s[q.put(n):]
	for b := range q.w.Blocks {
		if s[q.numbers+b] == uint64(n+1) && (d[0] != uint64(b) || d[1] != s[b]/queueActs && d[1]+1 != s[b]/queueActs) {
			return fmt.Errorf("the proxy reads chunk %d of block %d, want what block %d wrote", d[1], d[0], b)
		}
	}
	s[q.read]++
	p[0], p[1], p[2] = queueRead, d[0], d[1]
	return nil
}

// goes lets a put leave, or lands what comes next of it.
func (q *Queue) goes(s []uint64, i int) {
	p := s[q.put(i):]
	b := int(p[1])
	slot := q.slot(b, int(p[2]))
	p[0]++
	switch p[0] {
	case queueLeft:
		p[3] = s[q.sources+slot]
	case queueHalf:
		s[q.places+2*slot] = p[3]
	case queueLanded:
		s[q.places+2*slot+1] = p[3]
	}
	first := q.bug == QueueSignalBeforePut
	if word := &s[q.words+b]; p[0] == queueLanded && q.bug == QueueNewestCounts {
		*word = max(*word, p[2]+1)
	} else if p[0] == queueLanded && !first || p[0] == queueHalf && first {
		for j := 0; j < q.w.Blocks*q.w.Chunks; j++ { // in the order of numbers, which is that of the block
			other := s[q.put(j):]
			if (other[0] == queueLanded || first && other[0] == queueHalf) && int(other[1]) == b && other[2] == *word {
				*word++
			}
		}
	}
}

// receive reads a chunk and gives its slot back.
func (q *Queue) receive(s []uint64, b int) error {
	chunk := s[q.received+b]
	at := q.places + 2*q.slot(b, int(chunk))
	if q.bug == QueueGivesUnread && s[q.giving+b]+s[q.given+b] <= chunk {
		s[q.giving+b]++
		return nil
	}
	for half := range 2 {
		if s[at+half] != chunk+1 {
			return fmt.Errorf("the receiver of block %d reads chunk %d in half %d, want %d", b, s[at+half], half, chunk+1)
		}
	}
	s[q.received+b]++
	switch q.bug {
	case QueueGivesTwice:
		s[q.giving+b] += 2
	case QueueGivesUnread:
	default:
		s[q.giving+b]++
	}
	return nil
}

// Describe says what the move does.
func (q *Queue) Describe(s []uint64, m Move) Step {
	of := int(m &^ queueKind)
	step := func(format string, args ...any) Step { return Step{Action: fmt.Sprintf(format, args...)} }
	switch m & queueKind {
	case queueReads:
		return step("its proxy reads descriptor %d", s[q.read]+1)
	case queueTells:
		return step("its proxy tells that %d descriptors are done", q.left(s))
	case queueGoes:
		p := s[q.put(of):]
		return step("chunk %d of block %d %s", p[2], p[1], [...]string{"", "leaves", "lands by half", "has landed"}[p[0]])
	case queueReceive:
		return step("its receiver takes chunk %d of block %d", s[q.received+of], of)
	case queueGive:
		return step("it gets a slot of block %d back", of)
	}
	return step("block %d does %s chunk %d", of, [...]string{"fill", "take a number for", "write half of the descriptor of",
		"write the descriptor of", "publish"}[s[of]%queueActs], s[of]/queueActs)
}

// End wants all chunks to have been received.
func (q *Queue) End(s []uint64) error {
	for b := range q.w.Blocks {
		if got := s[q.received+b]; got != uint64(q.w.Chunks) {
			return fmt.Errorf("of block %d, %d chunks have come, want %d", b, got, q.w.Chunks)
		}
	}
	return nil
}
