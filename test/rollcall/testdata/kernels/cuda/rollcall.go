package cuda

import (
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// rollcalls are the launches of one communicator. It is a family.
type rollcalls struct {
	*kernels.RollCallBounds
	common
	block  rollcallBlock
	kernel cuda.Function
	args   rollcallArgs
}

func newRollCalls(b *kernels.RollCallBounds, offset int64) *rollcalls {
	return &rollcalls{RollCallBounds: b, block: layRollcallBlock(offset, int64(b.Size))}
}

func (x *rollcalls) members() int               { return x.Size }
func (*rollcalls) check() error                 { return nil }
func (*rollcalls) fault(*faultWords, int) error { return nil }

func (x *rollcalls) layout() kernels.Layout {
	bytes := x.block.end - x.block.control
	return kernels.Layout{Bytes: bytes, Zero: bytes}
}

// load also refuses a GPU that cannot run a block for each of the ranks on it at once: they wait for each other.
func (x *rollcalls) load(e *Engine) error {
	if err := e.loadModule("rollcall", entry{"rollcall", &x.kernel}); err != nil {
		return err
	}
	_, err := e.blocks(x.kernel, rollcallThreads, 0)
	return err
}

// add appends a roll call. Its arguments are copied into the batch.
func (x *rollcalls) add(p *port, op kernels.Operation) error {
	a, ok := op.(*kernels.RollCall)
	if !ok {
		return errForeign
	}
	x.args = rollcallArgs{world: p.world(x.block.control, a.Timeout), block: x.block}
	p.batch.Launch(0, cuda.Launch{Function: x.kernel, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{rollcallThreads, 1, 1}, Flags: p.e.flags, Args: cuda.BytesOf(&x.args)})
	return nil
}
