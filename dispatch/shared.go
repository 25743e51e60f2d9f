package dispatch

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Shared is memory that dispatchers of one heap take in turn (Options.Shared): the outputs of all of their handles, and what is on its way. It
// is as large as the largest of them wants, and grows when New makes one that wants more. The zero value is ready for use. Each of the
// dispatchers keeps its own few words, and the routings of its handles. One with Options.OwnRows keeps its outputs, too.
//
// All ranks make the calls of all of its dispatchers in one order, from one goroutine at a time. A call of one dispatcher overwrites the Rows, Scales,
// Indices, Weights and Sources of every handle of the others, so copy results first (Handle.CopyTo); views of them are refused from then on.
// Counts, Offsets, RankCounts and the routing stay: the other calls work with such a handle. There are no halves without Options.OwnRows, and no
// Masks, and the ranks are on one host.
//
// On the host, ranks that are in calls of different dispatchers get a *kernels.OrderError with both, and nothing has moved; so they do where some are
// in a call and others in New, with the options of the dispatcher that is not made then. On a GPU they wait for each other until the timeout. After a disagreement on a GPU, results of the next call are undefined, unless it is one of the same dispatcher or
// a dispatch to TokenMajor.
//
// The memory is given back when the last of the dispatchers is closed. A graph that has captured calls keeps the memory that they had, if the
// others grow.
type Shared struct {
	turn   communicator.Turn // guards the rest
	heap   *memory.Heap
	region *memory.Buffer
	words  *memory.Buffer   // kernels.DispatchShared.Words
	before []*memory.Buffer // that graphs may use
	living []*Dispatcher
	owner  *Dispatcher
	turns  uint64 // how often the owner has changed

	mu   sync.Mutex
	made [][]string // the options of all that were made, by shape
}

// sharesRows reports whether rows lie in the memory of Options.Shared.
func (o *Options) sharesRows() bool { return o.Shared != nil && !o.OwnRows }

// Bytes is the size of the memory, 0 while there is no dispatcher.
func (s *Shared) Bytes() int64 {
	s.turn.Lock()
	defer s.turn.Unlock()
	return s.bytes()
}

func (s *Shared) bytes() int64 {
	if s.region == nil {
		return 0
	}
	return s.region.View().Len()
}

// shareable refuses options of a dispatcher that cannot share.
func (o *Options) shareable(hosts *kernels.Hosts) error {
	switch {
	case o.Shared == nil:
	case o.Masks:
		return invalid("Options.Shared and Masks are both set")
	case hosts != nil:
		return invalid("Options.Shared is set for ranks on several hosts, they must be on one")
	}
	return nil
}

// enter takes the words that dispatchers have in common, with all ranks, and gives d its number.
func (s *Shared) enter(ctx context.Context, d *Dispatcher, h *memory.Heap, err error) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	if err == nil && s.words != nil && s.heap != h {
		err = invalid("Options.Shared is that of another heap")
	}
	claim := agree.Claim{Must: []agree.Value{agree.Named("dispatchers made with this Options.Shared", s.shapes())}}
	if _, failed := agree.On(ctx, h.Group(), claim, err); failed != nil {
		if err != nil {
			return failed // it has the name
		}
		return fmt.Errorf("dispatch: compare options: %w", failed)
	}
	if common := d.layout.Common; s.words == nil {
		if s.words, err = communicator.Allocate(ctx, h, common); err == nil {
			err = s.words.Clear(0, common)
		}
		if _, err = agree.On(ctx, h.Group(), agree.Claim{}, err); err != nil {
			return errors.Join(fmt.Errorf("dispatch: memory for words: %w", err), s.give())
		}
	}
	s.mu.Lock()
	s.made = append(s.made, d.options.fields())
	s.mu.Unlock()
	s.heap = h
	d.bounds.Shared.Shape, d.bounds.Shared.Words = s.shapes(), h.SymmetricOperand(s.words.View())
	return nil
}

// shapes is how many dispatchers were made.
func (s *Shared) shapes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.made)
}

// join has the memory be large enough for d, together with all ranks, and d lay out its own, unless it has rows elsewhere.
func (s *Shared) join(ctx context.Context, d *Dispatcher) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	if d.options.OwnRows {
		s.living = append(s.living, d)
		return nil
	}
	if need := d.rowsBytes(); need > s.bytes() {
		if err := s.grow(ctx, d, need); err != nil {
			return fmt.Errorf("dispatch: %d bytes for rows: %w", need, err)
		}
	}
	s.living = append(s.living, d)
	d.layOutRows(&cutter{heap: d.c.Heap, block: s.region.View()})
	return nil
}

