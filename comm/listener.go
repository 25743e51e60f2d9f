package comm

import (
	"context"
	"fmt"
	"net"
)

// Listener is a rank that can be reached and has not joined yet. It serves
// callers who have a store of their own to exchange addresses, such as torch's:
// Listen, publish Addr, collect everybody's, Join.
type Listener struct {
	cfg  Config
	ln   *net.UnixListener
	tcp  net.Listener // for other hosts; nil where the group spans none
	addr string
}

// Listen opens this rank's socket. Config.Addr is only used if the group may
// span hosts (see Config.LocalSize): as the host:port to which the interface
// leads on which others call this rank. Nobody needs to listen there.
func Listen(cfg Config) (*Listener, error) {
	l, err := listen(cfg)
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), l.cfg.JoinTimeout)
		defer cancel()
		if err = l.openToHosts(ctx); err != nil {
			l.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("comm: listen: %w", err)
	}
	return l, nil
}

func listen(cfg Config) (*Listener, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	ln, err := listenSocket(cfg.Sockets)
	if err != nil {
		return nil, lacksFiles(cfg.Rank, err)
	}
	return &Listener{cfg: cfg, ln: ln, addr: ln.Addr().String()}, nil
}

// Addr is the address of this rank, for the others: a printable text of less
// than 150 bytes and those of Config.Sockets, different every time.
func (l *Listener) Addr() string { return l.addr }

// Close gives up the address. Connections of a group that has been joined live on.
func (l *Listener) Close() error {
	l.ln.Close()
	if l.tcp != nil {
		l.tcp.Close()
	}
	return nil
}

// Join connects all ranks and returns when all are connected. addrs are the
// addresses of all ranks by rank, this one's included; every rank must pass the
// same. It works once, and closes the listener. The whole takes at most
// Config.JoinTimeout; then the error wraps [ErrTimeout] and names the ranks that
// are missing. Ranks that differ in what they were configured with get
// [ErrMismatch] and both values.
func (l *Listener) Join(ctx context.Context, addrs []string) (g *Group, err error) {
	defer l.cfg.span(ctx)(&g, &err)
	ctx, cancel := withJoinTimeout(ctx, &l.cfg)
	defer cancel()
	if g, err = l.join(ctx, addrs, nil); err != nil {
		return nil, joinError(err)
	}
	return g, nil
}

func withJoinTimeout(ctx context.Context, cfg *Config) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, cfg.JoinTimeout, fmt.Errorf("%w after %v", ErrTimeout, cfg.JoinTimeout))
}

func joinError(err error) error {
	if pe, ok := err.(*PeerError); ok {
		return withOp(pe, opJoin.String(), 0)
	}
	return fmt.Errorf("comm: join: %w", err)
}
