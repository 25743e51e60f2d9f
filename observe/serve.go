package observe

import (
	"encoding/json"
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
	"time"

	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/platform"
)

// Limits of what others can ask of a process.
const (
	snapshotEvery = 100 * time.Millisecond // requests in between get the one before
	requestWithin = 5 * time.Second        // a request that takes longer to send, or an answer to read, is given up
	headerBytes   = 4 << 10
	connections   = 32 // at a time; others wait until one ends
)

// Handler serves GET and HEAD: the metrics at any path, the [State] as JSON at paths that end in /state, and a [Dump] at those that end in
// /dump. Requests less than 100 ms apart get the same snapshot.
func Handler() http.Handler {
	var mu sync.Mutex
	var last State
	snapshot := func() State {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(last.At) > snapshotEvery {
			last = Snapshot()
		}
		return last
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "GET only", http.StatusMethodNotAllowed)
			return
		}
		switch {
		case strings.HasSuffix(r.URL.Path, "/state"):
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(snapshot())
		case strings.HasSuffix(r.URL.Path, "/dump"):
			w.Header().Set("Content-Type", "application/jsonl")
			_ = Dump(w)
		case strings.Contains(r.Header.Get("Accept"), "application/openmetrics-text"):
			w.Header().Set("Content-Type", "application/openmetrics-text; version=1.0.0; charset=utf-8")
			_ = WriteMetrics(w, snapshot(), OpenMetrics)
		default:
			w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
			_ = WriteMetrics(w, snapshot(), PrometheusText)
		}
	})
}

// socketPrefix begins the names of the sockets of a user's processes, in the abstract namespace; the process's number ends it.
func socketPrefix(uid int) string { return fmt.Sprintf("@switchyard-status-%d-", uid) }

var start sync.Once

// FromEnv has this process serve what the environment asks for: the socket for switchyard status, metrics, and dumps on faults. Only the
// first call counts. Communicators make it.
func FromEnv(log *slog.Logger) {
	start.Do(func() {
		if !env.Status() {
			return
		}
		name := socketPrefix(os.Geteuid()) + strconv.Itoa(os.Getpid())
		if l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: name}); err != nil {
			log.Warn("observe: switchyard status will not find this process", "err", err)
		} else {
			go serve(own{l}, log)
		}
		first := flight.Ranks()[0]
		if to := env.Metrics(); strings.Contains(to, "/") {
			go toFile(named(to, first.Number), log)
		} else if to != "" {
			listen(to, first.Local, log)
		}
		if dir := env.DumpFolder(); dir != "" {
			flight.OnFailure(func(r *flight.Rank) {
				if err := dumpTo(dir, r.Number); err != nil {
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
	s := &http.Server{Handler: Handler(), ReadTimeout: requestWithin, WriteTimeout: requestWithin, IdleTimeout: requestWithin, MaxHeaderBytes: headerBytes, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	if err := s.Serve(&bounded{l, make(chan struct{}, connections)}); err != nil {
		log.Warn("observe: not served any more", "err", err)
	}
}

// bounded accepts few connections at a time.
type bounded struct {
	net.Listener
	open chan struct{}
}

func (b *bounded) Accept() (net.Conn, error) {
	b.open <- struct{}{}
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
