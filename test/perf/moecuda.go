package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// wireGBps is what one link of the GPUs that were measured carries, in GB/s: the floor of a call is its bytes at this rate.
const wireGBps = 390

// moeFigures are what a row has besides for dispatch and combine on GPUs.
type moeFigures struct {
	Call       string  `json:"call"`  // dispatch, combine or pair
	Types      string  `json:"types"` // of the rows that are dispatched; they are combined in bfloat16
	Layout     string  `json:"layout"`
	LowLatency bool    `json:"low_latency"`
	Mode       string  `json:"mode"` // graph or eager
	Tokens     int     `json:"tokens"`
	Hidden     int     `json:"hidden"`
	Routing    string  `json:"routing"`
	MaxSMs     string  `json:"max_sms"`
	LinkBytes  int64   `json:"link_bytes"` // of the busiest rank, one direction
	GBpsEP     float64 `json:"gbps_deepep"`
	FloorUS    float64 `json:"floor_us"`
	Share      float64 `json:"share_of_floor"` // 1 is the floor
}

// moeRig is one rank's heap and stream for all cases.
type moeRig struct {
	g   *comm.Group
	dev *device.CUDADevice // nil on the host, for tests of what is checked
	h   *memory.Heap
	s   *device.CUDAStream
	all int // multiprocessors
}

func newMoERig(ctx context.Context, g *comm.Group) (r *moeRig, err error) {
	gpus, err := device.CUDACount()
	if err != nil {
		return nil, err
	}
	r = &moeRig{g: g}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close(ctx))
		}
	}()
	if r.dev, err = device.CUDA(g.Rank() % gpus); err != nil {
		return r, err
	}
	if r.all, err = r.dev.Context().Device().Attribute(cuda.Multiprocessors); err != nil {
		return r, err
	}
	if r.h, err = memory.NewHeap(ctx, g, r.dev, memory.Options{SegmentBytes: int64(2+3*g.Size()) << 30}); err != nil {
		return r, err
	}
	s, err := r.dev.NewStream()
	if err != nil {
		return r, err
	}
	r.s = s.(*device.CUDAStream)
	return r, nil
}

func (r *moeRig) close(ctx context.Context) (err error) {
	if r.s != nil {
		err = r.s.Close()
	}
	if r.h != nil {
		err = errors.Join(err, r.h.Close(ctx))
	}
	if r.dev != nil {
		err = errors.Join(err, r.dev.Close())
	}
	return err
}

// benchMoE times dispatch and combine on GPUs, case by case, in one run. Every element is checked.
func benchMoE(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	cases, err := casesOf(c)
	if err != nil {
		return nil, err
	}
	r, err := newMoERig(ctx, g)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	for _, k := range cases {
		got, err := r.run(ctx, c, &k)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", k.name(), err)
		}
		switch {
		case g.Rank() > 0:
		case c.Procs:
			rows = append(rows, got...)
		default:
			printer{json: c.JSON}.print(got) // a later case may run out of time
		}
	}
	return rows, nil
}

// moeRun is one case on one rank.
type moeRun struct {
	*moeRig
	k      *moeCase
	m      *moeModel
	o      dispatch.Options
	d      *dispatch.Dispatcher
	block  *memory.Buffer    // of the input; nil where it is another run's
	inputs []dispatch.Tokens // in turn, so that no cache holds them
	turn   int
	outs   []memory.View // the outputs of all handles
	made   memory.View   // rows of experts
	y      memory.View
}

