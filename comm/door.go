package comm

import (
	"net"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// door holds the connections of those who have proven nothing yet. There are so
// many of them at most: the oldest has to go for the next, so that those who say
// nothing leave room, and descriptors, for ranks.
type door struct {
	most int

	mu    sync.Mutex
	conns []net.Conn // oldest first
}

const (
	maxAtDoor = 256
	minAtDoor = 8
)

// newDoor takes a quarter of the descriptors that the process may have, at most.
func newDoor() door {
	most := maxAtDoor
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		most = max(minAtDoor, int(min(uint64(most), limit.Cur/4)))
	}
	return door{most: most}
}

func (d *door) enter(c net.Conn) {
	d.mu.Lock()
	full := len(d.conns) >= d.most
	d.mu.Unlock()
	if full {
		d.dropOldest()
	}
	d.mu.Lock()
	d.conns = append(d.conns, c)
	d.mu.Unlock()
}

// leave takes a connection out: it has proven itself, or is closed.
func (d *door) leave(c net.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := slices.Index(d.conns, c); i >= 0 {
		d.conns = slices.Delete(d.conns, i, i+1)
	}
}

// dropOldest closes the connection that has been here longest. Who serves it
// notices.
func (d *door) dropOldest() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.conns) > 0 {
		d.conns[0].Close()
		d.conns = slices.Delete(d.conns, 0, 1)
	}
}
