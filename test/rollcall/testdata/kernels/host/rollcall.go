package host

import "github.com/switchyard-moe/switchyard/kernels"

// rollCalls are the launches of one communicator. It is a family.
//
// A line says in how many calls its writer has signalled, so one line a pair is enough: a rank that is still awaited in call e may find the
// signal of call e+1 there, which is at least the one it waits for.
type rollCalls struct {
	common
	counted
	plain
	*kernels.RollCallBounds
}

func newRollCalls(b *kernels.RollCallBounds, offset int64) *rollCalls {
	return &rollCalls{counted: counted{offset: offset}, RollCallBounds: b}
}

// layout is the line of counted, and one of each rank behind it. All of it must be zero.
func (x *rollCalls) layout() kernels.Layout {
	bytes := kernels.LineBytes * int64(1+x.Size)
	return kernels.Layout{Bytes: bytes, Zero: bytes}
}

func (*rollCalls) open(*Engine)     {}
func (*rollCalls) sizes(int) string { return "" } // a roll call moves no data

func (x *rollCalls) run(p *port, op kernels.Operation) error { return x.do(p, op, x) }

// call is the kernel.
func (x *rollCalls) call(kernels.Operation) error {
	signals := lines{&x.w, x.offset + kernels.LineBytes}
	for i := 1; i < x.Size; i++ {
		signals.signal(x.e.peer(i))
	}
	return signals.awaitAll(nil)
}
