package observe_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/stack"
)

// playBesieged is a rank that fills its notes, and then says at each line of input what processor time it has taken, and how many
// descriptors it has open.
func playBesieged([]string) int {
	err := func() error {
		conf, err := comm.FromEnv()
		if err != nil {
			return err
		}
		g, err := comm.Join(context.Background(), conf)
		if err != nil {
			return err
		}
		s, err := stack.Open(context.Background(), g, device.Host(), stack.Options{Exchanger: &alltoallv.Options{}})
		if err != nil {
			return err
		}
		sp := &alltoallv.Splits{Send: []int64{8}, Recv: []int64{8}}
		for range 3000 {
			if err := s.Exchanger.Exchange(nil, memory.Host(make([]byte, 8)), memory.Host(make([]byte, 8)), sp); err != nil {
				return err
			}
		}
		fmt.Println("ready")
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			var u unix.Rusage
			if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
				return err
			}
			open, err := os.ReadDir("/proc/self/fd")
			if err != nil {
				return err
			}
			fmt.Println(time.Duration(u.Utime.Nano()+u.Stime.Nano()).Microseconds(), len(open))
		}
		return nil
	}()
	fmt.Println("ended:", err)
	return 0
}

// A thousand connections that ask without a pause, that read nothing of their answers, or that only stay open take little of a rank's
// processor time and descriptors, and who asks afterwards gets an answer.
func TestASiegeCostsARankLittle(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some seconds")
	}
	address := net.JoinHostPort(loopback.Host(), "9400")
	p := proctest.Ranks(t, 1, net.JoinHostPort(loopback.Host(), "29431"), proctest.Spec{Part: "besieged", Env: []string{"SWITCHYARD_METRICS=" + address}})[0]
	line, _ := p.Line()
	require.Equal(t, "ready", line)
	used := func() (cpu time.Duration, files int) {
		p.Tell("")
		line, _ := p.Line()
		var us int64
		_, err := fmt.Sscan(line, &us, &files)
		require.NoError(t, err, line)
		return time.Duration(us) * time.Microsecond, files
	}
	const siege = 3 * time.Second
	begun := time.Now()
	before, files := used()
	ctx, cancel := context.WithTimeout(t.Context(), siege)
	defer cancel()
	besiege := []func(ctx context.Context, c net.Conn){
		asks("/dump"), asks("/metrics"), asks("/state"),
		func(ctx context.Context, c net.Conn) { // it reads nothing
			_, _ = io.WriteString(c, strings.Repeat("GET /dump HTTP/1.1\r\nHost: x\r\n\r\n", 100))
			<-ctx.Done()
		},
		func(ctx context.Context, _ net.Conn) { <-ctx.Done() },
	}
	var all sync.WaitGroup
	for i := range 1000 {
		all.Go(func() {
			var d net.Dialer
			c, err := d.DialContext(ctx, "tcp", address)
			if err != nil {
				return // the queue is full
			}
			defer func() { _ = c.Close() }()
			context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
			besiege[i%len(besiege)](ctx, c)
		})
	}
	<-ctx.Done()
	after, open := used()
	took := time.Since(begun) // longer on a busy machine
	all.Wait()
	t.Logf("%v of processor time in %v, %d descriptors", after-before, took, open-files)
	if !proctest.Race { // which makes it several times as dear
		require.Less(t, after-before, took/6)
	}
	require.LessOrEqual(t, open-files, 40)
	client := http.Client{Timeout: time.Minute}
	resp, err := client.Get("http://" + address + "/metrics")
	require.NoError(t, err)
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Contains(t, string(text), "switchyard_calls_total")
}

// asks sends a request as soon as it has the answer to the last one.
func asks(path string) func(context.Context, net.Conn) {
	return func(_ context.Context, c net.Conn) {
		for in := bufio.NewReader(c); ; {
			if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path); err != nil {
				return
			}
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				return
			}
			if _, err := io.Copy(io.Discard, resp.Body); err != nil {
				return
			}
			_ = resp.Body.Close()
		}
	}
}
