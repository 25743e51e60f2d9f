//go:build cgo && linux

package ucx

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
)

// established says whether connections of a rail are.
func established(t *testing.T, r *Rail) (some bool) {
	require.NoError(t, sockets(func(fd, own, other int) {
		if own == r.port || slices.Contains(r.theirs, other) {
			info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
			some = some || err == nil && info.State == unix.BPF_TCP_ESTABLISHED
		}
	}))
	return some
}

// A rail whose UCX does not end gets its connections cut. Where that does not help it is closed all the same, and says so. Others open.
func TestF1_CloseLeavesAUCXThatDoesNotEnd(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	for _, c := range []struct {
		name string
		ends bool // once its connections are cut
	}{{"never", false}, {"once cut", true}} {
		t.Run(c.name, func(t *testing.T) {
			ends := railtest.Ends(t, 2, Open)
			for _, e := range ends {
				require.NoError(t, e.Meet(t.Context()))
			}
			r := ends[0].Rail.(*Rail)
			require.True(t, established(t, r))
			if !c.ends {
				r.cutGrace = time.Second
			}
			quit, left, over := r.quit, make(chan struct{}), make(chan struct{})
			r.quit = func() {
				for c.ends && established(t, r) {
					time.Sleep(time.Millisecond)
				}
				if !c.ends {
					<-left
				}
				quit()
				close(over)
			}
			err := r.Close()
			if c.ends {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, "ucx: close: UCX has not ended in 2s, and goes on")
			}
			require.NoError(t, r.Close(), "again")
			close(left)
			<-over
			again, err := Open(rails.Config{Size: 1})
			require.NoError(t, err)
			require.NoError(t, again.Close())
		})
	}
}

// A rail whose peer has not come does not wait for it once more when it is closed.
func TestF1_CloseWaitsForNobodyAgain(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	var ends []*Rail
	for i := range 2 {
		r, err := Open(rails.Config{Rank: i, Size: 2, Key: railtest.Key})
		require.NoError(t, err)
		ends = append(ends, r.(*Rail))
	}
	r, mute := ends[0], ends[1]
	require.NoError(t, r.Connect(1, mute.Address())) // which does not connect in its turn
	r.grace = time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), settleGrace)
	defer cancel()
	require.ErrorIs(t, r.Meet(ctx), comm.ErrTimeout)
	closed := make(chan error)
	go func() { closed <- r.Close() }()
	select {
	case err := <-closed:
		require.EqualError(t, err, "ucx: close: a connection has not come about, and UCX keeps its memory")
	case <-time.After(time.Minute):
		t.Fatal("Close waits for the peer")
	}
	require.NoError(t, mute.Close())
}
