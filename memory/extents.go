package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/internal/agree"
)

// extent is a piece of a segment that was committed at once.
type extent struct{ off, n int64 }

// adopt has all ranks of this process use the range of the first.
func (h *Heap) adopt(ctx context.Context) error {
	all, err := h.home.Share(ctx, h.back)
	if err == nil && h.home.Rank() != 0 {
		err = h.back.adopt(all[0].(backing))
	}
	_, err = agree.On(ctx, h.group, agree.Claim{Op: "adopt"}, err)
	return err
}

// commit gives every rank memory for e of its segment, maps it everywhere and binds it to multicast objects if the heap has them. On an
// error this rank keeps none of it.
func (h *Heap) commit(ctx context.Context, op string, e extent) error {
	fd, err := h.back.create(e.n)
	if err != nil {
		fd = -1
	} else {
		defer closeFD(fd)
	}
	parts := h.everyone(e)
	if err = h.placeAll(ctx, op, fd, parts, err); err != nil || h.multi == nil {
		return err
	}
	if err = h.bindAll(ctx, op, fd, e); err != nil {
		h.uncommit(e)
	}
	return err
}

// uncommit takes back what commit has mapped.
func (h *Heap) uncommit(e extent) {
	parts := h.everyone(e)
	if !h.home.InProcess() {
		h.displaceAll(h.peers(), parts)
	}
	h.displaceAll([]int{h.space.Rank}, parts)
}

// everyone is e in the segment of every rank of the host.
func (h *Heap) everyone(e extent) []part {
	parts := make([]part, h.home.Size())
	for r := range parts {
		parts[r] = part{place: e.off, n: e.n}
	}
	return parts
}

// part is the memory that one rank shows to all others: n bytes from off on behind its descriptor, at place of
// its segment.
type part struct{ place, off, n int64 }

// placeAll maps the part of every rank of the host on all of them, this rank's from fd. err is this rank's reason not to, if
// it has one already. On an error this rank has mapped nothing.
func (h *Heap) placeAll(ctx context.Context, op string, fd int, parts []part, err error) error {
	me := h.home.Rank()
	var placed []int
	place := func(r, fd int) error {
		p := parts[r]
		if p.n == 0 {
			return nil
		}
		err := h.back.place(h.at(r, p.place), fd, p.off, p.n)
		if err == nil {
			placed = append(placed, r)
		}
		return err
	}
	if err == nil {
		err = place(me, fd)
	}
	if !h.home.InProcess() {
		// ranks pass descriptors only if all can, and if there are any
		some := slices.ContainsFunc(parts, func(p part) bool { return p.n > 0 })
		if _, err = agree.On(ctx, h.group, agree.Claim{Op: op + ": export"}, err); err == nil && some {
			err = h.importAll(ctx, fd, parts, place)
		}
		var cut *agree.CutError
		if errors.As(err, &cut) {
			h.displaceAll(placed, parts)
			return err
		}
	}
	if _, err = agree.On(ctx, h.group, agree.Claim{Op: op}, err); err != nil {
		h.displaceAll(placed, parts)
	}
	return err
}

// importAll maps the parts of the other ranks.
func (h *Heap) importAll(ctx context.Context, fd int, parts []part, place func(r, fd int) error) error {
	me := h.home.Rank()
	var mine []int
	if parts[me].n > 0 {
		mine = []int{fd}
	}
	again := h.home.Replaying() // then the others have mapped what the lost rank had
	fds, err := h.home.ExchangeFDs(ctx, mine)
	for r := range fds {
		for i, fd := range fds[r] {
			if (r != me || again) && i == 0 && err == nil {
				err = place(r, fd)
			}
			err = errors.Join(err, closeFD(fd))
		}
	}
	for r, p := range parts {
		if err == nil && p.n > 0 && len(fds[r]) != 1 {
			err = fmt.Errorf("rank %d passed %d descriptors instead of one", r, len(fds[r]))
		}
	}
	return err
}

func (h *Heap) displaceAll(ranks []int, parts []part) {
	for _, r := range ranks {
		if parts[r].n == 0 {
			continue
		}
		if err := h.back.displace(h.at(r, parts[r].place), parts[r].n); err != nil {
			h.log.Warn("memory: displace", "rank", h.space.Rank, "of", r, "error", err)
		}
	}
}

// at is where an offset of rank r's segment lies in the range.
func (h *Heap) at(r int, off int64) int64 { return int64(r)*h.space.Stride + off }
