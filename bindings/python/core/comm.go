package core

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels/plan"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// Comm is one rank's end of a group. Its operations run in the order of their submission, which must be the same on all
// ranks.
type Comm struct {
	queue
	requests requests
	options  Options
	limit    atomic.Int64 // of the waits of operations, a time.Duration; 0 for the default
	ctx      context.Context
	cancel   context.CancelFunc

	// Set by the worker: by the first operation, which joins. Others read them once a ticket of it is complete.
	mu      sync.Mutex
	root    *comm.Group   // what was joined; it makes the other groups, and survives what ends them
	group   *comm.Group   // the same ranks; operations run in it
	watched []*comm.Group // the same ranks; see watchPeers
	unwatch context.CancelFunc
	heap    *memory.Heap
	point   *p2p.Endpoint
	gpus    []*GPU // in the order in which they were made
	leaving bool

	// The worker's own.
	exchanger   *alltoallv.Exchanger
	reducer     *allreduce.Reducer
	plans       []*plan.Checked          // the reducer's, but for registered ones
	registered  map[Side][]*plan.Checked // the reducers' others
	dispatchers []*Dispatcher
	masks       bool // a dispatcher has had masks
	shared      dispatch.Shared

	blocks blocks // on the host
	opened opened // on the host
}

// Open makes a Comm and submits its join as the first operation, with ticket 1. words is as for a queue; the listener is
// used up.
func Open(o Options, l *comm.Listener, words []byte) (*Comm, error) {
	if l == nil && len(o.Addrs) > 0 {
		return nil, fmt.Errorf("core: %w: addresses without a listener", ErrInvalid)
	}
	return open(o, words, func(ctx context.Context) (*comm.Group, error) {
		if l != nil {
			return l.Join(ctx, o.Addrs)
		}
		c, err := o.config()
		if err != nil {
			return nil, err
		}
		return comm.Join(ctx, c)
	})
}

func open(o Options, words []byte, join func(context.Context) (*comm.Group, error)) (*Comm, error) {
	c := &Comm{options: o}
	c.limit.Store(int64(seconds(o.TimeoutSeconds)))
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.requests.start(c.queue.watch)
	c.start(words, c.run)
	_, err := c.do(func() (int64, error) {
		g, err := join(c.ctx)
		if err != nil {
			return 0, err
		}
		return 0, c.build(g)
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// build makes what stands on the group. The group is the Comm's from here on.
func (c *Comm) build(root *comm.Group) error {
	c.mu.Lock()
	c.root = root
	c.mu.Unlock()
	ctx, cancel := c.meeting()
	defer cancel()
	if c.options.Replaceable { // as the group of operations does where a dispatcher has masks
		root.OnLoss(func(int, bool) {})
	}
	g, err := root.Split(ctx, 0, 0)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.group = g
	c.mu.Unlock()
	err = c.equip(ctx, root, g)
	var cut *agree.CutError
	if err != nil && !errors.As(err, &cut) {
		_ = g.Barrier(ctx) // a rank that leaves aborts the calls of those that do not have their error yet
	}
	return err
}

// equip makes what operations in g need. All ranks do it, and an error of one is one of all.
func (c *Comm) equip(ctx context.Context, root, g *comm.Group) error {
	h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: c.options.SegmentBytes})
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.heap = h
	c.mu.Unlock()
	if err := c.watchPeers(ctx, root); err != nil {
		return err
	}
	timeout := c.within()
	exchanges := c.options.exchanges(g, OnHost)
	exchanges.Timeout, exchanges.Validate = timeout, c.options.Validate
	if c.exchanger, err = alltoallv.New(ctx, h, exchanges); err != nil {
		return err
	}
	if err := c.makeReducer(ctx, g); err != nil {
		return err
	}
	x, err := p2p.New(ctx, h, p2p.Options{Timeout: timeout})
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.point = x
	c.mu.Unlock()
	return nil
}

// ready is the heap and the group of operations once the join has succeeded.
func (c *Comm) ready() (*memory.Heap, *comm.Group, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.heap == nil {
		return nil, nil, fmt.Errorf("core: %w: the ranks have not joined", ErrInvalid)
	}
	return c.heap, c.group, nil
}

// Rank and Size of this rank in the group. They are known when the join, ticket 1, is complete.
func (c *Comm) Rank() (rank, size int, err error) {
	_, g, err := c.ready()
	if err != nil {
		return -1, 0, err
	}
	return g.Rank(), g.Size(), nil
}

// do submits work that is not one of the hot operations.
func (c *Comm) do(f func() (int64, error)) (Ticket, error) {
	return c.put(func(o *op) { o.kind, o.do = opDo, f })
}

// Size is the number of ranks, 0 before the join is complete.
func (c *Comm) Size() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.heap == nil {
		return 0
	}
	return c.group.Size()
}

