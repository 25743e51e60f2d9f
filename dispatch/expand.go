package dispatch

import (
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Expansion is rows one for each token, as TokenMajor has them, and memory for rows one for each choice.
type Expansion struct {
	// Indices are [tokens, TopK] of int64, the expert of each choice here, -1 for none, as Result.Indices are. Counts [experts] of int32 are the
	// choices of each, as those of Result are. Slots are written, [tokens, TopK] of int32: the row of each choice, -1 for none.
	Indices, Counts, Slots memory.View
	// Rooms are written, [experts + 1] of int64: how many rows each expert has with those between it and the next, as far as Length goes, and at last 1
	// where choices were left out, else 0. Empty: they are not wanted.
	Rooms memory.View
	// Rows and Scales have one for each token, of any type, and Weights [tokens, TopK] are float32. They are written to ToRows, ToScales and
	// ToWeights, which have Length rows. A view that is empty is not there; Rows are.
	Rows, ToRows, Scales, ToScales, Weights, ToWeights memory.View
	// Align is of which each expert's first row is a multiple, at least 1.
	Align, Length int
}

// Expand makes of rows one for each token rows one for each choice of this rank's experts: expert by expert, in the order of tokens. Rows between
// those of two experts are zero. Choices for which Length leaves no room are left out. On the host rows behind the last one are zero, too; on a
// GPU they stay as they are. No other rank takes part, and the call is in the order of s, like a copy.
func (d *Dispatcher) Expand(s device.Stream, e Expansion) error {
	tokens, err := d.tokensIn(e.Indices, 8, kernels.Int64)
	if err != nil {
		return err
	}
	if e.Align < 1 || e.Length < 0 || e.Length > 1<<31-1 {
		return invalid("%d rows of experts that begin at multiples of %d", e.Length, e.Align)
	}
	if e.Counts.Len()%4 != 0 || e.Counts.Len() == 0 {
		return invalid("counts has %d bytes", e.Counts.Len())
	}
	for _, p := range []struct {
		name string
		v    memory.View
		want int64
		t    kernels.DType
	}{
		{"counts", e.Counts, e.Counts.Len(), kernels.Int32}, {"slots", e.Slots, e.Indices.Len() / 2, kernels.Int32},
		{"rooms", e.Rooms, either(e.Rooms, 2*e.Counts.Len()+8), kernels.Int64},
		{"weights", e.Weights, either(e.Weights, e.Indices.Len()/2), kernels.Float32},
		{"to weights", e.ToWeights, either(e.Weights, 4*int64(e.Length)), kernels.Float32},
	} {
		if err := d.check(p.name, p.v, p.want, p.t); err != nil {
			return err
		}
	}
	for _, p := range []struct {
		name     string
		from, to memory.View
		each     int64
	}{{"rows", e.Rows, e.ToRows, 16}, {"scales", e.Scales, e.ToScales, 4}} {
		if err := d.rowsOf(p.name, p.from, p.to, tokens, e.Length, p.each); err != nil {
			return err
		}
	}
	x := &kernels.Expand{
		Indices: d.own(e.Indices), Counts: d.own(e.Counts), Slots: d.own(e.Slots), Rooms: d.own(e.Rooms), Rows: d.own(e.Rows), ToRows: d.own(e.ToRows),
		Scales: d.own(e.Scales), ToScales: d.own(e.ToScales), Weights: d.own(e.Weights), ToWeights: d.own(e.ToWeights),
		TopK: d.bounds.TopK, Align: e.Align, Length: e.Length, Blocks: d.options.MaxSMs,
	}
	return d.alone(s, x, &x.Launched)
}

// Folding is rows one for each choice, as Expand has made them, and memory for rows one for each token.
type Folding struct {
	// Rows are [rows, hidden] of a float of 16 or 32 bits, Slots [tokens, TopK] those of Expand, and Sums [tokens, hidden] are written.
	Rows, Slots, Sums memory.View
	Type              kernels.DType
	// Weights are [rows] of float32; ToWeights [tokens, TopK] get that of the row of each choice, 0 for none. Both may be empty.
	Weights, ToWeights memory.View
}

// Fold sums the rows of each token's choices, in float32 and in the order of choices, as Expand does in other respects. A slot behind the last row
// is an error on the host, and no choice on a GPU.
func (d *Dispatcher) Fold(s device.Stream, f Folding) error {
	tokens, err := d.tokensIn(f.Slots, 4, kernels.Int32)
	if err != nil {
		return err
	}
	if f.Type != kernels.Float32 && f.Type != kernels.BFloat16 && f.Type != kernels.Float16 {
		return invalid("sums of %v", f.Type)
	}
	hidden, weights := int64(0), int64(-1)
	if tokens > 0 {
		hidden = f.Sums.Len() / int64(tokens)
	}
	if hidden > 0 {
		weights = either(f.Weights, 4*(f.Rows.Len()/hidden))
	}
	for _, p := range []struct {
		name string
		v    memory.View
		want int64
		t    kernels.DType
	}{
		{"rows", f.Rows, -1, f.Type}, {"sums", f.Sums, hidden * int64(tokens), f.Type},
		{"weights", f.Weights, weights, kernels.Float32}, {"to weights", f.ToWeights, either(f.Weights, 4*int64(tokens)*int64(d.bounds.TopK)), kernels.Float32},
	} {
		if err := d.check(p.name, p.v, p.want, p.t); err != nil {
			return err
		}
	}
	if hidden%f.Type.Size() != 0 || hidden == 0 && f.Rows.Len() > 0 && tokens > 0 || hidden > 0 && f.Rows.Len()%hidden != 0 {
		return invalid("rows of %d bytes, sums of %d tokens of %d bytes", f.Rows.Len(), tokens, hidden)
	}
	if d.c.Heap.Device().Kind() != device.HostKind && hidden%16 != 0 {
		return invalid("rows of %d bytes: on a GPU want a multiple of 16", hidden)
	}
	x := &kernels.Fold{
		Rows: d.own(f.Rows), Slots: d.own(f.Slots), Sums: d.own(f.Sums), Weights: d.own(f.Weights), ToWeights: d.own(f.ToWeights),
		TopK: d.bounds.TopK, Type: f.Type, Blocks: d.options.MaxSMs,
	}
	return d.alone(s, x, &x.Launched)
}

// either is n where a view is there, else nothing.
func either(v memory.View, n int64) int64 {
	if v.Len() == 0 {
		return 0
	}
	return n
}

// tokensIn is the number of tokens of what has size bytes for each choice.
func (d *Dispatcher) tokensIn(v memory.View, size int64, t kernels.DType) (tokens int, err error) {
	each := size * int64(d.bounds.TopK)
	if v.Len()%each != 0 {
		return 0, invalid("%d bytes are no number of tokens with top-%d of %v", v.Len(), d.bounds.TopK, t)
	}
	return int(v.Len() / each), d.check("indices", v, -1, t)
}

// rowsOf checks rows of any type for tokens, and room for length of them.
func (d *Dispatcher) rowsOf(name string, from, to memory.View, tokens, length int, multiple int64) error {
	for _, v := range []memory.View{from, to} {
		if err := d.check(name, memory.As[uint8](v), -1, kernels.Uint8); err != nil {
			return err
		}
	}
	if tokens == 0 || length == 0 || from.Len() == 0 && to.Len() == 0 {
		return nil
	}
	size := to.Len() / int64(length)
	if size*int64(length) != to.Len() || size*int64(tokens) != from.Len() || size == 0 {
		return invalid("%s of %d tokens have %d bytes, %d rows of them %d", name, tokens, from.Len(), length, to.Len())
	}
	if d.c.Heap.Device().Kind() != device.HostKind && size%multiple != 0 {
		return invalid("%s of %d bytes: on a GPU want a multiple of %d", name, size, multiple)
	}
	return nil
}

// alone makes a call of which no other rank hears.
func (d *Dispatcher) alone(s device.Stream, op kernels.Operation, l *kernels.Launched) error {
	l.Note = kernels.Note{Payload: -1, Alone: true}
	if s != nil {
		l.Done = d.c.DoneApart
	}
	return d.late(d.c.LaunchApart(s, op))
}
