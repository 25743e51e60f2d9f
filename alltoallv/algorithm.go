package alltoallv

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Traffic is the input of a choice of algorithm, as one rank sees it.
type Traffic struct {
	Rank, Size int
	// Device is the kind of device that does the work.
	Device device.Kind
	// SendBytes and RecvBytes have one entry a rank; they belong to the Exchanger.
	SendBytes, RecvBytes []int64
	// SendTotal and RecvTotal leave out the bytes that stay on the rank.
	SendTotal, RecvTotal int64
	// Largest is the largest message to or from another rank.
	Largest int64
	// Skew is the largest message of a direction over the mean message of that direction, 1 for uniform splits.
	Skew float64
	// InPlace says that peers can write the output directly.
	InPlace bool
	// Pulled says that this rank reads large messages in their senders' memory if peers cannot write the output.
	Pulled bool
	// Placed says that Splits.PeerDispls are known.
	Placed bool
	// Live says that the splits are read when the exchange runs: the bytes here are an estimate.
	Live bool
	// Multiprocessors says that the device can give a Schedule its multiprocessors, CopyEngines that it can move whole messages without them.
	Multiprocessors, CopyEngines bool
	// Shared says that other ranks run on this rank's GPU.
	Shared bool
	// PacketBytes and SlotBytes are the Exchanger's; MaxSMs bounds the multiprocessors, 0 with Options.NoSMs.
	PacketBytes, SlotBytes int64
	MaxSMs                 int

	table   *estimates
	log     float64 // of link(), for the table
	explain bool    // the reasons are wanted
}

// why is a reason with two numbers in it; empty unless reasons are wanted.
func (t *Traffic) why(format string, a, b int64) string {
	if !t.explain {
		return ""
	}
	return fmt.Sprintf(format, a, b)
}

// Schedule is how an algorithm serves the peers.
type Schedule struct {
	// Window is the number of peers from which a rank receives at the same time; 0 means all. Senders follow their receivers' credits.
	Window int
	// Staged sends through staging slots, also if peers could write the output in place.
	Staged bool
	// ChunkBytes is the number of bytes that one credit grants if peers write the output in place; 0 grants a whole message.
	ChunkBytes int64
	// SMs is the number of multiprocessors of a GPU that a call above PacketBytes takes, at most Traffic.MaxSMs; 0 takes all of those, or
	// none if the copy engines do the work.
	SMs int
	// Rate bounds the rank's senders on a GPU together, in GB/s; 0 lets them send as fast as they can.
	Rate float64
	// Copies has a GPU's copy engines move the messages, which needs Traffic.InPlace and Placed.
	Copies bool
	// Reorder lets a rank on a GPU send in another order than Order, so that the receiver with most bytes is never idle and ends last.
	Reorder bool
}

