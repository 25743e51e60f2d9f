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
	rounds, most := 200_000, time.Minute // a busy machine has less time for it
	if testing.Short() {
		rounds, most = 10_000, time.Second
	}
	worldtest.Procs(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: time.Minute})
		data := make([]byte, 64)
		begun := time.Now()
		for round := range rounds {
			if round%100 == 0 {
				word := []byte{0}
				if r.Rank() == 1 && time.Since(begun) > most {
					word[0] = 1
				}
				const over = 7
				if r.Rank() == 1 {
					r.Must(x.Send(nil, 0, over, memory.Host(word)))
				} else {
					r.Must(x.Recv(nil, 1, over, memory.Host(word)))
				}
				if word[0] == 1 {
					break
				}
			}
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
