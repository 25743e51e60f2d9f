package comm

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
)

// Group is one rank's end of a group of ranks that have met. Its methods may
// be called from several goroutines.
//
// AllGather, Barrier, Share, ExchangeFDs, Split, Admit and Shrink are collective:
// every rank of the group calls them, in the same order. Ranks that call
// different things at the same place get [ErrMismatch]; ranks are matched by
// call number, so calls from several goroutines of one rank need an order of
// their own.
//
// A collective call ends early when its context does. The rank has then still
// taken part (the others may complete the call, and later calls match as if
// nothing had happened), only it does not know the outcome. Split is the
// exception: a rank that gives up on it aborts the group, because half a
// subgroup is of no use to anybody.
//
// A group fails as a whole and for good: when a rank dies or is cut off
// ([ErrPeerLost]), when one calls Abort ([ErrAborted]), when ranks call
// different things ([ErrMismatch]), or when a rank has closed its end while
// others still wait for it ([ErrPeerLost]). Every rank learns it at once, and
// every call, running or to come, returns a [*PeerError] with the reason.
type Group struct {
	n      *node
	log    *slog.Logger
	id     uint64
	name   string
	parent uint64

	// Set by activate, before any caller has the group.
	rank       int
	members    []int       // world rank of every rank
	rankOf     map[int]int // its inverse
	topology   Topology
	home, rail *Group // nil where they are g, or this rank alone

	making sync.Mutex // of single
	single *Group

	done chan struct{} // closed when the group has failed or is closed

	// Guarded by n.mu.
	active  bool
	early   []inbound
	seq     uint64 // number of the next collective call, from 1; 0 is the join
	pending map[uint64]*pending
	left    map[int]bool     // world ranks that have closed their end
	out     map[int]bool     // world ranks that died or aborted, as far as told
	lost    map[int]*failure // why ranks of left have died, where OnLoss kept the group
	outlive map[*outliving]struct{}
	err     error // why the group failed
	closed  bool
	ended   bool // done is closed
	cbs     map[*callback]struct{}
	shrink  shrinking
	past    *past // nil without Config.Replaceable
	replay  *past // of a lost rank, whose place this process has taken

	mails    map[uint32]*Mail // by their number
	lastMail uint32

	inquiries   map[uint64]*inquiry // that wait for answers
	lastInquiry uint64
	gaveUp      struct { // the last call that this rank gave up
		seq     uint64
		missing []int
	}
}

type inbound struct {
	from int
	m    message
}

// Rank is this rank's number in the group, from 0 to Size-1.
func (g *Group) Rank() int { return g.rank }

// Size is the number of ranks of the group, the failed ones included.
func (g *Group) Size() int { return len(g.members) }

// Name is for logs and error messages: "world" or the name given at the start,
// and for subgroups their parent's name and how they were made of it.
func (g *Group) Name() string { return g.name }

// Logger is where what is worth knowing about the group goes, and what stands on it and was given no logger of its own.
func (g *Group) Logger() *slog.Logger { return g.log }

// Mute ends what the group itself logs. It comes before the first call on the group.
func (g *Group) Mute() { g.log = slog.New(slog.DiscardHandler) }

// AwaitedBy is the earliest call of the group in which a peer waits for this rank, which has not made it: the call in words, and its
// number, which is never 0. It is "" and 0 if no peer waits. It sends no message.
func (g *Group) AwaitedBy(peer int) (call string, seq uint64) {
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	op := opNone
	for at, p := range g.pending {
		if at > 0 && p.op == opNone && peer < len(p.parts) && p.parts[peer] != nil && (seq == 0 || at < seq) {
			op, seq = p.parts[peer].op, at
		}
	}
	if seq == 0 {
		return "", 0
	}
	return fmt.Sprintf("%v, call %d of group %s", op, seq, g.name), seq
}

// Left reports whether a rank has closed the group on its side. It sends no message.
func (g *Group) Left(rank int) bool {
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	return rank >= 0 && rank < len(g.members) && g.left[g.members[rank]]
}

