package plan

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
)

// Checked is a plan that has passed Check. It is not changed any more.
type Checked struct {
	Plan   Plan
	Digest uint64
	// Semaphores is how many there are from a rank to another.
	Semaphores int
	// Programs are the steps of each rank with all that an engine needs to know.
	Programs [][]Op
	// RoundsOnce says that no reduction takes the result of another, so that elements are rounded once.
	RoundsOnce bool
	// Read and Written say of each rank whether others read its input, and whether they touch its output.
	Read, Written []bool
}

// Op is a step that has been checked.
type Op struct {
	Step
	// Class is the chunk in its block of what the step moves, from which its length follows.
	Class int
	// Final says that a reduction has the elements of all ranks: an average is divided there.
	Final bool
}

// Chunks is how many chunks a buffer of a rank has.
func (c *Checked) Chunks(b Buffer) int { return c.Plan.chunks(b) }

// value is what lies in a chunk: the input chunks of some ranks, combined as how says. Two values with the same text have the same bits.
type value struct {
	chunk int
	ranks uint64
	how   string
}

func (v *value) String() string {
	if bits.OnesCount64(v.ranks) == 1 {
		return fmt.Sprintf("input:%d of rank %d", v.chunk, bits.TrailingZeros64(v.ranks))
	}
	return fmt.Sprintf("input:%d of ranks %s", v.chunk, v.how)
}

// access is a step that has touched a chunk.
type access struct{ rank, step int }

// cell is a chunk of a rank during the check: its value, its last writer, and who has read it since.
type cell struct {
	value *value
	wrote *access
	reads []access
}

// checker runs a plan once. The order in which signals allow steps to run is kept as vectors: before[r][q] is how many steps of rank q come
// before the next step of rank r.
type checker struct {
	p       *Plan
	out     *Checked
	cells   [][Buffers][]cell
	before  [][]int
	signals map[[3]int][][]int // by source, destination, semaphore: what comes before each signal
	waits   map[[3]int]int
	next    []int
}

// Check proves that a plan does what it says, or says why not.
func Check(p *Plan) (*Checked, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	digest, err := p.digest()
	if err != nil {
		return nil, err
	}
	c := &checker{p: p, signals: map[[3]int][][]int{}, waits: map[[3]int]int{}, next: make([]int, p.Ranks),
		out: &Checked{RoundsOnce: true, Plan: *p, Digest: digest, Programs: make([][]Op, p.Ranks), Read: make([]bool, p.Ranks), Written: make([]bool, p.Ranks)}}
	if err := c.paired(); err != nil {
		return nil, err
	}
	for rank := range p.Ranks {
		var cells [Buffers][]cell
		for b := range Buffers {
			cells[b] = make([]cell, p.chunks(b))
		}
		for i := range cells[Input] {
			cells[Input][i].value = &value{i, 1 << rank, fmt.Sprint(rank)}
		}
		c.cells = append(c.cells, cells)
		c.before = append(c.before, make([]int, p.Ranks))
		c.out.Programs[rank] = make([]Op, len(p.Programs[rank]))
	}
	for moved := true; moved; {
		moved = false
		for rank, steps := range p.Programs {
			for c.next[rank] < len(steps) {
				done, err := c.run(rank, c.next[rank], steps[c.next[rank]])
				if err != nil {
					return nil, err
				}
				if !done {
					break
				}
				c.next[rank]++
				moved = true
			}
		}
	}
	if err := c.cycle(); err != nil {
		return nil, err
	}
	if err := c.ended(); err != nil {
		return nil, err
	}
	if err := c.covered(); err != nil {
		return nil, err
	}
	return c.out, nil
}

// at names a step in messages.
func (c *checker) at(rank, step int) string {
	return fmt.Sprintf("rank %d, step %d (%v)", rank, step, c.p.Programs[rank][step])
}

