// Package railtest holds a rail to what package rails promises.
package railtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// Key is that of the rails of a test.
const Key = 0x5157495443485952

const (
	segment = 8 << 20
	signals = 4096 // words that puts name; bytes begin behind them
	wait    = time.Minute
)

// End is one rank of a test.
type End struct {
	rails.Rail
	Segment []byte
	rings   atomic.Int64
}

// Word is the number at a place.
func (e *End) Word(place int64) uint64 {
	return shm.Word(e.Segment, place).Load()
}

// NeedUCX skips the test where "ucx" is Missing, as an error that is unavailable says. It has the rail of UCX, which open makes, and the error as
// arguments, since the tests of that rail call it too.
func NeedUCX(t testing.TB, open func(rails.Config) (rails.Rail, error), unavailable error) {
	t.Helper()
	r, err := open(rails.Config{Size: 1})
	if errors.Is(err, unavailable) {
		proctest.Missing(t, "ucx", err)
	}
	require.NoError(t, err)
	require.NoError(t, r.Close())
}

// Ends makes n connected ends of rails that open makes, with all of their segments open but the last 64 KiB.
func Ends(t testing.TB, n int, open func(rails.Config) (rails.Rail, error)) []*End {
	ends := make([]*End, n)
	for i := range ends {
		e := &End{Segment: mapped(t)}
		r, err := open(rails.Config{Rank: i, Size: n, Key: Key, Segment: e.Segment, Ring: func() { e.rings.Add(1) }})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, r.Close()) })
		require.NoError(t, r.Open(0, segment/2))
		require.NoError(t, r.Open(segment/2, segment/2-64<<10))
		e.Rail = r
		ends[i] = e
	}
	for i, e := range ends {
		for j, peer := range ends {
			if i != j {
				require.NoError(t, e.Connect(j, peer.Address()))
			}
		}
	}
	return ends
}

// Rung is Ends with a channel for each, which holds something once the end has been rung since.
func Rung(t testing.TB, n int, open func(rails.Config) (rails.Rail, error)) ([]*End, []chan struct{}) {
	rings := make([]chan struct{}, n)
	for i := range rings {
		rings[i] = make(chan struct{}, 1)
	}
	return Ends(t, n, func(c rails.Config) (rails.Rail, error) {
		ring, rung := c.Ring, rings[c.Rank]
		c.Ring = func() {
			ring()
			select {
			case rung <- struct{}{}:
			default:
			}
		}
		return open(c)
	}), rings
}

// mapped is a segment: memory outside of Go's, which goes after the rails have been closed.
func mapped(t testing.TB) []byte {
	b, err := unix.Mmap(-1, 0, segment, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(b)) })
	return b
}

// Await waits until a word of an end is at least k.
func Await(t testing.TB, e *End, place int64, k uint64) {
	t.Helper()
	for end := time.Now().Add(wait); e.Word(place) < k; time.Sleep(50 * time.Microsecond) {
		if time.Now().After(end) {
			t.Fatalf("the word at %d holds %d, want %d", place, e.Word(place), k)
		}
	}
}

func fill(b []byte, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
	}
	for i := len(b) &^ 7; i < len(b); i++ {
		b[i] = byte(rng.Uint32())
	}
}

// Run runs all tests on rails that open makes.
func Run(t *testing.T, open func(rails.Config) (rails.Rail, error)) {
	t.Run("bytes then signal", func(t *testing.T) { bytesThenSignal(t, Ends(t, 2, open)) })
	t.Run("order", func(t *testing.T) { order(t, Ends(t, 3, open)) })
	t.Run("forget", func(t *testing.T) { forget(t, Ends(t, 2, open)) })
	t.Run("bounds", func(t *testing.T) { bounds(t, Ends(t, 2, open), open) })
	t.Run("twice", func(t *testing.T) { twice(t, Ends(t, 2, open), open) })
	t.Run("wait", func(t *testing.T) { waiting(t, Ends(t, 2, open)) })
	t.Run("rings", func(t *testing.T) { ringing(t, open) })
	t.Run("interrupt", func(t *testing.T) { interrupt(t, Ends(t, 2, open)) })
	t.Run("last look", func(t *testing.T) { lastLook(t, Ends(t, 2, open)) })
	t.Run("close", func(t *testing.T) { closing(t, Ends(t, 2, open)) })
}

