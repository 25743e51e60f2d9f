package main

import (
	"encoding/gob"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
)

// startHost starts the process of one of two hosts with two ranks each. They meet at an address of the first.
func startHost(t *testing.T, host int, addr string, s proctest.Spec) *proctest.Process {
	s.Part = "serve"
	s.Args = append(s.Args, "-model", modelFile(t), "-ranks", "4", "-peer-timeout", proctest.Scaled(2*time.Second).String())
	s.Env = append(s.Env, "SWITCHYARD_SECRET=mine", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1")
	return proctest.Rank(t, host, 2, addr, s)
}

// onHosts says how many ranks of a server are on each of two hosts.
func onHosts(c condition) (n [2]int) {
	for _, r := range c.Ranks {
		n[r.Host]++
	}
	return n
}

// A server on two hosts answers as one rank does, also to requests that are under way when a rank of either host is killed, and when the
// process of the other host is and comes back.
func TestServerOnTwoHosts(t *testing.T) {
	worldtest.NeedUCX(t)
	const clients, tokens = 8, 200
	calm := startServer(t, "-ranks", "1")
	want, _, wait := calm.crowd(clients, tokens, false)
	wait()
	require.NoError(t, calm.end())

	addr := loopback.Addr()
	start := func(host int) *proctest.Process {
		return startHost(t, host, addr, proctest.Spec{Args: []string{"-addr", "127.0.0.1:0"}, Env: []string{fmt.Sprint("SWITCHYARD_HOSTID=host ", host)}})
	}
	p, lender := program{Process: start(0), t: t}, start(1)
	p.Saw(`msg=ready`)
	out, _ := p.Output()
	p.url = regexp.MustCompile(`at=(\S+)`).FindStringSubmatch(out)[1]
	kill := func(host int, signal syscall.Signal) func(c condition) {
		return func(c condition) {
			i := slices.IndexFunc(c.Ranks, func(r at) bool { return r.Host == host })
			require.NoError(t, syscall.Kill(c.Ranks[i].Process, signal))
		}
	}
	troubles := []func(c condition){
		kill(0, syscall.SIGKILL),
		kill(1, syscall.SIGKILL),
		func(condition) {
			lender.Signal(syscall.SIGKILL)
			require.Equal(t, -1, lender.Wait())
			p.until(func(c condition) bool { return onHosts(c) == [2]int{2, 0} })
			lender = start(1)
		},
		kill(1, syscall.SIGSTOP),
		func(c condition) { kill(0, syscall.SIGKILL)(c); kill(1, syscall.SIGKILL)(c) }, // and none is left
	}
	if testing.Short() {
		troubles = troubles[:2]
	}
	for _, trouble := range troubles {
		p.until(func(c condition) bool { return onHosts(c) == [2]int{2, 2} })
		got, refused, wait := (&server{url: p.url, t: t}).crowd(clients, tokens, true)
		var before condition
		p.until(func(c condition) bool { before = c; return c.Running > 0 })
		trouble(before)
		wait()
		require.Equal(t, make([]string, clients), refused)
		require.Equal(t, want, got)
		p.until(func(c condition) bool { return c.Lost >= before.Lost+2 }) // a host leaves whole
	}
	p.until(func(c condition) bool { return onHosts(c) == [2]int{2, 2} })
	again, _, wait := (&server{url: p.url, t: t}).crowd(clients, tokens, false)
	wait()
	require.Equal(t, want, again)
	ranks := p.health().Ranks
	p.Signal(syscall.SIGTERM)
	require.Zero(t, p.Wait())
	require.Zero(t, lender.Wait())
	gone(t, ranks)
}

// A rank whose lender has ended, or its front, does not leave, which it would do together with the others: its process ends, and they see
// that.
func TestRankWithoutAFrontEnds(t *testing.T) {
	o, err := parse([]string{"-model", modelFile(t), "-ranks", "2"}, io.Discard)
	require.NoError(t, err)
	f, err := prepare(o, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	var seats []*seat
	ranks, ends := []*rank{{process: 1}, {process: 2}}, []chan error{make(chan error), make(chan error)}
	var stop []func() error
	for i, r := range ranks {
		orders, to := io.Pipe()
		from, replies := io.Pipe()
		s := newSeat(i)
		s.kill, s.orders = func() {}, gob.NewEncoder(to)
		go func() { ends[i] <- r.run(orders, replies) }()
		go s.listen(from, func() error { return nil }, func() {})
		<-s.replies
		seats, stop = append(seats, s), append(stop, to.Close)
	}
	for _, do := range []string{"read", "join"} {
		for _, a := range ask(seats, time.Minute, func(i int) *order {
			j := f.meet
			j.Rank, j.Size = i, len(seats)
			return &order{Do: do, Join: j}
		}) {
			require.False(t, a.failed(), a.Error)
		}
	}
	left := make(chan error)
	for i, r := range ranks {
		require.NoError(t, stop[i]())
		require.ErrorIs(t, <-ends[i], io.EOF)
		require.NoError(t, r.group.Err()) // it is not closed
	}
	for _, r := range ranks {
		go func() { left <- r.leave() }()
	}
	require.NoError(t, <-left)
	require.NoError(t, <-left)
}

// While the other host is cut off, the first one answers alone. The other one comes back by itself.
func TestLinkBetweenHostsIsCut(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 20 s")
	}
	worldtest.NeedUCX(t)
	const clients, tokens = 8, 200
	calm := startServer(t, "-ranks", "1")
	want, _, wait := calm.crowd(clients, tokens, false)
	wait()
	require.NoError(t, calm.end())

	spaces := proctest.Namespaces(t, 2)
	var hosts []*proctest.Process
	for i, s := range spaces {
		hosts = append(hosts, startHost(t, i, net.JoinHostPort(spaces[0].IP, "29500"),
			proctest.Spec{Via: s.Via, Args: []string{"-addr", spaces[0].IP + ":8080"}}))
	}
	front := hosts[0]
	ask := func() *proctest.Process {
		return proctest.Start(t, proctest.Spec{Part: "client", Via: spaces[0].Via,
			Args: []string{"http://" + spaces[0].IP + ":8080", strconv.Itoa(clients), strconv.Itoa(tokens)}})
	}
	check := func(client *proctest.Process) {
		var got []string
		require.Zero(t, client.Wait())
		out, _ := client.Output()
		require.NoError(t, json.Unmarshal([]byte(out), &got))
		require.Equal(t, want, got)
	}
	front.Saw(`(?s)(a fresh rank is in.*){2}`)
	client := ask()
	client.Wrote("under way")
	spaces[1].Cut()
	front.Saw(`the ranks go on" ranks=2`)
	check(client)
	check(ask())
	spaces[1].Mend()
	front.Saw(`(?s)(a fresh rank is in.*){4}`)
	check(ask())
	front.Signal(syscall.SIGTERM)
	for _, p := range hosts {
		require.Zero(t, p.Wait())
	}
}

// client asks a server for texts, as crowd does, and prints them. It says on standard error when they are under way.
func client(args []string) int {
	n, _ := strconv.Atoi(args[1])
	texts := make([]string, n)
	var all sync.WaitGroup
	for i := range texts {
		all.Go(func() {
			body := fmt.Sprintf(`{"prompt": "the train", "max_tokens": %s, "temperature": 1, "seed": %d}`, args[2], i)
			r, err := http.Post(args[0]+"/v1/completions", "application/json", strings.NewReader(body))
			if err != nil {
				texts[i] = err.Error()
				return
			}
			defer r.Body.Close()
			var a answer
			if err := json.NewDecoder(r.Body).Decode(&a); err != nil || len(a.Choices) == 0 {
				texts[i] = fmt.Sprint(r.Status, err)
				return
			}
			texts[i] = a.Choices[0].Text
		})
	}
	go func() {
		for c := (condition{}); c.Running == 0; {
			if r, err := http.Get(args[0] + "/healthz"); err == nil {
				_ = json.NewDecoder(r.Body).Decode(&c)
				_ = r.Body.Close()
			}
		}
		fmt.Fprintln(os.Stderr, "under way")
	}()
	all.Wait()
	_ = json.NewEncoder(os.Stdout).Encode(texts)
	return 0
}

// A server on several hosts says which flags and variables it needs before anything starts.
func TestFlagsOfSeveralHosts(t *testing.T) {
	good := comm.Config{Rank: 1, Size: 2, LocalSize: 1, Addr: "node0:29501", Secret: []byte("mine")}
	for _, c := range []struct {
		args, want string
		change     func(c *comm.Config)
	}{
		{"-model m", "", func(*comm.Config) {}},
		{"-model m", "3 processes on this host", func(c *comm.Config) { c.Size, c.LocalSize = 6, 3 }},
		{"-model m", "SWITCHYARD_SECRET", func(c *comm.Config) { c.Secret = nil }},
		{"-model m", "SWITCHYARD_ADDR is @here", func(c *comm.Config) { c.Addr = "@here" }},
		{"-model m -ranks 3", "multiple of the 2 hosts", func(*comm.Config) {}},
		{"-model m -cuda", "-cuda is for one host", func(*comm.Config) {}},
		{"", "-model is missing", func(*comm.Config) {}},
	} {
		o, err := parse(strings.Fields(c.args), io.Discard)
		require.NoError(t, err)
		conf := good
		c.change(&conf)
		err = o.spread(conf)
		if c.want == "" {
			require.NoError(t, err)
			require.Equal(t, 2, o.Hosts)
			require.Equal(t, 2, o.perHost())
			continue
		}
		require.ErrorIs(t, err, errUsage)
		require.ErrorContains(t, err, c.want)
	}
}

// A launcher that starts several processes on one host starts several servers.
func TestProcessesOfOneHostAreServers(t *testing.T) {
	o, err := parse(nil, io.Discard)
	require.NoError(t, err)
	require.NoError(t, o.spread(comm.Config{Rank: 1, Size: 2, LocalSize: 2}))
	require.Equal(t, 1, o.Hosts)
	require.Zero(t, o.world.Rank)
}

// A lender with another secret, or with another number of ranks, is refused, and ends.
func TestLenderIsRefused(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	o := options{Ranks: 4, Hosts: 2, PeerTimeout: time.Minute, world: comm.Config{Addr: loopback.Addr(), Secret: []byte("mine"), JoinTimeout: time.Minute}}
	f := newFront(o, joining{}, 1, log)
	require.NoError(t, f.listen())
	defer f.port.Close()
	o.world.Rank = 1
	for _, change := range []func(o *options){
		func(o *options) { o.world.Secret = []byte("another") },
		func(o *options) { o.Ranks = 2 },
		func(o *options) { o.world.Rank = 2 },
	} {
		other := o
		change(&other)
		require.ErrorIs(t, lend(t.Context(), other, log), errRefused)
		require.Empty(t, f.waiting())
	}
}

// A lender that does not reach the front says where it has tried.
func TestLenderWithoutAFront(t *testing.T) {
	addr := loopback.Addr()
	o := options{Ranks: 4, Hosts: 2, PeerTimeout: time.Minute, world: comm.Config{Rank: 1, Addr: addr, JoinTimeout: 50 * time.Millisecond}}
	require.ErrorContains(t, lend(t.Context(), o, slog.New(slog.DiscardHandler)), "the front at "+addr+" is not there for 50ms: ")
}
