package dispatch

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"time"
	"unicode/utf8"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Errors that callers tell apart with errors.Is.
var (
	// ErrInvalid is the cause of every error about arguments. Nothing has been enqueued then.
	ErrInvalid = comm.ErrInvalid
	// ErrClosed is returned by calls on a closed Dispatcher.
	ErrClosed = comm.ErrClosed
	// ErrReleased is returned for a Handle that was released or that never belonged to the Dispatcher.
	ErrReleased = errors.New("handle is not alive on this dispatcher")
	// ErrNoHandle is returned when Options.Handles handles are alive.
	ErrNoHandle = errors.New("no handle is free")
	// ErrHalf is returned when a handle is between the halves of a call, or a second half has no first.
	ErrHalf = errors.New("halves of calls do not pair up")
)

func invalid(format string, args ...any) error {
	return comm.Invalid("dispatch", format, args...)
}

// Errors that every rank gets from the same call. The handle then holds no dispatch, and the Dispatcher can be used further.
type (
	// OverflowError says that a dispatch does not fit Options.Capacity or Options.MaxRows, and by how much.
	OverflowError = kernels.OverflowError
	// IndexError says that a rank's token has a choice that is no expert.
	IndexError = kernels.IndexError
	// MaskedError says that the other ranks go on without this one, see Dispatcher.Mask.
	MaskedError = kernels.MaskedError
)

// Layout is the order of the rows of a rank's experts in memory. A row that belongs to no token is called padding.
type Layout = kernels.RowLayout

// The layouts. In the expert-major ones (Flat, Padded, Slab) each choice of a token is a row of its own; the rows of an expert
// are ordered by the rank they come from, then by token, then by choice. In the token-major ones (TokenMajor, RankPadded) a
// token has one row on a rank however many of its experts are there, ordered by the rank they come from and then by token;
// Handle.Indices and Handle.Weights have an entry for each row.
const (
	// Flat puts each expert's rows after those of the last expert, beginning at a multiple of Options.Align. Padding is zero.
	Flat = kernels.FlatRows
	// Padded gives each expert Options.Capacity rows: [local experts, capacity, hidden]. Padding is zero.
	Padded = kernels.PaddedRows
	// Slab is [local experts, ranks x MaxTokens, hidden], for few tokens. Padding is undefined: all rows of an expert behind its
	// Handle.Counts, which hold what the memory held before. Gradients of weights have to leave them out: they may be NaN. There is room for one row of every token
	// that any rank can have; tokens that have an expert twice need more, and where all are there that is an *OverflowError.
	Slab = kernels.SlabRows
	// TokenMajor puts the rows from each rank after those from the rank with the next lower number. There is no padding.
	TokenMajor = kernels.TokenRows
	// RankPadded is [ranks, MaxTokens, hidden]. Padding is undefined: all rows of a rank behind its Handle.RankCounts, in Handle.Rows as
	// in Handle.Indices and Handle.Weights, which may hold any number there.
	RankPadded = kernels.RankRows
)

// ScaleFormat is what one scale is.
type ScaleFormat = kernels.ScaleFormat

// The formats of scales.
const (
	// Float32Scales are float32 numbers.
	Float32Scales = kernels.Float32Scales
	// UE8M0Scales are powers of two, by their exponents: four bytes in an int32.
	UE8M0Scales = kernels.UE8M0Scales
	// PowerScales are powers of two, as float32 numbers.
	PowerScales = kernels.PowerScales
)

// Weighting says what a combine multiplies rows by.
type Weighting = kernels.Weighting

// The weightings.
const (
	// DispatchedWeights are Tokens.Weights of the dispatch, 1 where it had none.
	DispatchedWeights = kernels.DispatchedWeights
	// GivenWeights are CombineOptions.Weights.
	GivenWeights = kernels.GivenWeights
	// Unweighted sums rows as they are.
	Unweighted = kernels.Unweighted
	// TokenWeights are CombineOptions.TokenWeights.
	TokenWeights = kernels.TokenWeights
)

