package cuda

//lint:file-ignore U1000 kernels use what Go does not

import "structs"

// The queue from the kernels of a rank to its proxy, in pinned host memory that kernels reach.
const (
	queueHeadBytes = 256 // in front of the descriptors
	queueDone      = 0   // in it: a word of the proxy, of the descriptors so far those whose bytes may be written again, and whose slots
	queueRan       = 128 // and one of kernels, those that have ended: the writers of a line are a processor or a GPU
	putBytes       = 64  // of a descriptor
	putNumber      = 40  // in it: its number, counted from 1
)

// putWords is a descriptor: bytes for a rank on another host, and the signal behind them.
type putWords struct {
	_ structs.HostLayout

	place  place  // of the bytes, in that rank's segment of the rail
	source place  // and in this rank's
	bytes  int64  // may be 0
	signal place  // the word of that rank which says how many puts that name it have landed
	peer   uint64 // that rank, by its number in the group
	number uint64 // written last
	rest   [2]uint64
}

// queueWords is a queue as kernels know it.
type queueWords struct {
	_ structs.HostLayout

	head  uint64 // address of its head and the descriptors behind it
	next  uint64 // address, in memory of the GPU, of two words: descriptors so far, and of those the ones that were known to be done
	slots uint64 // descriptors that there is room for
}

// ringWords is a ring of slots by which chunks come from one rank to another on another host. Both ranks know where all of it lies.
type ringWords struct {
	_ structs.HostLayout

	slots     place  // of the receiver, in its segment of the rail
	sources   place  // of the sender, in its own: as many
	landed    place  // the word of the receiver that counts chunks
	given     place  // the word of the sender that counts puts without bytes, by which the receiver gives slots back
	state     uint64 // address, in memory of this rank's GPU, of a word: chunks so far
	slotBytes int64
	slotCount uint64
	gives     uint64 // slots that one put gives back, at most slotCount
	peer      uint64 // the other rank, by its number in the group
	name      uint64 // and as faults of this rank name it
}

// railWords is what kernels know of their rank's rail.
type railWords struct {
	_ structs.HostLayout

	queue   queueWords
	segment uint64 // address of this rank's segment of the rail
}

// The exchange between hosts (across.cu). A message is cut into chunks, for a ring; the first begins with a head.
const (
	acrossThreads     = 512     // of a block
	acrossHomeThreads = 128     // of the kernel that reads splits for the own host
	acrossHead        = 64      // bytes of a head
	farRank           = 1 << 16 // in a fault: the rank is numbered in the group, not on its host
)

// acrossWords are the words of an exchange between hosts in a control block, which only its own rank writes and ranks of its host read. All are
// zero before the first call.
type acrossWords struct {
	_ structs.HostLayout

	next    [2]uint64 // of the queue
	refused [6]uint64 // a call whose splits for another host this rank has refused; a word; of the part bytes, offset, limit, sending and its rank
	ended   uint32    // blocks of the running kernel that have ended
	rest    uint32
	out     [maxRanks]uint64 // chunks so far, by peer
	in      [maxRanks]uint64
	splits  [4 * maxRanks]int64 // of the running call, for the ranks of this host
}

// acrossPeer is a rank of another host, and what goes there and comes from there where splits are not in device memory.
type acrossPeer struct {
	_ structs.HostLayout

	rank       uint32 // in the group
	theirs     uint32 // the number of this rank among that rank's peers
	sendBytes  int64
	sendOffset int64
	recvBytes  int64
	recvOffset int64
}

// acrossArgs is one launch of the part of an exchange that goes to other hosts.
type acrossArgs struct {
	_ structs.HostLayout

	world     worldWords // of the own host
	rail      railWords
	src       uint64
	dst       uint64
	srcBytes  int64
	dstBytes  int64
	splits    uint64 // address of int64 [4][ranks], as in an exchange on one host; 0: they are below
	words     place  // struct sw_across_words in a segment of the heap
	rings     place  // of all ranks, in a segment of the rail
	slotBytes int64
	slotCount uint32
	gives     uint32
	ranks     uint32 // of the group
	me        uint32 // this rank in the group
	count     uint32 // of peers
	rest      uint32
	peers     [maxRanks]acrossPeer // ranks of other hosts, in their order
	to        [maxRanks]uint32     // peers in the order in which this rank sends to them,
	from      [maxRanks]uint32     // and receives from them: a rank sends in a step to the one that receives from it in the same
	home      [maxRanks]uint32     // ranks of this host, in the group
}