// within bounds the waits of an operation, 0 for the default.
func (c *Comm) within() time.Duration { return time.Duration(c.limit.Load()) }

// timeout is within, or the default.
func (c *Comm) timeout() time.Duration { return cmp.Or(c.within(), communicator.DefaultTimeout) }

// SetTimeout submits that the waits of this rank's operations behind it, on GPUs and of dispatchers too, are bounded by d.
func (c *Comm) SetTimeout(d time.Duration) (Ticket, error) {
	return c.do(func() (int64, error) {
		_, _, err := c.ready()
		if err != nil {
			return 0, err
		}
		owners := []interface{ SetTimeout(time.Duration) error }{c.exchanger, c.reducer, c.point}
		for _, d := range c.dispatchers {
			owners = append(owners, d.inner)
		}
		for _, g := range c.onGPUs() {
			g.mu.Lock()
			owners = append(owners, g.exchanger)
			if g.point != nil {
				owners = append(owners, g.point)
			}
			if g.reducer != nil {
				owners = append(owners, g.reducer)
			}
			g.reduces.Timeout = d
			for _, d := range g.dispatchers {
				owners = append(owners, d.inner)
			}
			g.mu.Unlock()
		}
		for _, o := range owners {
			err = errors.Join(err, o.SetTimeout(d))
		}
		if err == nil {
			c.limit.Store(int64(d))
		}
		return 0, err
	})
}

// Split submits the making of a subgroup's Comm; see comm.Group.Split. words is memory for its queue and put names it.
// The ticket's value is the name, 0 for a rank with a negative color.
func (c *Comm) Split(color, key int, words []byte, put func(*Comm) uint64) (Ticket, error) {
	return c.derive(words, put, func(root *comm.Group) (*comm.Group, error) {
		ctx, cancel := c.meeting()
		defer cancel()
		return root.Split(ctx, color, key)
	})
}

// Shrink submits the making of a Comm of the ranks that are left, after some were lost and without those of leaveOut; see
// comm.Group.Shrink. It waits for the others as long as within, 0 for as long as operations do. words, put and the ticket's
// value are as for Split. The Comm stays to be closed; with leaveOut it has failed on all ranks.
func (c *Comm) Shrink(leaveOut []int, within time.Duration, words []byte, put func(*Comm) uint64) (Ticket, error) {
	return c.derive(words, put, func(root *comm.Group) (*comm.Group, error) {
		ctx, cancel := context.WithTimeout(c.ctx, cmp.Or(within, c.timeout()))
		defer cancel()
		if len(leaveOut) > 0 {
			c.group.AbortFor(leaveOut[0], fmt.Errorf("rank %d goes on without ranks %v", c.group.Rank(), leaveOut))
		}
		return root.Shrink(ctx, leaveOut...)
	})
}

// derive submits the making of a Comm of a group that comes from this one's.
func (c *Comm) derive(words []byte, put func(*Comm) uint64, from func(root *comm.Group) (*comm.Group, error)) (Ticket, error) {
	return c.do(func() (int64, error) {
		if _, _, err := c.ready(); err != nil {
			return 0, err
		}
		sub, err := from(c.root)
		if err != nil || sub == nil {
			return 0, err
		}
		o := c.bequeath(sub.Size())
		o.Name, o.Listener, o.Addrs = sub.Name(), 0, nil
		child, err := open(o, words, func(context.Context) (*comm.Group, error) { return sub, nil })
		if err != nil {
			return 0, errors.Join(err, sub.Close())
		}
		return int64(put(child)), nil
	})
}

// onGPUs is what the Comm has on GPUs.
func (c *Comm) onGPUs() []*GPU {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gpus
}
