package p2p_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// Messages of one tag come in their order, also while their receiver looks through the boxes as they are filled: each has a size of its own,
// so one that is taken for another is a disagreement.
func TestMessagesOfATagAreNotOvertaken(t *testing.T) {
	rounds := 200_000
	if testing.Short() {
		rounds = 20_000
	}
	worldtest.Procs(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: 20 * time.Second})
		data := make([]byte, 64)
		for round := range rounds {
			// The first message is received last, so the receiver looks for each of the others in all boxes.
			const first, others = 5, 0
			if r.Rank() == 1 {
				r.Must(x.Send(nil, 0, first, memory.Host(data)))
			}
			for i := range 10 {
				n := int64(1 + (round+i)%60)
				if r.Rank() == 1 {
					r.Must(x.Send(nil, 0, others, memory.Host(data[:n])))
				} else {
					r.Must(x.Recv(nil, 1, others, memory.Host(data[:n])))
				}
			}
			if r.Rank() == 0 {
				r.Must(x.Recv(nil, 1, first, memory.Host(data)))
			}
		}
		require.NoError(r.T, x.Close(r.Ctx))
	})
}
