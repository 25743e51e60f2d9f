package memory

import (
	"fmt"
	"os"
	"sync"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
)

// backing is a device's side of a heap: a range of addresses that holds every rank's segment, and the
// memory there. Each rank has one. The heap talks to the group; a backing never does.
type backing interface {
	// granule is the unit of all places and sizes below, in bytes: a power of two.
	granule() int64
	// reserve takes n bytes of address space. After a failure it may be tried again with less.
	reserve(n int64) error
	// adopt uses the range that another rank of this process reserved, instead of reserve. All these
	// ranks see the memory that one of them places there. The last of them to close releases the range.
	adopt(owner backing) error
	// create makes n bytes of zero memory of this rank's device, which the descriptor names and
	// holds. The caller closes it.
	create(n int64) (fd int, err error)
	// place puts n bytes from from on of the memory behind fd at offset at of the range. The
	// placement holds the memory: fd may be closed after.
	place(at int64, fd int, from, n int64) error
	// displace unmaps [at, at+n).
	displace(at, n int64) error
	// identify returns the memory that contains a foreign view, or the reason why peers cannot map it.
	identify(v View) (source, error)
	// borrow maps memory that identify has named in another rank of this host, of which fd is the descriptor.
	borrow(src *source) (*loan, error)
	// locate is the identity alone, of a view without an owner, and the view's offset there.
	locate(v View) (id identity, at int64, ok bool)
	// who names the device to other ranks; reach checks, by those of all ranks and of this host's, that it works with them.
	who() []int64
	reach(all, home [][]int64) error
	// build is that of the kernels, with the release.
	build() string
	// engine runs kernels on the heap, which space describes. why says for which reason the abort word was set.
	engine(space kernels.Space, why func() error) (kernels.Engine, error)
	// clear makes n bytes at at of the range zero before it returns. They lie in this rank's segment.
	clear(at, n int64) error
	// pin makes n zero bytes of memory of the host that kernels on the device reach.
	pin(n int64) (pinned, error)
	// mem is the range where the host can read it, else nil; base is its address on the device.
	mem() []byte
	base() uintptr
	// close unmaps everything in the range, and releases the range. It is idempotent.
	close() error
}

// pinned is what pin makes. Close is idempotent.
type pinned interface {
	Bytes() []byte
	Addr() uintptr
	Close() error
}

// source is a part of a foreign piece of memory: span bytes from off on, which a registration maps, and
// in them the view, lead bytes from their start. In the piece the view begins at at, by whatever count.
type source struct {
	id              identity
	at              int64
	off, lead, span int64
	fd              int  // names the piece, or is -1
	owned           bool // the caller of identify closes fd
	name            name // names the view instead: then nothing is mapped, and off, lead and span are 0
}

// identity names a piece of memory for as long as it is mapped anywhere: a file by device and inode, GPU
// memory by the driver's buffer id. An address that is freed and mapped again has another (M7).
type identity struct{ dev, ino uint64 }

func newBacking(d device.Device) (backing, error) {
	if c, ok := d.(*device.CUDADevice); ok {
		return newCUDABacking(c)
	}
	if d.Kind() != device.HostKind {
		return nil, fmt.Errorf("%w: a symmetric heap on %v", ErrUnsupported, d)
	}
	return new(hostBacking), nil
}

// hostBacking is made of memfds.
type hostBacking struct {
	shared *hostRange
	once   sync.Once
	err    error
}

// hostRange is a reserved range and how many ranks of this process use it.
type hostRange struct {
	*shm.Range
	mu    sync.Mutex
	users int
	bells []*host.Bell // of the ranks, where each of them uses it
}

// A huge page; ranks' segments start at one, so that the kernel may use them.
func (*hostBacking) granule() int64 { return 2 << 20 }

func (b *hostBacking) reserve(n int64) error {
	r, err := shm.Reserve(n)
	if err != nil {
		return err
	}
	b.shared = &hostRange{Range: r, users: 1}
	return nil
}

func (b *hostBacking) adopt(owner backing) error {
	s := owner.(*hostBacking).shared
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users == 0 {
		return errClosed
	}
	s.users++
	b.shared = s
	return nil
}