// Options of a Dispatcher. Experts, TopK and Hidden must be set. All ranks pass the same; New compares them, and its error names
// both values of an option that differs.
type Options struct {
	// Experts is the number of experts of all ranks together, without copies; TopK is the number of choices of a token, at most 64.
	Experts, TopK int
	// Hidden is the number of elements of a row. On a GPU rows are a multiple of 16 bytes.
	Hidden int
	// MaxTokens is the most tokens one rank has in a call; default 4096.
	MaxTokens int
	// AgreeMaxTokens takes the largest MaxTokens of any rank, which may then differ. Dispatcher.MaxTokens tells it.
	AgreeMaxTokens bool
	// IndexType of Tokens.Experts: Int32 (what zero means here) or Int64.
	IndexType kernels.DType

	// DType of tokens: Float32 (what zero means here), BFloat16, Float16 or Float8E4M3, which comes with scales.
	DType kernels.DType
	// Quantize makes rows of Float8E4M3 with scales from tokens of another type. See the package's documentation for the rule.
	Quantize bool
	// ScalePerToken gives a row one scale; by default it has one for each 128 elements.
	ScalePerToken bool
	// ScaleFormat is the format of Tokens.Scales and of Handle.Scales.
	ScaleFormat ScaleFormat
	// ScaleColumns puts Handle.Scales in column-major order: the first scale of all rows, then the second of all rows; in Padded
	// and Slab within each expert. Tokens.Scales are always row-major.
	ScaleColumns bool
	// CombineDType is the type of the rows and results of Combine and both backward calls: Float32, BFloat16 or Float16. Zero
	// means DType, or BFloat16 if DType is Float8E4M3.
	CombineDType kernels.DType
	// Float8Combine makes partial sums cross as Float8E4M3 with a float32 scale for each 128 elements. On GPUs rows of token-major layouts
	// are then copied to staging, also those in the symmetric heap.
	Float8Combine bool

	// Layout of the output.
	Layout Layout
	// Align is the multiple of rows at which each expert begins in a Flat or Slab output. The default is 1, in a Slab of rows with scales
	// 64: products of float8 store whole blocks of 64 rows, and with less room would write over the rows of the next expert.
	Align int
	// Capacity is the number of rows of each expert in a Padded output. By default it is MaxTokens times the number of ranks. That
	// overflows only if a token has an expert twice, but each call writes zeros in all rows without a token: set it.
	Capacity int
	// MaxRows bounds a Flat output of one rank, padding included, or a TokenMajor one. By default it cannot overflow. On the host
	// memory that is not used costs addresses only; a GPU has memory for all of it.
	MaxRows int

	// Placement of the experts; default Contiguous.
	Placement *Placement
	// Handles is how many handles can be alive at a time, each with an output of its own; default 4, at most 16384. Training needs one for each
	// MoE layer, inference one or two.
	Handles int
	// LowLatency takes kernels for few tokens on GPUs, one each way. They need MaxTokens of at most 1024, at most 1024 expert slots (fewer in
	// expert-major layouts, whose tables share memory with the tokens' choices: 928 with 256 tokens and TopK 8, 352 with 1024), and for rows that
	// are quantised a scale for each 128 elements. With other options it changes nothing.
	// Calls of 1024 tokens are slower so: on 2 H200 a pair by rank takes 126 us, with the other kernels 98.
	LowLatency bool
	// Sources makes dispatches fill Handle.Sources. RowWeights makes them fill Handle.Weights, which token-major layouts always have.
	Sources, RowWeights bool
	// Landed makes dispatches count in Handle.Landed. It is for expert-major layouts only.
	Landed bool
	// Masks makes Mask and Unmask work, by which calls go on without ranks, and masks ranks that are lost. It is for at most 16 ranks
	// of one host, and leaves out Redispatch and CombineBackward. On GPUs it needs LowLatency with a layout other than TokenMajor, Handles
	// of 1, NVLink between the GPUs or one GPU for all, and no CombineOptions.TokenWeights. A call takes longer then; graphs that were
	// captured before a rank is masked go on without it.
	Masks bool
	// Layer, when set, names the layer of the model whose tokens the dispatcher carries, in status and metrics: these then tell its tokens by
	// expert. The host counts them anyway. On a GPU they are told as the last call of Counters has found them. Dispatchers of one name are one
	// layer, and a dispatcher that several layers use counts all of them.
	Layer string
	// Shared has the dispatcher take turns with others in memory for rows, see Shared. All ranks set it alike.
	Shared *Shared
	// OwnRows gives a dispatcher with Shared memory for rows of its own. It has the order of calls in common with the others, and nothing
	// else: its results stay, and it has halves. On a GPU Shared changes nothing then.
	OwnRows bool
	// HostCounts makes Handle.HostCounts work, which tells the host how many rows came.
	HostCounts bool
	// MaxSMs bounds the multiprocessors of a GPU that a call takes. By default a call takes 24 for rows by token, and 64 with LowLatency for
	// at most 48 tokens; for rows by expert, and for more tokens with LowLatency, it takes all but 36, which are for other kernels (X10).
	// In a combine by expert a pass over the rank's own memory, which waits for no part of the call from a peer, takes the 36 for its time. A
	// call keeps its multiprocessors while it waits for other ranks. If calls of several dispatchers, exchangers or reducers run at the same time, on
	// streams that ranks may reach in different orders, bound them so that all fit. The host device ignores it.
	MaxSMs int
	// Table has measured times of dispatches and combines on GPUs. A call with MaxSMs of 0 takes the number of multiprocessors that was fastest
	// with this rank's tokens, in place of the numbers above, and never more than all but 36. nil is the table of the package, for 2 and 4
	// ranks. Ranks may have different ones. The numbers above hold where a table has no curves for the call: for another number of ranks,
	// more tokens than were measured, rows by expert without LowLatency, CombineBackward, and Handle.CopyTo. They also hold for a TokenMajor
	// dispatch without LowLatency whose rows a copy takes as they come (Tokens.Taken, Dispatcher.DispatchTo), which shares the GPU with the copy.
	Table *Table
	// Timeout bounds every wait for a peer; default 30 s. After it an error names the peer.
	// On the host a peer that moves bytes of the communicator's calls is not silent.
	Timeout time.Duration
}

