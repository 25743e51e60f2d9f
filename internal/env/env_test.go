package env

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func set(t *testing.T, env map[string]string) {
	for _, v := range Variables() {
		t.Setenv(v.Name, "")
	}
	for name, v := range env {
		t.Setenv(name, v)
	}
}

func TestEveryVariableIsListed(t *testing.T) {
	var src []byte
	for _, name := range []string{"env.go", "launchers.go", "world.go"} {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		src = append(src, text...)
	}
	listed := map[string]bool{}
	for _, v := range Variables() {
		require.False(t, listed[v.Name], v.Name)
		listed[v.Name] = true
		require.NotEmpty(t, v.Default, v.Name)
		require.Regexp(t, `^[^|\n]+\.$`, v.Meaning, "a sentence that fits a table")
	}
	read := map[string]bool{}
	for _, m := range regexp.MustCompile(`"([A-Z][A-Z0-9]*_\w+|RANK)"`).FindAllSubmatch(src, -1) {
		require.True(t, listed[string(m[1])], "%s is read and not listed", m[1])
		read[string(m[1])] = true
	}
	for name := range read {
		delete(listed, name)
	}
	require.Empty(t, listed, "listed, but not read")
}

func TestProfiler(t *testing.T) {
	for text, want := range map[string]string{"": "", "0": "", "1": "/lib/nsys.so", " 1 ": "/lib/nsys.so"} {
		set(t, map[string]string{"SWITCHYARD_NVTX": text, "NVTX_INJECTION64_PATH": "/lib/nsys.so"})
		path, err := Profiler()
		require.NoError(t, err)
		require.Equal(t, want, path, text)
	}
	set(t, map[string]string{"SWITCHYARD_NVTX": "yes"})
	_, err := Profiler()
	require.EqualError(t, err, `SWITCHYARD_NVTX is "yes", want 0 or 1`)
}

func TestOlderKernels(t *testing.T) {
	for text, want := range map[string]bool{"": false, "0": false, "1": true} {
		set(t, map[string]string{"SWITCHYARD_OLDER_KERNELS": text})
		older, err := OlderKernels()
		require.NoError(t, err)
		require.Equal(t, want, older, text)
	}
	set(t, map[string]string{"SWITCHYARD_OLDER_KERNELS": "12.4"})
	_, err := OlderKernels()
	require.EqualError(t, err, `SWITCHYARD_OLDER_KERNELS is "12.4", want 0 or 1`)
}

