package memory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Memory that one rank shares with one other, without the rest: the exporter offers it, the importer opens it. They talk by words (comm.Mail)
// of the group of their host. Offers have topic 0 and a number each, by which all else about them has topics of its own.

// shares are what a heap has of such memory. Ranks are those of the host.
type shares struct {
	mail *comm.Mail

	mu     sync.Mutex
	last   uint32 // the number of the newest offer
	shared map[*Shared]struct{}
	opened map[*Opened]struct{}
	loans  map[loanKey]*loan // that this rank has mapped

	// placed has those of shared that have a row, for lookups.
	placed atomic.Pointer[[]*Shared]
}

// offer is a part of a piece of memory of the rank that sends it; see source.
type offer struct {
	Number          uint32
	Dev, Ino        uint64
	Off, Lead, Span int64
	Bytes           int64
	Descriptor      bool
	Name            name
	Elements        kernels.Elements
	Row             int // of the importer's alias table, in the exporter's column; 0: none
}

// read decodes an offer to h.
func (of *offer) read(text []byte, h *Heap) error {
	if err := json.Unmarshal(text, of); err != nil {
		return fmt.Errorf("malformed offer: %w", err)
	}
	first := kernels.AliasRows(h.space.Size)
	row := of.Row == 0 || h.gpu != nil && of.Row >= first && of.Row < first+kernels.ShareRows(h.space.Size)
	end := of.Lead + of.Bytes
	if of.Bytes <= 0 || of.Lead < 0 || of.Span < 0 || end < 0 || of.Span > 0 && end > of.Span || h.gpu == nil && !of.Descriptor || !row {
		return fmt.Errorf("malformed offer: %d bytes from byte %d of %d, row %d", of.Bytes, of.Lead, of.Span, of.Row)
	}
	return nil
}

// descriptorOf is the topic of the descriptor that comes in front of an offer, and toldOf that of what the importer tells about it.
func descriptorOf(number uint32) uint32 { return 2 * number }
func toldOf(number uint32) uint32       { return 2*number + 1 }

// An importer tells one of these about an offer, and the reason behind a refusal.
const (
	wordOpened  = 'o'
	wordClosed  = 'c'
	wordRefused = 'r'
)

// maxShared bounds the offers of a rank to one other that are not closed.
const maxShared = 1024

// loanKey names a piece of a rank's memory, which is mapped once however many offers have parts of it (M7).
type loanKey struct {
	rank      int
	id        identity
	off, span int64
}

// loan is memory of another rank in this process, from its first byte on.
type loan struct {
	mem   []byte
	addr  uintptr
	users int
	unmap func() error
}

// Shared is memory of this rank that one other rank may open. See Heap.Share.
type Shared struct {
	heap   *Heap
	rank   int // of the host
	number uint32
	id     identity
	at     int64 // the first byte in what id names
	n      int64
	row    int

	mu     sync.Mutex // held by Close
	opened bool
	ended  bool
}

// Share offers memory of this rank to rank peer, which opens it by Heap.Open. The two do it alone, and Share waits for nobody. v is what
// Register takes, at any place of a Mapping, or on a GPU in one allocation of cudaMalloc or, exportable as a file descriptor, of cuMemCreate.
// The peer maps the whole allocation, or on the host the pages, and the memory must not be freed before Shared.Close has returned nil: that
// waits for the peer, since a free cannot be refused afterwards and only the peer knows when its work has ended (M4). An allocation of which
// several ranges are shared is freed when all of them are closed.
//
// The error is an ErrInvalid for no bytes or a rank that is not another of the group, an ErrFreed for a freed view, an ErrUnsupported for a
// rank of another host, memory without a handle for peers, and memory of a heap, which peers reach as it is, an ErrOutOfMemory where 1024
// offers to the rank are not closed, and comm.ErrPeerLost for a rank that is gone.
func (h *Heap) Share(peer int, v View) (*Shared, error) {
	s, err := h.share(peer, v)
	if err != nil {
		return nil, fmt.Errorf("memory: share %d bytes with rank %d: %w", v.n, peer, err)
	}
	return s, nil
}

