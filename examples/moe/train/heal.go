package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/nn"
	"github.com/switchyard-moe/switchyard/examples/moe/report"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/memory"
)

// errKilled is what the rank of -kill-rank ends with, where ranks are not processes.
var errKilled = errors.New("killed")

// kill ends this rank as a crash would.
func (w *worker) kill() error {
	if w.cfg.Join {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	w.group.Kill()
	return errKilled
}

// testament is what a rank knows when the ranks change.
type testament struct {
	Rank  int   // in the old group, -1 for one that is new
	Done  int   // steps
	Final int   // see worker.final
	Mine  []int // the rank's experts
	// Of one of the ranks that have done the most steps.
	History *report.History
	Balance [][]float32 // by layer
	Experts [][]int     // where they were
	Ranks   int         // how many there were
}

// heal makes a worker of a smaller group out of a worker whose group has lost a rank. It is collective: all ranks that are left
// call it. The old worker is closed, whatever comes of it.
func (w *worker) heal(ctx context.Context) (*worker, error) {
	_ = w.close(ctx) // its errors are about the ranks that are lost
	g, err := w.group.Shrink(ctx)
	if err != nil {
		return nil, fmt.Errorf("go on without the ranks that are lost: %w", err)
	}
	n, err := carryOn(ctx, g, w.cfg, w.text, w)
	if err != nil {
		return nil, fmt.Errorf("go on without the ranks that are lost: %w", err)
	}
	return n, nil
}

// admitFor is how long ranks wait for a fresh one. Tests have less patience.
var admitFor = 30 * time.Second

// meeting says where a fresh rank meets the others.
func meeting(c config.Config) comm.Config {
	return comm.Config{Addr: c.MeetAt, Secret: c.Secret, JoinTimeout: admitFor, Name: "moe"}
}

// grow makes a worker of a larger group, with a fresh rank, between two steps. It is collective: the fresh rank calls carryOn. When
// none comes, the worker stays what it is.
func (w *worker) grow(ctx context.Context) (*worker, error) {
	w.Asked = true
	g, err := w.group.Admit(ctx, 1, meeting(w.cfg))
	if errors.Is(err, comm.ErrTimeout) && w.group.Err() == nil {
		w.Events = append(w.Events, fmt.Sprintf("No fresh rank came within %v before step %d.", admitFor, w.Done()+1))
		return w, nil
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("let a fresh rank in: %w", err), w.close(ctx))
	}
	if err = errors.Join(w.close(ctx), agree(ctx, g, w.cfg, w.text)); err != nil {
		g.Abort(err)
		g.Close()
		return nil, fmt.Errorf("let a fresh rank in: %w", err)
	}
	n, err := carryOn(ctx, g, w.cfg, w.text, w)
	if err != nil {
		return nil, fmt.Errorf("let a fresh rank in: %w", err)
	}
	return n, nil
}

// carryOn makes a worker of a group that has come of another one by loss or admission. It is collective. Ranks that were in the
// other group pass their worker of there, closed; a fresh one passes nil.
//
// The dense part of the model is on every rank; a fresh one gets it. Experts stay where they are. Those of lost ranks are lost: other
// ranks begin with copies of experts of their own, which the router can tell apart by its own weights. A fresh rank gets experts
// from those that have most.
func carryOn(ctx context.Context, g *comm.Group, c config.Config, text *text.Corpus, old *worker) (*worker, error) {
	fail := func(err error) (*worker, error) {
		g.Abort(err)
		g.Close()
		return nil, err
	}
	// Some ranks may have done one step more than others: the last one's sums can be complete on some when a rank is lost.
	mine := testament{Rank: -1}
	if old != nil {
		mine = testament{Rank: old.rank, Done: old.Done(), Final: old.final, Mine: old.experts()}
	}
	all, err := gather(ctx, g.AllGather, mine)
	if err != nil {
		return fail(err)
	}
	best := 0 // in the new group
	var was []int
	for r, t := range all {
		was = append(was, t.Rank)
		if t.Rank >= 0 && (all[best].Rank < 0 || t.Done > all[best].Done) {
			best = r
		}
	}
	mine = testament{}
	if g.Rank() == best {
		mine.History, mine.Experts, mine.Ranks = &old.History, old.dispatcher.Placement().Ranks, old.ranks
		for _, l := range old.model.Layers {
			mine.Balance = append(mine.Balance, l.Balance)
		}
	}
	parts, err := gather(ctx, g.AllGather, mine)
	if err != nil {
		return fail(err)
	}
	common, before := parts[best], standing(parts[best].Experts, all)
	if done := all[best].Done; old != nil && old.Done() < done {
		if old.Done() != done-1 || old.final != done {
			return fail(fmt.Errorf("rank %d has done %d steps, rank %d %d", old.rank, old.Done(), was[best], done))
		}
		nn.NewAdam(done, c.RateAt(done)).Apply(old.model.Experts())
	}

	p, moves := before.Follow(was)
	w, err := newWorker(ctx, g, c, text, p)
	if err != nil {
		return fail(err)
	}
	w.History = *common.History
	first := w.Done() + 1
	w.Changes = append(w.Changes, first)
	w.Events = append(w.Events, event(common.Ranks, was, before, first, moves))
	for i, l := range w.model.Layers {
		copy(l.Balance, common.Balance[i])
	}
	if old != nil {
		w.model.Clock.Spent = old.model.Clock.Spent
		kept := old.experts()
		for slot, e := range p.Local(w.rank) {
			if s := slices.Index(kept, e); s >= 0 {
				copyAll(w.model.Expert(slot), old.model.Expert(s))
			}
		}
	}
	if err := w.inherit(ctx, best, old, before, p, moves); err != nil {
		g.Abort(err) // the others need not wait for this rank
		return fail(errors.Join(err, w.close(ctx)))
	}
	return w, nil
}

