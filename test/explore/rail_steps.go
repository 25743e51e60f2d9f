package explore

import "fmt"

// Start is all zero.
func (r *Rail) Start() []uint64 { return make([]uint64, r.width) }

// Moves lists the ranks and puts that can go on, and what the network and a failure can do.
func (r *Rail) Moves(s []uint64, moves []Move) []Move {
	for rank := range r.w.Ranks {
		if r.canAct(s, rank) {
			moves = append(moves, Move(rank))
		}
		if s[r.cut] != 0 && s[r.fates+rank] != railEnded && !(r.bug == RailDeafWait && r.waits(s, rank)) {
			moves = append(moves, railHear|Move(rank))
		}
	}
	if r.w.Cut && s[r.cut] == 0 {
		moves = append(moves, railCut)
	}
	for i := range r.puts {
		p, state := &r.puts[i], s[r.states+i]
		deaf := s[r.fates+p.to] == railInterrupted || s[r.fates+p.to] == railEnded
		switch at := state & railStates; {
		case at == railUnsent, at == railLost:
		case at == railQueued, at == railHalf && r.bug == RailLandsInterrupted, at != railLanded && !deaf:
			moves = append(moves, railGoOn|Move(i))
		}
		switch at := state & railStates; {
		case at == railQueued, at == railUnderWay:
			if s[r.cut] != 0 {
				moves = append(moves, railLose|Move(i))
			}
		case at == railHalf, at == railLanded:
			if r.w.Twice && state&railAgain == 0 && !deaf {
				moves = append(moves, railRepeat|Move(i))
			}
		}
	}
	return moves
}

// op is the next action of a rank, nil when there is none.
func (r *Rail) op(s []uint64, rank int) *railOp {
	if s[rank] == uint64(len(r.programs[rank])) {
		return nil
	}
	return &r.programs[rank][s[rank]]
}

// canAct reports whether a rank can do its next action.
func (r *Rail) canAct(s []uint64, rank int) bool {
	o, fate := r.op(s, rank), s[r.fates+rank]
	if o == nil || fate != railFine && (o.act != railGive || fate != railInterrupted) {
		return false
	}
	return !r.waits(s, rank)
}

// waits reports whether a rank has to wait.
func (r *Rail) waits(s []uint64, rank int) bool {
	o := r.op(s, rank)
	switch {
	case o == nil:
	case o.act == railFlush:
		for i := range r.puts {
			if r.puts[i].from == rank && s[r.states+i]&railStates == railQueued {
				return true
			}
		}
	case o.act == railAwait:
		return s[r.word(rank, o.peer, o.word)] < o.count
	case o.act == railMet:
		for p := range r.w.Ranks {
			if s[r.met+p] < o.count {
				return true
			}
		}
	}
	return false
}

// Apply makes a move.
func (r *Rail) Apply(s []uint64, m Move) error {
	of := int(m &^ railKind)
	switch m & railKind {
	case railCut:
		s[r.cut] = 1
	case railHear:
		fate := &s[r.fates+of]
		switch {
		case *fate == railFine && r.bug == RailMemoryFirst:
			*fate = railGivenBefore
		case *fate == railFine:
			*fate = railInterrupted
		default:
			*fate = railEnded
		}
	case railGoOn:
		return r.goOn(s, of)
	case railLose:
		s[r.states+of] = railLost
	case railRepeat:
		return r.repeat(s, of)
	default:
		return r.act(s, of)
	}
	return nil
}

// act does a rank's next action.
func (r *Rail) act(s []uint64, rank int) error {
	o := r.op(s, rank)
	s[rank]++
	switch o.act {
	case railFill:
		s[r.source(rank, o.at)] = o.value
	case railSend:
		s[r.states+o.put] = railQueued
	case railRead:
		for half := range 2 {
			if got := s[r.place(rank, o.peer, o.at)+half]; got != o.value {
				return fmt.Errorf("rank %d reads %d in half %d of place %d of rank %d, want %d", rank, got, half, o.at, o.peer, o.value)
			}
		}
	case railMeet:
		s[r.met+rank] = o.count
	case railForget:
		s[r.epochs+rank]++
		clear(s[r.word(rank, 0, 0):r.word(rank+1, 0, 0)])
	case railClose:
		s[r.fates+rank] = railInterrupted
	case railGive:
		s[r.fates+rank] = railEnded
	}
	return nil
}

// goOn lets a put leave its source, or lands what comes next of it.
func (r *Rail) goOn(s []uint64, i int) error {
	p, state := &r.puts[i], &s[r.states+i]
	switch at := *state & railStates; {
	case at == railQueued:
		*state++
		if p.bytes {
			*state |= s[r.source(p.from, p.source)] << railValue
		}
	case at == railUnderWay && p.bytes:
		*state++
		if err := r.land(s, p, *state>>railValue, 0); err != nil {
			return err
		}
		if r.bug == RailSignalBeforePut {
			return r.publish(s, i)
		}
	default:
		*state += railLanded - at
		if p.bytes {
			if err := r.land(s, p, *state>>railValue, 1); err != nil {
				return err
			}
		}
		if r.bug != RailSignalBeforePut || !p.bytes {
			return r.publish(s, i)
		}
	}
	return nil
}

