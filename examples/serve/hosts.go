package main

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
)

// A server on several hosts is a process on each: the front on the first, and on every other one a lender, which starts ranks for the front.
// Each of these ranks has a connection to the front, which carries its orders and replies. Where the connection ends the rank does, and the
// other way round. The front begins with the ranks of its own host, and admits another host whenever all ranks of that are there.

const (
	helloTimeout = 5 * time.Second        // for both ends of a connection to say who they are
	dialAgain    = 100 * time.Millisecond // after the front was not reached
	lendAgain    = time.Second            // after the ranks of a host have ended
)

// spread says on how many hosts the server is: on several if a launcher has started a process of it on each.
func (o *options) spread(conf comm.Config) (err error) {
	if conf.LocalSize >= conf.Size { // on one host a launcher starts servers that have nothing to do with each other
		return nil
	}
	o.Hosts, o.world, o.Procs = conf.Size, conf, true
	o.world.JoinTimeout = cmp.Or(conf.JoinTimeout, comm.DefaultJoinTimeout)
	_, _, notPort := net.SplitHostPort(conf.Addr)
	switch {
	case conf.LocalSize > 1:
		err = fmt.Errorf("%d processes on this host: a server on several hosts is one process on each, which starts ranks", conf.LocalSize)
	case len(conf.Secret) == 0:
		err = errors.New("a server on several hosts needs one SWITCHYARD_SECRET: make a random text, and set it on all of them")
	case notPort != nil:
		err = fmt.Errorf("SWITCHYARD_ADDR is %s: the processes of a server on several hosts meet at a host:port", conf.Addr)
	case o.Ranks%o.Hosts != 0:
		err = fmt.Errorf("-ranks is %d, want a multiple of the %d hosts", o.Ranks, o.Hosts)
	case o.CUDA:
		err = errors.New("-cuda is for one host")
	case o.model == "":
		err = errors.New("-model is missing: a server on several hosts needs a file that examples/moe -save wrote, at the same path on all")
	}
	if err != nil {
		err = errors.Join(errUsage, err)
	}
	return err
}

// perHost is how many ranks a host has.
func (o *options) perHost() int { return o.Ranks / o.Hosts }

// round is the ranks of a host that have begun together and are not in the group yet.
type round struct {
	id    [16]byte
	seats []*seat
}

// listen opens the port that the lenders call.
func (f *front) listen() (err error) {
	if f.port, err = net.Listen("tcp", f.world.Addr); err != nil {
		return fmt.Errorf("the port for other hosts: %w", err)
	}
	go func() {
		for {
			c, err := f.port.Accept()
			switch {
			case errors.Is(err, net.ErrClosed):
				return
			case err != nil: // no descriptor is left, say
				f.log.Warn("the port for other hosts", "error", err)
				time.Sleep(dialAgain)
			default:
				go f.borrow(c)
			}
		}
	}()
	return nil
}

// borrow has the rank at the other end of a connection.
func (f *front) borrow(c net.Conn) {
	defer c.Close()
	h, err := f.greeted(c)
	if err != nil {
		f.log.Warn("a connection to the port for other hosts is refused", "from", c.RemoteAddr().String(), "error", err)
		return
	}
	s := newSeat(0)
	s.host, s.local, s.orders = int(h.Host), int(h.Local), gob.NewEncoder(c)
	s.ip, _, _ = net.SplitHostPort(c.RemoteAddr().String())
	s.kill = func() { _ = c.Close() } // at which its lender kills it
	f.mu.Lock()
	r := f.rounds[s.host]
	if r == nil || r.id != h.Round {
		if r != nil { // of a lender that is gone
			for _, old := range r.seats {
				old.kill()
			}
		}
		r = &round{id: h.Round}
		f.rounds[s.host] = r
	}
	r.seats = append(r.seats, s)
	f.mu.Unlock()
	s.listen(c, func() error { return errors.New("its connection has ended") }, f.stir)
}

