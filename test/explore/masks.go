package explore

import "fmt"

// MasksBug is a mistake that Masks can make.
type MasksBug uint8

// The mistakes.
const (
	NoMasksBug MasksBug = iota
	// OwnCast has each rank decide for itself who takes part in a call.
	OwnCast
	// OwnNotice reads every notice in the rank's own segment, where that of a masked rank may not have come.
	OwnNotice
	// NoLastLook goes on without looking once more whether this rank was masked while it read.
	NoLastLook
	// WritersNotAwaited goes on without a masked rank that may still write rows.
	WritersNotAwaited
	// OwnWordLast tells a masked rank behind all others.
	OwnWordLast
	// AdmittedByEach has each rank take in who asks, and not who was decided on.
	AdmittedByEach
	// MaskedComesBack takes in a rank that was masked, or has ended, since it asked.
	MaskedComesBack
	// NoTerms has a mask change nothing where a rank knows of one of before.
	NoTerms
)

// MaskEvent is what happens to one rank, at any time.
type MaskEvent uint8

// The events.
const (
	Masked   MaskEvent = iota
	Killed             // and masked by those who see it
	Replaced           // by a fresh process, which asks to be taken in
)

// Masks is how calls of dispatch and combine go on without a rank on the host (kernels/host/dispatch_mask.go): odd calls are dispatches, even
// ones combines. Halves has the rows of a combine.
//
// A call begins with a notice to every peer. When those of all peers have come that are not masked, one compare-and-swap decides who takes part in
// the call, its cast, and who is taken in again behind a combine. A notice of the cast that has not come is read in the segment of the rank that
// decided. A mask is of a term of the victim, which counts how often it has asked to be taken in.
type Masks struct {
	ranks, calls int
	victim       int
	events       []MaskEvent
	returns      bool
	bug          MasksBug
}

// NewMasks makes the system of n ranks that make a number of calls, during which the events happen to the victim one after the other. A victim that
// returns asks to be taken in again when it finds itself masked.
func NewMasks(n, calls, victim int, events []MaskEvent, returns bool, bug MasksBug) *Masks {
	return &Masks{ranks: n, calls: calls, victim: victim, events: events, returns: returns, bug: bug}
}

// The next action of a rank. Those with a peer are done for each peer.
const (
	maskBegin  = iota
	maskCount  // the call, and say of a dispatch that rows may be written
	maskTell   // a notice to a peer
	maskHear   // await that of a peer
	maskLook   // at the mask word
	maskGather // who has come, and who asks
	maskDecide // or learn what was decided
	maskTake   // read the notices
	maskGoOn   // unless this rank is masked
	maskWrite  // rows to a peer, and that they are there; in a combine that this rank is through
	maskWrote  // all of them
	maskRows   // await the word of a peer
	maskUse    // use the rows
	maskOut    // it is masked
	maskAsk    // to be taken in
	maskReturn
	maskEnd
)

var maskNames = [...]string{
	"looks whether it is masked", "begins the call", "tells", "awaits the notice of", "reads its mask word", "looks who has come", "decides",
	"reads the notices", "goes on", "writes to", "has written", "awaits the rows of", "uses the rows", "finds that it is masked", "asks to be taken in",
	"awaits that it is taken in", "is through",
}

// The state. Each rank has words of its own, the first of which say what it does and for which peer.
const (
	maskDoes = iota
	maskPeer
	maskCall    // the number of its call
	maskSaw     // the mask word, as it read it
	maskMembers // what it would decide, and then the decision
	maskComing
	maskDecider
	maskLost
	maskStale // a notice was of another call
	maskThere // up to which call it has used the rows that came
	maskWord  // what it knows of the victim: the term, and the bits below
	maskAsks
	maskWrites // it may write rows
	maskTerm   // of the victim, which it is in or asks for
	maskFields
)

const (
	victimMasked = 1
	victimEnded  = 2
	victimTerm   = 2 // where the term begins
)

func (m *Masks) at(rank, field int) int { return rank*maskFields + field }
func (m *Masks) notice(to, from int, call uint64) int {
	return m.ranks*maskFields + (to*m.ranks+from)*2 + int(call&1)
}
func (m *Masks) rows(to, from int) int {
	return m.notice(m.ranks-1, m.ranks-1, 1) + 1 + to*m.ranks + from
}

