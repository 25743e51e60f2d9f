package memory

import (
	"context"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// Operations whose waits are told, as package observe names them.
const (
	opOpen     = "open memory"
	opTakeBack = "take back memory"
)

// shownWait is the least wait that is told.
const shownWait = 100 * time.Microsecond

// waits are those of this rank for one other outside of kernels: those that last, and how long others took.
type waits struct {
	mu     sync.Mutex
	now    map[*flight.Running]struct{}
	waited map[flight.Wait]time.Duration
}

// waitsFor notes that a call with ctx waits for a rank of this host, until over is called.
func (h *Heap) waitsFor(ctx context.Context, operation string, rank int) (over func()) {
	_, home := h.home.Flight()
	ws, began := &h.shares.waits, time.Now()
	w := &flight.Running{Group: h.group.Name(), Operation: operation, Since: flight.Since(ctx), WaitsFor: home[rank]}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.now == nil {
		ws.now, ws.waited = make(map[*flight.Running]struct{}), make(map[flight.Wait]time.Duration)
	}
	ws.now[w] = struct{}{}
	return func() {
		ws.mu.Lock()
		defer ws.mu.Unlock()
		delete(ws.now, w)
		if took := time.Since(began); took >= shownWait {
			ws.waited[flight.Wait{Operation: operation, Peer: w.WaitsFor}] += took
		}
	}
}

// running are the waits that last.
func (ws *waits) running() (all []flight.Running) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for w := range ws.now {
		if time.Since(w.Since) >= shownWait {
			all = append(all, *w)
		}
	}
	return all
}

// tell tells how long calls have waited that wait no more.
func (ws *waits) tell(add func(w flight.Wait, d time.Duration)) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for w, d := range ws.waited {
		add(w, d)
	}
}
