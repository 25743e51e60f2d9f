package stack_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/stack"
)

// hostsOptions has room for what crosses hosts.
func hostsOptions() stack.Options {
	o := options()
	o.Heap.SegmentBytes = 64 << 20
	return o
}

// A host that loses a rank leaves whole. The stacks of the others reopen and work, and have its experts, until one host is left.
func TestF2_StackReopensOnTheHostsLeft(t *testing.T) {
	worldtest.NeedUCX(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	groups, err := comm.Local(6, comm.LocalOptions{PerHost: 2})
	require.NoError(t, err)
	ss := openAll(ctx, t, groups, 0, hostsOptions())
	requireAll(t, each(ss, func(_ int, s *stack.Stack) error { return use(s) }))

	for _, c := range []struct {
		lost, mate int // ranks of the last group
		rest       []int
		moves      []dispatch.Move
	}{
		{3, 2, []int{0, 1, 4, 5}, []dispatch.Move{{Expert: 4, From: -1, To: 2}, {Expert: 5, From: -1, To: 3}}},
		{0, 1, []int{2, 3}, []dispatch.Move{
			{Expert: 0, From: -1, To: 0}, {Expert: 1, From: -1, To: 1}, {Expert: 2, From: -1, To: 0}, {Expert: 3, From: -1, To: 1}}},
	} {
		ss[c.lost].Group.Kill()
		rest := make([]*stack.Stack, len(c.rest))
		for i, r := range c.rest {
			rest[i] = ss[r]
		}
		all := append(rest[:len(rest):len(rest)], ss[c.mate])
		requireAll(t, each(all, func(i int, s *stack.Stack) (err error) {
			if err := use(s); err == nil {
				return fmt.Errorf("a call without rank %d", c.lost)
			}
			if i == len(rest) {
				_, err = s.Group.Shrink(ctx)
				return errors.Join(hasLost(err, c.lost), s.Close(ctx))
			}
			if rest[i], err = leave(ctx, s); err != nil {
				return err
			}
			return use(rest[i])
		}))
		ss[c.mate].Group.Close()
		require.NoError(t, ss[c.lost].Close(ctx))
		for _, s := range rest {
			require.Equal(t, c.moves, s.Moves)
		}
		ss = rest
	}
	closeAll(ctx, t, ss)
}

// The ranks of a host, those of one place, and those of some hosts have groups whose stacks work, like that of all.
func TestStacksOfPartsOfAGroup(t *testing.T) {
	worldtest.NeedUCX(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	groups, err := comm.Local(6, comm.LocalOptions{PerHost: 2})
	require.NoError(t, err)
	some := make([]*comm.Group, len(groups))
	requireAll(t, each(make([]*stack.Stack, len(groups)), func(i int, _ *stack.Stack) (err error) {
		some[i], err = groups[i].Split(ctx, i/4, -i) // the ranks of two hosts backwards, and those of the third
		return err
	}))
	for _, c := range []struct {
		name         string
		part         func(rank int) (*comm.Group, error)
		ranks, hosts []int // of the part, by rank
	}{
		{"home", func(r int) (*comm.Group, error) { return groups[r].Home() }, []int{2, 2, 2, 2, 2, 2}, []int{1, 1, 1, 1, 1, 1}},
		{"rail", func(r int) (*comm.Group, error) { return groups[r].Rail() }, []int{3, 3, 3, 3, 3, 3}, []int{3, 3, 3, 3, 3, 3}},
		{"some hosts", func(r int) (*comm.Group, error) { return some[r], nil }, []int{4, 4, 4, 4, 2, 2}, []int{2, 2, 2, 2, 1, 1}},
	} {
		parts := make([]*comm.Group, len(groups))
		for r := range parts {
			parts[r], err = c.part(r)
			require.NoError(t, err, c.name)
			require.Equal(t, c.ranks[r], parts[r].Size(), c.name)
			require.Equal(t, c.hosts[r], parts[r].Topology().Hosts, c.name)
		}
		ss := openAll(ctx, t, parts, 0, hostsOptions())
		requireAll(t, each(ss, func(_ int, s *stack.Stack) error { return errors.Join(use(s), s.Close(ctx)) }))
	}
	for r, g := range groups {
		some[r].Close()
		g.Close()
	}
}

// hasLost checks that err names that rank as lost.
func hasLost(err error, rank int) error {
	var peer *comm.PeerError
	if !errors.Is(err, comm.ErrPeerLost) || !errors.As(err, &peer) || peer.Rank != rank {
		return fmt.Errorf("rank %d is lost, got: %v", rank, err)
	}
	return nil
}

var hostRounds = flag.Int("rounds", 0, fmt.Sprintf("how often TestF2_HostsComeAndGo loses a host; 0 is 10 on loopback, and %d in namespaces but for short tests", manyRounds))

// A group of three hosts loses the last one again and again, goes on without it, and takes a fresh one in.
// Memory, mappings and descriptors of the ranks that stay do not grow.
func TestF2_HostsComeAndGo(t *testing.T) {
	worldtest.NeedUCX(t)
	few, many := cmp.Or(*hostRounds, 10), cmp.Or(*hostRounds, manyRounds)
	if testing.Short() {
		many = few
	}
	t.Run("loopback", func(t *testing.T) {
		for r, err := range hostsComeAndGo(t, loopback.Addr(), onLoopback, few, 0) {
			require.NoError(t, err, "rank %d", r)
		}
	})
	t.Run("namespaces", func(t *testing.T) {
		spaces := proctest.Namespaces(t, 3)
		on := func(host int) proctest.Spec { return proctest.Spec{Via: spaces[host].Via} }
		for r, err := range hostsComeAndGo(t, spaces[0].IP+":29415", on, many, 0) {
			require.NoError(t, err, "rank %d", r)
		}
	})
	t.Run("a leak is found", func(t *testing.T) {
		if *hostRounds < manyRounds {
			t.Skipf("needs -rounds %d", manyRounds)
		}
		require.Error(t, errors.Join(hostsComeAndGo(t, loopback.Addr(), onLoopback, *hostRounds, 25)...))
	})
}

func onLoopback(host int) proctest.Spec {
	return proctest.Spec{Env: []string{fmt.Sprint("SWITCHYARD_HOSTID=host ", host)}}
}

// hostsComeAndGo runs the rounds, in each of which a rank that stays keeps leak KiB. It returns what is wrong with what each of these holds.
func hostsComeAndGo(t *testing.T, addr string, on func(host int) proctest.Spec, rounds, leak int) []error {
	start := func(r, n, round int) *proctest.Process {
		spec := on(2)
		if n == 6 {
			spec = on(r / 2)
		}
		spec.Part, spec.Within = "host that comes or goes", 9*time.Minute
		spec.Args = []string{strconv.Itoa(round), strconv.Itoa(rounds), strconv.Itoa(leak)}
		spec.Env = append(spec.Env, "LOCAL_RANK="+strconv.Itoa(r%2), "LOCAL_WORLD_SIZE=2", "SWITCHYARD_SECRET=a secret of the test", oneArena)
		return proctest.Rank(t, r, n, addr, spec)
	}
	stay, last := make([]*proctest.Process, 4), make([]*proctest.Process, 2)
	for r := range stay {
		stay[r] = start(r, 6, 0)
	}
	for round := range rounds + 1 {
		for local := range last {
			if round == 0 {
				last[local] = start(4+local, 6, 0)
			} else {
				last[local] = start(local, 2, round)
			}
		}
		require.NoError(t, errors.Join(proctest.Failures(last)...), "round %d", round)
	}
	require.NoError(t, errors.Join(proctest.Failures(stay)...))
	errs := make([]error, len(stay))
	for r, p := range stay {
		out, _ := p.Output()
		series, err := readHeld(out)
		require.NoError(t, err)
		require.Len(t, series, rounds)
		second, third := thirds(series)
		t.Logf("rank %d: %v; then %v; then %v", r, series[0], second, third)
		errs[r] = flat(series)
	}
	return errs
}

func playHostThatComesOrGoes(args []string) int {
	round, err1 := strconv.Atoi(args[0])
	rounds, err2 := strconv.Atoi(args[1])
	leak, err3 := strconv.Atoi(args[2])
	err := errors.Join(err1, err2, err3)
	if err == nil {
		err = comeOrGo(round, rounds, leak)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// comeOrGo is a rank of three hosts of two. Those of the last host begin in some round, and are lost in it, but for the last round.
func comeOrGo(round, rounds, leak int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()
	c, err := comm.FromEnv()
	if err != nil {
		return err
	}
	late := c
	if round > 0 {
		late.Late, late.Rank, late.Size = true, 0, 1
	}
	g, err := comm.Join(ctx, late)
	if err != nil {
		return err
	}
	s, err := stack.Open(ctx, g, device.Host(), hostsOptions())
	if err != nil {
		return err
	}
	var kept [][]byte
	for ; ; round++ {
		if err := use(s); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		// Then rank 5 may end, and what it has said in the barrier may not have left.
		if err := s.Group.Barrier(ctx); err != nil && (round == rounds || hasLost(err, 5) != nil) {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if round == rounds {
			err := s.Close(ctx)
			s.Group.Close()
			return err
		}
		if s.Group.Rank() == 5 {
			os.Exit(0) // without a word
		}
		if err := use(s); err == nil {
			return fmt.Errorf("round %d: calls without rank 5", round)
		}
		if s.Group.Rank() == 4 {
			_, err := s.Group.Shrink(ctx)
			err = errors.Join(hasLost(err, 5), s.Close(ctx))
			s.Group.Close()
			return err
		}
		if s, err = leave(ctx, s); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := use(s); err != nil {
			return fmt.Errorf("round %d: on the hosts left: %w", round, err)
		}
		old := s.Group
		if g, err = old.Admit(ctx, 2, c); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if s, err = s.Reopen(ctx, g); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		old.Close()
		now, err := holding()
		runtime.KeepAlive(kept)
		if err != nil {
			return err
		}
		fmt.Println(now)
		kept = append(kept, bytes.Repeat([]byte{1}, leak<<10))
	}
}

// Of three hosts one is lost, and the packets between the two others are then lost too: those of UCX in Reopen, all of them in Shrink. Neither waits
// for longer than its context or than a rank may be silent, and an error names the rank of the other host. The ranks of hosts that do not reach each
// other are lost to each other: each goes on alone.
func TestF2_PacketsAreLostWhileAGroupGoesOn(t *testing.T) {
	worldtest.NeedUCX(t)
	for _, c := range []struct{ name, call, silent, within, words string }{
		{"Reopen", "Reopen", "2s", "50s", `^Reopen: .*connect the rail: rank %d: on host %[1]d: timed out after 2s: no connection over UCX`},
		{"Shrink", "Shrink", "2s", "50s", `^Shrink: 1 rank is left`},
		{"Shrink with a context that ends", "Shrink", "60s", "1s", `^Shrink: .*rank %d\b.*timed out`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // it mostly waits
			spaces := proctest.Namespaces(t, 3)
			ps := make([]*proctest.Process, len(spaces))
			for r, s := range spaces {
				s.Void("void", fmt.Sprint("10.99.0.", 1+r), fmt.Sprint("10.99.0.", 1+(r+1)%2))
				ps[r] = proctest.Rank(t, r, len(ps), spaces[0].IP+":29416", proctest.Spec{Part: "packets are lost", Via: s.Via,
					Args: []string{c.call, c.within, spaces[0].IP, spaces[1].IP}, Env: []string{"LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1",
						"UCX_TLS=tcp,self", "SWITCHYARD_PEER_TIMEOUT=" + c.silent, "SWITCHYARD_SECRET=a secret of the test", oneArena}})
			}
			for r, err := range proctest.Failures(ps) {
				require.NoError(t, err)
				if out, _ := ps[r].Output(); r < 2 {
					words := c.words
					if strings.Contains(words, "%") {
						words = fmt.Sprintf(words, 1-r)
					}
					require.Regexp(t, words, out, "rank %d", r)
				}
			}
		})
	}
}

func playPacketsAreLost(args []string) int {
	within, err := time.ParseDuration(args[1])
	if err == nil {
		err = losePackets(args[0], within, args[2:])
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// losePackets is a rank of three hosts, and prints what becomes of the call. addrs are those of the first two.
func losePackets(call string, within time.Duration, addrs []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Second)
	defer cancel()
	c, err := comm.FromEnv()
	if err != nil {
		return err
	}
	g, err := comm.Join(ctx, c)
	if err != nil {
		return err
	}
	defer g.Close()
	s, err := stack.Open(ctx, g, device.Host(), hostsOptions())
	if err != nil {
		return err
	}
	if err := errors.Join(use(s), g.Barrier(ctx)); err != nil && hasLost(err, 2) != nil {
		return err
	}
	if g.Rank() == 2 {
		os.Exit(0) // without a word
	}
	if err := use(s); err == nil {
		return errors.New("calls without rank 2")
	}
	start := time.Now()
	if call == "Shrink" {
		line := fmt.Sprintf("ip neigh replace %s lladdr 02:00:00:00:00:01 dev veth%d nud permanent", addrs[1-g.Rank()], g.Rank())
		if out, err := exec.Command("sh", "-c", line).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", line, err, out)
		}
		short, stop := context.WithTimeout(ctx, within)
		defer stop()
		next, err := g.Shrink(short)
		if err != nil {
			fmt.Println("Shrink:", err)
		} else {
			fmt.Println("Shrink:", next.Size(), "rank is left")
			next.Close()
		}
	} else {
		next, err := g.Shrink(ctx)
		if err != nil {
			return err
		}
		defer next.Close()
		os.Setenv("UCX_NET_DEVICES", "void")
		_, err = s.Reopen(ctx, next)
		fmt.Println("Reopen:", err)
	}
	if err := s.Close(ctx); err != nil {
		return err
	}
	if took := time.Since(start); took > 30*time.Second { // the system tries for two minutes
		return fmt.Errorf("%s and Close took %v", call, took)
	}
	return nil
}
