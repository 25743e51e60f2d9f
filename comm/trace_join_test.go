package comm

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestJoinTraces runs rendezvous: of a group that starts, and of Admit. Commands are
//
//	join NAME...       these ranks join: size=, timeout= (of the join), members= and gid= (of Admit)
//	late NAME...       newcomers join
//	kill, stop NAME    its process ends, or does nothing any more
//	cancel NAME        its context ends
//	lost RANK by=NAME  the mesh of a rank that has the addresses finds RANK gone
//	end                the mesh of all stands
//	wait DURATION
//
// A rank's name is its number, and a prime if it was started again. The last line
// of an output is rank 0's phase, and its slots by rank.
func TestJoinTraces(t *testing.T) {
	runTraces(t, "join", func(t *testing.T, tr *tracer) tracedWorld {
		ctx, cancel := context.WithCancel(context.Background())
		return &traceRendezvous{t: t, tr: tr, ctx: ctx, cancel: cancel, ranks: map[string]*tracedRank{}, size: 3}
	})
}

type traceRendezvous struct {
	t      *testing.T
	tr     *tracer
	ctx    context.Context
	cancel context.CancelFunc
	size   int
	ranks  map[string]*tracedRank
	wg     sync.WaitGroup

	mu       sync.Mutex
	listener *pipeListener
	host     *host
	hostRank *tracedRank
}

// tracedRank is a rank that joins.
type tracedRank struct {
	name   string
	cancel context.CancelFunc
	orders chan func(rendezvous) // for when the addresses have come

	mu    sync.Mutex
	mute  bool // killed or stopped
	conns []*pipeConn
}

func (w *traceRendezvous) do(c command) {
	if size, err := strconv.Atoi(c.options["size"]); err == nil {
		w.size = size
	}
	switch c.name {
	case "join", "late":
		for _, name := range c.args {
			cfg := Config{Late: c.name == "late", JoinTimeout: c.duration(w.t, "timeout", 0), Addr: "@here"}
			if !cfg.Late {
				rank, err := strconv.Atoi(strings.TrimRight(name, "'"))
				require.NoError(w.t, err)
				cfg.Rank, cfg.Size = rank, w.size
				if members, err := strconv.Atoi(c.options["members"]); err == nil {
					gid, _ := strconv.Atoi(c.options["gid"])
					cfg.members, cfg.gid = members, uint64(gid)
				}
			}
			w.join(name, cfg)
			synctest.Wait()
		}
	case "kill", "stop":
		for _, name := range c.args {
			w.ranks[name].silence(c.name == "kill")
			w.mu.Lock()
			l := w.listener
			w.mu.Unlock()
			if l != nil && l.owner == w.ranks[name] && c.name == "kill" {
				l.Close()
			}
		}
	case "cancel":
		for _, name := range c.args {
			w.ranks[name].cancel()
		}
	case "lost":
		rank, err := strconv.Atoi(c.args[0])
		require.NoError(w.t, err)
		r := w.ranks[c.options["by"]]
		r.orders <- func(meet rendezvous) {
			err := meet.giveUp(joinFailed(&failure{code: failLost, culprit: rank, detail: "its socket is closed"}))
			w.say(r, "fails: %v", joinError(err))
		}
	case "end":
		for _, r := range w.ranks {
			select {
			case r.orders <- func(rendezvous) { w.say(r, "has joined") }:
			default: // it has ended
			}
		}
	case "wait":
		d, err := time.ParseDuration(c.args[0])
		require.NoError(w.t, err)
		time.Sleep(d + odd)
	default:
		w.t.Fatalf("no command %q", c.name)
	}
}

func (w *traceRendezvous) join(name string, cfg Config) {
	require.NoError(w.t, cfg.validate())
	caller, cancel := context.WithCancel(w.ctx)
	r := &tracedRank{name: name, cancel: cancel, orders: make(chan func(rendezvous))}
	w.ranks[name] = r
	w.wg.Go(func() {
		whole, stop := withJoinTimeout(caller, &cfg)
		defer stop()
		ctx, fail := context.WithCancelCause(whole)
		defer fail(nil)
		m := newMeeting(&cfg, "@"+name, fail)
		m.me.host = "a host"
		m.listen = func(context.Context) (net.Listener, error) { return w.listen(r) }
		m.dial = func(ctx context.Context) (net.Conn, error) { return w.dial(ctx, r) }
		meet, err := newRendezvous(ctx, caller, m)
		if err != nil {
			w.say(r, "fails: %v", joinError(err))
			return
		}
		if h, ok := meet.(*host); ok {
			w.mu.Lock()
			w.host, w.hostRank = h, r
			w.mu.Unlock()
		}
		addrs, err := meet.addrs(ctx)
		if err != nil {
			w.say(r, "fails: %v", joinError(meet.giveUp(err)))
			meet.end(caller)
			return
		}
		w.say(r, "has the addresses of %d ranks, itself rank %d", len(addrs), m.me.rank)
		select {
		case order := <-r.orders:
			order(meet)
		case <-ctx.Done():
			w.say(r, "fails: %v", joinError(meet.giveUp(context.Cause(ctx))))
		}
		meet.end(caller)
	})
}

func (w *traceRendezvous) say(r *tracedRank, format string, args ...any) {
	r.mu.Lock()
	mute := r.mute
	r.mu.Unlock()
	if !mute {
		w.tr.add(r.name, format, args...)
	}
}