// decision is where that of the last call is: its members, the term for which the victim is taken in, who decided, and the call.
func (m *Masks) decision() int { return m.rows(m.ranks-1, m.ranks-1) + 1 }

// agreed is whom the first rank that went on in a call took for its members.
func (m *Masks) agreed(call uint64) int { return m.decision() + 1 + int(call) }
func (m *Masks) event() int             { return m.agreed(uint64(m.calls)) + 1 }
func (m *Masks) told() int              { return m.event() + 1 } // how many mask words have the event
func (m *Masks) mark() int              { return m.event() + 2 } // the mask that they are told
func (m *Masks) dead() int              { return m.event() + 3 }

// decisionOf is a decision. coming is the term for which the victim is taken in, 0 if it is not.
func decisionOf(members, coming uint64, decider int, call uint64) uint64 {
	return members | coming<<8 | uint64(decider)<<16 | call<<24
}

// masks reports whether rank r knows that rank p is masked.
func (m *Masks) masks(s []uint64, r, p int) bool {
	return p == m.victim && s[m.at(r, maskWord)]&victimMasked != 0
}

// Start is all zero.
func (m *Masks) Start() []uint64 { return make([]uint64, m.dead()+1) }

// Moves lists the ranks that can go on, the event's next step as the move of rank n, and the victim's death as that of rank n+1.
func (m *Masks) Moves(s []uint64, moves []Move) []Move {
	for rank := range m.ranks {
		if (rank == m.victim && s[m.dead()] != 0) || !m.ready(s, rank) {
			continue
		}
		moves = append(moves, Move(rank))
	}
	if e := s[m.event()]; e < uint64(len(m.events)) {
		if m.events[e] == Killed && s[m.dead()] == 0 {
			moves = append(moves, Move(m.ranks+1))
		} else {
			moves = append(moves, Move(m.ranks))
		}
	}
	return moves
}

// ready reports whether a rank does not wait.
func (m *Masks) ready(s []uint64, r int) bool {
	call, p := s[m.at(r, maskCall)], m.peerOf(s, r)
	switch s[m.at(r, maskDoes)] {
	case maskHear:
		return s[m.notice(r, p, call)] >= call || m.masks(s, r, p) || m.masks(s, r, r)
	case maskRows:
		return m.in(s, r, p) && s[m.rows(r, p)] >= call || m.without(s, r, p) || m.masks(s, r, r)
	case maskReturn:
		return m.takenIn(s) != 0 || s[m.at(r, maskWord)]>>victimTerm >= s[m.at(r, maskTerm)]
	case maskEnd:
		return false
	case maskOut:
		return m.returns
	}
	return true
}

func (m *Masks) peerOf(s []uint64, r int) int { return (r + 1 + int(s[m.at(r, maskPeer)])) % m.ranks }

func (m *Masks) in(s []uint64, r, p int) bool { return s[m.at(r, maskMembers)]>>p&1 != 0 }

// without reports whether rank r waits no more for rows of p, or for p to be through with its own.
func (m *Masks) without(s []uint64, r, p int) bool {
	if !m.in(s, r, p) {
		return true
	}
	if !m.masks(s, r, p) {
		return false
	}
	combine := s[m.at(r, maskCall)]%2 == 0
	return combine || m.bug == WritersNotAwaited || s[m.at(r, maskWord)]&victimEnded != 0 || s[m.at(p, maskWrites)] == 0
}

// takenIn is the decision by which the victim is taken in, 0 for none.
func (m *Masks) takenIn(s []uint64) uint64 {
	if d := s[m.decision()]; d>>8&0xff != 0 && d>>8&0xff == s[m.at(m.victim, maskTerm)] {
		return d
	}
	return 0
}

// Apply lets a rank do its next action, or the event happen.
func (m *Masks) Apply(s []uint64, move Move) error {
	switch int(move) {
	case m.ranks:
		m.mask(s)
		return nil
	case m.ranks + 1:
		s[m.dead()] = 1
		return nil
	}
	return m.act(s, int(move))
}

// next is the rank that is told next of the event, the victim first.
func (m *Masks) next(s []uint64) int {
	to := m.victim + int(s[m.told()])
	if m.bug == OwnWordLast {
		to++
	}
	return to % m.ranks
}

