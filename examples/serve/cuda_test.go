package main

import (
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
)

// onGPUs are the arguments of a server with a rank on each GPU, of at most 4.
func onGPUs(t *testing.T) (args []string, ranks int) {
	n, err := device.CUDACount()
	if err != nil || n < 2 {
		t.Skipf("%d GPUs, needs 2: %v", n, err)
	}
	ranks = min(n, 4)
	return []string{"-cuda", "-ranks", strconv.Itoa(ranks)}, ranks
}

// onTheHost are the answers of ranks on the host to a crowd of 24.
func onTheHost(t *testing.T, tokens int) []string {
	calm := startServer(t, "-ranks", "2")
	want, _, wait := calm.crowd(24, tokens, false)
	wait()
	require.NoError(t, calm.end())
	return want
}

// Ranks on GPUs answer as ranks on the host do, also when one is lost and a fresh one comes.
func TestCUDA_AnswersAreThoseOfTheHost(t *testing.T) {
	const tokens = 150
	args, ranks := onGPUs(t)
	want := onTheHost(t, tokens)

	s := startServer(t, args...)
	for lost := range 2 {
		got, refused, wait := s.crowd(24, tokens, true)
		if lost > 0 {
			s.until(func(c condition) bool { return c.Running == 24 && c.Steps > 30 })
			s.strike(ranks - 1)
		}
		wait()
		require.Equal(t, make([]string, 24), refused)
		require.Equal(t, want, got)
		s.until(func(c condition) bool { return len(c.Ranks) == ranks && c.Lost == lost && c.Fresh == lost })
	}
	require.NoError(t, s.end())
}

// The same with processes, of which one after the other is killed.
func TestCUDA_RequestsOutliveTheirProcesses(t *testing.T) {
	const tokens = 600
	args, ranks := onGPUs(t)
	want := onTheHost(t, tokens)

	p := startProgram(t, args...)
	for turn := range 2 {
		before := p.health()
		got, refused, wait := (&server{url: p.url, t: t}).crowd(24, tokens, true)
		p.until(func(c condition) bool { return c.Running > 0 && c.Tokens > before.Tokens+100 })
		require.NoError(t, syscall.Kill(before.Ranks[turn%ranks].Process, syscall.SIGKILL))
		wait()
		require.Equal(t, make([]string, 24), refused)
		require.Equal(t, want, got)
		p.until(func(c condition) bool { return len(c.Ranks) == ranks && c.Lost == turn+1 && c.Fresh == turn+1 })
	}
	p.Signal(syscall.SIGTERM)
	require.Zero(t, p.Wait())
}
