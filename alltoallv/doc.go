// Package alltoallv exchanges messages of any size between all ranks of a group in one call: rank i's k-th split goes to
// rank k, whatever its length.
//
// All ranks make an [Exchanger] together, once, over a symmetric heap. They then make all calls of [Exchanger.Exchange] in the
// same order. A call talks to no socket, and once warm it allocates nothing, with known splits or new ones.
//
//	x, err := alltoallv.New(ctx, heap, alltoallv.Options{})
//	err = x.Exchange(nil, dst, src, &alltoallv.Splits{Send: send, Recv: recv, ElemSize: 4})
//
// [Exchanger.Counts] tells ranks that do not know it how much they will receive. [Exchanger.Barrier] is an exchange without
// messages.
//
// # How a message travels
//
// A message's size alone decides its wire mode, so both ends agree without talking: packets carry a flag in every word,
// eager messages land in double-buffered staging (on the host), and larger messages wait for a credit, which has the place to
// write: the output if it lies in the symmetric heap, otherwise a slot of staging. On the host, a rank whose output lies outside
// the heap copies large messages out of their senders' memory instead, if the system lets it read that.
//
// An [Algorithm] decides the order: all messages at once (packet, if all are small; direct), chunks through staging (pipelined),
// or one peer at a time (ring; copy, by a GPU's copy engines). Each rank chooses for itself, and ranks that choose differently
// understand each other. So ranks need no agreement when the splits of one are in its cache and those of another are not.
package alltoallv
