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
type rank struct{ *worldtest.Rank }

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
	worldtest.Local(t, n, segment, func(r *worldtest.Rank) { f(&rank{r}) })
}

// processes runs f on n ranks, each in its own process.
func processes(t *testing.T, n int, f func(r *rank)) {
	t.Helper()
	worldtest.Procs(t, n, segment, func(r *worldtest.Rank) { f(&rank{r}) })
}

// numbers is a view of Go memory.
func numbers[T shm.Number](v []T) memory.View { return memory.Host(shm.Bytes(v)) }

// tokens is an input of a dispatch with 32-bit indices.
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

// rows are those of a handle that its dispatch has made, of so many bytes each.
func (r *rank) rows(h *dispatch.Handle, size int) memory.View {
	return h.Rows().Slice(0, int64(r.counts(h).Rows*size))
}