// Bytes of any length are there when the signal is, and the receiver is rung.
func bytesThenSignal(t *testing.T, ends []*End) {
	sizes := []int{0, 1, 7, 8, 15, 4096, 65537, 256 << 10, 256<<10 + 1, 1 << 20, 2<<20 + 3}
	for k, size := range sizes {
		src := make([]byte, size)
		fill(src, uint64(k))
		place := int64(signals + k)
		before := ends[1].rings.Load()
		require.NoError(t, ends[0].Put(1, place, src, 64))
		Await(t, ends[1], 64, uint64(k+1))
		require.True(t, bytes.Equal(src, ends[1].Segment[place:place+int64(size)]), "%d bytes", size)
		require.Eventually(t, func() bool { return ends[1].rings.Load() > before }, wait, time.Millisecond, "%d bytes", size)
		require.NoError(t, ends[0].Flush(t.Context()))
		begun, left, err := ends[0].Left()
		require.NoError(t, err)
		require.EqualValues(t, []uint64{uint64(k + 1), uint64(k + 1)}, []uint64{begun, left})
	}
	require.Zero(t, ends[0].Word(64))
	require.Zero(t, ends[1].Refused())
}

// A word grows in the order of the puts that name it, large and small ones, while others grow too.
func order(t *testing.T, ends []*End) {
	const rounds, room = 60, 320 << 10 // more than a put has: bytes of two have no order
	sizes := []int{3, 40 << 10, 500, 300 << 10, 0, 8 << 10}
	srcs := make([][]byte, rounds)
	for k := range srcs {
		srcs[k] = make([]byte, sizes[k%len(sizes)])
		fill(srcs[k], uint64(k))
		for from := range 2 {
			place := signals + int64(from)*(segment/4) + int64(k%4)*room
			require.NoError(t, ends[from].Put(2, place, srcs[k], int64(8*from)))
			require.NoError(t, ends[from].Put(2, int64(1024+8*(2*(k%8)+from)), nil, int64(128+8*from)))
		}
		if k%4 != 3 {
			continue
		}
		for from := range 2 { // all that were put to other places than the last ones are as they were sent
			Await(t, ends[2], int64(8*from), uint64(k+1))
			place := signals + int64(from)*(segment/4) + int64(k%4)*room
			require.True(t, bytes.Equal(srcs[k], ends[2].Segment[place:][:len(srcs[k])]))
		}
	}
	for from := range 2 {
		Await(t, ends[2], int64(128+8*from), rounds)
		require.NoError(t, ends[from].Flush(t.Context()))
		require.EqualValues(t, rounds, ends[2].Word(int64(8*from)))
	}
}

// Words that both ends forget count from 1 again, whatever they hold, and the others go on.
func forget(t *testing.T, ends []*End) {
	const word, next = 640, 648
	for k := range uint64(3) {
		require.NoError(t, ends[0].Put(1, signals, nil, word))
		require.NoError(t, ends[0].Put(1, signals, nil, next))
		Await(t, ends[1], word, k+1)
		Await(t, ends[1], next, k+1)
	}
	ends[0].Forget(word, next)
	ends[1].Forget(word, next)
	shm.Word(ends[1].Segment, word).Store(0)
	require.NoError(t, ends[0].Put(1, signals, nil, next))
	Await(t, ends[1], next, 4)
	require.NoError(t, ends[0].Put(1, signals, nil, word))
	Await(t, ends[1], word, 1)
	require.EqualValues(t, 1, ends[1].Word(word))
}

