package memory

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/double"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// onHosts runs f on every rank of a group on hosts of perHost ranks.
func onHosts(t *testing.T, n, perHost int, f func(g *comm.Group) error) {
	t.Helper()
	gs, err := comm.Local(n, comm.LocalOptions{PerHost: perHost})
	require.NoError(t, err)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r, g := range gs {
		wg.Go(func() { errs[r] = f(g) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	for _, g := range gs {
		require.NoError(t, g.Close())
	}
}

// Each host has its segments, at the same offsets on all hosts, also after growing and registering.
func TestM1_OffsetsAreTheSameOnAllHosts(t *testing.T) {
	for _, c := range []struct{ n, perHost int }{{2, 1}, {4, 2}, {6, 2}} {
		net := double.New(uint64(c.n), time.Millisecond)
		onHosts(t, c.n, c.perHost, func(g *comm.Group) error { return useHosts(t.Context(), g, net.Open) })
	}
}

// The same with a process for every rank, in network namespaces.
func TestHeapOfProcessesOnHosts(t *testing.T) {
	railtest.NeedUCX(t, ucx.Open, ucx.ErrUnavailable)
	spaces := proctest.Namespaces(t, 2)
	ps := make([]*proctest.Process, 4)
	for r := range ps {
		host, local := r/2, r%2
		ps[r] = proctest.Rank(t, r, len(ps), spaces[0].IP+":29412", proctest.Spec{Part: "scenario", Args: []string{"hosts"}, Via: spaces[host].Via,
			Env: []string{fmt.Sprint("LOCAL_RANK=", local), "LOCAL_WORLD_SIZE=2", "UCX_TLS=tcp,self"}})
	}
	for _, err := range proctest.Failures(ps) {
		require.NoError(t, err)
	}
}

func hostsScenario(t *rankT, g *comm.Group) {
	require.Equal(t, 2, g.Topology().Hosts)
	require.NoError(t, useHosts(t.ctx, g, ucx.Open))
}

// Another libucp on one of two hosts, or none that can be opened, is every rank's error, with both values or the words of the system.
func TestF3_HostsWithAnotherUCX(t *testing.T) {
	railtest.NeedUCX(t, ucx.Open, ucx.ErrUnavailable)
	for _, c := range []struct {
		name  string
		make  func(t *testing.T, folder string) // a libucp.so.0
		words []string                          // patterns
	}{
		{"none", func(t *testing.T, folder string) {
			require.NoError(t, os.WriteFile(filepath.Join(folder, "libucp.so.0"), []byte("no library"), 0o600))
		}, []string{"not supported: a heap on 2 hosts", `libucp\.so\.0: file too short`, "libucx0"}},
		{"of another version", otherUCX, []string{`mismatch: rank \d has UCX 1\.\d+, rank \d has UCX 1\.\d+`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			spaces := proctest.Namespaces(t, 2)
			folder := t.TempDir()
			c.make(t, folder)
			ps := make([]*proctest.Process, 4)
			for r := range ps {
				env := []string{fmt.Sprint("LOCAL_RANK=", r%2), "LOCAL_WORLD_SIZE=2", "UCX_TLS=tcp,self"}
				if r >= 2 {
					env = append(env, "LD_LIBRARY_PATH="+folder)
				}
				ps[r] = proctest.Rank(t, r, len(ps), spaces[0].IP+":29413", proctest.Spec{Part: "scenario", Args: []string{"no rail"}, Via: spaces[r/2].Via, Env: env})
			}
			for r, err := range proctest.Failures(ps) {
				require.NoError(t, err)
				out, _ := ps[r].Output()
				for _, w := range c.words {
					require.Regexp(t, w, out, "rank %d", r)
				}
			}
		})
	}
}

// Where the packets of UCX are lost and those of the control plane are not, no rank waits for longer than a rank may be silent: the error names
// a rank of the other host and that host. What UCX has begun is no reason not to end.
func TestF2_RailsThatDoNotConnect(t *testing.T) {
	t.Parallel() // it mostly waits
	railtest.NeedUCX(t, ucx.Open, ucx.ErrUnavailable)
	spaces := proctest.Namespaces(t, 2)
	for i, s := range spaces {
		s.Void("void", fmt.Sprint("10.99.0.", 1+i), fmt.Sprint("10.99.0.", 2-i))
	}
	ps := make([]*proctest.Process, 4)
	for r := range ps {
		ps[r] = proctest.Rank(t, r, len(ps), spaces[0].IP+":29413", proctest.Spec{Part: "scenario", Args: []string{"rail drops"}, Via: spaces[r/2].Via,
			Env: []string{fmt.Sprint("LOCAL_RANK=", r%2), "LOCAL_WORLD_SIZE=2", "UCX_TLS=tcp,self", "UCX_NET_DEVICES=void", "SWITCHYARD_PEER_TIMEOUT=2s"}})
	}
	for r, err := range proctest.Failures(ps) {
		require.NoError(t, err)
		out, _ := ps[r].Output()
		require.Regexp(t, `connect the rail: rank \d: on host \d: timed out after 2s: no connection over UCX`, out, "rank %d", r)
	}
}

// The heap's rails let in nobody but the group's other hosts: no user of a rank's own host, and nobody on its loopback.
func TestF4_RailsLetInOtherHostsAlone(t *testing.T) {
	railtest.NeedUCX(t, ucx.Open, ucx.ErrUnavailable)
	spaces := proctest.Namespaces(t, 2)
	ps := make([]*proctest.Process, 4)
	for r := range ps {
		ps[r] = proctest.Rank(t, r, len(ps), spaces[0].IP+":29413", proctest.Spec{Part: "scenario", Args: []string{"rail doors"}, Via: spaces[r/2].Via,
			Env: []string{fmt.Sprint("LOCAL_RANK=", r%2), "LOCAL_WORLD_SIZE=2", "UCX_TLS=tcp,self"}})
	}
	for _, err := range proctest.Failures(ps) {
		require.NoError(t, err)
	}
}

// connection is a row of the kernel's table of TCP over IPv4. The socket is "0" before somebody accepts it.
type connection struct {
	own, other    netip.AddrPort
	state, socket string
}

func connections(t *rankT) (rows []connection) {
	table, err := os.ReadFile("/proc/self/net/tcp")
	require.NoError(t, err)
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		var ends [2]netip.AddrPort
		for i := range ends {
			var ip, port uint32
			_, err = fmt.Sscanf(f[1+i], "%X:%X", &ip, &port)
			ends[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte(binary.NativeEndian.AppendUint32(nil, ip))), uint16(port))
		}
		if err == nil { // else it is the head
			rows = append(rows, connection{ends[0], ends[1], f[3], f[9]})
		}
	}
	return rows
}

func railDoorsScenario(t *rankT, g *comm.Group) {
	h, err := NewHeap(t.ctx, g, device.Host(), Options{SegmentBytes: 1 << 20})
	require.NoError(t, err)
	doors := map[netip.AddrPort]bool{}
	for _, c := range connections(t) {
		if c.state == "0A" && c.own.Port() != 29413 { // it listens, and is not that of the ranks' meeting
			require.Equal(t, g.Door(), c.own.Addr())
			doors[c.own] = true
		}
	}
	require.Len(t, doors, 2, "one for each rank of this host")
	for at := range doors {
		conn, err := net.DialTimeout("tcp", at.String(), 300*time.Millisecond)
		var late net.Error
		if errors.As(err, &late) && late.Timeout() {
			continue // others wait already
		}
		require.NoError(t, err, "%v", at)
		defer conn.Close()
		_, err = conn.Write([]byte{0x78, 0x56, 0x34, 0x12, 0xbe, 0xba, 0xfe, 0xca, 0, 0xff, 0xff, 0xff, 0xff}) // UCX 1.13.1 aborts on it
		require.NoError(t, err, "%v", at)
	}
	require.NoError(t, g.Barrier(t.ctx))
	for _, c := range connections(t) {
		accepted := c.state == "01" && c.socket != "0"
		require.False(t, doors[c.own] && c.other.Addr() == g.Door() && accepted, "%v: a stranger was let in", c)
	}
	require.NoError(t, g.Barrier(t.ctx))
	require.NoError(t, h.Close(t.ctx))
}

func railDropsScenario(t *rankT, g *comm.Group) {
	start := time.Now()
	_, err := NewHeap(t.ctx, g, device.Host(), Options{SegmentBytes: 1 << 20})
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.Less(t, time.Since(start), 30*time.Second, "the system tries for two minutes")
	fmt.Println(err)
}

func noRailScenario(t *rankT, g *comm.Group) {
	_, err := NewHeap(t.ctx, g, device.Host(), Options{SegmentBytes: 1 << 20})
	require.Error(t, err)
	fmt.Println(err)
}

// otherUCX makes a libucp of the next minor version.
func otherUCX(t *testing.T, folder string) {
	cc, err := exec.LookPath("cc")
	if err != nil || runtime.GOARCH != "amd64" {
		t.Skip("needs cc, and amd64")
	}
	known, err := exec.Command("ldconfig", "-p").Output()
	require.NoError(t, err)
	real := regexp.MustCompile(`libucp\.so\.0 .*=> (\S+)`).FindSubmatch(known)
	if real == nil {
		proctest.Missing(t, "ucx", "ldconfig knows no libucp")
	}
	out, err := exec.Command(cc, "-shared", "-fPIC", `-DREAL_UCX="`+string(real[1])+`"`, "-o", filepath.Join(folder, "libucp.so.0"), "testdata/otherucx.c", "-ldl").CombinedOutput()
	require.NoError(t, err, string(out))
}

// useHosts is what one rank does: it grows, allocates and registers, compares where it did, and puts into the other hosts.
func useHosts(ctx context.Context, g *comm.Group, open openRail) error {
	top := g.Topology()
	h, err := newHeap(ctx, g, device.Host(), Options{SegmentBytes: 1 << 20, ReserveBytes: 64 << 20}, newBacking, open)
	if err != nil {
		return err
	}
	if h.Group() != g || h.space.Size != top.PerHost || h.space.Rank != top.Local {
		return fmt.Errorf("rank %d of %d in the space of rank %d", h.space.Rank, h.space.Size, g.Rank())
	}
	if err := h.Grow(ctx, 8<<20); err != nil {
		return err
	}
	b, err := h.Alloc(6 << 20)
	if err != nil {
		return err
	}
	// Every second host registers more than the others.
	n := int64(4096 << (top.Host % 2 * 10))
	fd, err := shm.Create("a test", n)
	if err != nil {
		return err
	}
	defer closeFD(fd)
	m, err := MapFile(fd, 0, n)
	if err != nil {
		return err
	}
	defer m.Close()
	r, err := h.Register(ctx, m.View())
	if err != nil {
		return err
	}
	after, err := h.Register(ctx, m.View())
	if err != nil {
		return err
	}
	mine := fmt.Sprint(b.Offset(), r.Offset(), after.Offset())
	all, err := g.AllGather(ctx, []byte(mine))
	if err != nil {
		return err
	}
	for p := range all {
		if string(all[p]) != mine {
			return fmt.Errorf("rank %d has the offsets %s, rank %d %s", g.Rank(), mine, p, all[p])
		}
	}
	for p := range g.Size() {
		if want := int64(4096 << (top.HostOf(p) % 2 * 10)); r.PeerLen(p) != want {
			return fmt.Errorf("%d bytes of rank %d, want %d", r.PeerLen(p), p, want)
		}
	}
	// Ranks of a host see each other's memory, and nobody else's.
	b.Bytes()[0], m.Bytes()[0] = byte(g.Rank()+1), byte(g.Rank()+100)
	if err := g.Barrier(ctx); err != nil {
		return err
	}
	for local := range top.PerHost {
		rank := top.RankOf(top.Host, local)
		for at, want := range map[int64]byte{b.Offset(): byte(rank + 1), r.Offset(): byte(rank + 100)} {
			if got := h.space.Range(local, at, 1)[0]; got != want {
				return fmt.Errorf("rank %d sees %d of rank %d at %d, want %d", g.Rank(), got, rank, at, want)
			}
		}
	}
	if err := g.Barrier(ctx); err != nil { // all have read what puts now replace
		return err
	}
	if err := putAcross(ctx, h, b); err != nil {
		return err
	}
	return errors.Join(after.Deregister(ctx), h.Verify(ctx), b.Free(), h.Close(ctx))
}

// putAcross has each rank put 1 MiB and 3 bytes behind it, in two puts, into a buffer of those of its local rank, who await and check them.
func putAcross(ctx context.Context, h *Heap, b *Buffer) error {
	const n, piece, words = 1 << 20, 1<<20 + 64, 4 << 20 // each host has a piece of the buffer, and a word behind them
	top, me := h.group.Topology(), h.group.Rank()
	src := bytes.Repeat([]byte{byte(me + 1)}, n)
	mine := b.Offset() + int64(top.Host)*piece
	for host := range top.Hosts {
		if peer := top.RankOf(host, top.Local); peer != me {
			signal := b.Offset() + words + int64(top.Host)*8
			if err := errors.Join(h.Rail().Put(peer, mine, src, signal), h.Rail().Put(peer, mine+n, []byte("put"), signal)); err != nil {
				return err
			}
		}
	}
	if err := h.Rail().Flush(ctx); err != nil {
		return err
	}
	for host := range top.Hosts {
		peer := top.RankOf(host, top.Local)
		if peer == me {
			continue
		}
		word := shm.Word(b.Bytes(), words+int64(host)*8)
		for end := time.Now().Add(time.Minute); word.Load() < 2; time.Sleep(50 * time.Microsecond) {
			if time.Now().After(end) {
				return fmt.Errorf("rank %d: %d puts of rank %d have landed, want 2", me, word.Load(), peer)
			}
		}
		want := append(bytes.Repeat([]byte{byte(peer + 1)}, n), "put"...)
		if !bytes.Equal(b.Bytes()[host*piece:][:len(want)], want) {
			return fmt.Errorf("rank %d has other bytes than rank %d has put", me, peer)
		}
	}
	return nil
}

// watchedRail notes what is done with a rail.
type watchedRail struct {
	rails.Rail
	note func(op string)
}

func (r *watchedRail) Close() error {
	r.note("rail close")
	return r.Rail.Close()
}

// A rail ends before its segment does, in which puts land until then; after a failure too, and then it takes no more puts.
func TestM4_TheRailEndsBeforeTheMemory(t *testing.T) {
	for _, fails := range []bool{false, true} {
		net := double.New(1, time.Millisecond)
		var made sync.WaitGroup
		made.Add(4)
		onHosts(t, 4, 2, func(g *comm.Group) error {
			var mu sync.Mutex
			var ops []string
			note := func(op string) {
				mu.Lock()
				defer mu.Unlock()
				ops = append(ops, op)
			}
			open := func(c rails.Config) (rails.Rail, error) {
				r, err := net.Open(c)
				return &watchedRail{r, note}, err
			}
			saw := func(_ int, op string, _, _ int64) { note(op) }
			h, err := newHeap(t.Context(), g, device.Host(), Options{SegmentBytes: 1 << 20}, sawBackings(g.Rank(), saw, nil), open)
			made.Done()
			if err != nil {
				return err
			}
			if fails {
				made.Wait() // an abort may take along what others have not left yet
				g.Abort(errors.New("a test"))
				<-g.Done()
				top := g.Topology()
				peer := top.RankOf(1-top.Host, top.Local)
				for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) { // hooks run after Done
					err := h.Rail().Put(peer, kernels.HeaderBytes, nil, kernels.HeaderBytes)
					if errors.Is(err, comm.ErrAborted) {
						break
					}
					if time.Now().After(end) {
						return fmt.Errorf("a put after a failure: %w", err)
					}
				}
			}
			if err := h.Close(t.Context()); err != nil {
				return err
			}
			if last := fmt.Sprint(ops[len(ops)-2:]); last != "[rail close close]" {
				return fmt.Errorf("the end of %v", ops)
			}
			return nil
		})
	}
}

