package communicator

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Launches are the launches of C whose arguments have the type T. Each is kept until it has run, and used again.
type Launches[T any, P interface {
	*T
	kernels.Operation
	WhenDone(func(error))
}] struct {
	C *Communicator
	// Apart has them made by LaunchApart, so that their errors leave C usable.
	Apart bool
	// Reset makes the arguments those with which every launch begins, and lets go of the last one's memory.
	Reset func(*T)

	idle Pool[Op[T]]
}

// Op is a launch that is made or runs.
type Op[T any] struct {
	Args T
	done func(error)
}

// Take returns a launch, for Launch or Give.
func (l *Launches[T, P]) Take() *Op[T] {
	o := l.idle.Take()
	if o == nil {
		o = new(Op[T])
		o.done = func(err error) {
			if l.Apart {
				l.C.DoneApart(err)
			} else {
				l.C.Done(err)
			}
			l.Give(o)
		}
		l.Reset(&o.Args)
	}
	return o
}

// Give takes back a launch that is not made.
func (l *Launches[T, P]) Give(o *Op[T]) {
	l.Reset(&o.Args)
	l.idle.Give(o)
}

// Launch makes a launch on s and takes it back when it has run. C is locked but for launches apart.
func (l *Launches[T, P]) Launch(s device.Stream, o *Op[T]) (err error) {
	op := P(&o.Args)
	if s != nil {
		op.WhenDone(o.done)
	}
	if l.Apart {
		err = l.C.LaunchApart(s, op)
	} else {
		err = l.C.Launch(s, op)
	}
	if s == nil || err != nil {
		l.Give(o)
	}
	return err
}

// Takes refuses a nil pointer as a stream.
func (c *Communicator) Takes(s device.Stream) error {
	if device.IsNil(s) {
		return comm.Invalid(c.name, "the stream is a nil %T, a call without a stream passes nil itself", s)
	}
	return nil
}

// Serves refuses memory of a call that does not exist any more, or is another device's. what names it in the error.
func (c *Communicator) Serves(what string, v memory.View) error {
	if err := v.Valid(); err != nil {
		return fmt.Errorf("%s: %s: %w", c.name, what, err)
	}
	if !c.Heap.Serves(v) {
		return comm.Invalid(c.name, "%s: a buffer at %#x is not memory of %v", what, v.Ptr(), c.Heap.Device())
	}
	return nil
}
