package p2p_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// note is one message of the model.
type note struct {
	tag uint64
	n   int64
	id  int // of the message among those of a round from one rank to another
}

// notes is what src sends to dst in a round, in this order. All ranks draw the same.
func notes(round, src, dst int) (list []note) {
	rnd := rand.New(rand.NewPCG(uint64(round), uint64(1000+src*64+dst)))
	for id := range rnd.IntN(6) {
		list = append(list, note{uint64(rnd.IntN(3)), rnd.Int64N(1 << rnd.IntN(19)), id})
	}
	return list
}

// shuffled is the notes in another order, in which those of one tag keep theirs.
func shuffled(rnd *rand.Rand, list []note) []note {
	list = slices.Clone(list)
	rnd.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	byTag := map[uint64][]int{}
	for i, c := range list {
		byTag[c.tag] = append(byTag[c.tag], i)
	}
	for _, at := range byTag {
		var same []note
		for _, i := range at {
			same = append(same, list[i])
		}
		slices.SortFunc(same, func(a, b note) int { return a.id - b.id })
		for k, i := range at {
			list[i] = same[k]
		}
	}
	return list
}

// In every round each rank sends messages of random tags and sizes to all others and receives theirs: as one batch in any order, as batches of
// sends and of receives, or message by message, sends first. Sources are overwritten as soon as their send is done.
func messages(rounds int) func(r *worldtest.Rank) {
	return func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: time.Minute})
		n, me := r.Size(), r.Rank()
		heap := alloc(r, 4<<20)
		s, err := r.Device.NewStream()
		r.Must(err)
		rnd := rand.New(rand.NewPCG(78, uint64(me)))
		for round := range rounds {
			var sends, receives []p2p.Message
			var check []func()
			var room int64
			view := func(bytes int64) memory.View { // of the heap, or not
				if rnd.IntN(2) == 0 && room+bytes <= heap.Len() {
					room += bytes
					return heap.Slice(room-bytes, bytes)
				}
				return memory.Host(make([]byte, bytes))
			}
			for _, i := range rnd.Perm(n - 1) {
				peer := (me + 1 + i) % n
				for _, c := range notes(round, me, peer) {
					v := view(c.n)
					fill(v.Bytes(), round*10+c.id, me, peer)
					sends = append(sends, p2p.Message{Peer: peer, Tag: c.tag, View: v})
				}
				for _, c := range shuffled(rnd, notes(round, peer, me)) {
					v := view(c.n)
					receives = append(receives, p2p.Message{Receive: true, Peer: peer, Tag: c.tag, View: v})
					check = append(check, func() { r.Must(worldtest.Check(v.Bytes(), round*10+c.id, peer, me)) })
				}
			}
			on := []device.Stream{nil, s}[rnd.IntN(2)]
			switch rnd.IntN(3) {
			case 0:
				all := append(slices.Clone(receives), sends...)
				if rnd.IntN(2) == 0 {
					all = append(slices.Clone(sends), receives...)
				}
				r.Must(x.Batch(on, all...))
			case 1:
				r.Must(x.Batch(on, sends...))
				r.Must(x.Batch(nil, receives...))
			case 2:
				for _, m := range sends {
					r.Must(x.Send(on, m.Peer, m.Tag, m.View))
				}
				for _, m := range receives {
					r.Must(x.Recv(nil, m.Peer, m.Tag, m.View))
				}
			}
			r.Must(s.Synchronize())
			for _, m := range sends {
				clear(m.View.Bytes())
			}
			for _, f := range check {
				f()
			}
		}
		r.Must(s.Close())
		r.Must(x.Close(r.Ctx))
	}
}

func TestMessagesFollowTheModel(t *testing.T) {
	for n := 2; n <= 4; n++ {
		worldtest.Local(t, n, segment, messages(40))
	}
	t.Run("processes", func(t *testing.T) { worldtest.Procs(t, 3, segment, messages(40)) })
}

// Rings in which all ranks send first come to their receives, with messages of any size and without a stream.
func TestRingsInWhichAllSendFirst(t *testing.T) {
	ring := func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: time.Minute})
		next, last := (r.Rank()+1)%r.Size(), (r.Rank()+r.Size()-1)%r.Size()
		for call, bytes := range []int64{0, 1, 8 << 10, 8<<10 + 1, 1 << 20, 20 << 20} {
			src, dst := make([]byte, bytes), make([]byte, bytes)
			fill(src, call, r.Rank(), next)
			r.Must(x.Send(nil, next, 7, memory.Host(src)))
			clear(src)
			r.Must(x.Recv(nil, last, 7, memory.Host(dst)))
			r.Must(worldtest.Check(dst, call, last, r.Rank()))
		}
		r.Must(x.Close(r.Ctx))
	}
	worldtest.Local(t, 3, segment, ring)
	t.Run("processes", func(t *testing.T) { worldtest.Procs(t, 3, segment, ring) })
}

