package explore

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
)

// Workload is a few consecutive exchanges as the kernels of all ranks get them. The model and the real kernel run the
// same ones.
type Workload struct {
	Block host.ExchangeBlock
	Calls []Call
}

// Call is one exchange. The slices are indexed by rank.
type Call struct {
	Routes    []*kernels.Routes
	Schedules []kernels.Schedule
	// Output is where the output buffer lies in the rank's segment, InPlace whether peers may write there.
	Output  []int64
	InPlace []bool
}

// Style is how one rank serves its peers in a call.
type Style struct {
	// Order is an alltoallv.Algorithm's.
	Order func(rank, size int) []int
	// Window is how many peers are served at a time, 0 for all.
	Window     int
	Staged     bool
	ChunkBytes int64
	InPlace    bool
	// Gap bytes are left free in the output before each message.
	Gap int64
}

// NewWorkload is a workload without calls, within these bounds.
func NewWorkload(size int, c kernels.ExchangeBounds) *Workload {
	c.Size = size
	return &Workload{Block: host.ExchangeBlock{ExchangeBounds: &c, Offset: kernels.HeaderBytes}}
}

// Outputs is where the output buffers begin in every segment.
func (w *Workload) Outputs() int64 {
	end := w.Block.Offset + w.Block.Bytes()
	return (end + kernels.LineBytes - 1) / kernels.LineBytes * kernels.LineBytes
}

// Add appends a call in which rank s sends bytes[s][d] to rank d. There is one style for all ranks or one for each.
func (w *Workload) Add(bytes [][]int64, styles ...Style) *Workload {
	n := w.Block.Size
	var c Call
	for rank := range n {
		style := styles[0]
		if len(styles) > 1 {
			style = styles[rank]
		}
		r := &kernels.Routes{}
		var sent, received int64
		for p := range n {
			r.SendBytes, r.SendOffsets = append(r.SendBytes, bytes[rank][p]), append(r.SendOffsets, sent)
			sent += bytes[rank][p]
			received += style.Gap
			r.RecvBytes, r.RecvOffsets = append(r.RecvBytes, bytes[p][rank]), append(r.RecvOffsets, received)
			received += bytes[p][rank]
		}
		for i, to := range style.Order(rank, n) {
			r.Order = append(r.Order, int32(to))
			for from := range n {
				if from != rank && style.Order(from, n)[i] == rank {
					r.ReverseOrder = append(r.ReverseOrder, int32(from))
				}
			}
		}
		if len(r.ReverseOrder) != n-1 {
			panic(fmt.Sprintf("explore: the order of rank %d has no mirror", rank))
		}
		c.Routes = append(c.Routes, r)
		c.Schedules = append(c.Schedules, kernels.Schedule{Window: style.Window, ChunkBytes: style.ChunkBytes, Staged: style.Staged})
		c.Output = append(c.Output, w.Outputs())
		c.InPlace = append(c.InPlace, style.InPlace)
	}
	w.Calls = append(w.Calls, c)
	return w
}

// inPlace reports whether the messages to a rank are written into its output.
func (c *Call) inPlace(rank int) bool { return c.InPlace[rank] && !c.Schedules[rank].Staged }

// OutputBytes is how much room the outputs of a rank need.
func (w *Workload) OutputBytes(rank int) int64 {
	var n int64
	for _, c := range w.Calls {
		for p, at := range c.Routes[rank].RecvOffsets {
			n = max(n, at+c.Routes[rank].RecvBytes[p])
		}
	}
	return n
}

// SourceBytes is how long the source of a rank is in a call.
func (c *Call) SourceBytes(rank int) int64 {
	var n int64
	for _, b := range c.Routes[rank].SendBytes {
		n += b
	}
	return n
}
