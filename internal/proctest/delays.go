package proctest

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Package comm promises that all ranks know the number and the host of a rank that is lost: within the first of these times after its process has
// ended, and where it has fallen silent, or a link was cut, within the second after that has lasted for comm.Config.PeerTimeout.
const (
	EndedIsNamedWithin  = time.Second
	SilentIsNamedWithin = 2 * time.Second
)

// Delays notes when this machine keeps processes waiting that could run, for longer than a nap: this one, and those whose Spec has it. A bound that
// is a promise is held to what something took without them: it is as tight as it says on an idle machine, and stands on a busy one.
type Delays struct {
	mu  sync.Mutex
	all []delay   // of all processes, in no order
	due time.Time // when this process can run next, or could have
}

// delay is from when a process could run until it did.
type delay struct{ from, to time.Time }

// NoteDelays notes them until the end of the test.
func NoteDelays(t testing.TB) *Delays {
	d, over := &Delays{due: time.Now().Add(nap)}, make(chan struct{})
	var noting sync.WaitGroup
	noting.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-time.After(nap):
			}
			d.mu.Lock()
			now := time.Now()
			if now.Sub(d.due) > nap {
				d.all = append(d.all, delay{d.due, now})
			}
			d.due = now.Add(nap)
			d.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		close(over)
		noting.Wait()
	})
	return d
}

// InTime holds what somebody took from begin to end, without the delays between, to a bound.
func (d *Delays) InTime(t testing.TB, begin, end time.Time, bound time.Duration, who string) {
	t.Helper()
	took := d.took(begin, end)
	if took >= bound { // a process may not have told yet
		time.Sleep(10 * nap)
		took = d.took(begin, end)
	}
	words := fmt.Sprintf("%s: %v, %v without delays", who, end.Sub(begin), took)
	if took >= bound {
		t.Errorf("%s, and %v are allowed", words, bound)
		return
	}
	t.Log(words)
}

func (d *Delays) took(begin, end time.Time) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := append(d.all[:len(d.all):len(d.all)], delay{d.due, end})
	slices.SortFunc(all, func(a, b delay) int { return cmp.Or(a.from.Compare(b.from), a.to.Compare(b.to)) })
	took, at := end.Sub(begin), begin // what lies before at is counted
	for _, late := range all {
		if late.from.After(at) {
			at = late.from
		}
		to := late.to
		if to.After(end) {
			to = end
		}
		if to.After(at) {
			took -= to.Sub(at)
			at = to
		}
	}
	return took
}

// A process tells of its delays on a pipe: when each began and ended, in nanoseconds since 1970, eight bytes each.
const (
	delaysVar = "SWITCHYARD_TEST_DELAYS" // is set for a process that tells
	delaysFD  = 3
)

// hear takes what a process tells, until that ends.
func (d *Delays) hear(pipe io.ReadCloser) {
	defer func() { _ = pipe.Close() }()
	var ns [2]int64
	for binary.Read(pipe, binary.LittleEndian, &ns) == nil {
		d.mu.Lock()
		d.all = append(d.all, delay{time.Unix(0, ns[0]), time.Unix(0, ns[1])})
		d.mu.Unlock()
	}
}

// tell has a process tell its delays, where its Spec asks for it.
var tell = sync.OnceFunc(func() {
	if os.Getenv(delaysVar) == "" {
		return
	}
	_ = os.Unsetenv(delaysVar)
	syscall.CloseOnExec(delaysFD)
	pipe := os.NewFile(delaysFD, "delays")
	due := time.Now().Add(nap) // not only once it is this goroutine's turn
	go func() {
		for {
			time.Sleep(nap)
			now := time.Now()
			if now.Sub(due) > nap && binary.Write(pipe, binary.LittleEndian, [2]int64{due.UnixNano(), now.UnixNano()}) != nil {
				return // the test is over
			}
			due = now.Add(nap) // the process may be kept waiting anywhere
		}
	}()
})