// String returns the name with the rank and the size.
func (g *Group) String() string {
	return fmt.Sprintf("%s[%d/%d]", g.name, g.rank, len(g.members))
}

// InProcess reports whether all ranks of the group are known to live in this
// process and on one host, so that [Group.Share] works. It is the same on every
// rank.
func (g *Group) InProcess() bool {
	switch {
	case len(g.members) == 1:
		return true
	case g.topology.Hosts > 1:
		return false
	}
	g.n.mu.Lock()
	defer g.n.mu.Unlock()
	for _, m := range g.members {
		if m == g.n.id {
			continue
		}
		if _, ok := g.n.links[m].(*localLink); !ok {
			return false
		}
	}
	return true
}

// AllGather hands every rank's bytes to every rank: entry i of the result is
// what rank i passed, of whatever length, up to 1 GiB. The result belongs to
// the caller; data is copied before AllGather returns.
func (g *Group) AllGather(ctx context.Context, data []byte) ([][]byte, error) {
	parts, err := g.exchange(ctx, opAllGather, message{data: data})
	if err != nil {
		return nil, err
	}
	out := make([][]byte, len(parts))
	for r, m := range parts {
		if out[r] = m.data; out[r] == nil {
			out[r] = []byte{}
		}
	}
	return out, nil
}

// Barrier returns once every rank has called it.
func (g *Group) Barrier(ctx context.Context) error {
	_, err := g.exchange(ctx, opBarrier, message{})
	return err
}

// Share hands every rank's value to every rank, as it is: entry i of the
// result is what rank i passed. It serves groups whose ranks all live in this
// process and returns an error that wraps [errors.ErrUnsupported] in others.
// The ranks share the memory that the values point to, and must agree on which
// rank may change it.
func (g *Group) Share(ctx context.Context, v any) ([]any, error) {
	if !g.InProcess() {
		return nil, fmt.Errorf("comm: share: ranks of %s live in other processes: %w", g, errors.ErrUnsupported)
	}
	parts, err := g.exchange(ctx, opShare, message{val: v})
	if err != nil {
		return nil, err
	}
	out := make([]any, len(parts))
	for r, m := range parts {
		out[r] = m.val
	}
	return out, nil
}

// MaxFDs is the most file descriptors a rank may pass in one ExchangeFDs.
const MaxFDs = 1024

// ExchangeFDs hands every rank's file descriptors to every rank: entry i of
// the result holds duplicates of what rank i passed, in its order, close on
// exec. The caller owns all of them, its own entry included, and closes them;
// fds remain the caller's too and may be closed as soon as the call returns.
// After an error nothing is left open. A rank may pass none, and at most
// [MaxFDs]. When descriptors of one rank could not be duplicated or received,
// the call fails and the group lives on. Descriptors do not cross hosts: of a
// group on several the error is [ErrUnsupported], and [Group.Home] can do it.
func (g *Group) ExchangeFDs(ctx context.Context, fds []int) ([][]int, error) {
	if n := g.topology.Hosts; n > 1 {
		return nil, fmt.Errorf("comm: %v: ranks of %s are on %d hosts: %w", opExchangeFDs, g, n, ErrUnsupported)
	}
	parts, err := g.exchange(ctx, opExchangeFDs, message{fds: fds})
	if err != nil {
		return nil, err
	}
	out := make([][]int, len(parts))
	for r, m := range parts {
		out[r] = m.fds
	}
	return out, nil
}

