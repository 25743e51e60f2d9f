package alltoallv_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

// Sizes on both sides of the length from which processes read each other's memory, and of what they read at once.
func TestPulledMessagesAcrossProcesses(t *testing.T) {
	worldtest.Procs(t, 3, 64<<20, func(r *worldtest.Rank) {
		for _, algorithm := range []string{"", "ring", "pipelined"} {
			var logs bytes.Buffer
			x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithm: algorithm, Logger: slog.New(slog.NewTextHandler(&logs, nil))})
			r.Must(err)
			for call, n := range []int64{1 << 10, 1<<16 - 1, 1 << 16, 1<<16 + 1, 1 << 20, 4<<20 + 3} {
				m := [][]int64{{n, n, 5}, {0, 100, n}, {n, 2 * n, 0}}
				dst := memory.Host(make([]byte, 4*n))
				r.Must(exchange(r, x, nil, dst, memory.Host(make([]byte, 4*n)), m, 1, call))
				inHeap, err := r.Heap.Alloc(4*n + 5)
				r.Must(err)
				r.Must(exchange(r, x, nil, dst, inHeap.View().Slice(5, 4*n), m, 1, call))
				r.Must(inHeap.Free())
				d, err := x.Explain(&alltoallv.Splits{Send: m[r.Rank()], Recv: column(m, r.Rank())}, false)
				r.Must(err)
				pulls := !strings.Contains(logs.String(), "take two copies") && d.Algorithm != "pipelined"
				if d.Pulled != pulls || pulls != strings.Contains(d.String(), "output pulled") || pulls && algorithm == "" && d.Algorithm != "direct" {
					r.Must(fmt.Errorf("%d bytes: %v; logs: %s", n, d, logs.String()))
				}
			}
			r.Must(x.Close(r.Ctx))
		}
	})
}

func TestF2_ProcessThatDiesWhileItIsReadIsNamed(t *testing.T) {
	worldtest.Procs(t, 3, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		const n = 4 << 20
		all := []int64{n, n, n}
		src, dst := memory.Host(make([]byte, 3*n)), memory.Host(make([]byte, 3*n))
		for call := 0; err == nil; call++ {
			err = x.Exchange(nil, dst, src, &alltoallv.Splits{Send: all, Recv: all})
			if call == 0 && r.Rank() == 2 { // all have begun
				time.AfterFunc(50*time.Millisecond, func() { os.Exit(0) })
			}
		}
		var peer *comm.PeerError
		if !errors.Is(err, comm.ErrPeerLost) || !errors.As(err, &peer) || peer.Rank != 2 {
			t.Errorf("rank %d: got %v", r.Rank(), err)
		}
	})
}
