package host

import "github.com/switchyard-moe/switchyard/kernels"

// Make takes the place of this rank's next call with a notice that it makes a dispatcher. Nobody waits for the notices of others: ranks that make one
// meet on the control plane, which they leave when all have written theirs, and so do ranks in a call, when they have read all.
func (p *port) Make() (call uint64, undo func()) {
	e, block := p.e, &p.fam.(*dispatches).block
	me := e.space.Rank
	call = e.count(block.epoch())
	line, n := block.notice(call, me), notice{call: kernels.CallWord(kernels.OpMake, 0, 0)}
	before := make([]uint64, e.space.Size)
	for i := 1; i < e.space.Size; i++ {
		p := e.peer(i)
		for i, v := range n.words() {
			e.word(p, line+8*int64(i+1)).Store(v)
		}
		seq := e.word(p, line+LineSeq)
		before[p] = seq.Load()
		e.signal(p, seq, kernels.LastSeq(call))
	}
	return call, func() {
		for i := 1; i < e.space.Size; i++ {
			e.word(e.peer(i), line+LineSeq).Store(before[e.peer(i)])
		}
		e.word(me, block.epoch()).Store(call - 1)
	}
}