// Where one rank's rail refuses more of the pool, no rank keeps memory for it, and the heap grows when the rail allows it.
func TestF3_ARailThatDoesNotGrow(t *testing.T) {
	net := double.New(1, 0)
	onHosts(t, 4, 2, func(g *comm.Group) error {
		refuse := false
		open := func(c rails.Config) (rails.Rail, error) {
			r, err := net.Open(c)
			return &narrowRail{r, &refuse}, err
		}
		placed := 0
		saw := func(_ int, op string, _, _ int64) {
			switch op {
			case "place":
				placed++
			case "displace":
				placed--
			}
		}
		h, err := newHeap(t.Context(), g, device.Host(), Options{SegmentBytes: 1 << 20, ReserveBytes: 8 << 20}, sawBackings(g.Rank(), saw, nil), open)
		if err != nil {
			return err
		}
		before := placed
		refuse = g.Rank() == 1
		if err := h.Grow(t.Context(), 4<<20); !errors.Is(err, comm.ErrOutOfMemory) || !strings.Contains(err.Error(), "rank 1") && !refuse {
			return fmt.Errorf("rank %d: grow: %w", g.Rank(), err)
		}
		if placed != before {
			return fmt.Errorf("rank %d has %d pieces of memory, %d before", g.Rank(), placed, before)
		}
		refuse = false
		if err := h.Grow(t.Context(), 4<<20); err != nil {
			return err
		}
		b, err := h.Alloc(4 << 20)
		if err != nil {
			return err
		}
		return errors.Join(b.Free(), h.Close(t.Context()))
	})
}