// Split divides the group: ranks that pass the same color, 0 or greater, form
// a new group, ordered by key and among equal keys by their rank here. A rank
// with a negative color takes part but belongs to no new group; it gets nil.
//
// The new groups live on the same connections as their parent and independently
// of it: each is closed by its own Close, may be split again, and may outlive
// its parent. The loss of a rank fails only the groups it belongs to; an Abort
// fails the group and all that were split from it.
func (g *Group) Split(ctx context.Context, color, key int) (*Group, error) {
	c, err := g.startCall(opSplit)
	if err != nil {
		return nil, err
	}
	// The new group must be known before the others can learn that it exists.
	var sub *Group
	if color >= 0 {
		name := g.name + "/" + strconv.Itoa(color)
		sub, err = g.n.register(groupID(g.id, "split", c.seq, uint64(color)), name, g.id)
		if err != nil {
			g.giveUp(c)
			return nil, fmt.Errorf("comm: split: %w", err)
		}
	}
	fail := func(err error) (*Group, error) {
		if sub != nil {
			sub.Close()
		}
		if g.Err() == nil {
			g.Abort(err)
		}
		return nil, err
	}
	var data [16]byte
	binary.LittleEndian.PutUint64(data[0:], uint64(int64(color)))
	binary.LittleEndian.PutUint64(data[8:], uint64(int64(key)))
	parts, err := g.finishCall(ctx, c, message{data: data[:]})
	if err != nil {
		return fail(err)
	}
	type place struct{ key, rank int }
	var places []place
	for r, m := range parts {
		pc, pk, err := decodeSplit(m.data)
		if err != nil {
			return fail(&PeerError{Rank: r, Op: opSplit.String(), Epoch: c.seq, Err: err})
		}
		if color >= 0 && pc == color {
			places = append(places, place{pk, r})
		}
	}
	if sub == nil {
		return nil, nil
	}
	slices.SortFunc(places, func(a, b place) int {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.rank, b.rank))
	})
	members := make([]int, len(places))
	for i, p := range places {
		members[i] = g.members[p.rank]
	}
	g.n.activate(sub, members)
	if c.past != nil {
		g.n.recall(sub)
	}
	return sub, nil
}

func decodeSplit(b []byte) (color, key int, err error) {
	if len(b) != 16 {
		return 0, 0, fmt.Errorf("%w: a split of %d bytes, not 16", errMalformed, len(b))
	}
	color = int(int64(binary.LittleEndian.Uint64(b[0:])))
	key = int(int64(binary.LittleEndian.Uint64(b[8:])))
	return color, key, nil
}

// Close leaves the group in good order. It waits for nobody: the others go on
// until they need this rank again, and calls of this rank that are running
// return [ErrClosed]. When the last group of a world is closed, the connections
// are too. Close is idempotent and returns nil, also on a group that failed.
func (g *Group) Close() error {
	n := g.n
	for _, d := range g.derived() {
		d.Close()
	}
	n.mu.Lock()
	if g.closed {
		n.mu.Unlock()
		return nil
	}
	g.closed = true
	g.cbs = nil
	for _, m := range g.mails {
		m.end()
	}
	if !g.ended {
		g.ended = true
		close(g.done)
	}
	g.signalShrink()
	var ls []link
	if g.active {
		ls = n.linksTo(g.members, -1)
	}
	sub := g.shrink.next
	g.shrink.next = nil
	n.mu.Unlock()
	for _, l := range ls {
		l.send(message{kind: kindLeave, gid: g.id})
	}
	if sub != nil {
		n.unregister(sub)
	}
	n.unregister(g)
	return nil
}

// Kill drops this rank out of its world the way a crash of its process would,
// without a word to anybody: the others lose it and all its groups fail. It is
// there to test how a program deals with failures, with [Local] groups too.
func (g *Group) Kill() { g.n.kill() }

// groupID derives the number of a new group from its parent's, so that all
// members know it without having to ask.
func groupID(parent uint64, how string, a, b uint64) uint64 {
	buf := binary.LittleEndian.AppendUint64(nil, parent)
	buf = binary.LittleEndian.AppendUint64(buf, a)
	buf = binary.LittleEndian.AppendUint64(buf, b)
	buf = append(buf, how...)
	sum := sha256.Sum256(buf)
	return binary.LittleEndian.Uint64(sum[:])
}
