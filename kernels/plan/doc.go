// Package plan has collectives that users write: files of steps by rank and chunk, and the check that such a plan does what it says.
//
// A plan is JSON. Every rank has a list of steps, which it does in order:
//
//	{"do": "put", "from": ["input:0"], "to": "scratch:0@1"}           write a chunk of rank 1
//	{"do": "signal", "peer": 1}                                       count a semaphore of rank 1 up; "semaphore" is its number, 0 if left out
//	{"do": "wait", "peer": 1}                                         consume one signal of rank 1
//	{"do": "copy", "from": ["scratch:0"], "to": "output:0"}           write a chunk of this rank
//	{"do": "reduce", "from": ["input:0", "scratch:0"], "to": "output:0"}
//
// A place is a buffer, a chunk and, behind an @, the rank that has it if that is another. Copies and reductions may read other ranks, puts
// write them. Nothing writes an input. What lies in scratch at the beginning is undefined, and nothing needs to be left there.
//
// Chunks: "chunks" is the number of chunks of a block. The block of an all-reduce is the whole buffer, that of other collectives a rank's
// slice, so the input of a reduce-scatter, the output of an all-gather and both of an all-to-all have as many blocks as there are ranks.
//
// [Read] and [Check] prove for a plan that it ends, in every order in which ranks can run; that no two steps touch a chunk of which one
// writes it, unless signals order them; that a rank's buffers are left alone once its steps are done; that every chunk of every output has
// what the collective says; and that all ranks get the same bits. Ranks make no choices, so one run shows all of that.
package plan
