// Package memory is the symmetric heap: memory that every rank of a group has at the same place.
//
// A [Heap] reserves one range of addresses per process and maps the segment of every rank in it, at
// equal distances. The byte at offset o of rank p's segment is then at
//
//	base + p*stride + o
//
// in every rank's address space, so a peer's address needs arithmetic and no table. On the host a
// segment is a memfd, on a GPU an allocation of the driver's virtual memory management; both are file
// descriptors, which ranks pass one another over their sockets. Ranks that share a process share one
// range, and may share a GPU. Nothing here needs privileges.
//
// If GPUs cannot export memory as descriptors, the segments are ordinary allocations that ranks map by CUDA IPC
// ([Options].LegacyIPC). The driver chooses their addresses, and kernels.Space has a table of them.
//
// The segments of GPUs can have a second, multicast address ([Options].Multicast, off by default): every rank binds its memory to multicast
// objects, extent by extent, and maps these as a whole. This has run on the emulated driver of the tests only, never on
// hardware.
//
// Ranks on several hosts have a heap for each host, and UCX carries bytes between them, into the pool's memory only.
//
// # Pool
//
// [Heap.Alloc] and [Buffer.Free] manage a segment's memory without a word to other ranks. One rule makes
// the result symmetric: the offset of an allocation depends on the sequence of calls and on nothing else,
// not on addresses, streams, time, the garbage collector or the progress of work. Ranks that make the same
// calls get the same offsets. Each rank keeps a digest of its calls; [Heap.Verify] compares the digests and
// names the first call that differs.
//
// A free counts at its position in the sequence of calls, also for work on streams. The next user of the
// memory waits, on its own stream, for the stream that freed it ([Heap.AllocOn], [Buffer.FreeOn]).
//
// A heap grows only when all ranks call [Heap.Grow], or together make a communicator for which it has no room. No allocation
// maps memory or waits for a peer.
//
// # Views
//
// Operations take a [View]: of a buffer, of any other memory ([Host], [Device]), or of a file's [Mapping].
// Peers write symmetric memory in place; other memory goes through staging. [Heap.Register], called by all
// ranks, makes a mapping symmetric, and also memory of a GPU: of cudaMalloc, by CUDA IPC, or memory that can
// leave its process as a descriptor. Registered memory of GPUs may lie outside the range. Its place then names
// a row of a table in device memory, in which every rank has its own addresses of all ranks' memory
// (kernels.Space.Addr). [Copy] moves bytes between views. Two ranks can do without the others: one offers such memory by
// [Heap.Share], and the other maps it by [Heap.Open].
//
// # Typed memory
//
// [Wrap] is a view of a Go slice of numbers, [Of] the numbers of a view, and [Matrix] rows of either: in Go memory
// ([NewMatrix]), in the heap ([AllocMatrix]) or of any view ([MatrixOf]). The package defines the types that Go lacks, such as
// [BFloat16].
//
//	x := memory.NewMatrix[float32](tokens, hidden)
//	y, err := memory.AllocMatrix[float32](heap, rows, hidden)
//	err = exchanger.Exchange(nil, y.View(), x.View(), splits)
//	first := y.Row(0)
//
// # Lifetime
//
// Memory that a rank shows to others outlives their mappings (M4): Close and Deregister first unmap the
// peers' memory, meet, and only then release their own; registered memory may be freed when Deregister has
// returned. Memory that two ranks share is closed by its importer, or withdrawn before that has opened it, before Shared.Close returns to its exporter. The garbage collector never frees symmetric memory, because it would do so at another time on
// every rank, so objects have to be closed. After Close the addresses are unmapped, and an access to a slice
// that Bytes returned ends the program.
package memory
