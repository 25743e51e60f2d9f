package kernels

// Expand is one launch that makes of rows one for each token rows one for each choice: expert by expert, each from a multiple of Align on, in the
// order of tokens. No other rank takes part. Rows between those of two experts are zero. On the host those behind the last are, too; on a GPU they
// stay as they are.
type Expand struct {
	// Indices are [tokens, TopK] of int64, the expert of each choice, -1 for none, and Counts [experts] of int32 the choices of each. Slots are a
	// result of the shape of Indices, of int32: the row of each choice, -1 for none and for one behind the last row.
	Indices, Counts, Slots Buffer
	// Rooms are a result, [experts + 1] of int64: how many of the Length rows each expert has with those between it and the next, and at last 1 where
	// rows are left out, else 0. Without bytes they are not wanted.
	Rooms Buffer
	// Rows and Scales are copied to ToRows and ToScales, which have Length of them, as ToWeights has. Weights are [tokens, TopK] of float32.
	// Those without bytes are not there.
	Rows, ToRows, Scales, ToScales, Weights, ToWeights Buffer
	TopK, Align, Length                                int
	// Blocks bounds the multiprocessors that the launch takes, as in DispatchCall.
	Blocks int
	Launched
}

// Operation is the name of the call.
func (*Expand) Operation() string { return OpExpand.String() }

// Tokens is how many there are.
func (x *Expand) Tokens() int { return int(x.Indices.Bytes) / (8 * x.TopK) }

// Experts is how many there are.
func (x *Expand) Experts() int { return int(x.Counts.Bytes / 4) }

// Fold is one launch that is the inverse: the sums of the rows of each token's choices, in float32 and in the order of choices. No other rank
// takes part.
type Fold struct {
	// Sums are [tokens, hidden] of the Rows [rows, hidden] that Slots [tokens, TopK] have as in an Expand. Type is theirs: a float of 16 or 32
	// bits. ToWeights [tokens, TopK] are those of Weights [rows], 0 for no choice. Those without bytes are not there. A slot behind the last row
	// is an error on the host, and no choice on a GPU.
	Rows, Slots, Sums, Weights, ToWeights Buffer
	TopK                                  int
	Type                                  DType
	Blocks                                int
	Launched
}

// Operation is the name of the call.
func (*Fold) Operation() string { return OpFold.String() }

// Tokens is how many there are.
func (x *Fold) Tokens() int { return int(x.Slots.Bytes) / (4 * x.TopK) }

// Length is how many rows there are.
func (x *Fold) Length() int {
	if tokens := int64(x.Tokens()); x.Sums.Bytes > 0 && tokens > 0 {
		return int(x.Rows.Bytes / (x.Sums.Bytes / tokens))
	}
	return int(x.Weights.Bytes / 4)
}
