package memory

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
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

// Registration is foreign memory with a place in every rank's segment, so peers reach it like the heap's own.
// Every rank registers memory of its own, of any length. The place is the same on all ranks.
type Registration struct {
	heap  *Heap
	own   region
	id    identity
	from  int64 // the first byte of this rank's part in what id names
	n     int64
	piece int32 // of the window
	room  int64
	row   int     // of the alias table, on GPUs
	place int64   // where all parts begin
	parts []part  // what is mapped of each rank in the window
	leads []int64 // where it begins in that
	names []name  // what is not mapped there
	lens  []int64
	view  View
}

// Register makes the memory of v symmetric. It is collective; a rank without memory passes View{}. On the
// host v must lie in a Mapping and begin at a multiple of the page size: the pages are mapped once more,
// at their place in every process. Go memory has no file descriptor and is an
// ErrUnsupported, as is a view of a heap. A freed view is an ErrFreed. An error of one rank is one on all.
//
// On a GPU v is a view of Device memory in one allocation of the heap's GPU: of cudaMalloc, as torch's tensors
// are, or of cuMemCreate, exportable as a file descriptor. Peers map the whole allocation, so it must not be freed
// before Deregister has returned. If a library divides its allocations, the identity is that of the allocation: a
// piece that the library gives to another user stays registered. Memory of cudaMallocAsync and managed memory have
// no handle for peers and are an ErrUnsupported.
//
// The call can wait for kernels that run on the GPU; no such kernel may wait for a rank that is in Register.
//
// A heap has room for ReserveBytes in registrations of the host and of cuMemCreate, and for 256 registrations on
// GPUs (112 with 64 ranks); one more is an ErrOutOfMemory.
//
// A registration is found by the identity of the memory and the range (View.Symmetric), never by address or
// content. So a mapping or an allocation at the address of an earlier one is not taken for that (M7).
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
	end := h.bounded(ctx)
	defer func() { err = end(err) }()
	src := source{fd: -1}
	switch {
	case broken != nil:
		err = broken
	case h.group.Replaying():
		err = fmt.Errorf("%w: the lost rank has registered memory, which the process in its place cannot have", ErrUnsupported)
	case v.n == 0:
	default:
		if err = v.Valid(); err == nil {
			src, err = h.back.identify(v)
		}
		if err == nil && h.gpu == nil && src.lead != 0 { // pages have one place on all ranks
			err = fmt.Errorf("%w: byte %d of the file is not at a multiple of %d", ErrInvalid, src.at, pageSize())
		}
	}
	if src.owned {
		defer closeFD(src.fd)
	}
	h.mu.Lock()
	places := h.window.live
	h.mu.Unlock()
	claims, err := agree.On(ctx, h.group, agree.Claim{
		Op:   "register",
		Must: []agree.Value{agree.Named("registrations", places)},
		Info: append([]int64{src.off, src.span, src.lead, v.n}, src.name[:]...),
	}, err)
	if err != nil {
		return nil, err
	}
	r = &Registration{heap: h, id: src.id, from: src.at, n: v.n, room: h.granule}
	size := h.home.Size()
	r.parts, r.leads, r.names, r.lens = make([]part, size), make([]int64, size), make([]name, size), make([]int64, len(claims))
	t := h.group.Topology()
	for rank, o := range claims.Infos() {
		r.lens[rank] = o[3]
		r.room = max(r.room, o[1])
		if i := t.LocalOf(rank); t.HostOf(rank) == t.Host {
			r.parts[i], r.leads[i] = part{off: o[0], n: o[1]}, o[2]
			copy(r.names[i][:], o[4:])
		}
	}
	if r.room = roundUp(r.room, h.granule); r.room < 0 || r.room > maxAlloc {
		return nil, fmt.Errorf("%w: %d bytes", ErrInvalid, r.room)
	}
	if err := h.makeRoom(r); err != nil {
		return nil, err
	}
	if err = h.placeAll(ctx, "register: commit", src.fd, r.parts, nil); err == nil && h.gpu != nil {
		if err = h.alias(ctx, r, v.ptr); err != nil {
			if !h.home.InProcess() {
				h.displaceAll(h.peers(), r.parts)
			}
			h.displaceAll([]int{h.space.Rank}, r.parts)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil {
		h.releaseRoom(r)
		return nil, err
	}
	h.journal.add(call{kind: callRegister, seg: -1, size: r.room, off: r.place})
	r.own.heap, r.own.what, r.own.off = h, "registration", r.place
	r.view = View{own: &r.own, n: v.n}
	if mem := h.space.Mem; mem != nil {
		lo := h.at(h.space.Rank, r.place)
		r.view.mem = mem[lo : lo+v.n : lo+v.n]
	} else {
		r.view.ptr = h.space.Addr(h.space.Rank, r.place)
	}
	all := append(h.registrations(), r)
	h.registered.Store(&all)
	return r, nil
}

// makeRoom gives r its place. The same calls give the same place on every rank, as in the pool.
func (h *Heap) makeRoom(r *Registration) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gpu != nil {
		if r.row = slices.Index(h.rows, false); r.row < 0 {
			return fmt.Errorf("%w: a heap of %d ranks has room for %d registrations", ErrOutOfMemory, h.space.Size, len(h.rows))
		}
	}
	i, _, ok := h.window.alloc(r.room)
	if !ok {
		return fmt.Errorf("%w: no room for %d bytes in the %d that are reserved for registrations",
			ErrOutOfMemory, r.room, h.limit)
	}
	r.piece, r.place = i, h.window.pieces[i].off
	for p := range r.parts {
		r.parts[p].place = r.place
	}
	if h.gpu != nil {
		h.rows[r.row] = true
		r.place = kernels.AliasPlace | int64(r.row)<<kernels.AliasShift
	}
	return nil
}

