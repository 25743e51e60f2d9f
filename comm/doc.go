// Package comm is where ranks meet. It makes groups of ranks, in one process or
// one process each, and gives them what they need to set up their data plane:
// all-gather, barrier, subgroups, file descriptors passed from process to
// process, and the news, at once, that a rank has been lost.
//
// Nothing here carries tokens. A group serves the control plane: calls take a
// [context.Context], return errors with words, and are made when things are
// created, grown, checked and closed. Data moves through memory that the ranks
// share, by packages that stand on this one.
//
// # Making a group
//
// [Local] makes n ranks in one process, a goroutine each:
//
//	groups, err := comm.Local(4)
//
// [Join] makes one of n processes, which were told who they are by a launcher,
// torchrun for one, or by hand:
//
//	cfg, err := comm.FromEnv()
//	group, err := comm.Join(ctx, cfg)
//
// Rank 0 listens on a TCP port while the ranks find each other; then all are
// connected to all by unix sockets, which is why a group spans one host. Callers
// who have a store of their own to exchange addresses use [Listen] and
// [Listener.Join] and need no port.
//
// [Group.Split] makes subgroups of any group, of any kind. They share the
// connections of the group they come from.
//
// [Group.Admit] makes a larger group of one that runs and of newcomers, who call
// Join with [Config.Late].
//
// # When a rank fails
//
// A group fails as a whole and for good, and every rank knows who is to blame:
// [Group.Err] and every call return a [*PeerError] with the rank and one of
// these conditions.
//
//   - [ErrPeerLost]: a process has ended without [Group.Close], which the others
//     see at once; or it was silent, stopped or cut off, for
//     [Config.PeerTimeout], 10 seconds by default; or it has closed the group
//     while another rank was waiting for it.
//   - [ErrAborted]: a rank called [Group.Abort] and gave a reason.
//   - [ErrMismatch]: ranks called different things at the same place.
//
// The first failure counts. Ranks that learn of it tell the others before they
// return, so that nobody blames them for leaving. [Group.OnFailure] and
// [Group.Done] let other parts of a program know, those that wait for memory to
// change for example. The survivors may call [Group.Shrink] and go on without
// the ranks that were lost. That a rank is late is no failure of the group: a
// call that waits for it ends with its context, with [ErrTimeout] and its rank,
// and Shrink leaves it out if it is told to.
//
// Ranks that close their groups one after the other, in good order, are no
// failure. This package catches no signals.
//
// # Strangers
//
// The TCP port can be reached by others while ranks join. With [Config.Secret]
// both sides of every connection prove that they know it, by an HMAC over fresh
// nonces of both, and what rank 0 tells the others is signed. The unix sockets
// refuse other users, secret or not. Who connects and says something else, or
// nothing, is turned away and disturbs nobody; without a secret, though, one
// that speaks the protocol is taken for a rank, and can make a join fail.
// Messages are of bounded length, and what is malformed closes its connection
// and nothing else. Who has proven nothing gets 2 KiB and 10 seconds; there are
// at most 256 such connections, or a quarter of the process's descriptors, or as
// many as ranks where these are more, and the oldest has to go for the next. Once all have joined, nothing listens any more;
// after a join that failed rank 0 does for a while, see [Join].
package comm

import _ "github.com/switchyard-moe/switchyard/internal/platform" // a clear word on other systems
