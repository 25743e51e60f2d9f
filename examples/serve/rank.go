package main

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/examples/moe/checkpoint"
	"github.com/switchyard-moe/switchyard/examples/moe/model"
	"github.com/switchyard-moe/switchyard/examples/moe/nn"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/rebalance"
	"github.com/switchyard-moe/switchyard/stack"
)

// order is what the front asks of a rank. All ranks get orders of the same kind in the same sequence, so they make the same calls.
type order struct {
	Do   string // read, place, join, step, heal, admit or leave
	Join joining
	// Of a heal: ranks that are lost to the front, and may live on a host that it does not reach.
	LeaveOut []int
	// Of a step: the last bytes of each text, one after the other, and for each text a temperature and a number of [0, 1) that picks the
	// byte.
	Contexts     []byte
	Temperatures []float32
	Draws        []float32
}

// joining says where ranks meet, and what they serve.
type joining struct {
	Rank, Size  int
	LocalRank   int  // on a host of LocalSize
	LocalSize   int  // 0 where the others have begun and are on one host
	Fresh       int  // ranks that are admitted
	Late        bool // the others have begun
	Addr        string
	Secret      []byte
	Patience    time.Duration // with ranks that do not come
	PeerTimeout time.Duration
	Model       string // a file that examples/moe -save wrote
	Digest      uint64 // of the model in it, so that a fresh rank does not read another one
	Batch       int    // texts of a rank in a step
	Spare       int    // expert slots of a rank for copies of experts
	Balance     int    // steps between two looks at the load of ranks, 0 for never
	CUDA        bool   // heap and dispatcher are on a GPU,
	GPU         int    // this one of those that there are
}

// reply answers an order. The first of a rank answers none: it says that the rank runs.
type reply struct {
	Next    []byte          // of a step: a byte for each text
	Waited  []time.Duration // of a step, now and then: how long this rank has waited for each rank
	Rank    int
	Experts []int
	Moved   string // of a step after which experts have moved: how busy the busiest rank was and would be
	Process int    // in the first
	Addr    string // where ranks can meet
	Error   string
	Lost    int // the rank that the error names, -1 if it names none
}

// How long ranks wait for each other.
const (
	callTimeout  = 10 * time.Second // in a call of a step
	joinTimeout  = 30 * time.Second
	admitTimeout = 3 * time.Second // no step is made meanwhile
	stopTimeout  = 5 * time.Second
	waitedEvery  = 200 * time.Millisecond
	flushTimeout = 3 * time.Second // for clients to read the ends of their answers
)

// rank is one rank: it carries out orders until its connection ends.
type rank struct {
	joining
	process int               // 0 for a goroutine
	whole   *checkpoint.Model // of which this rank uses a part
	gpu     *device.CUDADevice
	on      device.Stream // of the GPU, nil on the host
	stack   *stack.Stack
	model   *model.Model    // that part
	loop    *rebalance.Loop // nil where ranks have different numbers of experts
	at      []int
	asked   time.Time // how long it has waited

	mu    sync.Mutex // of what kill uses too
	group *comm.Group
	dead  bool
}

// run reads orders and writes replies.
func (r *rank) run(orders io.Reader, replies io.Writer) error {
	in, out := gob.NewDecoder(orders), gob.NewEncoder(replies)
	answer := reply{Lost: -1, Process: r.process}
	for {
		var o order
		err := out.Encode(&answer)
		if err == nil {
			err = in.Decode(&o)
		}
		switch {
		case err != nil && r.process > 0: // nobody has it leave, and in no call do the others wait for a process that has ended
			return err
		case err != nil || o.Do == "leave":
			return errors.Join(err, r.leave())
		}
		answer = r.answer(&o)
	}
}