// Algorithm is a way to order an exchange. Implementations are stateless; every rank gets the same ones, with the same
// names.
type Algorithm interface {
	// Name is the name in Options.Algorithm and Explain.
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

// Rotation is the order rank+1, rank+2, ... that all built-in algorithms use: in step i each rank sends to the rank i+1
// ahead and receives from the rank i+1 behind.
func Rotation(rank, size int) []int {
	order := make([]int, size-1)
	for i := range order {
		order[i] = (rank + 1 + i) % size
	}
	return order
}

// registry holds the algorithms of one Exchanger with their orders.
type registry struct {
	all    []ordered
	device device.Kind
	traits kernels.Traits
	limits Limits             // of the Exchanger, complete
	tables map[int]*estimates // by Limits.MaxSMs
	table  *Table
	fluid  fluid
	room   Traffic // of the plan that is being made
}

// ordered is an algorithm with its order on this rank. told is what ranks compare of it.
type ordered struct {
	Algorithm
	name, told     string
	order, reverse []int32
}

// newRegistry is for options that are complete. The traits are set when they are known.
func newRegistry(o *Options, rank, size int, kind device.Kind) (*registry, error) {
	r := &registry{device: kind, limits: o.limits(), tables: map[int]*estimates{}, table: o.Table}
	for i, a := range append(builtin(), o.Algorithms...) {
		name := a.Name()
		switch {
		case name == "":
			return nil, invalid("an algorithm has no name")
		case r.find(name) >= 0:
			return nil, invalid("two algorithms are called %q", name)
		}
		if l, ok := a.(listed); ok {
			if err := l.list.validate(); err != nil {
				return nil, err
			}
		}
		order, reverse, err := orders(a, rank, size)
		if err != nil {
			return nil, err
		}
		told := name
		if i >= len(builtin()) {
			text, err := digested(a, size)
			if err != nil {
				return nil, invalid("algorithm %q: %v", name, err)
			}
			told = fmt.Sprintf("%s of digest %016x", name, xxhash.Sum64(text))
		}
		r.all = append(r.all, ordered{a, name, told, order, reverse})
	}
	if err := r.check(r.limits); err != nil {
		return nil, err
	}
	r.estimates(size, r.limits.MaxSMs)
	return r, nil
}

// find is the index of an algorithm, or -1.
func (r *registry) find(name string) int {
	return slices.IndexFunc(r.all, func(a ordered) bool { return a.name == name })
}

// check refuses limits that name no algorithm.
func (r *registry) check(l Limits) error {
	switch {
	case l.MaxSMs < 0 || l.MaxSMs > mostSMs || l.CopySMs > mostSMs:
		return invalid("MaxSMs is %d and CopySMs %d, want 0 to %d and at most %d", l.MaxSMs, l.CopySMs, mostSMs, mostSMs)
	case l.NoSMs && l.Algorithm != "" && l.Algorithm != (copyEngine{}).Name():
		return invalid("NoSMs with algorithm %q", l.Algorithm)
	case l.Algorithm != "" && r.find(l.Algorithm) < 0:
		return invalid("no algorithm is called %q; there are %s", l.Algorithm, strings.Join(r.names(), ", "))
	}
	return nil
}

// estimates are the table's for calls with at most maxSMs multiprocessors.
func (r *registry) estimates(size, maxSMs int) *estimates {
	e, ok := r.tables[maxSMs]
	if !ok {
		e = r.table.forWorld(size, maxSMs)
		r.tables[maxSMs] = e
	}
	return e
}

func (r *registry) names() []string {
	names := make([]string, len(r.all))
	for i, a := range r.all {
		names[i] = a.name
	}
	return names
}

// told is what ranks compare of the algorithms.
func (r *registry) told() []string {
	told := make([]string, len(r.all))
	for i, a := range r.all {
		told[i] = a.told
	}
	return told
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

// chunkFor is the least chunk with which a message of n bytes has few enough of them to be numbered.
func chunkFor(n int64) int64 { return (n + kernels.MaxChunks - 1) / kernels.MaxChunks }

// skew is the largest message over the mean, own part left out.
func skew(largest, all int64, size int) float64 {
	if all == 0 {
		return 1
	}
	return float64(largest) * float64(size-1) / float64(all)
}

// traffic is a call as algorithms see it. at is the index of the plan's route: with 1 peers can write the output.
func (r *registry) traffic(p *plan, at int, c *kernels.ExchangeBounds, rank int) Traffic {
	routes := &p.routes[at]
	t := Traffic{Rank: rank, Size: c.Size, Device: r.device, SendBytes: routes.SendBytes, RecvBytes: routes.RecvBytes, SendTotal: p.sendAll,
		RecvTotal: p.recvAll, Largest: max(p.largestSend, p.largestRecv), InPlace: at == 1, Pulled: r.traits.Pulls && at == 0,
		Placed: routes.PeerOffsets != nil, Live: p.splits.live(), Multiprocessors: r.traits.Multiprocessors, CopyEngines: r.traits.CopyEngines,
		Shared: r.traits.Shared, PacketBytes: c.PacketBytes, SlotBytes: c.SlotBytes}
	l := r.limits.with(p.splits.Limits)
	if !l.NoSMs {
		t.MaxSMs = l.MaxSMs
	}
	t.Skew = max(1, skew(p.largestSend, p.sendAll, c.Size), skew(p.largestRecv, p.recvAll, c.Size))
	if t.table = r.estimates(c.Size, l.MaxSMs); t.table != nil {
		t.log = math.Log2(float64(max(t.link(), 1)))
	}
	return t
}

// choose fills in the order and the schedule of one of the plan's routes.
func (r *registry) choose(p *plan, at int, c *kernels.ExchangeBounds, rank int) {
	t, l := &r.room, r.limits.with(p.splits.Limits)
	*t = r.traffic(p, at, c, rank)
	routes, d := &p.routes[at], &p.chosen[at]
	*d = Decision{InPlace: t.InPlace, Forced: l.Algorithm != "" || l.NoSMs}
	for k := range c.Size {
		switch {
		case k == rank:
		case c.Hosts != nil && !slices.Contains(c.Hosts.Ranks, k):
			if d.Across++; routes.SendBytes[k] <= c.BundleBytes {
				d.Bundled++
			}
		default:
			d.Modes[c.Mode(routes.SendBytes[k])]++
		}
	}
	best := -1
	switch {
	case l.NoSMs:
		best = r.find(copyEngine{}.Name())
	case l.Algorithm != "":
		best = r.find(l.Algorithm)
	default:
		lowest := math.Inf(1)
		for i := range r.all {
			if us, _ := r.all[i].Cost(t); best < 0 || us < lowest {
				best, lowest = i, us
			}
		}
	}
	a := &r.all[best]
	s := a.Schedule(t)
	d.Algorithm, routes.Order, routes.ReverseOrder = a.name, a.order, a.reverse
	if s.Reorder && t.ordered() {
		p.order[at] = t.guess(&r.fluid).of(p.order[at], r.fluid.to, t.Rank)
		routes.Order, p.rough[at] = p.order[at], reorderAfter
	}
	p.schedule[at] = l.schedule(t, s)
	d.tell(t, &p.schedule[at])
}

// reorderAfter is the number of further calls with the same splits after which their order is worked out. If every call has new splits, as
// in MoE, it never is.
const reorderAfter = 2

// reorder works out the order of one of the plan's routes. Launches may still read the last one.
func (r *registry) reorder(p *plan, at int, c *kernels.ExchangeBounds, rank int) {
	r.room = r.traffic(p, at, c, rank)
	p.order[at] = r.room.sendOrder(&r.fluid, nil)
	p.routes[at].Order = p.order[at]
}

// candidates are all algorithms' estimates, in the order of the attempts.
func (r *registry) candidates(t Traffic) []Candidate {
	t.explain = true
	var all []Candidate
	for _, a := range r.all {
		us, why := a.Cost(&t)
		all = append(all, Candidate{a.name, us, why})
	}
	return all
}

// schedule is the engine's schedule for that of an algorithm, within the limits.
func (l Limits) schedule(t *Traffic, s Schedule) kernels.Schedule {
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
	k.Blocks, k.Rate = max(0, min(s.SMs, t.MaxSMs)), max(0, s.Rate)
	switch {
	case t.InPlace && !s.Staged:
	case l.CopySMs <= 0 || !t.Multiprocessors:
		k.Rate = min(k.Rate, aloneRate)
	default:
		if k.CopyBlocks = k.Blocks; k.Blocks == 0 {
			k.CopyBlocks = t.MaxSMs
		}
		if k.CopyBlocks > l.CopySMs { // as many send
			k.Blocks, k.CopyBlocks = l.CopySMs, l.CopySMs
		}
	}
	return k
}
