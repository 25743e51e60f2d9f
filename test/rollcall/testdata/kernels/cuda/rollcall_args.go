package cuda

//lint:file-ignore U1000 kernels use what Go does not

import "structs"

// Roll calls.
const (
	rollcallThreads = 64 // of the one block of their kernel, one for each peer
)

// rollcallBlock is where the words of a roll call's control block lie. All of it must be zero before the first call.
type rollcallBlock struct {
	_ structs.HostLayout

	control place // struct sw_control
	signals place // [size] lines: {seq}
	end     place // the offset behind the block
}

// layRollcallBlock lays the block out from offset on.
func layRollcallBlock(offset, size int64) (b rollcallBlock) {
	at := offset
	b.control, at = at, at+controlAlign
	b.signals, at = at, at+size*lineBytes
	b.end = at
	return b
}

// rollcallArgs is one launch of a roll call.
type rollcallArgs struct {
	_ structs.HostLayout

	world worldWords
	block rollcallBlock
}
