package comm

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/platform"
)

// sockLink is a link over a unix socket, or over a sealed connection to another host. It has two goroutines. The writer
// sends what is queued, and a sign of life when there is nothing to send. The
// reader delivers what arrives and decides alone when the peer is lost: at the
// end of the stream without a goodbye, at a malformed frame, or when nothing
// has come for too long.
type sockLink struct {
	n       *node
	peer    int
	conn    net.Conn
	timeout time.Duration // silence that means the peer is lost
	pid     int           // the peer's process, 0 where it is on another host

	wake chan struct{} // the writer has something to do

	mu      sync.Mutex
	queue   []outgoing
	ended   bool // the reader has come to the end of the stream
	heard   time.Time
	closing bool
	stopped bool // the writer has ended
}

type outgoing struct {
	m    message
	mark chan struct{} // not a message: closed when reached
}

// startLink makes a link of a connection whose handshake is done. If it
// reports false the link was not wanted, and the connection is closed.
func startLink(n *node, peer int, conn net.Conn, timeout time.Duration) bool {
	l := &sockLink{n: n, peer: peer, conn: conn, timeout: timeout, wake: make(chan struct{}, 1)}
	if c, ok := conn.(*net.UnixConn); ok {
		if other, err := platform.Credentials(c); err == nil {
			l.pid = int(other.Pid)
		}
	}
	conn.SetDeadline(time.Time{})
	if !n.setLink(peer, l, 2) {
		conn.Close()
		return false
	}
	go func() {
		defer n.wg.Done()
		l.write()
	}()
	go func() {
		defer n.wg.Done()
		l.read()
	}()
	return true
}

func (l *sockLink) send(m message) {
	if !l.enqueue(outgoing{m: m}) {
		m.drop()
	}
}

func (l *sockLink) flush(deadline time.Time) {
	mark := make(chan struct{})
	if !l.enqueue(outgoing{mark: mark}) {
		return
	}
	select {
	case <-mark:
	case <-time.After(time.Until(deadline)):
	}
}

func (l *sockLink) enqueue(o outgoing) bool {
	l.mu.Lock()
	if l.closing || l.stopped {
		l.mu.Unlock()
		return false
	}
	l.queue = append(l.queue, o)
	l.mu.Unlock()
	l.wakeUp()
	return true
}

func (l *sockLink) wakeUp() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// close does not wait: the writer finishes within grace and closes the
// connection.
func (l *sockLink) close(grace time.Duration) {
	l.mu.Lock()
	first := !l.closing
	l.closing = true
	l.mu.Unlock()
	if first {
		l.conn.SetWriteDeadline(time.Now().Add(grace))
		l.wakeUp()
	}
}

func (l *sockLink) cut() {
	l.mu.Lock()
	l.closing = true
	l.mu.Unlock()
	l.conn.Close()
	l.wakeUp()
}

func (l *sockLink) isClosing() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closing
}

// write is the writer. An error of the connection only means that nothing more
// is sent; what it means for the peer is the reader's to find out.
func (l *sockLink) write() {
	defer l.conn.Close()
	beat := time.NewTicker(l.timeout / beatsPerTimeout)
	defer beat.Stop()
	var broken bool
	for {
		l.mu.Lock()
		queue, closing := l.queue, l.closing
		l.queue = nil
		l.stopped = closing
		l.mu.Unlock()
		for i := range queue {
			o := &queue[i]
			if o.mark != nil {
				close(o.mark)
				continue
			}
			if !broken {
				broken = l.writeMessage(&o.m) != nil
			}
			o.m.drop()
		}
		if closing {
			return
		}
		select {
		case <-l.wake:
		case <-beat.C:
			l.n.pulse.beat(l.timeout)
			if !broken {
				broken = l.writeMessage(&message{kind: kindBeat}) != nil
			}
		}
	}
}

func (l *sockLink) writeMessage(m *message) error {
	h, data := m.frame()
	if conn, ok := l.conn.(*net.UnixConn); ok && len(m.fds) > 0 && m.poison == "" {
		return writeFDs(conn, h, m.fds)
	}
	for {
		part := data[:min(len(data), maxFrame)]
		data = data[len(part):]
		h.length = len(part)
		if len(data) > 0 {
			h.flags |= flagMore
		} else {
			h.flags &^= flagMore
		}
		var b [frameHeader]byte
		h.encode(&b)
		bufs := net.Buffers{b[:], part}
		if l.n != nil && l.n.delay != nil {
			l.n.delay()
		}
		if _, err := bufs.WriteTo(l.conn); err != nil {
			return err
		}
		if len(data) == 0 {
			return nil
		}
	}
}

// fdsPerWrite is below the kernel's limit for one control message, 253.
const fdsPerWrite = 250

func writeFDs(conn *net.UnixConn, h header, fds []int) error {
	h.length, h.fds = len(fds), len(fds)
	var b [frameHeader]byte
	h.encode(&b)
	if _, err := conn.Write(b[:]); err != nil {
		return err
	}
	var zeros [fdsPerWrite]byte
	for len(fds) > 0 {
		some := fds[:min(len(fds), fdsPerWrite)]
		fds = fds[len(some):]
		payload := zeros[:len(some)]
		sent, _, err := conn.WriteMsgUnix(payload, unix.UnixRights(some...), nil)
		if err != nil && sent <= 0 && !errors.Is(err, os.ErrDeadlineExceeded) {
			// Too many descriptors in flight, say. The bytes alone tell the
			// receiver that some are missing.
			sent, err = conn.Write(payload)
		}
		if err != nil {
			return err
		}
		if sent < len(payload) {
			if _, err := conn.Write(payload[sent:]); err != nil {
				return err
			}
		}
	}
	return nil
}