// mask tells one rank more of the event.
func (m *Masks) mask(s []uint64) {
	if m.events[s[m.event()]] == Replaced {
		s[m.dead()], s[m.at(m.victim, maskDoes)], s[m.at(m.victim, maskPeer)] = 0, maskOut, 0
		s[m.event()]++
		return
	}
	if s[m.told()] == 0 {
		s[m.mark()] = s[m.at(m.victim, maskTerm)]<<victimTerm | victimMasked
		if m.events[s[m.event()]] == Killed {
			s[m.mark()] |= victimEnded
		}
	}
	word, mark := &s[m.at(m.next(s), maskWord)], s[m.mark()]
	if *word>>victimTerm == mark>>victimTerm || *word&victimMasked != 0 && m.bug == NoTerms {
		*word |= mark & (victimMasked | victimEnded)
	} else if *word>>victimTerm < mark>>victimTerm {
		*word = mark
	}
	if s[m.told()]++; s[m.told()] == uint64(m.ranks) {
		s[m.told()] = 0
		s[m.event()]++
	}
}

func (m *Masks) act(s []uint64, r int) error {
	word := func(field int) *uint64 { return &s[m.at(r, field)] }
	does, call := word(maskDoes), *word(maskCall)
	masked := m.masks(s, r, r)
	next := func(what uint64) { *does, *word(maskPeer) = what, 0 }
	out := func() error {
		*word(maskWrites) = 0
		next(maskOut)
		if r != m.victim {
			return fmt.Errorf("rank %d finds itself masked in call %d, rank %d is", r, call, m.victim)
		}
		return nil
	}
	each := func(what uint64) { // the next peer, and behind the last what comes then
		if *word(maskPeer)++; *word(maskPeer) == uint64(m.ranks-1) {
			next(what)
		}
	}
	p := m.peerOf(s, r)
	switch *does {
	case maskBegin:
		if masked {
			return out()
		}
		if call == uint64(m.calls) {
			next(maskEnd)
			return nil
		}
		next(maskCount)
	case maskCount:
		*word(maskCall)++
		*word(maskWrites), *word(maskLost), *word(maskStale) = *word(maskCall)%2, 0, 0
		next(maskTell)
	case maskTell:
		s[m.notice(p, r, call)] = call
		each(maskHear)
	case maskHear:
		if s[m.notice(r, p, call)] < call && !m.masks(s, r, p) {
			return out()
		}
		each(maskLook)
	case maskLook:
		*word(maskSaw) = *word(maskWord)
		next(maskGather)
	case maskGather:
		m.gather(s, r)
		next(maskDecide)
	case maskDecide:
		mine := decisionOf(*word(maskMembers), *word(maskComing), r, call)
		d := &s[m.decision()]
		if *d>>24 < call {
			*d = mine
		}
		made, coming := *d, *word(maskComing)
		if m.bug == OwnCast {
			made = mine
		}
		*word(maskMembers), *word(maskComing), *word(maskDecider) = made&0xff, made>>8&0xff, made>>16&0xff
		if m.bug == AdmittedByEach {
			*word(maskComing) = coming
		}
		if made>>24 > call || made>>r&1 == 0 {
			return out()
		}
		next(maskTake)
	case maskTake:
		m.take(s, r)
		next(maskGoOn)
	case maskGoOn:
		if masked && m.bug != NoLastLook {
			return out()
		}
		if *word(maskStale) != 0 {
			return fmt.Errorf("rank %d goes on in call %d with a notice of another", r, call)
		}
		if was := &s[m.agreed(call)]; *was == 0 {
			*was = *word(maskMembers)
		} else if *was != *word(maskMembers) {
			return fmt.Errorf("rank %d goes on in call %d with ranks %b, another with %b", r, call, *word(maskMembers), *was)
		}
		next(maskWrite)
	case maskWrite:
		if m.in(s, r, p) {
			lives := p != m.victim || s[m.dead()] == 0 && !m.masks(s, p, p)
			if call%2 == 1 && lives && s[m.at(p, maskThere)] >= call {
				return fmt.Errorf("rank %d writes rows of call %d to rank %d, which has gone on", r, call, p)
			}
			s[m.rows(p, r)] = call
		}
		each(maskWrote)
	case maskWrote:
		*word(maskWrites) = 0
		next(maskRows)
	case maskRows:
		switch {
		case m.in(s, r, p) && s[m.rows(r, p)] >= call:
		case m.without(s, r, p):
			*word(maskLost) |= 1 << p
		default:
			return out()
		}
		each(maskUse)
	case maskUse:
		*word(maskThere) = call
		for p := range m.ranks {
			if p != r && m.in(s, r, p) && *word(maskLost)>>p&1 == 0 && s[m.rows(r, p)] != call {
				return fmt.Errorf("rank %d uses rows of rank %d of call %d in call %d", r, p, s[m.rows(r, p)], call)
			}
		}
		next(maskBegin)
	case maskOut:
		*word(maskTerm) = max(*word(maskTerm), *word(maskWord)>>victimTerm) + 1
		next(maskAsk)
	case maskAsk:
		*word(maskAsks) = 1
		next(maskReturn)
	case maskReturn:
		d := m.takenIn(s)
		if d == 0 || *word(maskWord)>>victimTerm >= d>>8&0xff { // masked again
			next(maskOut)
			return nil
		}
		*word(maskAsks) = 0
		*word(maskCall), *word(maskThere) = d>>24, d>>24
		*word(maskWord) = *word(maskTerm) << victimTerm
		next(maskBegin)
	}
	return nil
}

