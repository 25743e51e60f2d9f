package comm

import "time"

// Grace periods. Each bounds a wait that is there for good manners or better
// words: without it nothing would hang, and a rank that lives would be blamed, or
// one that is to blame be named late.
const (
	// Before a rank is blamed.

	// hearsayGrace is how long a rank waits, before it blames one that is gone in
	// a join, for what else there is to hear: that one may have had a reason to leave.
	hearsayGrace = 300 * time.Millisecond
	// verdictGrace is how long a guest that has given up a join waits to hear from
	// rank 0 who is to blame.
	verdictGrace = time.Second
	// refusalGrace is how long a rank whose connection is refused in the mesh waits
	// to hear why: the other may have been told that there will be no group.
	refusalGrace = 500 * time.Millisecond
	// newsGrace is how long a rank that finds its deadline passed reads what the
	// others have sent meanwhile, and how long several that were asked for whom
	// they wait have to answer.
	newsGrace = 200 * time.Millisecond
	// lateWake is how far behind its deadline a rank must wake up to have been
	// stopped: the scheduler alone takes less.
	lateWake = 50 * time.Millisecond
	// settleGrace is how long ranks may take to agree on the outcome of Admit when
	// their context has ended.
	settleGrace = time.Second

	// Before a rank that comes again is refused.

	// returnGrace is how long a rank that was started again is kept waiting while
	// the end of its former self may not have been noticed.
	returnGrace = 200 * time.Millisecond
	// portGrace is how long rank 0 waits for a port that its former self, or a
	// program that ends, may still hold.
	portGrace = 3 * time.Second
	// yieldGrace is how long rank 0 talks with its former self, to have it let go.
	yieldGrace = time.Second

	// After a failure, for those that have not heard of it.

	// mismatchGrace is how long the join of rank 0 lasts after ranks were found to
	// differ, for those that are still to come: its process may end with the join.
	mismatchGrace = 2 * time.Second
	// lingerLeast is how long rank 0 keeps the port for those that are still to
	// come, where JoinTimeout is shorter.
	lingerLeast = 10 * time.Second

	// Before a connection is given up.

	// filesGrace is how long a rank that joins tries to connect, or to accept, without a descriptor for it.
	filesGrace = time.Second
	// handshakeGrace is how long a connection may stay unproven.
	handshakeGrace = 10 * time.Second
	// lastWordGrace bounds a write to a rank that may be stopped, in a join.
	lastWordGrace = time.Second
	// flushGrace bounds how long a failing group holds back its own callers
	// for the news to leave the process first. The news is a few bytes; only a
	// peer whose socket is full, a stopped one, takes this long.
	flushGrace = 20 * time.Millisecond
	// closeGrace bounds how long a link that is closed waits for the last words to leave.
	closeGrace = time.Second
)
