package dispatch

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// present is what a rank tells the others when some ranks make a dispatcher, and others may be in a call of one of the same Options.Shared.
type present struct {
	Word      uint64   // of its call, see kernels.CallWord
	Call      uint64   // the number of the call in whose place it is, 0 where it has not told those
	Fields    []string // the options of its dispatcher
	MaxTokens int
	Agrees    bool // Options.AgreeMaxTokens
	Refused   bool // it cannot make the dispatcher, and tells why when ranks meet next
}

// meet has every rank tell what it does, and returns that.
func (p present) meet(ctx context.Context, g *comm.Group) ([]present, error) {
	text, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	claims, err := agree.On(ctx, g, agree.Claim{Must: agree.Same("a dispatcher"), Own: string(text)}, nil)
	if err != nil {
		return nil, err
	}
	all := make([]present, len(claims))
	for r, own := range claims.Owns() {
		if err := json.Unmarshal([]byte(own), &all[r]); err != nil {
			return nil, fmt.Errorf("rank %d: malformed options: %w", r, err)
		}
	}
	return all, nil
}

// turnTaken is a call in whose place a rank makes a dispatcher, see kernels.Maker. The zero value is of a rank that has taken none.
type turnTaken struct {
	call uint64
	undo func()
}

// take has the ranks that are in a call of one of the dispatchers, or come to one, hear that this rank makes another one. refused is the reason why it
// cannot, which is so on return; it tells them all the same.
func (s *Shared) take(h *memory.Heap, refused error) (t turnTaken, _ error) {
	if s == nil || h.Device().Kind() != device.HostKind || h.Group().Replaying() {
		return t, refused
	}
	s.turn.Lock()
	defer s.turn.Unlock()
	if len(s.living) == 0 || s.heap != h {
		return t, refused
	}
	err := s.turn.Wait()
	for _, d := range s.living {
		err = cmp.Or(err, d.c.Whole())
	}
	if err != nil {
		return t, cmp.Or(refused, err)
	}
	t.call, t.undo = s.living[0].c.Port().(kernels.Maker).Make()
	return t, refused
}

// meet tells all ranks that this one makes a dispatcher, and fails on all where some are in a call of another one, or where options differ. A rank that
// has refused them is an error when ranks meet next. most is the largest MaxTokens of any.
func (d *Dispatcher) meet(ctx context.Context, h *memory.Heap, taken turnTaken, refused error) (most int, err error) {
	o := &d.options
	mine := present{kernels.CallWord(kernels.OpMake, 0, 0), taken.call, o.fields(), o.MaxTokens, o.AgreeMaxTokens, refused != nil}
	all, err := mine.meet(ctx, h.Group())
	if order := disorder(all); order != nil {
		return 0, cmp.Or(refused, fmt.Errorf("dispatch: %w", order))
	}
	var cut *agree.CutError
	told := count(all, func(p present) bool { return p.Call > 0 })
	if taken.undo != nil && (err != nil && !errors.As(err, &cut) || told < len(all)) { // no rank is in a call of these dispatchers
		taken.undo()
	}
	if err == nil && told > 0 && told < len(all) {
		_, err = agree.On(ctx, h.Group(), agree.Claim{}, nil)
	}
	if err == nil {
		most, err = compare(all)
	}
	if err != nil {
		return 0, errors.Join(refused, fmt.Errorf("dispatch: compare options: %w", err))
	}
	return most, nil
}

// making is kernels.DispatchShared.Making. The turn is locked.
func (d *Dispatcher) making(call, word uint64) error {
	ctx, cancel := context.WithTimeout(context.Background(), d.c.Timeout())
	defer cancel()
	all, err := present{Word: word, Call: call, Fields: d.options.fields()}.meet(ctx, d.c.Group)
	if err != nil {
		return err
	}
	return disorder(all)
}

// disorder is the error of ranks that are not all at the making of a dispatcher, nil where they are.
func disorder(all []present) error {
	e := new(kernels.OrderError)
	for r, p := range all {
		if e.First, e.Call = all[0].Word, max(e.Call, p.Call); e.Rank == 0 && p.Word != e.First {
			e.Rank, e.Here = r, p.Word
			e.FirstIs, e.HereIs = differing(all[0].Fields, p.Fields)
		}
	}
	if e.Rank == 0 {
		return nil
	}
	return e
}

// compare is the error of ranks whose options differ, where none has refused them.
func compare(all []present) (most int, err error) {
	for r, p := range all {
		most = max(most, p.MaxTokens)
		var but []string
		if first := &all[0]; first.Agrees && p.Agrees {
			but = []string{"MaxTokens ", "Capacity ", "MaxRows "} // which are compared when all have the same MaxTokens
		}
		if of, other := differing(all[0].Fields, p.Fields, but...); of != "" && err == nil {
			err = fmt.Errorf("%w: rank 0 has %s; rank %d has %s", comm.ErrMismatch, of, r, other)
		}
	}
	if count(all, func(p present) bool { return p.Refused }) > 0 {
		err = nil
	}
	return most, err
}

func count(all []present, which func(p present) bool) (n int) {
	for _, p := range all {
		if which(p) {
			n++
		}
	}
	return n
}
