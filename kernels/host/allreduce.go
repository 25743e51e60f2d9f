package host

import (
	"sync"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/kernels"
)

// reductions are the launches of one communicator. It is a family.
type reductions struct {
	common
	c ReduceBlock
}

// The defaults of reductions. Slots are smaller where they would exceed their bound together.
const (
	defaultOneShotBytes  = 16 << 10
	defaultReduceSlots   = 4
	defaultReduceStaging = 16 << 20
	maxReduceSlotBytes   = 64 << 10
	maxPlanSlotBytes     = 256 << 10
	minPlanSlotBytes     = 4 << 10
)

func newReductions(c *kernels.ReduceBounds, offset int64) family {
	if c.Hosts != nil {
		return newReductionsAcross(c, offset)
	}
	return &reductions{c: ReduceBlock{c, offset}}
}

func reduceDefaults(c *kernels.ReduceBounds) {
	c.OneShotBytes, c.Blocks = kernels.Default(c.OneShotBytes, defaultOneShotBytes), 0
	c.DefaultSlots(defaultReduceSlots, defaultReduceStaging, maxReduceSlotBytes, c.Size+1)
	c.Plans.DefaultSlots(c.StagingBytes, maxPlanSlotBytes, minPlanSlotBytes)
}

func (f *reductions) defaults() { reduceDefaults(f.c.ReduceBounds) }

func (f *reductions) layout() kernels.Layout {
	return kernels.Layout{Bytes: f.c.Bytes(), Zero: f.c.ControlBytes()}
}

func (f *reductions) open(*Engine) {}

func (f *reductions) run(p *port, op kernels.Operation) error {
	x := reduceScratch.Get().(*reducing)
	x.c, x.offset = &f.c, f.c.Offset
	err := x.do(p, op, x)
	x.reset()
	reduceScratch.Put(x)
	return err
}

// reduceScratch keeps the scratch of kernels between launches.
var reduceScratch = sync.Pool{New: func() any { return new(reducing) }}

// link is one peer during a call.
type link struct {
	peer int
	// Written by the peer, in this rank's segment, and by this rank, in the peer's.
	entry, progress     *atomic.Uint64
	myEntry, myProgress *atomic.Uint64

	met      bool   // its entry line has been read:
	src, dst int64  // where its buffers are, or -1
	open     uint64 // how far this rank may go, as last seen

	// Two-shot:
	chunks int // of the peer's slice
	sent   int // the last of them that the peer may reduce
	taken  int // the last of them that has been consumed there, and fetched if need be
}

// reducing is one call of the kernel on one rank.
type reducing struct {
	plain
	counted
	c        *ReduceBlock
	a        *kernels.Reduction
	me       int
	links    []link // the next rank first
	met      int
	agreed   agreed
	mismatch error // the ranks' calls differ

	// Two-shot: chunks of this rank's slice, and how many have been reduced.
	mine, reduced int

	folds   folds
	fold    fold
	rows    [][]byte // one a rank
	targets [][]byte
	plan    planRun
}

func (x *reducing) reset() {
	clear(x.links)
	clear(x.rows)
	clear(x.targets[:cap(x.targets)])
	x.links, x.rows, x.targets = x.links[:0], x.rows[:0], x.targets[:0]
	x.e, x.c, x.a, x.fold, x.mismatch = nil, nil, nil, nil, nil
	x.met, x.mine, x.reduced = 0, 0, 0
	x.plan = planRun{}
}

func (x *reducing) sizes(int) string { return x.a.Call.String() }

