package worldtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
)

// HostWorlds are worlds on several hosts: ranks, and those of a host.
func HostWorlds() [][2]int { return [][2]int{{2, 1}, {4, 2}, {6, 2}, {3, 1}, {6, 3}} }

// EachHostWorld runs f on a process for every rank of a world, in network namespaces joined by UCX: on all of HostWorlds, and at 2 Gbit/s on
// the first three. Short tests have only those, and without a limit.
func EachHostWorld(t *testing.T, segment int64, f func(r *Rank)) {
	atRates(t, func(t *testing.T, rate string) {
		worlds := HostWorlds()
		if rate != "" || testing.Short() {
			worlds = worlds[:3]
		}
		for _, w := range worlds {
			t.Run(fmt.Sprintf("%d_of_%d", w[0], w[1]), func(t *testing.T) { hostProcs(t, w[0], w[1], rate, segment, f) })
		}
	})
}

// atRates runs f without a limit of what a host sends and, but for short tests, at 2 Gbit/s.
func atRates(t *testing.T, f func(t *testing.T, rate string)) {
	t.Run("no_limit", func(t *testing.T) { f(t, "") })
	if !testing.Short() {
		t.Run("2gbit", func(t *testing.T) { f(t, "2gbit") })
	}
}

// HostDies has rank 3 of 4 on two hosts, a process each, end without a word. The calls of the others name it soon, and what open has opened
// can be closed. At 2 Gbit/s, too.
func HostDies(t *testing.T, segment int64, open func(r *Rank) (call func() error, closes func(context.Context) error)) {
	atRates(t, func(t *testing.T, rate string) { hostDies(t, rate, segment, open) })
}

func hostDies(t *testing.T, rate string, segment int64, open func(r *Rank) (call func() error, closes func(context.Context) error)) {
	t.Helper()
	hostProcs(t, 4, 2, rate, segment, func(r *Rank) {
		call, closes := open(r)
		for k := range 50 {
			if r.Rank() == 3 && k == 5 {
				os.Exit(0)
			}
			start := time.Now()
			err := call()
			if err == nil {
				continue
			}
			if took := time.Since(start); took > time.Minute { // a loaded machine is slow
				r.Must(fmt.Errorf("after %v: %w", took, err))
			}
			var peer *comm.PeerError
			if !errors.Is(err, comm.ErrPeerLost) || !errors.As(err, &peer) || peer.Rank != 3 {
				r.Must(fmt.Errorf("call %d: got %w", k, err))
			}
			if err := closes(r.Ctx); err != nil && !errors.Is(err, comm.ErrPeerLost) { // the group may hear of it only now
				r.Must(err)
			}
			r.Must(r.Heap.Close(r.Ctx))
			return
		}
		r.Must(errors.New("no call has failed"))
	})
}
