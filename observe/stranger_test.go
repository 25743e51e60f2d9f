package observe_test

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{"stranger": playStranger, "besieged": playBesieged})
	os.Exit(m.Run())
}

// playStranger asks for the state by the socket, and prints what it gets.
func playStranger(args []string) int {
	c, err := net.Dial("unix", args[0])
	if err != nil {
		fmt.Println(err)
		return 1
	}
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	_, _ = io.WriteString(c, "GET /state HTTP/1.0\r\n\r\n")
	b, _ := io.ReadAll(c)
	fmt.Printf("%d bytes\n", len(b))
	return 0
}

// ownSocket is the name of the socket at which this process tells its state.
func ownSocket() string { return fmt.Sprintf("@switchyard-status-%d-%d", os.Geteuid(), os.Getpid()) }

// A process of another user gets no byte.
func TestAnotherUserLearnsNothing(t *testing.T) {
	other := proctest.AsNobody(t, "stranger", ownSocket())
	worldtest.Local(t, 1, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		out, err := other.CombinedOutput()
		r.Must(err)
		require.Equal(r.T, "0 bytes\n", string(out))
		r.Must(x.Close(r.Ctx))
	})
}

// Requests that are no requests harm nobody, and neither do connections without one.
func TestStrangersHarmNobody(t *testing.T) {
	worldtest.Local(t, 1, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		name := ownSocket()
		for _, hostile := range []string{"\x00\xff\x00", "GET /" + strings.Repeat("x", 1<<20) + " HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\n" + strings.Repeat("A: b\r\n", 1<<14)} {
			c, err := net.Dial("unix", name)
			r.Must(err)
			_, _ = io.WriteString(c, hostile)
			_ = c.(*net.UnixConn).CloseWrite() // the request does not go on
			_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
			b, _ := io.ReadAll(c)
			require.NotContains(r.T, string(b), "200 OK")
			r.Must(c.Close())
		}
		// More connections than are served at a time: calls go on, and so do those who ask once these are given up.
		var idle []net.Conn
		for range 200 {
			if c, err := net.DialTimeout("unix", name, 10*time.Millisecond); err == nil {
				idle = append(idle, c)
			}
		}
		sp := &alltoallv.Splits{Send: []int64{8}, Recv: []int64{8}}
		for range 100 {
			r.Must(x.Exchange(nil, memory.Host(make([]byte, 8)), memory.Host(make([]byte, 8)), sp))
		}
		for _, c := range idle {
			r.Must(c.Close())
		}
		c, err := net.Dial("unix", name)
		r.Must(err)
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, err = io.WriteString(c, "GET /state HTTP/1.0\r\n\r\n")
		r.Must(err)
		b, err := io.ReadAll(c)
		r.Must(err)
		require.Contains(r.T, string(b), "200 OK")
		r.Must(c.Close())

		r.Must(x.Close(r.Ctx))
	})
}