func (r *moeRig) open(ctx context.Context, k *moeCase) (_ *moeRun, err error) {
	x := &moeRun{moeRig: r, k: k, o: k.o}
	o := &x.o
	if o.MaxSMs = k.sms; k.sms == allSMs {
		o.MaxSMs = r.all
	}
	if x.m, err = newMoEModel(k.moeShape, r.g.Size(), *o); err != nil {
		return nil, err
	}
	o.Placement = x.m.at
	if o.Layout == dispatch.Flat { // some room, and not for all tokens of all ranks
		o.MaxRows = x.m.mostRows() + 1024
	}
	if x.d, err = dispatch.New(ctx, r.h, *o); err != nil {
		return nil, err
	}
	me, m := r.g.Rank(), x.m
	// As many tokens as an L2 of 64 MiB cannot hold.
	token := int64(k.Hidden) * m.tokenType().Size()
	copies := 1
	if !o.LowLatency {
		copies = min(int(128<<20/(int64(k.Tokens)*token))+1, 10)
	}
	var tokens, scales []byte
	for t := range k.Tokens {
		tokens = append(tokens, m.token(me, t)...)
		if m.tokenType() == kernels.Float8E4M3 {
			for i := range m.scaleWords() {
				scales = append(scales, shm.Bytes([]float32{m.scale(me, t, i)})...)
			}
		}
	}
	made := make([]byte, 0, 2*k.Hidden*x.d.MaxRows())
	for i := range x.d.MaxRows() {
		made = append(made, m.row(me, i)...)
	}
	parts := [][]byte{shm.Bytes(m.idx[me]), shm.Bytes(m.weights[me]), made, make([]byte, 2*k.Hidden*k.Tokens)}
	for range copies {
		parts = append(parts, tokens, scales)
	}
	var need int64
	for _, p := range parts {
		need += kernels.AlignUp(int64(len(p)), 256)
	}
	if x.block, err = r.h.Alloc(need); err != nil {
		return nil, errors.Join(err, x.close(ctx))
	}
	views, at := make([]memory.View, len(parts)), int64(0)
	for i, p := range parts {
		views[i] = x.block.View().Slice(at, int64(len(p)))
		at += kernels.AlignUp(int64(len(p)), 256)
		if err := r.copy(views[i], memory.Host(p)); err != nil {
			return nil, errors.Join(err, x.close(ctx))
		}
	}
	x.made, x.y = views[2], views[3]
	for i := range copies {
		x.inputs = append(x.inputs, dispatch.Tokens{X: views[4+2*i], Scales: views[5+2*i], Experts: views[0], Weights: views[1]})
	}
	return x, nil
}

// again is the same case with a table on a dispatcher of its own. The input is that of x, which is closed later.
func (x *moeRun) again(ctx context.Context, table *dispatch.Table) (*moeRun, error) {
	a := &moeRun{moeRig: x.moeRig, k: x.k, m: x.m, o: x.o, inputs: x.inputs, made: x.made, y: x.y}
	a.o.Table = table
	var err error
	a.d, err = dispatch.New(ctx, x.h, a.o)
	return a, err
}

func (r *moeRig) stream() device.Stream {
	if r.dev == nil {
		return nil
	}
	return r.s
}

func (r *moeRig) copy(dst, src memory.View) error {
	if src.Len() == 0 {
		return nil
	}
	return errors.Join(memory.Copy(r.stream(), dst, src), r.synchronize())
}

func (r *moeRig) synchronize() error {
	if r.dev == nil {
		return nil
	}
	return r.s.Synchronize()
}

func (r *moeRig) down(v memory.View) ([]byte, error) {
	b := make([]byte, v.Len())
	return b, r.copy(memory.Host(b), v)
}

func (x *moeRun) close(ctx context.Context) error {
	err := x.d.Close(ctx)
	if x.block != nil {
		err = errors.Join(err, x.block.Free())
	}
	return err
}

func (x *moeRun) dispatch() (*dispatch.Handle, error) {
	x.turn++
	return x.d.Dispatch(x.stream(), x.inputs[x.turn%len(x.inputs)])
}

func (x *moeRun) combine(h *dispatch.Handle, release bool) error {
	return x.d.Combine(x.stream(), x.y, x.made, h, dispatch.CombineOptions{Release: release})
}

// calls makes n calls of a kind. A dispatch leaves the last handle alive; a combine works with that of x.
func (x *moeRun) calls(call string, n int, h *dispatch.Handle) (last *dispatch.Handle, err error) {
	if call == "combine" {
		for range n {
			if err := x.combine(h, false); err != nil {
				return nil, err
			}
		}
		return h, nil
	}
	for i := range n {
		h, err := x.dispatch()
		if err != nil {
			return nil, err
		}
		last = h
		if call == "pair" {
			if err := x.combine(h, i < n-1); err != nil {
				return nil, err
			}
		} else if i < n-1 {
			h.Release()
		}
	}
	return last, nil
}

// check looks at every element of what a call has left, and spoils it for the next.
func (x *moeRun) check(call string, h *dispatch.Handle) error {
	me := x.g.Rank()
	if err := errors.Join(x.synchronize(), x.d.Fault()); err != nil {
		return err
	}
	if call != "combine" {
		rows, err := x.down(h.Rows())
		if err != nil {
			return err
		}
		scales, err := x.down(h.Scales())
		if err != nil {
			return err
		}
		counts, err := x.down(h.Counts())
		if err != nil {
			return err
		}
		if err := x.m.checkDispatch(me, rows, scales, shm.View[int32](counts)); err != nil {
			return err
		}
	}
	if call != "dispatch" {
		y, err := x.down(x.y)
		if err != nil {
			return err
		}
		return x.m.checkCombine(me, y)
	}
	return nil
}