func (h *Heap) share(peer int, v View) (*Shared, error) {
	rank, err := h.neighbour(peer)
	switch {
	case err != nil:
		return nil, err
	case v.n == 0:
		return nil, fmt.Errorf("%w: there are no bytes", ErrInvalid)
	}
	if err = v.Valid(); err != nil {
		return nil, err
	}
	src, err := h.back.identify(v)
	if src.owned {
		defer closeFD(src.fd)
	}
	if err != nil {
		return nil, err
	}
	o := offer{
		Dev: src.id.dev, Ino: src.id.ino, Off: src.off, Lead: src.lead, Span: src.span, Bytes: v.n,
		Descriptor: src.fd >= 0, Name: src.name, Elements: v.elem,
	}
	sh := &h.shares
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if open := sh.offered(rank); open >= maxShared {
		return nil, fmt.Errorf("%w: %d shares with that rank are not closed", ErrOutOfMemory, open)
	}
	sh.last++
	o.Number, o.Row = sh.last, h.freeRow(rank)
	text, err := json.Marshal(&o)
	if err != nil {
		return nil, err
	}
	if o.Descriptor {
		if err := sh.mail.Send(rank, descriptorOf(o.Number), nil, src.fd); err != nil {
			return nil, err
		}
	}
	if err := sh.mail.Send(rank, 0, text); err != nil {
		return nil, err
	}
	s := &Shared{heap: h, rank: rank, number: o.Number, id: src.id, at: src.at, n: v.n, row: o.Row}
	sh.shared[s] = struct{}{}
	sh.place()
	return s, nil
}

// freeRow is a row of the alias table on a GPU that this rank has not chosen for other memory at a rank, 0 if there is none. mu is held.
func (h *Heap) freeRow(rank int) int {
	if h.gpu == nil {
		return 0
	}
	first := kernels.AliasRows(h.space.Size)
	used := make([]bool, kernels.ShareRows(h.space.Size))
	for s := range h.shares.shared {
		if s.rank == rank && s.row != 0 {
			used[s.row-first] = true
		}
	}
	if i := slices.Index(used, false); i >= 0 {
		return first + i
	}
	return 0
}

// place lists what is in rows. mu is held.
func (sh *shares) place() {
	var all []*Shared
	for s := range sh.shared {
		if s.row != 0 {
			all = append(all, s)
		}
	}
	sh.placed.Store(&all)
}

// offered counts the offers to a rank that are not closed. mu is held.
func (sh *shares) offered(rank int) (n int) {
	for s := range sh.shared {
		if s.rank == rank {
			n++
		}
	}
	return n
}

// neighbour is the number on this host of another rank of it, if the two may share memory now.
func (h *Heap) neighbour(peer int) (rank int, err error) {
	h.mu.Lock()
	err = h.usable()
	h.mu.Unlock()
	if err != nil {
		return 0, err
	}
	if err = h.group.Err(); err != nil {
		return 0, err
	}
	t := h.group.Topology()
	switch {
	case peer < 0 || peer >= h.group.Size() || peer == h.group.Rank():
		return 0, fmt.Errorf("%w: rank %d, want another of the %d ranks than %d", ErrInvalid, peer, h.group.Size(), h.group.Rank())
	case t.HostOf(peer) != t.Host:
		return 0, fmt.Errorf("%w: rank %d is on host %d, and handles of memory do not leave host %d", ErrUnsupported, peer, t.HostOf(peer), t.Host)
	}
	return t.LocalOf(peer), nil
}

// Close takes the memory back. It returns nil once the peer has closed or refused it, or is gone, and the memory may then be freed (M4). When
// ctx ends first the error names the peer and says whether it has opened the memory (comm.ErrTimeout at a deadline); the memory is still
// shared, and Close can be called again. An offer that its peer never opens ends with the heap. It is idempotent.
func (s *Shared) Close(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	sh := &s.heap.shares
	for !s.ended {
		w, err := sh.mail.ReceiveLast(ctx, s.rank, toldOf(s.number))
		switch {
		case errors.Is(err, comm.ErrPeerLost) || errors.Is(err, ErrClosed):
			s.ended = true
		case err != nil:
			peer := s.heap.named(s.rank)
			if err = s.heap.ofGroup(err); s.opened {
				return fmt.Errorf("memory: take back %d bytes: rank %d has them open: %w", s.n, peer, err)
			}
			return fmt.Errorf("memory: take back %d bytes: rank %d has not opened them: %w", s.n, peer, err)
		default:
			s.opened = len(w.Data) == 1 && w.Data[0] == wordOpened
			s.ended = !s.opened
		}
	}
	sh.mu.Lock()
	delete(sh.shared, s)
	sh.place()
	sh.mu.Unlock()
	return nil
}

