package cuda_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels/cuda/internal/fatbin"
)

// emulation compiles the kernels for this processor, with testdata/emulate in place of a GPU, and returns the program. Blocks
// have fewer warps than on a GPU, so that a run is short; bugs are changes of the sources, each of an old text to a new one.
func emulation(t *testing.T, bugs ...string) string {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("the emulation switches stacks in the instructions of amd64")
	}
	if _, err := os.Stat("alltoallv.cu"); err != nil {
		t.Skip("the sources are not beside the test binary")
	}
	compiler := os.Getenv("CXX")
	for _, name := range []string{"c++", "g++", "clang++"} {
		if _, err := exec.LookPath(name); err == nil && compiler == "" {
			compiler = name
		}
	}
	if compiler == "" {
		t.Skip("needs a C++ compiler")
	}
	dir := t.TempDir()
	sources, err := fatbin.Sources(os.DirFS("../.."))
	require.NoError(t, err)
	edits := append([]string{"SW_SEND_THREADS = 384", "SW_SEND_THREADS = 96", "SW_RECV_THREADS = 320", "SW_RECV_THREADS = 64",
		"SW_PACKET_THREADS = 1024", "SW_PACKET_THREADS = 128", "SW_COPY_THREADS = 256", "SW_COPY_THREADS = 64"}, bugs...)
	found := make([]int, len(edits))
	for name := range sources {
		b, err := os.ReadFile(filepath.Join("../..", name))
		require.NoError(t, err)
		text := string(b)
		for i := 0; i < len(edits); i += 2 {
			found[i] += strings.Count(text, edits[i])
			text = strings.Replace(text, edits[i], edits[i+1], 1)
		}
		to := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(to), 0o777))
		require.NoError(t, os.WriteFile(to, []byte(text), 0o666))
	}
	for i := 0; i < len(edits); i += 2 {
		require.Equal(t, 1, found[i], "%q in the sources", edits[i])
	}
	program := filepath.Join(dir, "emulate")
	out, err := exec.Command(compiler, "-O1", "-std=c++20", "-Wno-unknown-pragmas", `-DSW_EMULATED="emulated.h"`, "-Itestdata/emulate",
		`-DSW_KERNELS="`+filepath.Join(dir, "kernels/cuda/alltoallv.cu")+`"`, "-o", program, "testdata/emulate/main.cpp").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return program
}

func emulate(program string, seed, rounds int) (string, error) {
	out, err := exec.Command(program, strconv.Itoa(seed), strconv.Itoa(rounds)).CombinedOutput()
	return string(out), err
}

// Exchanges of any counts and alignments, calls in a row, disagreements on sizes, missing ranks, aborts and splits that reach
// outside, each in a random order of all threads.
func TestKernelsKeepTheirPromisesInAnyOrderOfThreads(t *testing.T) {
	program := emulation(t)
	rounds := 120
	if testing.Short() {
		rounds = 16
	}
	out, err := emulate(program, 1, rounds)
	require.NoError(t, err, out)
}

// Bugs that the kernels have had, put back.
func TestTheEmulationFindsBugs(t *testing.T) {
	if testing.Short() || worldtest.Race { // which sees nothing of it
		t.Skip("compiles the kernels several times")
	}
	for what, bug := range map[string][]string{
		"a block waits for a credit that it does not need": {
			"if (b.place[s] != 0 || b.out[s].chunks == 0)", "if (b.place[s] != 0 || r[s].send_bytes <= a.packet_bytes)",
		},
		"a chunk is signalled as another one": {
			"if (chunks != 0 && before + chunks > from", "if (before + chunks > from",
		},
		"a warp leaves a chunk one tile too early": {
			"mine >= first + each;", "mine + 1 >= first + each;",
		},
		"the end of a message is signalled before all warps have written it": {
			"part_sync(send_part, SW_SEND_THREADS);", "",
		},
		"a slot is given back before all warps of a block that only copies have read it": {
			"expect(takers(a))", "expect(recv_warps)",
		},
		"a tile in place belongs to no stripe": {
			"(whole - o.stripe + o.stripes - 1) / o.stripes", "whole / o.stripes",
		},
		"a message for staging is passed over by some warps only": {
			"mine += (last - 1 - mine) / send_warps * send_warps; //", "mine = last; //",
		},
		"a slot is written before it has been read": {
			"c > slots + room && ", "false && ",
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			out, err := emulate(emulation(t, bug...), 1, 600)
			var exit *exec.ExitError
			require.True(t, errors.As(err, &exit), "not found: %s", out)
		})
	}
}
