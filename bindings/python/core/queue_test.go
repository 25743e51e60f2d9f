package core

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Threads of a queue do not look before they sleep while looking loses their core.
func TestQueuesSleepFirstWhereLookingLosesTheCore(t *testing.T) {
	q := &queue{began: time.Now()}
	var word atomic.Uint32
	const watches = 20
	took := func() time.Duration {
		start := time.Now()
		for range watches {
			require.False(t, q.watch(&word, 0))
		}
		return time.Since(start)
	}
	require.GreaterOrEqual(t, took(), watches*watchFor)
	q.patience.Looked(time.Since(q.began), time.Second, false)
	require.Eventually(t, func() bool {
		q.began = time.Now().Add(time.Hour) // the rest is not over
		return took() < watches*watchFor/2
	}, time.Minute, time.Millisecond, "others may have the core meanwhile")
	word.Store(1)
	require.True(t, q.watch(&word, 0))
}
