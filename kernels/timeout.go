package kernels

import (
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
)

// TimedOut is the error of a wait for a peer that its deadline has ended, a comm.ErrTimeout: how long it has waited and what the
// call exchanges with that peer, as far as the engine knows, and what it is most often.
func TimedOut(after time.Duration, sizes string) error {
	what := ""
	if after > 0 {
		what = " after " + after.String()
	}
	if sizes != "" {
		what += " (" + sizes + ")"
	}
	return fmt.Errorf("%w%s; most often that rank makes another call here, comes later than that, or hangs: with SWITCHYARD_DEBUG=info "+
		"every rank says whom it waits for", comm.ErrTimeout, what)
}
