package cuda

//lint:file-ignore U1000 kernels use what Go does not

import "structs"

// Rows one for each token, and rows one for each choice.
const (
	expandPlaceThreads = 1024 // of a block of expand_places, which numbers the choices of an expert
	expandThreads      = 256  // of a block of expand_rows, and of one that sums rows again
)

// expandArgs is one launch of expand_places, and one of expand_rows behind it.
type expandArgs struct {
	_ structs.HostLayout

	indices    uint64 // addresses: [tokens, topK] of int64, the expert of each choice, -1 for none
	counts     uint64 // [experts], the choices of each
	slots      uint64 // [tokens, topK] of int32, the row of each choice, -1 for none
	rows       uint64 // [tokens, rowBytes]
	toRows     uint64 // [length, rowBytes]
	scales     uint64 // the same of scales; 0: there are none
	toScales   uint64
	weights    uint64 // [tokens, topK]; 0: there are none
	toWeights  uint64 // [length]
	rooms      uint64 // [experts + 1] of int64: rows of each with those between it and the next, and whether rows are left out; 0: not wanted
	rowBytes   uint32
	scaleBytes uint32 // a multiple of 4
	tokens     uint32
	topK       uint32
	experts    uint32
	align      uint32 // of which the first row of an expert is a multiple
	length     uint32
	spare      uint32
}

// foldArgs is one launch of fold_rows.
type foldArgs struct {
	_ structs.HostLayout

	rows      uint64 // addresses: [length, rowBytes]
	slots     uint64 // [tokens, topK] of int32, the row of each choice; what is none of length rows is none
	sums      uint64 // [tokens, rowBytes]
	weights   uint64 // [length]; 0: there are none
	toWeights uint64 // [tokens, topK]
	rowBytes  uint32
	tokens    uint32
	topK      uint32
	length    uint32
}
