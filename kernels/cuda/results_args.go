package cuda

//lint:file-ignore U1000 kernels use what Go does not

import (
	"structs"

	"github.com/switchyard-moe/switchyard/kernels"
)

// The copy of what a dispatch has left.
const (
	resultThreads = 256                 // of a block
	resultParts   = kernels.ResultParts // entries of result_args.parts
)

// resultPart is a kernels.ResultPart.
type resultPart struct {
	_ structs.HostLayout

	to      uint64 // addresses
	from    uint64
	row     uint64 // bytes of a row; 0: the part does not go by rows
	bytes   uint64 // of a column at the address to
	pitch   uint64 // from one column to the next at the address from
	columns uint32
	fills   uint32 // 1: behind is in all words behind the last row
	behind  uint32
	unused  uint32
}

// resultArgs is one launch of the copy.
type resultArgs struct {
	_ structs.HostLayout

	fault uint64 // address of the handle's fault
	rows  uint64 // address of the number of rows that came
	parts [resultParts]resultPart
	count uint32
	spare uint32
}
