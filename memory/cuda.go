package memory

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
	kernelscuda "github.com/switchyard-moe/switchyard/kernels/cuda"
)

// cudaBacking is made of allocations of the driver's virtual memory management, which leave the process
// as file descriptors. Where it is scattered it is made of ordinary allocations, which leave it by CUDA IPC: nothing
// is reserved or placed, and the range has only this rank's segment in it.
type cudaBacking struct {
	ctx       *cuda.Context
	features  cuda.Features
	unit      int64
	alarm     cuda.Stream // nothing but raise and write use it, so nothing holds it up
	scattered bool
	sharers   int     // ranks on this rank's GPU
	segment   uintptr // of a scattered heap
	origin    uintptr // of the range
	shared    *cudaRange
	openings  sync.Mutex
	opened    map[exporter]*opening // guarded by openings
	once      sync.Once
	err       error
}

// cudaRange is a reserved range, which ranks of this process use.
type cudaRange struct {
	mu      sync.Mutex
	addr    uintptr
	n       int64
	users   int
	devices []*cuda.Device  // of the users: all of them access everything
	placed  map[int64]int64 // bytes by their place
}

func newCUDABacking(d *device.CUDADevice) (*cudaBacking, error) {
	b := &cudaBacking{ctx: d.Context(), unit: 2 << 20, opened: make(map[exporter]*opening)}
	var err error
	if b.features, err = b.ctx.Device().Features(); err != nil {
		return nil, err
	}
	if b.scattered = !b.features.VirtualMemory || !b.features.PosixFiles; !b.scattered {
		if b.unit, err = b.ctx.Granularity(cuda.PosixFile, true); err != nil {
			return nil, err
		}
	}
	_, urgent, err := b.ctx.StreamPriorities()
	if err != nil {
		return nil, err
	}
	b.alarm, err = b.ctx.NewStream(urgent)
	return b, err
}

func (b *cudaBacking) granule() int64 { return b.unit }

// who is the GPU's UUID, and whether this rank passes memory by CUDA IPC in place of descriptors.
func (b *cudaBacking) who() []int64 {
	scattered := int64(0)
	if b.scattered {
		scattered = 1
	}
	w := []int64{0, 0} // nobody's: mapping will tell
	if id, err := b.ctx.Device().UUID(); err == nil {
		w = uuidWords(id)
	}
	pid, pids, err := thisProcess()
	if err != nil {
		pid = int64(os.Getpid())
	}
	return append(w, scattered, pid, pids)
}

func uuidWords(id [16]byte) []int64 {
	return []int64{int64(binary.LittleEndian.Uint64(id[:])), int64(binary.LittleEndian.Uint64(id[8:]))}
}

// reach checks the GPUs that this process sees. One that it does not see, because of CUDA_VISIBLE_DEVICES,
// is found out about when its memory is mapped. Where one rank passes memory by CUDA IPC all do. Ranks on one GPU share it, also where they
// count as on several hosts; only those of this host reach each other's memory.
func (b *cudaBacking) reach(all, home [][]int64) error {
	me := b.who()
	for _, w := range all {
		b.scattered = b.scattered || w[2] != 0
		if slices.Equal(w[:2], me[:2]) {
			b.sharers++
		}
	}
	d := b.ctx.Device().Driver()
	n, err := d.DeviceCount()
	if err != nil {
		return err
	}
	var used []*cuda.Device
	for i := range n {
		v, err := d.Device(i)
		if err != nil {
			return err
		}
		id, err := v.UUID()
		if err != nil {
			return err
		}
		if slices.ContainsFunc(home, func(w []int64) bool { return slices.Equal(w[:2], uuidWords(id)) }) {
			used = append(used, v)
		}
	}
	need := cuda.Requirements{VirtualMemory: !b.scattered, PosixFiles: !b.scattered}
	if err := cuda.CheckDevices(used, need); err != nil {
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return nil
}

// apart is an error if two ranks that live in one process share a GPU. Processes of several hosts may have the same number, but not the same
// GPU.
func apart(all [][]int64) error {
	for b, w := range all {
		a := slices.IndexFunc(all[:b], func(v []int64) bool { return slices.Equal(v[:2], w[:2]) && slices.Equal(v[3:5], w[3:5]) })
		if a >= 0 {
			return fmt.Errorf("%w: ranks %d and %d of one process share a GPU: their kernels wait for each other, and the driver can hold one "+
				"back until the other has ended; give each a GPU or a process of its own, or set Options.ShareGPUs in tests", ErrUnsupported, a, b)
		}
	}
	return nil
}

func (b *cudaBacking) reserve(n int64) error {
	if b.scattered {
		return nil
	}
	addr, err := b.ctx.Reserve(n, b.unit, 0)
	if err != nil {
		return fmt.Errorf("reserve %d bytes of addresses: %w", n, err)
	}
	b.shared = &cudaRange{addr: addr, n: n, users: 1, devices: []*cuda.Device{b.ctx.Device()}, placed: make(map[int64]int64)}
	b.origin = addr
	return nil
}

func (b *cudaBacking) adopt(owner backing) error {
	if b.scattered {
		return nil
	}
	s := owner.(*cudaBacking).shared
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users == 0 {
		return errClosed
	}
	s.users++
	mine := b.ctx.Device()
	if !slices.ContainsFunc(s.devices, func(v *cuda.Device) bool { return v.Ordinal() == mine.Ordinal() }) {
		s.devices = append(s.devices, mine)
	}
	b.shared, b.origin = s, s.addr
	return nil
}

// create makes the memory and clears it at another address: where it will be placed is not known yet.
func (b *cudaBacking) create(n int64) (fd int, err error) {
	h, err := b.ctx.MemCreate(n, cuda.PosixFile)
	if err != nil {
		return -1, outOfMemory(err)
	}
	defer func() {
		if rerr := b.ctx.MemRelease(h); rerr != nil {
			if err == nil {
				rerr = errors.Join(rerr, closeFD(fd))
			}
			fd, err = -1, errors.Join(err, rerr)
		}
	}()
	if err := b.clearHandle(h, n); err != nil {
		return -1, fmt.Errorf("clear %d bytes: %w", n, err)
	}
	return b.ctx.ExportFD(h)
}

func outOfMemory(err error) error {
	if errors.Is(err, cuda.OutOfMemory) {
		return fmt.Errorf("%w: %w", ErrOutOfMemory, err)
	}
	return err
}

func (b *cudaBacking) clearHandle(h cuda.MemHandle, n int64) (err error) {
	addr, err := b.ctx.Reserve(n, b.unit, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.ctx.Unreserve(addr, n)) }()
	if err := b.ctx.MemMap(addr, n, 0, h); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.ctx.MemUnmap(addr, n)) }()
	if err := b.ctx.SetAccess(addr, n, b.ctx.Device()); err != nil {
		return err
	}
	return b.zero(addr, n)
}

