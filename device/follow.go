package device

import "fmt"

// Follow makes what is enqueued on s from now on wait for what has been enqueued on before; a nil s is the caller, who
// waits. It does nothing when before is nil or s itself, and nothing for a stream that is being captured into a graph,
// which has no past: whoever replays the graph orders it.
func Follow(s, before Stream) error {
	if before == nil || s == before {
		return nil
	}
	if c, ok := s.(*CUDAStream); ok {
		if capturing, err := c.Capturing(); err != nil || capturing {
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
