package memory

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// The driver chooses the address of GPU memory without a file descriptor, in every process anew. Registrations
// of such memory have a row in the alias table, and segments of it are in a table of segments.

// name is how other ranks find such memory: its address for those of the same process; for others the
// driver's handle of its allocation and how far into that it lies. The zero name is no memory.
type name [nameWords]int64

const (
	namePID    = iota
	namePIDs   // the namespace of the PID
	nameBuffer // the driver's id of the allocation in its process
	nameAddr
	nameLead
	nameIPC // 8 words

	nameWords = nameIPC + len(cuda.IPCHandle{})/8
)

func (n *name) ipc() (h cuda.IPCHandle) {
	for i, w := range n[nameIPC:] {
		binary.LittleEndian.PutUint64(h[8*i:], uint64(w))
	}
	return h
}

// opening is an allocation of another process that this rank has mapped.
type opening struct {
	addr  uintptr
	users int
}

// exporter is an allocation as its own process knows it. It keeps its id as long as it lives, and no other has it.
type exporter struct{ pid, pids, buffer int64 }

func (n *name) exporter() exporter { return exporter{n[namePID], n[namePIDs], n[nameBuffer]} }

// thisProcess tells processes of a host apart.
func thisProcess() (pid, pids int64, err error) {
	var st syscall.Stat_t
	if err := syscall.Stat("/proc/self/ns/pid", &st); err != nil {
		return 0, 0, fmt.Errorf("identify the process: %w", err)
	}
	return int64(os.Getpid()), int64(st.Ino), nil
}

// export names the memory at addr, which lies in the allocation of p.
func (b *cudaBacking) export(addr uintptr, p cuda.Pointer) (n name, err error) {
	if n[namePID], n[namePIDs], err = thisProcess(); err != nil {
		return name{}, err
	}
	base, _, err := b.ctx.AddressRange(addr)
	if err != nil {
		return name{}, err
	}
	h, err := b.ctx.IPCGet(base)
	if err != nil {
		return name{}, err
	}
	n[nameBuffer], n[nameAddr], n[nameLead] = int64(p.BufferID), int64(addr), int64(addr-base)
	for i := range n[nameIPC:] {
		n[nameIPC+i] = int64(binary.LittleEndian.Uint64(h[8*i:]))
	}
	return n, nil
}

// attach is the address in this process of memory that another rank has named. A process cannot open what it has exported itself.
func (b *cudaBacking) attach(n *name) (uintptr, error) {
	pid, pids, err := thisProcess()
	if err != nil {
		return 0, err
	}
	if n[namePID] == pid && n[namePIDs] == pids {
		addr := uintptr(n[nameAddr])
		return addr, b.enablePeer(addr)
	}
	b.openings.Lock()
	defer b.openings.Unlock()
	o := b.opened[n.exporter()]
	if o == nil {
		addr, err := b.ctx.IPCOpen(n.ipc())
		if err != nil {
			return 0, err
		}
		o = &opening{addr: addr}
		b.opened[n.exporter()] = o
	}
	o.users++
	return o.addr + uintptr(n[nameLead]), nil
}

// enablePeer lets kernels reach memory of another GPU of this process.
func (b *cudaBacking) enablePeer(addr uintptr) error {
	p, err := b.ctx.Pointer(addr)
	switch {
	case err != nil:
		return err
	case p.Type != cuda.DeviceMemory:
		return fmt.Errorf("%#x is not memory of a GPU any more", addr)
	case p.Device == b.ctx.Device().Ordinal():
		return nil
	}
	d, err := b.ctx.Device().Driver().Device(p.Device)
	if err != nil {
		return err
	}
	peer, err := d.Primary()
	if err != nil {
		return err
	}
	return errors.Join(b.ctx.EnablePeer(peer), peer.Close())
}

// detach releases the address that attach has returned.
func (b *cudaBacking) detach(n *name) error {
	b.openings.Lock()
	defer b.openings.Unlock()
	o := b.opened[n.exporter()]
	if o == nil {
		return nil // of this process
	}
	if o.users--; o.users > 0 {
		return nil
	}
	delete(b.opened, n.exporter())
	return b.ctx.IPCClose(o.addr)
}

// detachAll releases everything.
func (b *cudaBacking) detachAll() error {
	b.openings.Lock()
	defer b.openings.Unlock()
	var err error
	for _, o := range b.opened {
		err = errors.Join(err, b.ctx.IPCClose(o.addr))
	}
	clear(b.opened)
	return err
}

// allot makes this rank's segment of a scattered heap, n bytes of zero memory. It lies at at of the range, which
// has nothing else in it.
func (b *cudaBacking) allot(at, n int64) (name, error) {
	addr, err := b.ctx.MemAlloc(n)
	if err != nil {
		return name{}, outOfMemory(err)
	}
	b.segment, b.origin = addr, addr-uintptr(at)
	if err := b.zero(addr, n); err != nil {
		return name{}, fmt.Errorf("clear %d bytes: %w", n, err)
	}
	p, err := b.ctx.Pointer(addr)
	if err != nil {
		return name{}, err
	}
	return b.export(addr, p)
}

