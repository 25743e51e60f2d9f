package memory

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/shm"
)

// Mapping is a part of a file in this process, such as shared memory that another library made. It is
// foreign to every heap, but the file descriptor gives it an identity by which it can be registered.
type Mapping struct {
	own  region
	view View
	mem  []byte // of whole pages; nil when empty
	mu   sync.Mutex
	err  error
}

// MapFile maps n bytes of the file behind fd from offset off on, readable, writable and shared. off must
// be a multiple of the page size and the bytes must lie within the file, which must not be made shorter
// while it is mapped. fd stays the caller's and may be closed. Bad arguments are an ErrInvalid.
func MapFile(fd int, off, n int64) (*Mapping, error) {
	m, err := mapFile(fd, off, n)
	if err != nil {
		return nil, fmt.Errorf("memory: map %d bytes of file %d at %d: %w", n, fd, off, err)
	}
	return m, nil
}

func mapFile(fd int, off, n int64) (*Mapping, error) {
	id, err := shm.Identify(fd)
	if err != nil {
		return nil, err
	}
	switch {
	case off < 0 || n < 0 || off > id.Size-n:
		return nil, fmt.Errorf("%w: the file has %d bytes", ErrInvalid, id.Size)
	case off%pageSize() != 0:
		return nil, fmt.Errorf("%w: the offset is not a multiple of %d", ErrInvalid, pageSize())
	}
	m := new(Mapping)
	m.own.id, m.own.off, m.own.what = identity{id.Dev, id.Ino}, off, "mapping"
	// A later Register passes the descriptor to the peers, when the caller's may be closed.
	if m.own.fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("duplicate: %w", err)
	}
	m.view = View{own: &m.own, mem: []byte{}, n: n}
	if n > 0 {
		if m.mem, err = shm.MapFile(fd, off, n); err != nil {
			closeFD(m.own.fd)
			return nil, err
		}
		m.view.mem = m.mem[:n:n]
	}
	return m, nil
}

// View is the whole mapping.
func (m *Mapping) View() View { return m.view }

// Bytes is the memory. It is dead after Close.
func (m *Mapping) Bytes() []byte { return m.view.mem }

// Close unmaps the memory. Registrations of it have mappings of their own and live on. It is idempotent.
func (m *Mapping) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.own.freed.Swap(true) {
		return m.err
	}
	err := closeFD(m.own.fd)
	if m.mem != nil {
		if uerr := shm.Unmap(m.mem); uerr != nil {
			err = uerr
		}
	}
	if err != nil {
		m.err = fmt.Errorf("memory: unmap: %w", err)
	}
	return m.err
}

// Registration is foreign memory that has a place in every rank's segment, so that peers reach it like the
// heap's own. Every rank brings memory of its own, of any length. On the host it begins at the same offset on
// all; on GPUs whole allocations are mapped, so where a view begins depends on where it lies in its allocation.
type Registration struct {
	heap  *Heap
	own   region
	id    identity
	from  int64 // the first byte of this rank's part in what id names
	n     int64
	block int32 // of the window
	place int64 // of the block, in every segment
	room  int64
	parts []part   // what is mapped of each rank
	views []extent // what was registered of that
	view  View
}

// Register makes the memory of v symmetric. It is collective; a rank without memory passes View{}. On the
// host v must lie in a Mapping and begin at a multiple of the page size: the pages are mapped once more,
// at their place in every process. Go memory cannot be (it has no file descriptor) and is an
// ErrUnsupported, as is a view of a heap. A freed view is an ErrFreed. An error of one rank is one on all.
//
// On a GPU v is a view of Device memory that lies in one allocation of the heap's GPU, made by cuMemCreate and
// exportable as a file descriptor; the allocation is mapped as a whole. Memory of cudaMalloc cannot be placed
// where a peer wants it and is an ErrUnsupported.
//
// A registration is found by the identity of the memory and the range (View.Symmetric): never by address,
// so that a mapping which came to lie where another was is not taken for it, and never by content.
func (h *Heap) Register(ctx context.Context, v View) (*Registration, error) {
	err, broken := h.begin()
	defer h.end()
	var r *Registration
	if err == nil {
		r, err = h.register(ctx, v, broken)
	}
	if err != nil {
		return nil, fmt.Errorf("memory: register %d bytes: %w", v.n, err)
	}
	return r, nil
}