// narrowRail refuses to open more of the segment.
type narrowRail struct {
	rails.Rail
	refuse *bool
}

func (r *narrowRail) Open(off, n int64) error {
	if *r.refuse {
		return fmt.Errorf("%w: too many windows", comm.ErrOutOfMemory)
	}
	return r.Rail.Open(off, n)
}

// Messages without the key change nothing, and the rank that gets them says at the end how many there were.
func TestF4_MessagesOfStrangersAreCounted(t *testing.T) {
	net := double.New(1, 0)
	var mu sync.Mutex
	var log bytes.Buffer
	onHosts(t, 2, 1, func(g *comm.Group) error {
		open := func(c rails.Config) (rails.Rail, error) {
			r, err := net.Open(c)
			if err != nil || g.Rank() != 1 {
				return r, err
			}
			return r, func() error {
				c.Key, c.Rank, c.Segment, c.Ring = c.Key+1, 0, make([]byte, 1<<20), func() {}
				stranger, err := net.Open(c)
				if err != nil {
					return err
				}
				return errors.Join(r.Open(0, 4096), stranger.Connect(1, r.Address()), stranger.Put(1, 128, []byte("evil"), 0), stranger.Flush(t.Context()))
			}()
		}
		h, err := newHeap(t.Context(), g, device.Host(), Options{SegmentBytes: 1 << 20, Logger: slog.New(slog.NewTextHandler(lockedWriter{&mu, &log}, nil))}, newBacking, open)
		if err != nil {
			return err
		}
		for end := time.Now().Add(time.Minute); g.Rank() == 1 && h.Rail().Refused() == 0 && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		return h.Close(t.Context())
	})
	require.Regexp(t, `messages of strangers over the network.*rank=1 refused=1\n`, log.String())
	require.NotContains(t, log.String(), "rank=0 refused")
}

