package comm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// fromEnv is the configuration of a rank that a launcher has started with these variables.
func fromEnv(t *testing.T, rank, size int, env map[string]string) Config {
	for _, name := range []string{"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SWITCHYARD_PORT", "SWITCHYARD_SECRET",
		"SWITCHYARD_DEBUG", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"} {
		t.Setenv(name, env[name])
	}
	t.Setenv("RANK", strconv.Itoa(rank))
	t.Setenv("WORLD_SIZE", strconv.Itoa(size))
	cfg, err := FromEnv()
	require.NoError(t, err)
	return cfg
}

func joinAll(t *testing.T, cfgs ...Config) ([]*Group, []error) {
	gs, errs := make([]*Group, len(cfgs)), make([]error, len(cfgs))
	var wg sync.WaitGroup
	for i := range cfgs {
		wg.Go(func() { gs[i], errs[i] = Join(testContext(t), cfgs[i]) })
	}
	wg.Wait()
	return gs, errs
}

// The ports behind MASTER_PORT may be taken, by connections for instance.
func TestJoinNeedsNoPort(t *testing.T) {
	host, first := loopback.Host(), 0
	for base := 29500; first == 0; base += 10 { // another program may have one of them at all addresses, as torchrun does
		require.Less(t, base, 29700)
		var taken []net.Listener
		for port := base; port < base+4; port++ {
			if l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port))); err == nil {
				taken = append(taken, l)
				defer l.Close()
			}
		}
		if len(taken) == 4 {
			first = base
		}
	}
	env := map[string]string{"MASTER_ADDR": host, "MASTER_PORT": strconv.Itoa(first)}
	gs, errs := joinAll(t, fromEnv(t, 0, 2, env), fromEnv(t, 1, 2, env))
	requireAll(t, errs)
	requireAll(t, onEach(gs, func(g *Group) error { return errors.Join(g.Barrier(testContext(t)), g.Close()) }))

	// A port that was asked for is not replaced by another, and the error says who asked.
	env["SWITCHYARD_PORT"] = strconv.Itoa(first + 1)
	_, err := Join(testContext(t), fromEnv(t, 0, 2, env))
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.ErrorContains(t, err, "rank 0 cannot listen at "+host+":"+env["SWITCHYARD_PORT"]+", which Config.Addr or SWITCHYARD_PORT chooses")
}

// A job of torchrun's that was restarted, or comes after another at the same MASTER_PORT, does not meet ranks of the one before.
func TestJobsAtOneMasterPortDoNotMeet(t *testing.T) {
	job := func(id, restarts string) map[string]string {
		return map[string]string{"MASTER_ADDR": loopback.Host(), "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": id, "TORCHELASTIC_RESTART_COUNT": restarts}
	}
	now := job("a", "1")
	left := []map[string]string{job("a", "0"), job("b", "1")} // of each a rank 1 is left, and looks for its rank 0
	var cfgs []Config
	for _, env := range left {
		env["MASTER_ADDR"] = now["MASTER_ADDR"]
		cfg := fromEnv(t, 1, 2, env)
		cfg.JoinTimeout = time.Second
		cfgs = append(cfgs, cfg)
	}
	late := fromEnv(t, 1, 2, now)
	late.delay = func() { time.Sleep(10 * time.Millisecond) }
	gs, errs := joinAll(t, append(cfgs, fromEnv(t, 0, 2, now), late)...)
	for i := range left {
		requirePeer(t, errs[i], 0, ErrTimeout)
		require.ErrorContains(t, errs[i], "a name of one user in one network namespace; SWITCHYARD_PORT has ranks meet on a port")
	}
	requireAll(t, errs[len(left):])
	requireAll(t, onEach(gs[len(left):], func(g *Group) error { return errors.Join(g.Barrier(testContext(t)), g.Close()) }))
}

// playSquatter listens at a name until its standard input ends, and lets nobody hear from it.
func playSquatter(args []string) int {
	l, err := net.Listen("unix", args[0])
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer l.Close()
	fmt.Println("squatting")
	io.Copy(io.Discard, os.Stdin)
	return 0
}

// Another user at the name where ranks meet is neither heard nor believed, on either side.
func TestF4_AnotherUserAtTheName(t *testing.T) {
	t.Parallel() // it mostly waits
	name := freeName(t)
	ctx, cancel := context.WithCancel(testContext(t))
	var log lockedBuffer
	done := make(chan error)
	go func() {
		_, err := Join(ctx, Config{Size: 2, Addr: name, Logger: newTestLogger(&log)})
		done <- err
	}()
	require.Eventually(t, func() bool {
		c, err := net.Dial("unix", name)
		if err == nil {
			c.Close()
		}
		return err == nil
	}, soon, time.Millisecond)
	guest := proctest.AsNobody(t, "stranger", name)
	out, err := guest.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "closed")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "it belongs to user 65534") }, soon, time.Millisecond)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)

	name = freeName(t)
	host := proctest.AsNobody(t, "squatter", name)
	in, err := host.StdinPipe()
	require.NoError(t, err)
	said, err := host.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, host.Start())
	defer host.Wait()
	defer in.Close()
	line := make([]byte, 100)
	n, err := said.Read(line)
	require.NoError(t, err)
	require.Contains(t, string(line[:n]), "squatting")
	_, errs := joinAll(t, Config{Size: 2, Addr: name}, Config{Rank: 1, Size: 2, Addr: name, JoinTimeout: 2 * time.Second})
	require.ErrorIs(t, errs[0], syscall.EADDRINUSE)
	require.ErrorContains(t, errs[0], "SWITCHYARD_PORT")
	requirePeer(t, errs[1], 0, ErrTimeout)
	require.ErrorContains(t, errs[1], "it belongs to user 65534")
}
