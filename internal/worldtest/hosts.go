package worldtest

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/memory"
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

// loss is how ranks of two hosts of two are lost. A host that has lost one leaves whole.
type loss struct {
	name  string
	ranks []int
	how   syscall.Signal // 0: the hosts are cut off each other, and each loses the other one
	long  bool           // not for short tests
}

var losses = []loss{
	{"a_rank_ends", []int{3}, syscall.SIGKILL, false},
	{"a_leader_ends", []int{2}, syscall.SIGKILL, false},
	{"rank_0_ends", []int{0}, syscall.SIGKILL, true},
	{"a_host_falls_silent", []int{2, 3}, syscall.SIGSTOP, true},
	{"a_link_is_cut", []int{2, 3}, 0, false},
}

// HostDies has ranks of four on two hosts, a process each, be lost in the middle of calls: one ends, then the leader of a host does, and the link
// between the hosts is cut; but for short tests rank 0 ends too, a whole host is stopped, and all of that happens at 2 Gbit/s. The calls of all
// others, on both hosts, name a rank that is lost and its host, within what package comm promises. They can close their communicators. Then hosts
// that have lost nobody shrink to themselves, where open opens the same, whose calls are right. With -v the test logs how soon ranks were named.
//
// A call compares what it returns with what it should. open is for any number of ranks, from two on.
func HostDies(t *testing.T, segment int64, open func(r *Rank) (call func() error, closes func(context.Context) error)) {
	atRates(t, func(t *testing.T, rate string) {
		for _, l := range losses {
			if testing.Short() && l.long {
				continue
			}
			t.Run(l.name, func(t *testing.T) {
				if proctest.Again() {
					hostProc(t, segment, func(r *Rank) { l.outlive(r, segment, open) })
				} else {
					l.happen(t, rate)
				}
			})
		}
	})
}

// inCalls and named are what a rank prints when it makes calls, and when one has named a rank, with the time.
const inCalls = "makes calls"

var named = regexp.MustCompile(`named rank (\d) at (\d+)\n`)

// happen has the processes lose ranks, and holds the others to the time in which they name these.
func (l loss) happen(t *testing.T, rate string) {
	silent, within := time.Minute, proctest.EndedIsNamedWithin // who ends is known long before it has been silent
	if l.how != syscall.SIGKILL {
		silent = proctest.Scaled(2 * time.Second)
		within = silent + proctest.SilentIsNamedWithin
	}
	delays := proctest.NoteDelays(t)
	spaces, ps := startHostProcs(t, 4, 2, rate, delays, "SWITCHYARD_PEER_TIMEOUT="+silent.String())
	for _, p := range ps {
		p.Saw(inCalls)
	}
	begin := time.Now()
	rest := ps
	if l.how == 0 {
		spaces[1].Cut()
	} else {
		for _, r := range l.ranks {
			ps[r].Signal(l.how)
		}
		rest = slices.DeleteFunc(slices.Clone(ps), func(p *proctest.Process) bool { return slices.Contains(l.ranks, p.Rank) })
	}
	require.NoError(t, errors.Join(proctest.Failures(rest)...))
	for _, p := range rest {
		out, _ := p.Output()
		words := named.FindStringSubmatch(out)
		require.NotNil(t, words, "rank %d printed %q", p.Rank, out)
		ns, err := strconv.ParseInt(words[2], 10, 64)
		require.NoError(t, err)
		delays.InTime(t, begin, time.Unix(0, ns), within, fmt.Sprintf("rank %d named rank %s", p.Rank, words[1]))
	}
}

// outlive is a rank, one that is lost or not.
func (l loss) outlive(r *Rank, segment int64, open func(r *Rank) (call func() error, closes func(context.Context) error)) {
	hosts := r.Group.Topology()
	lost, host := l.ranks, hosts.HostOf(l.ranks[0])
	mate := hosts.Host == host
	if l.how == 0 && mate {
		lost, host, mate = []int{0, 1}, 0, false
	}
	call, closes := open(r)
	var err error
	for k := 0; err == nil; k++ {
		if k == 5 {
			fmt.Println(inCalls)
		}
		err = call()
	}
	end := time.Now()
	rank := r.lost(err, lost)
	fmt.Printf("named rank %d at %d\n", rank, end.UnixNano())
	if text := err.Error(); !strings.Contains(text, fmt.Sprintf("peer lost: on host %d: ", host)) || !strings.Contains(text, fmt.Sprintf("rank %d", rank)) {
		r.Must(fmt.Errorf("rank %d of host %d is lost, got: %w", rank, host, err))
	}
	if err := closes(r.Ctx); err != nil && !errors.Is(err, comm.ErrPeerLost) { // the group may hear of it only now
		r.Must(err)
	}
	r.Must(r.Heap.Close(r.Ctx))

	small, err := r.Group.Shrink(r.Ctx)
	if mate {
		r.lost(err, lost)
		return
	}
	r.Must(err)
	defer small.Close()
	next := &Rank{T: r.T, Ctx: r.Ctx, Group: small, Device: r.Device}
	next.Heap, err = memory.NewHeap(r.Ctx, small, r.Device, memory.Options{SegmentBytes: segment})
	r.Must(err)
	call, closes = open(next)
	for range 3 {
		r.Must(call())
	}
	r.Must(closes(r.Ctx))
	r.Must(next.Heap.Close(r.Ctx))
}

// lost is the rank that err says is lost, which is one of these.
func (r *Rank) lost(err error, ranks []int) int {
	var peer *comm.PeerError
	if !errors.Is(err, comm.ErrPeerLost) || !errors.As(err, &peer) || !slices.Contains(ranks, peer.Rank) {
		r.Must(fmt.Errorf("one of ranks %v is lost, got: %w", ranks, err))
	}
	return peer.Rank
}