const (
	scaleBlock   = 128
	productBlock = 64 // rows that a product of float8 stores at a time
	mostElements = 1 << 46
	mostExperts  = 1 << 20
	mostHandles  = 1 << 14
)

// maxLayer bounds the name of a layer, which is a label of metrics.
const maxLayer = 80

// validate fills in the defaults and describes the dispatcher to an engine, except for its memory.
func (o *Options) validate(rank, ranks int) (*kernels.DispatchBounds, error) {
	setDefault(&o.MaxTokens, 4096)
	setDefault(&o.Align, o.defaultAlign())
	setDefault(&o.Handles, 4)
	o.Timeout = cmp.Or(o.Timeout, communicator.DefaultTimeout)
	for _, v := range []struct {
		name  string
		value int
		most  int
	}{
		{"Experts", o.Experts, mostExperts}, {"TopK", o.TopK, 64}, {"Hidden", o.Hidden, math.MaxInt32},
		{"MaxTokens", o.MaxTokens, math.MaxInt32}, {"Align", o.Align, math.MaxInt32}, {"Handles", o.Handles, mostHandles},
	} {
		if v.value < 1 || v.value > v.most {
			return nil, invalid("Options.%s is %d, want 1 to %d", v.name, v.value, v.most)
		}
	}
	if !utf8.ValidString(o.Layer) || len(o.Layer) > maxLayer {
		return nil, invalid("Options.Layer is %.80q, want a name of at most %d bytes in UTF-8", o.Layer, maxLayer)
	}
	if most := math.MaxInt32; o.Capacity < 0 || o.Capacity > most {
		return nil, invalid("Options.Capacity is %d, want 0 to %d", o.Capacity, most)
	}
	switch {
	case o.MaxRows < 0:
		return nil, invalid("Options.MaxRows is %d, want at least 0", o.MaxRows)
	case o.MaxSMs < 0:
		return nil, invalid("Options.MaxSMs is %d, want at least 0", o.MaxSMs)
	case o.Timeout < 0:
		return nil, invalid("Options.Timeout is %v, want at least 0", o.Timeout)
	case o.OwnRows && o.Shared == nil:
		return nil, invalid("Options.OwnRows is set without Shared")
	}
	m := &kernels.DispatchBounds{
		Rank: rank, Ranks: ranks, Experts: o.Experts, TopK: o.TopK, MaxTokens: o.MaxTokens, Hidden: o.Hidden,
		Layout: o.Layout, Align: int64(o.Align), LowLatency: o.LowLatency, Landed: o.Landed, Masks: o.Masks, Float8Partials: o.Float8Combine,
	}
	if o.Masks && ranks > kernels.MaxMaskedRanks {
		return nil, invalid("Options.Masks is set for %d ranks, at most %d can be masked", ranks, kernels.MaxMaskedRanks)
	}
	if err := o.types(m); err != nil {
		return nil, err
	}
	if o.Placement == nil {
		o.Placement = Contiguous(o.Experts, ranks)
	} else {
		if err := o.Placement.validate(o.Experts, ranks); err != nil {
			return nil, err
		}
		o.Placement = o.Placement.clone()
	}
	m.First = o.Placement.slots(ranks)
	return m, o.rows(m)
}