func (*hostBacking) create(n int64) (int, error) { return shm.Create("switchyard-heap", n) }

func (b *hostBacking) place(at int64, fd int, from, n int64) error {
	if err := holds(fd, from, n); err != nil {
		return err
	}
	return b.shared.MapFD(at, fd, from, n)
}

func (b *hostBacking) displace(at, n int64) error { return b.shared.UnmapRange(at, n) }

func (*hostBacking) identify(v View) (source, error) {
	switch {
	case v.own == nil && v.mem == nil:
		return source{}, fmt.Errorf("%w: device memory at %#x on a heap of the host", ErrUnsupported, v.ptr)
	case v.own == nil:
		return source{}, fmt.Errorf("%w: memory at %#x has no file descriptor that peers could map; "+
			"allocate it from the heap or map it with MapFile", ErrUnsupported, v.Ptr())
	case v.own.heap != nil:
		return source{}, v.own.belongs()
	}
	src := source{id: v.own.id, at: v.own.off + v.off, fd: v.own.fd}
	src.lead = src.at % pageSize()
	src.off, src.span = src.at-src.lead, roundUp(src.lead+v.n, pageSize())
	return src, nil
}

// belongs is the refusal of memory that a heap has already.
func (r *region) belongs() error {
	if r.lender != 0 {
		return fmt.Errorf("%w: the memory is that of another rank, which has shared it", ErrUnsupported)
	}
	return fmt.Errorf("%w: the memory belongs to a symmetric heap already", ErrUnsupported)
}

func (b *hostBacking) borrow(src *source) (*loan, error) {
	if err := holds(src.fd, src.off, src.span); err != nil {
		return nil, err
	}
	mem, err := shm.MapFile(src.fd, src.off, src.span)
	if err != nil {
		return nil, err
	}
	return &loan{mem: mem, unmap: func() error { return shm.Unmap(mem) }}, nil
}

// holds refuses pages past the end of a file, which can be mapped and fault later.
func holds(fd int, from, n int64) error {
	switch id, err := shm.Identify(fd); {
	case err != nil:
		return err
	case from < 0 || n <= 0 || from > roundUp(id.Size, pageSize())-n:
		return fmt.Errorf("%w: [%d, %d+%d) of memory that has %d bytes", ErrInvalid, from, from, n, id.Size)
	}
	return nil
}

// Memory of the host without an owner has no identity.
func (*hostBacking) locate(View) (identity, int64, bool) { return identity{}, 0, false }

func (*hostBacking) who() []int64               { return nil }
func (*hostBacking) build() string              { return host.Build() }
func (*hostBacking) reach(_, _ [][]int64) error { return nil }

func (b *hostBacking) engine(space kernels.Space, why func() error) (kernels.Engine, error) {
	return host.New(space, b.shared.ranks(space.Size), why), nil
}

// ranks are the bells of size ranks, nil if not all of them live in this process.
func (r *hostRange) ranks(size int) []*host.Bell {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bells == nil && r.users == size {
		r.bells = host.NewBells(size)
	}
	return r.bells
}

func (b *hostBacking) clear(at, n int64) error {
	clear(b.shared.Bytes()[at : at+n])
	return nil
}

func (*hostBacking) pin(n int64) (pinned, error) { return &hostPinned{make([]byte, n)}, nil }

// hostPinned is Go memory: kernels of the host read and write that.
type hostPinned struct{ b []byte }

func (p *hostPinned) Bytes() []byte { return p.b }
func (p *hostPinned) Addr() uintptr { return shm.Addr(p.b) }

func (p *hostPinned) Close() error {
	p.b = nil
	return nil
}

func (b *hostBacking) mem() []byte   { return b.shared.Bytes() }
func (b *hostBacking) base() uintptr { return b.shared.Addr() }

func (b *hostBacking) close() error {
	b.once.Do(func() {
		s := b.shared
		if s == nil {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.users--; s.users == 0 {
			b.err = s.Close()
		}
	})
	return b.err
}

// closeFD closes a descriptor that this package owns.
func closeFD(fd int) error { return os.NewFile(uintptr(fd), "").Close() }

// pageSize is the unit in which files are mapped.
func pageSize() int64 { return int64(os.Getpagesize()) }
