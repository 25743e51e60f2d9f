package cuda

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

const (
	maskBytes, maskAt, asksAt, takenAt = 112, 0, 8, 16 // of maskWords, and where its words are
	maskRequestsAt                     = 2048          // of a fault record's memory
	maskAskEvery                       = 200 * time.Microsecond
)

// maskable says what of the bounds cannot go on without ranks. Kernels for many tokens wait for each other's places, so they need more than a
// mask; and a rank that comes back has to find the handle that the others use next.
func (x *dispatches) maskable() error {
	switch m := x.m; {
	case !m.Masks:
		return nil
	case !x.few() || m.Layout == kernels.TokenRows:
		return fmt.Errorf("kernels: dispatch: Masks on a GPU needs LowLatency, and tokens and experts that are few enough for its kernels: at most %d tokens, %d slots, not layout %v", dispatchFewTokens, dispatchFewSlots, kernels.TokenRows)
	case len(m.Handles) > 1:
		return fmt.Errorf("kernels: dispatch: Masks on a GPU is for one handle, there are %d", len(m.Handles))
	}
	return nil
}

// requests are what this rank's host wants to be masked.
func (p *port) requests() *maskRequests {
	return cuda.StructOf[maskRequests](p.fault.Bytes()[maskRequestsAt:])
}

// readMask is a word of a rank's struct sw_mask, readWord one at any place.
func (p *port) readMask(r int, at int64) (uint64, error) { return p.readWord(r, p.offset+at) }

func (p *port) readWord(r int, at int64) (uint64, error) {
	var word [8]byte
	if err := p.e.ctx.Read(p.masking, word[:], p.e.space.Addr(r, at)); err != nil {
		return 0, fmt.Errorf("kernels: %s: read masks of rank %d: %w", p.name, r, err)
	}
	return binary.LittleEndian.Uint64(word[:]), nil
}

// runMask runs a kernel while those of calls run, and waits for it.
func (p *port) runMask(f cuda.Function, a *maskArgs) error {
	a.world, a.masks = p.world(0, 0), p.offset
	p.maskBatch.Reset()
	p.maskBatch.Launch(0, cuda.Launch{Function: f, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{32, 1, 1}, Args: cuda.BytesOf(a)})
	if err := p.e.ctx.Submit(&p.maskBatch, uintptr(p.masking)); err != nil {
		return err
	}
	return p.e.ctx.SynchronizeStream(p.masking)
}

// Mask has calls go on without a rank, on all ranks. ended says that its process has ended. This rank's kernels learn of it in pinned memory,
// also while the driver is busy; a kernel tells all ranks.
func (p *port) Mask(rank int, ended bool) {
	p.masksMu.Lock()
	defer p.masksMu.Unlock()
	p.mask(rank, ended)
}

// mask is Mask. masksMu is held.
func (p *port) mask(rank int, ended bool) {
	q := p.requests()
	a := maskArgs{bits: 1 << rank, rank: uint32(rank)}
	if ended {
		a.bits |= a.bits << maskEnded
		atomic.OrUint32(&q.ended, 1<<rank)
	}
	a.number = atomic.AddUint32(&q.number[rank], 1)
	a.total = atomic.AddUint32(&q.total, 1)
	if err := p.runMask(p.fam.(*dispatches).masked.mask, &a); err != nil {
		p.maskFailed(fmt.Errorf("kernels: %s: mask rank %d: %w", p.name, rank, err))
	}
}

// maskFailed keeps what went wrong for Fault.
func (p *port) maskFailed(err error) { p.maskErr.CompareAndSwap(nil, &err) }

// Masked are the ranks that are masked, as this rank knows.
func (p *port) Masked() (ranks []int) {
	p.masksMu.Lock()
	defer p.masksMu.Unlock()
	word, err := p.readMask(p.e.space.Rank, maskAt)
	if err != nil {
		p.maskFailed(err)
	}
	for word &= 1<<kernels.MaxMaskedRanks - 1; word != 0; word &= word - 1 {
		ranks = append(ranks, bits.TrailingZeros64(word))
	}
	return ranks
}

// Unmask has the other ranks take this one in again, from the call after a combine on. It waits for all of this rank's launches, also those
// of graphs.
func (p *port) Unmask(ctx context.Context) (calls uint64, err error) {
	if err := p.e.ctx.Synchronize(); err != nil {
		return 0, err
	}
	p.masksMu.Lock()
	defer p.masksMu.Unlock()
	me, control := p.e.space.Rank, p.fam.controls(p.offset)[0]
	mask, err := p.readMask(me, maskAt)
	if err != nil {
		return 0, err
	}
	made, err := p.readWord(me, control)
	if err != nil || mask>>me&1 == 0 {
		return made, err
	}
	taken := func() (takenWord, error) {
		word, err := p.readMask(0, takenAt)
		return takenWord(word), err
	}
	before, err := taken() // what was decided of this rank earlier
	if err == nil {
		err = p.ask(1)
	}
	for err == nil {
		var now takenWord
		if now, err = taken(); err != nil {
			break
		}
		if ahead := now.after(made); now != before && ahead >= 0 && now.admitted()>>me&1 != 0 {
			a := maskArgs{bits: (1<<p.e.space.Size - 1) &^ now.members(), epoch: made + uint64(ahead), control: control}
			return a.epoch, p.runMask(p.fam.(*dispatches).masked.unmask, &a)
		}
		switch {
		case ctx.Err() != nil:
			err = context.Cause(ctx)
		case p.e.why() != nil:
			err = comm.ErrAborted
		default:
			time.Sleep(maskAskEvery)
		}
	}
	err = errors.Join(err, p.ask(0))
	p.mask(me, false) // where they have taken it in just now
	return 0, err
}

// ask says whether this rank wants to be unmasked.
func (p *port) ask(word byte) error {
	return p.e.ctx.Write(p.masking, p.e.space.Addr(p.e.space.Rank, p.offset)+asksAt, []byte{word, 0, 0, 0, 0, 0, 0, 0})
}

// takenWord is what is decided at a combine: who takes part behind it, who of them does again, and the low half of its number.
type takenWord uint64

func (t takenWord) members() uint64 { return uint64(t) & (1<<kernels.MaxMaskedRanks - 1) }
func (t takenWord) admitted() uint64 {
	return uint64(t) >> kernels.MaxMaskedRanks & (1<<kernels.MaxMaskedRanks - 1)
}

// after is how many calls the combine is after another call.
func (t takenWord) after(epoch uint64) int64 { return int64(int32(uint32(t>>32) - uint32(epoch))) }
