// Package devcomm gives kernels that users write in CUDA C++ what those of Switchyard have: peers' addresses, signals, waits that end, and the
// number of the call. The header switchyard.cuh (kernels/cuda/include) is the kernels' side.
//
// All ranks make a [Comm] together over a heap on GPUs. Each then launches the same kernels in the same order:
//
//	x, err := devcomm.New(ctx, heap, devcomm.Options{})
//	gather, err := x.Load(image, "all_gather") // a cubin, a fatbin or PTX
//	err = x.Launch(stream, gather, devcomm.Grid{Blocks: 16, Threads: 256}, args)
//
// A field of args has [Comm.Argument]. Programs that launch kernels by other means pass it too, and ask [Comm.Fault] for what they have come
// to. Launches can be captured in CUDA graphs: a replay counts calls as launches do.
package devcomm
