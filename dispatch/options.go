package dispatch

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
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
)

func invalid(format string, args ...any) error {
	return fmt.Errorf("dispatch: %w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}

// OverflowError says that a dispatch does not fit Options.Capacity or Options.MaxRows, and by how much. Every rank gets
// the same, no row has been moved, and the Dispatcher can be used further.
type OverflowError = kernels.OverflowError

// Layout is how the rows of a rank's experts lie in memory.
type Layout uint8

const (
	// Flat puts each expert's rows after those of the one before, beginning at a multiple of Options.Align.
	Flat Layout = iota
	// Padded gives each expert Options.Capacity rows: [local experts, capacity, hidden].
	Padded
)

// String is "flat" or "padded".
func (l Layout) String() string { return [...]string{"flat", "padded"}[l&1] }

// Options of a Dispatcher. Experts, TopK and Hidden have to be set. All ranks pass the same; New compares them and
// names both values where they differ.
type Options struct {
	// Experts is how many there are on all ranks together, not counting copies; TopK is how many a token can have.
	Experts, TopK int
	// Hidden is the number of elements of a row.
	Hidden int
	// MaxTokens is the most tokens one rank has in a call; default 4096.
	MaxTokens int
	// DType of rows: Float32 (what zero means here), BFloat16 or Float16. Sums are always made in float32.
	DType kernels.DType
	// Layout of the output. Rows that belong to no token are zero in either.
	Layout Layout
	// Align is the multiple of rows at which each expert begins in a Flat output; default 1.
	Align int
	// Capacity is how many rows each expert has in a Padded output. By default it is what cannot overflow, MaxTokens of
	// every rank, all of which have to be zeroed where no token is: set it.
	Capacity int
	// MaxRows bounds a Flat output of one rank, padding included. By default it is what cannot overflow. Memory is taken
	// as it is used on the host, so the default costs addresses; other devices pay for all of it.
	MaxRows int
	// Placement of the experts; default Contiguous.
	Placement *Placement
	// Handles is how many can be alive at a time, each with an output of its own; default 4. Training needs as many as
	// it has MoE layers, inference one or two.
	Handles int
	// Timeout bounds every wait for a peer; default 30 s. It is the time in which a hung peer is named.
	Timeout time.Duration
}

// validate fills in the defaults and lays the experts out.
func (o *Options) validate(ranks int) (*kernels.Experts, error) {
	setDefault(&o.MaxTokens, 4096)
	setDefault(&o.Align, 1)
	setDefault(&o.Handles, 4)
	if o.DType == 0 {
		o.DType = kernels.Float32
	}
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Second
	}
	for _, v := range []struct {
		name  string
		value int
		most  int
	}{
		{"Experts", o.Experts, math.MaxInt32}, {"TopK", o.TopK, o.Experts}, {"Hidden", o.Hidden, math.MaxInt32},
		{"MaxTokens", o.MaxTokens, math.MaxInt32}, {"Align", o.Align, math.MaxInt32}, {"Handles", o.Handles, 1 << 20},
	} {
		if v.value < 1 || v.value > v.most {
			return nil, invalid("Options.%s is %d, want 1 to %d", v.name, v.value, v.most)
		}
	}
	if o.DType != kernels.Float32 && o.DType != kernels.BFloat16 && o.DType != kernels.Float16 {
		return nil, invalid("Options.DType is %v, rows can be float32, bfloat16 or float16", o.DType)
	}
	if o.Capacity < 0 || o.MaxRows < 0 || o.Timeout < 0 {
		return nil, invalid("Options.Capacity is %d, MaxRows %d, Timeout %v", o.Capacity, o.MaxRows, o.Timeout)
	}
	switch o.Layout {
	case Flat:
		if o.Capacity > 0 {
			return nil, invalid("Options.Capacity is %d, but the layout is flat", o.Capacity)
		}
	case Padded:
		if o.MaxRows > 0 || o.Align > 1 {
			return nil, invalid("Options.MaxRows is %d and Align %d, but the layout is padded", o.MaxRows, o.Align)
		}
	default:
		return nil, invalid("Options.Layout is %d", uint8(o.Layout))
	}
	if o.Placement == nil {
		o.Placement = Contiguous(o.Experts, ranks)
	} else {
		if err := o.Placement.validate(o.Experts, ranks); err != nil {
			return nil, err
		}
		o.Placement = o.Placement.clone()
	}
	return o.layout(ranks)
}

func setDefault(v *int, d int) {
	if *v == 0 {
		*v = d
	}
}

func (o *Options) layout(ranks int) (*kernels.Experts, error) {
	x := &kernels.Experts{First: make([]int32, 1, ranks+1), Align: int64(o.Align), Hidden: o.Hidden, DType: o.DType}
	most := 0 // slots of one rank
	for r := range ranks {
		local := o.Placement.Local(r)
		for _, e := range local {
			x.Expert = append(x.Expert, int32(e))
		}
		x.First = append(x.First, int32(len(x.Expert)))
		most = max(most, len(local))
	}
	all := int64(ranks) * int64(o.MaxTokens)
	if o.Layout == Padded {
		setDefault(&o.Capacity, int(all))
		x.Capacity = int64(o.Capacity)
		x.Rows = x.Capacity * int64(most)
	} else {
		// Every expert with rows wastes less than an alignment.
		worst := all*int64(min(o.TopK, most)) + int64(most)*(x.Align-1)
		setDefault(&o.MaxRows, int(worst))
		x.Rows = min(int64(o.MaxRows), worst)
	}
	if x.Rows > math.MaxInt32 {
		return nil, invalid("a rank could get %d rows in one call, at most %d can be counted: lower MaxTokens, MaxRows or Capacity", x.Rows, math.MaxInt32)
	}
	return x, nil
}

// fields is what has to be equal on all ranks, with its names.
func (o *Options) fields() []string {
	return []string{
		fmt.Sprintf("Experts %d", o.Experts), fmt.Sprintf("TopK %d", o.TopK), fmt.Sprintf("Hidden %d", o.Hidden),
		fmt.Sprintf("MaxTokens %d", o.MaxTokens), fmt.Sprintf("DType %v", o.DType), fmt.Sprintf("Layout %v", o.Layout),
		fmt.Sprintf("Align %d", o.Align), fmt.Sprintf("Capacity %d", o.Capacity), fmt.Sprintf("MaxRows %d", o.MaxRows),
		fmt.Sprintf("Placement %v", o.Placement), fmt.Sprintf("Handles %d", o.Handles),
	}
}