// take is the ranks of a host, once all are there.
func (f *front) take(host int) []*seat {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.rounds[host]
	if r == nil || len(r.seats) < f.perHost() || slices.ContainsFunc(r.seats, (*seat).gone) {
		return nil
	}
	delete(f.rounds, host)
	return slices.SortedFunc(slices.Values(r.seats), func(a, b *seat) int { return a.local - b.local })
}

// waiting is the ranks of other hosts that nothing was asked of yet.
func (f *front) waiting() (seats []*seat) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.rounds {
		seats = append(seats, r.seats...)
	}
	return seats
}

// leaveWhole ends the ranks of hosts that have lost one: such a host leaves the group.
func (f *front) leaveWhole() {
	if f.Hosts == 1 {
		return
	}
	lost := make([]bool, f.Hosts)
	for _, s := range f.seats {
		lost[s.host] = lost[s.host] || s.gone()
	}
	_ = f.dismiss(slices.DeleteFunc(slices.Clone(f.seats), func(s *seat) bool { return !lost[s.host] }))
}

// place is where fresh ranks meet those that are there, of which s is the first: a port of its host if there are several hosts.
func (f *front) place(s *seat, number int) (string, error) {
	if f.Hosts == 1 {
		return fmt.Sprintf("%s-%d", f.meet.Addr, number), nil
	}
	ip := s.ip
	if s.host == 0 {
		ip = f.port.Addr().(*net.TCPAddr).IP.String()
	}
	a := ask([]*seat{s}, f.PeerTimeout, sameOrder(&order{Do: "place", Join: joining{Addr: ip}}))
	if a[0].failed() {
		return "", fmt.Errorf("no port on host %d: %s", s.host, reason(a))
	}
	return a[0].Addr, nil
}

// freePort is a port at an address of this host that is free now.
func freePort(ip string) (string, error) {
	at, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		return "", err
	}
	return at.Addr().String(), at.Close()
}

// lend starts ranks on this host for the front, until the front has them leave or ctx ends.
func lend(ctx context.Context, o options, log *slog.Logger) error {
	for {
		left, err := lendOnce(ctx, o, log)
		switch {
		case left || ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(lendAgain):
		}
	}
}

// lendOnce starts the ranks of this host, each with a connection to the front, and returns when all have ended. Where one ends the others
// do, because a host leaves the group whole. left says that the front had one leave.
func lendOnce(ctx context.Context, o options, log *slog.Logger) (left bool, err error) {
	life, stop := context.WithCancel(ctx)
	defer stop()
	type end struct {
		left bool
		err  error // of the connection
	}
	ends := make(chan end)
	h := hello{Host: uint32(o.world.Rank), Ranks: uint32(o.perHost())}
	_, _ = rand.Read(h.Round[:]) // it does not fail
	for local := range h.Ranks {
		h.Local = local
		go func(h hello) {
			c, err := call(life, o, h)
			ends <- end{err == nil && work(life, c, log), err}
		}(h)
	}
	for range h.Ranks {
		e := <-ends
		left = left || e.left
		if !e.left {
			stop()
		}
		if err == nil && !errors.Is(e.err, context.Canceled) {
			err = e.err
		}
	}
	return left, err
}

// work is the life of one rank on this host, which has a connection to the front. It says whether the front had it leave.
func work(ctx context.Context, c net.Conn, log *slog.Logger) (left bool) {
	defer c.Close()
	cmd, orders, replies, err := startRank()
	if err != nil {
		log.Warn("no rank", "error", err)
		return false
	}
	log.Info("a rank is started", "process", cmd.Process.Pid)
	kill := func() { _ = cmd.Process.Kill() } // an error means that it has ended
	defer context.AfterFunc(ctx, kill)()
	go func() {
		_, _ = io.Copy(orders, c) // until the front closes the connection
		kill()
	}()
	_, _ = io.Copy(c, replies) // until the rank has ended, or the connection has
	kill()
	err = cmd.Wait()
	log.Info("a rank has ended", "process", cmd.Process.Pid, "how", fmt.Sprint(err))
	return err == nil
}

