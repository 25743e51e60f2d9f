package memory

import (
	"fmt"
	"log/slog"

	"github.com/switchyard-moe/switchyard/kernels"
)

const (
	defaultSegment = 64 << 20
	// Address space costs nothing but page tables where it is used, and there are 128 TiB of it
	// in a process. A heap takes 4 TiB unless told otherwise, so that many fit; ranks get at most
	// 2 TiB of it each.
	defaultAddresses = 4 << 40
	maxDefaultStride = 2 << 40
	// maxAddresses is half of what there is.
	maxAddresses = 64 << 40
)

// Options says how a heap is made. The zero value works. All ranks pass the same.
type Options struct {
	// SegmentBytes is how much memory the pool of every rank has at first, 64 MiB when 0. It is
	// rounded up to what the device maps (2 MiB on the host). On the host a page takes memory when
	// it is first touched, on a GPU all of it is taken at once.
	SegmentBytes int64
	// ReserveBytes is how far Grow can take the pool of every rank, in bytes of memory. It costs
	// only addresses, and as many again are reserved for registrations. 0 means as much as is
	// reasonable: 1 TiB with one or two ranks, 32 GiB with 64, less where the process may have
	// less address space.
	ReserveBytes int64
	// LegacyIPC makes a heap on GPUs of ordinary device memory that other processes map by CUDA IPC, for machines and
	// containers that cannot export device memory as file descriptors or pass them. Heaps on GPUs that cannot are made so
	// by themselves. Peers' segments then lie anywhere, so kernels look their addresses up, and such a heap cannot Grow:
	// SegmentBytes is all it has. On the host it is an ErrInvalid.
	LegacyIPC bool
	// Multicast gives the segments of a heap on GPUs a multicast address beside their own, for reductions that ask for it
	// (allreduce.Options.Multicast). It has never run on hardware, and is off by default. It stays off where NCCL_NVLS_ENABLE=0,
	// NVSHMEM_DISABLE_NVLS=1 or TORCH_SYMM_MEM_DISABLE_MULTICAST=1 is set for any rank, where a GPU has none and where ranks share a GPU;
	// Heap.Multicast then says why. What the driver refuses is an error. On the host and with LegacyIPC it is an ErrInvalid.
	Multicast Multicast
	// Logger gets what happens to the heap as a whole, and who waits for whom in calls on it. nil is the group's.
	Logger *slog.Logger
}

// layout is Options made exact for a group of some size.
type layout struct {
	first   int64 // bytes of the first segment, header included
	limit   int64 // bytes the pool may reach, header included
	atLeast int64 // limit may be lowered to this where address space is short
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
