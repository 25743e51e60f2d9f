package memory

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/env"
)

// Multicast says whether the segments of a heap on GPUs have a second, multicast address, at which one access of a kernel reaches all
// ranks' memory, and how ranks pass each other the objects behind it. It has never run on hardware.
type Multicast uint8

// The ways.
const (
	// NoMulticast makes no multicast address.
	NoMulticast Multicast = iota
	// MulticastByFile passes file descriptors.
	MulticastByFile
	// MulticastByFabric passes fabric handles. GPUs in a fabric that IMEX runs have them.
	MulticastByFabric
)

// String is the way's name.
func (m Multicast) String() string {
	if m > MulticastByFabric {
		return fmt.Sprintf("Multicast(%d)", uint8(m))
	}
	return [...]string{"none", "by file descriptor", "by fabric handle"}[m]
}

func (m Multicast) handles() cuda.HandleType {
	if m == MulticastByFabric {
		return cuda.Fabric
	}
	return cuda.PosixFile
}

// hurdle is the reason why a rank cannot have multicast. Ranks exchange theirs.
type hurdle int64

const (
	noHurdle hurdle = iota
	hurdleEnvironment
	hurdleDevice
	hurdleIPC
)

func (u hurdle) String() string {
	return [...]string{"", "its environment forbids it", "its GPU has none", "its memory leaves it by CUDA IPC"}[u]
}

// multicast is one rank's view of all ranks' segments at once: an offset of the segments is at address base + offset.
//
// The segments are bound to consecutive objects. These are larger than most extents, since the driver recommends large ones, so an
// extent begins in the free end of the last object. Each object is mapped as a whole, from its beginning, where its first byte belongs (M6).
type multicast struct {
	ctx         *cuda.Context
	by          Multicast
	team        int   // ranks
	least, good int64 // what places and sizes are multiples of, and sizes of objects
	base        uintptr
	n           int64 // of addresses
	objects     []*multicastObject
}

// multicastObject is an object as this rank holds it.
type multicastObject struct {
	at, n  int64 // of the segments
	h      cuda.MemHandle
	mapped bool
	bound  []extent // this rank's memory, from the object's beginning
}

// newMulticast asks the driver for its granularities.
func newMulticast(ctx *cuda.Context, by Multicast, team int) (*multicast, error) {
	m := &multicast{ctx: ctx, by: by, team: team}
	for recommended, n := range map[bool]*int64{false: &m.least, true: &m.good} {
		var err error
		if *n, err = ctx.MulticastGranularity(team, by.handles(), recommended); err != nil {
			return nil, err
		}
	}
	m.good = max(m.good, m.least)
	return m, nil
}

// reserve takes addresses for segments of n bytes.
func (m *multicast) reserve(limit int64) (err error) {
	n := roundUp(limit, m.good)
	if m.base, err = m.ctx.Reserve(n, m.good, 0); err != nil {
		return fmt.Errorf("reserve %d bytes of multicast addresses: %w", n, err)
	}
	m.n = n
	return nil
}

// end is the offset at which the last object ends.
func (m *multicast) end() int64 {
	if len(m.objects) == 0 {
		return 0
	}
	last := m.objects[len(m.objects)-1]
	return last.at + last.n
}

// create makes the object o and the descriptor or fabric handle by which other ranks import it. An open descriptor is a reference, and so
// is each import of it, so the creator's handle is released at once; a fabric handle is no reference, so then it stays (M6).
func (m *multicast) create(o *multicastObject) (fd int, fabric cuda.FabricHandle, err error) {
	fd = -1
	h, err := m.ctx.MulticastCreate(m.team, o.n, m.by.handles())
	if err != nil {
		return fd, fabric, outOfMemory(err)
	}
	if m.by == MulticastByFabric {
		o.h = h
		fabric, err = m.ctx.ExportFabric(h)
		return fd, fabric, err
	}
	fd, err = m.ctx.ExportFD(h)
	if rerr := m.ctx.MemRelease(h); rerr != nil {
		if err == nil {
			rerr = errors.Join(rerr, closeFD(fd))
		}
		fd, err = -1, errors.Join(err, rerr)
	}
	return fd, fabric, err
}

