package alltoallv

import (
	"fmt"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/kernels"
)

// plan is everything about one set of splits that does not depend on the buffers' addresses.
type plan struct {
	splits           Splits // a copy, to compare with
	srcBytes         int64  // how long the buffers must be
	dstBytes         int64
	sendAll, recvAll int64 // bytes that leave and reach this rank, own part left out
	largestSend      int64 // to another rank
	largestRecv      int64 // from another rank
	sendGrain        int64 // a power of two of which parts of the buffers are multiples, 0 where all are empty
	recvGrain        int64

	// routes as the selected algorithms order them: index 0 for outputs that peers cannot write, 1 for those they can.
	routes   [2]kernels.Routes
	schedule [2]kernels.Schedule
	chosen   [2]Decision
	order    [2][]int32 // the routes' own orders, where they have any
	ready    [2]bool    // these have been chosen
	rough    [2]int     // calls until the order is worked out, if it is a guess
	peers    []int64    // of routes' PeerOffsets, where there are any
	spare    []int64    // sizes that are not read

	hash       uint64
	prev, next *plan        // least recently used list
	users      atomic.Int32 // launches that still read it
}

// planner finds plans by their splits, or makes them.
type planner struct {
	*registry
	*cache
	bounds *kernels.ExchangeBounds
	rank   int
}

// of is the plan of these splits. Its order and schedule, which depend on the output, may not be chosen yet.
func (k *planner) of(sp *Splits) (*plan, error) {
	p, h := k.get(sp)
	if p != nil {
		return p, nil
	}
	if err := k.check(sp.Limits); err != nil {
		return nil, err
	}
	p = k.blank()
	if err := p.build(sp, k.rank, k.bounds.Size); err != nil {
		return nil, err
	}
	k.put(h, p)
	return p, nil
}

// ready completes the plan by an order and a schedule for an output that peers can write, or one that they cannot, and returns the index
// of that route.
func (k *planner) ready(p *plan, inPlace bool) (at int) {
	if inPlace {
		at = 1
	}
	if p.ready[at] {
		p.chosen[at].Cached = true
		if p.rough[at] > 0 {
			if p.rough[at]--; p.rough[at] == 0 {
				k.reorder(p, at, k.bounds, k.rank)
			}
		}
		return at
	}
	k.choose(p, at, k.bounds, k.rank)
	p.ready[at] = true
	return at
}

// explain is the decision about the plan, with all candidates.
func (k *planner) explain(p *plan, inPlace bool) Decision {
	at := k.ready(p, inPlace)
	d := p.chosen[at]
	d.Candidates = k.candidates(k.traffic(p, at, k.bounds, k.rank))
	return d
}

// build fills p for the splits. It keeps p's slices where they are large enough.
func (p *plan) build(s *Splits, rank, size int) error {
	r := &p.routes[0]
	r.SendBytes, r.SendOffsets = sized(r.SendBytes, size), sized(r.SendOffsets, size)
	r.RecvBytes, r.RecvOffsets = sized(r.RecvBytes, size), sized(r.RecvOffsets, size)
	elem := s.elem()
	if elem < 0 {
		return invalid("element size %d", elem)
	}
	var err error
	if p.srcBytes, err = layout("send", s.Send, s.SendDispls, elem, size, r.SendBytes, r.SendOffsets); err != nil {
		return err
	}
	if p.dstBytes, err = layout("receive", s.Recv, s.RecvDispls, elem, size, r.RecvBytes, r.RecvOffsets); err != nil {
		return err
	}
	if s.Send[rank] != s.Recv[rank] {
		return invalid("rank %d sends %d elements to itself and receives %d from itself", rank, s.Send[rank], s.Recv[rank])
	}
	if s.RecvDispls != nil {
		if a, b, found := overlapping(r.RecvBytes, r.RecvOffsets); found {
			return invalid("what rank %d receives from ranks %d and %d overlaps (splits %v, displacements %v)", rank, a, b, s.Recv, s.RecvDispls)
		}
	}
	p.sendGrain, p.recvGrain = grain(r.SendBytes, r.SendOffsets), grain(r.RecvBytes, r.RecvOffsets)
	p.sendAll, p.recvAll = -r.SendBytes[rank], -r.RecvBytes[rank]
	p.largestSend, p.largestRecv = 0, 0
	for k := range size {
		p.sendAll += r.SendBytes[k]
		p.recvAll += r.RecvBytes[k]
		if k != rank {
			p.largestSend, p.largestRecv = max(p.largestSend, r.SendBytes[k]), max(p.largestRecv, r.RecvBytes[k])
		}
	}
	if s.live() && s.PeerDispls != nil {
		return invalid("PeerDispls with splits in device memory")
	}
	if r.PeerOffsets = nil; s.PeerDispls != nil {
		p.peers, p.spare = sized(p.peers, size), sized(p.spare, size)
		r.PeerOffsets = p.peers
		if _, err := layout("send", s.Send, s.PeerDispls, elem, size, p.spare, r.PeerOffsets); err != nil {
			return fmt.Errorf("%w, as PeerDispls", err)
		}
	}
	p.splits.assign(s)
	p.routes[1], p.ready, p.rough = *r, [2]bool{}, [2]int{}
	return nil
}

// grain is the largest power of two that divides sizes and offsets of all parts that are not empty, 0 if there are none.
func grain(bytes, offsets []int64) int64 {
	all := int64(0)
	for k, n := range bytes {
		if n > 0 {
			all |= n | offsets[k]
		}
	}
	return all & -all
}

// sized is v with length n and undefined content.
func sized[T any](v []T, n int) []T {
	if cap(v) < n {
		return make([]T, n)
	}
	return v[:n]
}
