package dispatch_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/switchyard-moe/switchyard/internal/worldtest"
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