func TestMulticastDisabledBy(t *testing.T) {
	for want, env := range map[string]map[string]string{
		"":                                   {"NCCL_NVLS_ENABLE": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "0", "NVSHMEM_DISABLE_NVLS": "false"},
		"NCCL_NVLS_ENABLE=0":                 {"NCCL_NVLS_ENABLE": "0"},
		"TORCH_SYMM_MEM_DISABLE_MULTICAST=1": {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
		"NVSHMEM_DISABLE_NVLS=true":          {"NVSHMEM_DISABLE_NVLS": "True", "NCCL_NVLS_ENABLE": "2"},
	} {
		set(t, env)
		require.Equal(t, want, MulticastDisabledBy())
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
	require.Equal(t, World{Launcher: "torchrun", Rank: 5, Size: 8, LocalRank: 1, LocalSize: 4, Addr: "node7:1235"}, w)
	settings, err := ReadSettings()
	require.NoError(t, err)
	require.Equal(t, Settings{Secret: []byte("s"), JoinTimeout: 90 * time.Second}, settings)

	set(t, map[string]string{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "SWITCHYARD_PORT": "99"})
	w, err = ReadWorld()
	require.NoError(t, err)
	require.Equal(t, "[::1]:99", w.Addr)

	// Ranks of one host meet in the folder of their sockets, others and those who chose a port do not; and no two jobs in one file.
	pod := map[string]string{"JOB_COMPLETION_INDEX": "1", "SWITCHYARD_WORLD_SIZE": "2", "SWITCHYARD_LOCAL_WORLD_SIZE": "2", "SWITCHYARD_SOCKETS": "/run/x"}
	set(t, pod)
	w, err = ReadWorld()
	require.NoError(t, err)
	require.Regexp(t, `^file:///run/x/meet-\d+-[0-9a-f]{16}$`, w.Addr)
	require.Equal(t, [3]int{1, 2, 2}, [3]int{w.Rank, w.Size, w.LocalSize})
	settings, err = ReadSettings()
	require.NoError(t, err)
	require.Equal(t, "/run/x", settings.Sockets)
	first := w.Addr
	pod["MASTER_ADDR"] = "other"
	set(t, pod)
	w, err = ReadWorld()
	require.NoError(t, err)
	require.NotEqual(t, first, w.Addr)
	pod["SWITCHYARD_LOCAL_WORLD_SIZE"], pod["MASTER_ADDR"], pod["MASTER_PORT"] = "1", "node1", "5000"
	set(t, pod)
	w, err = ReadWorld()
	require.NoError(t, err)
	require.Equal(t, "node1:5001", w.Addr)
	pod["SWITCHYARD_LOCAL_WORLD_SIZE"], pod["SWITCHYARD_PORT"] = "2", "99"
	set(t, pod)
	w, err = ReadWorld()
	require.NoError(t, err)
	require.Equal(t, "node1:99", w.Addr)

	set(t, map[string]string{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "65535"})
	w, err = ReadWorld()
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:65534", w.Addr)

	for want, env := range map[string]map[string]string{
		`RANK is 1 but WORLD_SIZE is not set`:  {"RANK": "1"},
		`WORLD_SIZE is 2 but RANK is not set`:  {"WORLD_SIZE": "2"},
		`RANK is "x", not a number`:            {"RANK": "x", "WORLD_SIZE": "2"},
		`MASTER_PORT is 0, not a port`:         {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "0"},
		`SWITCHYARD_PORT is 70000, not a port`: {"RANK": "1", "WORLD_SIZE": "2", "SWITCHYARD_PORT": "70000"},
		`SWITCHYARD_PORT is 0, not a port`:     {"RANK": "1", "WORLD_SIZE": "2", "SWITCHYARD_PORT": "0"},
	} {
		set(t, env)
		_, err := ReadWorld()
		require.ErrorContains(t, err, want)
	}
	for want, env := range map[string]map[string]string{
		`SWITCHYARD_PEER_TIMEOUT is "10", not a duration such as 10s`: {"SWITCHYARD_PEER_TIMEOUT": "10"},
		`SWITCHYARD_JOIN_TIMEOUT is "-1s", not a duration`:            {"SWITCHYARD_JOIN_TIMEOUT": "-1s"},
	} {
		set(t, env)
		_, err := ReadSettings()
		require.ErrorContains(t, err, want)
	}
}

// Ranks of one job on one host have one name to meet at, and no other job has it.
func TestMeetingName(t *testing.T) {
	addr := func(env map[string]string) string {
		t.Helper()
		set(t, map[string]string{"RANK": "0", "WORLD_SIZE": "2"})
		for name, v := range env {
			t.Setenv(name, v)
		}
		w, err := ReadWorld()
		require.NoError(t, err)
		return w.Addr
	}
	name := addr(nil)
	require.Regexp(t, fmt.Sprintf(`^@switchyard-meet-%d-29500-[0-9a-f]{16}$`, os.Geteuid()), name)
	for _, same := range []map[string]string{
		{"RANK": "1"}, {"LOCAL_WORLD_SIZE": "2"}, {"MASTER_PORT": "29500"}, {"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "127.0.0.1"}, {"SWITCHYARD_SECRET": "s"},
	} {
		require.Equal(t, name, addr(same), same)
	}
	seen := map[string]bool{name: true}
	for _, other := range []map[string]string{
		{"MASTER_PORT": "29502"}, {"MASTER_ADDR": "127.0.0.2"}, {"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "b"},
		{"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}, {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"},
		{"MASTER_ADDR": strings.Repeat("long.", 50)}, {"SWITCHYARD_PORT": "29507"}, {"LOCAL_WORLD_SIZE": "1"},
	} {
		at := addr(other)
		require.False(t, seen[at], other)
		require.True(t, len(at) < 100 || at[0] != '@', other)
		seen[at] = true
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
		set(t, map[string]string{"SWITCHYARD_DEBUG": level, "RANK": "3", "WORLD_SIZE": "4"})
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