// ofGroup is an error of the group of this host, whose ranks are numbered as in the heap's group.
func (h *Heap) ofGroup(err error) error {
	var p *comm.PeerError
	if h.home == h.group || !errors.As(err, &p) {
		return err
	}
	return &comm.PeerError{Rank: h.named(p.Rank), Op: p.Op, Epoch: p.Epoch, Err: p.Err}
}

// Opened is memory of another rank that this one has mapped. See Heap.Open.
type Opened struct {
	heap   *Heap
	number uint32
	key    loanKey
	loan   *loan
	row    int
	own    region
	view   View
	mu     sync.Mutex
	err    error
}

// Open maps memory that rank peer has shared with this rank, the oldest that this rank has not opened, and waits for it. The two do it alone.
// An allocation is mapped once, however often and in however many ranges it is shared; on the host equal ranges of pages are. On a GPU the
// call can wait for kernels that run there; no such kernel may wait for a rank that is in Open.
//
// When ctx ends first the error names the peer (comm.ErrTimeout at a deadline), and the next Open finds what it shares. Memory that cannot be
// mapped is refused: the error says why, and the peer has it back. The failure of the group ends the call. A rank on another host is an
// ErrUnsupported.
func (h *Heap) Open(ctx context.Context, peer int) (*Opened, error) {
	o, err := h.openShared(ctx, peer)
	if err != nil {
		return nil, fmt.Errorf("memory: open memory of rank %d: %w", peer, err)
	}
	return o, nil
}

func (h *Heap) openShared(ctx context.Context, peer int) (*Opened, error) {
	rank, err := h.neighbour(peer)
	if err != nil {
		return nil, err
	}
	sh := &h.shares
	w, err := sh.mail.Receive(ctx, rank, 0)
	if err != nil {
		return nil, h.ofGroup(err)
	}
	var of offer
	if err := of.read(w.Data, h); err != nil {
		return nil, err
	}
	o := &Opened{heap: h, number: of.Number, key: loanKey{rank, identity{of.Dev, of.Ino}, of.Off, of.Span}}
	err = h.openOffer(ctx, o, &of)
	said := []byte{wordOpened}
	if err != nil {
		said = append([]byte{wordRefused}, err.Error()...)
		said = said[:min(len(said), comm.MaxWord)]
	}
	if serr := sh.mail.Send(rank, toldOf(of.Number), said); serr != nil && err == nil { // nobody would take the memory back
		o.Close()
		err = h.ofGroup(serr)
	}
	if err != nil {
		return nil, err
	}
	return o, nil
}

