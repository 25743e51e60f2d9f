package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync/atomic"
)

// busyEnv makes a process a busy loop.
const busyEnv = "SWITCHYARD_PERF_BUSY"

// startBusy starts n processes from this executable that keep a core busy each, for what is measured to share. They end with stop, or with
// this process, however that ends: their standard input does.
func startBusy(n int) (stop func() error, err error) {
	var loops []*exec.Cmd
	var inputs []io.Closer
	stop = func() (err error) {
		for _, in := range inputs {
			err = errors.Join(err, in.Close())
		}
		for _, loop := range loops {
			err = errors.Join(err, loop.Wait())
		}
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	for range n {
		loop := exec.Command(self)
		loop.Env = append(os.Environ(), busyEnv+"=1", "GOMAXPROCS=1")
		loop.Stderr = os.Stderr
		in, err := loop.StdinPipe()
		if err == nil {
			err = loop.Start()
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("-busy: %w", err), stop())
		}
		loops, inputs = append(loops, loop), append(inputs, in)
	}
	return stop, nil
}

// runBusy is main in a busy loop. It reports whether this is one.
func runBusy() bool {
	if os.Getenv(busyEnv) == "" {
		return false
	}
	var ended atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		ended.Store(true)
	}()
	for !ended.Load() {
	}
	return true
}
