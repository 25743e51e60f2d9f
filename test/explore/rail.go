package explore

// RailBug is a mistake that Rail can make.
type RailBug uint8

// The mistakes.
const (
	NoRailBug RailBug = iota
	// RailSignalBeforePut raises the word before all bytes of the put are there.
	RailSignalBeforePut
	// RailNewestCounts sets the word to the number of the put that has landed, also if an earlier one has not.
	RailNewestCounts
	// RailCountsTwice counts what is delivered, also what has been before.
	RailCountsTwice
	// RailLandsTwice numbers puts, but lands bytes that are delivered again.
	RailLandsTwice
	// RailLandsInterrupted goes on with a put that has begun to land when the rail is interrupted.
	RailLandsInterrupted
	// RailMemoryFirst gives the memory back before the rail is interrupted.
	RailMemoryFirst
	// RailNoFlush writes the next bytes where the last put may still read.
	RailNoFlush
	// RailOneBuffer has one place for the puts of all rounds, and not one for each parity.
	RailOneBuffer
	// RailDeafWait goes on waiting after a failure.
	RailDeafWait
	// RailNoRest closes a communicator without waiting for puts that nobody has waited for.
	RailNoRest
)

// RailWorld is what the ranks of a Rail do. Each is on a host of its own.
type RailWorld struct {
	Ranks int
	// Rounds are those of communicators, which are opened one after the other in the same memory. In a round every rank puts Words times
	// Pieces messages to every other rank, and awaits and reads theirs.
	Rounds        []int
	Words, Pieces int
	// Tail has every round end with a put without bytes, which says that the rank has read what came. The next round of the others awaits
	// it, and writes over that; nobody awaits the last. Without it the places of two rounds take turns.
	Tail bool
	// Cut has the network be cut at any time, after which any put may be lost and all ranks hear of it.
	Cut bool
	// Twice has the network deliver any put a second time.
	Twice bool
}

// Rail is the signal over a rail (internal/rails): a put is bytes at a place of another rank and then a word there, which says how many puts
// that name it have landed with all before them. Puts leave and land in any order, and bytes land in two halves.
//
// In a round a rank fills its source, puts, flushes, and awaits and reads the messages of the others. A communicator ends when each rank has
// told the others that it is through, and all puts to it have landed; then the words begin anew. A rank that hears of a failure ends its
// waits, interrupts the rail, and gives the memory back.
type Rail struct {
	w        RailWorld
	bug      RailBug
	programs [][]railOp
	puts     []railPut
	streams  map[[3]int][]int // puts by from, to and word, in order

	// Places in a state, which begins with how far each rank is.
	fates, met, epochs, sources, cut, words, places, states, width int
}

type railAct uint8

const (
	railFill railAct = iota
	railSend
	railFlush
	railAwait
	railRead
	railMeet
	railMet
	railForget
	railClose
	railGive
)

// railOp is an action of a rank.
type railOp struct {
	act   railAct
	peer  int
	put   int    // of railSend
	word  int    // of railAwait
	count uint64 // that it waits for
	at    int    // of railFill the source, of railRead the place
	value uint64 // that is there
}

// railPut is a put.
type railPut struct {
	from, to, word, place, source int
	seq                           uint64 // among those of its communicator that name the word
	bytes                         bool
}

// The states of a put. Above them are two bits, and the bytes that it has taken along.
const (
	railUnsent   uint64 = iota
	railQueued          // its source is still read
	railUnderWay        // it has left
	railHalf            // one half of its bytes has landed
	railLanded
	railLost
	railAgain  = 1 << 3 // it has been delivered twice
	railNewer  = 1 << 4 // it has landed after an odd number of Forgets
	railStates = railAgain - 1
	railValue  = 8 // bits below the bytes
)

// The fates of a rank's rail and memory.
const (
	railFine uint64 = iota
	railInterrupted
	railEnded       // and the memory is given back
	railGivenBefore // a mistake: the memory is given back, and the rail is not interrupted
)

// The moves: a rank's number is its next action.
const (
	railCut    Move = (iota + 1) << 8
	railHear        // and the rank
	railGoOn        // and the put, which leaves, or a half of it lands
	railLose        // and the put
	railRepeat      // and the put, which is delivered again
	railKind   Move = 0xff00
)

