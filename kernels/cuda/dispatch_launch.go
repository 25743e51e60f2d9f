package cuda

import (
	"cmp"
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

const (
	// How many multiprocessors calls for many tokens take where nothing is said, and those for few. Next to a pass over this rank's memory rows cross with more: on 2 H200,
	// sending with 24, 32 and 40 made a flat dispatch of 58 MB 272, 268 and 272 us, reading with 16, 24 and 32 a combine 412, 310 and 256. With 40, 48, 56, 64 and 100 for the
	// pass behind the rows that are sent, the dispatch took 306, 288, 277, 286 and 270 us.
	// Rows that are sent as they are do not cross faster with more than 32, whatever the caller allows: 24, 32, 64 and 132 take 97.8, 98.2, 99.3 and 105 us for 30 MB. With
	// more tokens than dispatchSendMostTokens all that are allowed send, since a block's table of its tokens has to fit its shared memory.
	dispatchBlocks           = 24
	dispatchVeryFewBlocks    = 64
	dispatchVeryFew          = 48 // tokens
	dispatchSendBesideBlocks = 32
	dispatchSendMostBlocks   = 32
	dispatchSendMostTokens   = 16 << 10
	dispatchReadBesideBlocks = 40
	dispatchTakeBesideBlocks = 56

	// A pass that copies rows by token next to the kernel which reads them, for rows that no peer reaches where the caller has them. It disturbs those reads, so it has no more
	// blocks than it takes to be ahead of them, and with fewer bytes it comes first. On 2 H200, 58 MB to read: 222 us one after the other, 221 with 92 blocks next to 40 that
	// read, 205 with 32, and 206 with 48 next to 32; without a copy 185. Of 15 MB 65, 68 and 67.
	dispatchReadCopiesBlocks = 32
	dispatchCopyBlocks       = 48
	dispatchCopyBesideBytes  = 32 << 20
	dispatchCopyWindow       = 8 // log2 of the rows that are told together: looking for others takes a warp that reads about a microsecond

	// The bytes a nanosecond that all blocks together offer to one peer, and ask of one. On 2 H200 with 24 blocks 365 was fastest for rows of 14 KiB, 352 for rows of 7,
	// and 340 for reading.
	dispatchSendRate, dispatchSendRateShort, dispatchReadRate = 365, 352, 340
	dispatchShort                                             = 8 << 10

	dispatchPart = 16 << 10 // the most of a row that is moved at a time

	dispatchTellBytes = 4 << 20 // of this rank's rows, from which on a kernel of its own tells the host of counts: less crosses in the time of a launch
)

// dispatchCall is one operation on its way into a batch. Its launches have copies of base.
type dispatchCall struct {
	*dispatches
	p    *port
	c    *kernels.DispatchCall
	h    *kernels.DispatchHandle
	base dispatchArgs
}

func (x *dispatches) call(p *port, c *kernels.DispatchCall) (l dispatchCall, err error) {
	switch {
	case c.Handle < 0 || c.Handle >= len(x.m.Handles):
		return l, fmt.Errorf("kernels: %v: handle %d of %d", c.Op, c.Handle, len(x.m.Handles))
	case c.Tokens < 0 || c.Tokens > x.m.MaxTokens:
		return l, fmt.Errorf("kernels: %v: %d tokens of at most %d", c.Op, c.Tokens, x.m.MaxTokens)
	}
	m, h := x.m, &x.m.Handles[c.Handle]
	b := x.block(h.State.Place)
	l = dispatchCall{dispatches: x, p: p, c: c, h: h}
	l.base = dispatchArgs{
		world: p.world(b.control, c.Timeout), state: b,
		op: uint32(c.Op), tokens: uint32(c.Tokens), topK: uint32(m.TopK), maxTokens: uint32(m.MaxTokens), experts: uint32(m.Experts),
		slots: uint32(m.Slots()), local: uint32(m.Local(m.Rank)),
		table: uint64(m.Placement.Ptr), counters: uint64(m.Counters.Ptr),
		out: dispatchRowsWords{
			rows: uint64(h.Rows.Ptr), scales: uint64(h.Scales.Ptr), weights: addressOf(&h.Weights), sources: addressOf(&h.Sources),
			counts: uint64(h.Counts.Ptr), offsets: uint64(h.Offsets.Ptr), rankCounts: uint64(h.RankCounts.Ptr),
			most: m.Rows, room: m.Rows, align: max(m.Align, 1), capacity: m.Capacity,
		},
	}
	for i, n := range m.First {
		l.base.first[i] = uint32(n)
	}
	if m.Masks {
		l.base.masks, l.base.requests = x.masks, uint64(p.fault.Addr())+maskRequestsAt
	}
	if r := &c.Routing; r.State.Bytes > 0 {
		l.base.state.moveRouting(place(int64(r.State.Ptr) - int64(p.e.space.Addr(m.Rank, int64(b.arrived)))))
		l.base.out.counts, l.base.out.offsets, l.base.out.rankCounts = uint64(r.Counts.Ptr), uint64(r.Offsets.Ptr), uint64(r.RankCounts.Ptr)
	}
	if c.Phase&kernels.Send != 0 {
		l.base.mode |= dispatchSend
	}
	if c.Phase&kernels.Receive != 0 {
		l.base.mode |= dispatchReceive
	}
	return l, nil
}

// crossing is how many blocks the kernel has that sends rows, or reads and sums them: alone, or next to a pass.
func (l *dispatchCall) crossing(beside bool) int {
	switch {
	case !beside:
		return l.blocks(cmp.Or(l.c.DefaultBlocks, dispatchBlocks))
	case l.c.Op == kernels.OpDispatch || l.c.Op == kernels.OpRedispatch:
		return dispatchSendBesideBlocks
	case l.m.Layout.ByToken():
		return dispatchReadCopiesBlocks
	}
	return dispatchReadBesideBlocks
}

// overlaps reports whether a pass over this rank's rows runs next to the kernel of the same call that crosses: if one can begin before the other
// has ended, there are multiprocessors for both and the caller sets no bound.
func (l *dispatchCall) overlaps() bool {
	return l.c.Phase == kernels.Both && l.c.Blocks == 0 && l.p.e.flags&cuda.Programmatic != 0 && l.k.byDefault >= 2*l.crossing(true)
}

// taking is how many blocks the pass has that takes rows next to the kernel which sends.
func (l *dispatchCall) taking() int {
	return min(dispatchTakeBesideBlocks, l.k.byDefault-l.crossing(true)-1) // which a kernel that tells of counts has
}

// takesBeside reports whether a copy that belongs to the call takes rows as they come. The place of a block's first row crosses in 24 bits.
func (l *dispatchCall) takesBeside() bool {
	return l.compact() && !l.few() && l.overlaps() && l.m.Rows < 1<<24
}

// compact reports whether rows of one rank follow those of the one before without gaps.
func (l *dispatchCall) compact() bool { return l.m.Layout == kernels.TokenRows }

// blocks is how many a launch takes: what the caller allows of those that there are, or a default that leaves some to others.
func (l *dispatchCall) blocks(byDefault int) int {
	if l.c.Blocks > 0 {
		return min(l.c.Blocks, l.k.blocks)
	}
	return min(byDefault, l.k.byDefault)
}

// making is how many blocks the pass has that makes partial sums next to the kernel which reads and sums them. It waits for no peer's part of
// this call, so it takes all that the other leaves, unless it waits for the caller's own kernel to mark rows as done, or only copies.
func (l *dispatchCall) making(c *kernels.Combine) int {
	all := l.k.blocks
	if c.Ready.Bytes > 0 {
		all = l.k.byDefault
	}
	all -= l.crossing(true)
	if l.m.Layout.ByToken() {
		all = min(all, dispatchCopyBlocks)
	}
	return all
}

// spreading is how many blocks the pass of a backward call has. It waits for nobody, so by default it takes all multiprocessors.
func (l *dispatchCall) spreading() int {
	if l.c.Blocks > 0 {
		return l.blocks(0)
	}
	return l.k.blocks
}

// launch appends a kernel. The arguments are copied.
func (l *dispatchCall) launch(f cuda.Function, a *dispatchArgs, blocks, threads, shared int) {
	l.p.batch.Launch(0, cuda.Launch{
		Function: f, Grid: [3]uint32{uint32(blocks), 1, 1}, Block: [3]uint32{uint32(threads), 1, 1}, SharedBytes: uint32(shared),
		Flags: l.p.e.flags, Args: cuda.BytesOf(a),
	})
}

// send appends the kernel that sends tokens, or their gradients, to the ranks.
func (l *dispatchCall) send(a dispatchArgs, quantises bool) error {
	m, rowBytes := l.m, int64(a.rowBytes)
	f, blocks, part, movers := l.k.rows, l.crossing(a.mode&dispatchBeside != 0), rowBytes, int64(4)
	switch {
	case quantises:
		f, movers = l.k.rowsFloat8[numberKind(m.TokenType)], 14
	case l.c.Tokens <= dispatchSendMostTokens:
		blocks = min(blocks, dispatchSendMostBlocks)
	}
	if a.mode&dispatchTold != 0 { // by one block more
		blocks = min(blocks, l.blocks(l.k.byDefault)-1)
	}
	if part > dispatchPart && (!quantises || m.Scales.Block == 128 && m.Scales.Format != kernels.UE8M0Scales) {
		n := (part + dispatchPart - 1) / dispatchPart
		part = kernels.AlignUp((part+n-1)/n, 2048)
	}
	a.send.share = uint32((l.c.Tokens + blocks - 1) / blocks)
	share := int64(a.send.share)
	board := 4 * (int64(m.Ranks)*(share+(share+31)/32) + 2*int64(m.Slots()))
	scales := int64(0)
	if quantises {
		scales = dispatchScales
	}
	room := int64(l.k.shared) - board
	for movers > 1 && movers*(part+scales) > room {
		movers--
	}
	depth := min(7, dispatchSlots/movers, (room/movers-scales)/part)
	if depth < 1 {
		return fmt.Errorf("kernels: %v: %d tokens a block and rows of %d bytes do not fit a multiprocessor's shared memory: raise MaxSMs", l.c.Op, share, rowBytes)
	}
	a.part, a.parts, a.movers, a.depth = uint32(part), uint32((rowBytes+part-1)/part), uint32(movers), uint32(depth)
	wire := part * int64(a.wireBytes) / rowBytes
	rate := dispatchSendRate
	if wire <= dispatchShort {
		rate = dispatchSendRateShort
	}
	a.interval = l.interval(wire, movers*int64(blocks), float64(rate))
	l.launch(f, &a, blocks, dispatchThreads, int(movers*(depth*part+scales)+board))
	return nil
}

// tells reports whether a kernel next to the one that sends rows by token tells the host of counts, while rows cross: where the host wants those of
// a whole dispatch. Without room for that, and with few rows, counts are told when the rows are there.
func (l *dispatchCall) tells() bool {
	return l.c.Op == kernels.OpDispatch && l.c.Phase == kernels.Both && l.h.Mapped.Bytes > 0 && l.p.e.flags&cuda.Programmatic != 0 &&
		int64(l.c.Tokens)*l.m.RowBytes() >= dispatchTellBytes && l.blocks(l.k.byDefault) >= 2
}

// sendByToken appends the kernels that send rows by token, and tell of counts. taken says that a copy will take rows as they come.
func (l *dispatchCall) sendByToken(a dispatchArgs, taken bool) error {
	if !l.tells() {
		return l.send(a, l.m.Quantizes())
	}
	a.mode |= dispatchTold
	if taken {
		a.mode |= dispatchBeside
	}
	s := a
	s.send.mapped, s.send.ticket = 0, 0
	if err := l.send(s, l.m.Quantizes()); err != nil {
		return err
	}
	l.launch(l.k.counts, &a, 1, dispatchCountsThreads, 0)
	return nil
}

// interval is how many cycles a warp has for a part that crosses, where all of them share a link.
func (l *dispatchCall) interval(bytes, warps int64, rate float64) uint32 {
	if l.m.Ranks == 1 || l.p.e.sharers > 1 {
		return 0
	}
	return l.p.e.cyclesFor(bytes*warps, rate)
}

// place is where a part of the handle's staging is in every rank's segment.
func (l *dispatchCall) place(part int64) uint64 { return uint64(l.h.Staging.Place + part) }

// toStaging has rows arrive in staging.
func (l *dispatchCall) toStaging(a *dispatchArgs) {
	a.mode |= dispatchByExpert
	a.send.toRows, a.send.toScales = l.place(0), l.place(l.scalesAt())
	a.send.toIndices, a.send.toWeights, a.send.toSources = uint64(a.state.indices), uint64(a.state.weights), uint64(a.state.sources)
}

// addDispatch appends the kernels of a dispatch, and of the copy that belongs to it.
func (x *dispatches) addDispatch(p *port, d *kernels.Dispatch) error {
	l, err := x.call(p, &d.DispatchCall)
	if err == nil {
		err = aligned(d.Op, &d.X)
	}
	if err != nil {
		return err
	}
	m, h, a := x.m, l.h, l.base
	a.rowBytes, a.wireBytes, a.scaleWords = uint32(m.TokenBytes()), uint32(m.RowBytes()), uint32(m.ScaleWords())
	a.send = dispatchSendWords{
		x: uint64(d.X.Ptr), scales: uint64(d.Scales.Ptr), choices: uint64(d.Experts.Ptr), weights: addressOf(&d.Weights),
		landed: addressOf(&h.Landed), indexBytes: uint32(m.IndexBytes), scaleBlock: uint32(m.Scales.Block),
	}
	switch {
	case d.Numbers.Bytes > 0 && d.Op == kernels.OpDispatch: // without a ticket, by which kernels know whose they are
		a.send.mapped = uint64(d.Numbers.Ptr)
	case d.Ticket != 0:
		a.send.mapped, a.send.ticket = addressOf(&h.Mapped), d.Ticket
	}
	if m.Layout == kernels.RankRows {
		a.send.offsetBase = int64(m.MaxTokens)
	}
	if each := m.Local(0); each > 1 && m.Slots() == each*m.Ranks && m.MostLocal() == each {
		a.send.slotsInverse = uint32((1<<32 + uint64(each) - 1) / uint64(each))
	}
	if d.Op == kernels.OpRedispatch {
		a.mode |= dispatchCached
	}
	switch m.Scales.Format {
	case kernels.UE8M0Scales:
		a.mode |= dispatchExponents
	case kernels.PowerScales:
		a.mode |= dispatchPowers
	}
	if m.Scales.Columns {
		a.mode |= dispatchColumns
	}
	if m.Layout.ByToken() {
		if l.compact() {
			a.mode |= dispatchCompact
		}
		a.send.toRows, a.send.toScales, a.send.toIndices = uint64(h.Rows.Place), uint64(h.Scales.Place), uint64(h.Indices.Place)
		a.send.toWeights, a.send.toSources = placeOf(&h.Weights), placeOf(&h.Sources)
	} else {
		l.toStaging(&a)
		if m.Layout == kernels.PaddedRows || m.Layout == kernels.FlatRows && m.Align > 1 {
			a.mode |= dispatchZero
		}
	}
	switch {
	case l.few():
		return l.dispatchFew(&a, d.Into)
	case m.Layout.ByToken() && d.Phase&kernels.Send != 0:
		if left, ok := l.inPlace(&a, &d.X, d.Into); ok {
			if err := l.send(a, m.Quantizes()); err != nil {
				return err
			}
			return x.addInto(p, left, l.crossing(false))
		}
		if d.Into == nil || !l.takesBeside() {
			if err := l.sendByToken(a, d.Taken && l.takesBeside()); err != nil {
				return err
			}
			return x.addInto(p, d.Into, 0)
		}
		a.mode |= dispatchBeside
		if err := l.send(a, m.Quantizes()); err != nil {
			return err
		}
		return l.takeResults(&a, d.Into)
	case m.Layout.ByToken():
		l.launch(x.k.receive, &a, 1, dispatchThreads, 0)
		return x.addInto(p, d.Into, 0)
	}
	blocks := l.blocks(dispatchMaxBlocks)
	if l.overlaps() {
		a.mode |= dispatchBeside
		blocks = l.taking()
	}
	if d.Phase&kernels.Send != 0 {
		s := a
		s.mode &^= dispatchReceive | dispatchColumns // in staging they lie row by row
		if err := l.send(s, m.Quantizes()); err != nil {
			return err
		}
	}
	if d.Phase&kernels.Receive != 0 {
		l.take(a, blocks)
	}
	return x.addInto(p, d.Into, 0)
}

// addInto appends the copy that belongs to a dispatch, where it has one, as addResults does.
func (x *dispatches) addInto(p *port, r *kernels.Results, others int) error {
	if r == nil || r.Count == 0 {
		return nil
	}
	return x.addResults(p, r, others)
}

// straight has a dispatch of few tokens put its rows by token where the caller wants a copy of them, and returns what is left to copy: no peer
// writes rows of few tokens. One that goes on without ranks may clear rows of theirs for which the copy has no room.
func (l *dispatchCall) straight(a *dispatchArgs, r *kernels.Results) *kernels.Results {
	to, room := l.wanted(a, r)
	if to == nil || !l.m.Layout.ByToken() || l.m.Masks {
		return r
	}
	a.out.rows, a.out.room = uint64(to.Ptr), room
	return withoutRows(r)
}

// inPlace has peers write rows that follow one another where the caller wants a copy of them, if they reach that, as far as there is room, and
// returns what is left to copy.
func (l *dispatchCall) inPlace(a *dispatchArgs, tokens *kernels.Buffer, r *kernels.Results) (*kernels.Results, bool) {
	to, room := l.wanted(a, r)
	if to == nil || !l.compact() || !to.Reach || to.Overlaps(tokens) {
		return nil, false
	}
	a.send.toRows, a.out.room = uint64(to.Place), room
	return withoutRows(r), true
}

// wanted is where the caller wants a copy of rows, if kernels can write them there at once, and how many of them have room.
func (l *dispatchCall) wanted(a *dispatchArgs, r *kernels.Results) (to *kernels.Buffer, room int64) {
	if r == nil || r.Count == 0 || !r.Parts[0].Rows || r.Parts[0].To.Ptr%16 != 0 {
		return nil, 0
	}
	to = &r.Parts[0].To
	return to, min(l.m.Rows, to.Bytes/int64(a.wireBytes))
}

// withoutRows is the rest of a copy that begins with rows.
func withoutRows(r *kernels.Results) *kernels.Results {
	left := *r
	left.Count = copy(left.Parts[:], r.Parts[1:r.Count])
	return &left
}

// dispatchFew appends the kernel of a dispatch of few tokens, or of its halves.
func (l *dispatchCall) dispatchFew(a *dispatchArgs, into *kernels.Results) error {
	k := &l.k.few[l.order()]
	if l.m.Masks {
		k = &l.masked.few[l.order()]
	}
	f := k.plain
	if l.m.Quantizes() {
		f = k.float8[numberKind(l.m.TokenType)]
	}
	into, blocks := l.straight(a, into), l.fewBlocks()
	l.launch(f, a, blocks, dispatchFewThreads, int(l.fewShared()))
	return l.addInto(l.p, into, blocks)
}

// order is 0 where rows are by token, 1 where they are by expert.
func (l *dispatchCall) order() int {
	if l.m.Layout.ByToken() {
		return 0
	}
	return 1
}

// fewBlocks is how many blocks a kernel for few tokens has: with very few, more of them only wait.
func (l *dispatchCall) fewBlocks() int {
	byDefault := dispatchMaxBlocks
	if l.c.Tokens <= dispatchVeryFew {
		byDefault = dispatchVeryFewBlocks
	}
	return l.blocks(cmp.Or(l.c.DefaultBlocks, byDefault))
}

// take appends the pass that puts rows from staging where their experts' are.
func (l *dispatchCall) take(a dispatchArgs, blocks int) {
	m := l.m
	local := int64(m.Local(m.Rank))
	front := kernels.AlignUp(4*(2*local+1+int64(m.Ranks)*local), 128)
	part := min(int64(a.wireBytes), dispatchPart)
	movers := max(1, min(dispatchPassThreads/32, (int64(l.k.shared)-front)/part))
	a.part, a.parts, a.movers = uint32(part), uint32((int64(a.wireBytes)+part-1)/part), uint32(movers)
	l.launch(l.k.take, &a, blocks, dispatchPassThreads, int(front+movers*part))
}

// pass appends a pass over this rank's rows: it copies to y where that is set, else to where peers read them, and sums there.
func (l *dispatchCall) pass(a dispatchArgs, blocks int) {
	a.mode &^= dispatchByExpert
	if l.compact() {
		a.mode |= dispatchCompact
	}
	if !l.m.Layout.ByToken() {
		a.mode |= dispatchByExpert
	}
	a.part = dispatchPassPart
	if l.m.Layout.ByToken() && a.mode&dispatchBeside != 0 { // fewer tasks to tell of
		a.part = uint32(kernels.AlignUp(int64(a.rowBytes), dispatchPassPart))
	}
	a.parts = (a.rowBytes + a.part - 1) / a.part
	f := l.k.sums[numberKind(l.m.SumType)].partials
	if a.sum.y == 0 {
		f = l.sums().partials
	}
	l.launch(f, &a, blocks, dispatchSumPassThreads, 0)
}
