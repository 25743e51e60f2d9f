package alltoallv_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Ranks 0 and 1 disagree on a message of one packet, and rank 1, which sends it, hears of that in its next call. The others are not kept:
// they make that call as if nothing had been wrong, and rank 1 makes it too.
func TestF3_ARankThatHearsLateKeepsNobody(t *testing.T) {
	for range 50 {
		worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
			x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: time.Minute})
			r.Must(err)
			call := func(send, recv int64) error { // to rank 0
				sp := &alltoallv.Splits{Send: []int64{send, 0, 0}, Recv: make([]int64, 3)}
				if r.Rank() == 0 {
					sp = &alltoallv.Splits{Send: []int64{send, 0, 0}, Recv: []int64{send, recv, recv}}
				}
				return x.Exchange(nil, memory.Host(make([]byte, 64)), memory.Host(make([]byte, 64)), sp)
			}
			var bad *kernels.CountMismatchError
			switch r.Rank() {
			case 0:
				require.ErrorAs(r.T, call(12, 20), &bad)
			case 1:
				if err = call(12, 0); err != nil {
					r.Must(call(20, 0))
				} else {
					err = call(20, 0)
				}
				require.ErrorAs(r.T, err, &bad)
			case 2:
				r.Must(call(20, 0))
			}
			if r.Rank() != 1 {
				r.Must(call(20, 20))
			}
			r.Must(x.Close(r.Ctx))
		})
	}
}
