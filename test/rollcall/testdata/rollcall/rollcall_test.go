package rollcall_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/rollcall"
)

func init() { worldtest.Unseen() }

const segment = 8 << 20

func TestACallEndsWhenAllRanksHaveCalled(t *testing.T) {
	var begun [5]atomic.Int64 // by the number of ranks
	worldtest.Devices(t, segment, func(r *worldtest.Rank) {
		x, err := rollcall.New(r.Ctx, r.Heap, rollcall.Options{})
		r.Must(err)
		r.Barrier()
		before := begun[r.Size()].Load()
		r.Barrier()
		for call := int64(1); call <= 100; call++ {
			begun[r.Size()].Add(1)
			r.Must(x.Call(nil))
			if n := begun[r.Size()].Load() - before; n < call*int64(r.Size()) {
				r.Must(fmt.Errorf("call %d ended when %d had begun", call, n))
			}
		}
		r.Must(x.Close(r.Ctx))
	}, 1, 2, 3, 4)
}

func TestRollCallsKeepPromises(t *testing.T) {
	worldtest.Kind(func(r *worldtest.Rank, o worldtest.Opening) (*worldtest.Member, error) {
		if o.Bad {
			o.Timeout = -1
		}
		x, err := rollcall.New(r.Ctx, r.Heap, rollcall.Options{Timeout: o.Timeout})
		if err != nil {
			return nil, err
		}
		return &worldtest.Member{Call: func(s device.Stream, _ bool) error { return x.Call(s) }, Close: x.Close}, nil
	}).KeepsPromises(t, worldtest.Repeated) // a call has nothing that can be refused
}
