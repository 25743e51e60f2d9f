package memory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// The importer's side of memory that one rank shares with one other; see shares for both.

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
// When ctx ends first the error names the peer and says that nothing is shared (comm.ErrTimeout at a deadline), and the
// next Open finds what it shares. Each Open is for one Share: that of an offer which the peer has withdrawn meanwhile is an ErrFreed with its
// number and length. Memory that cannot be mapped is refused: the error says why, and the peer has it back. The failure of the group ends the
// call. A rank on another host is an ErrUnsupported.
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
	of, err := h.nextOffer(ctx, rank)
	if err != nil {
		return nil, err
	}
	ticket, ok, err := sh.mail.Take(rank, ticketOf(of.Number))
	for _, fd := range ticket.FDs {
		defer closeFD(fd)
	}
	if err == nil && !ok {
		_ = sh.mail.Send(rank, topicWithdrawn, []byte{wordWithdrawn}) // a rank that is gone needs no word
		return nil, fmt.Errorf("%w: the rank has withdrawn its offer %d, of %d bytes, which this rank had not opened", ErrFreed, of.Number, of.Bytes)
	}
	o := &Opened{heap: h, number: of.Number, key: loanKey{rank, identity{of.Dev, of.Ino}, of.Off, of.Span}}
	if err == nil {
		err = h.openOffer(o, of, ticket.FDs)
	}
	said := []byte{wordOpened}
	if err != nil {
		said = append([]byte{wordRefused}, err.Error()...)
		said = said[:min(len(said), comm.MaxWord)]
	}
	if serr := sh.mail.Send(rank, answersTo(of.Number), said); serr != nil && err == nil { // nobody would take the memory back
		o.Close()
		err = serr
	}
	if err != nil {
		return nil, h.ofGroup(err)
	}
	return o, nil
}

// nextOffer waits for the oldest offer of a rank that this one has not taken.
func (h *Heap) nextOffer(ctx context.Context, rank int) (*offer, error) {
	defer h.waitsFor(ctx, opOpen, rank)()
	w, err := h.shares.mail.Receive(ctx, rank, topicOffers)
	if ctx.Err() != nil && err != nil {
		return nil, fmt.Errorf("it has shared nothing with this rank that is not taken: %w", h.ofGroup(err))
	}
	if err != nil {
		return nil, h.ofGroup(err)
	}
	of := new(offer)
	if err = json.Unmarshal(w.Data, of); err == nil && of.Number == 0 {
		err = errors.New("no number")
	}
	if err != nil {
		return nil, fmt.Errorf("malformed offer: %w", err)
	}
	return of, nil
}

// openOffer maps what has been offered, with the descriptors of its ticket.
func (h *Heap) openOffer(o *Opened, of *offer, fds []int) error {
	if err := of.check(h); err != nil {
		return err
	}
	sh := &h.shares
	src := source{id: o.key.id, off: of.Off, lead: of.Lead, span: of.Span, fd: -1, name: of.Name}
	if of.Descriptor {
		if len(fds) != 1 {
			return fmt.Errorf("malformed offer: %d descriptors", len(fds))
		}
		src.fd = fds[0]
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
	if err := o.setRow(of.Row, o.view.ptr); err != nil {
		return errors.Join(err, o.unmap())
	}
	o.row = of.Row
	sh.opened[o] = struct{}{}
	return nil
}

// setRow has kernels of this rank find the memory at an address, where it has a row, or no more with 0.
func (o *Opened) setRow(row int, addr uintptr) error {
	if row == 0 {
		return nil
	}
	h := o.heap
	at := kernels.AliasOffset + 8*int64(row*h.space.Size+o.key.rank)
	return h.gpu.write(h.at(h.space.Rank, at), []uintptr{addr})
}

// unmap unmaps what nothing else has open. mu of the shares is held.
func (o *Opened) unmap() error {
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
	err := errors.Join(o.setRow(o.row, 0), o.unmap())
	sh.mu.Unlock()
	// A rank that is gone needs no word.
	if serr := sh.mail.Send(o.key.rank, answersTo(o.number), []byte{wordClosed}); serr != nil && !over(serr) {
		err = errors.Join(err, serr)
	}
	if err != nil {
		o.err = fmt.Errorf("memory: close memory of rank %d: %w", o.Peer(), err)
	}
	return o.err
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
