package device

import "fmt"

// Follow makes work enqueued on s from now on wait for work enqueued on before; a nil s is the caller, which waits itself. It does
// nothing if before is nil or s itself, and nothing while one of them is being captured into a graph, which does not run now:
// the program that replays the graph orders it.
func Follow(s, before Stream) error {
	if before == nil || s == before {
		return nil
	}
	for _, t := range [2]Stream{s, before} {
		if capturing, err := Capturing(t); err != nil || capturing {
			return err
		}
	}
	e, err := before.Record()
	switch {
	case err != nil:
	case s == nil:
		err = e.Wait()
	default:
		err = s.Wait(e)
	}
	if err != nil {
		return fmt.Errorf("device: order streams: %w", err)
	}
	return nil
}

// IsNil reports whether s is a nil pointer to a stream of this package. Such a pointer is no stream, and unlike nil itself not the
// caller either: calls refuse it.
func IsNil(s Stream) bool {
	switch s := s.(type) {
	case *HostStream:
		return s == nil
	case *CUDAStream:
		return s == nil
	}
	return false
}

// Capturing reports whether work enqueued on s, which may be nil, is being captured into a graph instead of running. Streams that
// can be captured have a method Capturing.
func Capturing(s Stream) (bool, error) {
	c, ok := s.(interface{ Capturing() (bool, error) })
	if !ok {
		return false, nil
	}
	capturing, err := c.Capturing()
	if err != nil {
		return false, fmt.Errorf("device: is a stream of %v being captured: %w", s.Device(), err)
	}
	return capturing, nil
}
