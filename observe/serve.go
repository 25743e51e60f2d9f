package observe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/platform"
)

// Limits of what others can ask of a process.
const (
	snapshotEvery = 100 * time.Millisecond // requests in between get the one before
	dumpEvery     = 500 * time.Millisecond // requests in between wait, and share the next one
	answerEvery   = 10 * time.Millisecond  // of a socket or a port
	acceptEvery   = 4 * time.Millisecond   // a connection; those that were given up come out of the queue as fast
	requestWithin = 5 * time.Second        // a request that takes longer to send, or an answer to read, is given up
	headerBytes   = 4 << 10
	connections   = 32 // at a time; others wait until one ends
)

// socketPrefix begins the names of the sockets of a user's processes, in the abstract namespace; the process's number ends it.
func socketPrefix(uid int) string { return fmt.Sprintf("@switchyard-status-%d-", uid) }

var start, opened sync.Once

// Listen opens the socket for switchyard status, unless the environment says otherwise. Only the first call counts. A rank that joins makes it.
func Listen(log *slog.Logger) {
	opened.Do(func() {
		if !env.Status() {
			return
		}
		name := socketPrefix(os.Geteuid()) + strconv.Itoa(os.Getpid())
		if l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: name}); err != nil {
			if errors.Is(err, syscall.EADDRINUSE) {
				err = fmt.Errorf("process %d of another PID namespace is found in its place: start both in one PID namespace (docker run --pid, "+
					"shareProcessNamespace of a pod)", os.Getpid())
			}
			log.Warn("observe: switchyard status will not find this process", "err", err)
		} else {
			go serve(own{l}, log)
		}
	})
}

// FromEnv has this process serve what the environment asks for: the socket for switchyard status, metrics, and dumps on faults. Only the
// first call counts. Communicators make it.
func FromEnv(log *slog.Logger) {
	Listen(log)
	start.Do(func() {
		if !env.Status() {
			return
		}
		first := flight.Ranks()[0]
		if to := env.Metrics(); strings.Contains(to, "/") {
			go toFile(named(to, first.Number), log)
		} else if to != "" {
			listen(to, first.Local, log)
		}
		if dir := env.DumpFolder(); dir != "" {
			var writing sync.Mutex
			flight.OnFailure(func(r *flight.Rank) {
				writing.Lock()
				defer writing.Unlock()
				if err := dumpTo(dir, r); err != nil {
					log.Warn("observe: no dump", "err", err)
				}
			})
		}
	})
}

// listen serves metrics at an address, whose port counts up with the local rank.
func listen(address string, local int, log *slog.Logger) {
	host, port, err := net.SplitHostPort(address)
	number, perr := strconv.Atoi(port)
	if err = errors.Join(err, perr); err != nil || number < 0 || number+local > 65535 {
		log.Warn("observe: SWITCHYARD_METRICS is no [HOST]:PORT and no path", "value", address, "err", err)
		return
	}
	if host == "" {
		host = "localhost"
	}
	if number != 0 {
		number += local
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(number)))
	if err != nil {
		log.Warn("observe: no metrics", "err", err)
		return
	}
	log.Info("observe: metrics", "at", "http://"+l.Addr().String()+"/metrics")
	go serve(l, log)
}

func serve(l net.Listener, log *slog.Logger) {
	handler, answers := Handler(), newPace(answerEvery)
	paced := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if answers.begin(r.Context()) { // else the client has gone
			answers.end()
			handler.ServeHTTP(w, r)
		}
	})
	s := &http.Server{Handler: paced, ReadTimeout: requestWithin, WriteTimeout: requestWithin, IdleTimeout: requestWithin, MaxHeaderBytes: headerBytes, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	if err := s.Serve(&bounded{l, make(chan struct{}, connections), newPace(acceptEvery)}); err != nil {
		log.Warn("observe: not served any more", "err", err)
	}
}

// pace lets things happen one after the other, some time apart.
type pace struct {
	every time.Duration
	turn  chan struct{} // held by the one whose turn it is
	last  time.Time
}

func newPace(every time.Duration) *pace { return &pace{every: every, turn: make(chan struct{}, 1)} }

// begin waits for its turn, and end ends that. A request that gives up takes none of the time of others.
func (p *pace) begin(ctx context.Context) bool {
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		return false
	}
	if p.pause(ctx) {
		return true
	}
	p.end()
	return false
}

// pause waits until the last thing was long enough ago.
func (p *pace) pause(ctx context.Context) bool {
	select {
	case <-time.After(p.every - time.Since(p.last)):
		p.last = time.Now()
		return true
	case <-ctx.Done():
		return false
	}
}

func (p *pace) end() { <-p.turn }

// bounded accepts few connections at a time, and few a second.
type bounded struct {
	net.Listener
	open chan struct{}
	pace *pace
}

func (b *bounded) Accept() (net.Conn, error) {
	b.open <- struct{}{}
	b.pace.begin(context.Background())
	defer b.pace.end()
	c, err := b.Listener.Accept()
	if err != nil {
		<-b.open
		return nil, err
	}
	return &counted{Conn: c, done: func() { <-b.open }}, nil
}

type counted struct {
	net.Conn
	once sync.Once
	done func()
}

func (c *counted) Close() error {
	c.once.Do(c.done)
	return c.Conn.Close()
}

// own accepts connections of this user only.
type own struct{ *net.UnixListener }

func (o own) Accept() (net.Conn, error) {
	for {
		c, err := o.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if peer, err := platform.Credentials(c); err == nil && int(peer.Uid) == os.Geteuid() {
			return c, nil
		}
		_ = c.Close()
	}
}

// named is a path with a rank's number in front of its ending.
func named(path string, rank int) string {
	ending := filepath.Ext(path)
	return fmt.Sprintf("%s-%d%s", strings.TrimSuffix(path, ending), rank, ending)
}

// toFile writes the metrics of this process to a file, as long as it has ranks.
func toFile(path string, log *slog.Logger) {
	for {
		if err := writeFile(path); err != nil {
			log.Warn("observe: no metrics", "err", err)
			return
		}
		time.Sleep(fileEvery)
	}
}
