// Package alltoallv exchanges messages of any size between all ranks of a group in one call: rank i's k-th split goes to
// rank k, whatever its length.
//
// An [Exchanger] owns its channels in a symmetric heap and is made once, by all ranks together. Every call of
// [Exchanger.Exchange] is then made by all ranks in the same order. It does no host communication, and once warm it
// allocates nothing, whether it has had these splits before or not.
//
//	x, err := alltoallv.New(ctx, heap, alltoallv.Options{})
//	err = x.Exchange(nil, dst, src, &alltoallv.Splits{Send: send, Recv: recv, ElemSize: 4})
//
// [Exchanger.Counts] tells ranks how much they will receive, where they do not know it. [Exchanger.Barrier] exchanges nothing.
//
// # How a message travels
//
// A message's size alone decides its wire mode, so both ends agree without talking: packets carry a flag in every word,
// eager messages land in double-buffered staging, and larger ones wait for a credit that says where to write: straight
// into the output when it lies in the symmetric heap, into a staging slot otherwise. On the host, a rank whose output lies
// outside the heap instead copies large messages out of their senders' memory, where the system lets it read that.
//
// An [Algorithm] decides the order: everything at once (packet, where all messages are small; direct), chunks through staging (pipelined), or one peer at a
// time (ring; copy, by a GPU's copy engines). Each rank chooses for itself; ranks that choose differently still understand each other, so nothing has
// to be agreed on when one rank's splits are in its cache and another's are not.
package alltoallv
