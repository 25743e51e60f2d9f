package worldtest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// The promises of this file are those of every communicator, so its tests only say how one is opened and called.

// AllocatesNothing fails the test when a call of f allocates once f is warm. All ranks call it, and all make as many calls. Allocations of all
// ranks of the process count.
func (r *Rank) AllocatesNothing(f func()) {
	r.T.Helper()
	const warm, runs = 5, 50
	for range warm {
		f()
	}
	r.Barrier()
	if r.Rank() != 0 {
		for range runs + 1 { // AllocsPerRun makes one call more than it counts
			f()
		}
	} else if got := testing.AllocsPerRun(runs, f); got > 0 && !proctest.Race {
		r.Must(fmt.Errorf("%v allocations a call", got))
	}
	r.Barrier()
}

// QueuedCallsFailAtOnce fails the test when, of 100 calls in a stream that wait for a rank which makes none, more than the first wait for their
// deadline (F1). open makes a communicator with a timeout, and returns a call of it.
func QueuedCallsFailAtOnce(t testing.TB, segment int64, open func(r *Rank, timeout time.Duration) (call func(s device.Stream) error)) {
	t.Helper()
	const calls, timeout, most = 100, time.Second, 50 * time.Second // 100 s if each waited
	waited := make(chan struct{})
	Local(t, 2, segment, func(r *Rank) {
		call := open(r, timeout)
		r.Barrier()
		if r.Rank() == 1 {
			<-waited
			return
		}
		defer close(waited)
		s, err := device.Host().NewStream()
		r.Must(err)
		start := time.Now()
		for range calls {
			r.Must(call(s))
		}
		err = s.Synchronize()
		var peer *comm.PeerError
		if took := time.Since(start); !errors.Is(err, comm.ErrTimeout) || !errors.As(err, &peer) || peer.Rank != 1 || took > most {
			r.Must(fmt.Errorf("got %v after %v", err, took))
		}
		r.Must(s.Close())
	})
}
