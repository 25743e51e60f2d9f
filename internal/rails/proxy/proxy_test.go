package proxy_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/double"
	"github.com/switchyard-moe/switchyard/internal/rails/proxy"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels/cuda"
)

func TestMain(m *testing.M) {
	os.Setenv("UCX_TLS", "tcp,self")
	os.Exit(m.Run())
}

const wait = time.Minute

// gpu posts to a queue as put_queue::post of kernels/cuda does. Its memory is that of the host.
type gpu struct {
	*cuda.Queue
	mem   []byte
	slots uint64
	next  atomic.Uint64
	stop  atomic.Bool // as an abort word
}

// Words of a queue, as rails.h has them.
const (
	queueDone, queueRan, queueHead = 0, 128, 256
	putBytes, putNumber            = 64, 40
)

func newGPU(slots int) *gpu {
	mem := shm.Bytes(make([]uint64, cuda.QueueBytes(slots)/8))
	return &gpu{Queue: cuda.NewQueue(mem, slots), mem: mem, slots: uint64(slots)}
}

// post returns the number of the put, 0 if it has been told to stop.
func (g *gpu) post(peer int, place, source, n, signal int64) uint64 {
	number := g.next.Add(1)
	if number > g.slots && !g.awaitDone(number-g.slots) {
		return 0
	}
	at := queueHead + int64((number-1)%g.slots)*putBytes
	for i, v := range []uint64{uint64(place), uint64(source), uint64(n), uint64(signal), uint64(peer)} {
		binary.NativeEndian.PutUint64(g.mem[at+8*int64(i):], v)
	}
	shm.Word(g.mem, at+putNumber).Store(number)
	return number
}

func (g *gpu) awaitDone(number uint64) bool {
	for end := time.Now().Add(wait); shm.Word(g.mem, queueDone).Load() < number; time.Sleep(20 * time.Microsecond) {
		if g.stop.Load() || time.Now().After(end) {
			return false
		}
	}
	return true
}

// engines are the rails that the proxy is tried on.
func engines(t *testing.T, f func(t *testing.T, open func(rails.Config) (rails.Rail, error))) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("double ", seed), func(t *testing.T) { f(t, double.New(seed, time.Millisecond).Open) })
	}
	t.Run("UCX", func(t *testing.T) {
		railtest.NeedUCX(t, ucx.Open, ucx.ErrUnavailable)
		f(t, ucx.Open)
	})
}

// start makes the proxy of an end. It is interrupted before the rail is closed.
func start(t testing.TB, r rails.Rail, segment []byte, gs ...*gpu) *proxy.Proxy {
	p := proxy.New(r, segment)
	t.Cleanup(p.Interrupt)
	for _, g := range gs {
		g.Launched()
		p.Add(g.Queue)
	}
	return p
}

const (
	rounds = 40
	room   = 96 << 10 // of a message
	base   = 1 << 20  // where messages lie: behind it those that come, then those that go
)