// defaultAlign is Align where nothing is said.
func (o *Options) defaultAlign() int {
	if o.Layout == Slab && (o.Quantize || o.DType == kernels.Float8E4M3) {
		return productBlock
	}
	return 1
}

func setDefault(v *int, d int) {
	if *v == 0 {
		*v = d
	}
}

// types fills in the types of m.
func (o *Options) types(m *kernels.DispatchBounds) error {
	if o.DType == 0 {
		o.DType = kernels.Float32
	}
	if o.IndexType == 0 {
		o.IndexType = kernels.Int32
	}
	if o.CombineDType == 0 {
		o.CombineDType = o.DType
		if o.DType == kernels.Float8E4M3 {
			o.CombineDType = kernels.BFloat16
		}
	}
	wide := func(d kernels.DType) bool {
		return d == kernels.Float32 || d == kernels.BFloat16 || d == kernels.Float16
	}
	switch {
	case !wide(o.DType) && o.DType != kernels.Float8E4M3:
		return invalid("Options.DType is %v, tokens can be float32, bfloat16, float16 or float8_e4m3", o.DType)
	case !wide(o.CombineDType):
		return invalid("Options.CombineDType is %v, want float32, bfloat16 or float16", o.CombineDType)
	case o.IndexType != kernels.Int32 && o.IndexType != kernels.Int64:
		return invalid("Options.IndexType is %v, want int32 or int64", o.IndexType)
	case o.Quantize && o.DType == kernels.Float8E4M3:
		return invalid("Options.Quantize is set, but DType is float8_e4m3 already")
	case !o.ScaleFormat.Valid():
		return invalid("Options.ScaleFormat is %d", o.ScaleFormat)
	}
	m.TokenType, m.RowType, m.SumType, m.IndexBytes = o.DType, o.DType, o.CombineDType, int(o.IndexType.Size())
	if o.Quantize {
		m.RowType = kernels.Float8E4M3
	}
	if m.RowType != kernels.Float8E4M3 {
		if o.ScalePerToken || o.ScaleFormat != 0 || o.ScaleColumns {
			return invalid("there are options for scales, but rows are %v", o.DType)
		}
		return nil
	}
	m.Scales = kernels.Scales{Block: scaleBlock, Format: o.ScaleFormat, Columns: o.ScaleColumns}
	if o.ScalePerToken {
		m.Scales.Block = o.Hidden
	}
	return nil
}

