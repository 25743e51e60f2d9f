package memory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Memory that one rank shares with one other, without the rest: the exporter offers it, the importer opens it. They talk by words (comm.Mail)
// of the group of their host. An offer has a number, from 1 on, and comes behind its ticket, a word that the importer takes to open the
// memory: an exporter that takes the ticket back has withdrawn the offer, and one of the two gets it, also at the same moment.

// shares are what a heap has of such memory. Ranks are those of the host.
type shares struct {
	mail *comm.Mail

	mu     sync.Mutex
	last   uint32 // the number of the newest offer
	shared map[*Shared]struct{}
	opened map[*Opened]struct{}
	loans  map[loanKey]*loan // that this rank has mapped
	// withdrawn counts by rank the offers that were, and that the rank has not found so.
	withdrawn map[int]int

	// inRows has those of shared that have a row, for lookups.
	inRows atomic.Pointer[[]*Shared]
	waits  waits
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

// check refuses what no exporter offers to h.
func (of *offer) check(h *Heap) error {
	first := kernels.AliasRows(h.space.Size)
	row := of.Row == 0 || h.gpu != nil && of.Row >= first && of.Row < first+kernels.ShareRows(h.space.Size)
	end := of.Lead + of.Bytes
	if of.Bytes <= 0 || of.Lead < 0 || of.Span < 0 || end < 0 || of.Span > 0 && end > of.Span || h.gpu == nil && !of.Descriptor || !row {
		return fmt.Errorf("malformed offer: %d bytes from byte %d of %d, row %d", of.Bytes, of.Lead, of.Span, of.Row)
	}
	return nil
}

// Topics of words: of offers, and of those of the importer that an offer was withdrawn when it came to it.
const (
	topicOffers    = 0
	topicWithdrawn = 1
)

// ticketOf is the topic of the ticket of an offer: its descriptor, or wordTicket where it has none. answersTo is that of the importer's answers.
func ticketOf(number uint32) uint32  { return 2 * number }
func answersTo(number uint32) uint32 { return 2*number + 1 }

// An importer answers an offer by one of these, and the reason behind a refusal.
const (
	wordOpened  = 'o'
	wordClosed  = 'c'
	wordRefused = 'r'

	wordTicket    = 't'
	wordWithdrawn = 'w'
)

// maxShared bounds the offers of a rank to one other that are not closed, with those withdrawn that the other has not come to.
const maxShared = 1024

// answerGrace is how long an exporter that withdraws an offer waits for the process of its importer to answer.
const answerGrace = time.Second

// Shared is memory of this rank that one other rank may open. See Heap.Share.
type Shared struct {
	heap   *Heap
	rank   int // of the host
	number uint32
	id     identity
	at     int64 // the first byte in what id names
	n      int64
	row    int

	mu     sync.Mutex // held by Wait and Close
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
// offers to the rank are not closed or were withdrawn and it has not come to them, and comm.ErrPeerLost for a rank that is gone.
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
	if open, withdrawn := sh.offered(rank), sh.unfound(rank); open+withdrawn >= maxShared {
		return nil, fmt.Errorf("%w: %d shares with that rank are not closed, and %d were withdrawn and have not been opened since", ErrOutOfMemory, open, withdrawn)
	}
	sh.last++
	o.Number, o.Row = sh.last, h.freeRow(rank)
	text, err := json.Marshal(&o)
	if err != nil {
		return nil, err
	}
	if o.Descriptor {
		err = sh.mail.Send(rank, ticketOf(o.Number), nil, src.fd)
	} else {
		err = sh.mail.Send(rank, ticketOf(o.Number), []byte{wordTicket})
	}
	if err != nil {
		return nil, err
	}
	if err := sh.mail.Send(rank, topicOffers, text); err != nil {
		return nil, err
	}
	s := &Shared{heap: h, rank: rank, number: o.Number, id: src.id, at: src.at, n: v.n, row: o.Row}
	sh.shared[s] = struct{}{}
	sh.listRows()
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

// listRows lists what is in rows. mu is held.
func (sh *shares) listRows() {
	var all []*Shared
	for s := range sh.shared {
		if s.row != 0 {
			all = append(all, s)
		}
	}
	sh.inRows.Store(&all)
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

// unfound counts the offers to a rank that were withdrawn, and that the rank has not come to. mu is held.
func (sh *shares) unfound(rank int) int {
	for sh.withdrawn[rank] > 0 {
		if _, found, err := sh.mail.Take(rank, topicWithdrawn); !found || err != nil {
			break
		}
		sh.withdrawn[rank]--
	}
	return sh.withdrawn[rank]
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

// Wait returns nil once the peer has opened and closed the memory, has refused it, or is gone: it may then be freed (M4). When ctx ends first
// the error names the peer and says whether it has opened the memory (comm.ErrTimeout at a deadline), and the memory is still shared.
func (s *Shared) Wait(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wait(ctx)
}

// Close takes the memory back. It waits as Wait does. Where the peer has not opened the memory when ctx ends, Close withdraws the offer and
// returns nil: the peer's Open of it is an ErrFreed. So with a context that has ended Close withdraws at once what is not open. An error says
// that the memory is still shared, since the peer has it open, is opening it, or its process has not answered for 1 s; Close can be called
// again. It is idempotent.
func (s *Shared) Close(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.wait(ctx)
	if err != nil && !s.opened {
		err = s.withdraw()
	}
	return err
}

// wait is Wait. mu is held.
func (s *Shared) wait(ctx context.Context) error {
	h := s.heap
	defer h.waitsFor(ctx, opTakeBack, s.rank)()
	for !s.ended {
		switch w, err := h.shares.mail.ReceiveLast(ctx, s.rank, answersTo(s.number)); {
		case over(err):
			s.ended = true
		case err != nil && s.opened:
			return fmt.Errorf("memory: take back %d bytes: rank %d has them open: %w", s.n, h.named(s.rank), h.ofGroup(err))
		case err != nil:
			return fmt.Errorf("memory: take back %d bytes: rank %d has not opened them: %w", s.n, h.named(s.rank), h.ofGroup(err))
		default:
			s.opened = len(w.Data) == 1 && w.Data[0] == wordOpened
			s.ended = !s.opened
		}
	}
	h.shares.forget(s, false)
	return nil
}

// withdraw takes the ticket of an offer back, or finds that the peer has taken it. mu is held.
func (s *Shared) withdraw() error {
	h := s.heap
	ctx, cancel := context.WithTimeout(context.Background(), answerGrace)
	defer cancel()
	recalled, err := h.shares.mail.Recall(ctx, s.rank, ticketOf(s.number))
	switch {
	case over(err) || err == nil && recalled:
		s.ended = true
		h.shares.forget(s, err == nil)
		return nil
	case err != nil:
		return fmt.Errorf("memory: take back %d bytes: rank %d does not say whether it has opened them: %w", s.n, h.named(s.rank), h.ofGroup(err))
	}
	return s.wait(ctx) // the peer opens it, and says how that went
}

// over says that nothing more comes of a peer, or that this rank has closed the heap.
func over(err error) bool { return errors.Is(err, comm.ErrPeerLost) || errors.Is(err, ErrClosed) }

// forget ends what this rank notes of memory that it has shared.
func (sh *shares) forget(s *Shared, withdrawn bool) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	delete(sh.shared, s)
	if sh.listRows(); withdrawn {
		sh.withdrawn[s.rank]++
	}
}

// ofGroup is an error of the group of this host, whose ranks are numbered as in the heap's group.
func (h *Heap) ofGroup(err error) error {
	var p *comm.PeerError
	if h.home == h.group || !errors.As(err, &p) {
		return err
	}
	return &comm.PeerError{Rank: h.named(p.Rank), Op: p.Op, Epoch: p.Epoch, Err: p.Err}
}

// sharedPlace is where kernels of rank peer find v, which has no place in the heap, as long as they have it open: on GPUs, part of memory that
// this rank shares with that one. It is found by its identity, never by its address (M7).
func (h *Heap) sharedPlace(v View, peer int) (place int64, ok bool) {
	p := h.shares.inRows.Load()
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
	sh.shared, sh.opened, sh.loans, sh.withdrawn = make(map[*Shared]struct{}), make(map[*Opened]struct{}), make(map[loanKey]*loan), make(map[int]int)
}
