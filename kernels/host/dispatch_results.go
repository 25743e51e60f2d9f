package host

import (
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// copyResults copies what a dispatch has left on this rank.
func (f *dispatches) copyResults(a *kernels.Results) {
	failed, came := a.Failed || f.handles[a.Handle].err != nil, int64(0)
	if !failed {
		came = int64(shm.View[int32](a.Rows.Mem)[0])
	}
	for i := range a.Parts[:a.Count] {
		p := &a.Parts[i]
		columns := int64(max(p.Columns, 1))
		each, pitch := p.To.Bytes/columns, p.From.Bytes/columns
		n := each
		switch {
		case p.Row > 0:
			n = min(came*p.Row, each)
		case failed && p.Fills:
			n = 0
		}
		for c := range columns {
			to := p.To.Mem[c*each:][:each]
			copy(to[:n], p.From.Mem[c*pitch:][:pitch])
			if p.Fills {
				behind := shm.View[uint32](to[n:])
				for i := range behind {
					behind[i] = p.Behind
				}
			}
		}
	}
}
