package deploy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/stack"
)

const (
	straggler = 2 // comes 50 ms late to every step, which is long on a busy machine, too
	experts   = 8
	topK      = 2
	hidden    = 64
	tokens    = 64
)

// endsVar has a job end with its first fault, as most do.
const endsVar = "JOB_ENDS"

// playJob works until it is killed.
func playJob([]string) int {
	fmt.Println("ended:", work(context.Background()))
	return 1
}

// work is a rank of a job that has something to show in every metric: steps of an exchange, a dispatch with its combine and an all-reduce, some
// of which fail or fall back. It goes on without ranks that are lost.
func work(ctx context.Context) error {
	conf, err := comm.FromEnv()
	if err != nil {
		return err
	}
	g, err := comm.Join(ctx, conf)
	if err != nil {
		return err
	}
	defer func() { _ = g.Close() }()
	s, err := stack.Open(ctx, g, device.Host(), stack.Options{
		Exchanger: &alltoallv.Options{}, Reducer: &allreduce.Options{},
		Dispatcher: &dispatch.Options{Experts: experts, TopK: topK, Hidden: hidden, MaxTokens: tokens, MaxRows: tokens * topK * 2, Layer: "7"},
	})
	if err != nil {
		return err
	}
	for n := 0; ; n++ {
		err := step(s, conf.Rank, n)
		if n == 10 {
			fmt.Println("works")
		}
		if lost := new(comm.PeerError); err != nil && errors.As(err, &lost) && os.Getenv(endsVar) == "" {
			old := s.Group
			smaller, err := old.Shrink(ctx)
			if err != nil {
				return err
			}
			if s, err = s.Reopen(ctx, smaller); err != nil {
				return err
			}
			if err := old.Close(); err != nil {
				return err
			}
			fmt.Println("went on")
		} else if err != nil {
			return err
		}
	}
}

func step(s *stack.Stack, rank, n int) error {
	if rank == straggler {
		time.Sleep(50 * time.Millisecond)
	}
	ranks := int64(s.Group.Size())
	sp := &alltoallv.Splits{}
	for p := range s.Group.Size() {
		size := int64(1 << 10)
		if n%20 == 10 && s.Group.Rank()+1 == p {
			size += 8 // which peer p does not expect: this call fails
		}
		sp.Send, sp.Recv = append(sp.Send, size), append(sp.Recv, 1<<10)
	}
	err := s.Exchanger.Exchange(nil, memory.Host(make([]byte, ranks<<10)), memory.Host(make([]byte, ranks<<10+8)), sp)
	if wrong := new(kernels.CountMismatchError); err != nil && !errors.As(err, &wrong) {
		return err
	}
	x := memory.NewMatrix[float32](tokens, hidden)
	chosen, weights := memory.NewMatrix[int32](tokens, topK), memory.NewMatrix[float32](tokens, topK)
	for t := range tokens {
		for k := range topK {
			chosen.Row(t)[k], weights.Row(t)[k] = int32((t+k)%experts), 1.0/topK
			if n%20 == 15 {
				chosen.Row(t)[k] = int32(k) // both on one rank, which has no room for them: this call fails
			}
		}
	}
	h, err := s.Dispatcher.Dispatch(nil, dispatch.Tokens{X: x.View(), Experts: chosen.View(), Weights: weights.View()})
	if full := new(kernels.OverflowError); errors.As(err, &full) {
		return nil
	}
	if err != nil {
		return err
	}
	defer h.Release()
	rows, err := memory.MatrixOf[float32](h.Rows(), hidden)
	if err != nil {
		return err
	}
	if err := s.Dispatcher.Combine(nil, memory.NewMatrix[float32](tokens, hidden).View(), rows.View(), h, dispatch.CombineOptions{}); err != nil {
		return err
	}
	flight.Ranks()[0].FellBack(flight.Fallback{Operation: "all_reduce", Backend: "gloo", Reason: "reduction"}) // as torch's backend does
	y := memory.Wrap(make([]float32, 64<<10))                                                                  // outside the heap: through staging
	return s.Reducer.AllReduce(nil, y, y, kernels.Float32, kernels.Sum)
}
