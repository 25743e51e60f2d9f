package kernels

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/comm"
)

// HandlesError says which handles the calls had that an engine tells of late, by Port.Fault: none of them holds a dispatch any more.
type HandlesError struct {
	Handles []int // of DispatchBounds.Handles
	Err     error
}

// Error is that of Err.
func (e *HandlesError) Error() string { return e.Err.Error() }

// Unwrap is Err.
func (e *HandlesError) Unwrap() error { return e.Err }

// OverflowError says that a dispatch does not fit. It is the same on every rank, nothing has been written, and the
// dispatcher can be used further.
type OverflowError struct {
	Call   uint64
	Rank   int   // the receiver
	Expert int   // -1 when the rank's output as a whole is too small
	Rows   int64 // what it would receive, with padding where Expert is -1
	Limit  int64 // what it has room for
}

// Error states the values.
func (e *OverflowError) Error() string {
	if e.Expert < 0 {
		return fmt.Sprintf("kernels: dispatch call %d: rank %d would get %d rows, its output holds %d", e.Call, e.Rank, e.Rows, e.Limit)
	}
	return fmt.Sprintf("kernels: dispatch call %d: expert %d on rank %d would get %d rows, its capacity is %d",
		e.Call, e.Expert, e.Rank, e.Rows, e.Limit)
}

func (*OverflowError) recoverable() {}

// RoutingError says that a rank's call goes by memory without a routing of its tokens: the dispatch has failed, which it has on every rank,
// or the memory was written since. The rank has not begun the call, and the dispatcher can be used further.
type RoutingError struct {
	Tokens int
}

// Error states the number.
func (e *RoutingError) Error() string {
	return fmt.Sprintf("kernels: the memory holds no routing of %d tokens", e.Tokens)
}

func (*RoutingError) recoverable() {}

// MaskedError says that this rank is masked: the others go on without it. It can be unmasked.
type MaskedError struct {
	Rank int
}

// Error names the rank.
func (e *MaskedError) Error() string {
	return fmt.Sprintf("kernels: rank %d is masked: the other ranks go on without it", e.Rank)
}

func (*MaskedError) recoverable() {}

// IndexError says that a rank's token has a choice that is no expert. It is the same on every rank, nothing has been moved, and the
// dispatcher can be used further.
type IndexError struct {
	Call          uint64
	Rank          int
	Token, Choice int
	Expert        int64
	Experts       int
}

// Error states the entry.
func (e *IndexError) Error() string {
	return fmt.Sprintf("kernels: dispatch call %d: token %d of rank %d has expert %d as choice %d, there are %d experts (-1 masks a choice)",
		e.Call, e.Token, e.Rank, e.Expert, e.Choice, e.Experts)
}

func (*IndexError) recoverable() {}

// OrderError says that ranks made different calls in the same place. It is the same on every rank, and nothing has been
// moved.
type OrderError struct {
	Call        uint64
	Rank        int    // that differs from rank 0
	First, Here uint64 // CallWord of rank 0 and of Rank
	// In what the calls' dispatchers differ, where they share memory.
	FirstIs, HereIs string
}

// CallWord says in one word what a call is: its kind, what a combine or its backward weighs with, and the epoch of the dispatch
// whose routing it uses.
func CallWord(o DispatchOp, w Weighting, dispatch uint64) uint64 {
	return dispatch<<8 | uint64(w)<<4 | uint64(o)
}

// shapeShift is where a call word has the number of DispatchShared.
const shapeShift = 48

// Disorder is the error of ranks in different calls.
func (m *DispatchBounds) Disorder(call uint64, rank int, first, here uint64) *OrderError {
	e := &OrderError{Call: call, Rank: rank, First: first, Here: here}
	if a, b := int(first>>shapeShift), int(here>>shapeShift); a != b && m.Shared != nil {
		e.FirstIs, e.HereIs = m.Shared.Differ(a, b)
	}
	return e
}

// CallWord is the word of a call of the dispatcher.
func (m *DispatchBounds) CallWord(o DispatchOp, w Weighting, dispatch uint64) uint64 {
	return uint64(m.Shape())<<shapeShift | CallWord(o, w, dispatch&(1<<(shapeShift-8)-1))
}

// CalledOp is the kind of call in a call word.
func CalledOp(word uint64) DispatchOp { return DispatchOp(word & 0xf) }

// Error states both calls.
func (e *OrderError) Error() string {
	first, here := callText(e.First), callText(e.Here)
	if e.FirstIs != e.HereIs {
		first, here = first+" ("+e.FirstIs+")", here+" ("+e.HereIs+")"
	}
	return fmt.Sprintf("kernels: call %d: rank 0 is in %s, rank %d in %s", e.Call, first, e.Rank, here)
}

func callText(word uint64) string {
	op, w, dispatch := CalledOp(word), Weighting(word>>4&0xf), word&(1<<shapeShift-1)>>8
	if op == OpMake {
		return op.String()
	}
	if op == OpCombine || op == OpCombineBackward {
		return fmt.Sprintf("%v with %v of dispatch %d", op, w, dispatch)
	}
	return fmt.Sprintf("%v of dispatch %d", op, dispatch)
}

// Unwrap is comm.ErrMismatch.
func (e *OrderError) Unwrap() error { return comm.ErrMismatch }

func (*OrderError) recoverable() {}

// ShortError says that a rank passed rows that are fewer than its dispatch made. It is the same on every rank, and
// nothing has been moved.
type ShortError struct {
	Call       uint64
	Rank       int
	Have, Need int64 // bytes
}

// Error states both sizes.
func (e *ShortError) Error() string {
	return fmt.Sprintf("kernels: call %d: rank %d passed %d bytes of rows or of their weights where its dispatch has %d", e.Call, e.Rank, e.Have, e.Need)
}

func (*ShortError) recoverable() {}
