package dispatch

import (
	"cmp"
	"fmt"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Tokens is what one rank dispatches. Matrices are row by row, without gaps. T is the number of tokens; it may be 0 and differ from
// rank to rank.
type Tokens struct {
	// X is [T, Hidden] of Options.DType, no longer and no shorter.
	X memory.View
	// Scales belong to tokens of Float8E4M3: [T, Hidden/128 rounded up] (or [T, 1]) of float32, or of bytes in int32 words,
	// the last of which is filled with zeros. Empty for other types.
	Scales memory.View
	// Experts is [T, TopK] of Options.IndexType: the choices of each token, -1 for none. Its length determines T. A token may
	// have an expert twice.
	Experts memory.View
	// Weights is [T, TopK] of float32: the factors of the rows in a combine. Empty means 1.
	Weights memory.View
	// Numbers is memory of the caller for Dispatcher.NumberWords words of int32, or empty: two that the call uses, then what Handle.Counts,
	// Offsets and RankCounts have, all 0 if the dispatch is given up before that is known. They are there with the dispatch, also in a graph,
	// and stay when the handle is released. Expert-major layouts have them, on a GPU without Options.HostCounts.
	Numbers memory.View
	// Taken says that Handle.CopyTo follows, with nothing between the two on the stream: the copy may take rows while others are on their way.
	// They are told of as they come then, which costs the call a little. Halves have nothing of it.
	Taken bool
}

// Dispatch sends every token's row to each of its experts. It refuses wrong lengths; an index that is no expert is an *IndexError
// on every rank. The caller releases the handle.
func (d *Dispatcher) Dispatch(s device.Stream, t Tokens) (*Handle, error) {
	h, _, err := d.dispatch(s, t, kernels.Both, nil)
	return h, err
}

// DispatchTo is Dispatch, and Handle.CopyTo of what it leaves, whose Routing it returns if that is wanted. On a GPU it is one call, in which
// TokenMajor rows are copied as they come, unless Options.MaxSMs bounds that. They may be written to to.Rows in place of Handle.Rows, which is undefined
// then: with Options.LowLatency, and by peers where to.Rows lies in the heap. After an error by which the dispatcher cannot go
// on, a peer may still write there until it has heard of that.
func (d *Dispatcher) DispatchTo(s device.Stream, t Tokens, to Result) (*Handle, *Routing, error) {
	if d.c.Heap.Device().Kind() != device.HostKind {
		return d.dispatch(s, t, kernels.Both, &to)
	}
	h, err := d.Dispatch(s, t)
	if err != nil {
		return nil, nil, err
	}
	routing, err := h.CopyTo(s, to)
	if err != nil {
		h.Release()
		return nil, nil, err
	}
	return h, routing, nil
}

// DispatchSend is the first half of Dispatch. Rows may be used after DispatchReceive, or as Handle.Landed allows; other handles
// may be used in between. The caller may change t when the stream has run this half.
func (d *Dispatcher) DispatchSend(s device.Stream, t Tokens) (*Handle, error) {
	h, _, err := d.dispatch(s, t, kernels.Send, nil)
	return h, err
}

// DispatchReceive is the second half of DispatchSend or RedispatchSend.
func (d *Dispatcher) DispatchReceive(s device.Stream, h *Handle) error {
	d.c.Lock()
	defer d.c.Unlock()
	return d.second(s, h, kernels.OpDispatch, kernels.OpRedispatch)
}

// dispatch makes a dispatch, with a copy of what it leaves where there is an into.
func (d *Dispatcher) dispatch(s device.Stream, t Tokens, phase kernels.Phase, into *Result) (*Handle, *Routing, error) {
	if err := d.whole(phase); err != nil {
		return nil, nil, err
	}
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.usable(); err != nil {
		return nil, nil, err
	}
	tokens, err := d.checkTokensOf(&t)
	if err == nil && into != nil {
		err = into.sized()
	}
	if err != nil {
		return nil, nil, err
	}
	h, err := d.take(tokens)
	if err != nil {
		return nil, nil, err
	}
	l := d.op(kernels.OpDispatch, h)
	l.dispatch = kernels.Dispatch{
		DispatchCall: d.launchOf(l.kind, h), X: d.own(t.X), Scales: d.own(t.Scales), Experts: d.own(t.Experts), Weights: d.own(t.Weights),
		Ticket: h.ticket, Numbers: d.own(t.Numbers), Taken: t.Taken && phase == kernels.Both && into == nil,
	}
	h.taken = l.dispatch.Taken
	l.dispatch.Note.Payload = t.X.Len()
	var routing *Routing
	if into != nil {
		if routing, err = d.results(&l.results, h, into, true); err != nil {
			d.recycle(l)
		}
		l.dispatch.Into = &l.results
	}
	if err == nil {
		err = d.launch(s, l, phase)
	}
	if err != nil {
		h.Release()
		d.mu.Lock()
		d.next = h.memory // for the call when it is made again
		d.mu.Unlock()
		return nil, nil, err
	}
	return h, routing, nil
}

// checkTokensOf refuses tokens that are not as the options say, and returns how many there are.
func (d *Dispatcher) checkTokensOf(t *Tokens) (int, error) {
	o := &d.options
	if err := d.check("experts", t.Experts, -1, o.IndexType); err != nil {
		return 0, fmt.Errorf("%w (Options.IndexType)", err)
	}
	index := o.IndexType.Size()
	tokens := int(t.Experts.Len() / (index * int64(o.TopK)))
	if t.Experts.Len()%(index*int64(o.TopK)) != 0 {
		return 0, invalid("experts has %d bytes, which is no number of tokens with top-%d of %v", t.Experts.Len(), o.TopK, o.IndexType)
	}
	if tokens > o.MaxTokens {
		return 0, invalid("%d tokens, Options.MaxTokens is %d", tokens, o.MaxTokens)
	}
	if t.Weights.Len() > 0 {
		if err := d.check("weights", t.Weights, 4*int64(tokens)*int64(o.TopK), kernels.Float32); err != nil {
			return 0, err
		}
	}
	if t.Numbers.Len() > 0 {
		if err := d.check("numbers", t.Numbers, 4*int64(d.NumberWords()), kernels.Int32); err != nil {
			return 0, err
		}
		switch {
		case t.Numbers.Ptr()%8 != 0:
			return 0, invalid("numbers begins at %#x, which is no multiple of 8", t.Numbers.Ptr())
		case d.bounds.Layout.ByToken():
			return 0, invalid("there are numbers in the %v layout, which has none", d.bounds.Layout)
		case o.HostCounts && d.c.Heap.Device().Kind() != device.HostKind:
			return 0, invalid("there are numbers, and Options.HostCounts is set on a GPU")
		}
	}
	if err := d.checkX(t.X, t.Scales, tokens); err != nil {
		return 0, fmt.Errorf("%w (experts has %d tokens: %d bytes of top-%d %v, Options.IndexType)", err, tokens, t.Experts.Len(), o.TopK, o.IndexType)
	}
	return tokens, nil
}

// checkX refuses rows and scales of tokens with the wrong length, type or alignment.
func (d *Dispatcher) checkX(x, scales memory.View, tokens int) error {
	t := d.options.DType
	if err := d.checkRows("x", x, t); err != nil {
		return err
	}
	if need := int64(tokens) * int64(d.bounds.Hidden) * t.Size(); x.Len() != need {
		return invalid("x has %d bytes, %d tokens of %d x %v need %d", x.Len(), tokens, d.bounds.Hidden, t, need)
	}
	if d.options.DType == kernels.Float8E4M3 {
		t := kernels.Float32
		if d.options.ScaleFormat == UE8M0Scales {
			t = kernels.Int32 // bytes, four in a word
		}
		return d.check("scales", scales, 4*int64(tokens)*int64(d.bounds.ScaleWords()), t)
	}
	if scales.Len() > 0 {
		return invalid("there are scales for tokens of %v", d.options.DType)
	}
	return nil
}

// Redispatch sends new rows along the routes of an earlier dispatch: x and scales are like those of Tokens, for the tokens of h. The
// rows replace those in the handle; everything else in it stays.
func (d *Dispatcher) Redispatch(s device.Stream, h *Handle, x, scales memory.View) error {
	return d.redispatch(s, h, x, scales, kernels.Both)
}

// RedispatchSend is the first half of Redispatch; DispatchReceive is the second.
func (d *Dispatcher) RedispatchSend(s device.Stream, h *Handle, x, scales memory.View) error {
	return d.redispatch(s, h, x, scales, kernels.Send)
}

func (d *Dispatcher) redispatch(s device.Stream, h *Handle, x, scales memory.View, phase kernels.Phase) error {
	if err := cmp.Or(d.unmaskable("Redispatch"), d.whole(phase)); err != nil {
		return err
	}
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.ready(h, false); err != nil {
		return err
	}
	if err := d.checkX(x, scales, h.tokens); err != nil {
		return err
	}
	if overlap(x, h.Rows()) {
		return invalid("x and the rows of the handle overlap")
	}
	l := d.op(kernels.OpRedispatch, h)
	l.dispatch = kernels.Dispatch{DispatchCall: d.launchOf(l.kind, h), X: d.own(x), Scales: d.own(scales)}
	l.dispatch.Note.Payload = x.Len()
	return d.launch(s, l, phase)
}

// CombineOptions says how rows are combined. The zero value multiplies each by the weight that it was dispatched with.
type CombineOptions struct {
	// Weighting is the same on all ranks. Token-major layouts ignore it: a row is already the sum of its token on its rank.
	Weighting Weighting
	// Weights belong to the rows, in float32: [rows] in an expert-major layout, [rows, TopK] in a token-major one. GivenWeights and
	// SumWeights use them.
	Weights memory.View
	// TokenWeights are the factors of the rows with the weighting of that name: [T, TopK] of float32, like Tokens.Weights, of this rank's
	// tokens. In expert-major layouts only.
	TokenWeights memory.View
	// SumWeights gets the Weights of each token's choices, [T, TopK] of float32, 0 for masked ones. If Weights is the gradient of
	// Handle.Weights, that is the gradient of Tokens.Weights. Some ranks may leave it empty.
	SumWeights memory.View
	// Bias are added to the sums, [T, Hidden] of Options.CombineDType each. Empty means none.
	Bias [2]memory.View
	// Ready are 32-bit words, one for each local expert (in token-major layouts for each rank, for the rows that came from there).
	// Rows are sent back as soon as their word reaches their number. The caller sets the words to zero before the call; after its
	// kernel has written n rows of a word it adds n, with release semantics at system scope. Empty means that all rows are ready.
	Ready memory.View
	// Release gives the handle back with the call, as Handle.Release after it would, and promises that rows do not change until a
	// later dispatch of this Dispatcher is complete. Ranks then wait less for each other. It is the same on all ranks, and not for
	// halves.
	Release bool
}

// Combine brings the rows back: y[t] is the sum of weight times row over the choices of token t, plus the biases; a token without
// choices has the sum 0. y is [T, Hidden] of Options.CombineDType, with the T of this rank's dispatch. rows is laid out like
// Handle.Rows and of CombineDType; it may be Handle.Rows, and may end with the last row of the dispatch. Rows outside the symmetric
// heap are copied to staging first. Padding is not read.
//
// The package's documentation says how sums are made. The result has the same bits in every run and on every device.
func (d *Dispatcher) Combine(s device.Stream, y, rows memory.View, h *Handle, o CombineOptions) error {
	return d.combine(s, kernels.OpCombine, y, rows, h, o, kernels.Both)
}

// CombineSend is the first half of Combine. Until the second, peers may read rows, and y is not written.
func (d *Dispatcher) CombineSend(s device.Stream, y, rows memory.View, h *Handle, o CombineOptions) error {
	return d.combine(s, kernels.OpCombine, y, rows, h, o, kernels.Send)
}

// CombineReceive is the second half of CombineSend.
func (d *Dispatcher) CombineReceive(s device.Stream, h *Handle) error {
	d.c.Lock()
	defer d.c.Unlock()
	return d.second(s, h, kernels.OpCombine)
}

// DispatchBackward computes the gradient of Dispatch: dx[t] is the sum of dRows over the rows of token t, made as Combine makes
// it without weights. dx and dRows are of CombineDType. If the experts used Handle.Weights, dRowWeights is its gradient in the same
// layout, and dWeights, [T, TopK], gets that of each token's choices; otherwise both are empty.
func (d *Dispatcher) DispatchBackward(s device.Stream, dx, dWeights, dRows, dRowWeights memory.View, h *Handle) error {
	o := CombineOptions{Weighting: Unweighted, Weights: dRowWeights, SumWeights: dWeights}
	return d.combine(s, kernels.OpDispatchBackward, dx, dRows, h, o, kernels.Both)
}

// weighting is the weighting that a call uses.
func (d *Dispatcher) weighting(o CombineOptions) (Weighting, error) {
	if !o.Weighting.Valid() {
		return 0, invalid("CombineOptions.Weighting is %d", o.Weighting)
	}
	if d.bounds.Layout.ByToken() && o.Weighting != TokenWeights {
		return Unweighted, nil
	}
	if d.bounds.Layout.ByToken() {
		return 0, invalid("CombineOptions.Weighting is %v in the %v layout, where rows are not weighted", o.Weighting, d.bounds.Layout)
	}
	return o.Weighting, nil
}

func (d *Dispatcher) combine(
	s device.Stream, kind kernels.DispatchOp, y, rows memory.View, h *Handle, o CombineOptions, phase kernels.Phase,
) error {
	if err := d.whole(phase); err != nil {
		return err
	}
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.ready(h, false); err != nil {
		return err
	}
	names := [4]string{"y", "rows", "weights", "sum weights"}
	if kind == kernels.OpDispatchBackward {
		names = [4]string{"dx", "dRows", "dRowWeights", "dWeights"}
	}
	sum := d.options.CombineDType
	if err := d.checkTokens(names[0], y, h.tokens, sum); err != nil {
		return err
	}
	if err := d.checkRows(names[1], rows, sum); err != nil {
		return err
	}
	if err := d.mine(names[1], rows, h.rowsTurn); err != nil {
		return err
	}
	if overlap(y, rows) {
		return invalid("%s and the rows overlap", names[0])
	}
	w, err := d.weighting(o)
	if err != nil {
		return err
	}
	if err := d.checkGiven(names[2], w, o.Weights, rows); err != nil {
		return err
	}
	if w == TokenWeights {
		if d.options.Masks && d.c.Heap.Device().Kind() != device.HostKind {
			return fmt.Errorf("dispatch: %w: CombineOptions.TokenWeights with Options.Masks on a GPU", comm.ErrUnsupported)
		}
		if err := d.check("token weights", o.TokenWeights, 4*int64(h.tokens)*int64(d.options.TopK), kernels.Float32); err != nil {
			return err
		}
	} else if o.TokenWeights.Len() > 0 {
		return invalid("there are token weights, but CombineOptions.Weighting is %v", w)
	}
	if w != GivenWeights && o.Weights.Len() > 0 && kind == kernels.OpCombine && o.SumWeights.Len() == 0 && h.tokens > 0 {
		return invalid("there are weights, but CombineOptions.Weighting is %v and there are no SumWeights", w)
	}
	if o.SumWeights.Len() > 0 {
		if err := d.check(names[3], o.SumWeights, 4*int64(h.tokens)*int64(d.options.TopK), kernels.Float32); err != nil {
			return err
		}
	}
	for i, b := range o.Bias {
		if b.Len() > 0 {
			if err := d.checkTokens(fmt.Sprintf("bias %d", i), b, h.tokens, sum); err != nil {
				return err
			}
		}
	}
	if n := d.bounds.Groups(d.bounds.Rank); o.Ready.Len() > 0 {
		if err := d.check("ready", o.Ready, 4*int64(n), kernels.Int32); err != nil {
			return err
		}
	}
	if o.Release && phase != kernels.Both {
		return invalid("CombineOptions.Release in halves")
	}
	l := d.op(kind, h)
	l.combine = kernels.Combine{
		DispatchCall: d.launchOf(kind, h), Release: o.Release, Weighting: w, Y: d.own(y), Rows: d.shown(rows), RowWeights: d.shown(o.Weights),
		TokenWeights: d.own(o.TokenWeights),
		SumWeights:   d.own(o.SumWeights), Bias: [2]kernels.Buffer{d.own(o.Bias[0]), d.own(o.Bias[1])}, Ready: d.own(o.Ready),
	}
	l.combine.Note.Staged = staging(&l.combine.Rows, nil)
	if err := d.launch(s, l, phase); err != nil || !o.Release {
		return err
	}
	h.Release()
	return nil
}

// CombineBackward computes the gradients of Combine from dy, [T, Hidden], and the rows of that Combine. dRows is weight times dy[t]
// in each row of token t, and zero in padding that the layout has zero. dWeights is the inner product of dy[t] and the row of the
// token's choice: [T, TopK] of float32, 0 for masked choices; with GivenWeights it is laid out like CombineOptions.Weights. It may
// be empty, and is empty if rows were not weighted. All but dWeights is of CombineDType. Of o only Weighting and Weights may be
// set; the gradient of a bias is dy.
//
// rows and dRows are laid out like Handle.Rows; if rows were not weighted, rows is not read and may be empty. The two may be the
// same memory; otherwise they must not overlap each other or dy. Rows outside the symmetric heap go through staging.
func (d *Dispatcher) CombineBackward(s device.Stream, dRows, dWeights, dy, rows memory.View, h *Handle, o CombineOptions) error {
	if err := d.unmaskable("CombineBackward"); err != nil {
		return err
	}
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.ready(h, false); err != nil {
		return err
	}
	w, err := d.weighting(o)
	if err != nil {
		return err
	}
	switch {
	case w == TokenWeights:
		return invalid("combine backward by %v: dispatch the weights, or give those of rows", w)
	case o.SumWeights.Len() > 0 || o.Bias[0].Len() > 0 || o.Bias[1].Len() > 0 || o.Ready.Len() > 0:
		return invalid("combine backward takes no options but Weighting and Weights")
	case w == Unweighted && dWeights.Len() > 0:
		return invalid("gradients of weights are asked for, but the rows are not weighted")
	case w != GivenWeights && o.Weights.Len() > 0:
		return invalid("there are weights, but CombineOptions.Weighting is %v", w)
	}
	if err := d.checkGiven("weights", w, o.Weights, rows); err != nil {
		return err
	}
	if n := int64(h.tokens) * int64(d.options.TopK); dWeights.Len() > 0 && w == DispatchedWeights && dWeights.Len() != 4*n {
		return invalid("dWeights has %d bytes, %d tokens with top-%d have %d weights", dWeights.Len(), h.tokens, d.options.TopK, n)
	}
	if err := d.check("dWeights", dWeights, -1, kernels.Float32); err != nil {
		return err
	}
	sum := d.options.CombineDType
	if err := d.checkTokens("dy", dy, h.tokens, sum); err != nil {
		return err
	}
	if err := d.checkRows("rows", rows, sum); err != nil {
		return err
	}
	if err := d.mine("rows", rows, h.rowsTurn); err != nil {
		return err
	}
	if err := d.checkRows("dRows", dRows, sum); err != nil {
		return err
	}
	if overlap(dy, dRows) || overlap(rows, dRows) && rows.Ptr() != dRows.Ptr() {
		return invalid("dRows overlaps dy or lies across rows")
	}
	l := d.op(kernels.OpCombineBackward, h)
	l.backward = kernels.CombineBackward{
		DispatchCall: d.launchOf(l.kind, h), Weighting: w, DY: d.own(dy), Rows: d.shown(rows), DRows: d.shown(dRows),
		RowWeights: d.shown(o.Weights), DWeights: d.shown(dWeights),
	}
	l.backward.Note.Staged = staging(&l.backward.Rows, &l.backward.DRows)
	return d.launch(s, l, kernels.Both)
}

// staging is why rows go through staging: peers reach them in the heap only. A buffer that is empty goes nowhere.
func staging(rows, dRows *kernels.Buffer) flight.Staging {
	switch {
	case rows.Bytes > 0 && !rows.Reach:
		return flight.StagedInput
	case dRows != nil && dRows.Bytes > 0 && !dRows.Reach:
		return flight.StagedOutput
	}
	return flight.NotStaged
}
