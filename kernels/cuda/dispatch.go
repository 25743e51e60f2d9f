package cuda

import (
	"fmt"
	"math"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// dispatchKernels are the kernels of MoE dispatch. Those by number type are indexed by it.
type dispatchKernels struct {
	rows, receive, begin, take, weights cuda.Function
	results, tokenWeights               cuda.Function
	rowsFloat8, spread                  [3]cuda.Function
	few                                 [2]fewKernels // for rows by token and by expert
	sums, sumsFloat8                    [3]sumKernels // float8: in which partial sums cross as that
	blocks                              int           // of any of them that run at once
	byDefault                           int           // of them that a call takes unless its caller says more
	shared                              int           // dynamic shared memory that a block can have
}

// fewKernels are those of a dispatch of few tokens: of rows as they are, and of those that it makes float8.
type fewKernels struct {
	plain  cuda.Function
	float8 [3]cuda.Function
}

// sumKernels are those of a combine: the pass that makes partial sums, and those that sum them, or make and sum those of few tokens by token and by expert.
type sumKernels struct {
	partials, rows cuda.Function
	few            [2]cuda.Function
}

// dispatches are the launches of one dispatcher. It is a family.
type dispatches struct {
	m *kernels.DispatchBounds
	k *dispatchKernels
}

// dispatchFixedShared is more than the kernels have next to what is asked for at launch.
const dispatchFixedShared = 28 << 10

func newDispatches(m *kernels.DispatchBounds, _ int64) *dispatches {
	return &dispatches{m: m}
}

func (*dispatches) defaults(int) {}

func (x *dispatches) check(ranks int) error {
	switch m := x.m; {
	case m.Ranks != ranks:
		return fmt.Errorf("kernels: dispatch: %d ranks on a heap of %d", m.Ranks, ranks)
	case m.RowBytes()%16 != 0 || m.TokenBytes()%16 != 0 || m.SumBytes()%16 != 0:
		return fmt.Errorf("kernels: dispatch: %d elements of %v, %v and %v: rows of GPUs are multiples of 16 bytes", m.Hidden, m.TokenType, m.RowType, m.SumType)
	case m.Quantizes() && m.Scales.Block != 128 && m.TokenBytes() > 128<<10:
		return fmt.Errorf("kernels: dispatch: tokens of %d bytes with one scale: at most %d on a GPU", m.TokenBytes(), 128<<10)
	}
	return nil
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
	x.k, err = loadOnce[dispatchKernels](e)
	return err
}

func (k *dispatchKernels) load(e *Engine) error {
	entries := []entry{
		{"dispatch_rows", &k.rows}, {"dispatch_few", &k.few[0].plain}, {"dispatch_few_by_expert", &k.few[1].plain}, {"dispatch_receive", &k.receive},
		{"combine_begin", &k.begin}, {"experts_take", &k.take}, {"combine_weights", &k.weights},
	}
	for i, t := range [...]string{"f32", "bf16", "f16"} {
		entries = append(entries, entry{"dispatch_rows_" + t, &k.rowsFloat8[i]}, entry{"experts_spread_" + t, &k.spread[i]},
			entry{"dispatch_few_" + t, &k.few[0].float8[i]}, entry{"dispatch_few_by_expert_" + t, &k.few[1].float8[i]})
		for suffix, s := range map[string]*sumKernels{t: &k.sums[i], t + "_float8": &k.sumsFloat8[i]} {
			entries = append(entries, entry{"experts_sum_" + suffix, &s.partials}, entry{"combine_rows_" + suffix, &s.rows},
				entry{"combine_few_" + suffix, &s.few[0]}, entry{"combine_few_by_expert_" + suffix, &s.few[1]})
		}
	}
	if err := e.loadModule("dispatch", entries...); err != nil {
		return err
	}
	if err := e.loadModule("results", entry{"copy_results", &k.results}); err != nil {
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
	k.byDefault = max(min(e.multiprocessors-dispatchOthers, dispatchMaxBlocks)/e.sharers, 1)
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
		return x.addResults(p, a)
	}
	return fmt.Errorf("kernels: %s on a dispatcher", op.Operation())
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
