// Command worker is an expert-parallel worker in one page: ranks meet, send tokens to their experts and back, average the
// gradient of what they share, and go on when one of them is lost. docs/go-workers.md goes through it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/stack"
)

const (
	experts = 8
	topK    = 2
	hidden  = 16
	tokens  = 64 // of a rank, in a step
	steps   = 20
)

func main() {
	lose := flag.Int("lose", -1, "the `rank` that leaves without a word half-way, to show what the others do")
	flag.Parse()
	ctx := context.Background()

	conf, err := comm.FromEnv()
	check(err)
	group, err := comm.Join(ctx, conf)
	check(err)
	s, err := stack.Open(ctx, group, device.Host(), stack.Options{
		Reducer:    &allreduce.Options{},
		Dispatcher: &dispatch.Options{Experts: experts, TopK: topK, Hidden: hidden, MaxTokens: tokens},
	})
	check(err)

	m := &model{bias: make([]float32, hidden)}
	for {
		err := train(ctx, s, m, *lose)
		if !errors.Is(err, comm.ErrPeerLost) {
			check(err)
			break
		}
		fmt.Printf("rank %d: step %d: %v\n", group.Rank(), m.step, err)
		survivors, err := group.Shrink(ctx)
		check(err)
		s, err = s.Reopen(ctx, survivors) // closes what there was
		check(err)
		check(group.Close())
		group, *lose = survivors, -1
		for _, move := range s.Moves {
			if move.To == group.Rank() {
				fmt.Printf("rank %d: has expert %d now, from rank %d\n", group.Rank(), move.Expert, move.From) // -1: load it
			}
		}
	}
	fmt.Printf("rank %d of %d: bias %.2f after %d steps\n", group.Rank(), group.Size(), m.bias[0], m.step)
	check(s.Close(ctx))
	check(group.Close())
}

// model is what a rank keeps when its group changes.
type model struct {
	step int
	bias []float32 // added to every token; the same on every rank
}

// worker is what a rank has on one group.
type worker struct {
	*stack.Stack
	gradients *allreduce.Buckets
	rowGrads  memory.Matrix[float32] // of the rows that the experts of this rank get
}

func train(ctx context.Context, s *stack.Stack, m *model, lose int) (err error) {
	w := &worker{Stack: s}
	w.gradients, err = allreduce.NewBuckets(ctx, s.Heap, []allreduce.Gradient{{Len: hidden}}, allreduce.BucketOptions{Op: kernels.Avg})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.gradients.Close(ctx)) }()
	if w.rowGrads, err = memory.AllocMatrix[float32](s.Heap, s.Dispatcher.MaxRows(), hidden); err != nil {
		return err
	}
	if err := w.catchUp(m); err != nil {
		return err
	}
	for ; m.step < steps; m.step++ {
		if s.Group.Rank() == lose && m.step == steps/2 {
			os.Exit(0) // as if somebody had taken the machine away
		}
		if err := w.step(m, rand.New(rand.NewPCG(uint64(s.Group.Rank()), uint64(m.step)))); err != nil {
			return err
		}
	}
	return nil
}

// catchUp gives every rank the model of one that got furthest.
func (w *worker) catchUp(m *model) error {
	all := make([]int64, w.Group.Size())
	if err := w.Reducer.AllGather(nil, memory.Wrap(all), memory.Wrap([]int64{int64(m.step)}), kernels.Int64); err != nil {
		return err
	}
	ahead := 0
	for rank, step := range all {
		if step > all[ahead] {
			ahead = rank
		}
	}
	m.step = int(all[ahead])
	return w.Reducer.Broadcast(nil, memory.Wrap(m.bias), ahead)
}

// step trains on tokens of its own: the bias learns to make the result of the layer as small as it can be.
func (w *worker) step(m *model, random *rand.Rand) error {
	x := memory.NewMatrix[float32](tokens, hidden)
	chosen, weights := memory.NewMatrix[int32](tokens, topK), memory.NewMatrix[float32](tokens, topK)
	for t := range tokens {
		for i := range x.Row(t) {
			x.Row(t)[i] = 1 + m.bias[i]
		}
		for k := range topK { // your router
			chosen.Row(t)[k], weights.Row(t)[k] = int32(random.IntN(experts)), 1.0/topK
		}
	}

	h, err := w.Dispatcher.Dispatch(nil, dispatch.Tokens{X: x.View(), Experts: chosen.View(), Weights: weights.View()})
	if err != nil {
		return err
	}
	defer h.Release()
	rows, err := memory.MatrixOf[float32](h.Rows(), hidden)
	if err != nil {
		return err
	}
	w.experts(h, rows)
	y := memory.NewMatrix[float32](tokens, hidden)
	if err := w.Dispatcher.Combine(nil, y.View(), rows.View(), h, dispatch.CombineOptions{}); err != nil {
		return err
	}

	dy := y // the loss is half the sum of squares
	dWeights, dx := memory.NewMatrix[float32](tokens, topK), memory.NewMatrix[float32](tokens, hidden)
	err = w.Dispatcher.CombineBackward(nil, w.rowGrads.View(), dWeights.View(), dy.View(), rows.View(), h, dispatch.CombineOptions{})
	if err != nil {
		return err
	}
	w.experts(h, w.rowGrads) // they are linear, so backward is the same
	if err := w.Dispatcher.DispatchBackward(nil, dx.View(), memory.View{}, w.rowGrads.View(), memory.View{}, h); err != nil {
		return err
	}

	gradient := w.gradients.Float32(0)
	clear(gradient)
	for t := range tokens {
		for i, v := range dx.Row(t) {
			gradient[i] += v / tokens
		}
	}
	if err := w.gradients.Ready(nil, 0); err != nil { // its all-reduce begins
		return err
	}
	if err := w.gradients.Wait(nil); err != nil {
		return err
	}
	for i := range m.bias {
		m.bias[i] -= 0.3 * gradient[i]
	}
	return nil
}

// experts applies the experts of this rank to their rows, in place. Expert e multiplies by 1 + e/10; yours do more.
func (w *worker) experts(h *dispatch.Handle, rows memory.Matrix[float32]) {
	first, n := memory.Of[int32](h.Offsets()), memory.Of[int32](h.Counts())
	for i, expert := range h.LocalExperts() {
		of := rows.Slice(int(first[i]), int(first[i]+n[i])).Data()
		for k := range of {
			of[k] *= 1 + float32(expert)/10
		}
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
