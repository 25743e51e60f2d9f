// Package upgrade has ranks of earlier versions of Switchyard in a group with ranks of this one, as in an upgrade that goes from process to
// process.
package upgrade

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/loopback"
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
	g, err := comm.Join(context.Background(), comm.Config{Rank: rank, Size: 2, Addr: os.Args[1], JoinTimeout: 20 * time.Second})
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
			program := build(t, old.commit)
			for rank := range 2 {
				addr := loopback.Addr()
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				defer cancel()
				var out bytes.Buffer
				cmd := exec.CommandContext(ctx, program, addr, fmt.Sprint(rank))
				cmd.Stdout, cmd.Stderr = &out, &out
				require.NoError(t, cmd.Start())
				began := time.Now()
				_, err := comm.Join(ctx, comm.Config{Rank: 1 - rank, Size: 2, Addr: addr, JoinTimeout: 20 * time.Second})
				require.NoError(t, cmd.Wait())
				connects, connected := 4, old.protocol
				if rank == 1 {
					connects, connected = old.protocol, 4
				}
				want := fmt.Sprintf("the rank that connects speaks protocol %d, the rank it connects to %d", connects, connected)
				require.ErrorIs(t, err, comm.ErrMismatch)
				require.ErrorContains(t, err, want)
				require.ErrorContains(t, err, "this one has Switchyard "+switchyard.Version+": a group has one release")
				require.Contains(t, out.String(), want, "the earlier one says so too")
				require.Less(t, time.Since(began), 10*time.Second)
			}
		})
	}
}

// build has a program of the repository as it was.
func build(t *testing.T, commit string) string {
	t.Helper()
	dir := t.TempDir()
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
	require.NoError(t, os.Mkdir(filepath.Join(dir, "probe"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "probe", "main.go"), []byte(probe), 0o644))
	program := filepath.Join(dir, "rank")
	cmd := exec.Command("go", "build", "-o", program, "./probe")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return program
}
