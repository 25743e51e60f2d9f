package memory

import (
	"fmt"
	"math/rand/v2"
	"sort"
	"testing"

	"github.com/stretchr/testify/require"
)

// check verifies every invariant of the pool.
func (p *pool) check(t testing.TB) {
	t.Helper()
	free := make(map[int32]bool)
	var walk func(i int32, high uint32) int
	var last int32
	walk = func(i int32, high uint32) int {
		if i == 0 {
			return 0
		}
		b := &p.pieces[i]
		require.True(t, b.free, "piece %d of the tree is live", i)
		require.LessOrEqual(t, b.prio, high)
		l := walk(b.left, b.prio)
		if last != 0 {
			require.True(t, p.less(last, i), "tree order")
		}
		last = i
		free[i] = true
		return max(l, walk(b.right, b.prio)) + 1
	}
	walk(p.root, ^uint32(0))

	unused := make(map[int32]bool)
	for i := p.spare; i != 0; i = p.pieces[i].next {
		require.False(t, unused[i], "spare list loops")
		unused[i] = true
	}
	var all []piece
	var used int64
	live := 0
	for i := int32(1); i < int32(len(p.pieces)); i++ {
		if unused[i] {
			continue
		}
		b := p.pieces[i]
		require.Equal(t, free[i], b.free, "piece %d", i)
		require.Positive(t, b.size)
		require.Zero(t, b.size%alignment)
		if !b.free {
			live++
			used += b.size
		}
		if b.next != 0 {
			n := p.pieces[b.next]
			require.Equal(t, i, n.prev)
			require.Equal(t, b.off+b.size, n.off)
			require.Equal(t, b.seg, n.seg, "neighbours share their counter")
			require.False(t, b.free && n.free, "free neighbours were not joined")
		}
		all = append(all, b)
	}
	require.Equal(t, live, p.live)
	require.Equal(t, used, p.used)
	sort.Slice(all, func(i, j int) bool { return all[i].off < all[j].off })
	var total int64
	for i, b := range all {
		total += b.size
		if i > 0 {
			require.GreaterOrEqual(t, b.off, all[i-1].off+all[i-1].size, "pieces overlap")
		}
	}
	require.Equal(t, p.total, total)
}

// plainPool is the pool's rule written down without any structure: the reference.
type plainPool struct {
	free []span // in no order
}

type span struct {
	seg     int32
	off, n  int64
	counter int32
}

func (p *plainPool) add(seg int32, off, n int64) {
	if n > 0 {
		p.free = append(p.free, span{seg, off, n, seg})
	}
}

func (p *plainPool) alloc(n int64) (span, bool) {
	need := max((n+alignment-1)/alignment*alignment, alignment)
	best := -1
	for i, s := range p.free {
		if s.n < need {
			continue
		}
		if best >= 0 {
			b := p.free[best]
			if b.n < s.n || b.n == s.n && (b.counter < s.counter || b.counter == s.counter && b.off < s.off) {
				continue
			}
		}
		best = i
	}
	if best < 0 {
		return span{}, false
	}
	s := p.free[best]
	p.free = append(p.free[:best], p.free[best+1:]...)
	if s.n > need {
		p.free = append(p.free, span{s.seg, s.off + need, s.n - need, s.counter})
	}
	s.n = need
	return s, true
}

func (p *plainPool) release(s span) {
	for again := true; again; {
		again = false
		for i, f := range p.free {
			if f.seg == s.seg && (f.off+f.n == s.off || s.off+s.n == f.off) {
				s.off, s.n = min(s.off, f.off), s.n+f.n
				p.free = append(p.free[:i], p.free[i+1:]...)
				again = true
				break
			}
		}
	}
	p.free = append(p.free, s)
}

// program is a sequence of pool calls, decoded from bytes so that a fuzzer can write it.
type program []byte

// run makes the calls on a fresh pool, whose segments begin at base, and on the plain one, and returns where
// each allocation went.
func (prog program) run(t testing.TB, base int64, seed uint32, check bool) (offs []int64) {
	p := pool{seed: seed}
	var ref plainPool
	grown := base
	grow := func(n int64) {
		ref.add(p.add(grown, n), grown, n)
		grown += n
	}
	grow(1 << 16)
	type pair struct {
		i int32
		s span
	}
	var live []pair
	for len(prog) >= 3 {
		op, arg := prog[0], int64(prog[1])<<8|int64(prog[2])
		prog = prog[3:]
		switch {
		case op < 130 || len(live) == 0 && op < 250:
			n := arg
			if op%3 == 0 {
				n = arg % 1024 // small sizes make ties
			}
			i, rest, ok := p.alloc(n)
			s, refOK := ref.alloc(n)
			require.Equal(t, refOK, ok)
			if !ok {
				offs = append(offs, -1)
				break
			}
			b := p.pieces[i]
			require.Equal(t, s, span{b.seg, b.off, b.size, b.seg}, "best fit of %d", n)
			require.GreaterOrEqual(t, b.size, n)
			require.Zero(t, b.off%alignment)
			if rest != 0 {
				require.Equal(t, b.off+b.size, p.pieces[rest].off)
			}
			live = append(live, pair{i, s})
			offs = append(offs, b.off-base)
		case op < 250:
			k := int(arg) % len(live)
			before := p.pieces[live[k].i]
			whole, gone := p.release(live[k].i)
			w := p.pieces[whole]
			require.True(t, w.free && w.off <= before.off && w.off+w.size >= before.off+before.size)
			require.NotContains(t, gone, whole)
			ref.release(live[k].s)
			live[k] = live[len(live)-1]
			live = live[:len(live)-1]
		default:
			grow(arg &^ (alignment - 1))
		}
		if check {
			p.check(t)
		}
	}
	// everything freed, every segment is one piece again
	for _, l := range live {
		p.release(l.i)
	}
	p.check(t)
	require.Zero(t, p.used)
	nodes := 0
	for i := range p.pieces {
		if p.pieces[i].free {
			nodes++
		}
	}
	segments := 0
	seen := make(map[int32]bool)
	for _, b := range p.pieces {
		if b.free && !seen[b.seg] {
			seen[b.seg] = true
			segments++
		}
	}
	require.Equal(t, segments, nodes, "segments did not become whole again")
	return offs
}

