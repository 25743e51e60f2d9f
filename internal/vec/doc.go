// Package vec is the arithmetic of the host: the loops that reduce and combine what the host engine moves.
//
// # Operations
//
//   - [ReduceRows] folds the same chunk of several ranks in rank order, in one pass, for every element type and
//     operation. [Load], [Accumulate] and [Store] are its three steps for an algorithm that folds one peer at a time:
//     types of at most 32 bits stay in a float32 accumulator in between.
//   - [WeightedSum] combines the rows of a token with their weights.
//   - [Scale], [Add], [Mul] on float32.
//
// # Promises
//
// Nothing allocates, and everything runs on the caller's goroutine. Slices are of equal length unless a function says
// otherwise; a wrong length is a mistake of the caller and panics with the lengths. No alignment is asked for.
//
// A destination may be exactly the memory of a source of the same type. Slices that overlap in any other way give an
// undefined result.
//
// Elementwise functions (ReduceRows and its steps, WeightedSum, Scale, Add, Mul) do not fuse or reorder: they give the same bits with
// assembly and without, on every architecture. Only which NaN a sum or product makes is not fixed.
//
// # Assembly
//
// On amd64 the loops are assembly for AVX2 with FMA and F16C, and some for AVX-512, chosen at run time. Other
// processors, other architectures and the build tag purego use plain Go. package main in gen writes the assembly.
package vec

//go:generate go run ./gen