// traffic has two blocks of each of two queues of a rank send messages to each peer, and takes theirs in: in place, with the next one of a block
// only when the last has been read.
func traffic(rank, size int, segment []byte, gs []*gpu) error {
	const blocks = 4
	var all sync.WaitGroup
	errs := make([]error, blocks)
	byteOf := func(from, to, block, k, i int) byte { return byte(from*31 + to*17 + block*7 + k*5 + i*3 + i>>8) }
	bytesOf := func(block, k int) int { return (block*7919 + k*k*977) % room }
	for block := range blocks {
		g := gs[block%len(gs)]
		all.Go(func() {
			line := func(other, what int) int64 { return int64(64 * (what*size*blocks + other*blocks + block)) } // 0: messages, 1: read
			at := func(other int, goes bool) int64 {
				n := other*blocks + block
				if goes {
					n += size * blocks
				}
				return base + int64(n)*room
			}
			reach := func(word int64, k uint64) error {
				for end := time.Now().Add(wait); shm.Word(segment, word).Load() < k; time.Sleep(20 * time.Microsecond) {
					if time.Now().After(end) {
						return fmt.Errorf("rank %d, block %d: the word at %d is %d, want %d", rank, block, word, shm.Word(segment, word).Load(), k)
					}
				}
				return nil
			}
			for k := range rounds {
				for i := 1; i < size; i++ {
					peer := (rank + i) % size
					if errs[block] = reach(line(peer, 1), uint64(k)); errs[block] != nil { // so its bytes have left
						return
					}
					n := bytesOf(block, k)
					out := segment[at(peer, true):][:n]
					for j := range out {
						out[j] = byteOf(rank, peer, block, k, j)
					}
					g.post(peer, at(rank, false), at(peer, true), int64(n), line(rank, 0))
				}
				for i := 1; i < size; i++ {
					peer := (rank + i) % size
					if errs[block] = reach(line(peer, 0), uint64(k+1)); errs[block] != nil {
						return
					}
					for j, b := range segment[at(peer, false):][:bytesOf(block, k)] {
						if want := byteOf(peer, rank, block, k, j); b != want {
							errs[block] = fmt.Errorf("rank %d, block %d, message %d of rank %d: byte %d is %d, want %d", rank, block, k, peer, j, b, want)
							return
						}
					}
					g.post(peer, 0, 0, 0, line(rank, 1))
				}
			}
			for i := 1; i < size && errs[block] == nil; i++ {
				errs[block] = reach(line((rank+i)%size, 1), rounds)
			}
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Messages of blocks that share queues with few slots come to the places that they are for, each before its number.
func TestTraffic(t *testing.T) {
	engines(t, func(t *testing.T, open func(rails.Config) (rails.Rail, error)) {
		ends := railtest.Ends(t, 3, open)
		var all sync.WaitGroup
		errs := make([]error, len(ends))
		for rank, e := range ends {
			gs := []*gpu{newGPU(1), newGPU(3)}
			p := start(t, e.Rail, e.Segment, gs...)
			all.Go(func() {
				if errs[rank] = traffic(rank, len(ends), e.Segment, gs); errs[rank] == nil {
					errs[rank] = p.Err()
				}
			})
		}
		all.Wait()
		for _, err := range errs {
			require.NoError(t, err)
		}
	})
}

// The same between processes in two network namespaces.
func TestTrafficBetweenNamespaces(t *testing.T) {
	railtest.NeedUCX(t, ucx.Open, ucx.ErrUnavailable)
	if !proctest.Again() {
		var ps []*proctest.Process
		for rank, s := range proctest.Namespaces(t, 2) {
			ps = append(ps, proctest.Start(t, proctest.Spec{Via: s.Via, Env: []string{fmt.Sprint("RANK=", rank)}}))
		}
		for rank, p := range ps {
			for {
				line, ok := p.Line()
				require.True(t, ok, "rank %d ends", rank)
				if _, err := hex.DecodeString(line); err == nil && line != "" {
					ps[1-rank].Tell(line)
					break
				}
			}
		}
		for rank, p := range ps {
			p.Saw("traffic is over")
			ps[1-rank].Tell("over")
		}
		for _, p := range ps {
			require.Zero(t, p.Wait())
		}
		return
	}
	rank := 0
	if os.Getenv("RANK") == "1" {
		rank = 1
	}
	const bytes = 8 << 20
	segment, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	r, err := ucx.Open(rails.Config{Rank: rank, Size: 2, Key: railtest.Key, Segment: segment, Ring: func() {}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	require.NoError(t, r.Open(0, bytes))
	fmt.Println(hex.EncodeToString(r.Address()))
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	require.True(t, in.Scan())
	address, err := hex.DecodeString(in.Text())
	require.NoError(t, err)
	require.NoError(t, r.Connect(1-rank, address))
	gs := []*gpu{newGPU(2), newGPU(8)}
	p := start(t, r, segment, gs...)
	require.NoError(t, traffic(rank, 2, segment, gs))
	require.NoError(t, p.Err())
	fmt.Println("traffic is over")
	in.Scan() // for the other
}

// After Interrupt the proxy reads and writes no queue, and nothing lands: the memory is another's. Kernels, which have been told to give up before, do.
func TestM4_NothingOfAProxyIsLeft(t *testing.T) {
	engines(t, func(t *testing.T, open func(rails.Config) (rails.Rail, error)) {
		for try := range 5 {
			ends := railtest.Ends(t, 2, open)
			gs, ps := []*gpu{newGPU(4), newGPU(4)}, make([]*proxy.Proxy, 2)
			var kernels [2]sync.WaitGroup
			for rank, e := range ends {
				ps[rank] = start(t, e.Rail, e.Segment, gs[rank])
				for block := range 3 {
					kernels[rank].Go(func() {
						for !gs[rank].stop.Load() && gs[rank].post(1-rank, base+int64(block)*room, 2*base, room, int64(8*block)) != 0 {
						}
					})
				}
			}
			railtest.Await(t, ends[0], 0, 20)
			time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
			gs[0].stop.Store(true)
			kernels[0].Wait()
			ps[0].Interrupt()
			for _, memory := range [][]byte{ends[0].Segment, gs[0].mem} {
				for i := range memory {
					memory[i] = 0x5A
				}
			}
			time.Sleep(5 * time.Millisecond) // time for what must not happen
			for _, memory := range [][]byte{ends[0].Segment, gs[0].mem} {
				require.Empty(t, bytes.Trim(memory, "\x5a"), "try %d", try)
			}
			gs[1].stop.Store(true)
			kernels[1].Wait()
			ps[1].Interrupt()
			ps[1].Interrupt()
			require.NoError(t, ps[0].Err())
			require.NoError(t, ps[1].Err())
		}
	})
}

// A descriptor that reaches past the segment ends the proxy, which says so. Kernels learn it from their deadlines.
func TestABadDescriptorIsNamed(t *testing.T) {
	ends := railtest.Ends(t, 2, double.New(1, 0).Open)
	for rank, c := range []struct{ source, n int64 }{{int64(len(ends[0].Segment)) - 4, 8}, {0, -1}} {
		g := newGPU(4)
		p := start(t, ends[rank].Rail, ends[rank].Segment, g)
		g.post(1-rank, base, c.source, c.n, 0)
		require.Eventually(t, func() bool { return p.Err() != nil }, wait, time.Millisecond)
		require.ErrorIs(t, p.Err(), comm.ErrInvalid)
		require.ErrorContains(t, p.Err(), fmt.Sprintf("a kernel puts %d bytes at %d of a segment of %d to rank %d", c.n, c.source, len(ends[0].Segment), 1-rank))
		p.Interrupt()
		require.Error(t, p.Err())
	}
}

// Puts to a lost rank are dropped, and those to others go on.
func TestALostRankHoldsUpNoOther(t *testing.T) {
	net := double.New(1, 0)
	ends := railtest.Ends(t, 3, net.Open)
	g := newGPU(2)
	p := start(t, ends[0].Rail, ends[0].Segment, g)
	net.Lose(1)
	for k := range uint64(20) {
		require.NotZero(t, g.post(1, base, 0, 100, 0))
		require.NotZero(t, g.post(2, base, 0, 100, 0))
		railtest.Await(t, ends[2], 0, k+1)
	}
	require.Zero(t, ends[1].Word(0))
	require.NoError(t, p.Err())
}

// held is a rail whose puts leave, as far as the proxy sees, when the test says so.
type held struct {
	rails.Rail
	begun, left atomic.Uint64
}

func (h *held) Put(peer int, place int64, src []byte, signal int64) error {
	err := h.Rail.Put(peer, place, src, signal)
	h.begun.Add(1)
	return err
}

func (h *held) Left() (begun, left uint64, err error) { return h.begun.Load(), h.left.Load(), nil }

// A put that does not leave holds up none that comes later, and kernels are told of no put before it has left with all before it.
func TestAPutThatStaysHoldsUpNoOther(t *testing.T) {
	ends := railtest.Ends(t, 2, double.New(1, 0).Open)
	h := &held{Rail: ends[0].Rail}
	g := newGPU(8)
	start(t, h, ends[0].Segment, g)
	for k := range uint64(3) { // one after another, so each is a batch of its own
		require.NotZero(t, g.post(1, base, 0, 100, 0))
		railtest.Await(t, ends[1], 0, k+1)
	}
	for n := range uint64(4) {
		h.left.Store(n)
		require.True(t, g.awaitDone(n))
		require.Equal(t, n, shm.Word(g.mem, queueDone).Load())
	}
}

// watched tells of naps and of their end.
type watched struct {
	rails.Rail
	naps    atomic.Int64
	resumed chan struct{}
}

func (w *watched) Wait(d time.Duration) {
	w.naps.Add(1)
	w.Rail.Wait(d)
}

func (w *watched) Resume() {
	select {
	case w.resumed <- struct{}{}:
	default:
	}
	w.Rail.Resume()
}

// The proxy is awake from a launch on until its kernels have ended, and after a capture for good. Else it leaves the rail to itself and sleeps.
func TestItSleepsWhileNothingIsInFlight(t *testing.T) {
	ends := railtest.Ends(t, 2, double.New(1, 0).Open)
	w := &watched{Rail: ends[0].Rail, resumed: make(chan struct{})} // told only to who waits
	g := newGPU(4)
	p := proxy.New(w, ends[0].Segment)
	defer p.Interrupt()
	napping := func(before int64) {
		require.Eventually(t, func() bool { return w.naps.Load() > before+3 }, wait, time.Millisecond)
	}
	asleep := func() {
		for end := time.Now().Add(wait); ; {
			p.Wake() // so that it tells once more, if it had told before anybody waited
			select {
			case <-w.resumed:
				return
			case <-time.After(time.Millisecond):
				require.Less(t, time.Now(), end, "it does not go to sleep")
			}
		}
	}
	p.Add(g.Queue)
	for k := range uint64(3) {
		asleep()
		before := w.naps.Load()
		asleep()
		require.Equal(t, before, w.naps.Load())
		g.Launched()
		p.Wake()
		napping(before)
		require.NotZero(t, g.post(1, base, 0, 10, 0))
		railtest.Await(t, ends[1], 0, k+1)
		shm.Word(g.mem, queueRan).Store(k + 1)
		asleep()
	}
	before := w.naps.Load()
	g.Captured()
	p.Wake()
	napping(before)
	require.NotZero(t, g.post(1, base, 0, 10, 0))
	railtest.Await(t, ends[1], 0, 4)
	p.Remove(g.Queue)
	asleep()
}

// A message of 1 KiB there and one back: by the rails alone, and by queues and proxies. What waits for them sleeps until it is rung.
func BenchmarkRoundTrip(b *testing.B) {
	railtest.NeedUCX(b, ucx.Open, ucx.ErrUnavailable)
	for _, by := range []string{"rail", "proxy"} {
		b.Run(by, func(b *testing.B) {
			ends, rings := railtest.Rung(b, 2, ucx.Open)
			var send [2]func() error
			for rank, e := range ends {
				send[rank] = func() error { return e.Put(1-rank, base, e.Segment[2*base:][:1024], 0) }
				if by == "proxy" {
					g := newGPU(64)
					start(b, e.Rail, e.Segment, g)
					send[rank] = func() error {
						g.post(1-rank, base, 2*base, 1024, 0)
						return nil
					}
				}
			}
			until := func(rank int, k uint64) {
				for ends[rank].Word(0) < k {
					<-rings[rank]
				}
			}
			b.ResetTimer()
			go func() {
				for k := range uint64(b.N) {
					until(1, k+1)
					_ = send[1]()
				}
			}()
			for k := range uint64(b.N) {
				if err := send[0](); err != nil {
					b.Fatal(err)
				}
				until(0, k+1)
			}
		})
	}
}
