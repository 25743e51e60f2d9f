package cuda

import (
	"errors"

	"github.com/switchyard-moe/switchyard/internal/cuda"
)

// takeStream is a stream of the engine that nothing runs on and nobody else has, until giveStream. There are as many as calls without a stream
// that have run at once: ranks that share a GPU share its 32 queues too, and two streams of one queue can wait for each other for ever.
func (e *Engine) takeStream() (cuda.Stream, error) {
	e.streamsMu.Lock()
	if n := len(e.streams); n > 0 {
		s := e.streams[n-1]
		e.streams = e.streams[:n-1]
		e.streamsMu.Unlock()
		return s, nil
	}
	e.streamsMu.Unlock()
	return e.ctx.NewStream(0)
}

// giveStream takes a stream back whose work has been waited for.
func (e *Engine) giveStream(s cuda.Stream) {
	e.streamsMu.Lock()
	defer e.streamsMu.Unlock()
	e.streams = append(e.streams, s)
}

// read copies memory of the GPU to the host, write the other way round. They wait for nothing that runs.
func (e *Engine) read(dst []byte, src uintptr) error {
	s, err := e.takeStream()
	if err != nil {
		return err
	}
	defer e.giveStream(s)
	return e.ctx.Read(s, dst, src)
}

func (e *Engine) write(dst uintptr, src []byte) error {
	s, err := e.takeStream()
	if err != nil {
		return err
	}
	defer e.giveStream(s)
	return e.ctx.Write(s, dst, src)
}

// closeStreams destroys the streams.
func (e *Engine) closeStreams() (err error) {
	e.streamsMu.Lock()
	defer e.streamsMu.Unlock()
	for _, s := range e.streams {
		err = errors.Join(err, e.ctx.DestroyStream(s))
	}
	e.streams = nil
	return err
}

// asideStream is a second stream for calls of a port, and the events that order it.
type asideStream struct {
	ctx  *cuda.Context
	s    cuda.Stream
	fork cuda.Event // has it wait for the call's stream,
	join cuda.Event // and the other way round
}

func newAsideStream(ctx *cuda.Context) (_ *asideStream, err error) {
	a := &asideStream{ctx: ctx}
	if a.s, err = ctx.NewStream(0); err != nil {
		return nil, err
	}
	for _, ev := range []*cuda.Event{&a.fork, &a.join} {
		if *ev, err = ctx.NewEvent(false); err != nil {
			return nil, errors.Join(err, a.close())
		}
	}
	return a, nil
}

// handle is the CUstream; nil has 0.
func (a *asideStream) handle() uintptr {
	if a == nil {
		return 0
	}
	return uintptr(a.s)
}

// close releases them. It is idempotent.
func (a *asideStream) close() (err error) {
	if a == nil {
		return nil
	}
	for _, ev := range []*cuda.Event{&a.fork, &a.join} {
		if *ev != 0 {
			err = errors.Join(err, a.ctx.DestroyEvent(*ev))
			*ev = 0
		}
	}
	if a.s != 0 {
		err = errors.Join(err, a.ctx.DestroyStream(a.s))
		a.s = 0
	}
	return err
}