// A rank that sleeps on the rail lands what comes itself. Later puts land without it, and an interrupt ends its sleep.
func waiting(t *testing.T, ends []*End) {
	const rounds = 50
	go func() {
		for k := range uint64(rounds) {
			for ends[1].Word(128) < k+1 {
				ends[1].Wait(wait)
			}
			if ends[1].Put(0, signals, make([]byte, 100), 128) != nil {
				return
			}
		}
	}()
	for k := range uint64(rounds) {
		require.NoError(t, ends[0].Put(1, signals, make([]byte, 100), 128))
		for end := time.Now().Add(wait); ends[0].Word(128) < k+1; ends[0].Wait(time.Second) {
			require.Less(t, time.Now(), end, "round %d", k)
		}
	}
	for k := range uint64(20) {
		if k%2 == 0 {
			ends[1].Wait(0)
			ends[1].Resume()
		} else {
			ends[1].Wait(0)
		}
		require.NoError(t, ends[0].Put(1, signals, nil, 256))
		Await(t, ends[1], 256, k+1)
	}
	asleep := make(chan struct{})
	go func() {
		defer close(asleep)
		ends[1].Wait(0)
		for ends[1].Put(0, signals, nil, 512) == nil {
			ends[1].Wait(wait)
		}
	}()
	time.Sleep(10 * time.Millisecond)
	start := time.Now()
	ends[1].Interrupt()
	<-asleep
	require.Less(t, time.Since(start), wait/2)
}

