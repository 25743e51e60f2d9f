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
// Where GPUs cannot export memory as descriptors the segments are ordinary allocations that ranks map by CUDA IPC
// ([Options].LegacyIPC). Those lie wherever the driver puts them: kernels.Space has a table of their addresses.
//
// The segments of GPUs can have a multicast address beside their own ([Options].Multicast, off by default): multicast objects to which every
// rank binds its memory, extent by extent, and which each rank maps as a whole. This has run on
// the emulated driver of the tests only, never on hardware.
//
// # Pool
//
// [Heap.Alloc] and [Buffer.Free] hand out a segment's memory without talking to anybody. What makes the
// result symmetric is a rule: the offset of an allocation depends on the sequence of calls and on nothing
// else. Not on addresses, streams, time, the garbage collector or on whether some work has finished.
// Ranks that make the same calls get the same offsets. They are not taken at their word: each keeps a
// digest of its calls, and [Heap.Verify] compares the digests and names the first call that differs.
//
// Work on streams fits in because a free counts where it is called. The next user of the memory waits,
// on its own stream, for the stream that freed it ([Heap.AllocOn], [Buffer.FreeOn]).
//
// A heap only grows when all ranks call [Heap.Grow], or make a communicator together that it has no room for. No allocation
// ever maps memory or waits for a peer.
//
// # Views
//
// Operations take a [View]: of a buffer, of any other memory ([Host], [Device]), or of a file's
// [Mapping]. What is symmetric is written by peers in place, other memory goes through staging. A mapping
// becomes symmetric by [Heap.Register], explicitly and on all ranks, and so does memory of a GPU: of
// cudaMalloc, by CUDA IPC, or what can leave its process as a descriptor. Registered memory of GPUs need not lie in
// the range. Its place names a row of a table in device memory, in which every rank has its own addresses of all
// ranks' parts (kernels.Space.Addr). [Copy] moves bytes between views.
//
// # Typed memory
//
// [Wrap] is a view of a Go slice of numbers, [Of] the numbers of a view, and [Matrix] rows of either: in Go memory
// ([NewMatrix]), in the heap ([AllocMatrix]) or of any view ([MatrixOf]). Go's missing types are here too, [BFloat16] for one.
//
//	x := memory.NewMatrix[float32](tokens, hidden)
//	y, err := memory.AllocMatrix[float32](heap, rows, hidden)
//	err = exchanger.Exchange(nil, y.View(), x.View(), splits)
//	first := y.Row(0)
//
// # Lifetime
//
// Whatever one rank maps of another outlives the map: Close and Deregister first let go of the peers'
// memory, meet, and only then give up their own; memory that was registered may be freed when Deregister has returned. Objects have to be closed; the garbage collector never
// frees symmetric memory, because it would do so at another time on every rank. After Close the addresses
// are gone, so touching a slice that Bytes returned ends the program.
package memory
