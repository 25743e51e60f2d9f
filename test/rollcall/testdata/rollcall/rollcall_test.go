package rollcall_test

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/rollcall"
)

const segment = 8 << 20

func TestACallEndsWhenAllRanksHaveCalled(t *testing.T) {
	var begun atomic.Int64
	run := func(r *worldtest.Rank) {
		x, err := rollcall.New(r.Ctx, r.Heap, rollcall.Options{})
		r.Must(err)
		for call := 1; call <= 100; call++ {
			begun.Add(1)
			r.Must(x.Call(nil))
			if n := begun.Load(); n < int64(call*r.Size()) {
				r.Must(fmt.Errorf("call %d ended when %d had begun", call, n))
			}
		}
		r.Must(x.Close(r.Ctx))
	}
	for n := 1; n <= 4; n++ {
		begun.Store(0)
		worldtest.Local(t, n, segment, run)
	}
	begun.Store(0)
	worldtest.GPUs(t, 2, segment, run)
}

// Of the calls queued on a stream only the first waits for the deadline (F1).
func TestQueuedRollCallsFailAtOnce(t *testing.T) {
	waited := make(chan struct{})
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x, err := rollcall.New(r.Ctx, r.Heap, rollcall.Options{Timeout: 300 * time.Millisecond})
		r.Must(err)
		r.Barrier()
		if r.Rank() == 1 {
			<-waited
			return
		}
		defer close(waited)
		s, err := device.Host().NewStream()
		r.Must(err)
		start := time.Now()
		for range 20 {
			r.Must(x.Call(s))
		}
		err = s.Synchronize()
		if took := time.Since(start); !errors.Is(err, comm.ErrTimeout) || took > 3*time.Second { // 6 if each waited
			r.Must(fmt.Errorf("got %v after %v", err, took))
		}
		r.Must(s.Close())
	})
}

func TestRollCallsAllocateNothingOnceWarm(t *testing.T) {
	const runs = 50
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x, err := rollcall.New(r.Ctx, r.Heap, rollcall.Options{})
		r.Must(err)
		call := func() { r.Must(x.Call(nil)) }
		call()
		if r.Rank() != 0 {
			for range runs + 1 {
				call()
			}
		} else if got := testing.AllocsPerRun(runs, call); got > 0 {
			r.Must(fmt.Errorf("%v allocations a call", got))
		}
		r.Must(x.Close(r.Ctx))
	})
}
