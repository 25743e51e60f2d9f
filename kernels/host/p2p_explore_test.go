package host_test

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
	"github.com/switchyard-moe/switchyard/test/explore"
)

// How large messages travel: read in the heap, read in their sender's memory, copied aside and read there, or through staging.
var travels = []string{"heap", "pulled", "aside", "staged"}

const pointHeap = kernels.HeaderBytes + 32<<10 // where sources of the heap are

// points is n ranks of one process that run the kernel of messages with a few bytes each, for explore.Schedules.
type points struct {
	*segments
	travel string
	issued []atomic.Uint64
	block  host.PointBlock
}

func newPoints(n int, travel string) *points {
	bounds := kernels.PointBounds{Size: n, Semaphores: 1, Boxes: 3, EagerBytes: 16, StagingBytes: 128}
	if travel == "aside" {
		bounds.ParkBytes = 1 << 20
	}
	w := &points{newSegments(n, roomy, &bounds), travel, make([]atomic.Uint64, n), host.PointBlock{PointBounds: &bounds, Offset: kernels.HeaderBytes}}
	for _, p := range w.ports {
		p.Ready()
		if travel == "staged" {
			host.SetUnreadable(p)
		}
		if travel == "aside" {
			host.SetImpatient(p)
		}
	}
	return w
}

// source is n bytes of value v, at a place of the heap of rank r where messages travel so.
func (w *points) source(r int, at int64, n int, v byte) kernels.Buffer {
	place, b := int64(-1), make([]byte, n)
	if w.travel == "heap" {
		place = pointHeap + at
		b = w.at(r, place, int64(n))
	}
	for i := range b {
		b[i] = v
	}
	return buffer(b, place)
}

func (w *points) launch(r int, list ...kernels.Message) error {
	a := &kernels.Messages{Launched: kernels.Launched{Timeout: time.Second}, List: list}
	a.Number, a.Issued = w.issued[r].Add(1), &w.issued[r]
	return w.ports[r].Launch(nil, a)
}

var errBytes = errors.New("wrong bytes")

func is(b kernels.Buffer, v byte) error {
	if slices.ContainsFunc(b.Mem, func(x byte) bool { return x != v }) {
		return fmt.Errorf("%w: want %d, got %v", errBytes, v, b.Mem)
	}
	return nil
}

// batches has each of n ranks exchange 5 messages of 3 tags with each other, in two batches, of which the second begins before all ranks have
// ended the first. Sources are overwritten at once. point, when set, runs at every point of a rank, to put a bug in.
func batches(n int, travel string, point func(w *points, rank int, what string)) func() explore.Program {
	return func() (p explore.Program) {
		w := newPoints(n, travel)
		for r := range n {
			p.Ranks = append(p.Ranks, func(turn explore.Turn) error {
				w.engines[r].SetStep(func(what string, waiting bool) error {
					if point != nil && !waiting {
						point(w, r, what)
					}
					return turn(what, waiting)
				})
				for call := range 2 {
					var list []kernels.Message
					var want []byte
					value := func(src, dst, i int) byte { return byte(1 + call*100 + src*30 + dst*10 + i) }
					for peer := range n {
						if peer == r {
							continue
						}
						for i, bytes := range []int{8, 300, 0, 16, 17} {
							list = append(list, kernels.Message{Peer: peer, Tag: uint64(i % 3), Buffer: w.source(r, int64(peer*1000+i*300), bytes, value(r, peer, i))})
							want = append(want, 0)
						}
						for _, i := range []int{2, 1, 0, 4, 3} { // those of a tag in order: 0 and 3, 1 and 4
							list = append(list, kernels.Message{Receive: true, Peer: peer, Tag: uint64(i % 3), Buffer: buffer(make([]byte, []int{8, 300, 0, 16, 17}[i]), -1)})
							want = append(want, value(peer, r, i))
						}
					}
					if err := w.launch(r, list...); err != nil {
						return err
					}
					for i, m := range list {
						if m.Receive {
							if err := is(m.Buffer, want[i]); err != nil {
								return err
							}
						} else {
							clear(m.Buffer.Mem)
						}
					}
				}
				return nil
			})
		}
		return p
	}
}

func TestMessagesArriveInAnySchedule(t *testing.T) {
	for _, travel := range travels {
		for n := 2; n <= 3; n++ {
			r := budget(1, 200/n).Explore(batches(n, travel, nil))
			require.Nil(t, r.Violation, "%d ranks, %s, after %d schedules: %v", n, travel, r.Schedules, r.Violation)
		}
	}
}