// rows sets how many rows an output has.
func (o *Options) rows(m *kernels.DispatchBounds) error {
	all := int64(m.Ranks) * int64(o.MaxTokens)
	flat, tokens := o.Layout == Flat, o.Layout == TokenMajor
	switch {
	case !o.Layout.Valid():
		return invalid("Options.Layout is %d", uint8(o.Layout))
	case o.Capacity > 0 && o.Layout != Padded:
		return invalid("Options.Capacity is %d, but the layout is %v", o.Capacity, o.Layout)
	case o.MaxRows > 0 && !flat && !tokens:
		return invalid("Options.MaxRows is %d, but the layout is %v", o.MaxRows, o.Layout)
	case o.Align > 1 && !flat && o.Layout != Slab:
		return invalid("Options.Align is %d, but the layout is %v", o.Align, o.Layout)
	case o.Landed && o.Layout.ByToken():
		return invalid("Options.Landed is set, but the layout is %v", o.Layout)
	}
	most := int64(m.MostLocal())
	switch o.Layout {
	case Padded, Slab:
		if o.Layout == Padded {
			setDefault(&o.Capacity, int(all))
			m.Capacity = int64(o.Capacity)
		} else {
			m.Capacity = kernels.AlignUp(all, m.Align)
		}
		m.Rows = math.MaxInt64
		if m.Capacity <= math.MaxInt64/most {
			m.Rows = m.Capacity * most
		}
	case RankPadded:
		m.Rows = all
	default:
		worst := all
		if flat {
			// Every expert with rows wastes less than an alignment.
			worst = all*int64(o.TopK) + most*(m.Align-1)
		}
		setDefault(&o.MaxRows, int(worst))
		m.Rows = min(int64(o.MaxRows), worst)
	}
	if m.Rows > math.MaxInt32 {
		return invalid("a rank could get %d rows in one call, at most %d can be counted: lower MaxTokens, MaxRows or Capacity",
			m.Rows, math.MaxInt32)
	}
	// Sizes of memory are sums of products of this, which must not pass what 64 bits hold.
	if rows, row := max(m.Rows, all), int64(o.Hidden)*int64(o.Handles); rows > mostElements/row {
		return invalid("outputs of %d handles of %d rows of Hidden %d are more than 2^46 elements: lower MaxTokens, MaxRows or Capacity", o.Handles, rows, o.Hidden)
	}
	return nil
}

// fields are the options that must be equal on all ranks, with their names.
func (o *Options) fields() []string {
	return []string{
		fmt.Sprintf("Experts %d", o.Experts), fmt.Sprintf("TopK %d", o.TopK), fmt.Sprintf("Hidden %d", o.Hidden),
		fmt.Sprintf("MaxTokens %d", o.MaxTokens), fmt.Sprintf("AgreeMaxTokens %v", o.AgreeMaxTokens), fmt.Sprintf("IndexType %v", o.IndexType), fmt.Sprintf("DType %v", o.DType),
		fmt.Sprintf("Quantize %v", o.Quantize), fmt.Sprintf("ScalePerToken %v", o.ScalePerToken), fmt.Sprintf("ScaleFormat %d", o.ScaleFormat),
		fmt.Sprintf("ScaleColumns %v", o.ScaleColumns), fmt.Sprintf("CombineDType %v", o.CombineDType),
		fmt.Sprintf("Float8Combine %v", o.Float8Combine), fmt.Sprintf("Layout %v", o.Layout), fmt.Sprintf("Align %d", o.Align),
		fmt.Sprintf("Capacity %d", o.Capacity), fmt.Sprintf("MaxRows %d", o.MaxRows),
		fmt.Sprintf("Placement %v", o.Placement), fmt.Sprintf("Handles %d", o.Handles), fmt.Sprintf("LowLatency %v", o.LowLatency),
		fmt.Sprintf("Sources %v", o.Sources), fmt.Sprintf("RowWeights %v", o.RowWeights), fmt.Sprintf("Landed %v", o.Landed),
		fmt.Sprintf("HostCounts %v", o.HostCounts), fmt.Sprintf("Masks %v", o.Masks), fmt.Sprintf("Layer %q", o.Layer),
		fmt.Sprintf("Shared %v", o.Shared != nil), fmt.Sprintf("OwnRows %v", o.OwnRows),
	}
}