// poison makes sure that what is checked was written by what was timed. No peer writes before all ranks have come to its end.
func (x *moeRun) poison(ctx context.Context) error {
	for _, v := range append([]memory.View{x.y}, x.outs...) {
		if v.Len() > 0 {
			if err := x.dev.Context().Set(cuda.Stream(x.s.Handle()), v.Ptr(), 0xff, v.Len()); err != nil {
				return err
			}
		}
	}
	return errors.Join(x.synchronize(), x.g.Barrier(ctx))
}

// warm makes a pair with each handle, so that what a first call loads is there, and finds the handles' outputs. checked: it looks at them.
func (x *moeRun) warm(checked bool) error {
	handles := make([]*dispatch.Handle, x.k.o.Handles)
	for i := range handles {
		var err error
		if handles[i], err = x.calls("pair", 1, nil); err != nil {
			return err
		}
		x.outs = append(x.outs, handles[i].Rows(), handles[i].Scales())
		if checked {
			if err := x.check("pair", handles[i]); err != nil {
				return err
			}
		}
	}
	for _, h := range handles {
		h.Release()
	}
	return errors.Join(x.synchronize(), x.d.Fault())
}

func (r *moeRig) run(ctx context.Context, c config, k *moeCase) (rows []row, err error) {
	x, err := r.open(ctx, k)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.close(ctx)) }()
	if err := x.warm(true); err != nil {
		return nil, err
	}
	for _, call := range k.calls {
		for _, mode := range k.modes {
			us, err := x.time(ctx, c, call, mode)
			if err != nil {
				return nil, fmt.Errorf("%s, %s: %w", call, mode, err)
			}
			rows = append(rows, x.row(c, call, mode, us))
		}
	}
	return rows, nil
}

// time is the slowest rank's microseconds a call.
func (x *moeRun) time(ctx context.Context, c config, call, mode string) (_ []float64, err error) {
	samples, calls := 10, x.k.callsPerGraph()
	if x.k.o.LowLatency {
		samples = 25
	}
	if c.Iters > 0 {
		samples = c.Iters
	}
	if err := errors.Join(x.g.Barrier(ctx), x.poison(ctx)); err != nil {
		return nil, err
	}
	var h *dispatch.Handle
	if call == "combine" {
		if h, err = x.dispatch(); err != nil {
			return nil, err
		}
	}
	one := func() error {
		if call != "combine" && h != nil {
			h.Release()
		}
		h, err = x.calls(call, calls, h)
		return err
	}
	if mode == "graph" {
		graph, err := x.s.Capture(one)
		if err != nil {
			return nil, err
		}
		defer graph.Close()
		one = func() error { return graph.Launch(x.s) }
	}
	t, err := timeOnGPU(ctx, x.g, x.dev, x.s, samples, calls, one)
	if err != nil {
		return nil, err
	}
	if err := x.check(call, h); err != nil {
		return nil, err
	}
	h.Release()
	return t.merge(ctx, x.g)
}

// bytesOf is what a token's row is on its way there and back, scales included.
func (x *moeRun) bytesOf() (there, back int64) {
	return int64(x.k.Hidden)*x.m.rowType().Size() + 4*int64(x.m.scaleWords()), 2 * int64(x.k.Hidden)
}

func (x *moeRun) row(c config, call, mode string, us []float64) row {
	there, back := x.bytesOf()
	each := map[string]int64{"dispatch": there, "combine": back, "pair": there + back}[call]
	link, all := x.m.busiest()
	if x.k.o.LowLatency { // DeepEP counts every choice there
		all = int64(x.k.Tokens * x.k.TopK)
	}
	floor := float64(link*each) / wireGBps / 1e3
	mid := median(us)
	return row{
		Op: c.Op, Ranks: x.g.Size(), Procs: c.Procs, Device: c.Device, Splits: x.k.routing(), Algorithm: call, BytesPerRank: int64(x.k.Tokens) * each,
		GBpsLink: float64(link*each) / mid / 1e3, Checked: true,
		MoE: &moeFigures{
			Call: call, Types: x.k.types, Layout: x.k.o.Layout.String(), LowLatency: x.k.o.LowLatency, Mode: mode, Tokens: x.k.Tokens, Hidden: x.k.Hidden, Routing: x.k.routing(),
			MaxSMs: x.k.multiprocessors(), LinkBytes: link * each, GBpsEP: float64(all*each) / mid / 1e3, FloorUS: floor, Share: floor / mid,
		},
	}.timed(us)
}
