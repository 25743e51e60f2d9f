package flight

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// clocks runs a test with the system's time, and with the processor's counter where that is good enough.
func clocks(t *testing.T, test func(t *testing.T, c *clock)) {
	t.Run("time", func(t *testing.T) { test(t, newClock(false)) })
	t.Run("counter", func(t *testing.T) {
		c := newClock(counts())
		if !c.counts {
			t.Skip("the system does not keep its time by the processor's counter")
		}
		test(t, c)
	})
}

func TestMomentsAreTimes(t *testing.T) {
	clocks(t, func(t *testing.T, c *clock) {
		const share = 0.01 // by which the rate may seem to be wrong on a busy machine
		began := time.Now()
		for range 5 {
			outer := time.Now()
			a := c.now()
			inner := time.Now()
			time.Sleep(5 * time.Millisecond)
			least := time.Since(inner)
			b := c.now()
			most := time.Since(outer)
			took := c.lapse(a, b)
			require.GreaterOrEqual(t, float64(took), float64(least)*(1-share)-1000)
			require.LessOrEqual(t, float64(took), float64(most)*(1+share)+1000)
			d := c.dial(began)
			require.InDelta(t, float64(took), float64(d.since(b)-d.since(a)), float64(took)*share+2)
			from, now := outer.Sub(began), time.Since(began)
			slack := time.Duration(share*float64(now-from)) + time.Microsecond
			require.GreaterOrEqual(t, d.since(a), from-slack)
			require.LessOrEqual(t, d.since(a), inner.Sub(began)+slack)
		}
		require.Zero(t, c.dial(began).since(0), "no moment")
		now := c.now()
		require.Zero(t, c.lapse(now, now-1)/time.Microsecond, "back in time, as between two cores")
	})
}

// After a sleep of the system, whose time stood still while the counter ran on, the first rate counts.
func TestARateThatIsFarOffIsNotTaken(t *testing.T) {
	clocks(t, func(t *testing.T, c *clock) {
		c.first.time = c.first.time.Add(-time.Hour)
		require.InDelta(t, float64(c.scale)/(1<<32), c.dial(time.Now()).rate, 1e-9)
	})
}

// Where the time stands still the counter cannot be measured.
func TestAClockInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newClock(true)
		require.False(t, c.counts)
		a := c.now()
		time.Sleep(time.Second)
		require.Equal(t, time.Second, c.lapse(a, c.now()))
	})
}

func BenchmarkMoment(b *testing.B) {
	c := timepiece()
	for b.Loop() {
		c.now()
	}
}

func BenchmarkTime(b *testing.B) {
	began := time.Now()
	for b.Loop() {
		_ = time.Since(began)
	}
}