// Without room for copies a ring of large messages is a batch.
func TestABatchIsARingWithoutCopies(t *testing.T) {
	worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{ParkBytes: -1, EagerBytes: -1, Timeout: time.Minute})
		next, last := (r.Rank()+1)%3, (r.Rank()+2)%3
		src, dst := make([]byte, 1<<20), make([]byte, 1<<20)
		fill(src, 1, r.Rank(), next)
		r.Must(x.Batch(nil, p2p.Message{Peer: next, View: memory.Host(src)}, p2p.Message{Receive: true, Peer: last, View: memory.Host(dst)}))
		r.Must(worldtest.Check(dst, 1, last, r.Rank()))
		r.Must(x.Close(r.Ctx))
	})
}

// Boxes are bounded: a send waits for one, and the receives that come then make room.
func TestSendsWaitForBoxes(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Boxes: 3, Timeout: time.Minute})
		for call := range 200 {
			b := make([]byte, 1+call*37)
			if r.Rank() == 0 {
				fill(b, call, 0, 1)
				r.Must(x.Send(nil, 1, uint64(call/3), memory.Host(b)))
				continue
			}
			r.Must(x.Recv(nil, 0, uint64(call/3), memory.Host(b)))
			r.Must(worldtest.Check(b, call, 0, 1))
		}
		r.Must(x.Close(r.Ctx))
	})
}

// Ranks that disagree on a size both get both sizes, a sender that was done with its next send; after that messages work.
func TestF3_SizesThatDisagreeAreNamedOnBothRanks(t *testing.T) {
	both := func(err error, sent, expected uint64) error {
		var m *kernels.MessageMismatchError
		if !errors.As(err, &m) || !errors.Is(err, comm.ErrMismatch) || m.Src != 0 || m.Dst != 1 || m.Tag != 5 || m.Sent != sent || m.Expected != expected {
			return fmt.Errorf("got %w, want %d and %d bytes", err, sent, expected)
		}
		return nil
	}
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		for _, park := range []int64{0, -1} {
			x := endpoint(r, p2p.Options{Timeout: time.Minute, ParkBytes: park})
			for _, sent := range []int64{10, 100 << 10} {
				v := memory.Host(make([]byte, sent))
				if r.Rank() == 1 {
					r.Must(both(x.Recv(nil, 0, 5, v.Slice(0, sent-1)), uint64(sent), uint64(sent-1)))
					r.Barrier()
					r.Must(x.Recv(nil, 0, 5, v))
					continue
				}
				err := x.Send(nil, 1, 5, v)
				r.Barrier()
				if err == nil { // it was done
					err = x.Send(nil, 1, 5, v)
				}
				r.Must(both(err, uint64(sent), uint64(sent-1)))
				r.Must(x.Send(nil, 1, 5, v))
			}
			r.Must(x.Close(r.Ctx))
		}
	})
}

// Ranks that both know the elements of a message, and have other ones, both get both types; views of bytes fit any, and integers of either sign
// those of the other.
func TestF3_ElementsThatDisagreeAreNamedOnBothRanks(t *testing.T) {
	float32s, int32s := kernels.ElementsOf(kernels.Float32, false), kernels.ElementsOf(kernels.Int32, false)
	both := func(err error, n int64) error {
		var m *kernels.MessageMismatchError
		if !errors.As(err, &m) || !errors.Is(err, comm.ErrMismatch) || m.Src != 0 || m.Dst != 1 || m.Sent != uint64(n) || m.Expected != uint64(n) ||
			m.SentElements != int32s || m.ExpectedElements != float32s || !strings.Contains(err.Error(), "(sent as int32, expected as float32)") {
			return fmt.Errorf("got %w, want %d bytes of int32, and of float32", err, n)
		}
		return nil
	}
	test := func(r *worldtest.Rank) {
		for _, n := range []int64{12, 100 << 10} {
			x := endpoint(r, p2p.Options{Timeout: time.Minute, ParkBytes: -1})
			b := memory.Host(make([]byte, n))
			if r.Rank() == 1 {
				r.Must(both(x.Recv(nil, 0, 5, memory.As[float32](b)), n))
				r.Barrier()
				for _, v := range []memory.View{b, memory.As[float32](b), memory.As[uint32](b)} {
					r.Must(x.Recv(nil, 0, 5, v))
				}
				r.Must(x.Close(r.Ctx))
				continue
			}
			err := x.Send(nil, 1, 5, memory.As[int32](b))
			r.Barrier()
			for _, v := range []memory.View{memory.As[int32](b), b, memory.As[int32](b)} {
				sent := x.Send(nil, 1, 5, v)
				if err == nil && sent != nil { // the first was done
					err, sent = sent, x.Send(nil, 1, 5, v)
				}
				r.Must(sent)
			}
			if closed := x.Close(r.Ctx); err == nil { // of another host: it had not come back yet
				err = closed
			} else {
				r.Must(closed)
			}
			r.Must(both(err, n))
		}
	}
	worldtest.Local(t, 2, segment, test)
	worldtest.Hosts(t, 2, 1, segment, test)
}