// paired checks that every signal is waited for: one that is left would be taken by the next call.
func (c *checker) paired() error {
	count := map[[3]int][2]int{}
	var keys [][3]int
	for rank, steps := range c.p.Programs {
		for _, s := range steps {
			var key [3]int
			switch s.Do {
			case Signal:
				key = [3]int{rank, *s.Peer, s.Semaphore}
			case Wait:
				key = [3]int{*s.Peer, rank, s.Semaphore}
			default:
				continue
			}
			n, known := count[key]
			if !known {
				keys = append(keys, key)
			}
			n[btoi(s.Do == Wait)]++
			count[key] = n
			c.out.Semaphores = max(c.out.Semaphores, s.Semaphore+1)
		}
	}
	for _, k := range keys {
		if n := count[k]; n[0] != n[1] {
			return invalid("%q: rank %d signals semaphore %d of rank %d %d times, which waits for it %d times", c.p.Name, k[0], k[2], k[1], n[0], n[1])
		}
	}
	return nil
}

// run does a step, or says that its signal has not come.
func (c *checker) run(rank, i int, s Step) (done bool, err error) {
	c.out.Programs[rank][i].Step = s
	own := c.before[rank]
	switch s.Do {
	case Wait:
		key := [3]int{*s.Peer, rank, s.Semaphore}
		n := c.waits[key]
		if n == len(c.signals[key]) {
			return false, nil
		}
		for q, steps := range c.signals[key][n] {
			own[q] = max(own[q], steps)
		}
		c.waits[key]++
		own[rank] = i + 1
		return true, nil
	case Signal:
		own[rank] = i + 1
		key := [3]int{rank, *s.Peer, s.Semaphore}
		c.signals[key] = append(c.signals[key], slices.Clone(own))
		return true, nil
	}
	v := &value{chunk: -1}
	var how []string
	for _, from := range s.From {
		x, err := c.read(rank, i, from)
		if err != nil {
			return false, err
		}
		switch {
		case v.chunk >= 0 && v.chunk != x.chunk:
			return false, invalid("%q: %s combines chunk %d of the input with chunk %d", c.p.Name, c.at(rank, i), v.chunk, x.chunk)
		case v.ranks&x.ranks != 0:
			return false, invalid("%q: %s has the input of rank %d twice", c.p.Name, c.at(rank, i), bits.TrailingZeros64(v.ranks&x.ranks))
		}
		v.chunk, v.ranks = x.chunk, v.ranks|x.ranks
		how = append(how, x.how)
	}
	v.how = how[0]
	if len(how) > 1 {
		v.how = "(" + strings.Join(how, " + ") + ")"
	}
	if err := c.write(rank, i, *s.To, v); err != nil {
		return false, err
	}
	own[rank] = i + 1
	op := &c.out.Programs[rank][i]
	final := bits.OnesCount64(v.ranks) == c.p.Ranks
	c.out.RoundsOnce = c.out.RoundsOnce && (s.Do != Reduce || final)
	op.Class, op.Final = v.chunk%c.p.Chunks, s.Do == Reduce && final
	return true, nil
}

// holder is the rank that has a place, for a step of rank.
func holder(rank int, at Place) int {
	if at.Rank >= 0 {
		return at.Rank
	}
	return rank
}

func (c *checker) cell(rank int, at Place) *cell {
	return &c.cells[holder(rank, at)][at.Buffer][at.Chunk]
}

// ordered says whether an access comes before the next step of a rank.
func (c *checker) ordered(a access, rank int) bool {
	return a.rank == rank || c.before[rank][a.rank] > a.step
}

func (c *checker) read(rank, i int, at Place) (*value, error) {
	x := c.cell(rank, at)
	if at.Buffer != Input && x.value == nil {
		return nil, invalid("%q: %s reads %v of rank %d, which nothing has written before", c.p.Name, c.at(rank, i), At(at.Buffer, at.Chunk), holder(rank, at))
	}
	if x.wrote != nil && !c.ordered(*x.wrote, rank) {
		return nil, c.race(rank, i, *x.wrote, at)
	}
	x.reads = append(x.reads, access{rank, i})
	if at.Rank >= 0 {
		c.out.Read[at.Rank] = c.out.Read[at.Rank] || at.Buffer == Input
		c.out.Written[at.Rank] = c.out.Written[at.Rank] || at.Buffer == Output
	}
	return x.value, nil
}

