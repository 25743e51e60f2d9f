package core

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Options of a Comm and of a Listener. Zero values leave the environment's or the library's defaults.
type Options struct {
	// Rank, Size, LocalRank and LocalSize say who this rank is. With Env they come from torchrun's variables instead.
	Rank, Size           int
	LocalRank, LocalSize int
	Env                  bool
	// Addr is the host:port where the ranks meet. It is not used with a Listener.
	Addr   string
	Secret string
	Name   string
	// JoinSeconds, PeerSeconds and TimeoutSeconds bound the join, the silence of a peer and the waits of an operation.
	JoinSeconds, PeerSeconds, TimeoutSeconds float64
	// SegmentBytes is what each rank's heap has at first.
	SegmentBytes int64
	// Validate has the ranks compare every call before they make it; see alltoallv.Options and allreduce.Options.
	Validate bool
	// Listener and Addrs, by rank, join ranks that have a store of their own to meet in.
	Listener uint64
	Addrs    []string
	// Environ is what the process's environment says by now. Go has its own, from when the process began.
	Environ map[string]string
}

// environment is held while the process's environment is being brought up to date and read.
var environment sync.Mutex

// refresh brings Go's environment up to date.
func refresh(environ map[string]string) error {
	if environ == nil {
		return nil
	}
	for _, v := range env.Variables() {
		name := v.Name
		value, set := environ[name]
		old, was := os.LookupEnv(name)
		var err error
		switch {
		case set && (!was || value != old):
			err = os.Setenv(name, value)
		case !set && was:
			err = os.Unsetenv(name)
		}
		if err != nil {
			return fmt.Errorf("core: environment: %s: %w", name, err)
		}
	}
	return nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// config is what the options mean to package comm. Where they say nothing, Switchyard's own variables do.
func (o *Options) config() (comm.Config, error) {
	environment.Lock()
	defer environment.Unlock()
	if err := refresh(o.Environ); err != nil {
		return comm.Config{}, err
	}
	log, err := env.Logger(os.Stderr)
	if err != nil {
		return comm.Config{}, badEnvironment(err)
	}
	if _, err := env.Profiler(); err != nil {
		return comm.Config{}, badEnvironment(err)
	}
	c := comm.Config{Rank: o.Rank, Size: o.Size, LocalRank: o.LocalRank, LocalSize: o.LocalSize, Addr: o.Addr, Logger: log}
	world, err := env.ReadWorld()
	if err != nil && o.Env {
		return comm.Config{}, badEnvironment(err)
	}
	if o.Env {
		c.Rank, c.Size, c.LocalRank, c.LocalSize, c.Addr = world.Rank, world.Size, world.LocalRank, world.LocalSize, world.Addr
	}
	c.Secret, c.JoinTimeout, c.PeerTimeout = world.Secret, world.JoinTimeout, world.PeerTimeout
	if o.Secret != "" {
		c.Secret = []byte(o.Secret)
	}
	if o.JoinSeconds > 0 {
		c.JoinTimeout = seconds(o.JoinSeconds)
	}
	if o.PeerSeconds > 0 {
		c.PeerTimeout = seconds(o.PeerSeconds)
	}
	c.Name = o.Name
	return c, nil
}

// Listen opens this rank's socket for callers with a store of their own.
func Listen(o Options) (*comm.Listener, error) {
	c, err := o.config()
	if err != nil {
		return nil, err
	}
	return comm.Listen(c)
}

// Comm is one rank's end of a group. Its operations run in the order of their submission, which must be the same on all
// ranks.
type Comm struct {
	queue
	options Options
	ctx     context.Context
	cancel  context.CancelFunc

	// Set by the worker: by the first operation, which joins. Others read them once a ticket of it is complete.
	mu      sync.Mutex
	root    *comm.Group   // what was joined; it makes the other groups, and survives what ends them
	group   *comm.Group   // the same ranks; operations run in it
	watched []*comm.Group // the same ranks; see watchPeers
	heap    *memory.Heap
	gpus    []*GPU // in the order in which they were made
	leaving bool

	// The worker's own.
	exchanger   *alltoallv.Exchanger
	reducer     *allreduce.Reducer
	dispatchers []*Dispatcher

	blocks blocks // on the host
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
	c.ctx, c.cancel = context.WithCancel(context.Background())
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
	g, err := root.Split(ctx, 0, 0)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.group = g
	c.mu.Unlock()
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
	timeout := seconds(c.options.TimeoutSeconds)
	if c.exchanger, err = alltoallv.New(ctx, h, alltoallv.Options{Timeout: timeout, Validate: c.options.Validate}); err != nil {
		return err
	}
	if c.reducer, err = allreduce.New(ctx, h, allreduce.Options{Timeout: timeout, Validate: c.options.Validate}); err != nil {
		return err
	}
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

// grace is how long an operation may go on after a peer has left: it may have everything from that peer already.
const grace = time.Second

// watchPeers has this rank learn of peers that leave. A process that ends without leaving fails the group, which ends
// waits for it at once; one that leaves in good order does not, and an operation that waits for it would do so until its
// timeout. A call of the control plane does end then, if the rank that left had not made it yet. So the ranks make calls
// that are never complete, in groups of their own: for every bit of a rank's number one that ranks with a 0 there do not
// make, and one that those with a 1 do not. Any two ranks differ in a bit.
func (c *Comm) watchPeers(ctx context.Context, g *comm.Group) error {
	for bit := 0; 1<<bit < g.Size(); bit++ {
		for absent := range 2 {
			w, err := g.Split(ctx, 0, 0)
			if err != nil {
				return err
			}
			w.Mute() // whoever looks on wants to hear of calls that somebody made
			c.mu.Lock()
			c.watched = append(c.watched, w)
			c.mu.Unlock()
			if g.Rank()>>bit&1 != absent {
				go c.watch(w)
			}
		}
	}
	return nil
}

// watch waits for a peer to leave, and then for an operation that waits for it.
func (c *Comm) watch(w *comm.Group) {
	err := w.Barrier(c.ctx)
	var gone *comm.PeerError
	if !errors.As(err, &gone) || !errors.Is(err, comm.ErrPeerLost) {
		return // this rank has left, or the group has failed
	}
	var running Ticket
	since := time.Now()
	for {
		select {
		case <-c.stopped:
			return
		case <-c.group.Done():
			return
		case <-time.After(grace / 10):
		}
		// Whether a GPU waits cannot be asked without disturbing those who capture its work into a graph. Nothing on it
		// that waits for that peer still, a while after, will see it come.
		switch t, busy := c.current(); {
		case !busy && len(c.onGPUs()) == 0 || t != running:
			running, since = t, time.Now()
		case time.Since(since) > grace:
			c.mu.Lock()
			leaving := c.leaving
			c.mu.Unlock()
			if !leaving {
				c.group.ReportLeft(gone.Rank)
			}
			return
		}
	}
}

// run executes one operation, on the worker.
func (c *Comm) run(o *op) (int64, error) {
	if o.kind == opDo {
		return o.do()
	}
	if c.exchanger == nil || c.reducer == nil {
		return 0, fmt.Errorf("core: %w: the ranks have not joined", ErrInvalid)
	}
	switch o.kind {
	case opBarrier:
		return 0, c.exchanger.Barrier(nil)
	case opAllToAll:
		return 0, c.exchanger.Exchange(nil, o.dst, o.src, &o.splits)
	case opAllReduce:
		return 0, c.reducer.AllReduce(nil, o.dst, o.src, o.dtype, o.reduce)
	case opReduceScatter:
		return 0, c.reducer.ReduceScatter(nil, o.dst, o.src, o.dtype, o.reduce)
	default:
		return 0, c.reducer.AllGather(nil, o.dst, o.src, kernels.Uint8)
	}
}

// Buffer is memory of a caller: an address and a length.
type Buffer struct {
	Addr  uintptr
	Bytes int64
}

// view is the memory as operations take it: symmetric where it is.
func (c *Comm) view(b Buffer) (memory.View, error) {
	if b.Bytes < 0 || b.Bytes > 0 && b.Addr == 0 {
		return memory.View{}, fmt.Errorf("core: %w: %d bytes at address %#x", ErrInvalid, b.Bytes, b.Addr)
	}
	if b.Bytes == 0 {
		return memory.View{}, nil
	}
	if v, ok := c.blocks.view(b); ok {
		return v, nil
	}
	return memory.Host(shm.At(b.Addr, b.Bytes)), nil
}

func (c *Comm) views(dst, src Buffer) (d, s memory.View, err error) {
	if d, err = c.view(dst); err == nil {
		s, err = c.view(src)
	}
	return d, s, err
}

// do submits work that is not one of the hot operations.
func (c *Comm) do(f func() (int64, error)) (Ticket, error) {
	return c.put(func(o *op) { o.kind, o.do = opDo, f })
}

// AllToAll submits an exchange, as Place describes. The shape is copied; the buffers are the operation's until it is
// complete.
func (c *Comm) AllToAll(stream, dst, src uintptr, shape Shape) (Ticket, error) {
	if err := onHost(stream, shape); err != nil {
		return 0, err
	}
	d, s, err := c.views(Buffer{dst, shape.DstBytes}, Buffer{src, shape.SrcBytes})
	if err != nil {
		return 0, err
	}
	ranks := c.Size()
	return c.put(func(o *op) {
		o.kind, o.dst, o.src = opAllToAll, d, s
		o.splits.Send, o.splits.Recv = append(o.splits.Send[:0], shape.send(ranks)...), append(o.splits.Recv[:0], shape.recv(ranks)...)
		o.splits.ElemSize = shape.Row
	})
}

// onHost refuses what only GPUs have.
func onHost(stream uintptr, shape Shape) error {
	switch {
	case stream != 0:
		return fmt.Errorf("core: %w: stream %#x on the host, which has none", ErrInvalid, stream)
	case *shape.ShapeHead != ShapeHead{Row: shape.Row, DstBytes: shape.DstBytes, SrcBytes: shape.SrcBytes}:
		return fmt.Errorf("core: %w: splits in device memory, displacements at the peers and limits are for GPUs", ErrInvalid)
	}
	return nil
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

// Explain says how an exchange into dst would be carried.
func (c *Comm) Explain(dst uintptr, shape Shape) (string, error) {
	h, _, err := c.ready()
	if err != nil {
		return "", err
	}
	if err := onHost(0, shape); err != nil {
		return "", err
	}
	d, err := c.view(Buffer{dst, shape.DstBytes})
	if err != nil {
		return "", err
	}
	_, inPlace := d.Symmetric(h)
	var sp alltoallv.Splits
	shape.assign(c.Size(), &sp)
	decision, err := c.exchanger.Explain(&sp, inPlace)
	if err != nil {
		return "", err
	}
	return decision.String(), nil
}

// Fault is nil: tickets tell the errors of the host's exchanges.
func (c *Comm) Fault() error { return nil }

// Barrier submits a barrier, which no rank leaves before all have come.
func (c *Comm) Barrier() (Ticket, error) { return c.put(func(o *op) { o.kind = opBarrier }) }

// AllReduce submits an all-reduce, as Place describes.
func (c *Comm) AllReduce(stream uintptr, dst, src Buffer, dt kernels.DType, o kernels.ReduceOp) (Ticket, error) {
	return c.reduction(opAllReduce, stream, dst, src, dt, o)
}

// ReduceScatter submits a reduce-scatter, as Place describes.
func (c *Comm) ReduceScatter(stream uintptr, dst, src Buffer, dt kernels.DType, o kernels.ReduceOp) (Ticket, error) {
	return c.reduction(opReduceScatter, stream, dst, src, dt, o)
}

// AllGather submits an all-gather, as Place describes.
func (c *Comm) AllGather(stream uintptr, dst, src Buffer) (Ticket, error) {
	return c.reduction(opAllGather, stream, dst, src, kernels.Uint8, kernels.Sum)
}

func (c *Comm) reduction(kind opKind, stream uintptr, dst, src Buffer, dt kernels.DType, r kernels.ReduceOp) (Ticket, error) {
	if stream != 0 {
		return 0, fmt.Errorf("core: %w: stream %#x on the host, which has none", ErrInvalid, stream)
	}
	d, s, err := c.views(dst, src)
	if err != nil {
		return 0, err
	}
	return c.put(func(o *op) { o.kind, o.dst, o.src, o.dtype, o.reduce = kind, d, s, dt, r })
}

// Refuse submits that this rank does not make the call that the others make now, as Place describes.
func (c *Comm) Refuse(why error) (Ticket, error) {
	return c.do(func() (int64, error) { return 0, c.refuse(why) })
}

// refuse takes part in the comparison of a call, with why this rank does not make it. The error is never nil.
func (c *Comm) refuse(why error) error {
	why = fmt.Errorf("core: %w", why)
	_, g, err := c.ready()
	if err != nil || !c.options.Validate {
		return errors.Join(why, err)
	}
	ctx, cancel := context.WithTimeout(c.ctx, c.timeout())
	defer cancel()
	_, err = agree.On(ctx, g, agree.Claim{}, why)
	return err
}

// timeout bounds the waits of an operation.
func (c *Comm) timeout() time.Duration {
	return cmp.Or(seconds(c.options.TimeoutSeconds), communicator.DefaultTimeout)
}

// Alloc submits an allocation of symmetric memory, as Place describes.
func (c *Comm) Alloc(stream uintptr, n int64, put func(*Block) uint64) (Ticket, error) {
	if stream != 0 || n < 0 {
		return 0, fmt.Errorf("core: %w: %d bytes for stream %#x of the host", ErrInvalid, n, stream)
	}
	return c.do(func() (int64, error) {
		h, _, err := c.ready()
		if err != nil {
			return 0, err
		}
		ctx, cancel := c.meeting()
		defer cancel()
		b, err := c.blocks.allocate(ctx, h, nil, n)
		if err != nil {
			return 0, err
		}
		b.comm = c
		return int64(put(b)), nil
	})
}

// Verify submits a comparison of what the ranks have allocated and freed.
func (c *Comm) Verify() (Ticket, error) {
	return c.do(func() (int64, error) {
		h, _, err := c.ready()
		if err != nil {
			return 0, err
		}
		ctx, cancel := c.meeting()
		defer cancel()
		return 0, h.Verify(ctx)
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
			c.group.Abort(fmt.Errorf("the group goes on without ranks %v", leaveOut))
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
		o := c.options
		o.Name, o.Listener, o.Addrs = sub.Name(), 0, nil
		child, err := open(o, words, func(context.Context) (*comm.Group, error) { return sub, nil })
		if err != nil {
			return 0, errors.Join(err, sub.Close())
		}
		return int64(put(child)), nil
	})
}

// Close submits the end of the Comm: nothing can be submitted after it. It is collective. With keep the symmetric memory
// stays where it is until the process ends, for tensors that are still alive.
func (c *Comm) Close(keep bool) (Ticket, error) {
	t, err := c.do(func() (int64, error) { return 0, c.release(keep) })
	if err == nil {
		c.end()
	}
	return t, err
}

func (c *Comm) release(keep bool) error {
	c.mu.Lock()
	root, g, h, watched, gpus := c.root, c.group, c.heap, c.watched, c.gpus
	c.leaving = true
	c.mu.Unlock()
	var errs []error
	for _, gpu := range gpus {
		errs = append(errs, gpu.stop(c.ctx))
	}
	ctx, cancel := c.meeting()
	defer cancel()
	for _, d := range c.dispatchers {
		errs = append(errs, d.inner.Close(ctx))
	}
	if c.reducer != nil {
		errs = append(errs, c.reducer.Close(ctx))
	}
	if c.exchanger != nil {
		errs = append(errs, c.exchanger.Close(ctx))
	}
	// Heaps are closed together, which a rank that keeps its memory has no part in. Where there is one, the others let go of
	// theirs without it: peers have mappings of their own.
	free := ctx
	if g != nil {
		if all, err := g.AllGather(ctx, fmt.Append(nil, keep)); err == nil && slices.ContainsFunc(all, func(b []byte) bool { return string(b) == "true" }) {
			over, cancel := context.WithCancel(ctx)
			cancel()
			free = over
		}
	}
	if !keep {
		var freed []error
		for _, gpu := range gpus {
			freed = append(freed, gpu.free(free))
		}
		if h != nil {
			freed = append(freed, h.Close(free))
		}
		if free.Err() == nil { // else they say that others may still use it
			errs = append(errs, freed...)
		}
	}
	for _, g := range append(watched, g, root) {
		if g != nil {
			errs = append(errs, g.Close())
		}
	}
	c.cancel()
	return errors.Join(errs...)
}

// Abort fails the group on every rank, at once.
func (c *Comm) Abort(reason string) {
	c.mu.Lock()
	root := c.root
	c.mu.Unlock()
	if root != nil {
		root.Abort(errors.New(reason)) // and with it the groups that it made
	}
	c.cancel()
}

// Abandon ends the Comm without its peers, when the process is about to end or its group has been dropped. What is under
// way gets the time drain to become complete and is aborted then; nothing of it touches a caller's memory after Abandon.
// With keep the symmetric memory stays mapped. It reports whether everything had become complete.
func (c *Comm) Abandon(drain time.Duration, keep bool) bool {
	c.end()
	clean := c.settle(drain)
	for _, gpu := range c.onGPUs() {
		clean = clean && gpu.drain(drain)
	}
	stopped := clean
	if !clean {
		c.Abort("the process has ended with operations under way")
		stopped = c.settle(time.Minute)
	}
	c.mu.Lock()
	root, g, h, watched := c.root, c.group, c.heap, c.watched
	c.leaving = true
	c.mu.Unlock()
	c.cancel()
	for _, gpu := range c.onGPUs() {
		// Its kernels have seen the abort word. What still runs is somebody else's, and the memory stays for it.
		if stopped && gpu.drain(grace) {
			_ = gpu.stop(c.ctx) // a context that is over, as below
			if !keep {
				_ = gpu.free(c.ctx)
			}
		}
	}
	if h != nil && stopped && !keep {
		// A context that is over: what is mapped here is let go of at once, which is what the error says. Peers have
		// mappings of their own.
		_ = h.Close(c.ctx)
	}
	for _, g := range append(watched, g, root) {
		if g != nil {
			_ = g.Close() // it is always nil
		}
	}
	return clean
}

// onGPUs is what the Comm has on GPUs.
func (c *Comm) onGPUs() []*GPU {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gpus
}

// settle waits until the worker has stopped.
func (c *Comm) settle(d time.Duration) bool {
	select {
	case <-c.stopped:
		return true
	case <-time.After(d):
		return false
	}
}
