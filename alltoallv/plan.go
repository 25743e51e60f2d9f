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

	// routes as the selected algorithms order them: index 0 for outputs that peers cannot write, 1 for those they can.
	routes   [2]kernels.Routes
	schedule [2]kernels.Schedule
	chosen   [2]Decision
	order    [2][]int32 // the routes' own orders, where they have any

	hash       uint64
	prev, next *plan        // least recently used list
	users      atomic.Int32 // launches that still read it
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
		r.PeerOffsets = make([]int64, size)
		if _, err := layout("send", s.Send, s.PeerDispls, elem, size, make([]int64, size), r.PeerOffsets); err != nil {
			return fmt.Errorf("%w, as PeerDispls", err)
		}
	}
	p.splits.assign(s)
	p.routes[1] = *r
	return nil
}

func sized(v []int64, n int) []int64 {
	if cap(v) < n {
		return make([]int64, n)
	}
	return v[:n]
}
