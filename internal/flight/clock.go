package flight

import (
	"math"
	"math/bits"
	"sync"
	"time"
)

// moment is a reading of the clock of notes. The processor's counter takes 10 ns to read where the system's time takes 25 ns, and a note reads it
// twice, so notes have counts where the counter is good enough, and nanoseconds elsewhere. 0 is none.
type moment int64

// clock tells moments. It is one for the process.
type clock struct {
	counts bool
	first  reading
	scale  uint64 // nanoseconds of a count, times 2^32, as measured at first
}

// reading is a moment, and the time at it.
type reading struct {
	moment
	time time.Time
}

// measured is how long the counter is compared with the time at first: known to 0.1% then also where its readings take a microsecond.
const measured = time.Millisecond

// looks is how often the time is looked at for that: where it stands still, as in a bubble of testing/synctest, the counter is not taken.
const looks = 200_000

// newClock measures the counter, if there is a good one.
func newClock(counts bool) *clock {
	c := &clock{counts: counts, first: reading{time: time.Now()}, scale: 1 << 32}
	if !counts {
		return c
	}
	c.first = read()
	for range looks {
		if time.Since(c.first.time) >= measured {
			break
		}
	}
	if rate := c.rate(read()); rate > 0 && rate < 1<<31 {
		c.scale = uint64(rate * (1 << 32))
	} else { // it does not count up
		c.counts = false
	}
	return c
}

// process's clock.
var timepiece = sync.OnceValue(func() *clock { return newClock(counts()) })

// read is a reading of the counter, the closest of some.
func read() (best reading) {
	least := time.Duration(math.MaxInt64)
	for range 5 {
		before := time.Now()
		at := moment(counter())
		if took := time.Since(before); took < least {
			least, best = took, reading{at, before.Add(took / 2)}
		}
	}
	return best
}

// rate is the number of nanoseconds of a count between the first reading and a later one.
func (c *clock) rate(r reading) float64 {
	return float64(r.time.Sub(c.first.time)) / float64(r.moment-c.first.moment)
}

// now is the moment.
func (c *clock) now() moment {
	if c.counts {
		return moment(counter())
	}
	return moment(time.Since(c.first.time))
}

// lapse is the time between two moments, from a to b.
func (c *clock) lapse(a, b moment) time.Duration {
	if !c.counts {
		return time.Duration(b - a)
	}
	hi, lo := bits.Mul64(uint64(max(0, b-a)), c.scale)
	return time.Duration(hi<<32 | lo>>32)
}

// dial turns moments into times that count from a beginning. It is right for moments close to the one at which it was made: the system adjusts
// its time to that of others, and the counter runs on.
type dial struct {
	at     moment
	passed time.Duration // from the beginning until then
	rate   float64       // nanoseconds of a count
}

// adjusted is how much the rate may have changed since the first measurement. Where it has changed more, the system was asleep meanwhile.
const adjusted = 0.005

func (c *clock) dial(began time.Time) dial {
	if !c.counts {
		return dial{c.now(), time.Since(began), 1}
	}
	r, rate := read(), float64(c.scale)/(1<<32)
	if long := c.rate(r); math.Abs(long/rate-1) < adjusted {
		rate = long
	}
	return dial{r.moment, r.time.Sub(began), rate}
}

// since is the time of a moment, 0 where that is none.
func (d dial) since(m moment) time.Duration {
	if m == 0 {
		return 0
	}
	return max(1, d.passed-time.Duration(float64(d.at-m)*d.rate))
}
