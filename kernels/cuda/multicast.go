package cuda

import (
	"fmt"
	"math"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// multicastKernels are the kernels of reductions by multicast. They have never run on hardware.
type multicastKernels struct {
	warps, blocks, packets cuda.Function
	limit                  int // blocks that run at once
}

func (k *multicastKernels) load(e *Engine) (err error) {
	if e.space.Multicast == 0 {
		return fmt.Errorf("the heap has no multicast addresses")
	}
	if err = e.loadModule("multicast", entry{"allreduce_multicast_warps", &k.warps}, entry{"allreduce_multicast_blocks", &k.blocks},
		entry{"allreduce_multicast_packets", &k.packets}); err != nil {
		return err
	}
	k.limit = math.MaxInt
	for _, f := range []cuda.Function{k.warps, k.blocks, k.packets} {
		n, err := e.blocks(f, multicastThreads, 0)
		if err != nil {
			return err
		}
		k.limit = min(k.limit, n)
	}
	return nil
}

func (k *multicastKernels) kernel(p kernels.Pipeline) cuda.Function {
	switch p {
	case kernels.BlockPipeline:
		return k.blocks
	case kernels.MulticastPackets:
		return k.packets
	}
	return k.warps
}

// multicastSteps is how many blocks a block pipeline has at least.
const multicastSteps = 3

func (x *reductions) validateMulticast(a *kernels.Reduction) error {
	lines, c := int64(a.Blocks), x.c
	gathered := a.Packets && a.Call.Collective.Gathers()
	switch a.Multicast {
	case kernels.NoMulticast:
		if c.Multicast && gathered {
			return fmt.Errorf("kernels: allreduce: %v by packets (%v) beside those of multicast, which have their places", a.Call, a.Algorithm)
		}
		return nil
	case kernels.BlockPipeline:
		lines /= multicastSteps
	}
	switch slice := a.Longest() * a.Call.DType.Size(); {
	case !c.Multicast:
		return fmt.Errorf("kernels: allreduce: multicast in bounds without it")
	case a.Multicast == kernels.MulticastPackets:
		if !gathered || a.Algorithm != kernels.OneShot {
			return fmt.Errorf("kernels: allreduce: %v (%v) by packets of multicast, packets %v", a.Call, a.Algorithm, a.Packets)
		}
		if a.PushBytes() > c.MulticastPacketBytes() {
			return fmt.Errorf("kernels: allreduce: packets of multicast of %d bytes, at most %d", a.PushBytes(), c.MulticastPacketBytes())
		}
		return nil
	case a.Algorithm != kernels.TwoShot || a.Packets || a.Pull || a.Push || a.Rate != 0 || !a.Call.Multicastable():
		return fmt.Errorf("kernels: allreduce: %v (%v) by multicast, packets %v, pull %v, push %v, rate %v", a.Call, a.Algorithm, a.Packets, a.Pull, a.Push, a.Rate)
	case lines < 1:
		return fmt.Errorf("kernels: allreduce: a %v of %d blocks, want at least %d", a.Multicast, a.Blocks, multicastSteps)
	case slice/c.SlotBytes/lines >= kernels.MaxChunks:
		return fmt.Errorf("kernels: allreduce: a slice of %d bytes by multicast is too many chunks of %d", slice, c.SlotBytes)
	}
	return nil
}

// multicastFlags tell calls apart of ranks that take different kernels.
func multicastFlags(p kernels.Pipeline) uint32 {
	switch p {
	case kernels.WarpPipeline:
		return reduceWarps
	case kernels.BlockPipeline:
		return reduceBlocks
	case kernels.MulticastPackets:
		return reduceWarps | reduceBlocks
	}
	return 0
}