// openOffer maps what has been offered.
func (h *Heap) openOffer(ctx context.Context, o *Opened, of *offer) error {
	sh := &h.shares
	src := source{id: o.key.id, off: of.Off, lead: of.Lead, span: of.Span, fd: -1, name: of.Name}
	if of.Descriptor { // it came first
		w, err := sh.mail.Receive(ctx, o.key.rank, descriptorOf(of.Number))
		if err != nil {
			return h.ofGroup(err)
		}
		for _, fd := range w.FDs {
			defer closeFD(fd)
		}
		if len(w.FDs) != 1 {
			return fmt.Errorf("malformed offer: %d descriptors", len(w.FDs))
		}
		src.fd = w.FDs[0]
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if h.closed.Load() {
		return errClosed
	}
	p := sh.loans[o.key]
	if p == nil {
		var err error
		if p, err = h.back.borrow(&src); err != nil {
			return err
		}
		sh.loans[o.key] = p
	}
	p.users++
	o.loan = p
	o.own.heap, o.own.lender, o.own.what = h, o.key.rank+1, "memory of another rank"
	o.view = View{own: &o.own, n: of.Bytes, elem: of.Elements}
	if p.mem != nil {
		o.view.mem = p.mem[of.Lead : of.Lead+of.Bytes : of.Lead+of.Bytes]
	} else {
		o.view.ptr = p.addr + uintptr(of.Lead)
	}
	if err := o.reach(of.Row, o.view.ptr); err != nil {
		return errors.Join(err, o.letGo())
	}
	o.row = of.Row
	sh.opened[o] = struct{}{}
	return nil
}

// reach has kernels of this rank find the memory at an address, where it has a row, or no more with 0.
func (o *Opened) reach(row int, addr uintptr) error {
	if row == 0 {
		return nil
	}
	h := o.heap
	at := kernels.AliasOffset + 8*int64(row*h.space.Size+o.key.rank)
	return h.gpu.write(h.at(h.space.Rank, at), []uintptr{addr})
}

// letGo unmaps what nothing else has open. mu of the shares is held.
func (o *Opened) letGo() error {
	if o.loan.users--; o.loan.users > 0 {
		return nil
	}
	delete(o.heap.shares.loans, o.key)
	return o.loan.unmap()
}

// View is the peer's memory, as long as it has shared. It is foreign to the heap: p2p.Endpoint puts into it and gets from it, and other calls
// take it as they take memory of their own device.
func (o *Opened) View() View { return o.view }

// Peer is the rank whose memory it is.
func (o *Opened) Peer() int { return o.heap.named(o.key.rank) }

// Close gives the memory back to its rank, which may then free it, and unmaps it unless it is open otherwise, too. The caller has waited for
// all work that uses it. It waits for no rank, and is idempotent.
func (o *Opened) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.own.freed.Swap(true) {
		return o.err
	}
	sh := &o.heap.shares
	sh.mu.Lock()
	delete(sh.opened, o)
	err := errors.Join(o.reach(o.row, 0), o.letGo())
	sh.mu.Unlock()
	// A rank that is gone needs no word.
	serr := sh.mail.Send(o.key.rank, toldOf(o.number), []byte{wordClosed})
	if serr != nil && !errors.Is(serr, comm.ErrPeerLost) && !errors.Is(serr, ErrClosed) {
		err = errors.Join(err, serr)
	}
	if err != nil {
		o.err = fmt.Errorf("memory: close memory of rank %d: %w", o.Peer(), err)
	}
	return o.err
}

// sharedPlace is where kernels of rank peer find v, which has no place in the heap, as long as they have it open: on GPUs, part of memory that
// this rank shares with that one. It is found by its identity, never by its address (M7).
func (h *Heap) sharedPlace(v View, peer int) (place int64, ok bool) {
	p := h.shares.placed.Load()
	if p == nil || len(*p) == 0 || v.own != nil {
		return 0, false
	}
	t := h.group.Topology()
	rank, located := t.LocalOf(peer), false
	var id identity
	var at int64
	for _, s := range *p {
		if s.rank != rank {
			continue
		}
		if !located {
			if id, at, located = h.back.locate(v); !located {
				return 0, false
			}
		}
		if s.id == id && at >= s.at && at+v.n <= s.at+s.n {
			return kernels.AliasPlace | int64(s.row)<<kernels.AliasShift | (at - s.at), true
		}
	}
	return 0, false
}

// begin comes before the heap's ranks meet for the first time.
func (sh *shares) begin(home *comm.Group) {
	sh.mail = home.Mail()
	sh.shared, sh.opened, sh.loans = make(map[*Shared]struct{}), make(map[*Opened]struct{}), make(map[loanKey]*loan)
}

// closeOpened closes what this rank has open, before the ranks meet for the last time.
func (sh *shares) closeOpened() error {
	sh.mu.Lock()
	all := make([]*Opened, 0, len(sh.opened))
	for o := range sh.opened {
		all = append(all, o)
	}
	sh.mu.Unlock()
	var err error
	for _, o := range all {
		err = errors.Join(err, o.Close())
	}
	return err
}

// Lender is the rank whose memory v is: of an Opened of this heap. ok is false for all other memory.
func (h *Heap) Lender(v View) (rank int, ok bool) {
	if v.own == nil || v.own.heap != h || v.own.lender == 0 {
		return 0, false
	}
	return h.named(v.own.lender - 1), true
}
