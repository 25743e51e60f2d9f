package cuda

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// rollcallKernels is the kernel of roll calls.
type rollcallKernels struct{ rollcall cuda.Function }

// load also refuses a GPU that cannot run a block for each of the ranks on it at once: they wait for each other.
func (k *rollcallKernels) load(e *Engine) error {
	if err := e.loadModule("rollcall", entry{"rollcall", &k.rollcall}); err != nil {
		return err
	}
	_, err := e.blocks(k.rollcall, rollcallThreads, 0)
	return err
}

// rollcalls are the launches of one communicator. It is a family.
type rollcalls struct {
	*kernels.RollCallBounds
	block rollcallBlock
	k     *rollcallKernels
	args  rollcallArgs
}

func newRollCalls(b *kernels.RollCallBounds, offset int64) *rollcalls {
	return &rollcalls{RollCallBounds: b, block: layRollcallBlock(offset, int64(b.Size))}
}

func (*rollcalls) defaults(int) {}

func (x *rollcalls) check(ranks int) error {
	if x.Size != ranks {
		return fmt.Errorf("kernels: rollcall: bounds of %d ranks on a heap of %d", x.Size, ranks)
	}
	return nil
}

func (x *rollcalls) layout() kernels.Layout {
	bytes := x.block.end - x.block.control
	return kernels.Layout{Bytes: bytes, Zero: bytes}
}

func (*rollcalls) controls(offset int64) []int64 { return []int64{offset} }
func (*rollcalls) fault(*faultWords, int) error  { return nil }
func (*rollcalls) hit(err error, _ []int) error  { return err }

func (x *rollcalls) load(e *Engine) (err error) {
	x.k, err = loadOnce[rollcallKernels](e)
	return err
}

// add appends a roll call. Its arguments are copied into the batch.
func (x *rollcalls) add(p *port, op kernels.Operation) error {
	a, ok := op.(*kernels.RollCall)
	switch {
	case !ok:
		return fmt.Errorf("kernels: %s on a port of roll calls", op.Operation())
	case a.Timeout <= 0:
		return fmt.Errorf("kernels: rollcall: timeout %v", a.Timeout)
	}
	x.args = rollcallArgs{world: worldOf(&p.e.space, x.block.control, p.fault.Addr(), a.Timeout.Nanoseconds()), block: x.block}
	p.batch.Launch(0, cuda.Launch{Function: x.k.rollcall, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{rollcallThreads, 1, 1}, Flags: p.e.flags, Args: cuda.BytesOf(&x.args)})
	return nil
}