func (w *traceRendezvous) status() string {
	w.mu.Lock()
	h, r := w.host, w.hostRank
	w.mu.Unlock()
	if h == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mute {
		return ""
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	text := h.phase.String() + ":"
	for r := range h.slots {
		text += " " + h.slots[r].phase.String()
	}
	return text + "\n"
}

func (w *traceRendezvous) end() {
	w.cancel()
	for _, r := range w.ranks {
		r.silence(true)
	}
	w.wg.Wait()
	time.Sleep(time.Second) // what runs behind a join ends
}

// silence ends what a rank says and hears; with gone its connections end too.
func (r *tracedRank) silence(gone bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mute = true
	for _, c := range r.conns {
		if gone {
			c.Conn.Close()
		}
	}
}

// pipeListener is the port where ranks meet.
type pipeListener struct {
	w     *traceRendezvous
	owner *tracedRank
	conns chan net.Conn
	over  chan struct{}
}

func (w *traceRendezvous) listen(r *tracedRank) (net.Listener, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.listener != nil {
		return nil, syscall.EADDRINUSE
	}
	w.listener = &pipeListener{w: w, owner: r, conns: make(chan net.Conn), over: make(chan struct{})}
	return w.listener, nil
}

func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: "@here"} }

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.over:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	if l.w.listener == l {
		l.w.listener = nil
		close(l.over)
	}
	return nil
}

func (w *traceRendezvous) dial(ctx context.Context, r *tracedRank) (net.Conn, error) {
	w.mu.Lock()
	l := w.listener
	w.mu.Unlock()
	if l == nil {
		return nil, syscall.ECONNREFUSED
	}
	a, b := net.Pipe()
	mine, theirs := newPipeConn(a, w, r, l.owner), newPipeConn(b, w, l.owner, r)
	mine.client = true
	select {
	case l.conns <- theirs:
		return mine, nil
	case <-l.over:
	case <-ctx.Done():
	}
	mine.Close()
	theirs.Close()
	return nil, syscall.ECONNREFUSED
}

// pipeConn is one end of a connection. What is written takes 1 ms, and is in the
// trace.
type pipeConn struct {
	net.Conn
	w      *traceRendezvous
	owner  *tracedRank
	arrow  string // who speaks to whom
	client bool

	mu     sync.Mutex
	hello  bool // has been said
	closed bool
	out    chan []byte
}

func newPipeConn(c net.Conn, w *traceRendezvous, owner, to *tracedRank) *pipeConn {
	p := &pipeConn{Conn: c, w: w, owner: owner, arrow: owner.name + " > " + to.name, out: make(chan []byte, 100)}
	owner.mu.Lock()
	owner.conns = append(owner.conns, p)
	owner.mu.Unlock()
	go func() {
		for b := range p.out {
			time.Sleep(time.Millisecond)
			p.Conn.Write(b) // the other end may be gone
		}
		p.Conn.Close()
	}()
	return p
}

func (p *pipeConn) SetWriteDeadline(time.Time) error { return nil } // it never waits

func (p *pipeConn) SetDeadline(t time.Time) error { return p.Conn.SetReadDeadline(t) }

func (p *pipeConn) Write(b []byte) (int, error) {
	p.owner.mu.Lock()
	mute := p.owner.mute
	p.owner.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return 0, io.ErrClosedPipe
	}
	if !mute {
		if text := p.describe(b); text != "" {
			p.w.tr.add(p.arrow, "%s", text)
		}
		p.out <- bytes.Clone(b)
	}
	p.hello = true
	return len(b), nil
}

func (p *pipeConn) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.closed = true
		p.Conn.SetReadDeadline(time.Unix(1, 0))
		close(p.out)
	}
	return nil
}

// describe puts what is written into words.
func (p *pipeConn) describe(b []byte) string {
	if !p.hello {
		h, _, err := readHello(bytes.NewReader(b))
		if err != nil {
			return err.Error()
		}
		id, err := decodeIdentity(h.body)
		switch {
		case err != nil:
			return err.Error()
		case id.purpose == toYieldPort:
			return "hello, yield the port"
		case id.late:
			return fmt.Sprintf("hello, a newcomer at %s", id.addr)
		case !p.client:
			return "hello"
		}
		return fmt.Sprintf("hello, rank %d of %d at %s", id.rank, id.size, id.addr)
	}
	body := b[sealedHead:]
	switch frameType(b[0]) {
	case frameAccept:
		rank, size, err := decodePlace(body)
		if err != nil {
			return err.Error()
		}
		return fmt.Sprintf("accepted as rank %d of %d", rank, size)
	case frameReject:
		return fmt.Sprintf("rejected: %s", body)
	case framePresent:
		if p.client {
			return "present"
		}
		return "present?"
	case frameTable:
		t, err := decodeTable(body, int(binary.LittleEndian.Uint32(body)))
		if err != nil {
			return err.Error()
		}
		return "table: " + strings.Join(t.addrs, " ")
	case frameFail:
		f, err := decodeFail(body)
		if err != nil {
			return err.Error()
		}
		return "failed: " + joinFailed(f).Error()
	case frameDone:
		p.w.mu.Lock()
		h := p.w.host
		p.w.mu.Unlock()
		if !p.client && h != nil && h.failure() != nil {
			return "" // which goes to those whose connection has not ended by chance
		}
		return "done"
	}
	return fmt.Sprintf("%q", b[0])
}
