package device

import (
	"errors"
	"fmt"
	"sync"

	"github.com/switchyard-moe/switchyard/internal/cuda"
)

// Graph is work that was captured once and runs as a whole, any number of times.
type Graph struct {
	dev  *CUDADevice
	x    cuda.GraphExec
	once sync.Once
	err  error
}

// Capture makes a graph of the work that f enqueues on s, and does not run it. Another stream takes part in the capture from the
// time it waits for a mark of s until s has waited for one of its marks. Memory and streams that f uses outlive the graph,
// which the caller closes. If f returns an error, no graph is left.
func (s *CUDAStream) Capture(f func() error) (*Graph, error) {
	g, err := s.capture(f)
	if err != nil {
		return nil, fmt.Errorf("device: capture on a stream of %v: %w", s.dev, err)
	}
	return g, nil
}

func (s *CUDAStream) capture(f func() error) (*Graph, error) {
	c := s.dev.ctx
	if err := c.BeginCapture(s.h, cuda.RelaxedCapture); err != nil {
		return nil, err
	}
	err := f()
	g, cerr := c.EndCapture(s.h)
	if err = errors.Join(err, cerr); err != nil {
		if g != 0 {
			err = errors.Join(err, c.DestroyGraph(g))
		}
		return nil, err
	}
	x, err := c.Instantiate(g)
	if err = errors.Join(err, c.DestroyGraph(g)); err != nil {
		return nil, err
	}
	return &Graph{dev: s.dev, x: x}, nil
}

// Launch enqueues the graph's work on a CUDA stream of its device.
func (g *Graph) Launch(s Stream) error {
	t, ok := s.(*CUDAStream)
	if !ok {
		return fmt.Errorf("device: launch a graph: a stream of %v", s.Device())
	}
	if g.x == 0 {
		return errors.New("device: launch a graph: it is closed")
	}
	if err := g.dev.ctx.LaunchGraph(g.x, t.h); err != nil {
		return fmt.Errorf("device: launch a graph: %w", err)
	}
	return nil
}

// Close releases the graph, which does not run any more. It is idempotent.
func (g *Graph) Close() error {
	g.once.Do(func() {
		if err := g.dev.ctx.DestroyGraphExec(g.x); err != nil {
			g.err = fmt.Errorf("device: close a graph: %w", err)
		}
		g.x = 0
	})
	return g.err
}
