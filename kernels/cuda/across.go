package cuda

import (
	"errors"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Crossing is what the kernels of a rank need to reach ranks of other hosts.
type Crossing struct {
	// Segment is the rank's rail segment, pinned, and Address where kernels have it.
	Segment []byte
	Address uintptr
	// Proxy reads queues.
	Proxy interface {
		Add(*Queue)
		Remove(*Queue)
		Wake()
		Err() error
	}
}

// Cross lets communicators that are opened from now on reach other hosts. All that it names outlives them.
func (e *Engine) Cross(c Crossing) { e.crossing = &c }

// acrossKernels are those of exchanges that cross hosts.
type acrossKernels struct {
	across, home cuda.Function
	limit        int // blocks of the kernel that crosses which run at once
}

func (k *acrossKernels) load(e *Engine) (err error) {
	if err = e.loadModule("across", entry{"alltoallv_across", &k.across}, entry{"alltoallv_home", &k.home}); err != nil {
		return err
	}
	k.limit, err = e.blocks(k.across, acrossThreads, 0)
	return err
}

// Of the rings between two ranks: slots, and how large they are where a communicator's do not take more than a part of the rail segment.
const (
	acrossSlots    = 8
	acrossGives    = 4 // slots that one put gives back
	acrossShare    = 4 // a part is one of this number
	acrossMost     = 128 << 10
	acrossLeast    = 4 << 10
	acrossLineStep = 64  // words are written by two processors
	acrossPuts     = 256 // descriptors of a queue
	acrossBlocks   = 8   // that send, and as many receive
)

// hostExchanges are the exchanges of a communicator on several hosts. In a call the ranks of a host exchange as on one host, by kernels that know
// of no other; behind these one sends and receives what crosses.
type hostExchanges struct {
	*exchanges // of this host
	whole      *kernels.ExchangeBounds
	start      int64 // of the control block, which begins with struct acrossWords
	k          *acrossKernels
	peers      []int   // ranks of other hosts, in their order
	number     []int32 // of each rank among these, or among those of this host

	args   acrossArgs
	op     kernels.AllToAllV // of this host
	routes kernels.Routes
}

// openExchanges is the family of an exchanger's bounds.
func openExchanges(c *kernels.ExchangeBounds, offset int64) family {
	if c.Hosts == nil {
		return newExchanges(c, offset)
	}
	home := *c
	home.Size, home.Hosts = len(c.Hosts.Ranks), nil
	x := &hostExchanges{exchanges: newExchanges(&home, offset+acrossControl), whole: c, start: offset}
	here, n := 0, home.Size
	for r, host := range c.Hosts.Host {
		if host == c.Hosts.Host[c.Hosts.Rank] {
			x.number = append(x.number, int32(here))
			here++
		} else {
			x.number = append(x.number, int32(len(x.peers)))
			x.peers = append(x.peers, r)
		}
	}
	x.routes = kernels.Routes{
		SendBytes: make([]int64, n), SendOffsets: make([]int64, n), RecvBytes: make([]int64, n), RecvOffsets: make([]int64, n),
		Order: make([]int32, 0, n), ReverseOrder: make([]int32, 0, n),
	}
	return x
}

// acrossControl is the room of struct acrossWords, and acrossSplits where in it splits are, which come last.
var (
	acrossControl = kernels.AlignUp(int64(len(cuda.BytesOf(new(acrossWords)))), controlAlign)
	acrossSplits  = uintptr(len(cuda.BytesOf(new(acrossWords))) - 4*8*maxRanks)
)

// slotBytes is how large the slots are.
func (x *hostExchanges) slotBytes() int64 {
	room := x.whole.Hosts.Limit/acrossShare - x.wordBytes()
	return min(room/int64(2*len(x.peers)*acrossSlots)&^127, acrossMost)
}

// wordBytes is what words take of the rail segment.
func (x *hostExchanges) wordBytes() int64 { return 2 * int64(len(x.peers)) * acrossLineStep }

func (x *hostExchanges) check() error {
	if len(x.peers) > maxRanks {
		return fmt.Errorf("kernels: alltoallv: %d ranks on other hosts: the CUDA engine serves 1 to %d", len(x.peers), maxRanks)
	}
	if need := acrossShare * (x.wordBytes() + int64(2*len(x.peers)*acrossSlots)*acrossLeast); x.whole.Hosts.Limit < need {
		return fmt.Errorf("kernels: alltoallv: rings to %d ranks on other hosts need a rail segment of %d bytes, it has %d", len(x.peers), need, x.whole.Hosts.Limit)
	}
	return x.exchanges.check()
}

func (x *hostExchanges) layout() kernels.Layout {
	l := x.exchanges.layout()
	l.Bytes, l.Zero = l.Bytes+acrossControl, l.Zero+acrossControl
	l.Rail = x.wordBytes() + int64(2*len(x.peers)*acrossSlots)*x.slotBytes()
	return l
}

// controls are of this host's kernels: one that crosses leaves its faults where they do.
func (x *hostExchanges) controls(int64) []int64 { return []int64{x.offset} }

func (x *hostExchanges) load(e *Engine) (err error) {
	if e.crossing == nil {
		return errors.New("the heap has no rail segment")
	}
	if x.k, err = loadOnce[acrossKernels](e); err != nil {
		return err
	}
	return x.exchanges.load(e)
}

// name is the rank of the group that kernels name.
func (x *hostExchanges) name(rank uint32) int {
	if rank&farRank != 0 {
		return int(rank &^ farRank)
	}
	return x.whole.Hosts.Ranks[rank]
}

func (x *hostExchanges) fault(f *faultWords, _ int) error {
	g := *f
	g.peer = uint32(x.name(f.peer))
	switch f.kind {
	case faultSplits:
		g.part = uint32(x.name(f.part))
	case faultOrder:
		return fmt.Errorf("kernels: call %d: %w: rank %d makes its call %d", f.epoch, comm.ErrMismatch, g.peer, f.sent)
	}
	return x.exchanges.fault(&g, x.whole.Hosts.Rank)
}

// late is the error of a wait for a rank of another host, or for the proxy, nil where a rank of this host was waited for.
func (x *hostExchanges) late(p *port, f *faultWords) error {
	e := &comm.PeerError{Rank: x.name(f.peer), Op: p.name, Epoch: f.epoch}
	switch {
	case f.peer&farRank != 0:
		e.Err = fmt.Errorf("%w: on host %d: nothing more has come from it", comm.ErrTimeout, x.whole.Hosts.Host[e.Rank])
	case int(f.peer) == p.e.space.Rank:
		e.Err = fmt.Errorf("%w: its own proxy does not put what kernels ask for", comm.ErrTimeout)
		if err := p.e.crossing.Proxy.Err(); err != nil {
			e.Err = fmt.Errorf("%w: %w", e.Err, err)
		}
	default:
		return nil
	}
	return e
}

func (x *hostExchanges) add(p *port, op kernels.Operation) error {
	a, ok := op.(*kernels.AllToAllV)
	if !ok {
		return errForeign
	}
	if n, size := len(a.Routes.Order), len(x.whole.Hosts.Host); n != size-1 || len(a.Routes.ReverseOrder) != n {
		return fmt.Errorf("kernels: alltoallv: orders of %d and %d peers for %d ranks", n, len(a.Routes.ReverseOrder), size)
	}
	x.fill(p, a)
	l := cuda.Launch{Grid: [3]uint32{1, 1, 1}, Args: cuda.BytesOf(&x.args)}
	if a.Splits.Bytes > 0 {
		l.Function, l.Block = x.k.home, [3]uint32{acrossHomeThreads, 1, 1}
		p.batch.Launch(0, l)
	}
	if err := x.exchanges.add(p, &x.op); err != nil {
		return err
	}
	blocks := max(1, min(acrossBlocks, len(x.peers), x.k.limit/2))
	l.Function, l.Grid[0], l.Block = x.k.across, uint32(2*blocks), [3]uint32{acrossThreads, 1, 1}
	p.batch.Launch(0, l)
	return nil
}

// fill sets the arguments of what crosses, and the operation of this host.
func (x *hostExchanges) fill(p *port, a *kernels.AllToAllV) {
	hosts, r, c := x.whole.Hosts, a.Routes, p.e.crossing
	words := p.e.space.Addr(p.e.space.Rank, x.start)
	if x.args.count == 0 {
		x.lay()
	}
	g := &x.args
	g.world = p.world(x.offset, a.Timeout)
	g.rail = railWords{queue: queueWords{head: uint64(p.queue.mem.Addr()), next: uint64(words), slots: acrossPuts}, segment: uint64(c.Address)}
	g.src, g.dst, g.srcBytes, g.dstBytes, g.splits = uint64(a.Src.Ptr), uint64(a.Dst.Ptr), a.Src.Bytes, a.Dst.Bytes, uint64(a.Splits.Ptr)
	for i, q := range x.peers {
		m := &g.peers[i]
		m.sendBytes, m.sendOffset, m.recvBytes, m.recvOffset = r.SendBytes[q], r.SendOffsets[q], r.RecvBytes[q], r.RecvOffsets[q]
	}
	h := &x.routes
	h.PeerOffsets = h.PeerOffsets[:0]
	for i, q := range hosts.Ranks {
		h.SendBytes[i], h.SendOffsets[i], h.RecvBytes[i], h.RecvOffsets[i] = r.SendBytes[q], r.SendOffsets[q], r.RecvBytes[q], r.RecvOffsets[q]
		if r.PeerOffsets != nil {
			h.PeerOffsets = append(h.PeerOffsets, r.PeerOffsets[q])
		}
	}
	h.Order, h.ReverseOrder = h.Order[:0], h.ReverseOrder[:0]
	for i, q := range r.Order {
		if hosts.Host[q] == hosts.Host[hosts.Rank] {
			h.Order = append(h.Order, x.number[q])
		}
		if q = r.ReverseOrder[i]; hosts.Host[q] == hosts.Host[hosts.Rank] {
			h.ReverseOrder = append(h.ReverseOrder, x.number[q])
		}
	}
	x.op.Routes, x.op.Schedule, x.op.Src, x.op.Dst, x.op.Timeout = h, a.Schedule, a.Src, a.Dst, a.Timeout
	if x.op.Splits = a.Splits; a.Splits.Bytes > 0 {
		x.op.Splits = kernels.Buffer{Ptr: words + acrossSplits, Bytes: 32 * int64(len(hosts.Ranks))}
	}
}

// lay sets the arguments that all calls share. Ranks send and receive by their distance, whatever a plan says: so no message waits for a later
// one of any rank.
func (x *hostExchanges) lay() {
	hosts, g := x.whole.Hosts, &x.args
	host, size := hosts.Host[hosts.Rank], len(hosts.Host)
	g.words, g.rings, g.slotBytes, g.slotCount, g.gives = x.start, x.whole.RailAt, x.slotBytes(), acrossSlots, acrossGives
	g.ranks, g.me, g.count = uint32(size), uint32(hosts.Rank), uint32(len(x.peers))
	for i, q := range x.peers {
		g.peers[i].rank, g.peers[i].theirs = uint32(q), x.numberAt(q)
	}
	for i, q := range hosts.Ranks {
		g.home[i] = uint32(q)
	}
	to, from := 0, 0
	for i := 1; i < size; i++ {
		if q := (hosts.Rank + i) % size; hosts.Host[q] != host {
			g.to[to] = uint32(x.number[q])
			to++
		}
		if q := (hosts.Rank + size - i) % size; hosts.Host[q] != host {
			g.from[from] = uint32(x.number[q])
			from++
		}
	}
}

// numberAt is the number of this rank among the peers of a rank of another host.
func (x *hostExchanges) numberAt(rank int) uint32 {
	n := uint32(0)
	for q, host := range x.whole.Hosts.Host {
		if host != x.whole.Hosts.Host[rank] && q < x.whole.Hosts.Rank {
			n++
		}
	}
	return n
}

// restTimeout bounds the wait for puts that give slots back, on their way from kernels that have ended.
const restTimeout = 30 * time.Second

// rest returns when nothing of the launches is on its way to this rank any more, after which its part of the rail segment may be used anew. An
// error, also an earlier one of the launches, says that something may be.
func (x *hostExchanges) rest(p *port) error {
	if err := p.err(); err != nil && !kernels.Recoverable(err) {
		return err
	}
	b := make([]byte, acrossControl)
	if err := p.e.read(b, p.e.space.Addr(p.e.space.Rank, x.start)); err != nil {
		return err
	}
	w := cuda.StructOf[acrossWords](b)
	for i, q := range x.peers {
		word := shm.Word(p.e.crossing.Segment, x.whole.RailAt+int64(len(x.peers)+i)*acrossLineStep)
		var late bool // the look behind it is the last one
		for end := time.Now().Add(restTimeout); word.Load() < w.out[i]/acrossGives; shm.Sleep(20 * time.Microsecond) {
			if late {
				return &comm.PeerError{Rank: q, Op: "rest", Err: fmt.Errorf("%w: on host %d: slots that it has read are not given back", comm.ErrTimeout, x.whole.Hosts.Host[q])}
			}
			late = time.Now().After(end)
		}
	}
	return nil
}

// portQueue is the queue of a port to the rank's proxy.
type portQueue struct {
	*Queue
	mem   *cuda.HostBuffer
	proxy interface {
		Remove(*Queue)
		Wake()
	}
}

// newQueue makes one, and has the proxy read it.
func (e *Engine) newQueue() (*portQueue, error) {
	mem, err := e.ctx.NewHostBuffer(QueueBytes(acrossPuts))
	if err != nil {
		return nil, err
	}
	q := &portQueue{Queue: NewQueue(mem.Bytes(), acrossPuts), mem: mem, proxy: e.crossing.Proxy}
	e.crossing.Proxy.Add(q.Queue)
	return q, nil
}

// submitted says that a kernel which posts has been enqueued, or captured.
func (q *portQueue) submitted(captured bool) {
	if captured {
		q.Captured()
	} else {
		q.Launched()
	}
	q.proxy.Wake()
}

// close has the proxy leave the queue alone, and gives its memory back. It works on a nil portQueue.
func (q *portQueue) close() error {
	if q == nil {
		return nil
	}
	q.proxy.Remove(q.Queue)
	return q.mem.Close()
}
