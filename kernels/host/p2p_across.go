package host

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A rail only puts, and puts that name different words have no order. So what is between two ranks of different hosts is a few logs: records at
// the end of each, which the other writes in turn and counts by a word. A record is written over when its reader has said something that it
// only says behind it.
//
// A message is a record in a box of its receiver, with its bytes if they are few. Its receiver answers that it has it, or that it expects
// another size. To a larger one it answers that it wants it, one after the other for each sender: then the chunks come through a ring of slots.
// Either side gives up by a record. The sender says how many chunks it has put, so both know whose the next chunk in the ring is.
//
// Every launch that waits moves everything that is between its rank and the other one. A goroutine of the rank (tend) moves messages that are
// copied aside, and serves memory that others get, while no launch waits.

// pointsAcross is what transfers have for ranks of other hosts.
type pointsAcross struct {
	hostRanks
	c      *kernels.PointBounds
	offset int64
	slots  int64         // where slots begin
	pairs  []*farPair    // with the ranks of other hosts, in their order
	aside  atomic.Int32  // messages that are copied aside,
	parked *atomic.Int64 // and their bytes
	active atomic.Int32  // launches
	quiet  bool          // nothing is put any more

	wake, quit, over chan struct{} // of the goroutine
	once             sync.Once
}

// The words by which a rank counts the puts of one rank of another host.
const (
	postsWord     = movesWord + 1 + iota // messages
	repliedWord                          // and what this rank is told of its own
	withdrawnWord                        // messages that are taken back
	pieceWord                            // chunks of large messages
	creditsWord                          // halves of the ring of chunks that are free again
	putsWord                             // parts of puts
	asksWord                             // parts of gets that are asked for
	repliesWord                          // and have come
	wantsWord                            // what the rank waits for
	signalsWord                          // signals, by semaphore; behind them halves of their logs that are free again
)

const (
	farSlots  = 8  // of StagingBytes in the ring of chunks
	getSlots  = 2  // and of parts of gets
	signalLog = 64 // signals of a semaphore that nobody has consumed
	// answersEach is how many answers a message has at most.
	answersEach = 3
	farRecord   = 32
)

func newPointsAcross(c *kernels.PointBounds, offset int64) (a *pointsAcross, inner PointBlock) {
	a = &pointsAcross{hostRanks: newHostRanks(c.Hosts), c: c, offset: offset}
	bounds := *c
	bounds.Size = a.perHost
	inner = PointBlock{&bounds, offset + int64(len(a.others))*a.bytes()}
	a.slots = inner.Offset + inner.Bytes()
	return a, inner
}

func (a *pointsAcross) words() int { return signalsWord + 2*a.c.Semaphores }

// Where the parts of what one rank of another host writes lie, from their beginning.
func (a *pointsAcross) answersAt() int64 {
	return kernels.AlignUp(int64(8*(2*a.words()+1)), kernels.LineBytes)
}
func (a *pointsAcross) withdrawnAt() int64 {
	return a.answersAt() + int64(answersEach*a.c.Boxes)*farRecord
}
func (a *pointsAcross) wantsAt() int64   { return a.withdrawnAt() + int64(a.c.Boxes)*farRecord }
func (a *pointsAcross) asksAt() int64    { return a.wantsAt() + kernels.LineBytes }
func (a *pointsAcross) signalsAt() int64 { return a.asksAt() + getSlots*farRecord }
func (a *pointsAcross) boxesAt() int64 {
	return a.signalsAt() + int64(a.c.Semaphores)*signalLog*8
}
func (a *pointsAcross) boxBytes() int64 {
	return kernels.LineBytes + kernels.AlignUp(a.c.EagerBytes, kernels.LineBytes)
}
func (a *pointsAcross) bytes() int64 { return a.boxesAt() + int64(a.c.Boxes)*a.boxBytes() }

// area is where the part of rank from begins in the segments of a host.
func (a *pointsAcross) area(host, from int) int64 { return a.offset + a.number(host, from)*a.bytes() }

// slot is where slot k of rank from is on a host: those of chunks come first.
func (a *pointsAcross) slot(host, from int, k uint64) int64 {
	return a.slots + (a.number(host, from)*(farSlots+getSlots)+int64(k))*a.c.StagingBytes
}

func (a *pointsAcross) layout(inner *PointBlock) kernels.Layout {
	slots := int64(len(a.others)*(farSlots+getSlots)) * a.c.StagingBytes
	return kernels.Layout{Bytes: a.slots + slots - a.offset, Zero: inner.Offset + inner.ControlBytes() - a.offset}
}

// farPair is what is between this rank and one of another host.
type farPair struct {
	far
	a      *pointsAcross
	failed failedWait
	steps  uint64 // that something has been moved; far.heard is when that was last
	bytes  int64  // that were moved and no launch has counted

	// Messages of this rank.
	chunks   []byte // on their way, by slot
	boxes    []*sending
	records  [][]byte // by box
	answered uint64   // answers that have been read
	told     [][]byte // the records of answers, and of messages that were taken back
	backs    [][]byte
	// Messages to this rank.
	seen      uint64 // that have been looked at, as have those that were taken back
	withdrawn uint64
	back      *incoming   // the last one that was taken back, until there is another message
	arrived   []*incoming // and nobody has claimed, in their order
	pending   []*end      // receives that have claimed none, the oldest first
	queue     []*incoming // claimed large ones: the first is on its way
	granted   bool        // and its sender has been told
	taken     uint64      // chunks
	// Signals, by semaphore.
	consumed []uint64
	signals  [][]byte // their records
	// Gets: parts that this rank has asked for and those that it has served.
	gets   sync.Mutex // one get is made at a time
	asked  uint64
	served atomic.Uint64
	asks   [getSlots][]byte
}

