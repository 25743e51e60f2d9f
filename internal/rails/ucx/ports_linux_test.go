//go:build cgo && linux

package ucx

import (
	"context"
	"crypto/rand"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
)

// unasked are bytes that end a process in which UCX parses them: 1.13.1 aborts on the second's ids, 1.22.0 on random ones.
func unasked() [][]byte {
	random := make([]byte, 4<<10)
	rand.Read(random)
	return [][]byte{{0x78, 0x56, 0x34, 0x12, 0xbe, 0xba, 0xfe, 0xca, 0, 0xff, 0xff, 0xff, 0xff}, random}
}

// unprivileged takes the privileges of this thread until the end of the test.
func unprivileged(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all, none [2]unix.CapUserData
	require.NoError(t, unix.Capget(&head, &all[0]))
	for i := range all {
		none[i].Permitted = all[i].Permitted
	}
	require.NoError(t, unix.Capset(&head, &none[0]))
	t.Cleanup(func() {
		require.NoError(t, unix.Capset(&head, &all[0]))
		runtime.UnlockOSThread()
	})
}

// UCX listens on the interface of the control plane alone, and no byte of who is not on one of the group's other hosts gets to it, whatever
// privileges the process has.
func TestF4_StrangersDoNotReachUCX(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	unprivileged(t)
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
		r, door := opened(0, from...)
		d := net.Dialer{Timeout: 100 * time.Millisecond}
		said := 0          // connections, all at the guard
		for i := range 6 { // the guard has room for few
			conn, err := d.Dial("tcp", door[0])
			if err != nil {
				var late net.Error
				require.ErrorAs(t, err, &late, "from %v", from)
				require.True(t, late.Timeout(), "from %v: %v", from, err)
				break
			}
			defer conn.Close()
			_, err = conn.Write(unasked()[i%2])
			require.NoError(t, err)
			said++
		}
		require.Eventually(t, func() bool {
			queue, err := unix.GetsockoptTCPInfo(r.(*Rail).guard[0], unix.SOL_TCP, unix.TCP_INFO)
			require.NoError(t, err)
			return int(queue.Unacked) == said
		}, time.Minute, time.Millisecond, "from %v: %d wait at the guard", from, said)
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
