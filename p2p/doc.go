// Package p2p moves data between two ranks of a group, without the others.
//
// An Endpoint is made together by all ranks. After that no call is collective: Put and Get write and read a peer's symmetric memory, or memory
// that it has shared with this rank (memory.Heap.Share), Signal
// counts a semaphore at the peer up, and Wait consumes one signal. Send and Recv carry messages of any memory, with tags, and Batch several of
// them at the same time. Calls on one stream run in their order; calls on different streams run at the same time, so a Wait on one holds up no
// other.
package p2p
