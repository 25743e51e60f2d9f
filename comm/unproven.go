package comm

import (
	"errors"
	"net"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// unproven holds the connections of processes that have not shown to be ranks.
// At most limit of them are open at once, and the oldest is closed for the next.
// So connections that stay silent leave room, and descriptors, for ranks. A
// connection is removed before its rank is accepted, which nothing closes then.
type unproven struct {
	limit int

	mu    sync.Mutex
	conns []net.Conn // oldest first
}

const (
	maxUnprovenConns = 256
	minUnprovenConns = 8
)

// newUnproven takes a quarter of the descriptors that the process may have, at
// most, and at least a place for each rank: all may connect at once.
func newUnproven(cfg *Config) unproven {
	if cfg.unproven > 0 {
		return unproven{limit: cfg.unproven}
	}
	limit := maxUnprovenConns
	var files unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &files) == nil {
		limit = int(min(uint64(limit), files.Cur/4))
	}
	return unproven{limit: max(minUnprovenConns, cfg.Size, limit)}
}

// errCrowded means that a connection was closed for another before it was proven.
var errCrowded = errors.New("others connected before it was proven a rank")

func (u *unproven) add(c net.Conn) {
	u.mu.Lock()
	full := len(u.conns) >= u.limit
	u.mu.Unlock()
	if full {
		u.closeOldest()
	}
	u.mu.Lock()
	u.conns = append(u.conns, c)
	u.mu.Unlock()
}

// remove takes out a connection that is proven, or closed. It reports false if
// the connection has been closed for another.
func (u *unproven) remove(c net.Conn) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	i := slices.Index(u.conns, c)
	if i >= 0 {
		u.conns = slices.Delete(u.conns, i, i+1)
	}
	return i >= 0
}

// closeOldest closes the connection that has been unproven longest, which the
// goroutine that serves it notices.
func (u *unproven) closeOldest() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.conns) > 0 {
		u.conns[0].Close()
		u.conns = slices.Delete(u.conns, 0, 1)
	}
}