// write puts 64-bit words at at of the range, in this rank's segment. Kernels see them when it returns.
func (b *cudaBacking) write(at int64, words []uintptr) error {
	var buf []byte
	for _, w := range words {
		buf = binary.LittleEndian.AppendUint64(buf, uint64(w))
	}
	return b.ctx.Write(b.alarm, b.origin+uintptr(at), buf)
}

// attachAll returns the addresses in this process of the memory that the other ranks have named. After an error of
// any rank, no rank holds memory of another when it returns, unless the call was cut off.
func (h *Heap) attachAll(ctx context.Context, op string, names []name) ([]uintptr, error) {
	addrs := make([]uintptr, len(names))
	var held []int
	var err error
	for _, r := range h.peers() {
		if names[r] == (name{}) {
			continue
		}
		if addrs[r], err = h.gpu.attach(&names[r]); err != nil {
			err = fmt.Errorf("memory of rank %d by CUDA IPC: %w", r, err)
			break
		}
		held = append(held, r)
	}
	if _, err = agree.On(ctx, h.group, agree.Claim{Op: op + ": attach"}, err); err != nil {
		return nil, h.letGo(ctx, op, held, names, err)
	}
	return addrs, nil
}

// letGo ends a call that has failed on every rank, when peers may have attached what this rank is about to free.
// It returns err, and why it was cut off if it was.
func (h *Heap) letGo(ctx context.Context, op string, held []int, names []name, err error) error {
	h.detachAll(held, names)
	var cut *agree.CutError
	if !errors.As(err, &cut) {
		if _, cerr := agree.On(ctx, h.group, agree.Claim{Op: op + ": let go"}, nil); cerr != nil {
			err = errors.Join(err, cerr)
		}
	}
	return err
}

func (h *Heap) detachAll(ranks []int, names []name) {
	for _, r := range ranks {
		if names[r] == (name{}) {
			continue
		}
		if err := h.gpu.detach(&names[r]); err != nil {
			h.log.Warn("memory: close CUDA IPC", "rank", h.group.Rank(), "of", r, "error", err)
		}
	}
}

// scatter gives every rank a segment at an address of its own.
func (h *Heap) scatter(ctx context.Context, n int64) error {
	me := h.space.Rank
	own, err := h.gpu.allot(h.at(me, 0), n)
	claims, err := agree.On(ctx, h.group, agree.Claim{Op: "commit", Info: own[:]}, err)
	if err != nil {
		return err
	}
	names := make([]name, h.home.Size())
	for r, w := range h.ofHome(claims.Infos()) {
		copy(names[r][:], w)
	}
	segments, err := h.attachAll(ctx, "commit", names)
	if err != nil {
		return err
	}
	h.space.Base, segments[me] = h.gpu.base(), h.gpu.segment
	err = h.gpu.write(h.at(me, kernels.SegmentsOffset), segments)
	if _, err = agree.On(ctx, h.group, agree.Claim{Op: "commit: table"}, err); err != nil {
		return h.letGo(ctx, "commit", h.peers(), names, err)
	}
	h.space.Segments = segments
	return nil
}

// alias puts the addresses of r's memory into its row of the table. Memory mapped in the window is there already.
// own is the address of this rank's memory.
func (h *Heap) alias(ctx context.Context, r *Registration, own uintptr) error {
	addrs, err := h.attachAll(ctx, "register", r.names)
	if err != nil {
		return err
	}
	for p := range addrs {
		if r.parts[p].n > 0 {
			addrs[p] = h.space.Base + uintptr(h.at(p, r.parts[p].place+r.leads[p]))
		} else if p == h.space.Rank {
			addrs[p] = own
		}
	}
	if _, err = agree.On(ctx, h.group, agree.Claim{Op: "register: table"}, h.writeRow(r.row, addrs)); err != nil {
		return h.letGo(ctx, "register", h.peers(), r.names, err)
	}
	h.space.Aliases.Set(r.row, addrs)
	return nil
}

// unalias undoes alias.
func (h *Heap) unalias(r *Registration) {
	h.space.Aliases.Set(r.row, nil)
	if err := h.writeRow(r.row, make([]uintptr, h.space.Size)); err != nil {
		h.log.Warn("memory: clear an alias", "rank", h.space.Rank, "error", err)
	}
	h.detachAll(h.peers(), r.names)
}

func (h *Heap) writeRow(row int, addrs []uintptr) error {
	return h.gpu.write(h.at(h.space.Rank, kernels.AliasOffset+8*int64(row*len(addrs))), addrs)
}
