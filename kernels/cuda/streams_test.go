package cuda

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A GPU has 32 queues for streams, for all communicators of all ranks on it: those of one rank have one stream for calls without one, and as
// many as such calls run at once.
func TestCommunicatorsShareStreams(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	for _, sharers := range []int{1, 2} {
		_, ctx := emulated.Device(t, 0)
		memory, err := ctx.MemAlloc(1 << 20)
		require.NoError(t, err)
		e, err := New(ctx, kernels.Space{Base: memory, Stride: 512 << 10, Size: 2}, sharers, func() error { return nil })
		require.NoError(t, err)
		m := &kernels.DispatchBounds{
			Ranks: 2, Experts: 2, First: []int32{0, 1, 2}, TopK: 1, MaxTokens: 64, Hidden: 128, IndexBytes: 4,
			TokenType: kernels.BFloat16, RowType: kernels.BFloat16, SumType: kernels.BFloat16, Layout: kernels.FlatRows, Rows: 128, Align: 1,
			Handles: make([]kernels.DispatchHandle, 1),
		}
		var ports []kernels.Port
		for range 3 {
			p, err := e.Open(m, kernels.HeaderBytes)
			require.NoError(t, err)
			ports = append(ports, p)
			call := kernels.DispatchCall{Op: kernels.OpDispatch, Phase: kernels.Both, Tokens: 64, Launched: kernels.Launched{Timeout: time.Second}}
			require.NoError(t, p.Launch(nil, &kernels.Dispatch{DispatchCall: call}))
			require.Len(t, e.streams, 1)
		}
		first, err := e.takeStream()
		require.NoError(t, err)
		second, err := e.takeStream()
		require.NoError(t, err)
		require.NotEqual(t, first, second)
		e.giveStream(second)
		e.giveStream(first)
		for _, p := range ports {
			require.NoError(t, p.Close())
		}
		require.Len(t, e.streams, 2, "ports leave the streams of their engine")
		require.NoError(t, e.Close())
		require.NoError(t, ctx.MemFree(memory))
	}
}
