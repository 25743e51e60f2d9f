package dispatch_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

const replacesVar = "SWITCHYARD_TEST_REPLACES" // where the process is to take a lost rank's place

// Processes are killed in mid-step, every rank once and one twice, and fresh processes take their places while the others go on: in the end all
// ranks have rows of all, and nobody has made a new group.
func TestFreshProcessesTakeThePlacesOfKilledOnes(t *testing.T) {
	const ranks = 4
	if proctest.Again() {
		replaceableProcess(t)
		return
	}
	ps := proctest.Ranks(t, ranks, loopback.Addr(), proctest.Spec{})
	for _, p := range ps {
		p.Saw("goes on")
	}
	for i, victim := range []int{2, 0, 0, 3, 1} {
		ps[victim].Signal(syscall.SIGKILL)
		require.NotZero(t, ps[victim].Wait())
		sponsor, addr := (victim+1+i)%ranks, loopback.Addr()
		if sponsor == victim {
			sponsor = (victim + 1) % ranks
		}
		ps[sponsor].Tell(fmt.Sprint("replace ", victim, " ", addr))
		ps[victim] = proctest.Rank(t, victim, ranks, addr, proctest.Spec{Env: []string{replacesVar + "=" + addr}})
		ps[victim].Saw("goes on")
	}
	ps[0].Tell("end")
	for _, err := range proctest.Failures(ps) {
		require.NoError(t, err)
	}
}

// replaceableProcess is one of them.
func replaceableProcess(t *testing.T) {
	conf, err := comm.FromEnv()
	require.NoError(t, err)
	conf.Replaceable = true
	if addr := os.Getenv(replacesVar); addr != "" {
		conf.Replaces, conf.Addr = true, addr
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	g, err := comm.Join(ctx, conf)
	require.NoError(t, err)
	defer g.Close()
	h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: segment})
	require.NoError(t, err)
	r := &rank{Rank: &worldtest.Rank{T: t, Ctx: ctx, Group: g, Device: device.Host(), Heap: h}}
	last, err := h.Alloc(8) // the last round, in rank 0's segment
	require.NoError(t, err)
	m := newMaskedRounds(r, 48, dispatch.Options{LowLatency: true})
	r.Barrier()
	var ends atomic.Bool
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			var victim int
			c := conf
			if n, _ := fmt.Sscanf(in.Text(), "replace %d %s", &victim, &c.Addr); n == 2 {
				require.NoError(t, g.Replace(ctx, victim, c))
			}
			ends.Store(ends.Load() || strings.HasPrefix(in.Text(), "end"))
		}
	}()
	if conf.Replaces {
		calls, err := m.d.Unmask(ctx)
		require.NoError(t, err)
		require.Zero(t, calls%2)
		m.round = int(calls / 2)
	}
	fmt.Println("goes on")
	space := h.Space()
	word := shm.Word(space.Range(0, last.Offset(), 8), 0)
	for until := uint64(0); until == 0 || uint64(m.round) < until; until = word.Load() {
		if g.Rank() == 0 && until == 0 && ends.Load() {
			word.Store(uint64(m.round) + 200)
		}
		whole := until > 0 && uint64(m.round)+100 > until
		if whole {
			require.Empty(t, m.masked())
		}
		h, x, err := m.send()
		require.NoError(t, err)
		require.NoError(t, m.end(h, x, whole))
	}
	r.Barrier()
	require.NoError(t, m.d.Close(ctx))
	require.NoError(t, h.Close(ctx))
}