func (x *reducing) call(op kernels.Operation) error {
	e, c, a := x.e, x.c, op.(*kernels.Reduction)
	x.a, x.me, x.agreed = a, e.space.Rank, agreed{e.space.Rank, a.Call}
	if c.Size == 1 {
		move(a.Dst.Mem, a.Src.Mem)
		return nil
	}
	if a.Call.Collective.Reduces() {
		x.fold = x.folds.of(a.Call.DType)
	}
	for i := 1; i < c.Size; i++ {
		p := (x.me + i) % c.Size
		x.links = append(x.links, link{peer: p, src: -1, dst: -1,
			entry: e.word(x.me, c.Entry(x.epoch, p)), progress: e.word(x.me, c.Progress(p)),
			myEntry: e.word(p, c.Entry(x.epoch, x.me)), myProgress: e.word(p, c.Progress(x.me))})
	}
	for len(x.rows) < c.Size {
		x.rows = append(x.rows, nil)
	}
	switch a.Algorithm {
	case kernels.OneShot:
		return x.oneShot()
	case kernels.TwoShot:
		return x.twoShot()
	case kernels.Planned:
		return x.planned()
	}
	return x.ring()
}

// move copies src to dst unless they are the same memory. It writes through the caches, like all copies of this kernel,
// whatever the size: where a result goes is where an input has just been read (measured; stores around the caches take up
// to twice as long, and are no faster for buffers that are staged).
func move(dst, src []byte) {
	if len(src) > 0 && &dst[0] != &src[0] {
		copy(dst, src)
	}
}

// part is elements lo to hi of slice p in a buffer that has all slices, or this rank's alone.
func (x *reducing) part(b []byte, all bool, p int, lo, hi int64) []byte {
	var at int64
	if all {
		at = x.a.Bounds[p]
	}
	es := x.a.Call.DType.Size()
	return b[(at+lo)*es : (at+hi)*es]
}

func (x *reducing) input(p int, lo, hi int64) []byte {
	return x.part(x.a.Src.Mem, x.a.Call.Collective.Reduces(), p, lo, hi)
}

func (x *reducing) output(p int, lo, hi int64) []byte {
	return x.part(x.a.Dst.Mem, x.a.Call.Collective.Gathers(), p, lo, hi)
}

// theirs is elements lo to hi of this rank's slice in a peer's buffer at off of its segment, which has all slices.
func (x *reducing) theirs(peer int, off, lo, hi int64) []byte {
	es := x.a.Call.DType.Size()
	return x.e.space.Range(peer, off+(x.a.Bounds[x.me]+lo)*es, (hi-lo)*es)
}

// enter tells a peer what this rank calls, where it can reach src and dst (offsets or -1), and how far it may go.
func (x *reducing) enter(l *link, src, dst int64, seq uint64) {
	x.e.at(postingCredit, l.peer)
	line := x.c.Entry(x.epoch, x.me)
	c := &x.a.Call
	x.e.word(l.peer, line+entryCount).Store(uint64(c.Count))
	x.e.word(l.peer, line+entryCall).Store(c.Word())
	x.e.word(l.peer, line+entryShape).Store(c.Shape)
	x.e.word(l.peer, line+entrySrc).Store(uint64(src + 1))
	x.e.word(l.peer, line+entryDst).Store(uint64(dst + 1))
	x.e.signal(l.peer, l.myEntry, seq)
}

// meet reads the entry lines that have come. Every rank reads all of them, so that a disagreement is known everywhere.
func (x *reducing) meet() bool {
	moved := false
	for i := range x.links {
		l := &x.links[i]
		if l.met {
			continue
		}
		if l.open = l.entry.Load(); l.open < kernels.Seq(x.epoch, 0) {
			continue
		}
		line := x.c.Entry(x.epoch, l.peer)
		theirs := kernels.ReduceCall{Count: int64(x.e.word(x.me, line+entryCount).Load()), Shape: x.e.word(x.me, line+entryShape).Load()}
		theirs.SetWord(x.e.word(x.me, line+entryCall).Load())
		if x.mismatch == nil {
			x.mismatch = x.agreed.with(x.me, &x.a.Call, l.peer, &theirs, x.epoch)
		}
		l.src = int64(x.e.word(x.me, line+entrySrc).Load()) - 1
		l.dst = int64(x.e.word(x.me, line+entryDst).Load()) - 1
		l.met, moved = true, true
		x.met++
	}
	return moved
}