// call reaches the front, which may not be there yet, or not be reached for a while.
func call(ctx context.Context, o options, h hello) (net.Conn, error) {
	late := time.After(o.world.JoinTimeout)
	for {
		c, err := (&net.Dialer{Timeout: helloTimeout}).DialContext(ctx, "tcp", o.world.Addr)
		if err == nil {
			if err = o.greet(c, h); err == nil {
				return c, nil
			}
			_ = c.Close()
		}
		if errors.Is(err, errRefused) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-late:
			return nil, fmt.Errorf("the front at %s is not there for %v: %w", o.world.Addr, o.world.JoinTimeout, err)
		case <-time.After(dialAgain):
		}
	}
}

var (
	errRefused = errors.New("the front has refused this host, and its log says why: another SWITCHYARD_SECRET, or other flags")
	errSecret  = errors.New("SWITCHYARD_SECRET is another one there")
)

// hello is the first word of a lender on a connection. The front answers with a nonce, then the lender and at last the front prove that they
// have the secret, without telling it.
type hello struct {
	Host, Local, Ranks uint32 // of the ranks on this host the one numbered Local
	Round              [16]byte
	Nonce              [16]byte
}

// proof is what one side of a connection sends. It is another one on every connection.
func (o *options) proof(side string, h hello, nonce [16]byte) (p [sha256.Size]byte) {
	m := hmac.New(sha256.New, o.world.Secret)
	_, _ = io.WriteString(m, "switchyard serve "+side)
	_ = binary.Write(m, binary.BigEndian, h)
	_, _ = m.Write(nonce[:])
	m.Sum(p[:0])
	return p
}

// greet is the lender's side.
func (o *options) greet(c net.Conn, h hello) error {
	if err := o.guard(c); err != nil {
		return err
	}
	_, _ = rand.Read(h.Nonce[:]) // it does not fail
	var nonce [16]byte
	if err := errors.Join(binary.Write(c, binary.BigEndian, h), binary.Read(c, binary.BigEndian, &nonce)); err != nil {
		return err
	}
	mine, want := o.proof("lender", h, nonce), o.proof("front", h, nonce)
	var theirs [sha256.Size]byte
	err := errors.Join(binary.Write(c, binary.BigEndian, mine), binary.Read(c, binary.BigEndian, &theirs))
	switch {
	case errors.Is(err, io.EOF) || err == nil && !hmac.Equal(want[:], theirs[:]):
		return errRefused
	case err != nil:
		return err
	}
	return c.SetDeadline(time.Time{})
}

// greeted is the front's side.
func (o *options) greeted(c net.Conn) (h hello, err error) {
	if err := o.guard(c); err != nil {
		return h, err
	}
	if err := binary.Read(c, binary.BigEndian, &h); err != nil {
		return h, err
	}
	var nonce [16]byte
	_, _ = rand.Read(nonce[:]) // it does not fail
	var theirs [sha256.Size]byte
	if err := errors.Join(binary.Write(c, binary.BigEndian, nonce), binary.Read(c, binary.BigEndian, &theirs)); err != nil {
		return h, err
	}
	mine, want := o.proof("front", h, nonce), o.proof("lender", h, nonce)
	switch {
	case !hmac.Equal(want[:], theirs[:]):
		return h, errSecret
	case int(h.Ranks) != o.perHost():
		return h, fmt.Errorf("host %d has %d ranks by its -ranks, this one has %d", h.Host, h.Ranks, o.perHost())
	case h.Host < 1 || int(h.Host) >= o.Hosts || h.Local >= h.Ranks:
		return h, fmt.Errorf("rank %d of host %d of %d", h.Local, h.Host, o.Hosts)
	}
	return h, errors.Join(binary.Write(c, binary.BigEndian, mine), c.SetDeadline(time.Time{}))
}

// guard bounds the greeting, and has the system end a connection to a host that is silent for the time after which a rank is lost.
func (o *options) guard(c net.Conn) error {
	t := c.(*net.TCPConn)
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(o.PeerTimeout.Milliseconds()))
	})
	return errors.Join(err, set, t.SetDeadline(time.Now().Add(helloTimeout)),
		t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: o.PeerTimeout / 2, Interval: o.PeerTimeout / 4}))
}
