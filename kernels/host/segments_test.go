package host_test

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
	"github.com/switchyard-moe/switchyard/test/explore"
)

// segments is ranks of one process with a port of one family each, on a heap that is a piece of Go memory, so that the race detector sees all
// of it. Control blocks lie at the end of the header.
type segments struct {
	mem     []byte
	stride  int64
	engines []*host.Engine
	ports   []kernels.Port
}

// roomy is the size of a segment with 64 KiB behind the header.
const roomy = kernels.HeaderBytes + 64<<10

func newSegments(n int, stride int64, f kernels.Family) *segments {
	var s segments
	raw := make([]byte, int64(n)*stride+kernels.LineBytes)
	s.mem, s.stride = raw[-int64(shm.Addr(raw))&(kernels.LineBytes-1):][:int64(n)*stride], stride
	bells := host.NewBells(n)
	for r := range n {
		e := host.New(kernels.Space{Mem: s.mem, Stride: stride, Rank: r, Size: n}, bells, func() error { return nil })
		p, err := e.Open(f, kernels.HeaderBytes)
		if err != nil {
			panic(err)
		}
		s.engines, s.ports = append(s.engines, e), append(s.ports, p)
	}
	return &s
}

// at is n bytes of a rank's segment.
func (s *segments) at(rank int, off, n int64) []byte {
	return s.mem[int64(rank)*s.stride+off:][:n:n]
}

// word is a word of a rank's segment, for tests that tamper with it.
func (s *segments) word(rank int, off int64) *uint64 { return &shm.View[uint64](s.at(rank, off, 8))[0] }

// buffer is b as an operation gets it, at a place of its rank's segment or at -1.
func buffer(b []byte, place int64) kernels.Buffer {
	return kernels.Buffer{Mem: b, Ptr: shm.Addr(b), Bytes: int64(len(b)), Place: place, Reach: place >= 0}
}

// calls are calls that all ranks make, one behind the other, for explore.Schedules.
type calls struct {
	*segments
	times int
	// one makes a call of a rank, numbered from 1, and looks at what it has left. It may take turns of its own.
	one func(rank, call int, turn explore.Turn) error
	// point, when set, runs at every point of a rank, to put a bug in.
	point func(rank int, what string)
	begun []int // by rank: the last call that has begun
}

// errEarly is that of a rank that has ended a call which another had not begun.
var errEarly = errors.New("a call ended early")

// start is a fresh run.
func (c *calls) start() (p explore.Program) {
	clear(c.mem)
	c.begun = make([]int, len(c.engines))
	for r, e := range c.engines {
		p.Ranks = append(p.Ranks, func(turn explore.Turn) error {
			e.SetStep(func(what string, waiting bool) error {
				if c.point != nil && !waiting {
					c.point(r, what)
				}
				return turn(what, waiting)
			})
			for call := 1; call <= c.times; call++ {
				if err := turn(fmt.Sprintf("begins call %d", call), false); err != nil {
					return err
				}
				c.begun[r] = call
				if err := c.one(r, call, turn); err != nil {
					return fmt.Errorf("call %d: %w", call, err)
				}
				for q, begun := range c.begun {
					if begun < call {
						return fmt.Errorf("%w: call %d of rank %d, before rank %d", errEarly, call, r, q)
					}
				}
			}
			return nil
		})
	}
	return p
}
