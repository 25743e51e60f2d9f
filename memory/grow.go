package memory

import (
	"context"
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/agree"
)

// settle notes the result of a collective call that changes the heap.
func (h *Heap) settle(err error) {
	var cut *agree.CutError
	if errors.As(err, &cut) {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.broken == nil {
			h.broken = fmt.Errorf("a collective call was cut off: %w", cut)
		}
	}
}

// begin opens a collective call, which end closes. A closed heap is closed on every rank. A broken one may be
// broken on this rank only, which then takes part with the error.
func (h *Heap) begin() (closed, broken error) {
	h.together.Lock()
	if h.closed.Load() {
		return errClosed, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return nil, h.broken
}

func (h *Heap) end() { h.together.Unlock() }

// Grow adds n bytes to the pool: after it, Alloc of n bytes finds room once. It is collective. The memory
// is zero, and no buffer extends over it and older memory. The error on every rank is comm.ErrMismatch if
// the ranks pass different n, ErrInvalid if n is not positive, ErrOutOfMemory if the heap would pass
// Options.ReserveBytes and ErrUnsupported on a heap of CUDA IPC memory (Options.LegacyIPC).
//
// On a GPU it can wait for kernels. If ctx ends during that wait, this rank's calls on the heap give up (comm.ErrAborted), and the heap can
// only be closed. The same holds for Register, Deregister and Close.
func (h *Heap) Grow(ctx context.Context, n int64) (err error) {
	defer h.span(ctx, n)(&err)
	err, broken := h.begin()
	defer h.end()
	if err == nil {
		err = h.grow(ctx, n, broken)
	}
	if err != nil {
		return fmt.Errorf("memory: grow by %d bytes: %w", n, err)
	}
	h.log.Info("memory: heap grown", "group", h.group.Name(), "rank", h.group.Rank(), "bytes", n)
	return nil
}

func (h *Heap) grow(ctx context.Context, n int64, broken error) (err error) {
	end := h.bounded(ctx)
	defer func() { err = end(err) }()
	last := h.extents[len(h.extents)-1]
	e := extent{off: last.off + last.n, n: roundUp(n, h.granule)}
	switch {
	case broken != nil:
		err = broken
	case n <= 0:
		err = fmt.Errorf("%w: not a size", ErrInvalid)
	case h.space.Segments != nil:
		err = fmt.Errorf("%w: a heap of CUDA IPC memory has one segment; make it with the SegmentBytes that it needs", ErrUnsupported)
	case e.n < 0 || e.n > h.limit-e.off:
		err = fmt.Errorf("%w: %d of the %d bytes of Options.ReserveBytes are committed", ErrOutOfMemory, e.off, h.limit)
	}
	if _, err = agree.On(ctx, h.group, agree.Claim{Op: "grow", Must: []agree.Value{agree.Named("bytes", n)}}, err); err != nil {
		return err
	}
	if err = h.commit(ctx, "grow: commit", e); err != nil {
		return err
	}
	if err = h.extendRail(ctx, e); err != nil {
		h.uncommit(e)
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.extents = append(h.extents, e)
	seg := h.pool.add(e.off, e.n)
	h.journal.add(call{kind: callGrow, seg: seg, size: e.n, off: e.off})
	return nil
}

// Verify compares the calls of the ranks on the heap so far. It is collective and the error is the same
// on every rank: a *DivergenceError (ErrDiverged) that names the first call that differs and the call of
// each rank. Without a difference it costs one all-gather of a few bytes.
func (h *Heap) Verify(ctx context.Context) error {
	err, _ := h.begin()
	defer h.end()
	if err == nil {
		err = h.verify(ctx)
	}
	var d *DivergenceError
	if err == nil || errors.As(err, &d) {
		return err
	}
	return fmt.Errorf("memory: verify: %w", err)
}

func (h *Heap) verify(ctx context.Context) error {
	h.mu.Lock()
	count, digest := h.journal.count, h.journal.digest
	mine := h.journal.appendTo(nil)
	h.mu.Unlock()
	all, err := agree.On(ctx, h.group, agree.Claim{Op: "verify", Info: []int64{count, int64(digest)}}, nil)
	if err != nil {
		return err
	}
	same := true
	for _, o := range all.Infos() {
		same = same && o[0] == all[0].Info[0] && o[1] == all[0].Info[1]
	}
	if same {
		return nil
	}
	msgs, err := h.group.AllGather(ctx, mine)
	if err != nil {
		return err
	}
	hs := make([]history, len(msgs))
	for r := range msgs {
		if hs[r], err = parseHistory(msgs[r]); err != nil {
			return fmt.Errorf("rank %d: %w", r, err)
		}
	}
	if d := diverged(hs); d != nil {
		return d
	}
	return nil
}
