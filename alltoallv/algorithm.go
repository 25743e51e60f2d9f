package alltoallv

import (
	"fmt"
	"math"
	"strings"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Traffic is what a choice of algorithm can depend on, as one rank sees it.
type Traffic struct {
	Rank, Size int
	// Device is the kind of device that does the work.
	Device device.Kind
	// SendBytes and RecvBytes have one entry a rank; they belong to the Exchanger.
	SendBytes, RecvBytes []int64
	// SendTotal and RecvTotal leave out what stays on the rank.
	SendTotal, RecvTotal int64
	// Largest is the largest message to or from another rank.
	Largest int64
	// Skew is the largest message of a direction over the mean message of that direction, 1 for uniform splits.
	Skew float64
	// InPlace says that peers can write the output directly.
	InPlace bool
	// Pulled says that this rank reads large messages in their senders' memory where peers cannot write the output.
	Pulled bool
	// Placed says that Splits.PeerDispls are known.
	Placed bool
	// Live says that the splits are read when the exchange runs: the bytes here are an estimate.
	Live bool
	// Multiprocessors says that the device has as many as a Schedule wants, CopyEngines that it can move whole messages without them.
	Multiprocessors, CopyEngines bool
	// Shared says that other ranks run on this rank's GPU.
	Shared bool
	// PacketBytes and SlotBytes are the Exchanger's, MaxSMs bounds the multiprocessors: 0 with Options.NoSMs.
	PacketBytes, SlotBytes int64
	MaxSMs                 int

	table *estimates
}

// Schedule is how an algorithm serves the peers.
type Schedule struct {
	// Window is how many peers are received from at the same time; 0 means all. Senders follow their receivers' credits.
	Window int
	// Staged sends through staging slots even where the output could be written in place.
	Staged bool
	// ChunkBytes is how much one credit grants when the output is written in place; 0 grants a whole message.
	ChunkBytes int64
	// SMs is how many multiprocessors of a GPU a call above PacketBytes takes, at most Traffic.MaxSMs; 0 takes all of those, or
	// none where the copy engines do the work.
	SMs int
	// Rate holds the rank's senders on a GPU to so many GB/s together; 0 lets them send as fast as they can.
	Rate float64
	// Copies has a GPU's copy engines move the messages, where Traffic.InPlace and Placed.
	Copies bool
	// Reorder lets a rank of a GPU send in another order than Order, so that the receiver of most is never idle and the last to be through.
	Reorder bool
}

// Algorithm is a way to order an exchange. Implementations are stateless; the same ones, under the same names, are given
// to every rank.
type Algorithm interface {
	// Name is what Options.Algorithm and Explain call it.
	Name() string
	// Cost estimates the time of an exchange in microseconds; the lowest wins. +Inf means that it does not apply. why is
	// for people.
	Cost(t *Traffic) (us float64, why string)
	// Order lists the peers of a rank in the order in which it sends to them: every other rank once. For every i the map
	// from rank to Order(rank)[i] must be one to one, which New checks: a rank receives in step i from the one rank that
	// sends to it in step i.
	Order(rank, size int) []int
	// Schedule of an exchange that this algorithm has been chosen for.
	Schedule(t *Traffic) Schedule
}

// Rotation is the order rank+1, rank+2, ... that all built-in algorithms use: in step i everybody sends i+1 ranks ahead
// and receives from i+1 ranks behind.
func Rotation(rank, size int) []int {
	order := make([]int, size-1)
	for i := range order {
		order[i] = (rank + 1 + i) % size
	}
	return order
}

// Figures of a host without a table: what a message costs beside its bytes, what a step of a ring costs, in microseconds,
// and how many bytes a microsecond a core copies. They were measured with 2 and 4 processes on two cores, where a core
// copies 13 to 17 GB/s and a message costs a line or two. They only have to rank algorithms.
const (
	hostMessage = 0.3
	hostStep    = 1
	hostRate    = 12e3
)

// messages is what the messages of a rank cost beside their bytes.
func messages(t *Traffic) float64 { return hostMessage * float64(t.Size-1) }

// staged is the time of moving bytes through staging on the host, where the core that receives copies them out
// afterwards.
func staged(t *Traffic) float64 {
	all := float64(t.SendTotal + t.RecvTotal)
	return hostMessage*all/float64(t.SlotBytes) + all/hostRate
}

// cost is what the table says of an algorithm, or what formula does where there is none.
func (t *Traffic) cost(algorithm, why string, formula func(t *Traffic) float64) (float64, string) {
	if t.table == nil {
		return formula(t), why
	}
	if t.Largest <= t.PacketBytes && !t.Live && t.PacketBytes > 0 {
		algorithm, why = packet{}.Name(), "every message is a packet, whatever the order"
	}
	us, _, ok := t.Estimate(algorithm)
	if !ok {
		return math.Inf(1), "the table has no figures of it"
	}
	return us, why
}

// sms is how many multiprocessors the table gives an algorithm.
func (t *Traffic) sms(algorithm string) int {
	_, sms, _ := t.Estimate(algorithm)
	return sms
}

type packet struct{}

func (packet) Name() string               { return "packet" }
func (packet) Order(rank, size int) []int { return Rotation(rank, size) }
func (packet) Schedule(*Traffic) Schedule { return Schedule{} }
func (a packet) Cost(t *Traffic) (float64, string) {
	switch {
	case t.Largest > t.PacketBytes:
		return math.Inf(1), fmt.Sprintf("the largest message, %d bytes, exceeds a packet's %d", t.Largest, t.PacketBytes)
	case t.Live && t.Multiprocessors:
		return math.Inf(1), "messages of splits in device memory may exceed a packet"
	}
	return t.cost(a.Name(), "every message fits a packet: no signal after the data, no credit", func(t *Traffic) float64 { return messages(t) / 2 })
}

type direct struct{}

func (direct) Name() string                   { return "direct" }
func (direct) Order(rank, size int) []int     { return Rotation(rank, size) }
func (a direct) Schedule(t *Traffic) Schedule { return Schedule{SMs: t.sms(a.Name())} }
func (a direct) Cost(t *Traffic) (float64, string) {
	if t.InPlace {
		return t.cost(a.Name(), "peers write the output in place, all at once", func(t *Traffic) float64 {
			return messages(t) + float64(t.SendTotal)/hostRate
		})
	}
	if t.Pulled {
		return t.cost(a.Name(), "large messages are read in their senders' memory, all at once", func(t *Traffic) float64 {
			return messages(t) + float64(t.RecvTotal)/hostRate
		})
	}
	if t.Largest <= t.SlotBytes {
		return t.cost(a.Name(), "every message fits a staging slot", func(t *Traffic) float64 {
			return messages(t) + float64(t.SendTotal+t.RecvTotal)/hostRate
		})
	}
	return math.Inf(1), fmt.Sprintf("the output is not symmetric and the largest message, %d bytes, exceeds a staging slot's %d", t.Largest, t.SlotBytes)
}

type pipelined struct{}

func (pipelined) Name() string                   { return "pipelined" }
func (pipelined) Order(rank, size int) []int     { return Rotation(rank, size) }
func (a pipelined) Schedule(t *Traffic) Schedule { return Schedule{Staged: true, SMs: t.sms(a.Name())} }
func (a pipelined) Cost(t *Traffic) (float64, string) {
	return t.cost(a.Name(), "chunks go through fixed staging while earlier ones are copied out", func(t *Traffic) float64 {
		return messages(t) + staged(t)
	})
}

// evenSkew is up to which skew a ring's senders are held to a rate: their steps then take equally long.
const evenSkew = 1.25

func (t *Traffic) skewed() bool { return t.Skew > evenSkew }

type ring struct{}

func (ring) Name() string               { return "ring" }
func (ring) Order(rank, size int) []int { return Rotation(rank, size) }
func (a ring) Schedule(t *Traffic) Schedule {
	_, s, _ := t.estimate(a.Name())
	if t.skewed() { // not all links are busy at the same time, and those that are have several senders
		s.rate = 0
	}
	return Schedule{Window: 1, SMs: s.sms, Rate: s.rate, Reorder: t.skewed()}
}
func (a ring) Cost(t *Traffic) (float64, string) {
	return t.cost(a.Name(), "one peer at a time, for receivers that many senders at once would overload", func(t *Traffic) float64 {
		us := hostStep * float64(t.Size-1)
		switch {
		case t.InPlace:
			return us + float64(t.SendTotal)/hostRate
		case t.Pulled:
			return us + messages(t) + float64(t.RecvTotal)/hostRate
		}
		return us + messages(t) + staged(t)
	})
}

// copiesToOne is a part of the time that the table has, of equal parts, for copies of which one rank gets the most: at 512 MiB a
// rank 392 instead of 380 GB/s among 4 H200, 396 instead of 375 among 8.
const copiesToOne = 0.97

// aloneRate bounds the rate of senders that copy messages out of staging as well: 128 MiB a rank on 4 GPUs take 343 us at 355 GB/s and 359
// at 365, which is best with other multiprocessors for that.
const aloneRate = 355

// ownSMs is how many multiprocessors copy what stays on the rank while the copy engines move the rest: with 8 of them 512 MiB a rank
// took 1254 us on 8 H200, with a copy engine 1268.
const ownSMs = 8

type copyEngine struct{}

func (copyEngine) Name() string               { return "copy" }
func (copyEngine) Order(rank, size int) []int { return Rotation(rank, size) }
func (copyEngine) Schedule(t *Traffic) Schedule {
	return Schedule{Window: 1, SMs: ownSMs, Copies: true, Reorder: t.skewed()}
}
func (a copyEngine) Cost(t *Traffic) (float64, string) {
	switch {
	case !t.CopyEngines:
		return math.Inf(1), "only a GPU has copy engines"
	case t.Shared:
		return math.Inf(1), "other ranks run on this GPU, whose queues would hold up each other's copies"
	case t.Live:
		return math.Inf(1), "copy engines cannot read splits from device memory"
	case !t.InPlace || !t.Placed:
		return math.Inf(1), "copy engines need a symmetric destination and Splits.PeerDispls"
	}
	us, why := t.cost(a.Name(), "the copy engines move everything, one peer after the other", func(*Traffic) float64 { return math.Inf(1) })
	if t.skewed() && t.Largest > t.PacketBytes {
		us *= copiesToOne
	}
	return us, why
}

func builtin() []Algorithm {
	return []Algorithm{packet{}, direct{}, pipelined{}, ring{}, copyEngine{}}
}

// registry holds the algorithms of one Exchanger with their orders.
type registry struct {
	all     []Algorithm
	order   map[string][]int32
	reverse map[string][]int32
	forced  Algorithm
	device  device.Kind
	traits  kernels.Traits
	maxSMs  int
	copySMs int
	table   *estimates
}

// newRegistry is for options that are complete. The traits are set when they are known.
func newRegistry(o *Options, rank, size int, kind device.Kind) (*registry, error) {
	r := &registry{all: append(builtin(), o.Algorithms...), order: map[string][]int32{}, reverse: map[string][]int32{}, device: kind,
		maxSMs: o.MaxSMs, copySMs: o.CopySMs, table: o.Table.forWorld(size, o.MaxSMs)}
	if o.NoSMs {
		r.maxSMs = 0
	}
	for _, a := range r.all {
		name := a.Name()
		if _, twice := r.order[name]; twice || name == "" {
			return nil, invalid("two algorithms are called %q", name)
		}
		order, reverse, err := orders(a, rank, size)
		if err != nil {
			return nil, err
		}
		r.order[name], r.reverse[name] = order, reverse
		if name == o.Algorithm {
			r.forced = a
		}
	}
	if o.Algorithm != "" && r.forced == nil {
		return nil, invalid("no algorithm is called %q; there are %s", o.Algorithm, strings.Join(r.names(), ", "))
	}
	return r, nil
}

func (r *registry) names() []string {
	names := make([]string, len(r.all))
	for i, a := range r.all {
		names[i] = a.Name()
	}
	return names
}

// orders checks an algorithm's order on every rank and returns this rank's, with its mirror: who sends here in step i.
func orders(a Algorithm, rank, size int) (order, reverse []int32, err error) {
	reverse = make([]int32, size-1)
	from := make([][]int, size-1)
	for i := range from {
		from[i] = make([]int, size)
		for k := range from[i] {
			from[i][k] = -1
		}
	}
	for src := range size {
		peers := a.Order(src, size)
		if len(peers) != size-1 {
			return nil, nil, invalid("algorithm %s orders %d peers of rank %d among %d ranks", a.Name(), len(peers), src, size)
		}
		seen := make([]bool, size)
		for i, dst := range peers {
			if dst < 0 || dst >= size || dst == src || seen[dst] {
				return nil, nil, invalid("algorithm %s: the order %v of rank %d does not name every other rank once", a.Name(), peers, src)
			}
			seen[dst] = true
			if other := from[i][dst]; other >= 0 {
				return nil, nil, invalid("algorithm %s: ranks %d and %d both send to rank %d in step %d", a.Name(), other, src, dst, i)
			}
			from[i][dst] = src
			if src == rank {
				order = append(order, int32(dst))
			}
		}
	}
	for i := range reverse {
		reverse[i] = int32(from[i][rank])
	}
	return order, reverse, nil
}

// Decision is the answer of Explain.
type Decision struct {
	// Algorithm is the chosen one.
	Algorithm string
	// Forced says that Options.Algorithm left no choice.
	Forced bool
	// InPlace says that peers write the output directly.
	InPlace bool
	// Pulled says that this rank reads large messages in their senders' memory.
	Pulled bool
	// Cached says that the splits were in the cache.
	Cached bool
	// SMs is how many multiprocessors of a GPU the call takes; 0 leaves it to the kernel, or needs none.
	SMs int
	// CopySMs is how many more of them copy messages out of staging, 0 when those that send do it.
	CopySMs int
	// Rate is the GB/s to which the senders are held together on a GPU, 0 when they are not.
	Rate float64
	// Modes counts the messages to other ranks by wire mode: packet, eager, credit.
	Modes [3]int
	// Candidates holds every algorithm's estimate, in the order in which they are tried.
	Candidates []Candidate
}

// Candidate is one algorithm's estimate.
type Candidate struct {
	Algorithm    string
	Microseconds float64
	Why          string
}

// String says in a few lines what was chosen and why.
func (d Decision) String() string {
	var b strings.Builder
	how := "lowest estimate"
	if d.Forced {
		how = "forced"
	}
	b.WriteString(d.Algorithm)
	if d.SMs > 0 {
		fmt.Fprintf(&b, " on %d multiprocessors", d.SMs)
	}
	if d.Rate > 0 {
		fmt.Fprintf(&b, " at %g GB/s", d.Rate)
	}
	fmt.Fprintf(&b, " (%s); messages: %d packet, %d eager, %d credit", how, d.Modes[0], d.Modes[1], d.Modes[2])
	switch {
	case d.InPlace:
		b.WriteString("; output in place")
	case d.Pulled:
		b.WriteString("; output pulled")
	default:
		b.WriteString("; output through staging")
		if d.CopySMs > 0 {
			fmt.Fprintf(&b, " by %d more multiprocessors", d.CopySMs)
		}
	}
	for _, c := range d.Candidates {
		fmt.Fprintf(&b, "\n  %-10s %10.1f us  %s", c.Algorithm, c.Microseconds, c.Why)
	}
	return b.String()
}

// chunkFor is the least chunk with which a message of n bytes has few enough of them to be numbered.
func chunkFor(n int64) int64 { return (n + kernels.MaxChunks - 1) / kernels.MaxChunks }

// skew is the largest message over the mean, own part left out.
func skew(bytes []int64, all int64, rank int) float64 {
	if all == 0 {
		return 1
	}
	var largest int64
	for k, n := range bytes {
		if k != rank {
			largest = max(largest, n)
		}
	}
	return float64(largest) * float64(len(bytes)-1) / float64(all)
}

// choose fills one of the plan's routes, with its schedule, and says why.
func (r *registry) choose(p *plan, inPlace bool, c *kernels.Channels, rank int) {
	at := 0
	if inPlace {
		at = 1
	}
	routes, d := &p.routes[at], &p.chosen[at]
	t := Traffic{Rank: rank, Size: c.Size, Device: r.device, SendBytes: routes.SendBytes, RecvBytes: routes.RecvBytes, SendTotal: p.sendAll,
		RecvTotal: p.recvAll, InPlace: inPlace, Pulled: r.traits.Pulls && !inPlace, Placed: routes.PeerOffsets != nil, Live: p.splits.live(),
		Multiprocessors: r.traits.Multiprocessors, CopyEngines: r.traits.CopyEngines, Shared: r.traits.Shared,
		PacketBytes: c.PacketBytes, SlotBytes: c.SlotBytes, MaxSMs: r.maxSMs, table: r.table}
	*d = Decision{InPlace: inPlace, Forced: r.forced != nil, Candidates: d.Candidates[:0]}
	for k := range c.Size {
		if k == rank {
			continue
		}
		t.Largest = max(t.Largest, routes.SendBytes[k], routes.RecvBytes[k])
		d.Modes[c.Mode(routes.SendBytes[k])]++
	}
	t.Skew = max(1, skew(routes.SendBytes, p.sendAll, rank), skew(routes.RecvBytes, p.recvAll, rank))
	best, lowest := r.forced, math.Inf(1)
	for _, a := range r.all {
		us, why := a.Cost(&t)
		d.Candidates = append(d.Candidates, Candidate{a.Name(), us, why})
		if r.forced == nil && (best == nil || us < lowest) {
			best, lowest = a, us
		}
	}
	d.Algorithm = best.Name()
	s := best.Schedule(&t)
	routes.Order, routes.ReverseOrder = r.order[d.Algorithm], r.reverse[d.Algorithm]
	if s.Reorder && t.ordered() {
		p.order[at] = t.sendOrder(p.order[at])
		routes.Order = p.order[at]
	}
	p.schedule[at] = r.schedule(&t, s)
	d.tell(&t, &p.schedule[at])
}

// schedule is what the engine gets of an algorithm's wishes.
func (r *registry) schedule(t *Traffic, s Schedule) kernels.Schedule {
	k := kernels.Schedule{Staged: s.Staged, Copies: s.Copies && t.CopyEngines && t.InPlace && t.Placed}
	if s.Window > 0 && s.Window <= t.Size {
		k.Window = s.Window
	}
	if s.ChunkBytes > 0 {
		k.ChunkBytes = max(s.ChunkBytes, chunkFor(t.Largest))
	}
	if t.Largest <= t.PacketBytes && !t.Live {
		return k
	}
	k.Blocks, k.Rate = max(0, min(s.SMs, r.maxSMs)), max(0, s.Rate)
	switch {
	case t.InPlace && !s.Staged:
	case r.copySMs == 0 || !t.Multiprocessors:
		k.Rate = min(k.Rate, aloneRate)
	default:
		if k.CopyBlocks = k.Blocks; k.Blocks == 0 {
			k.CopyBlocks = r.maxSMs
		}
		if k.CopyBlocks > r.copySMs { // as many send
			k.Blocks, k.CopyBlocks = r.copySMs, r.copySMs
		}
	}
	return k
}

// tell fills in what a schedule says.
func (d *Decision) tell(t *Traffic, k *kernels.Schedule) {
	d.SMs, d.CopySMs, d.Rate = k.Blocks, k.CopyBlocks, k.Rate
	d.Pulled = t.Pulled && !k.Staged
}
