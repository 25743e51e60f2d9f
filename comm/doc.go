// Package comm is where ranks meet. It makes groups of ranks, in one process or
// one process each, and gives them what they need to set up their data plane:
// all-gather, barrier, subgroups, file descriptors passed from process to
// process, words between two of them ([Mail]), and the news that a rank has been
// lost.
//
// A group carries no tokens. It serves the control plane: calls take a
// [context.Context], return errors with words, and are made when objects are
// created, grown, checked and closed. Packages above this one move data through
// memory that the ranks share.
//
// # Making a group
//
// [Local] makes n ranks in one process, a goroutine each:
//
//	groups, err := comm.Local(4)
//
// [Join] makes a group of n processes. A launcher such as torchrun, or the
// caller, has told each process its rank:
//
//	cfg, err := comm.FromEnv()
//	group, err := comm.Join(ctx, cfg)
//
// Rank 0 listens on a TCP port while the ranks find each other; then all are
// connected to all by unix sockets, on one host. If [Config.LocalSize] is less
// than the size, a group may span hosts: unix sockets connect the ranks of each,
// the first rank of a host, its leader, is connected to all other leaders, and
// passes on what the ranks of its host say and hear ([Group.Topology]). Callers
// with a store of their own to exchange addresses use [Listen] and
// [Listener.Join] and need no port.
//
// [Group.Split] makes subgroups of any group, of any kind. They share the
// connections of the group they come from.
//
// [Group.Admit] makes a larger group of a group and of newcomers, which call
// Join with [Config.Late].
//
// # When a rank fails
//
// A group fails as a whole and for good, and every rank knows the rank to blame:
// [Group.Err] and every call return a [*PeerError] with that rank and one of
// these conditions.
//
//   - [ErrPeerLost]: a process ended without [Group.Close], which the others
//     see at once; or it was silent for [Config.PeerTimeout], 10 seconds by
//     default, because it was stopped or cut off; or it closed the group while
//     another rank was waiting for it.
//   - [ErrAborted]: a rank called [Group.Abort] and gave a reason.
//   - [ErrMismatch]: ranks called different things at the same place.
//
// The first failure counts. Ranks that learn of it tell the others before they
// return, so that no rank blames them for leaving. [Group.OnFailure] and
// [Group.Done] tell other code of the program, such as code that waits for
// memory to change. The survivors may call [Group.Shrink] and go on without
// the ranks that were lost. A late rank is no failure of the group: a call that
// waits for it ends with its context, with [ErrTimeout] and its rank, and Shrink
// leaves it out if it is told to.
//
// Ranks may close their groups one after the other; that is no failure. This
// package catches no signals.
//
// # Strangers
//
// The TCP port can be reached by others while ranks join. With [Config.Secret]
// both sides of every connection prove that they know it, by an HMAC over fresh
// nonces of both, and what rank 0 tells the others is signed. The unix sockets
// refuse other users, secret or not. A connection that says something else, or
// nothing, is turned away and disturbs no other. Without a secret, a process
// that speaks the protocol is taken for a rank, and can make a join fail.
// Connections between hosts prove a key that is made of the secret and of the
// addresses of all ranks, and every frame on them is signed with it. Nothing is
// encrypted.
// Messages are of bounded length, and a malformed one closes its connection and
// nothing else. A connection that has proven nothing gets 2 KiB and 10 seconds.
// At most 256 such connections are open, or a quarter of the process's
// descriptors, or as many as ranks if these are more; a new one closes the
// oldest. Once all ranks have joined, nothing listens; after a join that failed
// rank 0 listens for a while, see [Join].
package comm

import _ "github.com/switchyard-moe/switchyard/internal/platform" // a clear word on other systems
