package host

import (
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/kernels"
)

// family is what the engine has for one communicator: the layout of its control block, and the kernels of its operations.
type family interface {
	// defaults fills in what the bounds leave open.
	defaults()
	layout() kernels.Layout
	// open prepares this rank, whose control block is clear; ready is called when all ranks have opened.
	open(e *Engine)
	ready(e *Engine) kernels.Traits
	// run is the kernel of op, one of the family's operations. Launches of one port never overlap.
	run(p *port, op kernels.Operation) error
}

// entry is a family in the table.
type entry struct {
	operations []string // the names of its operations, which no other family has; at most maxOperations
	// open makes a family of the bounds f, nil when f belongs to another.
	open func(f kernels.Family, offset int64) family
}

// families is the table of families, one line each. It has at most maxFamilies.
func families() []entry {
	return []entry{
		entryOf(newExchanges, "alltoallv", "barrier"),
		entryOf(newReductions, names(kernels.ReduceScatter, kernels.AllGather, kernels.AllReduce, kernels.Broadcast, kernels.AllToAll)...),
		entryOf(newDispatches, names(kernels.OpDispatch, kernels.OpRedispatch, kernels.OpCombine, kernels.OpCombineBackward, kernels.OpDispatchBackward, kernels.OpResults, kernels.OpExpand, kernels.OpFold)...),
		entryOf(newTransfers, append(names(kernels.TransferKinds()...), kernels.MessageOperations()...)...),
	}
}

func entryOf[B kernels.Family, F family](open func(bounds B, offset int64) F, operations ...string) entry {
	return entry{operations, func(f kernels.Family, offset int64) family {
		if b, ok := f.(B); ok {
			return open(b, offset)
		}
		return nil
	}}
}

func names[N fmt.Stringer](values ...N) (list []string) {
	for _, v := range values {
		list = append(list, v.String())
	}
	return list
}

// familyOf is the engine's family of the bounds f, and its place in the table. offset is that of the control block.
func familyOf(f kernels.Family, offset int64) (x family, place int, err error) {
	for i, entry := range families() {
		if x := entry.open(f, offset); x != nil {
			return x, i, nil
		}
	}
	return nil, 0, fmt.Errorf("kernels: the host engine has no %s", f.Family())
}

// opcode names an operation in a word: the place of its family in the table, and its place among the names there.
type opcode uint16

const (
	numberBits    = 4
	opcodeBits    = 8 + numberBits
	maxOperations = 1 << numberBits
	maxFamilies   = 1 << (opcodeBits - numberBits)
)

// opcodeOf is an operation of the family at a place of the table, by its name among those of the family.
func opcodeOf(place int, names []string, name string) (code opcode, ok bool) {
	number := slices.Index(names, name)
	return opcode(place<<numberBits | number), number >= 0
}

func (o opcode) String() string {
	family, number := int(o>>numberBits), int(o%maxOperations)
	if table := families(); family < len(table) && number < len(table[family].operations) {
		return table[family].operations[number]
	}
	return fmt.Sprintf("call of kind %d", uint16(o))
}
