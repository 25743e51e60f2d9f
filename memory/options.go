package memory

import (
	"fmt"
	"log/slog"

	"github.com/switchyard-moe/switchyard/kernels"
)

const (
	defaultSegment = 64 << 20
	// Used address space costs page tables only, and a process has 128 TiB of it. A heap takes 4 TiB by default, which leaves room for others;
	// each rank gets at most 2 TiB of it.
	defaultAddresses = 4 << 40
	maxDefaultStride = 2 << 40
	// maxAddresses is half of the address space.
	maxAddresses = 64 << 40
)

// Options of a heap. The zero value works. All ranks pass the same.
type Options struct {
	// SegmentBytes is the memory of every rank's pool at first, 64 MiB if 0. It is rounded up to what
	// the device maps (2 MiB on the host). On the host a page takes memory when it is first touched; on
	// a GPU the heap takes all of it at once.
	SegmentBytes int64
	// ReserveBytes bounds the memory of every rank's pool after all calls of Grow. It costs addresses
	// only, and as many again for registrations. 0 means 1 TiB with one or two ranks and less with
	// more (32 GiB with 64), or less if the process may have less address space.
	ReserveBytes int64
	// LegacyIPC makes a heap on GPUs from ordinary device memory that other processes map by CUDA IPC, for machines and
	// containers that cannot export device memory as file descriptors or pass them. GPUs that cannot export get such a heap
	// without the option. Peers' segments then lie at any address, so kernels look these up, and the heap cannot Grow beyond
	// SegmentBytes. On the host the option is an ErrInvalid.
	LegacyIPC bool
	// ShareGPUs lets ranks that live in one process share a GPU, as tests on a machine with few GPUs do. Their kernels wait for each other, and
	// the driver holds one back until another has ended in some first calls on a stream, so that a call then ends by its timeout. Without
	// the option such ranks are ErrUnsupported. Ranks that are processes of their own may always share a GPU. On the host the option does nothing.
	ShareGPUs bool
	// Multicast gives the segments of a heap on GPUs a second, multicast address, for reductions that ask for it
	// (allreduce.Options.Multicast). It has never run on hardware, and is off by default. It stays off if any rank has set NCCL_NVLS_ENABLE=0,
	// NVSHMEM_DISABLE_NVLS=1 or TORCH_SYMM_MEM_DISABLE_MULTICAST=1, if a GPU lacks it and if ranks share a GPU; Heap.Multicast then says
	// why. A refusal of the driver is an error. On the host and with LegacyIPC the option is an ErrInvalid.
	Multicast Multicast
	// RailBytes is the pinned host memory that each rank of a heap of GPUs on several hosts has for what crosses between hosts, 64 MiB if 0.
	// Communicators take rings of it when they are made, and keep them. Other heaps take none of it.
	RailBytes int64
	// Logger gets the events of the heap, and the waits for peers in calls on it. nil is the group's.
	Logger *slog.Logger
}

// layout is Options with all sizes, for a group of a known size.
type layout struct {
	first   int64 // bytes of the first segment, header included
	limit   int64 // bytes the pool may reach, header included
	atLeast int64 // limit may be lowered to this if address space is short
}

// stride is the distance of two ranks' segments: the pool's addresses and the window for
// registrations, as large.
func (l layout) stride() int64 { return 2 * l.limit }

func (o Options) validate(size int, granule int64) (layout, error) {
	var l layout
	if o.SegmentBytes < 0 || o.ReserveBytes < 0 {
		return l, fmt.Errorf("%w: segment of %d bytes, reserve of %d bytes", ErrInvalid, o.SegmentBytes, o.ReserveBytes)
	}
	segment := o.SegmentBytes
	if segment == 0 {
		segment = defaultSegment
		if o.ReserveBytes > 0 {
			segment = min(segment, o.ReserveBytes)
		}
	}
	if most := int64(maxAddresses/2) / int64(size); segment > most-granule || o.ReserveBytes > most-granule {
		return l, fmt.Errorf("%w: segment of %d bytes, reserve of %d bytes: %d ranks can have %d bytes each",
			ErrInvalid, segment, o.ReserveBytes, size, most-granule)
	}
	l.first = roundUp(kernels.HeaderBytes+segment, granule)
	if o.ReserveBytes > 0 {
		if o.ReserveBytes < segment {
			return l, fmt.Errorf("%w: reserve of %d bytes is less than the segment of %d bytes",
				ErrInvalid, o.ReserveBytes, segment)
		}
		l.limit = roundUp(kernels.HeaderBytes+o.ReserveBytes, granule)
		l.atLeast = l.limit
		return l, nil
	}
	l.limit = granule
	for 4*l.limit <= min(maxDefaultStride, defaultAddresses/int64(size)) {
		l.limit *= 2
	}
	l.limit = max(l.limit, l.first)
	l.atLeast = l.first
	return l, nil
}