// mapAll maps the objects that are new.
func (m *multicast) mapAll() error {
	for _, o := range m.objects {
		if o.mapped {
			continue
		}
		at := m.base + uintptr(o.at)
		if err := m.ctx.MemMap(at, o.n, 0, o.h); err != nil {
			return fmt.Errorf("map a multicast object of %d bytes: %w", o.n, err)
		}
		o.mapped = true
		if err := m.ctx.SetAccess(at, o.n, m.ctx.Device()); err != nil {
			return err
		}
	}
	return nil
}

// bind binds this rank's memory for e, which the descriptor names, when every rank has added its GPU to the objects.
func (m *multicast) bind(fd int, e extent) (err error) {
	if err := m.mapAll(); err != nil {
		return err
	}
	h, err := m.ctx.ImportFD(fd)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.ctx.MemRelease(h)) }() // the bind holds the memory
	for _, o := range m.objects {
		lo, hi := max(o.at, e.off), min(o.at+o.n, e.off+e.n)
		if lo >= hi {
			continue
		}
		if err := m.ctx.MulticastBind(o.h, lo-o.at, h, lo-e.off, hi-lo); err != nil {
			return fmt.Errorf("bind %d bytes to a multicast object: %w", hi-lo, outOfMemory(err))
		}
		o.bound = append(o.bound, extent{lo - o.at, hi - lo})
	}
	return nil
}

// unbind undoes bind, also one that has failed half-way.
func (m *multicast) unbind(e extent) error {
	var err error
	for _, o := range m.objects {
		o.bound = slices.DeleteFunc(o.bound, func(b extent) bool {
			inside := o.at+b.off >= e.off && o.at+b.off < e.off+e.n
			if inside {
				err = errors.Join(err, m.ctx.MulticastUnbind(o.h, b.off, b.n))
			}
			return inside
		})
	}
	return err
}

// unmap takes the objects out of the addresses. This rank then reaches no memory by them.
func (m *multicast) unmap(objects ...*multicastObject) error {
	var err error
	for _, o := range objects {
		if o.mapped {
			err = errors.Join(err, m.ctx.MemUnmap(m.base+uintptr(o.at), o.n))
			o.mapped = false
		}
	}
	return err
}

// drop releases all that this rank holds of objects. No rank uses them any more.
func (m *multicast) drop(objects ...*multicastObject) error {
	err := m.unmap(objects...)
	for _, o := range objects {
		for _, b := range o.bound {
			err = errors.Join(err, m.ctx.MulticastUnbind(o.h, b.off, b.n))
		}
		o.bound = nil
		if o.h != 0 {
			err = errors.Join(err, m.ctx.MemRelease(o.h))
			o.h = 0
		}
	}
	return err
}

// close releases everything.
func (m *multicast) close() error {
	err := m.drop(m.objects...)
	m.objects = nil
	if m.n > 0 {
		err = errors.Join(err, m.ctx.Unreserve(m.base, m.n))
		m.n = 0
	}
	return err
}

// Multicast reports whether the heap's memory has multicast addresses, and if Options asked for them and it has none, why.
func (h *Heap) Multicast() (on bool, why string) { return h.multi != nil, h.noMulticast }

// hurdle is this rank's.
func (h *Heap) hurdle(by Multicast) hurdle {
	switch {
	case by == NoMulticast:
		return noHurdle
	case env.MulticastDisabledBy() != "":
		return hurdleEnvironment
	case h.gpu.scattered:
		return hurdleIPC
	case !h.gpu.features.Multicast, by == MulticastByFabric && !h.gpu.features.Fabric:
		return hurdleDevice
	}
	return noHurdle
}

