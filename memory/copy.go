package memory

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
)

// Copy enqueues on s a copy of src to dst, which have the same length and, where both are known, the same elements. Both may be views of any memory; the caller does not
// change or free them until the stream has run the copy.
//
// A copy from host memory to host memory takes a nil stream, which copies at once, or a host stream. All other copies take a
// CUDA stream. Between the host and a GPU Copy waits for the stream, because Go memory is not pinned; such a copy cannot be
// captured in a graph (device.ErrCapturing).
func Copy(s device.Stream, dst, src View) error {
	if err := copyView(s, dst, src); err != nil {
		return fmt.Errorf("memory: copy %d bytes: %w", src.n, err)
	}
	return nil
}

func copyView(s device.Stream, dst, src View) error {
	if device.IsNil(s) {
		return fmt.Errorf("%w: the stream is a nil %T", ErrInvalid, s)
	}
	if dst.n != src.n {
		return fmt.Errorf("%w: into %d bytes", ErrInvalid, dst.n)
	}
	if !dst.Alike(src) {
		return fmt.Errorf("%w: elements of %s into elements of %s", ErrInvalid, src.Element(), dst.Element())
	}
	for _, v := range [2]View{dst, src} {
		if err := v.Valid(); err != nil {
			return err
		}
	}
	hosts := dst.OnHost() && src.OnHost()
	switch t := s.(type) {
	case nil:
		if hosts {
			copy(dst.mem, src.mem)
			return nil
		}
	case *device.HostStream:
		if hosts {
			return t.Enqueue(&copyTask{dst, src})
		}
	case *device.CUDAStream:
		if !hosts {
			return cudaCopy(t, dst, src)
		}
	}
	return fmt.Errorf("%w: from %s to %s by a stream of %s", ErrInvalid, where(src), where(dst), streamOf(s))
}

func cudaCopy(s *device.CUDAStream, dst, src View) error {
	if src.n == 0 {
		return nil
	}
	c, h := s.Device().(*device.CUDADevice).Context(), cuda.Stream(s.Handle())
	if dst.mem == nil && src.mem == nil {
		return c.Copy(h, dst.ptr, src.ptr, src.n)
	}
	capturing, err := s.Capturing()
	switch {
	case err != nil:
		return err
	case capturing:
		return device.ErrCapturing
	case src.mem != nil:
		return c.Write(h, dst.ptr, src.mem)
	default:
		return c.Read(h, dst.mem, src.ptr)
	}
}

func where(v View) string {
	if v.OnHost() {
		return "the host"
	}
	return "a GPU"
}

func streamOf(s device.Stream) string {
	if s == nil {
		return "the caller"
	}
	return s.Device().String()
}

type copyTask struct{ dst, src View }

func (t *copyTask) Run() error {
	copy(t.dst.mem, t.src.mem)
	return nil
}
