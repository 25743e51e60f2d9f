package cuda

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// multicastKernels are the kernels of reductions by multicast. They have never run on hardware.
type multicastKernels struct {
	warps, blocks cuda.Function
	limit         int // blocks that run at once
}

func (k *multicastKernels) load(e *Engine) (err error) {
	if e.space.Multicast == 0 {
		return fmt.Errorf("the heap has no multicast addresses")
	}
	if err = e.loadModule("multicast", entry{"allreduce_multicast_warps", &k.warps}, entry{"allreduce_multicast_blocks", &k.blocks}); err != nil {
		return err
	}
	if k.limit, err = e.blocks(k.warps, multicastThreads, 0); err != nil {
		return err
	}
	n, err := e.blocks(k.blocks, multicastThreads, 0)
	k.limit = min(k.limit, n)
	return err
}

func (k *multicastKernels) kernel(p kernels.Pipeline) cuda.Function {
	if p == kernels.BlockPipeline {
		return k.blocks
	}
	return k.warps
}

// multicastSteps is how many blocks a block pipeline has at least.
const multicastSteps = 3

func (x *reductions) validateMulticast(a *kernels.Reduction) error {
	lines, c := int64(a.Blocks), x.c
	switch a.Multicast {
	case kernels.NoMulticast:
		return nil
	case kernels.BlockPipeline:
		lines /= multicastSteps
	}
	switch slice := a.Longest() * a.Call.DType.Size(); {
	case !c.Multicast:
		return fmt.Errorf("kernels: allreduce: multicast in bounds without it")
	case a.Algorithm != kernels.TwoShot || a.Packets || a.Pull || a.Push || a.Rate != 0 || !a.Call.Multicastable():
		return fmt.Errorf("kernels: allreduce: %v (%v) by multicast, packets %v, pull %v, push %v, rate %v", a.Call, a.Algorithm, a.Packets, a.Pull, a.Push, a.Rate)
	case lines < 1:
		return fmt.Errorf("kernels: allreduce: a %v of %d blocks, want at least %d", a.Multicast, a.Blocks, multicastSteps)
	case slice/c.SlotBytes/lines >= kernels.MaxChunks:
		return fmt.Errorf("kernels: allreduce: a slice of %d bytes by multicast is too many chunks of %d", slice, c.SlotBytes)
	}
	return nil
}

// multicastFlags tell calls apart of ranks that take different pipelines.
func multicastFlags(p kernels.Pipeline) uint32 {
	switch p {
	case kernels.WarpPipeline:
		return reduceWarps
	case kernels.BlockPipeline:
		return reduceBlocks
	}
	return 0
}
