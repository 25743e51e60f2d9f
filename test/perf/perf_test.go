package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMain lets the test binary be a worker: runProcs starts the running executable again.
func TestMain(m *testing.M) {
	if worker, err := runWorker(context.Background()); worker {
		exit(err)
	}
	os.Exit(m.Run())
}

// output runs the command and returns what it prints.
func output(t *testing.T, args ...string) []byte {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	old := os.Stdout
	os.Stdout = w
	defer func() { os.Stdout = old }()
	done := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(r)
		done <- b
	}()
	err = run(t.Context(), args)
	w.Close()
	out := <-done
	require.NoError(t, err)
	return out
}

func TestEveryOperationPrintsItsFields(t *testing.T) {
	for _, args := range [][]string{
		{"alltoallv", "-sizes", "8KiB,100KiB", "-splits", "uniform,zipf"},
		{"alltoallv", "-sizes", "100KiB", "-splits", "zipf", "-staged", "-algorithm", "ring", "-procs"},
		{"allreduce", "-sizes", "8KiB,100KiB", "-op", "max"},
		{"dispatch", "-tokens", "64", "-hidden", "32"},
	} {
		out := output(t, append(args, "-ranks", "2", "-iters", "3", "-json")...)
		lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
		require.NotEmpty(t, lines)
		for _, line := range lines {
			var fields map[string]any
			require.NoError(t, json.Unmarshal(line, &fields), "%s", line)
			for _, name := range []string{"op", "ranks", "procs", "device", "splits", "algorithm", "bytes_per_rank", "us", "us_p10", "us_p90", "gbps_link", "checked", "peer", "peer_us"} {
				require.Contains(t, fields, name)
			}
			require.Equal(t, args[0], fields["op"])
			require.Equal(t, true, fields["checked"])
			require.Positive(t, fields["us"])
		}
	}
}

func TestPeerStandsBesideOurs(t *testing.T) {
	out := output(t, "alltoallv", "-ranks", "2", "-sizes", "8KiB", "-splits", "uniform", "-iters", "3", "-json", "-rounds", "2",
		"-peer", "echo '# {ranks} {splits}'; echo 8192 {ranks}00.5 1.0")
	var r row
	require.NoError(t, json.Unmarshal(out, &r))
	require.NotNil(t, r.PeerUS)
	require.Equal(t, 200.5, *r.PeerUS)
}

func TestBadArgumentsAreErrors(t *testing.T) {
	for _, args := range [][]string{nil, {"nothing"}, {"alltoallv", "-sizes", "8QiB"}, {"alltoallv", "-ranks", "0"}, {"alltoallv", "-ranks", "2", "-sizes", "8", "-splits", "odd"},
		{"allreduce", "-ranks", "2", "-sizes", "8", "-op", "median"}, {"alltoallv", "-ranks", "2", "-sizes", "8", "-peer", "echo x y"}, {"alltoallv", "-ranks", "2", "-sizes", "8", "-peer", "true"}} {
		require.Error(t, run(t.Context(), args), "%v", args)
	}
}

func TestSplitMatrix(t *testing.T) {
	m, err := splitMatrix("zipf", 3, 1100)
	require.NoError(t, err)
	require.Equal(t, []int64{600, 300, 200}, m[1])
	m, err = splitMatrix("uniform", 4, 1000)
	require.NoError(t, err)
	require.Equal(t, []int64{250, 250, 250, 250}, m[3])
}