// grow makes the memory anew. No rank uses the old any more when all have met.
func (s *Shared) grow(ctx context.Context, d *Dispatcher, need int64) error {
	err := s.turn.Wait()
	claim := agree.Claim{Must: []agree.Value{agree.Named("bytes", need)}}
	if s.turn.Captured() {
		claim.Own = "captured"
	}
	claims, err := agree.On(ctx, d.c.Group, claim, err)
	if err != nil {
		return err
	}
	old := s.bytes()
	switch {
	case s.region == nil:
	case slices.Contains(claims.Owns(), "captured"):
		s.before = append(s.before, s.region)
	default:
		err = s.region.Free()
	}
	var full error
	s.region, full = communicator.Allocate(ctx, d.c.Heap, need)
	err = errors.Join(err, full)
	if full != nil && old > 0 {
		var again error
		if s.region, again = communicator.Allocate(ctx, d.c.Heap, old); again != nil {
			for d := range s.inside() {
				d.c.Done(again) // they have no memory
			}
			return errors.Join(err, again)
		}
	}
	for d := range s.inside() {
		d.layOutRows(&cutter{heap: d.c.Heap, block: s.region.View()})
	}
	s.owner = nil
	return err
}

// inside are the dispatchers whose rows lie in the memory.
func (s *Shared) inside() iter.Seq[*Dispatcher] {
	return func(yield func(*Dispatcher) bool) {
		for _, d := range s.living {
			if d.options.sharesRows() && !yield(d) {
				return
			}
		}
	}
}

// leave forgets a dispatcher that is closed, and gives the memory back with the last.
func (s *Shared) leave(d *Dispatcher) error {
	if s == nil {
		return nil
	}
	s.turn.Lock()
	defer s.turn.Unlock()
	s.living = slices.DeleteFunc(s.living, func(o *Dispatcher) bool { return o == d })
	if s.owner == d {
		s.owner = nil
	}
	if len(s.living) > 0 {
		return nil
	}
	return s.give()
}

// give gives back what there is.
func (s *Shared) give() (err error) {
	for _, b := range append(s.before, s.region, s.words) {
		if b != nil && !s.heap.Closed() {
			err = errors.Join(err, b.Free())
		}
	}
	s.heap, s.before, s.region, s.words = nil, nil, nil, nil
	return err
}

// called notes that a call of d has been made. The turn is locked.
func (s *Shared) called(d *Dispatcher, h *Handle, kind kernels.DispatchOp) {
	if !d.options.sharesRows() || kind == kernels.OpResults {
		return
	}
	if s.owner != d {
		s.owner = d
		s.turns++
	}
	switch kind {
	case kernels.OpDispatch:
		h.turn, h.rowsTurn = s.turns, s.turns
	case kernels.OpRedispatch:
		h.rowsTurn = s.turns
	}
}

// view is the memory.
func (s *Shared) view() memory.View {
	s.turn.Lock()
	defer s.turn.Unlock()
	if s.region == nil {
		return memory.View{}
	}
	return s.region.View()
}

// differ says in which options two of the dispatchers differ.
func (s *Shared) differ(a, b int) (of, other string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if min(a, b) < 1 || max(a, b) > len(s.made) {
		return "another dispatcher", "another dispatcher"
	}
	if of, other = differing(s.made[a-1], s.made[b-1]); of == "" {
		return fmt.Sprintf("dispatcher %d", a), fmt.Sprintf("dispatcher %d, of the same options", b)
	}
	return of, other
}

// differing are the fields of options, one list as the other, that are not the same in both. Those that begin with a word of but count for none.
func differing(a, b []string, but ...string) (of, other string) {
	var ofs, others []string
	for i, f := range a {
		left := func(word string) bool { return strings.HasPrefix(f, word) }
		if g := b[i]; f != g && !slices.ContainsFunc(but, left) {
			ofs, others = append(ofs, f), append(others, g)
		}
	}
	return strings.Join(ofs, ", "), strings.Join(others, ", ")
}

// mine refuses memory that dispatchers share where it is not d's now, or, with a turn, not since then. Other memory is fine.
func (d *Dispatcher) mine(name string, v memory.View, turn uint64) error {
	s := d.options.Shared
	if !d.options.sharesRows() || s.region == nil || !overlap(v, s.region.View()) || s.owner == d && (turn == 0 || turn == s.turns) {
		return nil
	}
	return invalid("%s lies in Options.Shared, where another dispatcher has made a call since: copy results before", name)
}

// whole refuses a half of a call where others may come in between.
func (d *Dispatcher) whole(phase kernels.Phase) error {
	if d.options.sharesRows() && phase != kernels.Both {
		return fmt.Errorf("dispatch: %w: halves of calls with Options.Shared", comm.ErrUnsupported)
	}
	return nil
}