type lockedWriter struct {
	mu *sync.Mutex
	b  *bytes.Buffer
}

func (w lockedWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(b)
}

// A rank that cannot open its rail, or finds that another's does not fit, is every rank's error, and no rail is left.
func TestF3_RailsThatDoNotFit(t *testing.T) {
	noUCX := fmt.Errorf("ucx: %w: libucp.so.0: cannot open shared object file (Debian: libucx0)", ucx.ErrUnavailable)
	for _, c := range []struct {
		refuse func(r rails.Rail) (rails.Rail, error)
		want   error
		words  []string
	}{
		{refuse: func(rails.Rail) (rails.Rail, error) { return nil, noUCX }, want: ErrUnsupported, words: []string{"2 hosts", "libucp.so.0: cannot open", "libucx0"}},
		{refuse: func(r rails.Rail) (rails.Rail, error) { return &otherVersion{r}, nil }, want: comm.ErrMismatch, words: []string{"rank 3 has 1.22, rank 1 has 1.13"}},
	} {
		net := double.New(1, time.Millisecond)
		var open atomic.Int64
		onHosts(t, 4, 2, func(g *comm.Group) error {
			_, err := newHeap(t.Context(), g, device.Host(), Options{SegmentBytes: 1 << 20}, newBacking, func(cfg rails.Config) (rails.Rail, error) {
				r, err := net.Open(cfg)
				if err == nil && g.Rank() == 3 {
					r, err = c.refuse(r)
				}
				if err != nil {
					return nil, err
				}
				open.Add(1)
				return &watchedRail{r, func(string) { open.Add(-1) }}, nil
			})
			if !errors.Is(err, c.want) {
				return fmt.Errorf("rank %d: %w", g.Rank(), err)
			}
			for _, w := range c.words {
				if !strings.Contains(err.Error(), w) {
					return fmt.Errorf("rank %d: no %q in %w", g.Rank(), w, err)
				}
			}
			return nil
		})
		require.Zero(t, open.Load())
	}
}

