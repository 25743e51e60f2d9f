// Package rails carries bytes between hosts. A rail delivers what a peer on the host would have written: bytes at a place in this rank's
// segment of a heap, then a number that only grows, then a bell. So waits and plans inside a host know nothing of it.
//
// Package ucx is the rail over UCX, for memory of the host, and package double one within the process, for tests.
package rails

import (
	"context"
	"net/netip"
	"time"
)

// Config is what a rail is made of.
type Config struct {
	// Rank is this rank's number and Size the number of ranks that may put: rails know ranks by these.
	Rank, Size int
	// Key is the same on all ranks of a rail, and not known to others. A message without it changes nothing.
	Key uint64
	// Segment is this rank's segment, as far as it is reserved. Places count bytes from its beginning.
	Segment []byte
	// Interface is the address of the interface that leads to the other ranks. Nobody but From is let in by it. Where it is not valid, as
	// in one process, any interface serves, and anybody reaches it.
	Interface netip.Addr
	From      []netip.Addr
	// Ring is called, from any goroutine, after puts have landed in the segment.
	Ring func()
}

// Rail is one rank's end. Its methods may be called from several goroutines.
//
// The signals of the puts of one rank that name the same word grow in the order of these puts: a word that holds k says that all bytes
// of the first k of them have landed. Puts with different words have no order. Only one rank names a word.
type Rail interface {
	// Address is where peers connect to. They get it by other means.
	Address() []byte
	// Connect makes a peer reachable, at its address. It waits for nobody. The error is comm.ErrMismatch where the two ends do not fit.
	Connect(peer int, address []byte) error
	// Meet returns once all peers that were connected have been heard of. Each calls Connect and Meet with all others. The error is a
	// *comm.PeerError of one that has not been when ctx ends, or whose connection fails.
	Meet(ctx context.Context) error
	// Open lets peers put into n bytes of the segment from off on, until Close.
	Open(off, n int64) error
	// Put sends src to a place of a peer's segment, and then sets the 64-bit word at place signal there to the number of puts of this
	// rank that have named it. It returns before src has left: Flush says when it has. The error is comm.ErrPeerLost where the peer
	// is known to be gone, and after Close or Interrupt.
	Put(peer int, place int64, src []byte, signal int64) error
	// Forget has the next put that names a word at a place between two begin anew: the word will hold 1. That goes for the puts of this rank
	// to others as for those of others to it. None is under way, and all ranks that name such a word call it before the next put.
	Forget(from, to int64)
	// Left is how many puts of this rank have begun, and of these, from the first on, how many have left: their memory may be written again. The
	// error is that of a Put at that time.
	Left() (begun, left uint64, err error)
	// Flush returns when the memory of all puts so far may be written again, or with an error where that has not come about when ctx ends or
	// the rail is interrupted.
	Flush(ctx context.Context) error
	// Progress does what there is to do at once. It reports whether anything has landed. A rank that waits need not call it: something
	// else sleeps until there is something to do, and rings.
	Progress() bool
	// Wait sleeps until there is something to do, does it and returns, after d at most. It may return early. The caller does what the rail's own
	// goroutine does otherwise, which leaves the rail to such callers from then on: until Resume, or a millisecond after the last Wait.
	Wait(d time.Duration)
	// Resume has the rail's own goroutine see to it again.
	Resume()
	// Refused counts the messages that have changed nothing: without the key, or with places that are not open.
	Refused() int64
	// Interrupt makes Put fail from now on, at once, and Flush where puts have not left. When it returns nothing lands in the segment any more.
	Interrupt()
	// Close ends the rail. After it nothing lands any more, and the segment may be given back. It is idempotent.
	Close() error
}
