package ucx

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
)

// doors are the addresses at which this process listens for TCP.
func doors(t *testing.T) map[string]bool {
	mine := map[string]bool{}
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, fd := range fds {
		link, _ := os.Readlink("/proc/self/fd/" + fd.Name())
		mine[strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]")] = true
	}
	table, err := os.ReadFile("/proc/self/net/tcp")
	require.NoError(t, err)
	found := map[string]bool{}
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		const listens = "0A"
		if len(f) < 10 || f[3] != listens || !mine[f[9]] {
			continue
		}
		var ip, port uint32
		_, err := fmt.Sscanf(f[1], "%X:%X", &ip, &port)
		require.NoError(t, err)
		addr := netip.AddrFrom4([4]byte(binary.NativeEndian.AppendUint32(nil, ip)))
		if addr.IsUnspecified() {
			addr = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		}
		found[netip.AddrPortFrom(addr, uint16(port)).String()] = true
	}
	return found
}

// resident is the memory of this process, without what Go keeps for later.
func resident(t *testing.T) int {
	debug.FreeOSMemory()
	text, err := os.ReadFile("/proc/self/statm")
	require.NoError(t, err)
	pages, err := strconv.Atoi(strings.Fields(string(text))[1])
	require.NoError(t, err)
	return pages * os.Getpagesize()
}

// Strangers who connect to UCX's own port and say nothing, or something else than UCX does, change nothing and take no memory worth
// mentioning, and the rail works.
func TestF4_StrangersAtThePortOfUCX(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	before := doors(t)
	ends := railtest.Ends(t, 2, Open)
	segment := bytes.Clone(ends[0].Segment)
	random := make([]byte, 64<<10)
	rand.Read(random)
	found, conns := 0, []net.Conn{}
	was := resident(t)
	for door := range doors(t) {
		if before[door] {
			continue
		}
		found++
		for i := range 100 {
			c, err := net.Dial("tcp", door)
			require.NoError(t, err)
			defer c.Close()
			conns = append(conns, c)
			switch i % 5 {
			case 1:
				c.Write(random[:4]) // and no more
			case 2:
				c.Write([]byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"))
			case 3:
				c.Write(random)
			case 4:
				c.Write(make([]byte, 64))
			}
		}
	}
	require.NotZero(t, found)
	for k := range uint64(20) {
		require.NoError(t, ends[0].Put(1, 1<<20, []byte("put"), 512))
		railtest.Await(t, ends[1], 512, k+1)
	}
	for i, c := range conns {
		if i%5 >= 2 { // what is not UCX's is turned away
			c.SetReadDeadline(time.Now().Add(time.Minute))
			_, err := io.Copy(io.Discard, c)
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		}
	}
	took := resident(t) - was
	t.Logf("%d KiB for %d strangers", took>>10, len(conns))
	require.Less(t, took, len(conns)*4<<10+4<<20)
	require.True(t, bytes.Equal(segment, ends[0].Segment))
}

// A range of ports of the user's is kept to.
func TestPortsOfTheUsersRange(t *testing.T) {
	railtest.NeedUCX(t, Open, ErrUnavailable)
	free, err := net.Listen("tcp", ":0")
	require.NoError(t, err)
	port := free.Addr().(*net.TCPAddr).Port
	t.Setenv("UCX_TCP_PORT_RANGE", fmt.Sprintf("%d-%d", port, port))
	_, err = Open(rails.Config{Size: 1})
	require.ErrorIs(t, err, ErrUnavailable, "somebody has it")
	require.NoError(t, free.Close())
	r, err := Open(rails.Config{Size: 1})
	require.NoError(t, err)
	defer r.Close()
	for door := range doors(t) {
		if netip.MustParseAddrPort(door).Port() == uint16(port) {
			return
		}
	}
	t.Fatalf("nothing listens at port %d", port)
}
