package host

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Masks. Each rank has a mask word for every rank in its own segment, which any rank of the host sets and every wait reads. Ranks set it at
// different times, so the ranks of a call, its cast, are decided by one compare-and-swap on a word of rank 0's segment, which stays mapped when
// rank 0 is gone. A rank of the cast whose notice has come to some ranks only is read in the segment of the rank that decided.
//
// A rank's term counts how often it was taken in, or has asked for that. A mask is of the term that the masked rank is in or asks for, and the
// decision by which it is taken in again says of which term it is. So a rank that is late in that call tells a mask of before from one of
// after it. The process that comes in the place of one that has ended goes on with its terms.

// maskWord is what a rank knows of another: its term, whether it is masked in it, and whether the process of that term has ended besides.
type maskWord uint64

const (
	wordMasked maskWord = 1 << iota
	wordEnded
	wordTerm = 2 // where the term begins
)

func maskOf(term uint64, bits maskWord) maskWord { return maskWord(term)<<wordTerm | bits }

func (w maskWord) masked() bool { return w&wordMasked != 0 }
func (w maskWord) ended() bool  { return w&wordEnded != 0 }
func (w maskWord) term() uint64 { return uint64(w >> wordTerm) }

// learn has a mask word know of a mask. One of an earlier term is no news.
func learn(word *atomic.Uint64, mask maskWord) {
	for was := maskWord(word.Load()); was.term() <= mask.term(); was = maskWord(word.Load()) {
		now := mask
		if was.term() == mask.term() {
			now |= was
		}
		if was == now || word.CompareAndSwap(uint64(was), uint64(now)) {
			return
		}
	}
}

// admit has a mask word know that its rank is taken in for a term, in which it may be masked already.
func admit(word *atomic.Uint64, term uint64) {
	for was := maskWord(word.Load()); was.term() < term; was = maskWord(word.Load()) {
		if word.CompareAndSwap(uint64(was), uint64(maskOf(term, 0))) {
			return
		}
	}
}

// castOf is a decision: the ranks of a call, the one that takes part from the next call on, if any, the low bits of that one's term, who
// decided, and the low bits of the epoch.
type castWord uint64

const (
	castRankBits = 4
	castTermBits = 11
	castAdmitted = kernels.MaxMaskedRanks // the rank, and behind it whether there is one
	castDecider  = castAdmitted + castRankBits + 1
	castTerm     = castDecider + castRankBits
	castEpoch    = castTerm + castTermBits
	askEvery     = 200 * time.Microsecond
)

// newcomer is a rank that is taken in, and the term.
type newcomer struct {
	rank int // none if there is nobody
	term uint64
}

const none = -1

func castOf(members uint64, who newcomer, decider int, epoch uint64) castWord {
	cast := members | uint64(decider)<<castDecider | epoch<<castEpoch
	if who.rank != none {
		cast |= (1<<castRankBits|uint64(who.rank))<<castAdmitted | who.term&(1<<castTermBits-1)<<castTerm
	}
	return castWord(cast)
}

func (c castWord) bits(at, n int) uint64 { return uint64(c) >> at & (1<<n - 1) }
func (c castWord) members() uint64       { return c.bits(0, kernels.MaxMaskedRanks) }
func (c castWord) decider() int          { return int(c.bits(castDecider, castRankBits)) }

// admitted is the rank that is taken in, none if there is nobody.
func (c castWord) admitted() int {
	if c.bits(castAdmitted+castRankBits, 1) == 0 {
		return none
	}
	return int(c.bits(castAdmitted, castRankBits))
}

// term is that of the rank which is taken in, the nearest to one that is known of it.
func (c castWord) term(known uint64) uint64 {
	const high = 64 - castTermBits
	return known + uint64(int64((c.bits(castTerm, castTermBits)-known)<<high)>>high)
}

// after is how many calls c is after that of an epoch.
func (c castWord) after(epoch uint64) int64 {
	return int64(uint64(c)>>castEpoch<<castEpoch-epoch<<castEpoch) >> castEpoch
}

// term is which one this rank is in or asks for, asks is not 0 while it wants to be unmasked, writing while it may write rows in peers' memory,
// and cast is, on rank 0, who takes part in a call. One word is enough: who decides call e+1 has the notices of it of all ranks of e that are
// not masked, which have then read that of e.
func (l *dispatchBlock) term() int64    { return l.control + 24 }
func (l *dispatchBlock) asks() int64    { return l.control + 32 }
func (l *dispatchBlock) writing() int64 { return l.control + 40 }
func (l *dispatchBlock) cast() int64    { return l.control + 48 }

// mask is the word of what this rank knows of rank p.
func (l *dispatchBlock) mask(p int) int64 { return l.masksAt + 8*int64(p) }

// known is this rank's word of rank p.
func (m *dispatching) known(p int) *atomic.Uint64 {
	return m.e.word(m.e.space.Rank, m.block.mask(p))
}

