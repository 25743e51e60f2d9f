// Package upgrade has ranks of other versions and builds of Switchyard in a group with ranks of this one, as in an upgrade that goes from
// process to process.
package upgrade

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/memory"
)

// probe is a rank of an earlier version. It uses what comm has had since 0.1.0.
const probe = `package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
)

func main() {
	rank := 0
	if os.Args[2] == "1" {
		rank = 1
	}
	g, err := comm.Join(context.Background(), comm.Config{Rank: rank, Size: 2, Addr: os.Args[1], JoinTimeout: 5 * time.Minute})
	if err == nil {
		err = g.Barrier(context.Background())
	}
	fmt.Println("old:", err)
}
`

// Versions that speak another protocol, or are another release, are refused with both numbers, whichever of them is rank 0.
func TestAnEarlierVersionIsRefused(t *testing.T) {
	if testing.Short() {
		t.Skip("builds earlier versions")
	}
	for _, old := range []struct {
		commit, release string
		protocol        int
	}{
		{"de160bb511", "0.1.0", 1},
		{"9c2ada1", "0.2.0, before its release", 3},
	} {
		t.Run(old.release, func(t *testing.T) {
			dir := t.TempDir()
			unpack(t, dir, old.commit)
			program := build(t, dir, probe)
			for rank := range 2 {
				addr := loopback.Addr()
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
				defer cancel()
				var out bytes.Buffer
				cmd := exec.CommandContext(ctx, program, addr, fmt.Sprint(rank))
				cmd.Stdout, cmd.Stderr = &out, &out
				require.NoError(t, cmd.Start())
				began := time.Now()
				_, err := comm.Join(ctx, comm.Config{Rank: 1 - rank, Size: 2, Addr: addr, JoinTimeout: 5 * time.Minute})
				require.NoError(t, cmd.Wait())
				connects, connected := 4, old.protocol
				if rank == 1 {
					connects, connected = old.protocol, 4
				}
				want := fmt.Sprintf("the rank that connects speaks protocol %d, the rank it connects to %d", connects, connected)
				require.ErrorIs(t, err, comm.ErrMismatch)
				require.ErrorContains(t, err, want)
				require.ErrorContains(t, err, "this one has Switchyard "+switchyard.Version+" (build ")
				require.Contains(t, out.String(), want, "the earlier one says so too")
				require.Less(t, time.Since(began), 2*time.Minute)
			}
		})
	}
}

// sibling is a rank of another build of this version. Its argument is the address of the join.
const sibling = `package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
)

func main() {
	ctx := context.Background()
	g, err := comm.Join(ctx, comm.Config{Rank: 1, Size: 2, Addr: os.Args[1], JoinTimeout: 5 * time.Minute})
	if err == nil {
		defer g.Close()
		var h *memory.Heap
		if h, err = memory.NewHeap(ctx, g, device.Host(), memory.Options{}); err == nil {
			err = h.Close(ctx)
		}
	}
	fmt.Println(err)
}
`

// A build of this version from other sources is refused with both identities: where ranks meet if they would meet in another way, and where
// they would map each other's memory if only the kernels differ. The build from the same sources is not.
func TestAnotherBuildOfThisVersionIsRefused(t *testing.T) {
	if testing.Short() {
		t.Skip("builds other versions")
	}
	const one = `[0-9.]+ \(build ([0-9a-f]{12})\)`
	for _, c := range []struct{ name, changed, want string }{
		{"the same", "", ""},
		{"meets otherwise", "comm/wire.go", `version: the rank that connects has Switchyard ` + one + `, the rank it connects to ` + one + `: a group has one build of one release$`},
		{"other kernels", "kernels/host/alltoallv.go", `mismatch: kernels: rank 0 has ` + one + `, rank 1 has ` + one + `$`},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			copyTree(t, dir)
			if c.changed != "" {
				text, err := os.ReadFile(filepath.Join("../..", c.changed))
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(filepath.Join(dir, c.changed), append(text, "\n// Another build.\n"...), 0o644))
			}
			program := build(t, dir, sibling)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			addr := loopback.Addr()
			var out bytes.Buffer
			cmd := exec.CommandContext(ctx, program, addr)
			cmd.Stdout, cmd.Stderr = &out, &out
			require.NoError(t, cmd.Start())
			g, err := comm.Join(ctx, comm.Config{Size: 2, Addr: addr, JoinTimeout: 5 * time.Minute})
			var h *memory.Heap
			if err == nil {
				defer g.Close()
				if h, err = memory.NewHeap(ctx, g, device.Host(), memory.Options{}); err == nil {
					err = h.Close(ctx)
				}
			}
			require.NoError(t, cmd.Wait())
			if c.changed == "" {
				require.NoError(t, err)
				require.Equal(t, "<nil>\n", out.String())
				return
			}
			require.ErrorIs(t, err, comm.ErrMismatch)
			mine := regexp.MustCompile(c.want).FindStringSubmatch(err.Error())
			require.NotNil(t, mine, err.Error())
			require.NotEqual(t, mine[1], mine[2])
			theirs := regexp.MustCompile(c.want).FindStringSubmatch(strings.TrimSpace(out.String()))
			require.Equal(t, mine, theirs, "both ranks say so: %s", out.String())
		})
	}
}

// copyTree puts the files that git knows, or would add, into a folder.
func copyTree(t *testing.T, dir string) {
	t.Helper()
	list := exec.Command("git", "ls-files", "-co", "--exclude-standard", "-z", "*.go", "*.c", "*.h", "*.s", "*.fatbin", "*.gz", "*.json", "*.html", "go.mod", "go.sum")
	list.Dir = "../.."
	files, err := list.Output()
	if err != nil {
		t.Skipf("not a git repository: %v", err)
	}
	for name := range strings.SplitSeq(strings.TrimRight(string(files), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join("../..", name))
		if os.IsNotExist(err) {
			continue // deleted
		}
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), text, 0o644))
	}
}

// unpack puts the repository into a folder as it was.
func unpack(t *testing.T, dir, commit string) {
	t.Helper()
	archive := exec.Command("git", "archive", "--format=tar", commit)
	archive.Dir = "../.."
	tar := exec.Command("tar", "-x", "-C", dir)
	var err error
	tar.Stdin, err = archive.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, tar.Start())
	if err := archive.Run(); err != nil {
		_ = tar.Wait()
		t.Skipf("commit %s is not in this clone: %v", commit, err)
	}
	require.NoError(t, tar.Wait())
}

// build has a program that is part of the module in a folder.
func build(t *testing.T, dir, source string) string {
	t.Helper()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "probe"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "probe", "main.go"), []byte(source), 0o644))
	program := filepath.Join(dir, "rank")
	cmd := exec.Command("go", "build", "-o", program, "./probe")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return program
}
