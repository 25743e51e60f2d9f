package ucx

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
)

func TestMain(m *testing.M) {
	os.Setenv("UCX_TLS", "tcp,self")
	os.Exit(m.Run())
}

func TestRail(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	railtest.Run(t, Open)
}

func TestVersionsMustAgree(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	ends := railtest.Ends(t, 2, Open)
	other := ends[1].Address()
	other[4]++
	err := ends[0].Connect(1, other)
	require.ErrorContains(t, err, "rank 0 has UCX 1.")
	require.ErrorContains(t, err, ", rank 1 has UCX 1.")
	require.Error(t, ends[0].Connect(1, nil))
}

// UCX with a log for developers does not end a process that opens it again.
func TestUCXWithALogOpensTwice(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	cmd := exec.Command(os.Args[0], "-test.run=^TestVersionsMustAgree$")
	cmd.Env = append(os.Environ(), "UCX_LOG_LEVEL=debug")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out[max(0, len(out)-4000):])
}

// Ranks that have connected meet. One that is not there, or has not connected, is named when the time is over, and not before.
func TestRanksMeet(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	ends := railtest.Ends(t, 3, Open)
	for _, e := range ends {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		require.NoError(t, e.Meet(ctx))
		cancel()
	}
	alone := make([]rails.Rail, 2)
	for rank := range alone {
		var err error
		alone[rank], err = Open(rails.Config{Rank: rank, Size: 2, Key: railtest.Key})
		require.NoError(t, err)
		defer alone[rank].Close()
	}
	require.NoError(t, alone[0].Connect(1, alone[1].Address()))
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, comm.ErrTimeout)
	defer cancel()
	err := alone[0].Meet(ctx)
	var peer *comm.PeerError
	require.ErrorAs(t, err, &peer)
	require.Equal(t, 1, peer.Rank)
	require.ErrorIs(t, err, comm.ErrTimeout)
}

// One put there and one back, where both ends sleep until they are rung.
func BenchmarkRoundTrip(b *testing.B) {
	railtest.NeedUCX(b, Open, ErrUnavailable)
	for _, bytes := range []int{8, 1 << 10, 64 << 10, 256 << 10, 1 << 20} {
		b.Run(fmt.Sprint(bytes), func(b *testing.B) {
			ends, rings := railtest.Rung(b, 2, Open)
			src := ends[0].Segment[1<<20:][:bytes]
			b.ResetTimer()
			go func() {
				for k := 1; k <= b.N; k++ {
					for ends[1].Word(0) < uint64(k) {
						<-rings[1]
					}
					_ = ends[1].Put(0, 4096, src, 0)
				}
			}()
			for k := range b.N {
				if err := ends[0].Put(1, 4096, src, 0); err != nil {
					b.Fatal(err)
				}
				for ends[0].Word(0) <= uint64(k) {
					<-rings[0]
				}
			}
		})
	}
}

// Errors of UCX are words, and name the variables that cause them.
func TestErrorsOfUCXAreWords(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	opened := func(rank int, tls, devices string) (rails.Rail, error) {
		for name, value := range map[string]string{"UCX_TLS": tls, "UCX_NET_DEVICES": devices} {
			t.Setenv(name, value)
			if value == "" {
				os.Unsetenv(name)
			}
		}
		r, err := Open(rails.Config{Rank: rank, Size: 2})
		if err == nil {
			t.Cleanup(func() { require.NoError(t, r.Close()) })
		}
		return r, err
	}
	const cure = ": every rank needs a transport and a device that others are reached by, such as UCX_TLS=tcp"
	_, err := opened(0, "nonsense", "")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "ucp_init: No such device, with UCX_TLS=nonsense"+cure)
	require.NotContains(t, err.Error(), "libucx0") // which is there
	_, err = opened(0, "tcp", "nonsense")
	require.ErrorContains(t, err, "ucp_init: No such device, with UCX_TLS=tcp and UCX_NET_DEVICES=nonsense"+cure)

	other, err := opened(1, "tcp", "")
	require.NoError(t, err)
	r, err := opened(0, "self", "")
	require.NoError(t, err)
	require.EqualError(t, r.Connect(1, other.Address()), "ucx: connect to rank 1: ucp_ep_create: Destination is unreachable, with UCX_TLS=self"+cure)
}