func randomProgram(r *rand.Rand, n int) program {
	prog := make(program, 3*n)
	for i := range prog {
		prog[i] = byte(r.Uint32())
	}
	return prog
}

func TestM1_PoolMatchesThePlainRule(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		prog := randomProgram(r, 300)
		prog.run(t, 0, 0, true)
	}
}

func TestM1_OffsetsDependOnTheCallsAlone(t *testing.T) {
	for seed := range uint64(20) {
		prog := randomProgram(rand.New(rand.NewPCG(seed, 2)), 2000)
		// other addresses and another shape of the tree
		require.Equal(t, prog.run(t, 0, 0, false), prog.run(t, 1<<30, 12345, false))
	}
}

func FuzzPool(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 3))
	for _, n := range []int{0, 1, 7, 50, 200} {
		f.Add([]byte(randomProgram(r, n)))
	}
	f.Add([]byte{0, 0, 0, 200, 0, 0, 255, 4, 0, 3, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 3*200 {
			return
		}
		prog := program(b)
		require.Equal(t, prog.run(t, 0, 0, true), prog.run(t, 1<<40, 99, false))
	})
}

func TestPoolEdges(t *testing.T) {
	var p pool
	_, _, ok := p.alloc(0)
	require.False(t, ok, "an empty pool has nothing")
	require.Zero(t, p.largest())

	p.add(1024, 1024)
	a, _, ok := p.alloc(0)
	require.True(t, ok)
	b, _, ok := p.alloc(0)
	require.True(t, ok)
	require.Equal(t, int64(1024), p.pieces[a].off)
	require.Equal(t, int64(1280), p.pieces[b].off, "buffers of no bytes have offsets of their own")
	require.Equal(t, int64(512), p.largest())
	_, _, ok = p.alloc(513)
	require.False(t, ok)
	c, rest, ok := p.alloc(512)
	require.True(t, ok)
	require.Zero(t, rest)
	p.release(a)
	p.release(c)
	p.release(b)
	p.check(t)
	require.Equal(t, int64(1024), p.largest())

	for _, n := range []int64{-1, 1<<62 + 1, 1<<63 - 1} {
		require.Equal(t, int64(-1), roundUp(n, alignment), n)
	}
	require.Equal(t, int64(1<<62), roundUp(1<<62, alignment))
}

func TestPoolTiesGoToTheOldestSegment(t *testing.T) {
	var p pool
	// the second segment lies below the first: the counter decides, not the place
	p.add(1<<20, 1024)
	p.add(0, 1024)
	i, _, ok := p.alloc(1024)
	require.True(t, ok)
	require.Equal(t, int64(1<<20), p.pieces[i].off)
	require.Equal(t, int32(0), p.pieces[i].seg)
	j, rest, ok := p.alloc(256)
	require.True(t, ok)
	require.Equal(t, int64(0), p.pieces[j].off)
	require.Equal(t, int32(1), p.pieces[rest].seg, "a split inherits the counter")
}

func TestPoolAllocatesNothingWhenWarm(t *testing.T) {
	var p pool
	p.add(0, 1<<24)
	var live [256]int32
	r := rand.New(rand.NewPCG(4, 4))
	round := func() {
		for i := range live {
			live[i], _, _ = p.alloc(int64(r.IntN(20000)))
		}
		r.Shuffle(len(live), func(i, j int) { live[i], live[j] = live[j], live[i] })
		for _, i := range live {
			p.release(i)
		}
	}
	for range 20 {
		round()
	}
	require.Zero(t, testing.AllocsPerRun(20, round))
}

func BenchmarkPool(b *testing.B) {
	for _, pieces := range []int{100, 10_000} {
		b.Run(fmt.Sprint(pieces), func(b *testing.B) {
			var p pool
			p.add(0, 1<<40)
			r := rand.New(rand.NewPCG(5, 5))
			live := make([]int32, pieces)
			for i := range live {
				live[i], _, _ = p.alloc(r.Int64N(1 << 20))
			}
			b.ReportAllocs()
			for b.Loop() {
				k := r.IntN(pieces)
				p.release(live[k])
				live[k], _, _ = p.alloc(r.Int64N(1 << 20))
			}
		})
	}
}
