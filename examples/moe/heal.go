package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

// errKilled is what the rank of -kill-rank ends with, where ranks are not processes.
var errKilled = errors.New("killed")

// heals says whether ranks that are left go on without one that is lost.
func (c config) heals() bool { return c.AtStep > 0 }

// kill ends this rank as a crash would.
func (w *worker) kill() error {
	if w.cfg.Join {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	w.group.Kill()
	return errKilled
}

// testament is what a rank knows when others are lost.
type testament struct {
	Rank  int // in the old group
	Done  int // steps
	Final int // see worker.final
	// Of one of the ranks that have done the most steps.
	History *history
	Balance [][]float32 // by layer
	Dense   []byte      // weights and moments of the dense part
}

// heal makes a worker of a smaller group out of a worker whose group has lost a rank. It is collective: all ranks that are left
// call it. The old worker is closed, whatever comes of it.
//
// The dense part of the model is on every rank, so it goes on where it was. So do experts of ranks that are left. Those of lost
// ranks are lost: other ranks begin with copies of experts of their own, which the router can tell apart by its own weights.
func (w *worker) heal(ctx context.Context) (*worker, error) {
	placement := w.moving.Placement()
	_ = w.close(ctx) // its errors are about the ranks that are lost
	g, err := w.group.Shrink(ctx)
	if err != nil {
		return nil, fmt.Errorf("go on without the ranks that are lost: %w", err)
	}
	fail := func(err error) (*worker, error) {
		g.Abort(err)
		g.Close()
		return nil, fmt.Errorf("go on without the ranks that are lost: %w", err)
	}

	// Some ranks may have done one step more than others: the last one's sums can be complete on some when a rank is lost.
	all, err := gather(ctx, g.AllGather, testament{Rank: w.rank, Done: w.done(), Final: w.final})
	if err != nil {
		return fail(err)
	}
	best := slices.MaxFunc(all, func(a, b testament) int { return a.Done - b.Done })
	mine := testament{}
	if w.rank == best.Rank {
		mine.History, mine.Dense = &w.history, w.model.dense()
		for _, l := range w.model.layers {
			mine.Balance = append(mine.Balance, l.balance)
		}
	}
	parts, err := gather(ctx, g.AllGather, mine)
	if err != nil {
		return fail(err)
	}
	common := parts[slices.IndexFunc(parts, func(t testament) bool { return t.History != nil })]
	if w.done() < best.Done {
		if w.done() != best.Done-1 || w.final != best.Done {
			return fail(fmt.Errorf("rank %d has done %d steps, rank %d %d", w.rank, w.done(), best.Rank, best.Done))
		}
		newAdam(best.Done, w.cfg.rateAt(best.Done)).apply(w.model.slabs[len(w.model.slabs)-1])
	}

	// Experts stay where they are; the ranks with the fewest take those that are lost.
	var left []int
	for _, t := range all {
		left = append(left, t.Rank)
	}
	p, had := &dispatch.Placement{}, make([]int, g.Size())
	copies := map[int]int{} // lost expert to the one it is a copy of, -1 for a new one
	for _, at := range placement.Ranks {
		r := slices.Index(left, at[0])
		if r >= 0 {
			had[r]++
		}
		p.Ranks = append(p.Ranks, []int{r})
	}
	for e, at := range p.Ranks {
		if at[0] >= 0 {
			continue
		}
		r := slices.Index(had, slices.Min(had))
		at[0], copies[e] = r, -1
		if own := placement.Local(left[r]); len(own) > 0 {
			copies[e] = own[len(copies)%len(own)]
		}
		had[r]++
	}

	n, err := newWorker(ctx, g, w.cfg, w.text, p)
	if err != nil {
		g.Close()
		return nil, err
	}
	n.history = *common.History
	n.Since = n.done() + 1
	n.Events = append(n.Events, event(w.ranks, left, n.Since, copies))
	n.model.setDense(common.Dense)
	n.model.clock.spent = w.model.clock.spent
	for i, l := range n.model.layers {
		copy(l.balance, common.Balance[i])
		for slot, e := range p.Local(n.rank) {
			from, whole := e, true
			if c, lost := copies[e]; lost {
				from, whole = c, false
			}
			if s := slices.Index(placement.Local(w.rank), from); s >= 0 {
				n.model.setExpert(i, slot, w.model, s, whole)
			}
		}
	}
	return n, nil
}

// gather hands every rank's testament to every rank.
func gather(ctx context.Context, all func(context.Context, []byte) ([][]byte, error), mine testament) ([]testament, error) {
	b, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	parts, err := all(ctx, b)
	if err != nil {
		return nil, err
	}
	ts := make([]testament, len(parts))
	for i, b := range parts {
		if err := json.Unmarshal(b, &ts[i]); err != nil {
			return nil, fmt.Errorf("rank %d: %w", i, err)
		}
	}
	return ts, nil
}

// event says what happened.
func event(ranks int, left []int, step int, copies map[int]int) string {
	var lost, experts, fresh []int
	var from []string
	for r := range ranks {
		if !slices.Contains(left, r) {
			lost = append(lost, r)
		}
	}
	for e := range copies {
		experts = append(experts, e)
	}
	slices.Sort(experts)
	for _, e := range experts {
		if c := copies[e]; c >= 0 {
			from = append(from, fmt.Sprintf("%d went on as a copy of %d", e, c))
		} else {
			fresh = append(fresh, e)
		}
	}
	s := fmt.Sprintf("%s lost in step %d. The others went on from there as ranks 0 to %d", were("Rank", lost), step, len(left)-1)
	if len(experts) > 0 {
		s += fmt.Sprintf(". %s lost too", were("Expert", experts))
	}
	if len(from) > 0 {
		s += ": " + strings.Join(from, ", ")
	}
	if len(fresh) > 0 {
		s += fmt.Sprintf(". %s began anew", list("Expert", fresh))
	}
	return s + "."
}

func were(what string, of []int) string {
	if len(of) == 1 {
		return list(what, of) + " was"
	}
	return list(what, of) + " were"
}

// list is like "ranks 1, 2".
func list(what string, of []int) string {
	if len(of) != 1 {
		what += "s"
	}
	return what + " " + strings.Trim(strings.ReplaceAll(fmt.Sprint(of), " ", ", "), "[]")
}

// dense is the weights of the dense part and their moments, one after the other.
func (m *model) dense() []byte {
	var b []byte
	for _, s := range m.slabs[:len(m.slabs)-1] {
		for _, v := range [][]float32{s.w, s.m, s.v} {
			b = append(b, memory.Wrap(v).Bytes()...)
		}
	}
	return b
}

func (m *model) setDense(b []byte) {
	for _, s := range m.slabs[:len(m.slabs)-1] {
		for _, v := range [][]float32{s.w, s.m, s.v} {
			b = b[copy(memory.Wrap(v).Bytes(), b):]
		}
	}
}

// setExpert makes an expert of a layer the same as one of another model: with the moments of its weights if it is to go on as the
// same one.
func (m *model) setExpert(layer, slot int, from *model, fromSlot int, moments bool) {
	n := expertSize(m.cfg)
	to, s := m.slabs[len(m.slabs)-1], from.slabs[len(from.slabs)-1]
	at, fromAt := (layer*len(m.layers[layer].experts)+slot)*n, (layer*len(from.layers[layer].experts)+fromSlot)*n
	copy(to.w[at:at+n], s.w[fromAt:])
	if moments {
		copy(to.m[at:at+n], s.m[fromAt:])
		copy(to.v[at:at+n], s.v[fromAt:])
	}
}
