package observe_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/observe"
)

// Whoever asks one process does not ask others, which may be stopped and then answer nobody.
func TestOneProcessIsAskedAlone(t *testing.T) {
	other := exec.CommandContext(t.Context(), "sleep", "600") // its number is nobody else's
	require.NoError(t, other.Start())
	defer func() { _ = other.Process.Kill(); _ = other.Wait() }()
	l, err := net.Listen("unix", fmt.Sprintf("@switchyard-status-%d-%d", os.Geteuid(), other.Process.Pid))
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	var asked atomic.Int32
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			asked.Add(1)
			_ = c.Close()
		}
	}()
	worldtest.Local(t, 2, 1<<20, func(r *worldtest.Rank) {
		if r.Rank() != 0 {
			return
		}
		s, err := observe.Everybody(r.Ctx, os.Getpid())
		r.Must(err)
		require.NotEmpty(r.T, s.Ranks)
		require.Zero(r.T, asked.Load())
		s, err = observe.Everybody(r.Ctx, 0)
		r.Must(err)
		require.NotZero(r.T, asked.Load(), "it is there to be asked")
		require.NotEmpty(r.T, s.Silent)
	})
}