// NewRail makes the system.
func NewRail(w RailWorld, bug RailBug) *Rail {
	r := &Rail{w: w, bug: bug, programs: make([][]railOp, w.Ranks), streams: map[[3]int][]int{}}
	for rank := range w.Ranks {
		before := 0
		for comm, rounds := range w.Rounds {
			seqs := map[[2]int]uint64{}
			for round := range rounds {
				r.round(rank, before, round, seqs)
			}
			r.rest(rank, comm, seqs)
			before += rounds
		}
		r.add(rank, railOp{act: railClose}, railOp{act: railGive})
	}
	n := w.Ranks
	r.fates = n
	r.met = r.fates + n
	r.epochs = r.met + n
	r.sources = r.epochs + n
	r.cut = r.sources + n*w.Words*w.Pieces
	r.words = r.cut + 1
	r.places = r.words + n*n*(w.Words+2)
	r.states = r.places + n*n*r.room()*2
	r.width = r.states + len(r.puts)
	return r
}

// room is how many places a rank has in the memory of another.
func (r *Rail) room() int { return 2 * r.w.Words * r.w.Pieces }

// word is one of rank from in the memory of another: those of messages, that of tails, and that of the rest.
func (r *Rail) word(at, from, word int) int {
	return r.words + (at*r.w.Ranks+from)*(r.w.Words+2) + word
}

// place is the first half of one.
func (r *Rail) place(at, from, place int) int {
	return r.places + ((at*r.w.Ranks+from)*r.room()+place)*2
}

func (r *Rail) source(rank, source int) int { return r.sources + rank*r.w.Words*r.w.Pieces + source }

func (r *Rail) add(rank int, ops ...railOp) { r.programs[rank] = append(r.programs[rank], ops...) }

// send adds a put.
func (r *Rail) send(p railPut, seqs map[[2]int]uint64) {
	to := [2]int{p.to, p.word}
	seqs[to]++
	p.seq = seqs[to]
	s := [3]int{p.from, p.to, p.word}
	r.streams[s] = append(r.streams[s], len(r.puts))
	r.add(p.from, railOp{act: railSend, peer: p.to, put: len(r.puts)})
	r.puts = append(r.puts, p)
}

// round adds what a rank does in a round of a communicator, which comes behind before rounds of others.
func (r *Rail) round(rank, before, round int, seqs map[[2]int]uint64) {
	w, n := &r.w, r.w.Ranks
	for i := 1; i < n && w.Tail && round > 0; i++ {
		r.add(rank, railOp{act: railAwait, peer: (rank + i) % n, word: w.Words, count: uint64(round)})
	}
	var sources, places []int // of the messages for a rank, and what is in them
	var values []uint64
	for m := range w.Words * w.Pieces {
		at := m
		if r.bug != RailOneBuffer && !w.Tail {
			at += round % 2 * w.Words * w.Pieces
		}
		sources, places = append(sources, m), append(places, at)
		values = append(values, uint64(1+m+w.Words*w.Pieces*(before+round)))
		r.add(rank, railOp{act: railFill, at: m, value: values[m]})
	}
	for i := 1; i < n; i++ {
		for m := range sources {
			r.send(railPut{from: rank, to: (rank + i) % n, word: m / w.Pieces, place: places[m], source: sources[m], bytes: true}, seqs)
		}
	}
	if r.bug != RailNoFlush {
		r.add(rank, railOp{act: railFlush})
	}
	for i := 1; i < n; i++ {
		peer := (rank + i) % n
		for m := range sources {
			r.add(rank, railOp{act: railAwait, peer: peer, word: m / w.Pieces, count: uint64(round*w.Pieces + m%w.Pieces + 1)},
				railOp{act: railRead, peer: peer, at: places[m], value: values[m]})
		}
	}
	for i := 1; i < n && w.Tail; i++ {
		r.send(railPut{from: rank, to: (rank + i) % n, word: w.Words}, seqs)
	}
}

// rest adds the end of a communicator. Ranks meet on the control plane before they drop the numbers, and after that.
func (r *Rail) rest(rank, comm int, seqs map[[2]int]uint64) {
	w, n := &r.w, r.w.Ranks
	if r.bug != RailNoRest {
		for i := 1; i < n; i++ {
			r.send(railPut{from: rank, to: (rank + i) % n, word: w.Words + 1}, seqs)
		}
		for i := 1; i < n; i++ {
			peer := (rank + i) % n
			for word := range w.Words {
				r.add(rank, railOp{act: railAwait, peer: peer, word: word, count: uint64(w.Rounds[comm] * w.Pieces)})
			}
			if w.Tail {
				r.add(rank, railOp{act: railAwait, peer: peer, word: w.Words, count: uint64(w.Rounds[comm])})
			}
			r.add(rank, railOp{act: railAwait, peer: peer, word: w.Words + 1, count: 1})
		}
	}
	before, after := uint64(2*comm+1), uint64(2*comm+2)
	r.add(rank, railOp{act: railMeet, count: before}, railOp{act: railMet, count: before}, railOp{act: railForget},
		railOp{act: railMeet, count: after}, railOp{act: railMet, count: after})
}