// sending is a message of this rank in a box.
type sending struct {
	number, tag uint64
	src         []byte
	bytes       int64
	extent      extent
	pushed      int64
	chunks      uint64
	granted     bool
	refused     bool // its receiver has given up
	back        bool // it is taken back
	over        bool
	awaited     bool // a launch waits for its end
	told        bool // of an end that no launch has waited for
	parked      bool
	phase       uint64
	expected    extent
}

// incoming is a message of another host.
type incoming struct {
	number, tag uint64
	bytes       int64
	extent      extent
	box         int
	h           *end // that has claimed it
	dst         []byte
	done        int64
	chunks      uint64
	until       uint64 // how many chunks come at most
	phase       uint64 // 0, taken or withdrawn
}

// all is how many chunks a message has.
func (a *pointsAcross) all(bytes int64) uint64 {
	return uint64((bytes + a.c.StagingBytes - 1) / a.c.StagingBytes)
}

func (a *pointsAcross) openFars(e *Engine) {
	records := func(n int) [][]byte {
		all := make([]byte, n*farRecord)
		return slices.Collect(slices.Chunk(all, farRecord))
	}
	for range a.others {
		f := &farPair{a: a, boxes: make([]*sending, a.c.Boxes), records: make([][]byte, a.c.Boxes),
			told: records(answersEach * a.c.Boxes), backs: records(a.c.Boxes),
			consumed: make([]uint64, a.c.Semaphores), signals: records(a.c.Semaphores * signalLog)}
		copy(f.asks[:], records(getSlots))
		a.openFar(&f.far, e, a.words(), a.area)
		a.pairs = append(a.pairs, f)
	}
	e.ringMates()
	a.wake, a.quit, a.over = make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	e.landing(a, a.landed)
	go a.tend()
}

// put sends bytes to a place of the other rank, which are not written before they have left. f is locked.
func (f *farPair) put(place int64, src []byte, word int) error {
	if f.a.quiet {
		return nil
	}
	return f.far.put(place, src, word)
}

// silence counts from when something was moved between the ranks, or the other has said that it moves bytes.
func (f *farPair) silence(w *waiter, waited time.Duration) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.count(movesWord); n != f.landed {
		f.landed, f.heard = n, time.Now()
	}
	return f.since(w, waited, f.heard)
}

// progress moves what is between the ranks. It reports whether that was anything. f is locked.
func (f *farPair) progress() (moved bool, err error) {
	before := f.steps
	if err = f.hear(); err == nil {
		if err = f.drain(); err == nil {
			err = f.push()
		}
	}
	if moved = f.steps != before; moved {
		f.heard = time.Now()
	}
	return moved, err
}

// hear reads the records of the other rank. f is locked.
func (f *farPair) hear() error {
	f.answers()
	f.posts()
	if err := f.withdrawals(); err != nil {
		return err
	}
	return f.grant()
}

// rest returns when all that was put here has landed, and says what nobody has received.
func (a *pointsAcross) rest(e *Engine) error {
	a.stop(e)
	over, err := a.hostRanks.rest(e, a.offset, a.offset+int64(len(a.others))*a.bytes())
	if !over {
		return err
	}
	errs := []error{err}
	a.quiet = true
	for _, f := range a.pairs {
		f.mu.Lock()
		_, err := f.progress()
		errs = append(errs, err)
		for _, o := range f.boxes {
			if o != nil && o.over && o.phase == disagreed && !o.told {
				errs = append(errs, f.mismatch(o))
			}
		}
		if list := f.unanswered(); len(list) > 0 {
			errs = append(errs, f.left(unreceivedOf(a.hosts.Rank, f.rank, list)+"; "+f.wants()))
		}
		if list := f.unclaimed(); len(f.arrived) > 0 {
			errs = append(errs, f.left(unreceivedOf(f.rank, a.hosts.Rank, list)))
		}
		f.mu.Unlock()
	}
	return errors.Join(errs...)
}

// left is the error of messages that nobody has received.
func (f *farPair) left(which string) error {
	return &comm.PeerError{Rank: f.rank, Op: "close", Err: fmt.Errorf("%w: on host %d: %s", comm.ErrMismatch, f.host, which)}
}

// unanswered are the messages of this rank that the other one has not received, in words. f is locked.
func (f *farPair) unanswered() (list []string) {
	for _, o := range f.boxes {
		if o != nil && !o.over && !o.back && !o.refused {
			list = append(list, fmt.Sprintf("tag %d, %d bytes", o.tag, o.bytes))
		}
	}
	return list
}

// unclaimed are those of the other one that this rank has not received, in words. f is locked.
func (f *farPair) unclaimed() (list []string) {
	for _, m := range f.arrived {
		list = append(list, fmt.Sprintf("tag %d, %d bytes", m.tag, m.bytes))
	}
	if m := f.back; m != nil {
		list = append(list, fmt.Sprintf("tag %d, %d bytes (taken back)", m.tag, m.bytes))
	}
	return list
}

// unreceivedOf says which messages from src wait at dst.
func unreceivedOf(src, dst int, list []string) string {
	if more := len(list) - mostNamed; more > 0 {
		list = append(list[:mostNamed:mostNamed], fmt.Sprintf("%d more", more))
	}
	if len(list) == 0 {
		return fmt.Sprintf("rank %d has sent no message that rank %d has not received", src, dst)
	}
	return fmt.Sprintf("rank %d has sent what rank %d has not received: %s", src, dst, strings.Join(list, "; "))
}
