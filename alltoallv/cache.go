package alltoallv

import "sync/atomic"

// cache keeps plans by their splits, least recently used ones leave first. It belongs to one rank: a hit says
// nothing about other ranks and needs nothing from them (X2).
type cache struct {
	limit        int
	plans        map[uint64]*plan // equality is checked on a hit; of two plans with one hash the newer stays
	root         plan             // sentinel: root.next is the most recently used
	hits, misses atomic.Uint64
}

func newCache(limit int) *cache {
	c := &cache{limit: limit, plans: make(map[uint64]*plan, limit)}
	c.root.prev, c.root.next = &c.root, &c.root
	return c
}

func (c *cache) unlink(p *plan) { p.prev.next, p.next.prev = p.next, p.prev }

func (c *cache) pushFront(p *plan) {
	p.prev, p.next = &c.root, c.root.next
	p.prev.next, p.next.prev = p, p
}

// get returns the plan of these splits, nil when there is none.
func (c *cache) get(s *Splits) (*plan, uint64) {
	if p := c.root.next; p != &c.root && p.splits.equal(s) {
		c.hits.Add(1)
		return p, p.hash
	}
	h := s.hash()
	p := c.plans[h]
	if p == nil || !p.splits.equal(s) {
		c.misses.Add(1)
		return nil, h
	}
	c.hits.Add(1)
	c.unlink(p)
	c.pushFront(p)
	return p, h
}

// blank returns a plan to build in: one that has to leave and that no launch reads any more, or a new one.
func (c *cache) blank() *plan {
	if len(c.plans) >= c.limit {
		p := c.root.prev
		c.unlink(p)
		delete(c.plans, p.hash)
		if p.users.Load() == 0 {
			return p
		}
	}
	return new(plan)
}

func (c *cache) put(h uint64, p *plan) {
	if old := c.plans[h]; old != nil {
		c.unlink(old)
	}
	p.hash = h
	c.plans[h] = p
	c.pushFront(p)
}
