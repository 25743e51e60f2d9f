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
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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
	connections   = 32              // at a time; others wait until one ends
	tellWithin    = 2 * time.Second // that a failure waits for a file to be written
	dumpAgain     = time.Second     // between dumps to files of a rank whose calls fail and leave it usable, such as receives that time out
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
			go serve(own{l}, &scrapes{}, log)
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
		mute := func(err error) {
			flight.Mute(err.Error())
			if text := fmt.Sprintf("rank %d serves no metrics", first.Number); log.Enabled(context.Background(), slog.LevelWarn) {
				log.Warn("observe: "+text, "err", err)
			} else { // whoever asked for metrics has not asked for a log
				fmt.Fprintf(os.Stderr, "switchyard: %s: %v\n", text, err)
			}
		}
		if to := env.Metrics(); strings.Contains(to, "/") {
			f := &file{path: named(to, first.Seat(first.Number)), mute: mute}
			go f.keep()
			flight.OnFailure(tellWithin, func(*flight.Rank) { f.write() })
		} else if to != "" {
			if err := listen(to, first.Place(), log); err != nil {
				mute(err)
			}
		}
		if dir := env.DumpFolder(); dir != "" {
			var writing sync.Mutex
			written := map[*flight.Rank]time.Time{}
			write := func(r *flight.Rank, every time.Duration) {
				writing.Lock()
				defer writing.Unlock()
				if time.Since(written[r]) < every {
					return
				}
				if err := dumpTo(dir, r); err != nil {
					log.Warn("observe: no dump", "err", err)
				}
				written[r] = time.Now()
			}
			flight.OnFailure(tellWithin, func(r *flight.Rank) { write(r, 0) })
			flight.OnError(tellWithin, func(r *flight.Rank) { write(r, dumpAgain) })
		}
	})
}

// listen serves metrics at an address, whose port counts up with the place of the rank on its host.
func listen(address string, place int, log *slog.Logger) error {
	host, port, err := net.SplitHostPort(address)
	number, perr := strconv.Atoi(port)
	if err = errors.Join(err, perr); err != nil || number < 0 || number+place > 65535 {
		return errors.Join(fmt.Errorf("SWITCHYARD_METRICS is %q, want [HOST]:PORT or a path", address), err)
	}
	if host == "" {
		host = "localhost"
	}
	if number != 0 {
		number += place
	}
	end, failure, err := env.MetricsHold()
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(number)))
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("port %d, that of SWITCHYARD_METRICS and this rank's place on its host, is taken: %w", number, err)
	} else if err != nil {
		return fmt.Errorf("SWITCHYARD_METRICS is %q: %w", address, err)
	}
	log.Info("observe: metrics", "at", "http://"+l.Addr().String()+"/metrics")
	seen := &scrapes{}
	seen.hold(flight.OnEnd, end)
	if failure > 0 {
		seen.hold(flight.OnFailure, failure)
	}
	go serve(l, seen, log)
	return nil
}

func serve(l net.Listener, seen *scrapes, log *slog.Logger) {
	handler, answers := Handler(), newPace(answerEvery)
	paced := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asks := r.Context().Value(connection{}).(*counted)
		asks.busy.Store(true)
		defer asks.busy.Store(false)
		if answers.begin(r.Context()) { // else the client has gone
			answers.end()
			began := time.Now()
			handler.ServeHTTP(w, r)
			seen.note(began)
		}
	})
	s := &http.Server{Handler: paced, ReadTimeout: requestWithin, WriteTimeout: requestWithin, IdleTimeout: requestWithin, MaxHeaderBytes: headerBytes, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connection{}, c) }}
	b := &bounded{Listener: l, pace: newPace(acceptEvery)}
	b.freed.L = &b.mu
	if err := s.Serve(b); err != nil {
		log.Warn("observe: not served any more", "err", err)
	}
}

// connection is the key of a request's connection in its context.
type connection struct{}

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

// bounded accepts few connections at a time, and few a second. Where there are too many, the one goes that has been silent longest: a client
// that asks is answered, whoever else is connected.
type bounded struct {
	net.Listener
	pace *pace

	mu    sync.Mutex
	open  []*counted // the oldest first
	freed sync.Cond
}

func (b *bounded) Accept() (net.Conn, error) {
	b.pace.begin(context.Background())
	defer b.pace.end()
	c, err := b.Listener.Accept()
	if err != nil {
		return nil, err
	}
	one := &counted{Conn: c, of: b}
	b.mu.Lock()
	for len(b.open) >= connections {
		silent := slices.IndexFunc(b.open, func(o *counted) bool { return !o.busy.Load() })
		if silent < 0 {
			b.freed.Wait()
			continue
		}
		o := b.open[silent]
		b.open = slices.Delete(b.open, silent, silent+1)
		_ = o.Conn.Close()
	}
	b.open = append(b.open, one)
	b.mu.Unlock()
	return one, nil
}

// counted is a connection that is accepted. It is busy while a request of it is answered.
type counted struct {
	net.Conn
	of   *bounded
	busy atomic.Bool
}

func (c *counted) Close() error {
	c.of.mu.Lock()
	if at := slices.Index(c.of.open, c); at >= 0 {
		c.of.open = slices.Delete(c.of.open, at, at+1)
		c.of.freed.Signal()
	}
	c.of.mu.Unlock()
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

// file is where the metrics of this process are.
type file struct {
	path string
	mute func(error)

	mu    sync.Mutex
	muted bool
}

// write writes the metrics of now.
func (f *file) write() {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := writeFile(f.path)
	if err != nil && !f.muted {
		f.mute(fmt.Errorf("SWITCHYARD_METRICS: %w", err))
	} else if err == nil && f.muted {
		flight.Mute("")
	}
	f.muted = err != nil
}

// keep writes again and again, as long as the process runs.
func (f *file) keep() {
	for ; ; time.Sleep(fileEvery) {
		f.write()
	}
}

// scrapes are the answers with metrics that a port has given.
type scrapes struct {
	mu   sync.Mutex
	last time.Time     // when the last one began
	next chan struct{} // is closed at the next one
}

// note notes an answer that began at a time.
func (s *scrapes) note(began time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = began
	if s.next != nil {
		close(s.next)
	}
	s.next = nil
}

// await waits for an answer that tells of what was noted at a time, unless nobody has ever asked.
func (s *scrapes) await(noted time.Time, within time.Duration) {
	for late := time.After(within); ; {
		s.mu.Lock()
		if s.last.IsZero() || s.last.Sub(noted) > snapshotEvery { // a younger one may have an older snapshot
			s.mu.Unlock()
			return
		}
		if s.next == nil {
			s.next = make(chan struct{})
		}
		next := s.next
		s.mu.Unlock()
		select {
		case <-next:
		case <-late:
			return
		}
	}
}

// hold has those who tell of failures, or of their ends, wait until a scrape has seen the last one, once for each.
func (s *scrapes) hold(on func(time.Duration, func(*flight.Rank)), within time.Duration) {
	var held sync.Map // faults, by their times
	on(within, func(r *flight.Rank) {
		at := r.LastFault()
		if _, again := held.LoadOrStore(at, true); !again && !at.IsZero() {
			s.await(at, within)
		}
	})
}
