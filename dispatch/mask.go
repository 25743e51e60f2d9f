package dispatch

import (
	"context"
	"fmt"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Mask has the calls of all ranks go on without a rank, also those under way (Options.Masks): they end with what the others have sent.
// Tokens go to copies of its experts on other ranks, as the placement has them; a choice whose expert has none counts as -1. The rank
// counts as one without tokens. Of a dispatch under way, rows of the rank that may be incomplete become zeros, with no source, weight
// 0 and 0 in RankCounts once the call has ended; the handle's other counts stay as they were told. Combines leave out the rows that
// the rank has not shown.
//
// On GPUs ranks do not agree on whom a call under way does without: one rank may have got the rows of the masked rank and another may
// not. A dispatch has all of its rows or none, and so has a combine. Waits end some milliseconds after this rank knows of a loss.
//
// A rank that the group loses is masked by itself, and the group works on until a rank next calls it: SetPlacement, Close, and New of
// anything. Calls of the masked rank return a *MaskedError. Calls to which it may be writing wait until it is through or its
// process has ended, so end a process that is stopped. Any rank may call Mask, at any time; on GPUs not of a rank that is being taken in again
// (Unmask): until all ranks are through the combine behind which it is, ranks that are in that combine can miss the Mask, and their next call
// waits for the rank until Options.Timeout.
func (d *Dispatcher) Mask(rank int) error {
	if err := d.masks("Mask"); err != nil {
		return err
	}
	if rank < 0 || rank >= d.bounds.Ranks {
		return invalid("Mask of rank %d, there are %d", rank, d.bounds.Ranks)
	}
	_, err := d.maskMemory(func(m kernels.Masker) []int { m.Mask(rank, false); return nil })
	return err
}

// Masked are the ranks that are masked, in ascending order, as this rank knows: a rank that is unmasked is known from the next call on.
func (d *Dispatcher) Masked() ([]int, error) {
	if err := d.masks("Masked"); err != nil {
		return nil, err
	}
	return d.maskMemory(kernels.Masker.Masked)
}

// Unmask has the others take this rank in again, if it is masked: it returns during one of their combines, and the call after that is
// this rank's next. calls is how many calls the others have made by then, halves not counted: where a step has several, the rank makes
// those that are left of it without tokens. Handles of earlier dispatches can only be released, on all ranks. The rank waits for its
// own launches first. After an error, that of ctx for example, it is masked as before.
func (d *Dispatcher) Unmask(ctx context.Context) (calls uint64, err error) {
	if err := d.masks("Unmask"); err != nil {
		return 0, err
	}
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.c.Whole(); err != nil {
		return 0, err
	}
	if err := d.c.Group.CatchUp(); err != nil {
		return 0, fmt.Errorf("dispatch: unmask: %w", err)
	}
	err = d.c.Wait()
	if err == nil || kernels.Recoverable(err) {
		err = d.usable() // which tells that this rank is masked
	}
	if err != nil && !kernels.Recoverable(err) {
		return 0, fmt.Errorf("dispatch: unmask: %w", err)
	}
	if calls, err = d.c.Port().(kernels.Masker).Unmask(ctx); err != nil {
		return 0, fmt.Errorf("dispatch: unmask: %w", err)
	}
	return calls, nil
}

// masks refuses a call that needs Options.Masks.
func (d *Dispatcher) masks(call string) error {
	if !d.options.Masks {
		return invalid("%s needs Options.Masks", call)
	}
	return nil
}

// unmaskable refuses a call that cannot go on without ranks.
func (d *Dispatcher) unmaskable(call string) error {
	if d.options.Masks {
		return fmt.Errorf("dispatch: %w: %s with Options.Masks", comm.ErrUnsupported, call)
	}
	return nil
}

// maskMemory has f use the masks, also while a call of this rank runs.
func (d *Dispatcher) maskMemory(f func(kernels.Masker) []int) ([]int, error) {
	d.masking.Lock()
	defer d.masking.Unlock()
	if d.masksOver {
		return nil, fmt.Errorf("dispatch: %w", comm.ErrClosed)
	}
	return f(d.c.Port().(kernels.Masker)), nil
}

// endMasks comes before the memory goes.
func (d *Dispatcher) endMasks() {
	if d.stopMasks != nil {
		d.stopMasks()
	}
	d.masking.Lock()
	defer d.masking.Unlock()
	d.masksOver = true
}