func (c *checker) write(rank, i int, at Place, v *value) error {
	x := c.cell(rank, at)
	if x.wrote != nil && !c.ordered(*x.wrote, rank) {
		return c.race(rank, i, *x.wrote, at)
	}
	for _, a := range x.reads {
		if a != (access{rank, i}) && !c.ordered(a, rank) {
			return c.race(rank, i, a, at)
		}
	}
	x.value, x.wrote, x.reads = v, &access{rank, i}, x.reads[:0]
	if at.Rank >= 0 {
		c.out.Written[at.Rank] = c.out.Written[at.Rank] || at.Buffer == Output
	}
	return nil
}

func (c *checker) race(rank, i int, other access, at Place) error {
	return invalid("%q: a race for %v of rank %d: no signal orders %s and %s", c.p.Name, At(at.Buffer, at.Chunk), holder(rank, at), c.at(other.rank, other.step), c.at(rank, i))
}

// cycle finds ranks that wait for each other when no rank can go on.
func (c *checker) cycle() error {
	for rank, i := range c.next {
		if i == len(c.p.Programs[rank]) {
			continue
		}
		// The peer of a wait without a signal has not ended, because every wait has its signal.
		var way []int
		for r := rank; ; r = *c.p.Programs[r][c.next[r]].Peer {
			if at := slices.Index(way, r); at >= 0 {
				way = way[at:]
				break
			}
			way = append(way, r)
		}
		var parts []string
		for _, r := range way {
			parts = append(parts, c.at(r, c.next[r]))
		}
		return invalid("%q: a cycle: each waits for the next, and the last for the first: %s", c.p.Name, strings.Join(parts, "; "))
	}
	return nil
}

// ended checks that others are done with a rank's input and output when its steps are.
func (c *checker) ended() error {
	for rank := range c.p.Ranks {
		for _, b := range []Buffer{Input, Output} {
			for chunk, x := range c.cells[rank][b] {
				touched := x.reads
				if x.wrote != nil {
					touched = append(touched, *x.wrote)
				}
				for _, a := range touched {
					if !c.ordered(a, rank) {
						return invalid("%q: %s touches %v of rank %d, which may have ended: no signal tells it", c.p.Name, c.at(a.rank, a.step), At(b, chunk), rank)
					}
				}
			}
		}
	}
	return nil
}

// want is what has to lie in a chunk of a rank's output: an input chunk of one rank, or of all.
func (c *checker) want(rank, chunk int) (of int, ranks uint64) {
	all := uint64(1)<<c.p.Ranks - 1
	from, class := chunk/c.p.Chunks, chunk%c.p.Chunks
	switch c.p.Collective {
	case ReduceScatter:
		return rank*c.p.Chunks + class, all
	case AllGather:
		return class, 1 << from
	case AllToAll:
		return rank*c.p.Chunks + class, 1 << from
	}
	return chunk, all
}

// covered checks what lies in the outputs.
func (c *checker) covered() error {
	for rank := range c.p.Ranks {
		for chunk, x := range c.cells[rank][Output] {
			of, ranks := c.want(rank, chunk)
			want := fmt.Sprintf("input:%d of all ranks", of)
			if !c.p.Collective.Reduces() {
				want = (&value{of, ranks, ""}).String()
			}
			switch v := x.value; {
			case v == nil:
				return invalid("%q: a hole: nothing writes output:%d of rank %d, which should be %s", c.p.Name, chunk, rank, want)
			case v.chunk != of || v.ranks != ranks:
				return invalid("%q: output:%d of rank %d is %v, and should be %s", c.p.Name, chunk, rank, v, want)
			case c.p.Collective == AllReduce && rank > 0 && v.how != c.cells[0][Output][chunk].value.how:
				return invalid("%q: output:%d is combined as %s on rank %d and as %s on rank 0: their bits may differ", c.p.Name, chunk, v.how, rank, c.cells[0][Output][chunk].value.how)
			}
		}
	}
	return nil
}