// A tag that nobody receives is an error of the sender that waits and of the receiver that waits for another, with both tags. The message is
// taken back, and the next right ones work.
func TestF3_ATagThatNobodyReceivesIsNamed(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: 3 * time.Second, ParkBytes: -1})
		v := memory.Host(make([]byte, 100<<10))
		var err error
		var pe *comm.PeerError
		r.Barrier()
		if r.Rank() == 0 {
			err = x.Send(nil, 1, 7, v)
			require.ErrorContains(r.T, err, "tag 7, 102400 bytes to rank 1")
			require.Regexp(r.T, `rank 1 waits for (no message of this rank; the last was )?tag 8, 1000 bytes`, err.Error())
		} else {
			err = x.Recv(nil, 0, 8, v.Slice(0, 1000))
			require.ErrorContains(r.T, err, "tag 8, 1000 bytes from rank 0")
			require.ErrorContains(r.T, err, "rank 0 has sent what rank 1 has not received: tag 7, 102400 bytes")
		}
		require.ErrorIs(r.T, err, comm.ErrTimeout)
		require.True(r.T, errors.As(err, &pe) && pe.Rank == 1-r.Rank())
		r.Barrier()
		for range 40 { // more than there are boxes
			r.Must(x.Batch(nil, p2p.Message{Peer: 1 - r.Rank(), Tag: 7, View: v.Slice(0, 50<<10)},
				p2p.Message{Receive: true, Peer: 1 - r.Rank(), Tag: 7, View: v.Slice(50<<10, 50<<10)}))
		}
		r.Must(x.Close(r.Ctx))
	})
}

// What a sender was done with and nobody has received is an error of Close on both ranks.
func TestF3_CloseNamesWhatNobodyHasReceived(t *testing.T) {
	worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: time.Minute})
		switch r.Rank() {
		case 0:
			r.Must(x.Send(nil, 1, 5, memory.Host(make([]byte, 10))))
			r.Must(x.Send(nil, 1, 7, memory.Host(make([]byte, 11))))
			r.Must(x.Send(nil, 1, 7, memory.Host(make([]byte, 100<<10))))
		case 1:
			r.Must(x.Recv(nil, 0, 5, memory.Host(make([]byte, 10))))
		}
		err := x.Close(r.Ctx)
		if r.Rank() == 2 {
			r.Must(err)
			return
		}
		require.ErrorIs(r.T, err, comm.ErrMismatch)
		require.ErrorContains(r.T, err, "rank 0 has sent what rank 1 has not received: tag 7, 11 bytes; tag 7, 102400 bytes")
		if r.Rank() == 0 {
			require.ErrorContains(r.T, err, "rank 1 waits for no message of this rank")
		}
		require.Zero(r.T, r.Heap.Stats().InUse)
	})
}