// answer carries out one order.
func (r *rank) answer(o *order) (a reply) {
	a.Lost = -1
	var err error
	switch o.Do {
	case "step":
		a.Next, err = r.step(o)
		a.Waited = r.waited()
		if err == nil {
			a.Moved, err = r.even()
		}
	case "read":
		err = r.read(o.Join)
	case "place":
		a.Addr, err = freePort(o.Join.Addr)
	case "join":
		r.joining = o.Join
		err = r.join()
	case "heal":
		err = r.heal(o.LeaveOut)
	case "admit":
		err = r.admit(o.Join)
	default:
		err = fmt.Errorf("order %q", o.Do)
	}
	if err != nil {
		a.Error = err.Error()
		var who *comm.PeerError
		if errors.As(err, &who) && (r.group == nil || who.Rank != r.group.Rank()) {
			a.Lost = who.Rank
		}
	}
	if r.group != nil {
		a.Rank = r.group.Rank()
	}
	if err == nil && (o.Do != "step" || a.Moved != "") && r.stack != nil {
		a.Experts = r.stack.Dispatcher.Placement().Local(a.Rank)
	}
	return a
}

// step predicts a byte for each text of this rank. A rank without texts takes part: its experts are for the texts of all.
func (r *rank) step(o *order) ([]byte, error) {
	texts, window := len(o.Draws), len(o.Contexts)/max(1, len(o.Draws))
	r.at = r.at[:0]
	for i := range texts {
		r.at = append(r.at, (i+1)*window)
	}
	if err := r.model.Forward(o.Contexts, r.at); err != nil {
		return nil, err
	}
	r.model.Release()
	next := make([]byte, texts)
	for i := range next {
		next[i] = pick(r.model.Logits[i*256:(i+1)*256], o.Temperatures[i], o.Draws[i])
	}
	return next, nil
}

// waited is how long this rank has waited for each rank since they met, and nil if that was asked a short while ago.
func (r *rank) waited() []time.Duration {
	if time.Since(r.asked) < waitedEvery {
		return nil
	}
	r.asked = time.Now()
	c, err := r.stack.Dispatcher.Counters()
	if err != nil { // the stack is closed, which the step says
		return nil
	}
	return c.Waited
}

// pick chooses a byte: the likeliest at temperature 0.
func pick(logits []float32, temperature, draw float32) byte {
	if temperature == 0 {
		return byte(slices.Index(logits, slices.Max(logits)))
	}
	for i := range logits {
		logits[i] /= temperature
	}
	nn.Softmax(logits)
	return text.Draw(logits, draw)
}

// read reads the model and opens the GPU, if it is to have one, so that a rank that cannot is no rank yet.
func (r *rank) read(j joining) (err error) {
	if r.whole, err = checkpoint.Read(j.Model); err != nil {
		return err
	}
	if r.whole.Digest != j.Digest {
		return fmt.Errorf("model %s is not the one that this server began with: it has changed", j.Model)
	}
	if !j.CUDA {
		return nil
	}
	n, err := device.CUDACount()
	if err == nil {
		r.gpu, err = device.CUDA(j.GPU % max(n, 1))
	}
	if err == nil {
		r.on, err = r.gpu.NewStream()
	}
	return err
}

// join meets the other ranks and opens what a step needs.
func (r *rank) join() error {
	ctx := context.Background()
	g, err := comm.Join(ctx, r.meeting(r.joining))
	if err != nil {
		return err
	}
	r.use(g)
	at := device.Device(device.Host())
	if r.gpu != nil {
		at = r.gpu
	}
	c := r.whole.Config
	r.stack, err = stack.Open(ctx, g, at, stack.Options{Dispatcher: &dispatch.Options{
		Experts: c.Experts, TopK: c.TopK, Hidden: c.Hidden, MaxTokens: r.Batch, Handles: c.Layers, HostCounts: true, Timeout: callTimeout,
		Placement: r.placement(g.Size()), Layer: "experts",
	}})
	if err != nil {
		return err
	}
	return r.load(ctx)
}

func (r *rank) meeting(j joining) comm.Config {
	conf, err := comm.FromEnv()
	if err != nil { // the variables of a launcher, which is none of this server's
		conf = comm.Config{}
	}
	if j.Secret == nil { // that of several hosts, which each host has from its environment
		j.Secret = conf.Secret
	}
	return comm.Config{Rank: j.Rank, Size: j.Size, LocalRank: j.LocalRank, LocalSize: j.LocalSize, Late: j.Late, Addr: j.Addr, Secret: j.Secret,
		PeerTimeout: r.PeerTimeout, JoinTimeout: j.Patience, Name: "serve", Logger: conf.Logger}
}

