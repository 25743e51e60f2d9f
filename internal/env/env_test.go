package env

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var all = []string{
	rank, worldSize, localRank, localWorldSize, masterAddr, masterPort,
	port, secret, joinTimeout, peerTimeout, debug, cudaHeap,
}

func set(t *testing.T, env map[string]string) {
	for _, name := range all {
		t.Setenv(name, "")
	}
	for name, v := range env {
		t.Setenv(name, v)
	}
}

// The package comment is where users find the variables.
func TestEveryVariableIsDocumented(t *testing.T) {
	src, err := os.ReadFile("env.go")
	require.NoError(t, err)
	comment, code, _ := bytes.Cut(src, []byte("\npackage env\n"))
	for _, name := range all {
		require.Regexp(t, `\n//\t`+name+`\b`, string(comment))
	}
	for _, m := range regexp.MustCompile(`"([A-Z][A-Z_]{3,})"`).FindAllSubmatch(code, -1) {
		if name := string(m[1]); name != "TRACE" {
			require.Contains(t, all, name, "the list of this test is not complete")
		}
	}
}

func TestCUDAHeap(t *testing.T) {
	for text, want := range map[string]int64{"": 0, "4096": 4096, "3K": 3 << 10, "256M": 256 << 20, " 2G": 2 << 30} {
		set(t, map[string]string{"SWITCHYARD_CUDA_HEAP": text})
		n, err := CUDAHeap()
		require.NoError(t, err)
		require.Equal(t, want, n, text)
	}
	for _, text := range []string{"much", "-1", "0", "1.5G", "9999999999G", "MM"} {
		set(t, map[string]string{"SWITCHYARD_CUDA_HEAP": text})
		_, err := CUDAHeap()
		require.ErrorContains(t, err, "not a size such as 256M", text)
	}
}

func TestReadWorld(t *testing.T) {
	set(t, nil)
	w, err := ReadWorld()
	require.NoError(t, err)
	require.Equal(t, World{Size: 1, LocalSize: 1}, w)

	set(t, map[string]string{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
		"MASTER_ADDR": "node7", "MASTER_PORT": "1234", "SWITCHYARD_SECRET": "s", "SWITCHYARD_JOIN_TIMEOUT": "90s"})
	w, err = ReadWorld()
	require.NoError(t, err)
	require.Equal(t, World{Rank: 5, Size: 8, LocalRank: 1, LocalSize: 4, Addr: "node7:1235", Secret: []byte("s"), JoinTimeout: 90 * time.Second}, w)

	set(t, map[string]string{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "SWITCHYARD_PORT": "99"})
	w, err = ReadWorld()
	require.NoError(t, err)
	require.Equal(t, "[::1]:99", w.Addr)

	set(t, map[string]string{"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65535"})
	w, err = ReadWorld()
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:65534", w.Addr)

	for want, env := range map[string]map[string]string{
		`RANK is 1 but WORLD_SIZE is not set`:                         {"RANK": "1"},
		`WORLD_SIZE is 2 but RANK is not set`:                         {"WORLD_SIZE": "2"},
		`RANK is "x", not a number`:                                   {"RANK": "x", "WORLD_SIZE": "2"},
		`MASTER_PORT is 0, not a port`:                                {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "0"},
		`SWITCHYARD_PORT is 70000, not a port`:                        {"RANK": "1", "WORLD_SIZE": "2", "SWITCHYARD_PORT": "70000"},
		`SWITCHYARD_PEER_TIMEOUT is "10", not a duration such as 10s`: {"SWITCHYARD_PEER_TIMEOUT": "10"},
		`SWITCHYARD_JOIN_TIMEOUT is "-1s", not a duration`:            {"SWITCHYARD_JOIN_TIMEOUT": "-1s"},
	} {
		set(t, env)
		_, err := ReadWorld()
		require.ErrorContains(t, err, want)
	}
}

func TestLogger(t *testing.T) {
	set(t, nil)
	l, err := Logger(nil)
	require.NoError(t, err)
	require.Nil(t, l)
	set(t, map[string]string{"SWITCHYARD_DEBUG": "loud"})
	_, err = Logger(nil)
	require.ErrorContains(t, err, `SWITCHYARD_DEBUG is "loud", want warn, info or trace`)

	for level, want := range map[string][]string{"warn": {"WARN"}, "INFO": {"WARN", "INFO"}, "trace": {"WARN", "INFO", "TRACE"}} {
		set(t, map[string]string{"SWITCHYARD_DEBUG": level, "RANK": "3"})
		var out bytes.Buffer
		l, err := Logger(&out)
		require.NoError(t, err)
		l.Warn("x")
		l.Info("x")
		l.Log(context.Background(), LevelTrace, "x")
		var got []string
		for _, m := range regexp.MustCompile(`level=(\w+) msg=x lib=switchyard world_rank=3`).FindAllStringSubmatch(out.String(), -1) {
			got = append(got, m[1])
		}
		require.Equal(t, want, got)
	}
	require.Less(t, LevelTrace, slog.LevelDebug)
}
