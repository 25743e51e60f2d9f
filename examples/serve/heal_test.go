package main

import (
	"encoding/gob"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// strike kills a rank as a crash would.
func (s *server) strike(rank int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seats[rank].kill()
}

// crowd asks for texts at the same time, each by a seed of its own, and returns the texts and the errors.
func (s *server) crowd(n, tokens int, stream bool) (texts, refused []string, wait func()) {
	var all sync.WaitGroup
	texts, refused = make([]string, n), make([]string, n)
	for i := range n {
		all.Go(func() {
			texts[i], refused[i], _ = s.ask(fmt.Sprintf(`{"prompt": "the train", "max_tokens": %d, "temperature": 1, "seed": %d, "stream": %v}`, tokens, i, stream))
		})
	}
	return texts, refused, all.Wait
}

// Requests that are under way when ranks are lost get the answers that they would have had: no byte is missing, and none is there twice.
// Fresh ranks come in.
func TestRequestsOutliveTheirRanks(t *testing.T) {
	const tokens = 200
	calm := startServer(t, "-ranks", "1")
	want, _, wait := calm.crowd(24, tokens, false)
	wait()
	require.NoError(t, calm.end())

	cases := [][]int{{1, 2}, {0}, {2}}
	if testing.Short() {
		cases = cases[:1]
	}
	for _, lost := range cases {
		s := startServer(t, "-ranks", "4")
		got, refused, wait := s.crowd(24, tokens, true)
		for i, rank := range lost {
			s.until(func(c condition) bool { return c.Running == 24 && c.Steps > 30*(i+1) })
			s.strike(rank)
		}
		wait()
		require.Equal(t, make([]string, 24), refused)
		require.Equal(t, want, got, "seeds alone decide, not ranks: %v", lost)
		s.until(func(c condition) bool { return len(c.Ranks) == 4 && c.Lost == len(lost) && c.Fresh == len(lost) })
		text, _, _ := s.ask(fmt.Sprintf(`{"prompt": "the train", "max_tokens": %d, "temperature": 1, "seed": 3}`, tokens))
		require.Equal(t, want[3], text)
		require.NoError(t, s.end())
	}
}

// Experts move while requests are answered, to copies of the busiest, and ranks are lost meanwhile. The answers stay the same.
func TestExpertsMoveUnderLoad(t *testing.T) {
	const tokens = 200
	calm := startServer(t, "-ranks", "1")
	want, _, wait := calm.crowd(24, tokens, false)
	wait()
	require.NoError(t, calm.end())
	spares := []string{"1", "0", "3"}
	if testing.Short() {
		spares = spares[:1]
	}
	for _, spare := range spares {
		s := startServer(t, "-ranks", "4", "-balance", "15", "-spare", spare)
		got, refused, wait := s.crowd(24, tokens, true)
		s.until(func(c condition) bool { return c.Running == 24 && c.Steps > 100 })
		s.strike(1)
		wait()
		require.Equal(t, make([]string, 24), refused)
		require.Equal(t, want, got)
		s.until(func(c condition) bool { return len(c.Ranks) == 4 && c.Fresh == 1 })
		again, _, wait := s.crowd(24, tokens, true)
		wait()
		require.Equal(t, want, again)
		require.NoError(t, s.end())
		require.Regexp(t, `msg="experts moved" busiest="1\.\d\d times the mean, now 1\.\d\d" experts="0:`, s.log.String())
	}
}

// A rank that is lost while nobody asks is noticed and replaced.
func TestIdleRankIsReplaced(t *testing.T) {
	s := startServer(t, "-ranks", "2")
	s.strike(1)
	s.until(func(c condition) bool { return len(c.Ranks) == 2 && c.Lost == 1 && c.Fresh == 1 })
	_, _, code := s.ask(`{"prompt": "x"}`)
	require.Equal(t, http.StatusOK, code)
}

// The last rank serves all. Where it is lost too, others start, and requests that are under way go on with them.
func TestAllRanksAreLost(t *testing.T) {
	const tokens = 300
	s := startServer(t, "-ranks", "3")
	want, _, wait := s.crowd(8, tokens, false)
	wait()
	got, refused, wait := s.crowd(8, tokens, true)
	s.until(func(c condition) bool { return c.Running == 8 })
	s.mu.Lock()
	for _, seat := range s.seats {
		seat.kill()
	}
	s.mu.Unlock()
	wait()
	require.Equal(t, make([]string, 8), refused)
	require.Equal(t, want, got)
	require.Equal(t, 3, s.health().Lost)
	require.NoError(t, s.end())
}

// If no rank can start, requests end with the reason, and the server with an error.
func TestNoRankIsLeft(t *testing.T) {
	s := startServer(t, "-ranks", "2")
	s.mu.Lock()
	s.meet.Model = s.model + "-gone"
	s.mu.Unlock()
	_, refused, wait := s.crowd(8, 4096, true)
	s.until(func(c condition) bool { return c.Running == 8 && c.Steps > 10 })
	s.strike(0)
	s.until(func(c condition) bool { return len(c.Ranks) == 1 })
	before := s.health().Tokens
	s.until(func(c condition) bool { return c.Tokens > before+80 })
	s.strike(0)
	wait()
	for _, why := range refused {
		require.Contains(t, why, errNoRanks.Error()+", and others do not start: ")
		require.Contains(t, why, "no such file")
	}
	require.ErrorIs(t, <-s.ended, errNoRanks)
	s.ended <- nil
}

// A fresh rank that cannot come in costs the others nothing but the time of one try.
func TestFreshRankThatFails(t *testing.T) {
	if testing.Short() {
		t.Skip("waits until another one is tried")
	}
	s := startServer(t, "-ranks", "3")
	b, err := os.ReadFile(s.model)
	require.NoError(t, err)
	s.mu.Lock()
	s.meet.Model = s.model + "-gone"
	s.mu.Unlock()
	_, refused, wait := s.crowd(8, 300, true)
	s.until(func(c condition) bool { return c.Steps > 10 })
	s.strike(1)
	wait()
	require.Equal(t, make([]string, 8), refused)
	c := s.health()
	require.Zero(t, c.Fresh)
	require.Equal(t, 1, c.Lost, "and none since")
	require.Len(t, c.Ranks, 2)

	// Another model at the same place is refused too.
	require.NoError(t, os.WriteFile(s.model+"-gone", []byte(strings.Replace(string(b), `"seed":1`, `"seed":2`, 1)), 0o600))
	t.Cleanup(func() { _ = os.Remove(s.model + "-gone") })
	s.until(func(c condition) bool { return len(c.Ranks) == 3 })
	require.NoError(t, s.end())
	require.Contains(t, s.log.String(), "no such file")
}

// A step that fails on all ranks again and again ends its requests, not the server.
func TestStepsThatFail(t *testing.T) {
	s := startServer(t, "-ranks", "2", "-batch", "1")
	s.mu.Lock()
	s.Batch = 2 // more than the ranks have room for
	s.mu.Unlock()
	_, refused, wait := s.crowd(4, 2000, false) // of which three are there at once, however late they come
	wait()
	for _, why := range refused {
		if why != "" {
			require.Contains(t, why, "4 steps in a row failed, the last: dispatch: dispatch: invalid argument: 2 tokens, Options.MaxTokens is 1")
		}
	}
	require.NotEqual(t, make([]string, 4), refused)
	require.Eventually(t, func() bool { return s.health().State == ready }, time.Minute, 10*time.Millisecond)
}

// A rank that was stopped when its part of a step was done holds nobody up in a call. It is given up all the same.
func TestRankThatDoesNotAnswerIsGivenUp(t *testing.T) {
	var seats []*seat
	for i := range 2 {
		orders, to := io.Pipe()
		s := &seat{rank: i, orders: gob.NewEncoder(to), replies: make(chan reply, 1)}
		s.kill = sync.OnceFunc(func() { close(s.replies) })
		seats = append(seats, s)
		go func() {
			if new(order).read(orders) == nil && i == 0 {
				s.replies <- reply{Lost: -1}
			}
		}()
	}
	begin := time.Now()
	answers := ask(seats, 50*time.Millisecond, sameOrder(&order{Do: "step"}))
	require.False(t, answers[0].failed())
	require.True(t, answers[1].failed())
	require.Less(t, time.Since(begin), answerTimeout/2)
}

func (o *order) read(from io.Reader) error { return gob.NewDecoder(from).Decode(o) }

// A rank that is stopped while another one is killed has its time from the order on, not from the other's end.
func TestStoppedRankIsGivenUpBesideAKilledOne(t *testing.T) {
	process := exec.Command("sleep", "1000")
	require.NoError(t, process.Start())
	defer process.Wait()
	defer process.Process.Kill()
	require.NoError(t, process.Process.Signal(syscall.SIGSTOP))
	var seats []*seat
	for i := range 2 {
		orders, to := io.Pipe()
		s := &seat{rank: i, orders: gob.NewEncoder(to), replies: make(chan reply, 1)}
		s.kill = sync.OnceFunc(func() { close(s.replies) })
		seats = append(seats, s)
		go func() {
			if new(order).read(orders) == nil && i == 0 {
				s.kill()
			}
		}()
	}
	seats[1].pid = process.Process.Pid
	require.Eventually(t, seats[1].stopped, time.Minute, time.Millisecond)
	lag, begin := proctest.Scaled(time.Second), time.Now()
	answers := ask(seats, lag, sameOrder(&order{Do: "step"}))
	took := time.Since(begin)
	require.False(t, answers[0].ok)
	require.False(t, answers[1].ok)
	require.GreaterOrEqual(t, took, lag)
	require.Less(t, took, 2*lag)
}