// gather finds who has come, and who asks.
func (m *Masks) gather(s []uint64, r int) {
	call, saw := s[m.at(r, maskCall)], s[m.at(r, maskSaw)]
	members, coming := uint64(1)<<r, uint64(0)
	for p := range m.ranks {
		switch {
		case p == r:
		case p != m.victim || saw&victimMasked == 0:
			if s[m.notice(r, p, call)] >= call {
				members |= 1 << p
			}
		case call%2 == 0 && s[m.at(p, maskAsks)] != 0 && s[m.at(p, maskTerm)] > saw>>victimTerm:
			coming = s[m.at(p, maskTerm)]
		}
	}
	s[m.at(r, maskMembers)], s[m.at(r, maskComing)] = members, coming
}

// take reads the notices of the cast, and takes in who comes.
func (m *Masks) take(s []uint64, r int) {
	call := s[m.at(r, maskCall)]
	for p := range m.ranks {
		if p == r || !m.in(s, r, p) {
			continue
		}
		in := r
		if s[m.notice(r, p, call)] < call && m.bug != OwnNotice {
			in = int(s[m.at(r, maskDecider)])
		}
		if s[m.notice(in, p, call)] != call {
			s[m.at(r, maskStale)] = 1
		}
	}
	mask, coming := &s[m.at(r, maskWord)], s[m.at(r, maskComing)]
	if coming > *mask>>victimTerm || coming != 0 && coming == *mask>>victimTerm && m.bug == MaskedComesBack {
		*mask = coming << victimTerm
	}
}

// Describe names the next action.
func (m *Masks) Describe(s []uint64, move Move) Step {
	switch int(move) {
	case m.ranks:
		if m.events[s[m.event()]] == Replaced {
			return Step{Rank: m.victim, Action: "comes again, a fresh process"}
		}
		return Step{Rank: m.victim, Action: fmt.Sprintf("is masked in the word of rank %d", m.next(s))}
	case m.ranks + 1:
		return Step{Rank: m.victim, Action: "is killed"}
	}
	r := int(move)
	does := s[m.at(r, maskDoes)]
	action := fmt.Sprintf("%s (call %d)", maskNames[does], s[m.at(r, maskCall)])
	switch does {
	case maskTell, maskHear, maskWrite, maskRows:
		action = fmt.Sprintf("%s rank %d (call %d)", maskNames[does], m.peerOf(s, r), s[m.at(r, maskCall)])
	}
	return Step{Rank: r, Action: action}
}

// End wants every rank to be through, but for the victim, which may also be out.
func (m *Masks) End(s []uint64) error {
	for r := range m.ranks {
		switch does := s[m.at(r, maskDoes)]; {
		case does == maskEnd, r == m.victim && (s[m.dead()] != 0 || does == maskOut || does == maskReturn):
		default:
			return fmt.Errorf("rank %d for ever %s rank %d in call %d", r, maskNames[does], m.peerOf(s, r), s[m.at(r, maskCall)])
		}
	}
	return nil
}