// obstacle is the reason why the ranks cannot have multicast, "" if they can. all are their words about their GPUs, their hurdles last.
func obstacle(all [][]int64) string {
	if len(all) == 1 {
		return "the group has one rank"
	}
	for r, w := range all {
		if u := hurdle(w[len(w)-1]); u != noHurdle {
			return fmt.Sprintf("rank %d: %v", r, u)
		}
		for p := range r {
			if slices.Equal(all[p][:2], w[:2]) {
				return fmt.Sprintf("ranks %d and %d share a GPU", p, r)
			}
		}
	}
	return ""
}

// teamUp prepares multicast if all ranks can have it, and rounds places to its granularity.
func (h *Heap) teamUp(by Multicast, all [][]int64) (err error) {
	if by == NoMulticast {
		return nil
	}
	if h.noMulticast = obstacle(all); h.noMulticast != "" {
		if v := env.MulticastDisabledBy(); v != "" {
			h.noMulticast += " (" + v + ")"
		}
		h.log.Warn("memory: no multicast", "group", h.group.Name(), "rank", h.group.Rank(), "why", h.noMulticast)
		return nil
	}
	h.multi, err = newMulticast(h.gpu.ctx, by, len(all))
	if err == nil {
		h.granule = max(h.granule, h.multi.least)
	}
	return err
}

// bindAll binds e of every rank's segment; fd is this rank's descriptor of it. It makes another object if the last one has no room. When it
// returns all ranks have bound theirs, so kernels may use the addresses. On an error this rank keeps none of it.
func (h *Heap) bindAll(ctx context.Context, op string, fd int, e extent) (err error) {
	m := h.multi
	had := len(m.objects)
	defer func() {
		if err != nil {
			err = errors.Join(err, m.unbind(e), m.drop(m.objects[had:]...))
			m.objects = m.objects[:had]
		}
	}()
	if end := m.end(); e.off+e.n > end {
		o := &multicastObject{at: end, n: roundUp(e.off+e.n-end, m.good)}
		m.objects = append(m.objects, o)
		if err := h.assemble(ctx, op, o); err != nil {
			return err
		}
	}
	_, err = agree.On(ctx, h.group, agree.Claim{Op: op + ": multicast bind"}, m.bind(fd, e))
	return err
}

// assemble makes o on rank 0; every rank imports it and adds its GPU. It returns when all have. Before that no rank may bind or map,
// since the driver would wait for ranks that may have failed.
func (h *Heap) assemble(ctx context.Context, op string, o *multicastObject) error {
	m, fd := h.multi, -1
	var fabric cuda.FabricHandle
	var err error
	if h.space.Rank == 0 {
		if fd, fabric, err = m.create(o); fd >= 0 {
			defer closeFD(fd)
		}
	}
	made := agree.Claim{Op: op + ": multicast object"}
	for i := 0; i < len(fabric); i += 8 {
		made.Info = append(made.Info, int64(binary.LittleEndian.Uint64(fabric[i:])))
	}
	claims, err := agree.On(ctx, h.group, made, err)
	if err != nil {
		return err
	}
	switch {
	case m.by == MulticastByFile:
		err = h.importObject(ctx, fd, o)
	case h.space.Rank != 0:
		for i, w := range claims[0].Info {
			binary.LittleEndian.PutUint64(fabric[8*i:], uint64(w))
		}
		o.h, err = m.ctx.ImportFabric(fabric)
	}
	if err == nil {
		err = m.ctx.MulticastAddDevice(o.h)
	}
	_, err = agree.On(ctx, h.group, agree.Claim{Op: op + ": multicast team"}, err)
	return err
}

// importObject gives this rank a handle of the object that is behind rank 0's descriptor.
func (h *Heap) importObject(ctx context.Context, fd int, o *multicastObject) error {
	var mine []int
	if fd >= 0 {
		mine = []int{fd}
	}
	fds, err := h.group.ExchangeFDs(ctx, mine)
	for r := range fds {
		for _, fd := range fds[r] {
			if r == 0 && o.h == 0 && err == nil {
				o.h, err = h.multi.ctx.ImportFD(fd)
			}
			err = errors.Join(err, closeFD(fd))
		}
	}
	if err == nil && o.h == 0 {
		err = errors.New("rank 0 passed no descriptor of the multicast object")
	}
	return err
}
