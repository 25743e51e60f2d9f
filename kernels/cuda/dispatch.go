package cuda

import (
	"fmt"
	"math"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// dispatchKernels are the kernels of MoE dispatch. Those by number type are indexed by it.
type dispatchKernels struct {
	rows, counts, receive, begin, take, weights cuda.Function
	results, takeResults, tokenWeights          cuda.Function
	rowsFloat8, spread                          [3]cuda.Function
	few                                         [2]fewKernels // for rows by token and by expert
	sums, sumsFloat8                            [3]sumKernels // float8: in which partial sums cross as that
	blocks                                      int           // of any of them that run at once
	byDefault                                   int           // of them that a call takes unless its caller says more
	shared                                      int           // dynamic shared memory that a block can have
}

// fewKernels are those of a dispatch of few tokens: of rows as they are, and of those that it makes float8.
type fewKernels struct {
	plain  cuda.Function
	float8 [3]cuda.Function
}

// maskedKernels are those of calls that can go on without ranks, which are loaded for dispatchers that have them.
type maskedKernels struct {
	mask, unmask     cuda.Function
	few              [2]fewKernels
	sums, sumsFloat8 [3][2]cuda.Function
}

// sumKernels are those of a combine: the pass that makes partial sums, and those that sum them, or make and sum those of few tokens by token and by
// expert, and by expert with weights that come in the call.
type sumKernels struct {
	partials, rows cuda.Function
	few            [2]cuda.Function
	late           cuda.Function
}

// dispatches are the launches of one dispatcher. It is a family.
type dispatches struct {
	common
	m       *kernels.DispatchBounds
	k       *dispatchKernels
	masks   place          // of struct sw_mask, 0 for none
	masked  *maskedKernels // with Masks
	expands *expandKernels
}

// dispatchFixedShared is more than the kernels have next to what is asked for at launch.
const dispatchFixedShared = 28 << 10

func newDispatches(m *kernels.DispatchBounds, offset int64) *dispatches {
	x := &dispatches{m: m}
	if m.Masks {
		x.masks = offset
	}
	return x
}

func (x *dispatches) members() int { return x.m.Ranks }

func (x *dispatches) check() error {
	switch m := x.m; {
	case m.RowBytes()%16 != 0 || m.TokenBytes()%16 != 0 || m.SumBytes()%16 != 0:
		return fmt.Errorf("kernels: dispatch: %d elements of %v, %v and %v: rows of GPUs are multiples of 16 bytes", m.Hidden, m.TokenType, m.RowType, m.SumType)
	case m.Quantizes() && m.Scales.Block != 128 && m.TokenBytes() > 128<<10:
		return fmt.Errorf("kernels: dispatch: tokens of %d bytes with one scale: at most %d on a GPU", m.TokenBytes(), 128<<10)
	}
	return x.maskable()
}

// controls are the places of what a fault leaves behind: each handle counts its calls by itself.
func (x *dispatches) controls(int64) (places []int64) {
	for i := range x.m.Handles {
		places = append(places, x.m.Handles[i].State.Place)
	}
	return places
}

func (x *dispatches) fault(f *faultWords, me int) error {
	m, peer := x.m, int(f.peer)
	switch f.kind {
	case faultOrder:
		first, here, other := f.expected, f.sent, peer
		if me != 0 {
			first, here, other = f.sent, f.expected, me // as seen from rank 0, if peer is it
		}
		return &kernels.OrderError{Call: f.epoch, Rank: other, First: kernels.CallWord(kernels.DispatchOp(first), kernels.Unweighted, f.epoch), Here: kernels.CallWord(kernels.DispatchOp(here), kernels.Unweighted, f.epoch)}
	case faultMasked:
		return &kernels.MaskedError{Rank: me}
	case faultIndex:
		return &kernels.IndexError{Call: f.epoch, Rank: peer, Token: int(f.sent), Choice: int(f.expected), Expert: int64(f.limit), Experts: m.Experts}
	case faultOverflow:
		o := &kernels.OverflowError{Call: f.epoch, Rank: peer, Expert: -1, Rows: int64(f.sent), Limit: int64(f.limit)}
		if f.expected != math.MaxUint64 {
			o.Expert = int(f.expected)
		}
		return o
	}
	return nil
}

// hit names the handles.
func (*dispatches) hit(err error, handles []int) error {
	return &kernels.HandlesError{Handles: handles, Err: err}
}

func (x *dispatches) load(e *Engine) (err error) {
	if x.k, err = loadOnce[dispatchKernels](e); err != nil {
		return err
	}
	if x.expands, err = loadOnce[expandKernels](e); err != nil || !x.m.Masks {
		return err
	}
	x.masked, err = loadOnce[maskedKernels](e)
	return err
}

// entries are the kernels for few tokens.
func fewEntries(few *[2]fewKernels, sums func(kind, order int, float8 bool) *cuda.Function) (entries []entry) {
	entries = append(entries, entry{"dispatch_few", &few[0].plain}, entry{"dispatch_few_by_expert", &few[1].plain})
	for i, t := range [...]string{"f32", "bf16", "f16"} {
		entries = append(entries, entry{"dispatch_few_" + t, &few[0].float8[i]}, entry{"dispatch_few_by_expert_" + t, &few[1].float8[i]})
		for _, float8 := range [...]bool{false, true} {
			suffix := t
			if float8 {
				suffix += "_float8"
			}
			entries = append(entries, entry{"combine_few_" + suffix, sums(i, 0, float8)}, entry{"combine_few_by_expert_" + suffix, sums(i, 1, float8)})
		}
	}
	return entries
}

func (k *maskedKernels) load(e *Engine) error {
	entries := fewEntries(&k.few, func(kind, order int, float8 bool) *cuda.Function {
		if float8 {
			return &k.sumsFloat8[kind][order]
		}
		return &k.sums[kind][order]
	})
	entries = append(entries, entry{"dispatch_mask", &k.mask}, entry{"dispatch_unmask", &k.unmask})
	if err := e.loadModule("dispatch_masked", entries...); err != nil {
		return err
	}
	return k.share(e)
}

// share lets the dispatches of few tokens have all of a multiprocessor's shared memory that they may ask for.
func (k *maskedKernels) share(e *Engine) error {
	for i := range k.few {
		for _, f := range append([]cuda.Function{k.few[i].plain}, k.few[i].float8[:]...) {
			if err := e.ctx.SetFunctionAttribute(f, cuda.FunctionMaxDynamicShared, e.maxShared-dispatchFixedShared); err != nil {
				return err
			}
		}
	}
	return nil
}

func (k *dispatchKernels) load(e *Engine) error {
	entries := []entry{
		{"dispatch_rows", &k.rows}, {"dispatch_counts", &k.counts}, {"dispatch_receive", &k.receive}, {"combine_begin", &k.begin}, {"experts_take", &k.take},
		{"combine_weights", &k.weights},
	}
	entries = append(entries, fewEntries(&k.few, func(kind, order int, float8 bool) *cuda.Function {
		if float8 {
			return &k.sumsFloat8[kind].few[order]
		}
		return &k.sums[kind].few[order]
	})...)
	for i, t := range [...]string{"f32", "bf16", "f16"} {
		entries = append(entries, entry{"dispatch_rows_" + t, &k.rowsFloat8[i]}, entry{"experts_spread_" + t, &k.spread[i]})
		for suffix, s := range map[string]*sumKernels{t: &k.sums[i], t + "_float8": &k.sumsFloat8[i]} {
			entries = append(entries, entry{"experts_sum_" + suffix, &s.partials}, entry{"combine_rows_" + suffix, &s.rows}, entry{"combine_few_late_" + suffix, &s.late})
		}
	}
	if err := e.loadModule("dispatch", entries...); err != nil {
		return err
	}
	if err := e.loadModule("results", entry{"copy_results", &k.results}, entry{"take_results", &k.takeResults}); err != nil {
		return err
	}
	if err := e.loadModule("token_weights", entry{"token_weights", &k.tokenWeights}); err != nil {
		return err
	}
	k.shared = e.maxShared - dispatchFixedShared
	large := append([]cuda.Function{k.rows, k.take}, k.rowsFloat8[:]...)
	for i := range k.few {
		large = append(append(large, k.few[i].plain), k.few[i].float8[:]...)
	}
	for i := range k.sums {
		large = append(large, k.sums[i].rows, k.sumsFloat8[i].rows)
	}
	for _, f := range large {
		if err := e.ctx.SetFunctionAttribute(f, cuda.FunctionMaxDynamicShared, k.shared); err != nil {
			return err
		}
	}
	// Each takes a multiprocessor; ranks that share a GPU have theirs.
	k.blocks = min(e.multiprocessors/e.sharers, dispatchMaxBlocks)
	k.byDefault = min(e.free(), dispatchMaxBlocks)
	if k.blocks == 0 {
		return fmt.Errorf("%d ranks do not fit on %v", e.sharers, e.ctx.Device())
	}
	return nil
}

// add appends the launches of an operation. Their arguments are copied into the batch.
func (x *dispatches) add(p *port, op kernels.Operation) error {
	switch a := op.(type) {
	case *kernels.Dispatch:
		return x.addDispatch(p, a)
	case *kernels.Combine:
		return x.addCombine(p, a)
	case *kernels.CombineBackward:
		return x.addBackward(p, a)
	case *kernels.Results:
		return x.addResults(p, a, 0)
	case *kernels.Expand:
		return x.addExpand(p, a)
	case *kernels.Fold:
		return x.addFold(p, a)
	}
	return errForeign
}

func numberKind(d kernels.DType) int {
	switch d {
	case kernels.BFloat16:
		return 1
	case kernels.Float16:
		return 2
	}
	return 0
}

// weighs is what rows are multiplied by, as a launch's mode says it.
func weighs(w kernels.Weighting) uint32 {
	return [...]uint32{kernels.Unweighted: 0, kernels.DispatchedWeights: dispatchWeigh, kernels.GivenWeights: dispatchGiven, kernels.TokenWeights: dispatchWeigh}[w]
}

// aligned refuses memory that vectors of 16 bytes cannot be moved to and from.
func aligned(op kernels.DispatchOp, buffers ...*kernels.Buffer) error {
	for _, b := range buffers {
		if b.Bytes > 0 && b.Ptr%16 != 0 {
			return fmt.Errorf("kernels: %v: rows at %#x: on a GPU they begin at a multiple of 16", op, b.Ptr)
		}
	}
	return nil
}