// releaseRoom undoes makeRoom. The caller holds mu.
func (h *Heap) releaseRoom(r *Registration) {
	h.window.release(r.piece)
	if h.gpu != nil {
		h.rows[r.row] = false
	}
}

// registrations is a copy of the list.
func (h *Heap) registrations() []*Registration {
	if p := h.registered.Load(); p != nil {
		return append([]*Registration(nil), *p...)
	}
	return nil
}

// find returns the newest registration of n bytes at off of the memory with identity id.
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

// peers are the other ranks of the host, as their segments are numbered.
func (h *Heap) peers() []int {
	out := make([]int, 0, h.home.Size())
	for r := range h.home.Size() {
		if r != h.home.Rank() {
			out = append(out, r)
		}
	}
	return out
}

// View is this rank's memory, symmetric in the heap.
func (r *Registration) View() View { return r.view }

// Offset is the place of every rank's memory in its segment, as kernels.Space.Addr takes it. On the host it is an offset
// like those of buffers, in bytes; on a GPU the memory lies elsewhere, and the place counts bytes from its beginning.
func (r *Registration) Offset() int64 { return r.place }

// PeerLen is the length of rank p's memory in bytes. Memory beyond it must not be touched.
func (r *Registration) PeerLen(p int) int64 { return r.lens[p] }

// Deregister takes the memory out of the segments. It is collective: every rank unmaps its peers' memory before
// any call returns, so the memory may then be freed (M4). The caller has waited for all work that uses the
// registration. The Mapping stays. A second Deregister is an ErrFreed; after the heap's Close it does nothing.
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
	end := h.bounded(ctx)
	defer func() { err = end(err) }()
	must := []agree.Value{agree.Named("offset", r.place)}
	if _, err = agree.On(ctx, h.group, agree.Claim{Op: "deregister", Must: must}, broken); err != nil {
		return err
	}
	r.own.freed.Store(true)
	rest := h.registrations()
	rest = slices.DeleteFunc(rest, func(o *Registration) bool { return o == r })
	h.registered.Store(&rest)
	if h.gpu != nil {
		h.unalias(r)
	}
	if !h.home.InProcess() {
		h.displaceAll(h.peers(), r.parts)
	}
	_, err = agree.On(ctx, h.group, agree.Claim{Op: "deregister: exporter"}, nil)
	h.displaceAll([]int{h.space.Rank}, r.parts)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.releaseRoom(r)
	h.journal.add(call{kind: callDeregister, seg: -1, size: r.room, off: r.place})
	return err
}
