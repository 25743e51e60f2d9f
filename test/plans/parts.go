package plans

import "github.com/switchyard-moe/switchyard/kernels/plan"

// InParts is what the engines do with a plan whose chunks are longer than slots: all steps for one part of every chunk, then for the next. Parts
// share scratch. With meet ranks go on to the next part when all have come to its beginning, as they do.
func InParts(p *plan.Plan, parts int, meet bool) *plan.Plan {
	b := builder{&plan.Plan{Name: p.Name + "-in-parts", Collective: p.Collective, Ranks: p.Ranks, Chunks: p.Chunks * parts, Scratch: p.Scratch, Programs: make([][]plan.Step, p.Ranks)}}
	for rank, steps := range p.Programs {
		for part := range parts {
			place := func(at plan.Place) plan.Place {
				if at.Buffer != plan.Scratch {
					at.Chunk = at.Chunk*parts + part
				}
				return at
			}
			for _, s := range steps {
				if s.To != nil {
					to := place(*s.To)
					s.To = &to
				}
				var from []plan.Place
				for _, at := range s.From {
					from = append(from, place(at))
				}
				s.From = from
				b.add(rank, s)
			}
			if !meet || part+1 == parts {
				continue
			}
			for _, do := range []plan.Kind{plan.Signal, plan.Wait} {
				for i := 1; i < p.Ranks; i++ {
					peer := (rank + i) % p.Ranks
					b.add(rank, plan.Step{Do: do, Peer: &peer, Semaphore: plan.MaxSemaphores - 1})
				}
			}
		}
	}
	return b.p
}
