package dispatch

import (
	"time"

	"github.com/switchyard-moe/switchyard/internal/shm"
)

const (
	// countsLook is how long a wait for counts looks again and again. Counts of a call whose ranks have begun come within it.
	countsLook = 500 * time.Microsecond
	// Then it sleeps, each time a part of what it has waited, within these: counts are known a while before the rows are there, and the host
	// that is late by less than that keeps nobody waiting.
	countsSleepPart                   = 32
	countsLeastSleep, countsMostSleep = 20 * time.Microsecond, time.Millisecond
)

// countsWait paces a wait for counts by what those before it have learned.
type countsWait struct {
	patience *shm.Patience
	since    time.Duration
	looks    bool
}

func waitForCounts(p *shm.Patience, now time.Duration) countsWait {
	return countsWait{p, now, p.Looks(now)}
}

// pause says how long to sleep after a look that has found nothing: 0 is to look again.
func (w *countsWait) pause(now time.Duration) time.Duration {
	waited := now - w.since
	if w.looks {
		if waited < countsLook {
			return 0
		}
		w.looks = false
		w.patience.Looked(now, waited, false)
	}
	return min(max(waited/countsSleepPart, countsLeastSleep), countsMostSleep)
}

// done takes in that counts have come.
func (w *countsWait) done(now time.Duration) {
	if w.looks {
		w.patience.Looked(now, now-w.since, true)
	}
}
