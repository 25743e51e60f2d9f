package host

import (
	"sync"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// exchanges are the launches of one communicator. It is a family.
type exchanges struct {
	bounds  *kernels.ExchangeBounds
	c       ExchangeBlock // among the ranks of this host
	sides   []side
	places  []int      // by rank: its number in the space, -1 of those of other hosts
	across  *across    // nil on one host
	nonce   *shm.Nonce // by which peers know this rank's memory
	sources []source   // by rank

	complaints uint64   // how many of this rank's receivers' it has taken in
	heard      []uint64 // by rank: the call of the last
	mismatched uint64   // the last call for which this rank has returned that sizes differ
}

// side is a part of the ranks of a call: those of this host (home), or all others (across).
type side interface {
	// begin sends what needs no answer. refused are this rank's splits if it refuses them: then it sends nothing but that, and takes nothing.
	begin(x *exchange, refused *kernels.SplitsError) error
	// pass sends what there is room for and takes what has come. It reports whether that is anything.
	pass(x *exchange) (moved bool, err error)
	// late is one that has not done its part, nil if all have. It is asked once all on the sides before have.
	late(x *exchange) peer
}

// source is where a port finds a peer's memory outside its segment.
type source struct {
	readable bool        // this rank may read it
	memory   shm.Process // which is there, in another process
}

// The defaults of exchanges. Slots are smaller where they would exceed their bound together.
const (
	defaultPacketBytes  = 128
	defaultEagerBytes   = 1 << 10
	defaultSlots        = 4
	defaultStagingBytes = 32 << 20
	maxSlotBytes        = 256 << 10
)

func newExchanges(c *kernels.ExchangeBounds, offset int64) *exchanges {
	f := &exchanges{bounds: c, c: ExchangeBlock{c, offset}}
	if c.Hosts != nil {
		f.across = newAcross(c, offset)
		f.c = f.across.block
	}
	return f
}

func (f *exchanges) defaults() {
	c := f.bounds
	c.PacketBytes, c.EagerBytes = kernels.Default(c.PacketBytes, defaultPacketBytes), kernels.Default(c.EagerBytes, defaultEagerBytes)
	c.DefaultSlots(defaultSlots, defaultStagingBytes, maxSlotBytes, c.Size)
}

func (f *exchanges) layout() kernels.Layout {
	if f.across != nil {
		return f.across.layout()
	}
	return kernels.Layout{Bytes: f.c.Bytes(), Zero: f.c.ControlBytes()}
}

func (f *exchanges) open(e *Engine) {
	f.places, f.sides = make([]int, f.bounds.Size), []side{home{}}
	for r := range f.places {
		f.places[r] = r
	}
	if f.across != nil {
		f.across.open(e)
		f.sides = append(f.sides, f.across)
		for r := range f.places {
			f.places[r] = f.across.place(r)
		}
	}
	f.show(e)
}

// rest has all that crosses hosts landed.
func (f *exchanges) rest(e *Engine) error {
	if f.across == nil {
		return nil
	}
	_, err := f.across.rest(e, f.across.offset, f.c.Offset)
	return err
}

func (f *exchanges) ready(e *Engine) kernels.Traits {
	err := f.look(e)
	return kernels.Traits{Pulls: err == nil, Slow: err}
}

func (f *exchanges) run(p *port, op kernels.Operation) error {
	x := exchangeScratch.Get().(*exchange)
	err := x.run(p, f, op.(*kernels.AllToAllV))
	x.reset()
	exchangeScratch.Put(x)
	return err
}

// pollsPerLook is how many idle passes go by between two looks for messages that nobody expects.
const pollsPerLook = 32

// exchangeScratch keeps the scratch of kernels between launches.
var exchangeScratch = sync.Pool{New: func() any { return new(exchange) }}

// half is one direction of one pair during a call.
type half struct {
	peer   int
	mode   kernels.Mode
	buf    []byte // the message in the user's buffer
	total  int64
	extent extent
	done   int64  // bytes moved so far
	chunk  int    // number of the next chunk to send or to receive, from 1
	grants int    // receive: number of the next chunk to grant
	asked  int64  // receive: bytes granted so far
	refuse bool   // receive: the sender has been refused and has yet to acknowledge
	pull   bool   // receive: this rank reads the message in its sender's memory
	taken  uint64 // send: how far the receiver has read it there
	seq    *atomic.Uint64
}

// exchange is one call of the kernel on one rank: two lists of halves, served window by window until both are done.
type exchange struct {
	plain
	e      *Engine
	f      *exchanges
	c      *ExchangeBlock
	a      *kernels.AllToAllV
	window int
	epoch  uint64
	w      waiter
	sends  []half
	recvs  []half
	sHead  int // first send that is not done
	rHead  int
	rOpen  int  // receives that have been opened (credits posted)
	stream bool // too large for the caches
	failed error
	own    kernels.AllToAllV // of a launch with splits in memory: what they make of it
	routes kernels.Routes
}

func (x *exchange) reset() {
	x.w.leave()
	clear(x.sends)
	clear(x.recvs)
	x.sends, x.recvs = x.sends[:0], x.recvs[:0]
	if x.a == &x.own {
		x.own = kernels.AllToAllV{}
	}
	x.e, x.f, x.c, x.a, x.failed = nil, nil, nil, nil, nil
	x.sHead, x.rHead, x.rOpen = 0, 0, 0
}

func (x *exchange) run(p *port, f *exchanges, a *kernels.AllToAllV) error {
	e, c := p.e, &f.c
	x.e, x.f, x.c, x.a = e, f, c, a
	me := e.space.Rank
	x.epoch = e.count(c.Epoch())
	var refused *kernels.SplitsError
	if a.Splits.Bytes > 0 {
		refused = x.readSplits()
		a = x.a
	}
	r := a.Routes
	if x.window = a.Schedule.Window; x.window <= 0 {
		x.window = c.Size
	}
	x.w.begin(p, x, p.call(a, c.Epoch(), x.epoch), a.Timeout)
	var all int64
	for _, n := range r.SendBytes {
		all += n
	}
	x.stream = all >= e.cacheBytes

	for i := len(f.sides) - 1; i >= 0; i-- { // what goes farthest goes first
		if err := f.sides[i].begin(x, refused); err != nil {
			x.withdraw()
			return err
		}
	}
	if self := e.space.Name(me); refused == nil && r.SendBytes[self] > 0 {
		n := r.SendBytes[self]
		src, dst := a.Src.Mem[r.SendOffsets[self]:][:n], a.Dst.Mem[r.RecvOffsets[self]:][:n]
		if shm.Addr(src) != shm.Addr(dst) {
			x.copy(dst, src)
		}
	}
	for {
		moved, late := false, peer(nil)
		for _, s := range f.sides {
			did, err := s.pass(x)
			if err != nil {
				x.withdraw()
				return err
			}
			if moved = moved || did; late == nil {
				late = s.late(x)
			}
		}
		switch {
		case late == nil:
			if err := x.w.flush(); err != nil {
				return err
			}
			if refused != nil {
				return refused
			}
			return x.outcome()
		case moved:
			x.w.busy()
			continue
		}
		if err := x.w.idle(late); err != nil {
			x.withdraw()
			return x.w.fail(late, err)
		}
		if x.w.polls%pollsPerLook == 0 {
			x.lookForMismatch()
		}
	}
}

// home is the side of this host.
type home struct{}

func (home) begin(x *exchange, refused *kernels.SplitsError) error {
	e, c, r := x.e, x.c, x.a.Routes
	me := e.space.Rank
	if refused != nil {
		x.refuse(refused)
		return nil
	}
	for _, p := range r.ReverseOrder {
		peer := x.f.places[p]
		if peer < 0 {
			continue
		}
		n := r.RecvBytes[p]
		x.recvs = append(x.recvs, half{peer: peer, mode: c.Mode(n), total: n, extent: extentOf(n, x.a.Dst.Elements), chunk: 1, grants: 1,
			buf: x.a.Dst.Mem[r.RecvOffsets[p] : r.RecvOffsets[p]+n], seq: e.word(me, c.Signal(x.epoch, peer))})
	}
	x.open()
	for _, p := range r.Order {
		peer := x.f.places[p]
		if peer < 0 {
			continue
		}
		n := r.SendBytes[p]
		x.sends = append(x.sends, half{peer: peer, mode: c.Mode(n), total: n, extent: extentOf(n, x.a.Src.Elements), chunk: 1,
			buf: x.a.Src.Mem[r.SendOffsets[p] : r.SendOffsets[p]+n], seq: e.word(peer, c.Signal(x.epoch, me))})
		x.begin(&x.sends[len(x.sends)-1])
	}
	return nil
}

func (home) pass(x *exchange) (moved bool, err error) {
	moved = x.pushSends()
	return x.pullRecvs() || moved, nil
}

func (home) late(x *exchange) peer {
	for i := x.rHead; i < len(x.recvs); i++ {
		if x.recvs[i].chunk > 0 {
			return x.e.near(x.recvs[i].peer)
		}
	}
	if x.sHead < len(x.sends) {
		return x.e.near(x.sends[x.sHead].peer)
	}
	return nil
}

// streamFrom is the length from which a fence for one copy around the caches does not matter.
const streamFrom = 32 << 10

// copy moves bytes through the caches, or around them when the exchange as a whole does not fit.
func (x *exchange) copy(dst, src []byte) {
	x.w.copy(dst, src, x.stream && len(src) >= streamFrom)
}
