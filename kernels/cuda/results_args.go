package cuda

//lint:file-ignore U1000 kernels use what Go does not

import (
	"structs"

	"github.com/switchyard-moe/switchyard/kernels"
)

// The copy of what a dispatch has left.
const (
	resultThreads     = 256                 // of a block of copy_results
	takeResultThreads = 512                 // of a block of take_results
	resultParts       = kernels.ResultParts // entries of result_args.parts
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

// takeResultArgs is one launch of the copy that runs next to its dispatch.
type takeResultArgs struct {
	_ structs.HostLayout

	call    dispatchArgs // of the kernel in front of it
	results resultArgs
	rows    uint32 // 1 where the first part is the rows, which are taken one by one as they come; 0 where nobody wants them
	taken   uint32 // how many parts come first that are in one stretch, with some bytes for each row, and with nothing behind the last
}
