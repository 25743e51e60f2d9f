package host

import "github.com/switchyard-moe/switchyard/kernels"

// rollCalls are the launches of one communicator. It is a family.
//
// A line says in how many calls its writer has signalled, so one line a pair is enough: a rank that is still awaited in call e may find the
// signal of call e+1 there, which is at least the one it waits for.
type rollCalls struct {
	*kernels.RollCallBounds
	offset int64 // of the control block: the words of calls, of a failed call and of progress (progress.go), then lines of signals
	w      waiter
}

func newRollCalls(b *kernels.RollCallBounds, offset int64) *rollCalls {
	return &rollCalls{RollCallBounds: b, offset: offset}
}

func (x *rollCalls) signals() lines { return lines{&x.w, x.offset + kernels.LineBytes} }

func (*rollCalls) defaults() {}

// layout has a line for each rank behind the first. All of it must be zero.
func (x *rollCalls) layout() kernels.Layout {
	bytes := kernels.LineBytes * int64(1+x.Size)
	return kernels.Layout{Bytes: bytes, Zero: bytes}
}

func (*rollCalls) open(*Engine)                 {}
func (*rollCalls) ready(*Engine) kernels.Traits { return kernels.Traits{} }
func (*rollCalls) sizes(int) string             { return "" } // a roll call moves no data

// run is the kernel. After a call that failed half-way it fails at once, so that of the calls in a stream only the first waits for its
// deadline (F1).
func (x *rollCalls) run(p *port, op kernels.Operation) error {
	e := p.e
	failed := e.word(e.space.Rank, x.offset+8)
	if failed.Load() != 0 {
		return kernels.ErrFailed
	}
	epoch := e.count(x.offset)
	x.w.begin(p, x, p.call(op, x.offset, epoch), op.(*kernels.RollCall).Timeout)
	defer x.w.leave()
	for i := 1; i < x.Size; i++ {
		x.signals().signal(e.peer(i))
	}
	err := x.signals().awaitAll(nil)
	if err != nil {
		failed.Store(1)
	}
	return err
}
