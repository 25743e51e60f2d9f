package device

import "fmt"

// Follow makes what is enqueued on s from now on wait for what has been enqueued on before; a nil s is the caller, who
// waits. It does nothing when before is nil or s itself, and nothing where one of them is being captured into a graph, which
// has no past and does not run now: whoever replays the graph orders it.
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

// Capturing reports whether what is enqueued on s, which may be nil, is being captured into a graph instead of running. Streams that
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