// heal goes on without the ranks that are lost. Experts of theirs come to others, which have the whole model.
func (r *rank) heal(leaveOut []int) error {
	ctx, stop := context.WithTimeout(context.Background(), callTimeout)
	defer stop()
	g, err := r.group.Shrink(ctx, leaveOut...)
	if err != nil {
		return err
	}
	return r.reopen(ctx, g)
}

// admit lets fresh ranks in. If one does not come, the group is what it was.
func (r *rank) admit(j joining) error {
	ctx, stop := context.WithTimeout(context.Background(), callTimeout)
	defer stop()
	g, err := r.group.Admit(ctx, j.Fresh, r.meeting(j))
	if err != nil {
		return err
	}
	return r.reopen(ctx, g)
}

// reopen opens on the next group what was open on the last one. If a rank is lost meanwhile, the next heal begins with the stack that this
// rank still has.
func (r *rank) reopen(ctx context.Context, g *comm.Group) error {
	last := r.use(g)
	if r.loop != nil {
		if err := r.loop.Close(ctx); err != nil {
			return err
		}
		r.loop = nil
	}
	next, err := r.stack.Reopen(ctx, g)
	if err != nil {
		return err
	}
	r.stack = next
	return errors.Join(r.load(ctx), last.Close())
}

// load makes this rank's part of the model on its stack: the dense part, and the experts that the placement gives it.
func (r *rank) load(ctx context.Context) error {
	c, d := r.whole.Config, r.stack.Dispatcher
	rows, err := r.alloc(ctx, d.MaxRows()*c.Hidden)
	if err != nil {
		return err
	}
	made := make([]memory.View, c.Layers)
	for i := range made {
		made[i] = rows // a layer's combine has read it when the next layer begins
	}
	r.model = model.New(c, r.group.Rank(), d, nil, made)
	if r.on != nil {
		carrier := &model.Carrier{Stream: r.on}
		for i, view := range []*memory.View{&carrier.X, &carrier.Chosen, &carrier.Weights} {
			if *view, err = r.alloc(ctx, r.Batch*[]int{c.Hidden, c.TopK, c.TopK}[i]); err != nil {
				return err
			}
		}
		r.model.Carry(carrier)
	}
	r.whole.Load(r.model, d.Placement().Local(r.group.Rank()))
	r.loop, err = r.balance(ctx)
	return err
}

// alloc takes n numbers of 32 bits of the heap, after growing it if there is no room. All ranks come to the same.
func (r *rank) alloc(ctx context.Context, n int) (memory.View, error) {
	b, err := r.stack.Heap.Alloc(4 * int64(n))
	if errors.Is(err, memory.ErrOutOfMemory) {
		if err = r.stack.Heap.Grow(ctx, 4*int64(n)); err == nil {
			b, err = r.stack.Heap.Alloc(4 * int64(n))
		}
	}
	if err != nil {
		return memory.View{}, err
	}
	return b.View(), nil
}

// use makes g the group of this rank, and returns the last one.
func (r *rank) use(g *comm.Group) (last *comm.Group) {
	r.mu.Lock()
	defer r.mu.Unlock()
	last, r.group = r.group, g
	if r.dead {
		g.Kill()
	}
	return last
}

// kill ends a rank that is a goroutine as a crash would end a process.
func (r *rank) kill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dead = true
	if r.group != nil {
		r.group.Kill()
	}
}

// leave ends a rank in good order, together with the others.
func (r *rank) leave() (err error) {
	ctx, stop := context.WithTimeout(context.Background(), stopTimeout)
	defer stop()
	if r.loop != nil {
		err = r.loop.Close(ctx)
	}
	if r.stack != nil {
		err = errors.Join(err, r.stack.Close(ctx))
	}
	if r.group != nil {
		err = errors.Join(err, r.group.Close())
	}
	if r.on != nil {
		err = errors.Join(err, r.on.Close())
	}
	if r.gpu != nil {
		err = errors.Join(err, r.gpu.Close())
	}
	return err
}
