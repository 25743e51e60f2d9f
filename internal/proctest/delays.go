package proctest

import (
	"sync"
	"testing"
	"time"
)

// Package comm promises that all ranks know the number and the host of a rank that is lost: within the first of these times after its process has
// ended, and where it has fallen silent, or a link was cut, within the second after that has lasted for comm.Config.PeerTimeout.
const (
	EndedIsNamedWithin  = time.Second
	SilentIsNamedWithin = 2 * time.Second
)

// Delays notes for how long this machine keeps a process waiting that could run. A bound that is a promise is held to what something took without
// them: it is as tight as it says on an idle machine, and stands on a busy one.
type Delays struct {
	mu  sync.Mutex
	all []delay
}

// delay is from when the process could run until it did; to is zero where it has not yet.
type delay struct{ from, to time.Time }

// NoteDelays notes them until the end of the test.
func NoteDelays(t testing.TB) *Delays {
	d, over := &Delays{}, make(chan struct{})
	var noting sync.WaitGroup
	noting.Go(func() {
		for {
			d.mu.Lock()
			d.all = append(d.all, delay{from: time.Now().Add(nap)})
			d.mu.Unlock()
			select {
			case <-over:
				return
			case <-time.After(nap):
			}
			d.mu.Lock()
			d.all[len(d.all)-1].to = time.Now()
			d.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		close(over)
		noting.Wait()
	})
	return d
}

// Took is how long something took from begin to end, without the delays between.
func (d *Delays) Took(begin, end time.Time) time.Duration {
	took := end.Sub(begin)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, late := range d.all {
		from, to := late.from, late.to
		if from.Before(begin) {
			from = begin
		}
		if to.IsZero() || to.After(end) {
			to = end
		}
		took -= max(to.Sub(from), 0)
	}
	return took
}
