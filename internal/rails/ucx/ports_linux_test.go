//go:build cgo && linux

package ucx

import (
	"context"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
)

// needFilters skips the test where the kernel lets this process have no filter.
func needFilters(t *testing.T) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	if err := attach(fd, filter(nil)); err != nil {
		proctest.Missing(t, "filters", err)
	}
}

// UCX listens on the interface of the control plane alone, and the kernel drops what does not come from the group's other hosts: no byte of a
// stranger gets to UCX.
func TestF4_StrangersDoNotReachUCX(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	needFilters(t)
	t.Setenv("UCX_NET_DEVICES", "")
	os.Unsetenv("UCX_NET_DEVICES")
	loopback, elsewhere := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.7")
	opened := func(rank int, from ...netip.Addr) (rails.Rail, []string) {
		before := doors(t)
		r, err := Open(rails.Config{Rank: rank, Size: 2, Key: railtest.Key, Interface: loopback, From: from})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, r.Close()) })
		var mine []string
		for door := range doors(t) {
			if !before[door] {
				mine = append(mine, door)
			}
		}
		require.Len(t, mine, 1, "one port of one interface")
		require.Equal(t, loopback, netip.MustParseAddrPort(mine[0]).Addr())
		return r, mine
	}
	for _, from := range [][]netip.Addr{nil, {elsewhere}, {netip.MustParseAddr("2001:db8::1"), elsewhere}} {
		_, door := opened(0, from...)
		d := net.Dialer{Timeout: 300 * time.Millisecond}
		conn, err := d.Dial("tcp", door[0])
		if err == nil {
			conn.Close()
		}
		var late net.Error
		require.ErrorAs(t, err, &late, "from %v", from)
		require.True(t, late.Timeout(), "from %v: %v", from, err)
	}
	a, _ := opened(0, elsewhere, loopback)
	b, _ := opened(1, loopback)
	require.NoError(t, a.Connect(1, b.Address()))
	require.NoError(t, b.Connect(0, a.Address()))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, a.Meet(ctx))
	require.NoError(t, b.Meet(ctx))

	_, err := Open(rails.Config{Size: 2, Interface: elsewhere})
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "no interface has the address 192.0.2.7")
}
