package memory

// alignment is that of every offset the pool hands out, in bytes: what a GPU's widest
// coalesced access and cudaMalloc both give.
const alignment = 256

// pool hands out offsets. It holds no memory and knows no device: which offset a call gets is a
// pure function of the calls before it (M1).
//
// The free piece that fits best is taken. Among pieces of one size the lowest allocation
// counter wins, which is the number of the segment a piece was cut from and which splits
// inherit, then the lowest offset. A freed piece joins its free neighbours at once.
//
// Free pieces sit in a treap ordered by (size, counter, offset); all pieces of a segment sit in
// a list ordered by offset. So every call costs O(log n), and because pieces are entries of one
// slice that are used again, a pool allocates nothing once it has seen its largest number of
// pieces. The shape of the treap is random, but not the piece that it finds.
type pool struct {
	pieces []piece // pieces[0] is none
	spare  int32   // head of the unused entries, linked by next
	root   int32   // of the treap of free pieces
	segs   int32   // segments added so far: the next counter
	seed   uint32  // of the treap's priorities

	total int64 // bytes of all segments
	used  int64 // bytes of all live pieces
	live  int   // live pieces
}

type piece struct {
	off, size   int64
	seg         int32 // the allocation counter, inherited by splits
	prev, next  int32 // neighbours by offset in the segment
	left, right int32 // children in the treap, when free
	prio        uint32
	free        bool
}

// roundUp returns n rounded up to a multiple of the power of two a, or -1 when n is negative or
// the result would not fit.
func roundUp(n, a int64) int64 {
	if n < 0 || n > 1<<62 {
		return -1
	}
	return (n + a - 1) &^ (a - 1)
}

// unused returns an unused piece.
func (p *pool) unused() int32 {
	if p.spare != 0 {
		i := p.spare
		p.spare = p.pieces[i].next
		p.pieces[i] = piece{}
		return i
	}
	if len(p.pieces) == 0 {
		p.pieces = make([]piece, 1, 64)
	}
	p.pieces = append(p.pieces, piece{})
	return int32(len(p.pieces) - 1)
}

func (p *pool) drop(i int32) {
	p.pieces[i] = piece{next: p.spare}
	p.spare = i
}

// add makes n bytes from off available as the next segment and returns its number. Both must be
// multiples of alignment. Pieces never span two segments.
func (p *pool) add(off, n int64) int32 {
	seg := p.segs
	p.segs++
	p.total += n
	if n > 0 {
		i := p.unused()
		p.pieces[i].off, p.pieces[i].size, p.pieces[i].seg = off, n, seg
		p.insert(i)
	}
	return seg
}

// alloc takes a piece of at least n bytes; n must be from 0 to 1<<62. A call for 0 bytes takes
// the smallest piece there is, so that every live piece has an offset of its own. rest is the
// free piece that was cut off, or 0. ok is false, and nothing has changed, when no piece fits.
func (p *pool) alloc(n int64) (i, rest int32, ok bool) {
	need := max(roundUp(n, alignment), alignment)
	i = p.fit(need)
	if i == 0 {
		return 0, 0, false
	}
	p.remove(i)
	if p.pieces[i].size > need {
		rest = p.unused()
		b, r := &p.pieces[i], &p.pieces[rest]
		r.off, r.size, r.seg = b.off+need, b.size-need, b.seg
		r.prev, r.next = i, b.next
		if b.next != 0 {
			p.pieces[b.next].prev = rest
		}
		b.next, b.size = rest, need
		p.insert(rest)
	}
	p.used += need
	p.live++
	return i, rest, true
}

// release frees the live piece i. It returns the free piece that now holds its bytes and the
// pieces that went up in it (0 for none). Those are used again by the next call.
func (p *pool) release(i int32) (whole int32, gone [2]int32) {
	p.used -= p.pieces[i].size
	p.live--
	whole = i
	if j := p.pieces[i].next; j != 0 && p.pieces[j].free {
		p.remove(j)
		p.join(i, j)
		gone[0] = j
	}
	if j := p.pieces[i].prev; j != 0 && p.pieces[j].free {
		p.remove(j)
		p.join(j, i)
		whole, gone[1] = j, i
	}
	p.insert(whole)
	return whole, gone
}

// join appends piece j to its left neighbour i.
func (p *pool) join(i, j int32) {
	a, b := &p.pieces[i], &p.pieces[j]
	a.size += b.size
	a.next = b.next
	if b.next != 0 {
		p.pieces[b.next].prev = i
	}
	p.drop(j)
}

// largest returns the size of the largest free piece.
func (p *pool) largest() int64 {
	i := p.root
	if i == 0 {
		return 0
	}
	for p.pieces[i].right != 0 {
		i = p.pieces[i].right
	}
	return p.pieces[i].size
}

// less orders free pieces.
func (p *pool) less(i, j int32) bool {
	a, b := &p.pieces[i], &p.pieces[j]
	switch {
	case a.size != b.size:
		return a.size < b.size
	case a.seg != b.seg:
		return a.seg < b.seg
	}
	return a.off < b.off
}

// fit returns the first free piece of at least n bytes, or 0.
func (p *pool) fit(n int64) int32 {
	var best int32
	for t := p.root; t != 0; {
		if b := &p.pieces[t]; b.size >= n {
			best, t = t, b.left
		} else {
			t = b.right
		}
	}
	return best
}

func (p *pool) insert(i int32) {
	// xorshift: any spread of priorities keeps the treap flat
	s := p.seed
	if s == 0 {
		s = 2463534242
	}
	s ^= s << 13
	s ^= s >> 17
	s ^= s << 5
	p.seed = s

	b := &p.pieces[i]
	b.free, b.prio, b.left, b.right = true, s, 0, 0

	// walk down past the nodes of higher priority, then split what is below
	at := &p.root
	for *at != 0 && p.pieces[*at].prio >= s {
		if t := *at; p.less(i, t) {
			at = &p.pieces[t].left
		} else {
			at = &p.pieces[t].right
		}
	}
	l, r := &b.left, &b.right
	t := *at
	*at = i
	for t != 0 {
		if p.less(t, i) {
			*l = t
			l = &p.pieces[t].right
			t = *l
		} else {
			*r = t
			r = &p.pieces[t].left
			t = *r
		}
	}
	*l, *r = 0, 0
}

func (p *pool) remove(i int32) {
	at := &p.root
	for *at != i {
		if t := *at; p.less(i, t) {
			at = &p.pieces[t].left
		} else {
			at = &p.pieces[t].right
		}
	}
	l, r := p.pieces[i].left, p.pieces[i].right
	for l != 0 && r != 0 { // merge the two subtrees in its place
		if p.pieces[l].prio >= p.pieces[r].prio {
			*at = l
			at = &p.pieces[l].right
			l = *at
		} else {
			*at = r
			at = &p.pieces[r].left
			r = *at
		}
	}
	*at = l | r
	p.pieces[i].free = false
}
