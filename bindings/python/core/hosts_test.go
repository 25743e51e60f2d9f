package core

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A Comm over several hosts exchanges and reduces, and its messages cross.
func TestHostsOfAComm(t *testing.T) {
	worldtest.Hosts(t, 4, 2, 1<<20, func(r *worldtest.Rank) {
		g, err := r.Group.Split(r.Ctx, 0, 0)
		require.NoError(r.T, err)
		c, err := open(Options{TimeoutSeconds: 20}, words(), func(context.Context) (*comm.Group, error) { return g, nil })
		require.NoError(r.T, err)
		_, err = await(c, 1, nil)
		require.NoError(r.T, err)

		src, dst := make([]int64, 4), make([]int64, 4)
		for p := range 4 {
			src[p] = int64(10*r.Rank() + p)
		}
		shape := Shape{ShapeHead: &ShapeHead{Row: 8, DstBytes: 32, SrcBytes: 32}, Ranks: slices.Repeat([]int64{1}, 8)}
		ticket, err := c.AllToAll(0, buf(dst).Addr, buf(src).Addr, shape)
		_, err = await(c, ticket, err)
		require.NoError(r.T, err)
		for p := range 4 {
			require.EqualValues(r.T, 10*p+r.Rank(), dst[p])
		}

		got := make([]byte, 8)
		q, err := c.Messages(0, []MessageCall{send([]byte(fmt.Sprintf("rank %03d", r.Rank())), 3-r.Rank(), 0), receive(got, 3-r.Rank(), 0)}, 0)
		require.NoError(r.T, err)
		_, _, err = q.Wait(20 * time.Second)
		require.NoError(r.T, err)
		require.Equal(r.T, fmt.Sprintf("rank %03d", 3-r.Rank()), string(got))

		ticket, err = c.AllReduce(0, buf(dst), buf(src), kernels.Int64, kernels.Sum)
		_, err = await(c, ticket, err)
		require.NoError(r.T, err)
		require.EqualValues(r.T, []int64{60, 64, 68, 72}, dst)

		ticket, err = c.Close(false)
		_, err = await(c, ticket, err)
		require.NoError(r.T, err)
	})
}