func (b *cudaBacking) zero(addr uintptr, n int64) error {
	s, err := b.ctx.NewStream(0)
	if err != nil {
		return err
	}
	err = b.ctx.Set(s, addr, 0, n)
	return errors.Join(err, b.ctx.SynchronizeStream(s), b.ctx.DestroyStream(s))
}

func (b *cudaBacking) place(at int64, fd int, from, n int64) (err error) {
	s := b.shared
	s.mu.Lock()
	defer s.mu.Unlock()
	if at < 0 || n <= 0 || at > s.n-n {
		return fmt.Errorf("%w: [%d, %d+%d) lies outside the reserved %d bytes", ErrInvalid, at, at, n, s.n)
	}
	h, err := b.ctx.ImportFD(fd)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.ctx.MemRelease(h)) }()
	addr := s.addr + uintptr(at)
	if err := b.ctx.MemMap(addr, n, from, h); err != nil {
		return fmt.Errorf("map %d bytes: %w", n, err)
	}
	if err := b.ctx.SetAccess(addr, n, s.devices...); err != nil {
		return errors.Join(fmt.Errorf("access from %v: %w", s.devices, err), b.ctx.MemUnmap(addr, n))
	}
	s.placed[at] = n
	return nil
}

func (b *cudaBacking) displace(at, n int64) error {
	s := b.shared
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.placed[at] != n {
		return fmt.Errorf("%w: [%d, %d+%d) is not a placement", ErrInvalid, at, at, n)
	}
	delete(s.placed, at)
	return b.ctx.MemUnmap(s.addr+uintptr(at), n)
}

func (b *cudaBacking) identify(v View) (source, error) {
	switch {
	case v.own != nil && v.own.heap != nil:
		return source{}, v.own.belongs()
	case v.mem != nil || v.own != nil:
		return source{}, fmt.Errorf("%w: memory of the host at %#x on a heap of %v", ErrUnsupported, v.Ptr(), b.ctx.Device())
	}
	p, err := b.ctx.Pointer(v.ptr)
	if err != nil {
		return source{}, err
	}
	switch {
	case p.Type != cuda.DeviceMemory:
		return source{}, fmt.Errorf("%w: %#x is not memory of a GPU", ErrUnsupported, v.ptr)
	case p.Device != b.ctx.Device().Ordinal():
		return source{}, fmt.Errorf("%w: memory of cuda:%d on a heap of %v", ErrUnsupported, p.Device, b.ctx.Device())
	}
	mapped := cuda.HandleType(p.Exportable)&cuda.PosixFile != 0 && !b.scattered
	if !mapped && !p.LegacyIPC {
		why := "it was made neither by cudaMalloc nor, for file descriptors, by cuMemCreate"
		if b.scattered {
			why = "it was not made by cudaMalloc, and the heap has only CUDA IPC"
		}
		return source{}, fmt.Errorf("%w: memory at %#x cannot be passed to peers (%s); allocate it from the heap", ErrUnsupported, v.ptr, why)
	}
	// The pointer's own range is all the addresses that were reserved together, this one what was mapped at once.
	base, n, err := b.ctx.AddressRange(v.ptr)
	if err != nil {
		return source{}, err
	}
	lead := int64(v.ptr - base)
	if lead > n-v.n {
		return source{}, fmt.Errorf("%w: %d bytes at %#x span more than one allocation: %d bytes of it are left there",
			ErrUnsupported, v.n, v.ptr, n-lead)
	}
	// A buffer id belongs to one mapping, so addresses are places in what it names.
	src := source{id: identity{dev: cudaIdentity, ino: p.BufferID}, at: int64(v.ptr), fd: -1}
	if !mapped {
		src.name, err = b.export(v.ptr, p)
		src.lead = src.name[nameLead]
		return src, err
	}
	h, err := b.ctx.RetainHandle(base)
	if err != nil {
		return source{}, err
	}
	src.lead, src.span = lead, n
	src.fd, err = b.ctx.ExportFD(h)
	src.owned = err == nil
	return src, errors.Join(err, b.ctx.MemRelease(h))
}

