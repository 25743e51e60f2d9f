package cuda

import (
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// expandKernels are those between rows of tokens and rows of choices. Those by number type are indexed by it.
type expandKernels struct {
	places, rows cuda.Function
	fold         [3]cuda.Function
}

func (k *expandKernels) load(e *Engine) error {
	return e.loadModule("expand", entry{"expand_places", &k.places}, entry{"expand_rows", &k.rows},
		entry{"fold_rows_f32", &k.fold[0]}, entry{"fold_rows_bf16", &k.fold[1]}, entry{"fold_rows_f16", &k.fold[2]})
}

// addExpand appends the numbering of choices, and the copy of rows behind it.
func (x *dispatches) addExpand(p *port, a *kernels.Expand) error {
	if err := aligned(kernels.OpExpand, &a.Rows, &a.ToRows); err != nil {
		return err
	}
	tokens, experts := a.Tokens(), a.Experts()
	args := expandArgs{
		indices: uint64(a.Indices.Ptr), counts: uint64(a.Counts.Ptr), slots: uint64(a.Slots.Ptr), rows: uint64(a.Rows.Ptr), toRows: uint64(a.ToRows.Ptr),
		tokens: uint32(tokens), topK: uint32(a.TopK), experts: uint32(experts), align: uint32(a.Align), length: uint32(a.Length),
	}
	if a.Length > 0 {
		args.rowBytes = uint32(a.ToRows.Bytes / int64(a.Length))
		args.scaleBytes = uint32(a.ToScales.Bytes / int64(a.Length))
	}
	if args.scaleBytes > 0 {
		args.scales, args.toScales = uint64(a.Scales.Ptr), uint64(a.ToScales.Ptr)
	}
	if a.ToWeights.Bytes > 0 {
		args.weights, args.toWeights = uint64(a.Weights.Ptr), uint64(a.ToWeights.Ptr)
	}
	if a.Rooms.Bytes > 0 {
		args.rooms = uint64(a.Rooms.Ptr)
	}
	if tokens > 0 || args.rooms != 0 {
		p.batch.Launch(0, cuda.Launch{
			Function: x.expands.places, Grid: [3]uint32{uint32(experts), 1, 1}, Block: [3]uint32{expandPlaceThreads, 1, 1}, Args: cuda.BytesOf(&args),
		})
	}
	tiles := int64(args.rowBytes+tileBytes-1) / tileBytes * int64(tokens+experts*(a.Align-1))
	if tiles > 0 && a.Length > 0 {
		p.batch.Launch(0, cuda.Launch{
			Function: x.expands.rows, Grid: [3]uint32{x.alone(p, a.Blocks, (tiles*32+expandThreads-1)/expandThreads), 1, 1},
			Block: [3]uint32{expandThreads, 1, 1}, Args: cuda.BytesOf(&args),
		})
	}
	return nil
}

// addFold appends the sums of rows.
func (x *dispatches) addFold(p *port, a *kernels.Fold) error {
	if err := aligned(kernels.OpFold, &a.Rows, &a.Sums); err != nil {
		return err
	}
	tokens := a.Tokens()
	if tokens == 0 {
		return nil
	}
	args := foldArgs{
		rows: uint64(a.Rows.Ptr), slots: uint64(a.Slots.Ptr), sums: uint64(a.Sums.Ptr), rowBytes: uint32(a.Sums.Bytes / int64(tokens)),
		tokens: uint32(tokens), topK: uint32(a.TopK), length: uint32(a.Length()),
	}
	if a.ToWeights.Bytes > 0 {
		args.weights, args.toWeights = uint64(a.Weights.Ptr), uint64(a.ToWeights.Ptr)
	}
	p.batch.Launch(0, cuda.Launch{
		Function: x.expands.fold[numberKind(a.Type)], Grid: [3]uint32{x.alone(p, a.Blocks, int64(tokens)), 1, 1},
		Block: [3]uint32{expandThreads, 1, 1}, Args: cuda.BytesOf(&args),
	})
	return nil
}

// blocksEach is how many blocks of a kernel that waits for nobody run on a multiprocessor.
const blocksEach = 8

// alone is the blocks of a launch that waits for nobody and has work for most of them: on all multiprocessors, unless its caller says how many.
func (x *dispatches) alone(p *port, bound int, most int64) uint32 {
	of := p.e.multiprocessors
	if bound > 0 {
		of = min(bound, of)
	}
	return uint32(max(1, min(most, int64(blocksEach*of))))
}