// maskedRanks has a bit for every rank that is masked, as this rank knows.
func (m *dispatching) maskedRanks() (ranks uint64) {
	for p := range m.e.space.Size {
		if maskWord(m.known(p).Load()).masked() {
			ranks |= 1 << p
		}
	}
	return ranks
}

// mayWrite says whether this rank may write rows in peers' memory from now on.
func (m *dispatching) mayWrite(may bool) {
	if !m.m.Masks {
		return
	}
	word := m.e.word(m.e.space.Rank, m.block.writing())
	if !may {
		word.Store(0)
		for i := 1; i < m.e.space.Size; i++ {
			m.e.ring(m.e.peer(i))
		}
		return
	}
	word.Store(1)
}

// unmasked is an error when this rank is masked.
func (m *dispatching) unmasked() error {
	if m.m.Masks && maskWord(m.known(m.e.space.Rank).Load()).masked() {
		return &kernels.MaskedError{Rank: m.e.space.Rank}
	}
	return nil
}

// in reports whether rank p takes part in the call.
func (m *dispatching) in(p int) bool { return !m.m.Masks || m.r.cast>>p&1 != 0 }

// without reports whether a wait goes on without the line of peer p: it does not take part, or is masked and writes no more rows. The
// caller looks at the line once more.
func (m *dispatching) without(p int) bool {
	if !m.in(p) {
		return true
	}
	word := maskWord(m.known(p).Load())
	if !word.masked() {
		return false
	}
	return !m.rowsComing || word.ended() || m.e.word(p, m.block.writing()).Load() == 0
}

// decide agrees with the other ranks on who takes part in the call, all of whose notices this rank then has: take gets those that had
// not come from a rank that has them.
func (m *dispatching) decide(take func(peer, at int)) error {
	e, me, epoch := m.e, m.e.space.Rank, m.r.epoch
	came := func(p int) bool {
		return e.word(me, m.block.notice(epoch, p)).Load() >= kernels.LastSeq(epoch)
	}
	members, who := uint64(1)<<me, newcomer{rank: none}
	for p := range e.space.Size {
		if p == me {
			continue
		}
		switch word := maskWord(m.known(p).Load()); {
		case !word.masked():
			if came(p) {
				members |= 1 << p
			}
		case m.call.Op == kernels.OpCombine && who.rank == none && e.word(p, m.block.asks()).Load() != 0:
			if term := e.word(p, m.block.term()).Load(); term > word.term() {
				who = newcomer{p, term}
			}
		}
	}
	word := e.word(0, m.block.cast())
	var cast castWord
	for cast = castWord(word.Load()); cast.after(epoch) < 0; cast = castWord(word.Load()) {
		word.CompareAndSwap(uint64(cast), uint64(castOf(members, who, me, epoch)))
	}
	if m.r.cast = cast.members(); cast.after(epoch) > 0 || !m.in(me) {
		return &kernels.MaskedError{Rank: me}
	}
	for p := range e.space.Size {
		switch {
		case p == me:
		case !m.in(p):
			m.r.notices[p] = notice{}
		case came(p):
			take(p, me)
		default:
			take(p, cast.decider())
		}
	}
	if p := cast.admitted(); p != none {
		known := m.known(p)
		admit(known, cast.term(maskWord(known.Load()).term()))
	}
	return m.unmasked() // the others may have gone on, and what was taken be of a later call
}

// dropOut takes the rows from and to the ranks that do not take part out of a dispatch that is agreed on.
func (m *dispatching) dropOut() {
	x, r, each, slots := m.m, m.r, len(m.r.counts), m.m.Slots()
	all := uint64(1)<<x.Ranks - 1
	if !x.Masks || r.cast == all {
		return
	}
	for p := range x.Ranks {
		if m.in(p) {
			continue
		}
		clear(m.counts[p*each:][:each])
		for src := range x.Ranks {
			of := m.counts[src*each:][:each]
			clear(of[x.First[p]:x.First[p+1]])
			of[slots+p] = 0
		}
	}
	copy(r.counts, m.counts[x.Rank*each:][:each])
	kept := r.rows[:0]
	for t := range r.tokens() {
		rows := r.rows[r.first[t]:r.first[t+1]]
		r.first[t] = int32(len(kept))
		for _, row := range rows {
			if m.in(int(row.rank)) {
				kept = append(kept, row)
			}
		}
	}
	r.first[r.tokens()] = int32(len(kept))
	r.rows = kept
}

// noteCame keeps how many rows each rank has for each slot of this one, for lostRows.
func (m *dispatching) noteCame() {
	x, r := m.m, m.r
	if !x.Masks {
		return
	}
	local := x.Local(x.Rank)
	r.came = sized(r.came, x.Ranks*local)
	for src := range x.Ranks {
		copy(r.came[src*local:][:local], m.counts[src*len(r.counts)+int(x.First[x.Rank]):])
	}
}