// borrow maps the whole allocation: that of CUDA IPC where it is already, another one at an address of its own.
func (b *cudaBacking) borrow(src *source) (l *loan, err error) {
	if src.span == 0 {
		addr, err := b.attach(&src.name)
		if err != nil {
			return nil, fmt.Errorf("by CUDA IPC: %w", err)
		}
		n := src.name
		return &loan{addr: addr - uintptr(n[nameLead]), unmap: func() error { return b.detach(&n) }}, nil
	}
	h, err := b.ctx.ImportFD(src.fd)
	if err != nil {
		return nil, err
	}
	defer func() {
		if rerr := b.ctx.MemRelease(h); rerr != nil {
			if l != nil {
				rerr = errors.Join(rerr, l.unmap())
			}
			l, err = nil, errors.Join(err, rerr)
		}
	}()
	addr, err := b.ctx.Reserve(src.span, b.unit, 0)
	if err != nil {
		return nil, fmt.Errorf("reserve %d bytes of addresses: %w", src.span, err)
	}
	if err := b.ctx.MemMap(addr, src.span, 0, h); err != nil {
		return nil, errors.Join(fmt.Errorf("map %d bytes: %w", src.span, err), b.ctx.Unreserve(addr, src.span))
	}
	unmap := func() error { return errors.Join(b.ctx.MemUnmap(addr, src.span), b.ctx.Unreserve(addr, src.span)) }
	if err := b.ctx.SetAccess(addr, src.span, b.ctx.Device()); err != nil {
		return nil, errors.Join(fmt.Errorf("access from %v: %w", b.ctx.Device(), err), unmap())
	}
	return &loan{addr: addr, unmap: unmap}, nil
}

// cudaIdentity keeps buffer ids apart from inodes.
const cudaIdentity = ^uint64(0)

func (b *cudaBacking) locate(v View) (identity, int64, bool) {
	p, err := b.ctx.Pointer(v.ptr)
	if err != nil || p.Type != cuda.DeviceMemory {
		return identity{}, 0, false
	}
	return identity{dev: cudaIdentity, ino: p.BufferID}, int64(v.ptr), true
}

// raise sets the 64-bit word at at of the range to 1, by the stream: kernels that fill the GPU do not hold it up.
func (b *cudaBacking) raise(at int64) error {
	return b.ctx.WriteValue(b.alarm, b.origin+uintptr(at), 1)
}

func (b *cudaBacking) build() string { return kernelscuda.Build() }

func (b *cudaBacking) engine(space kernels.Space, why func() error) (kernels.Engine, error) {
	e, err := kernelscuda.New(b.ctx, space, b.sharers, why)
	if err != nil {
		return nil, err
	}
	return e, nil
}

func (b *cudaBacking) clear(at, n int64) error { return b.zero(b.origin+uintptr(at), n) }

func (b *cudaBacking) pin(n int64) (pinned, error) {
	p, err := b.ctx.NewHostBuffer(n)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (*cudaBacking) mem() []byte     { return nil }
func (b *cudaBacking) base() uintptr { return b.origin }

func (b *cudaBacking) close() error {
	b.once.Do(func() {
		b.err = errors.Join(b.ctx.SynchronizeStream(b.alarm), b.ctx.DestroyStream(b.alarm), b.detachAll())
		if b.segment != 0 {
			b.err = errors.Join(b.err, b.ctx.MemFree(b.segment))
		}
		s := b.shared
		if s == nil {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.users--; s.users > 0 {
			return
		}
		for at, n := range s.placed {
			b.err = errors.Join(b.err, b.ctx.MemUnmap(s.addr+uintptr(at), n))
		}
		clear(s.placed)
		b.err = errors.Join(b.err, b.ctx.Unreserve(s.addr, s.n))
	})
	return b.err
}