// Each call that lands something rings for it: ranks that sleep until then wake up, also where another goroutine of theirs puts.
func ringing(t *testing.T, open func(rails.Config) (rails.Rail, error)) {
	const rounds, word, other = 200, 128, 256
	ends, rings := Rung(t, 2, open)
	var all sync.WaitGroup
	errs := make([]error, 4)
	for i, e := range ends {
		all.Go(func() {
			late := time.After(wait)
			for k := range uint64(rounds) {
				if errs[i] = e.Put(1-i, signals, make([]byte, 100), word); errs[i] != nil {
					return
				}
				for e.Word(word) <= k {
					select {
					case <-rings[i]:
					case <-late:
						errs[i] = fmt.Errorf("rank %d was not rung for put %d, and there are %d", i, k+1, e.Word(word))
						return
					}
				}
			}
		})
		all.Go(func() {
			for range rounds {
				errs[2+i] = errors.Join(errs[2+i], e.Put(1-i, 2*signals, make([]byte, 10), other))
				time.Sleep(20 * time.Microsecond)
			}
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
}

// A message to memory that is not open, or without the key, changes nothing and is counted.
func bounds(t *testing.T, ends []*End, open func(rails.Config) (rails.Rail, error)) {
	before := bytes.Clone(ends[1].Segment)
	src := bytes.Repeat([]byte{0xab}, 300<<10)
	last := int64(segment - 64<<10)
	var bad int64
	for _, p := range []struct {
		place  int64
		n      int
		signal int64
	}{{last, 1, 0}, {last - 8, 9, 0}, {last - 1024, 300 << 10, 0}, {-1, 1, 0}, {-8, 300 << 10, 0}, {1 << 62, 8, 0}, {signals, 8, last}, {signals, 8, -8}, {signals, 8, 4}, {signals, 300 << 10, 1 << 62}} {
		require.NoError(t, ends[0].Put(1, p.place, src[:p.n], p.signal))
		bad++
	}
	stranger := mapped(t)
	for _, c := range []rails.Config{{Rank: 0, Size: 2, Key: Key + 1}, {Rank: 7, Size: 8, Key: Key}} {
		c.Segment, c.Ring = stranger, func() {}
		r, err := open(c)
		require.NoError(t, err)
		require.NoError(t, r.Connect(1, ends[1].Address()))
		for _, n := range []int{8, 300 << 10} {
			require.NoError(t, r.Put(1, signals, src[:n], 0))
			bad++
		}
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		require.NoError(t, r.Flush(ctx))
		cancel()
		defer r.Close()
	}
	require.Eventually(t, func() bool { return ends[1].Refused() >= bad }, wait, time.Millisecond)
	require.EqualValues(t, bad, ends[1].Refused())
	require.True(t, bytes.Equal(before, ends[1].Segment))
	require.NoError(t, ends[0].Put(1, signals, src[:8], 512)) // and the rail works
	Await(t, ends[1], 512, 1)
	require.ErrorIs(t, ends[0].Put(0, signals, src[:8], 512), comm.ErrInvalid)
	require.ErrorIs(t, ends[0].Put(2, signals, src[:8], 512), comm.ErrInvalid)
	require.ErrorIs(t, ends[0].Open(segment-8, 16), comm.ErrInvalid)
}

// A put that is delivered again changes nothing and is counted, whether its word tells of it or an earlier one has not come.
func twice(t *testing.T, ends []*End, open func(rails.Config) (rails.Rail, error)) {
	const word = 512
	var bad int64
	for i := range byte(3) { // each is a rank 0, whose first put is refused
		c := rails.Config{Rank: 0, Size: 2, Key: Key, Segment: mapped(t), Ring: func() {}}
		r, err := open(c)
		require.NoError(t, err)
		defer r.Close()
		require.NoError(t, r.Connect(1, ends[1].Address()))
		require.NoError(t, r.Put(1, -1, []byte{1}, word))
		require.NoError(t, r.Put(1, signals, []byte{10 + i}, word))
		if bad++; i > 0 {
			bad++
		}
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		require.NoError(t, r.Flush(ctx))
		cancel()
		require.Eventually(t, func() bool { return ends[1].Refused() >= bad && ends[1].Segment[signals] == 10 }, wait, time.Millisecond)
		if i == 1 { // the earlier one
			require.Zero(t, ends[1].Word(word))
			require.NoError(t, ends[0].Put(1, 2*signals, []byte{20}, word))
			Await(t, ends[1], word, 2)
		}
	}
	require.EqualValues(t, []any{bad, uint64(2), byte(10)}, []any{ends[1].Refused(), ends[1].Word(word), ends[1].Segment[signals]})
	require.NoError(t, ends[0].Put(1, signals, []byte{30}, word)) // number 2 again
	require.NoError(t, ends[0].Put(1, signals, []byte{40}, word))
	Await(t, ends[1], word, 3)
	require.Eventually(t, func() bool { return ends[1].Refused() == bad+1 }, wait, time.Millisecond)
}

// A flush whose time is over looks once more: what it waits for may have left since it looked last.
func lastLook(t *testing.T, ends []*End) {
	src := bytes.Repeat([]byte{0xef}, 512<<10)
	for range 40 { // it may hear of both at the same time, and choose
		require.NoError(t, ends[0].Put(1, signals, src, 64))
		require.NoError(t, ends[0].Flush(proctest.Moment(t.Context(), func() {
			for begun, left, err := uint64(1), uint64(0), error(nil); begun != left && err == nil; time.Sleep(20 * time.Microsecond) {
				ends[0].Progress()
				begun, left, err = ends[0].Left()
			}
		})))
	}
}

// After Interrupt nothing is sent, and nothing lands of what peers go on sending, so the segment may be used for other things.
func interrupt(t *testing.T, ends []*End) {
	src := bytes.Repeat([]byte{0xef}, 512<<10)
	send := func() {
		for _, n := range []int{0, 64, len(src)} {
			require.NoError(t, ends[1].Put(0, signals, src[:n], 64))
		}
	}
	for range 10 {
		send()
	}
	Await(t, ends[0], 64, 1)
	ends[0].Interrupt()
	require.ErrorIs(t, ends[0].Put(1, signals, nil, 0), comm.ErrAborted)
	require.NoError(t, ends[0].Flush(t.Context()), "all that it has put had left before")
	_, _, err := ends[0].Left()
	require.ErrorIs(t, err, comm.ErrAborted)
	clear(ends[0].Segment)
	for range 10 {
		send()
		ends[0].Progress()
		time.Sleep(5 * time.Millisecond)
	}
	require.True(t, bytes.Equal(ends[0].Segment, make([]byte, segment)))
}

// After Close nothing lands, whatever is still sent.
func closing(t *testing.T, ends []*End) {
	src := bytes.Repeat([]byte{0xcd}, 1<<20)
	for range 20 {
		require.NoError(t, ends[0].Put(1, signals, src, 0))
	}
	Await(t, ends[1], 0, 1)
	require.NoError(t, ends[1].Close())
	clear(ends[1].Segment)
	for range 20 {
		_ = ends[0].Put(1, signals, src, 0) // it may know that the peer is gone
	}
	time.Sleep(50 * time.Millisecond)
	ends[0].Progress()
	require.True(t, bytes.Equal(ends[1].Segment, make([]byte, segment)))
	require.NoError(t, ends[1].Close())
	require.ErrorIs(t, ends[1].Put(0, signals, nil, 0), comm.ErrClosed)
}