// lostRows makes padding of the rows of ranks that were masked before all of their rows had come: zeros of no source.
func (m *dispatching) lostRows() {
	if m.lost == 0 {
		return
	}
	x, r := m.m, m.r
	local := x.Local(x.Rank)
	from := m.rankCounts()
	for src := range x.Ranks {
		if m.lost>>src&1 == 0 {
			continue
		}
		r.from[src] = 0
		for _, words := range from {
			if len(words) > 0 {
				atomic.StoreInt32(&words[src], 0)
			}
		}
		if x.Layout.ByToken() {
			m.clearRows(r.offsets[src], r.offsets[src]+r.groups[src], true)
			continue
		}
		for g := range local {
			at := r.offsets[g]
			for before := range src {
				at += int64(r.came[before*local+g])
			}
			m.clearRows(at, at+int64(r.came[src*local+g]), true)
		}
	}
	for g := range len(m.h.Landed.Mem) / 4 { // the rows of all others are here
		m.landedWord(m.e.space.Rank, m.h, g).Store(uint32(r.groups[g]))
	}
}

// present lists the rows of a token that ranks of the call have to show.
func (m *dispatching) present(rows []routedRow) []routedRow {
	if !m.m.Masks {
		return rows
	}
	m.here = m.here[:0]
	for _, row := range rows {
		if p := int(row.rank); m.in(p) && m.lost>>p&1 == 0 {
			m.here = append(m.here, row)
		}
	}
	return m.here
}

// Mask has calls go on without a rank, on all ranks. ended says that its process has ended.
func (p *port) Mask(rank int, ended bool) {
	f, mask := p.fam.(*dispatches), wordMasked
	if ended {
		mask |= wordEnded
	}
	mask = maskOf(p.e.word(rank, f.block.term()).Load(), mask)
	for i := range p.e.space.Size { // its own first: who is not masked has been waited for
		learn(p.e.word((rank+i)%p.e.space.Size, f.block.mask(rank)), mask)
	}
	for r := range p.e.space.Size {
		p.e.ring(r)
	}
}

// Masked are the ranks that are masked, as this rank knows.
func (p *port) Masked() (ranks []int) {
	f := p.fam.(*dispatches)
	for r := range p.e.space.Size {
		if maskWord(p.e.word(p.e.space.Rank, f.block.mask(r)).Load()).masked() {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// Unmask has the other ranks take this one in again, from the call after a combine on. No launch of this rank runs.
func (p *port) Unmask(ctx context.Context) (calls uint64, err error) {
	f, e := p.fam.(*dispatches), p.e
	me := e.space.Rank
	own, asks, term, counter := e.word(me, f.block.mask(me)), e.word(me, f.block.asks()), e.word(me, f.block.term()), e.word(me, f.block.epoch())
	for word := maskWord(own.Load()); word.masked(); word = maskWord(own.Load()) {
		if asks.Load() == 0 || term.Load() <= word.term() { // it was masked since it asked, perhaps
			term.Store(max(term.Load(), word.term()) + 1)
			asks.Store(1)
		}
		cast := castWord(e.word(0, f.block.cast()).Load())
		if asked := term.Load(); cast.admitted() == me && cast.term(asked) == asked {
			if p.takenIn(cast); !maskWord(own.Load()).masked() {
				break
			}
		}
		err = context.Cause(ctx)
		if err == nil && (e.abort.Load() != 0 || p.leaving.Load()) {
			err = comm.ErrAborted
		}
		if err != nil {
			asks.Store(0)
			p.Mask(me, false) // where they have taken it in just now
			return 0, err
		}
		time.Sleep(askEvery)
	}
	asks.Store(0)
	return counter.Load(), nil
}

// takenIn has this rank know what the others know behind the call of a decision by which they take it in.
func (p *port) takenIn(cast castWord) {
	f, e := p.fam.(*dispatches), p.e
	me, counter := e.space.Rank, e.word(e.space.Rank, f.block.epoch())
	epoch := counter.Load() + uint64(cast.after(counter.Load()))
	counter.Store(epoch)
	for i := range f.handles {
		f.handles[i].unreceived = false
	}
	for r := range e.space.Size {
		known := e.word(me, f.block.mask(r))
		switch {
		case r == me:
		case cast.members()>>r&1 == 0:
			learn(known, maskOf(maskWord(known.Load()).term(), wordMasked)) // in that term or a later one, which this rank is told
		default:
			in := cast.decider() // who has the notices of all others
			if r == in {
				in = me
			}
			admit(known, noticeOf(func(at int64) uint64 { return e.word(in, f.block.notice(epoch, r)+at).Load() }).term())
		}
	}
	admit(e.word(me, f.block.mask(me)), e.word(me, f.block.term()).Load())
}
