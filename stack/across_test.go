package stack_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/memory/devcomm"
	"github.com/switchyard-moe/switchyard/p2p"
)

// What GPUs of several hosts cannot do is refused on all ranks, in one sentence, when it is made; the heap then works as before.
func TestF3_CallsThatGPUsOfSeveralHostsDoNotHave(t *testing.T) {
	worldtest.NeedUCX(t)
	if !emulated.Driver(t) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	const n = 4
	groups, err := comm.Local(n, comm.LocalOptions{PerHost: 2})
	require.NoError(t, err)
	makers := map[string]func(h *memory.Heap) error{
		"allreduce": func(h *memory.Heap) error { _, err := allreduce.New(ctx, h, allreduce.Options{}); return err },
		"dispatch": func(h *memory.Heap) error {
			o := *options().Dispatcher
			_, err := dispatch.New(ctx, h, o)
			return err
		},
		"p2p":     func(h *memory.Heap) error { _, err := p2p.New(ctx, h, p2p.Options{}); return err },
		"devcomm": func(h *memory.Heap) error { _, err := devcomm.New(ctx, h, devcomm.Options{}); return err },
	}
	errs := make([]error, n)
	var ranks sync.WaitGroup
	for rank, g := range groups {
		ranks.Go(func() {
			errs[rank] = func() error {
				d, err := device.CUDA(rank)
				if err != nil {
					return err
				}
				h, err := memory.NewHeap(ctx, g, d, memory.Options{SegmentBytes: 4 << 20, RailBytes: 1 << 20})
				if err != nil {
					return err
				}
				for _, name := range []string{"allreduce", "dispatch", "p2p", "devcomm"} {
					if err := makers[name](h); !errors.Is(err, comm.ErrUnsupported) {
						return fmt.Errorf("rank %d: %s: %w", rank, name, err)
					} else if want := "not supported: GPUs on 2 hosts"; !strings.Contains(err.Error(), want) {
						return fmt.Errorf("rank %d: %s: no %q in %w", rank, name, want, err)
					}
				}
				return errors.Join(h.Verify(ctx), h.Close(ctx), d.Close(), g.Close())
			}()
		})
	}
	ranks.Wait()
	require.NoError(t, errors.Join(errs...))
}
