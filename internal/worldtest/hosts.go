package worldtest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/proctest"
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

// losses are how ranks of the second of two hosts of two are lost.
var losses = []struct {
	name   string
	ranks  []int
	silent bool
}{{"a_rank_ends", []int{3}, false}, {"a_leader_ends", []int{2}, false}, {"a_host_falls_silent", []int{2, 3}, true}}

// HostDies has ranks of four on two hosts, a process each, be lost in the middle of calls: one ends without a word, then the leader of a host does, and
// but for short tests a whole host is stopped. The calls of the others name one of them soon, and what open has opened can be closed. At 2 Gbit/s,
// too. With -v it logs how soon.
func HostDies(t *testing.T, segment int64, open func(r *Rank) (call func() error, closes func(context.Context) error)) {
	atRates(t, func(t *testing.T, rate string) {
		for _, loss := range losses {
			if testing.Short() && loss.silent {
				continue
			}
			t.Run(loss.name, func(t *testing.T) {
				if loss.silent {
					t.Setenv("SWITCHYARD_PEER_TIMEOUT", proctest.Scaled(2*time.Second).String())
				}
				for _, p := range hostProcs(t, 4, 2, rate, segment, func(r *Rank) { hostDies(r, loss.ranks, loss.silent, open) }) {
					if line, ok := p.Line(); ok {
						t.Logf("rank %d: %s", p.Rank, line)
					}
				}
			})
		}
	})
}

func hostDies(r *Rank, lost []int, silent bool, open func(r *Rank) (call func() error, closes func(context.Context) error)) {
	awake := make(chan os.Signal, 1)
	signal.Notify(awake, syscall.SIGCONT)
	pids, err := r.Group.AllGather(r.Ctx, binary.LittleEndian.AppendUint32(nil, uint32(os.Getpid())))
	r.Must(err)
	call, closes := open(r)
	for k := range 50 {
		if slices.Contains(lost, r.Rank()) && k == 5 {
			if silent {
				r.Must(syscall.Kill(os.Getpid(), syscall.SIGSTOP))
				<-awake
			}
			os.Exit(0)
		}
		start := time.Now()
		err := call()
		if err == nil {
			continue
		}
		took := time.Since(start)
		if took > time.Minute { // a loaded machine is slow
			r.Must(fmt.Errorf("after %v: %w", took, err))
		}
		var peer *comm.PeerError
		if !errors.Is(err, comm.ErrPeerLost) || !errors.As(err, &peer) || !slices.Contains(lost, peer.Rank) {
			r.Must(fmt.Errorf("call %d: got %w", k, err))
		}
		fmt.Printf("named rank %d after %v\n", peer.Rank, took)
		if err := closes(r.Ctx); err != nil && !errors.Is(err, comm.ErrPeerLost) { // the group may hear of it only now
			r.Must(err)
		}
		r.Must(r.Heap.Close(r.Ctx))
		if silent {
			home, err := r.Group.Home()
			r.Must(err)
			r.Must(home.Barrier(r.Ctx))
			if r.Rank() == 0 {
				for _, rank := range lost {
					r.Must(syscall.Kill(int(binary.LittleEndian.Uint32(pids[rank])), syscall.SIGCONT))
				}
			}
		}
		return
	}
	r.Must(errors.New("no call has failed"))
}