// otherVersion connects to nobody.
type otherVersion struct{ rails.Rail }

func (*otherVersion) Connect(int, []byte) error {
	return fmt.Errorf("%w: rank 3 has 1.22, rank 1 has 1.13", comm.ErrMismatch)
}

// A rank that allocates something else than those of another host is named on all.
func TestM3_HostsThatDivergeAreNamed(t *testing.T) {
	net := double.New(1, 0)
	onHosts(t, 4, 2, func(g *comm.Group) error {
		h, err := newHeap(t.Context(), g, device.Host(), Options{SegmentBytes: 1 << 20}, newBacking, net.Open)
		if err != nil {
			return err
		}
		if _, err := h.Alloc(int64(1000 + 4096*(g.Rank()/3))); err != nil {
			return err
		}
		var d *DivergenceError
		if err := h.Verify(t.Context()); !errors.As(err, &d) || fmt.Sprint(d.Ranks) != "[3]" {
			return fmt.Errorf("verify: %w", err)
		}
		return h.Close(t.Context())
	})
}

func TestF3_HostsWithDifferentNumbersOfRanks(t *testing.T) {
	onHosts(t, 5, 2, func(g *comm.Group) error {
		_, err := NewHeap(t.Context(), g, device.Host(), Options{})
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "[2 2 1]")
		return nil
	})
}
