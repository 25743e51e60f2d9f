package stack_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/stack"
)

func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{"beside a stopped rank": playBesideAStoppedRank, "host that comes or goes": playHostThatComesOrGoes,
		"packets are lost": playPacketsAreLost})
	os.Exit(m.Run())
}

// After a call that timed out, closing, shrinking and reopening take no longer than their contexts, though a rank is stopped: it
// is left out, and learns it when it wakes up.
func TestF2_StoppedRankHoldsUpNobody(t *testing.T) { onDevices(t, 1, stoppedRankHoldsUpNobody) }

func stoppedRankHoldsUpNobody(t *testing.T, gpus int) {
	ps := proctest.Ranks(t, 3, loopback.Addr(), proctest.Spec{
		Part: "beside a stopped rank", Args: []string{t.TempDir(), strconv.Itoa(gpus)}, Within: 3 * time.Minute, // also of one that nobody has woken
	})
	require.NoError(t, errors.Join(proctest.Failures(ps)...))
}

func playBesideAStoppedRank(args []string) int {
	gpus, err := strconv.Atoi(args[1])
	if err == nil {
		err = besideAStoppedRank(args[0], gpus)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// bothClosed waits until ranks 0 and 1 have closed: who shrinks tells the other that rank 2 is left out, and that ends a wait for it.
func bothClosed(ctx context.Context, dir string, rank int) error {
	name := func(r int) string { return filepath.Join(dir, strconv.Itoa(r)) }
	if err := os.WriteFile(name(rank), nil, 0o600); err != nil {
		return err
	}
	for {
		if _, err := os.Stat(name(1 - rank)); err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("rank %d has not closed: %w", 1-rank, ctx.Err())
		}
		time.Sleep(time.Millisecond)
	}
}

func besideAStoppedRank(dir string, gpus int) error {
	const stopped = 2
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	c, err := comm.FromEnv()
	if err != nil {
		return err
	}
	c.PeerTimeout = time.Minute
	g, err := comm.Join(ctx, c)
	if err != nil {
		return err
	}
	defer g.Close()
	rank := g.Rank()
	o := options()
	o.Exchanger.Timeout = 3 * time.Second
	d, err := openDevice(rank, gpus)
	if err != nil {
		return err
	}
	s, err := stack.Open(ctx, g, d, o)
	if err != nil {
		return err
	}
	src, dst := memory.Host(make([]byte, 3<<20)), memory.Host(make([]byte, 3<<20))
	if gpus > 0 {
		if err := s.Heap.Grow(ctx, 8<<20); err != nil {
			return err
		}
		b, err := s.Heap.Alloc(6 << 20)
		if err != nil {
			return err
		}
		src, dst = b.View().Slice(0, 3<<20), b.View().Slice(3<<20, 3<<20)
	}
	pids, err := g.AllGather(ctx, []byte(strconv.Itoa(os.Getpid())))
	if err != nil {
		return err
	}
	if err := errors.Join(ready(ctx, s), use(s)); err != nil {
		return err
	}
	parts := []int64{1 << 20, 1 << 20, 1 << 20}
	exchange := func() error {
		return s.Exchanger.Exchange(nil, dst, src, &alltoallv.Splits{Send: parts, Recv: parts})
	}
	if rank == stopped {
		syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		time.Sleep(50 * time.Millisecond) // this thread may go on for a moment before all are stopped
		err := exchange()
		var pe *comm.PeerError
		if !errors.Is(err, comm.ErrPeerLost) || !errors.As(err, &pe) || pe.Rank != rank {
			return fmt.Errorf("the stopped rank got %v", err)
		}
		if _, err := g.Shrink(ctx); !errors.Is(err, comm.ErrPeerLost) {
			return fmt.Errorf("the stopped rank's Shrink: %v", err)
		}
		return s.Close(ctx)
	}
	if err := exchange(); !errors.Is(err, comm.ErrTimeout) {
		return fmt.Errorf("the exchange ended with %v", err)
	}
	start := time.Now()
	short, stop := context.WithTimeout(ctx, 300*time.Millisecond)
	defer stop()
	if err := s.Close(short); rank == 0 && !errors.Is(err, comm.ErrTimeout) { // the stopped rank may use the memory yet
		return fmt.Errorf("close: %w", err)
	}
	closing := time.Since(start)
	if err := bothClosed(ctx, dir, rank); err != nil {
		return err
	}
	start = time.Now()
	next, err := g.Shrink(ctx, stopped)
	if err != nil {
		return err
	}
	defer next.Close()
	if s, err = s.Reopen(ctx, next); err != nil {
		return err
	}
	if took := closing + time.Since(start); took > 30*time.Second {
		return fmt.Errorf("that took %v", took)
	}
	if err := errors.Join(ready(ctx, s), use(s)); err != nil {
		return err
	}
	if err := s.Close(ctx); err != nil {
		return err
	}
	if rank == 0 {
		pid, err := strconv.Atoi(string(pids[stopped]))
		if err != nil {
			return err
		}
		return syscall.Kill(pid, syscall.SIGCONT)
	}
	return nil
}