// experts are those of this rank, in the order in which its model has them.
func (w *worker) experts() []int { return w.dispatcher.Placement().Local(w.rank) }

// standing is where experts are, in the numbers of the old group: by one rank's placement, but that of the ranks which are left each has its
// own. These differ where a rank was lost while experts moved.
func standing(placement [][]int, left []testament) *dispatch.Placement {
	p := &dispatch.Placement{Ranks: make([][]int, len(placement))}
	for e, at := range placement {
		p.Ranks[e] = slices.DeleteFunc(slices.Clone(at), func(r int) bool {
			return !slices.ContainsFunc(left, func(t testament) bool { return t.Rank == r && slices.Contains(t.Mine, e) })
		})
		found := len(p.Ranks[e]) > 0
		for _, t := range left {
			if !found && t.Rank >= 0 && slices.Contains(t.Mine, e) {
				p.Ranks[e] = append(p.Ranks[e], t.Rank)
			}
		}
	}
	return p
}

// inherit brings what is new on a rank there: the dense part from rank best, and the experts that have moved.
func (w *worker) inherit(ctx context.Context, best int, old *worker, before, now *dispatch.Placement, moves []dispatch.Move) error {
	x, err := allreduce.New(ctx, w.heap, allreduce.Options{})
	if err != nil {
		return err
	}
	if w.rank == best {
		copyAll(w.model.Dense(), old.model.Dense())
	}
	err = broadcast(x, w.model.Dense(), best)
	for _, m := range moves {
		var mine [][]float32 // where the expert lies here
		switch w.rank {
		case m.To:
			mine = w.model.Expert(slices.Index(now.Local(w.rank), m.Expert))
		case m.From:
			mine = old.model.Expert(slices.Index(old.experts(), m.Expert))
		default: // this rank only takes part
			mine = make([][]float32, 3*w.cfg.Layers)
			for i := range mine {
				mine[i] = make([]float32, w.cfg.ExpertSize())
			}
		}
		if m.From >= 0 {
			err = errors.Join(err, broadcast(x, mine, m.From))
		} else if m.To == w.rank && old != nil {
			if like := copyOf(before, old.rank, m.Expert); like >= 0 {
				copyWeights(mine, old.model.Expert(slices.Index(old.experts(), like)))
			}
		}
	}
	return errors.Join(err, x.Close(ctx))
}

// broadcast brings what lies in the parts on rank root to the parts on all.
func broadcast(x *allreduce.Reducer, parts [][]float32, root int) error {
	all := slices.Concat(parts...)
	if err := x.Broadcast(nil, memory.Wrap(all), root); err != nil {
		return err
	}
	for _, v := range parts {
		all = all[copy(v, all):]
	}
	return nil
}

// copyOf is the expert of which a rank makes a copy in the place of one that is lost, -1 if it has none.
func copyOf(before *dispatch.Placement, rank, lost int) int {
	own := before.Local(rank)
	if len(own) == 0 {
		return -1
	}
	return own[lost%len(own)]
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

// event says what happened before a step. was is the numbers that the ranks had among the ranks of before.
func event(ranks int, was []int, before *dispatch.Placement, step int, moves []dispatch.Move) string {
	var lost, moved, experts, anew []int
	var from []string
	for r := range ranks {
		if !slices.Contains(was, r) {
			lost = append(lost, r)
		}
	}
	for _, m := range moves {
		if m.From >= 0 {
			moved = append(moved, m.Expert)
			continue
		}
		experts = append(experts, m.Expert)
		if c := copyOf(before, was[m.To], m.Expert); c >= 0 {
			from = append(from, fmt.Sprintf("%d went on as a copy of %d", m.Expert, c))
		} else {
			anew = append(anew, m.Expert)
		}
	}
	if fresh := slices.Index(was, -1); fresh >= 0 {
		s := fmt.Sprintf("A fresh rank came before step %d, as rank %d", step, fresh)
		if len(moved) > 0 {
			slices.Sort(moved)
			s += ", and took over " + list("expert", moved)
		}
		return s + "."
	}
	s := fmt.Sprintf("%s lost in step %d. The others went on from there as ranks 0 to %d", were("Rank", lost), step, len(was)-1)
	if len(experts) > 0 {
		s += fmt.Sprintf(". %s lost too", were("Expert", experts))
	}
	if len(from) > 0 {
		s += ": " + strings.Join(from, ", ")
	}
	if len(anew) > 0 {
		s += fmt.Sprintf(". %s began anew", list("Expert", anew))
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

// copyAll makes an expert, or the dense part, the same as another.
func copyAll(to, from [][]float32) {
	for i := range to {
		copy(to[i], from[i])
	}
}

// copyWeights makes the weights of an expert the same as those of another.
func copyWeights(to, from [][]float32) {
	for i := 0; i < len(to); i += 3 {
		copy(to[i], from[i])
	}
}
