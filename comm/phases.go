package comm

// A join has a phase, on rank 0 and on every other rank:
//
//	gathering ── all are present ──► met
//	gathering, met ── a failure ──► failed
//	gathering, met, failed ── the end ──► closed
//
// The first failure counts, and none after the end. On rank 0, met means that
// every rank is present; on the others, that the addresses of all have come.
type joinPhase uint8

const (
	gathering joinPhase = iota
	met
	failed
	closed
)

func (p joinPhase) String() string { return [...]string{"gathering", "met", "failed", "closed"}[p] }

// may reports whether a join in phase p can go on to phase next.
func (p joinPhase) may(next joinPhase) bool {
	switch next {
	case met:
		return p == gathering
	case failed:
		return p == gathering || p == met
	case closed:
		return p != closed
	}
	return false
}

// Rank 0 has a slot for every member of the group to be. Nothing is said to a
// rank before it has been accepted, nor does it count as one that has come. When
// all slots are taken, those who hold one are asked whether they are still there:
// one may have died and been started again, which is seen only later.
type slotPhase uint8

const (
	slotFree     slotPhase = iota
	slotClaimed            // a rank has shown who it is
	slotAccepted           // and was told that it is accepted
	slotAsked              // and whether it is still there
	slotPresent            // and has said so
	slotLeft               // its connection has ended, after all had met
)

func (p slotPhase) String() string {
	return [...]string{"free", "claimed", "accepted", "asked", "present", "left"}[p]
}

// slotEvent is what can happen to a slot.
type slotEvent uint8

const (
	rankClaims  slotEvent = iota
	rankRefused           // it could not be told that it is accepted
	rankAccepted
	rankAsked
	rankAnswers
	rankGone // before all have met: it may come back
	rankLeaves
)

// slotMoves are all moves of a slot. An event that is not among them for the
// phase of a slot leaves the slot as it is.
var slotMoves = [...]struct {
	from slotPhase
	on   slotEvent
	to   slotPhase
}{
	{slotFree, rankClaims, slotClaimed},
	{slotClaimed, rankRefused, slotFree},
	{slotClaimed, rankAccepted, slotAccepted},
	{slotAccepted, rankAsked, slotAsked},
	{slotAccepted, rankGone, slotFree},
	{slotAsked, rankAnswers, slotPresent},
	{slotAsked, rankGone, slotFree},
	{slotPresent, rankGone, slotFree},
	{slotPresent, rankLeaves, slotLeft},
}

// memberSlot is what rank 0 knows of a rank.
type memberSlot struct {
	phase slotPhase
	told  bool     // a rank of this number was told of the failure
	s     *session // nil of rank 0 itself, and while the slot is free
	addr  string
}

// move has an event happen to the slot. It reports whether the slot has moved.
func (m *memberSlot) move(on slotEvent) bool {
	for _, move := range slotMoves {
		if move.from == m.phase && move.on == on {
			m.phase = move.to
			if m.phase == slotFree {
				m.s, m.addr = nil, ""
			}
			return true
		}
	}
	return false
}
