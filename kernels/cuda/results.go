package cuda

import (
	"fmt"
	"math"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// addResults appends the copy of what a dispatch has left. It begins when all before it on the stream has ended, or while the dispatch runs. The
// kernel is set up while the one in front of it runs if there is room for its blocks next to that many of the other; 0: it waits.
func (x *dispatches) addResults(p *port, r *kernels.Results, others int) error {
	l, err := x.call(p, &kernels.DispatchCall{Op: kernels.OpDispatch, Handle: r.Handle, Tokens: r.Tokens, Blocks: r.Blocks, Phase: kernels.Both})
	if err != nil {
		return err
	}
	if r.Taken && l.takesBeside() && l.tells() {
		l.base.mode |= dispatchTold // a kernel in front has counted the call
		return l.takeResults(&l.base, r)
	}
	a, tiles, err := x.results(p, r)
	if err != nil {
		return err
	}
	blocks := x.k.byDefault
	if r.Blocks > 0 {
		blocks = min(r.Blocks, x.k.blocks)
	}
	const each = resultThreads / 32 // a tile for each warp
	blocks = max(1, int(min(int64(blocks), (tiles+each-1)/each)))
	var flags cuda.LaunchFlags
	if others > 0 && others+blocks <= x.k.blocks {
		flags = p.e.flags
	}
	p.batch.Launch(0, cuda.Launch{
		Function: x.k.results, Grid: [3]uint32{uint32(blocks), 1, 1}, Block: [3]uint32{resultThreads, 1, 1}, Flags: flags, Args: cuda.BytesOf(&a),
	})
	return nil
}

// takeResults appends the same for the dispatch in front of it. It begins while that runs, takes rows as they come, and counts the call.
func (l *dispatchCall) takeResults(call *dispatchArgs, r *kernels.Results) error {
	a, _, err := l.results(l.p, r)
	if err != nil {
		return err
	}
	take := takeResultArgs{call: *call, results: a}
	if r.Count > 0 && r.Parts[0].Rows {
		take.rows = 1
	}
	for i := range r.Parts[:r.Count] { // what is filled behind the last row is so when all blocks know whether there are rows
		if p := &r.Parts[i]; p.Row == 0 || p.Columns > 1 || p.Fills {
			break
		}
		take.taken++
	}
	l.p.batch.Launch(0, cuda.Launch{
		Function: l.k.takeResults, Grid: [3]uint32{uint32(l.taking()), 1, 1}, Block: [3]uint32{takeResultThreads, 1, 1},
		Flags: l.p.e.flags, Args: cuda.BytesOf(&take),
	})
	return nil
}

// results are the arguments of a copy, and how many tiles it has at most.
func (x *dispatches) results(p *port, r *kernels.Results) (a resultArgs, tiles int64, err error) {
	if r.Handle < 0 || r.Handle >= len(x.m.Handles) {
		return a, 0, fmt.Errorf("kernels: results: handle %d of %d", r.Handle, len(x.m.Handles))
	}
	s, control := &p.e.space, x.m.Handles[r.Handle].State.Place
	a.rows = uint64(r.Rows.Ptr)
	if !r.Failed { // else there is no address, which says so
		a.fault = uint64(s.Addr(s.Rank, control)) + controlFault
	}
	for i := range r.Parts[:r.Count] {
		from := &r.Parts[i]
		columns := int64(max(from.Columns, 1))
		part := resultPart{
			to: uint64(from.To.Ptr), from: uint64(from.From.Ptr), row: uint64(from.Row), bytes: uint64(from.To.Bytes / columns),
			pitch: uint64(from.From.Bytes / columns), columns: uint32(columns), behind: from.Behind,
		}
		if from.Fills || from.State {
			part.fills = 1
		}
		if from.State { // no row has arrived, and no choice has a place
			b := x.block(0)
			arrived := part
			arrived.bytes = uint64(b.places - b.arrived)
			a.add(arrived)
			part.to, part.from, part.bytes = part.to+arrived.bytes, part.from+arrived.bytes, part.bytes-arrived.bytes
			part.behind = math.MaxUint32
		}
		a.add(part)
	}
	for i := range a.parts[:a.count] {
		part := &a.parts[i]
		tiles += int64(part.columns) * ((int64(part.bytes) + kernels.LineBytes - 1 + tileBytes - 1) / tileBytes)
	}
	return a, tiles, nil
}

func (a *resultArgs) add(p resultPart) {
	a.parts[a.count] = p
	a.count++
}