// agreed is the call of the rank that knows most of its elements, of those that have been compared: one that knows nothing of its own finds out
// that two others have different ones, and all ranks come to the same verdict.
type agreed struct {
	rank int
	call kernels.ReduceCall
}

// with compares the call of this rank, and what others know of their elements, with the call of a peer.
func (k *agreed) with(me int, mine *kernels.ReduceCall, peer int, theirs *kernels.ReduceCall, epoch uint64) error {
	as := *theirs
	as.Elements = mine.Elements
	switch {
	case as != *mine:
		return &kernels.CallMismatchError{Rank: me, Peer: peer, Mine: *mine, Theirs: *theirs, Epoch: epoch}
	case !k.call.Elements.Alike(theirs.Elements):
		return &kernels.CallMismatchError{Rank: k.rank, Peer: peer, Mine: k.call, Theirs: *theirs, Epoch: epoch}
	case theirs.Elements > k.call.Elements:
		*k = agreed{peer, *theirs}
	}
	return nil
}

// meetAll waits for every peer to enter the call.
func (x *reducing) meetAll() error {
	for {
		moved := x.meet()
		if x.met == len(x.links) {
			x.w.busy()
			return x.mismatch
		}
		if err := x.pace(moved); err != nil {
			return err
		}
	}
}

// pace is called after every pass of a polling loop.
func (x *reducing) pace(moved bool) error {
	if moved {
		x.w.busy()
		return nil
	}
	late := x.e.near(x.late())
	if err := x.w.idle(late); err != nil {
		return x.w.fail(late, err)
	}
	return nil
}

// late is the first peer that has something to do before this rank can go on.
func (x *reducing) late() int {
	for i := range x.links {
		if !x.links[i].met {
			return x.links[i].peer
		}
	}
	for i := range x.links {
		l := &x.links[i]
		if x.reduced < x.mine && l.open < kernels.Seq(x.epoch, x.reduced+1) || x.reduced == x.mine && l.taken < l.chunks {
			return l.peer
		}
	}
	return x.me
}

// oneShot pushes what each peer needs into its staging and combines what the peers have pushed. No peer's memory is
// needed after that, so the call ends without a second look at anybody.
func (x *reducing) oneShot() error {
	a, c := x.a, x.c
	for i := range x.links {
		l := &x.links[i]
		data := a.Src.Mem
		if a.Call.Collective == kernels.ReduceScatter {
			_, n := a.Slice(l.peer)
			data = x.input(l.peer, 0, n)
		}
		x.e.at(puttingData, l.peer)
		copy(x.e.space.Range(l.peer, c.Push(x.epoch, x.me), int64(len(data))), data)
		x.enter(l, -1, -1, kernels.LastSeq(x.epoch))
	}
	if err := x.meetAll(); err != nil {
		return err
	}
	x.e.at(takingData, x.me)
	if !a.Call.Collective.Reduces() {
		for p := range c.Size {
			_, n := a.Slice(p)
			if to := x.output(p, 0, n); p == x.me {
				move(to, a.Src.Mem)
			} else {
				copy(to, x.e.space.Range(x.me, c.Push(x.epoch, p), int64(len(to))))
			}
		}
		return nil
	}
	for p := range x.rows {
		x.rows[p] = x.e.space.Range(x.me, c.Push(x.epoch, p), int64(len(a.Dst.Mem)))
	}
	x.rows[x.me] = a.Src.Mem
	if a.Call.Collective == kernels.ReduceScatter {
		_, n := a.Slice(x.me)
		x.rows[x.me] = x.input(x.me, 0, n)
	}
	x.fold.rows(a.Dst.Mem, x.rows, 0, int64(len(a.Dst.Mem)), a.Call.Op, c.Size)
	return nil
}
