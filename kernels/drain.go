package kernels

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrRunning means that launches still run though they were told to give up: what they use cannot be released.
var ErrRunning = errors.New("kernels: launches still run")

// How long Drain waits for launches when its context has ended, before it tells them to give up and after.
const (
	drainGrace = 10 * time.Millisecond
	stopGrace  = time.Second
)

// Drain runs wait, which returns when all launches of a port have run, on behalf of an engine. Once ctx has ended stop is to make those that
// wait for peers give up. Drain returns soon after: with the context's error where they have, with ErrRunning too where something else holds
// them up.
func Drain(ctx context.Context, wait func() error, stop func()) error {
	if ctx.Done() == nil {
		return wait()
	}
	done := make(chan error, 1)
	go func() { done <- wait() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(drainGrace):
	}
	stop()
	select {
	case werr := <-done:
		return errors.Join(fmt.Errorf("kernels: launches that ran were told to give up: %w", context.Cause(ctx)), werr)
	case <-time.After(stopGrace):
		return fmt.Errorf("%w: %w", ErrRunning, context.Cause(ctx))
	}
}