// Rank 0 takes two messages of each of two others, of any rank and of one, while these send.
func TestMessagesFromAnyRankInAnySchedule(t *testing.T) {
	for _, travel := range travels {
		r := budget(1, 200).Explore(func() (p explore.Program) {
			w := newPoints(3, travel)
			takes := func(turn explore.Turn) error {
				w.engines[0].SetStep(turn)
				var list []kernels.Message
				var from [4]int
				for i, peer := range []int{kernels.AnyRank, 2, kernels.AnyRank, kernels.AnyRank} {
					list = append(list, kernels.Message{Receive: true, Peer: peer, Buffer: buffer(make([]byte, 20), -1), From: &from[i]})
				}
				if err := errors.Join(w.launch(0, list[:2]...), w.launch(0, list[2:]...)); err != nil {
					return err
				}
				var sent [3]byte
				for _, i := range []int{0, 1, 2, 3} {
					sent[from[i]]++
					if err := is(list[i].Buffer, byte(10*from[i])+sent[from[i]]); err != nil {
						return fmt.Errorf("receive %d, from rank %d: %w", i, from[i], err)
					}
				}
				return nil
			}
			p.Ranks = append(p.Ranks, takes)
			for r := 1; r < 3; r++ {
				p.Ranks = append(p.Ranks, func(turn explore.Turn) error {
					w.engines[r].SetStep(turn)
					for i := range 2 {
						b := w.source(r, int64(100*i), 20, byte(10*r+i+1))
						if err := w.launch(r, kernels.Message{Buffer: b}); err != nil {
							return err
						}
						clear(b.Mem)
					}
					return nil
				})
			}
			return p
		})
		require.Nil(t, r.Violation, "%s, after %d schedules: %v", travel, r.Schedules, r.Violation)
	}
}

// A sender that gives up at some look has its source at once: either its message has been received, or nobody ever receives it, and the
// receiver gets the next one.
func TestMessagesThatAreTakenBack(t *testing.T) {
	for _, travel := range travels {
		for looks := 1; looks <= 4; looks++ {
			r := budget(2, 200).Explore(func() explore.Program {
				w := newPoints(2, travel)
				var first error
				var got []byte
				sends := func(turn explore.Turn) error {
					left := looks
					w.engines[0].SetStep(func(what string, waiting bool) error {
						if waiting {
							if left--; left == 0 {
								return comm.ErrTimeout
							}
						}
						return turn(what, waiting)
					})
					b := w.source(0, 0, 300, 1)
					first = w.launch(0, kernels.Message{Peer: 1, Buffer: b})
					clear(b.Mem)
					if first != nil && !errors.Is(first, comm.ErrTimeout) {
						return first
					}
					left = -1
					return w.launch(0, kernels.Message{Peer: 1, Buffer: w.source(0, 1000, 300, 2)})
				}
				receives := func(turn explore.Turn) error {
					w.engines[1].SetStep(turn)
					for len(got) == 0 || got[len(got)-1] != 2 {
						b := buffer(make([]byte, 300), -1)
						if err := w.launch(1, kernels.Message{Receive: true, Peer: []int{0, kernels.AnyRank}[looks%2], Buffer: b}); err != nil {
							return err
						}
						if err := is(b, b.Mem[0]); err != nil {
							return err
						}
						got = append(got, b.Mem[0])
					}
					return nil
				}
				return explore.Program{Ranks: []func(explore.Turn) error{sends, receives}, End: func() error {
					if want := map[bool]string{true: "\x01\x02", false: "\x02"}[first == nil]; string(got) != want {
						return fmt.Errorf("the first send came to %v, and %v arrived", first, got)
					}
					return nil
				}}
			})
			require.Nil(t, r.Violation, "%s, %d looks, after %d schedules: %v", travel, looks, r.Schedules, r.Violation)
		}
	}
}

// Bugs that are put in are found.
func TestSchedulesFindBugsOfMessages(t *testing.T) {
	for name, bug := range map[string]func(w *points, rank int, what string){
		"a message is offered before it is in its box": func(w *points, rank int, what string) {
			if rank == 0 && what == "puts data to rank 1" {
				posted := shm.Word(w.mem, w.stride+w.block.Posted(0))
				number := posted.Load() + 1
				for box := range w.block.Boxes {
					state := shm.Word(w.mem, w.stride+w.block.Box(0, box))
					if _, took := host.StateOf(number - 1); number > 1 && state.Load() == took {
						offers, _ := host.StateOf(number)
						state.Store(offers)
						posted.Store(number)
						return
					}
				}
			}
		},
		"a message is let go before it is read": func(w *points, rank int, what string) {
			if rank == 1 && what == "takes data of rank 0" {
				for box := range w.block.Boxes {
					state := shm.Word(w.mem, w.stride+w.block.Box(0, box))
					for number := uint64(1); number < 20; number++ {
						offers, took := host.StateOf(number)
						if s := state.Load(); s > offers && s < took {
							state.Store(took)
						}
					}
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := budget(2, 500).Explore(batches(2, "heap", bug))
			require.NotNil(t, r.Violation, "not found in %d schedules", r.Schedules)
		})
	}
}