// land writes half of a put's bytes.
func (r *Rail) land(s []uint64, p *railPut, value uint64, half int) error {
	s[r.place(p.to, p.from, p.place)+half] = value
	return r.owns(s, p)
}

// owns wants the memory to be that of the rank.
func (r *Rail) owns(s []uint64, p *railPut) error {
	if fate := s[r.fates+p.to]; fate == railEnded || fate == railGivenBefore {
		return fmt.Errorf("a put of rank %d lands in memory that rank %d has given back", p.from, p.to)
	}
	return nil
}

// publish raises the word of a put that has landed, as far as those before it have.
func (r *Rail) publish(s []uint64, i int) error {
	p, epoch := &r.puts[i], uint64(0)
	if s[r.epochs+p.to]%2 != 0 {
		epoch = railNewer
	}
	s[r.states+i] |= epoch
	word := &s[r.word(p.to, p.from, p.word)]
	switch r.bug {
	case RailNewestCounts:
		*word = max(*word, p.seq)
	case RailCountsTwice:
		*word++
	case RailSignalBeforePut:
		*word = max(*word, p.seq)
	default:
		for {
			before := *word
			for _, k := range r.streams[[3]int{p.from, p.to, p.word}] {
				state := s[r.states+k]
				if state&railStates == railLanded && state&railNewer == epoch && r.puts[k].seq == *word+1 {
					*word++
				}
			}
			if *word == before {
				break
			}
		}
	}
	return r.owns(s, p)
}

// repeat delivers a put again. A put that has landed, or lands, is refused.
func (r *Rail) repeat(s []uint64, i int) error {
	p, state := &r.puts[i], &s[r.states+i]
	*state |= railAgain
	switch r.bug {
	case RailCountsTwice:
		return r.publish(s, i)
	case RailLandsTwice:
		for half := range 2 {
			if p.bytes {
				if err := r.land(s, p, *state>>railValue, half); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Describe says what the move does.
func (r *Rail) Describe(s []uint64, m Move) Step {
	of := int(m &^ railKind)
	step := func(rank int, format string, args ...any) Step {
		return Step{Rank: rank, Action: fmt.Sprintf(format, args...)}
	}
	switch m & railKind {
	case railCut:
		return step(0, "and all others: the network is cut")
	case railHear:
		if s[r.fates+of] == railFine && r.bug != RailMemoryFirst || s[r.fates+of] == railGivenBefore {
			return step(of, "hears of the failure and interrupts its rail")
		}
		return step(of, "gives its memory back")
	case railGoOn, railLose, railRepeat:
		p := &r.puts[of]
		what := fmt.Sprintf("put %d in word %d from rank %d (bytes: %t)", p.seq, p.word, p.from, p.bytes)
		switch at := s[r.states+of] & railStates; {
		case m&railKind == railLose:
			return step(p.to, "never gets %s", what)
		case m&railKind == railRepeat:
			return step(p.to, "gets %s again", what)
		case at == railQueued:
			return step(p.from, "is through with the source of its put %d in word %d to rank %d", p.seq, p.word, p.to)
		case at == railUnderWay && p.bytes:
			return step(p.to, "gets the first half of %s", what)
		}
		return step(p.to, "gets %s", what)
	}
	return step(of, "%s", r.describe(r.op(s, of)))
}

func (r *Rail) describe(o *railOp) string {
	switch o.act {
	case railFill:
		return fmt.Sprintf("fills source %d with %d", o.at, o.value)
	case railSend:
		p := &r.puts[o.put]
		if !p.bytes {
			return fmt.Sprintf("puts number %d in word %d of rank %d", p.seq, p.word, p.to)
		}
		return fmt.Sprintf("puts source %d at place %d of rank %d, number %d in word %d", p.source, p.place, p.to, p.seq, p.word)
	case railFlush:
		return "flushes its puts"
	case railAwait:
		return fmt.Sprintf("finds %d puts of rank %d in word %d", o.count, o.peer, o.word)
	case railRead:
		return fmt.Sprintf("reads %d at place %d of rank %d", o.value, o.at, o.peer)
	case railMeet, railMet:
		return fmt.Sprintf("meets all others (%d)", o.count)
	case railForget:
		return "drops the numbers of puts"
	case railClose:
		return "closes its rail"
	}
	return "gives its memory back"
}

// End wants every rank to be through, and to have given its memory back.
func (r *Rail) End(s []uint64) error {
	for rank := range r.w.Ranks {
		if s[r.fates+rank] != railEnded {
			return fmt.Errorf("rank %d never %s", rank, r.describe(r.op(s, rank)))
		}
	}
	return nil
}