const (
	// beatsPerTimeout is how many signs of life go out in the time that their
	// absence means a loss.
	beatsPerTimeout = 8
	// silencePart of that time is waited for the first word, the rest once
	// more: a process that was stopped itself finds its deadline passed when
	// it wakes up, and what its peers sent unread.
	silencePart = 0.75
)

// read is the reader.
func (l *sockLink) read() {
	in := &fdReader{l: l, oob: make([]byte, unix.CmsgSpace(4*256))}
	defer in.close()
	r := bufio.NewReaderSize(in, 16<<10)
	for {
		m, err := readMessage(r, in.take)
		if err != nil {
			l.mu.Lock()
			l.ended = true
			l.mu.Unlock()
			if !l.isClosing() {
				l.n.cutOff(l.peer, l.blame(err))
			}
			return
		}
		l.mu.Lock()
		l.heard = time.Now()
		l.mu.Unlock()
		bye := m.kind == kindBye
		l.n.deliver(l.peer, m)
		if bye && !l.n.listensTo(l.peer) {
			return
		}
	}
}

// blame says who is lost when the stream ends: the peer, unless this process has
// not run for so long that the peer may have given it up. Others then say so as
// well, or what else has happened, and are heard first. Where nobody is left
// that says anything, it is this rank that was given up: whoever ran meanwhile
// has found it silent.
func (l *sockLink) blame(err error) *failure {
	slept := l.n.pulse.slept(l.timeout)
	for end := time.Now().Add(l.timeout / 4); slept > 0 && time.Now().Before(end) && !l.isClosing(); {
		time.Sleep(5 * time.Millisecond)
	}
	if slept >= l.timeout && l.n.alone(l.timeout) {
		return &failure{code: failLost, culprit: l.n.id, detail: fmt.Sprintf(
			"this process did not run for %v, and rank %d has gone on without it", slept.Round(time.Millisecond), l.peer)}
	}
	return &failure{code: failLost, culprit: l.peer, detail: l.why(err), ended: hungUp(err)}
}

// hungUp reports whether err is the end of a stream, which a process that ends closes.
func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET)
}

// pulse tells whether this process has been running.
type pulse struct {
	mu   sync.Mutex
	last time.Time     // of the last beat
	gap  time.Duration // the last that was too long, which ended at woke
	woke time.Time
}

// beat is called several times in the time that a peer may be silent.
func (p *pulse) beat(timeout time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if gap := now.Sub(p.last); gap > timeout/2 {
		p.gap, p.woke = gap, now
	}
	p.last = now
}

// slept is for how long this process has not run lately, 0 if that is not worth mentioning.
func (p *pulse) slept(timeout time.Duration) time.Duration {
	p.beat(timeout)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.woke.IsZero() || time.Since(p.woke) > timeout {
		return 0
	}
	return p.gap
}

func (l *sockLink) why(err error) string {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Sprintf("nothing heard of it for %v", l.timeout)
	case errors.Is(err, errMalformed):
		return "it sent a " + err.Error()
	case hungUp(err):
		return "its connection ended without a goodbye"
	default:
		return err.Error()
	}
}

// fdReader reads the bytes of a connection and collects the descriptors that
// come with them.
type fdReader struct {
	l    *sockLink
	oob  []byte
	fds  []int
	lost bool // some did not arrive
}

func (r *fdReader) Read(b []byte) (int, error) {
	first := time.Duration(float64(r.l.timeout) * silencePart)
	r.l.conn.SetReadDeadline(time.Now().Add(first))
	n, err := r.readOnce(b)
	if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
		r.l.conn.SetReadDeadline(time.Now().Add(r.l.timeout - first))
		n, err = r.readOnce(b)
	}
	return n, err
}

func (r *fdReader) readOnce(b []byte) (int, error) {
	conn, ok := r.l.conn.(*net.UnixConn)
	if !ok {
		return r.l.conn.Read(b)
	}
	n, oobn, flags, _, err := conn.ReadMsgUnix(b, r.oob)
	n = max(n, 0) // it may be -1 with an error
	if oobn > 0 {
		msgs, perr := unix.ParseSocketControlMessage(r.oob[:oobn])
		r.lost = r.lost || perr != nil
		for i := range msgs {
			fds, perr := unix.ParseUnixRights(&msgs[i])
			if perr == nil {
				r.fds = append(r.fds, fds...)
			}
		}
	}
	if flags&unix.MSG_CTRUNC != 0 {
		r.lost = true
	}
	if len(r.fds) > 2*MaxFDs { // nobody has announced them
		return 0, fmt.Errorf("%w stream: %d descriptors out of place", errMalformed, len(r.fds))
	}
	return n, err
}

// take returns the n descriptors that belong to the message just read. If some
// were lost on the way, it is not known which, and all are closed.
func (r *fdReader) take(n int) ([]int, error) {
	if r.lost || len(r.fds) < n {
		got := len(r.fds)
		r.close()
		r.lost = false
		return nil, fmt.Errorf("%d of %d descriptors arrived; the limit of open files may be reached", min(got, n), n)
	}
	fds := append([]int(nil), r.fds[:n]...)
	r.fds = append(r.fds[:0], r.fds[n:]...)
	return fds, nil
}

func (r *fdReader) close() {
	closeFDs(r.fds)
	r.fds = nil
}