// Of the messages in a stream only the first waits for the deadline; those with other ranks go on.
func TestF1_QueuedMessagesFailAtOnce(t *testing.T) {
	waited := make(chan struct{})
	worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: 3 * time.Second, ParkBytes: -1})
		v := memory.Host(make([]byte, 100<<10))
		r.Barrier()
		switch r.Rank() {
		case 0:
			s, err := r.Device.NewStream()
			r.Must(err)
			start := time.Now()
			for range 10 {
				r.Must(x.Send(s, 1, 0, v))
				r.Must(x.Recv(s, 1, 0, v))
			}
			for range 50 {
				r.Must(x.Recv(nil, 2, 0, v.Slice(0, 10)))
			}
			err = s.Synchronize()
			var pe *comm.PeerError
			if took := time.Since(start); !errors.Is(err, comm.ErrTimeout) || !errors.As(err, &pe) || pe.Rank != 1 || took > 40*time.Second {
				r.Must(fmt.Errorf("got %v after %v", err, took)) // 60 s if each waited
			}
			r.Must(s.Close())
			close(waited)
			r.Must(x.Recv(nil, 1, 0, v))
		case 1:
			<-waited
			r.Must(x.Send(nil, 0, 0, v))
		case 2:
			for range 50 {
				r.Must(x.Send(nil, 0, 0, v.Slice(0, 10)))
			}
		}
		r.Must(x.Close(r.Ctx))
	})
}

// A sender that dies in the middle of its messages is named, and a message that was copied aside dies with it.
func TestF2_MessagesOfADeadProcessNameIt(t *testing.T) {
	worldtest.Procs(t, 3, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: time.Minute})
		v := memory.Host(make([]byte, 1<<20))
		if r.Rank() == 1 {
			for _, peer := range []int{0, 2} {
				r.Must(x.Send(nil, peer, 1, v))
				r.Must(x.Recv(nil, peer, 1, v.Slice(0, 1)))
			}
			os.Exit(0)
		}
		r.Must(x.Recv(nil, 1, 1, v))
		r.Must(x.Send(nil, 1, 1, v.Slice(0, 1)))
		start := time.Now()
		err := x.Recv(nil, 1, 1, v)
		if r.Rank() == 2 {
			err = x.Send(nil, 1, 1, memory.Host(make([]byte, 300<<20))) // too much to be copied aside
		}
		var pe *comm.PeerError
		if !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, comm.ErrPeerLost) || time.Since(start) > 40*time.Second {
			r.T.Errorf("rank %d: got %v after %v", r.Rank(), err, time.Since(start))
		}
	})
}

// A receiver that comes when its sender has closed, because that had heard of a loss sooner, gets the message or an error, and not what lies there
// by then.
func TestF2_NobodyReadsAMessageThatItsSenderHasLetGo(t *testing.T) {
	for name, run := range map[string]func(t *testing.T, f func(r *worldtest.Rank)){
		"processes": func(t *testing.T, f func(r *worldtest.Rank)) { worldtest.Procs(t, 2, segment, f) },
		"one process": func(t *testing.T, f func(r *worldtest.Rank)) {
			worldtest.Local(t, 2, segment, f)
		},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(r *worldtest.Rank) {
				x, told := endpoint(r, p2p.Options{Timeout: 3 * time.Second}), endpoint(r, p2p.Options{Timeout: time.Minute})
				message := bytes.Repeat([]byte{7}, 1<<20)
				if r.Rank() == 0 {
					r.Must(x.Send(nil, 1, 0, memory.Host(bytes.Clone(message))))
					ctx, cancel := context.WithTimeout(r.Ctx, time.Millisecond)
					defer cancel()
					if err := x.Close(ctx); err == nil {
						r.T.Error("the endpoint met a rank that did not come")
					}
					var other [][]byte
					for range 64 {
						runtime.GC()
						other = append(other, bytes.Repeat([]byte{9}, len(message)))
					}
					r.Must(told.Send(nil, 1, 0, memory.Host([]byte{1})))
					runtime.KeepAlive(other)
					_ = told.Recv(nil, 1, 0, memory.Host(make([]byte, 1)))
					return
				}
				r.Must(told.Recv(nil, 0, 0, memory.Host(make([]byte, 1))))
				got := make([]byte, len(message))
				if err := x.Recv(nil, 0, 0, memory.Host(got)); err == nil && !bytes.Equal(got, message) {
					r.T.Errorf("got %d bytes of %v", len(got), got[:4])
				}
				_ = told.Send(nil, 0, 0, memory.Host([]byte{1}))
			})
		})
	}
}

func TestMessagesAllocateNothingOnceWarm(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{ParkBytes: -1})
		at, peer := alloc(r, 64<<10), 1-r.Rank()
		call := func() {
			for _, n := range []int64{10, 32 << 10} {
				r.Must(x.Batch(nil, p2p.Message{Peer: peer, View: at.Slice(0, n)}, p2p.Message{Receive: true, Peer: peer, View: at.Slice(32<<10, n)}))
			}
		}
		r.AllocatesNothing(call)
		r.Must(x.Close(r.Ctx))
	})
}
