package dispatch_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

// rank is one rank of a test, for require. When it fails the other ranks do too.
type rank struct {
	*worldtest.Rank
	gpu *gpuMemory // nil on the host
}

// up is memory of the rank's device with these bytes; of the host these bytes themselves.
func (r *rank) up(b []byte) memory.View {
	if r.gpu == nil {
		return memory.Host(b)
	}
	return r.gpu.up(b)
}

// down reads memory of the rank's device.
func (r *rank) down(v memory.View) []byte {
	if r.gpu == nil {
		return v.Bytes()
	}
	return r.gpu.down(v)
}

// write puts bytes into memory of the rank's device.
func (r *rank) write(v memory.View, b []byte) {
	if r.gpu == nil {
		copy(v.Bytes(), b)
		return
	}
	r.gpu.write(v, b)
}

func (r *rank) Errorf(format string, args ...any) {
	r.T.Errorf("rank %d: %s", r.Rank.Rank(), fmt.Sprintf(format, args...))
}

func (r *rank) FailNow() {
	r.Group.Abort(errors.New("the test failed on another rank"))
	runtime.Goexit()
}

const segment = 2 << 20

// local runs f on n ranks of this process.
func local(t testing.TB, n int, f func(r *rank)) {
	t.Helper()
	worldtest.Local(t, n, segment, func(r *worldtest.Rank) { f(&rank{Rank: r}) })
}

// processes runs f on n ranks, each in its own process.
func processes(t *testing.T, n int, f func(r *rank)) {
	t.Helper()
	worldtest.Procs(t, n, segment, func(r *worldtest.Rank) { f(&rank{Rank: r}) })
}

// numbers is a view of Go memory.
func numbers[T shm.Number](v []T) memory.View { return memory.Host(shm.Bytes(v)) }

// tokens is an input of a dispatch with 32-bit indices, on the rank's device as x is.
func (r *rank) tokens(x memory.View, idx []int32, weights []float32) dispatch.Tokens {
	return dispatch.Tokens{X: x, Experts: r.up(shm.Bytes(idx)), Weights: r.up(shm.Bytes(weights))}
}

// tokens is that on the host.
func tokens(x memory.View, idx []int32, weights []float32) dispatch.Tokens {
	return dispatch.Tokens{X: x, Experts: numbers(idx), Weights: numbers(weights)}
}

var (
	none  memory.View
	plain dispatch.CombineOptions
)

// counts are those of a handle.
func (r *rank) counts(h *dispatch.Handle) dispatch.HostCounts {
	c, err := h.HostCounts(r.Ctx)
	require.NoError(r, err)
	return c
}

func (r *rank) counters(d *dispatch.Dispatcher) dispatch.Counters {
	c, err := d.Counters()
	require.NoError(r, err)
	return c
}

// rows are those of a handle that its dispatch has made, each of that many bytes.
func (r *rank) rows(h *dispatch.Handle, size int) memory.View {
	return h.Rows().Slice(0, int64(r.counts(h).Rows*size))
}
