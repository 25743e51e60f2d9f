package memory

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// A scenario is what one rank of a test does. The same scenario runs with all ranks in one process,
// with ranks in one process that only know each other by sockets, and with a process for every rank.
type scenario func(t *rankT, g *comm.Group)

// scenarios are found by name in the processes of a test.
var scenarios = map[string]scenario{
	"offsets":    offsetsScenario,
	"divergence": divergenceScenario,
	"bytes":      bytesScenario,
	"grow":       growScenario,
	"close":      closeScenario,
	"register":   registerScenario,
	"mismatch":   mismatchScenario,
	"abort":      abortScenario,
	"killed":     killedScenario,
	"cut":        cutScenario,
	"hosts":      hostsScenario,
	"no rail":    noRailScenario,
	"rail drops": railDropsScenario,
	"share":      shareScenario,
	"withdraw":   withdrawScenario,
	"rail doors": railDoorsScenario,

	"cuda bytes":    cudaBytesScenario,
	"cuda register": cudaRegisterScenario,
	"cuda abort":    cudaAbortScenario,
	"cuda bounded":  cudaBoundedScenario,
	"cuda mismatch": cudaMismatchScenario,
	"cuda killed":   cudaKilledScenario,
	"cuda malloc":   cudaMallocScenario,
	"cuda mixed":    cudaMixedScenario,
	"cuda order":    cudaOrderScenario,
	"cuda cycles":   cudaCyclesScenario,
	"cuda unopened": cudaUnopenedScenario,
	"cuda share":    cudaShareScenario,
	"cuda withdraw": cudaWithdrawScenario,
	"share killed":  shareKilledScenario,

	"legacy bytes":    legacy(cudaBytesScenario),
	"legacy abort":    legacy(cudaAbortScenario),
	"legacy killed":   legacy(cudaKilledScenario),
	"legacy malloc":   legacy(cudaMallocScenario),
	"legacy order":    legacy(cudaOrderScenario),
	"legacy cycles":   legacy(cudaCyclesScenario),
	"legacy unopened": legacy(cudaUnopenedScenario),
	"legacy share":    legacy(cudaShareScenario),
	"legacy withdraw": legacy(cudaWithdrawScenario),
}

// legacy runs a scenario with heaps of CUDA IPC memory.
func legacy(s scenario) scenario {
	return func(t *rankT, g *comm.Group) {
		t.legacy = true
		s(t, g)
	}
}

func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{"scenario": playScenario})
	os.Exit(m.Run())
}

func playScenario(args []string) int {
	c, err := comm.FromEnv()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	g, err := comm.Join(testContext(), c)
	if err != nil {
		fmt.Println("join:", err)
		return 1
	}
	defer g.Close()
	if err := runRank(g, scenarios[args[0]]); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// rankT is the require.TestingT of one rank.
type rankT struct {
	ctx    context.Context
	errs   []string
	legacy bool
}

func (t *rankT) Errorf(format string, args ...any) {
	t.errs = append(t.errs, fmt.Sprintf(format, args...))
}
func (t *rankT) FailNow() { runtime.Goexit() }

// logf prints, in whatever process the rank is.
func (t *rankT) logf(format string, args ...any) {
	if flag.Parsed() && testing.Verbose() {
		fmt.Printf(format+"\n", args...)
	}
}

func testContext() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Second)
	time.AfterFunc(60*time.Second, cancel)
	return ctx
}

// runRank runs s; when it fails the other ranks do too.
func runRank(g *comm.Group, s scenario) error {
	t := &rankT{ctx: testContext()}
	done := make(chan struct{})
	finished := false
	go func() {
		defer close(done)
		s(t, g)
		finished = true
	}()
	<-done
	if !finished || len(t.errs) > 0 {
		err := fmt.Errorf("rank %d: %s", g.Rank(), strings.Join(t.errs, "\n"))
		g.Abort(errors.New("the test failed here"))
		return err
	}
	return nil
}