func (h *Heap) register(ctx context.Context, v View, broken error) (r *Registration, err error) {
	defer func() { h.settle(err) }()
	var src source
	switch {
	case broken != nil:
		err = broken
	case v.n == 0:
		src.fd = -1
	default:
		if err = v.Valid(); err == nil {
			src, err = h.back.identify(v)
		}
	}
	if src.owned {
		defer closeFD(src.fd)
	}
	h.mu.Lock()
	places := h.window.live
	h.mu.Unlock()
	infos, err := meet(ctx, h.group, round{
		Op:   "register",
		Must: []value{{"registrations", fmt.Sprint(places)}},
		Info: []int64{src.off, src.span, src.lead, v.n},
	}, err)
	if err != nil {
		return nil, err
	}
	r = &Registration{heap: h, id: src.id, from: src.at, n: v.n}
	r.parts, r.views = make([]part, len(infos)), make([]extent, len(infos))
	for i, o := range infos {
		r.parts[i], r.views[i] = part{off: o[0], n: o[1]}, extent{o[2], o[3]}
		r.room = max(r.room, o[1])
	}
	if r.room = roundUp(r.room, h.granule); r.room < 0 || r.room > maxAlloc {
		return nil, fmt.Errorf("%w: %d bytes", ErrInvalid, r.room)
	}

	// The same calls give the same place on every rank, as in the pool.
	h.mu.Lock()
	i, _, ok := h.window.alloc(r.room)
	if ok {
		r.block, r.place = i, h.window.blocks[i].off
	}
	h.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("%w: no room for %d bytes in the %d that are reserved for registrations",
			ErrOutOfMemory, r.room, h.limit)
	}
	for p := range r.parts {
		r.parts[p].place = r.place
	}
	err = h.placeAll(ctx, "register: commit", src.fd, r.parts, nil)
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil {
		h.window.release(r.block)
		return nil, err
	}
	h.journal.add(call{kind: callRegister, seg: -1, size: r.room, off: r.place})
	r.own.heap, r.own.what, r.own.off = h, "registration", r.place+src.lead
	r.view = View{own: &r.own, n: v.n}
	lo := h.at(h.space.Rank, r.own.off)
	if mem := h.space.Mem; mem != nil {
		r.view.mem = mem[lo : lo+v.n : lo+v.n]
	} else {
		r.view.ptr = h.space.Base + uintptr(lo)
	}
	all := append(h.registrations(), r)
	h.registered.Store(&all)
	return r, nil
}

// registrations is a copy of the list.
func (h *Heap) registrations() []*Registration {
	if p := h.registered.Load(); p != nil {
		return append([]*Registration(nil), *p...)
	}
	return nil
}

// find returns the newest registration of n bytes at off of what id names.
func (h *Heap) find(id identity, off, n int64) *Registration {
	p := h.registered.Load()
	if p == nil {
		return nil
	}
	for i := len(*p) - 1; i >= 0; i-- {
		if r := (*p)[i]; r.n > 0 && r.id == id && off >= r.from && off+n <= r.from+r.n {
			return r
		}
	}
	return nil
}

// peers are the ranks other than this one.
func (h *Heap) peers() []int {
	out := make([]int, 0, h.group.Size())
	for r := range h.group.Size() {
		if r != h.group.Rank() {
			out = append(out, r)
		}
	}
	return out
}

// View is this rank's part, symmetric in the heap.
func (r *Registration) View() View { return r.view }

// Offset is where this rank's part begins in its segment, in bytes.
func (r *Registration) Offset() int64 { return r.own.off }

// PeerOffset is where rank p's part begins in its segment, in bytes.
func (r *Registration) PeerOffset(p int) int64 { return r.place + r.views[p].off }

// PeerLen is the length of rank p's part in bytes. What lies past it is not to be touched.
func (r *Registration) PeerLen(p int) int64 { return r.views[p].n }

// Deregister takes the memory out of the segments again. It is collective: every rank lets go of its peers'
// parts before any gives up its own. The caller has waited for all work that uses the registration. The
// Mapping stays. A second Deregister is an ErrFreed; after the heap's Close there is nothing left to do.
func (r *Registration) Deregister(ctx context.Context) error {
	h := r.heap
	err, broken := h.begin()
	defer h.end()
	switch {
	case err != nil:
		return nil
	case r.own.freed.Load():
		err = ErrFreed
	default:
		err = r.deregister(ctx, broken)
	}
	if err != nil {
		return fmt.Errorf("memory: deregister %d bytes: %w", r.n, err)
	}
	return nil
}

func (r *Registration) deregister(ctx context.Context, broken error) (err error) {
	h := r.heap
	defer func() { h.settle(err) }()
	must := []value{{"offset", fmt.Sprint(r.place)}}
	if _, err = meet(ctx, h.group, round{Op: "deregister", Must: must}, broken); err != nil {
		return err
	}
	r.own.freed.Store(true)
	rest := h.registrations()
	rest = slices.DeleteFunc(rest, func(o *Registration) bool { return o == r })
	h.registered.Store(&rest)
	if !h.group.InProcess() {
		h.displaceAll(h.peers(), r.parts)
		_, err = meet(ctx, h.group, round{Op: "deregister: exporter"}, nil)
	}
	h.displaceAll([]int{h.group.Rank()}, r.parts)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.window.release(r.block)
	h.journal.add(call{kind: callDeregister, seg: -1, size: r.room, off: r.place})
	return err
}
