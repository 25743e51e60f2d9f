package core

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/switchyard-moe/switchyard/p2p"
)

// over waits for a request as callers do, in slices.
func over(q *Request, err error) ([]int, error) {
	for err == nil {
		done, from, err := q.Wait(10 * time.Millisecond)
		if done || err != nil {
			return from, err
		}
	}
	return nil, err
}

func send(b []byte, to int, tag uint64) MessageCall {
	return MessageCall{Buffer: buf(b), Peer: int64(to), Tag: tag}
}

func receive(b []byte, from int, tag uint64) MessageCall {
	return MessageCall{Buffer: buf(b), Receive: 1, Peer: int64(from), Tag: tag}
}

// In every round each rank submits sends to all others and receives from them, in any order and in groups of any size, those of one peer and
// tag in order. Collectives of the queue go on among them. Each message arrives where it belongs.
func TestRequestsFollowTheModel(t *testing.T) {
	for _, n := range []int{2, 3, 4} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			each(t, n, func(c *Comm) error {
				me, _, err := c.Rank()
				if err != nil {
					return err
				}
				rnd := rand.New(rand.NewPCG(3, uint64(me)))
				for round := range 30 {
					same := rand.New(rand.NewPCG(4, uint64(round)))
					size := make([]int, 12)
					for i := range size {
						size[i] = same.IntN(1 << same.IntN(18))
					}
					var left [][]MessageCall // by peer and direction, each in order
					var want, got [][]byte
					for p := range n {
						if p == me {
							continue
						}
						var out, in []MessageCall
						for i, bytes := range size {
							value := func(src, dst int) byte { return byte(round*50 + src*16 + dst*4 + i) }
							b := slices.Repeat([]byte{value(me, p)}, bytes)
							out = append(out, send(b, p, uint64(i%3)))
							b = make([]byte, bytes)
							in = append(in, receive(b, p, uint64(i%3)))
							got, want = append(got, b), append(want, slices.Repeat([]byte{value(p, me)}, bytes))
						}
						left = append(left, out, in)
					}
					var requests []*Request
					for len(left) > 0 {
						var calls []MessageCall
						for range 1 + rnd.IntN(4) {
							if len(left) == 0 {
								break
							}
							k := rnd.IntN(len(left))
							calls = append(calls, left[k][0])
							if left[k] = left[k][1:]; len(left[k]) == 0 {
								left = slices.Delete(left, k, k+1)
							}
						}
						q, err := c.Messages(0, calls, 0)
						if err != nil {
							return err
						}
						requests = append(requests, q)
					}
					ticket, err := c.Barrier()
					for _, k := range rnd.Perm(len(requests)) {
						if _, err := over(requests[k], nil); err != nil {
							return err
						}
					}
					if _, err := await(c, ticket, err); err != nil {
						return err
					}
					for i := range got {
						if !bytes.Equal(got[i], want[i]) {
							return fmt.Errorf("round %d, message %d of %d: wrong bytes", round, i, len(got))
						}
					}
				}
				ticket, err := c.Close(false)
				_, err = await(c, ticket, err)
				return err
			})
		})
	}
}

// Puts and gets go to symmetric memory, a signal comes behind them, and what is from any rank says from which.
func TestTransfersOnTheHost(t *testing.T) {
	each(t, 3, func(c *Comm) error {
		me, n, err := c.Rank()
		if err != nil {
			return err
		}
		var b *Block
		ticket, err := c.Alloc(0, 64, func(k *Block) uint64 { b = k; return 1 })
		if _, err := await(c, ticket, err); err != nil {
			return err
		}
		at := func(off int) Buffer { return Buffer{b.Addr() + uintptr(off), 8} }
		next, last := int64((me+1)%n), int64((me+n-1)%n)
		mine, got := []uint64{uint64(100 + me)}, []uint64{0}
		for _, call := range []TransferCall{
			{Kind: PutTransfer, Peer: next, Mine: buf(mine), At: at(8 * me)},
			{Kind: SignalTransfer, Peer: next, Semaphore: 3},
		} {
			if q, err := c.Transfer(0, &call); q != nil || err != nil {
				return fmt.Errorf("%v, %w", q, err)
			}
		}
		if _, err := over(c.Transfer(0, &TransferCall{Kind: WaitTransfer, Peer: last, Semaphore: 3})); err != nil {
			return err
		}
		if ticket, err = c.Barrier(); err == nil {
			_, err = await(c, ticket, nil)
		}
		if err != nil {
			return err
		}
		if _, err := c.Transfer(0, &TransferCall{Kind: GetTransfer, Peer: next, Mine: buf(got), At: at(8 * me)}); err != nil || got[0] != mine[0] {
			return fmt.Errorf("got %d, want %d: %w", got[0], mine[0], err)
		}
		if me == 0 {
			for range n - 1 {
				b := []byte{0}
				from, err := over(c.Messages(0, []MessageCall{receive(b, p2p.AnyRank, 5)}, 0))
				if err != nil || from[0] != int(b[0]) {
					return fmt.Errorf("from %v, message %d: %w", from, b[0], err)
				}
			}
		} else {
			b := []byte{byte(me)}
			if _, err := over(c.Messages(0, []MessageCall{send(b, 0, 5)}, 0)); err != nil {
				return err
			}
		}
		if _, err := c.Transfer(7, &TransferCall{Kind: SignalTransfer, Peer: next}); err == nil {
			return fmt.Errorf("a stream on the host was not refused")
		}
		if code, _ := Classify(func() error { _, err := over(c.Messages(0, []MessageCall{send(nil, me, 0)}, 0)); return err }()); code != Invalid {
			return fmt.Errorf("a message to this rank: code %d", code)
		}
		ticket, err = c.Close(false)
		_, err = await(c, ticket, err)
		return err
	})
}

// A request that waits for a rank which leaves in good order ends soon with an error that names it, and one of a Comm that is abandoned ends
// before Abandon returns.
func TestF2_RequestsEndWhenARankLeaves(t *testing.T) {
	each(t, 2, func(c *Comm) error {
		me, _, err := c.Rank()
		if err != nil {
			return err
		}
		b := make([]byte, 8)
		waits, err := c.Messages(0, []MessageCall{receive(b, 1-me, 1)}, 0)
		if err != nil {
			return err
		}
		began := time.Now()
		if me == 1 {
			c.Abandon(0, false)
			if done, _, err := waits.Wait(0); !done || err == nil {
				return fmt.Errorf("after Abandon: over is %v, %w", done, err)
			}
			if _, err := c.Messages(0, []MessageCall{send(nil, 0, 1)}, 0); err == nil {
				return fmt.Errorf("a message after Abandon was not refused")
			}
			return nil
		}
		_, err = over(waits, nil)
		if code, rank := Classify(err); code != PeerLost && code != Aborted || rank != 1 || time.Since(began) > time.Minute {
			return fmt.Errorf("after %v: code %d, rank %d: %w", time.Since(began), code, rank, err)
		}
		c.Abandon(0, false)
		return nil
	})
}