// runRanks runs s on every group at once and closes them.
func runRanks(t testing.TB, gs []*comm.Group, s scenario) {
	t.Helper()
	errs := make([]error, len(gs))
	var wg sync.WaitGroup
	for r, g := range gs {
		wg.Go(func() {
			errs[r] = runRank(g, s)
		})
	}
	wg.Wait()
	for _, g := range gs {
		require.NoError(t, g.Close())
	}
	require.NoError(t, errors.Join(errs...))
}

func localRanks(t testing.TB, n int) []*comm.Group {
	t.Helper()
	gs, err := comm.Local(n)
	require.NoError(t, err)
	return gs
}

// socketRanks are ranks of this process that do not know they share it.
func socketRanks(t testing.TB, n int) []*comm.Group {
	t.Helper()
	gs, errs := make([]*comm.Group, n), make([]error, n)
	addr := loopback.Addr()
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			gs[r], errs[r] = comm.Join(testContext(), comm.Config{Rank: r, Size: n, Addr: addr})
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	require.False(t, n > 1 && gs[0].InProcess())
	return gs
}

// everywhere runs a scenario in all three ways.
func everywhere(t *testing.T, n int, name string) {
	t.Helper()
	require.Contains(t, scenarios, name)
	t.Run("local", func(t *testing.T) { runRanks(t, localRanks(t, n), scenarios[name]) })
	t.Run("sockets", func(t *testing.T) { runRanks(t, socketRanks(t, n), scenarios[name]) })
	t.Run("processes", func(t *testing.T) { require.NoError(t, errors.Join(processes(t, n, name)...)) })
}

// processes runs a scenario with a process for every rank and returns how each ended.
func processes(t testing.TB, n int, name string) []error {
	t.Helper()
	return proctest.Failures(proctest.Ranks(t, n, loopback.Addr(), proctest.Spec{Part: "scenario", Args: []string{name}}))
}

// heapOf makes a small heap.
func heapOf(t *rankT, g *comm.Group, o Options) *Heap {
	if o.SegmentBytes == 0 {
		o.SegmentBytes = 2 << 20
	}
	h, err := NewHeap(t.ctx, g, device.Host(), o)
	require.NoError(t, err)
	return h
}

// sawBacking records what a heap asks of its device, and can refuse.
type sawBacking struct {
	backing
	rank int
	saw  func(rank int, op string, at, n int64)
	deny func(rank int, op string, n int64) error
}

func sawBackings(rank int, saw func(int, string, int64, int64), deny func(int, string, int64) error) func(device.Device) (backing, error) {
	return func(d device.Device) (backing, error) {
		b, err := newBacking(d)
		return &sawBacking{b, rank, saw, deny}, err
	}
}

func (b *sawBacking) note(op string, at, n int64) error {
	if b.saw != nil {
		b.saw(b.rank, op, at, n)
	}
	if b.deny != nil {
		return b.deny(b.rank, op, n)
	}
	return nil
}

func (b *sawBacking) reserve(n int64) error {
	if err := b.note("reserve", 0, n); err != nil {
		return err
	}
	return b.backing.reserve(n)
}

func (b *sawBacking) adopt(owner backing) error {
	if err := b.note("adopt", 0, 0); err != nil {
		return err
	}
	return b.backing.adopt(owner.(*sawBacking).backing)
}

func (b *sawBacking) create(n int64) (int, error) {
	if err := b.note("create", 0, n); err != nil {
		return -1, err
	}
	return b.backing.create(n)
}

func (b *sawBacking) place(at int64, fd int, from, n int64) error {
	if err := b.note("place", at, n); err != nil {
		return err
	}
	return b.backing.place(at, fd, from, n)
}

func (b *sawBacking) displace(at, n int64) error {
	_ = b.note("displace", at, n)
	return b.backing.displace(at, n)
}

func (b *sawBacking) close() error {
	_ = b.note("close", 0, 0)
	return b.backing.close()
}
