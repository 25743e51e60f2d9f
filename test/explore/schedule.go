package explore

import (
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"runtime/debug"
)

// Turn lets other ranks go first. what names the action that comes next; waiting says that the rank has found nothing to
// do and will only look again, in which case it is not given a turn before another rank has acted. Turn returns ErrStopped
// when the schedule is over and the rank should return.
type Turn func(what string, waiting bool) error

// ErrStopped ends the ranks of a schedule that will not be finished.
var ErrStopped = errors.New("explore: the schedule is over")

// Program is one fresh run of real code: the body of every rank, and a judgement of the end, which may be nil.
type Program struct {
	Ranks []func(Turn) error
	End   func() error
}

// Schedules explores the order in which the ranks of a program get their turns. Ranks run one at a time, from one Turn to
// the next. The simplest schedule keeps the running rank until it waits or ends and then goes on with the next one in the
// ring; at every turn another rank can be taken instead, at the cost of one deviation for each rank that is passed over.
type Schedules struct {
	// Deviations is the most deviations of a schedule; all such schedules are run.
	Deviations int
	// Random is how many random schedules are run after these, from Seed.
	Random int
	Seed   uint64
}

// ScheduleResult says what was run.
type ScheduleResult struct {
	Schedules, Turns int
	// Violation is the first error of a rank or of the end, or a deadlock, with the schedule that leads there.
	Violation *Violation
}

// schedule is one run. decisions[i] is the option taken at turn i.
type schedule struct {
	choose    func(turn, options int) int
	decisions []decision
	trace     []Step
}

type decision struct{ options, taken int }

// Explore runs the program, made anew by start each time, under every schedule, and stops at the first violation.
func (s Schedules) Explore(start func() Program) ScheduleResult {
	var r ScheduleResult
	run := func(choose func(turn, options int) int) *schedule {
		c := &schedule{choose: choose}
		err := c.run(start())
		r.Schedules++
		r.Turns += len(c.decisions)
		if err != nil {
			r.Violation = &Violation{Err: err, Trace: c.trace}
		}
		return c
	}
	var prefix []decision
	for more := true; more && r.Violation == nil; {
		c := run(func(turn, _ int) int {
			if turn < len(prefix) {
				return prefix[turn].taken
			}
			return 0
		})
		prefix, more = s.after(c.decisions)
	}
	rnd := rand.New(rand.NewPCG(s.Seed, 0))
	for range s.Random {
		if r.Violation != nil {
			break
		}
		// Now and then every turn is a deviation, now and then a rank is held up for long.
		often := []float64{0.5, 0.1, 0.02}[rnd.IntN(3)]
		run(func(_, options int) int {
			if rnd.Float64() < often {
				return rnd.IntN(options)
			}
			return 0
		})
	}
	return r
}

// after is the schedule that follows d in the enumeration: the last decision that can be raised is.
func (s Schedules) after(d []decision) (prefix []decision, more bool) {
	spent := 0
	for _, x := range d {
		spent += x.taken
	}
	for i := len(d) - 1; i >= 0; i-- {
		spent -= d[i].taken
		if d[i].taken+1 < d[i].options && spent+d[i].taken+1 <= s.Deviations {
			prefix = append(prefix, d[:i+1]...)
			prefix[i].taken++
			return prefix, true
		}
	}
	return nil, false
}

// coroutine is one rank of a run.
type coroutine struct {
	next    func() (string, bool)
	stop    func()
	at      string // what it does next
	waiting bool   // it only looks again
	seen    int    // how many actions there had been when it looked last
	stopped bool
	done    bool
	err     error
}

func newCoroutine(body func(Turn) error) *coroutine {
	c := &coroutine{at: "starts"}
	c.next, c.stop = iter.Pull(func(yield func(string) bool) {
		defer func() {
			if p := recover(); p != nil {
				c.err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
			}
		}()
		c.err = body(func(what string, waiting bool) error {
			if !c.stopped {
				c.waiting = waiting
				c.stopped = !yield(what)
			}
			if c.stopped {
				return ErrStopped
			}
			return nil
		})
	})
	return c
}

// run takes the program to its end, or to its first error.
func (s *schedule) run(p Program) error {
	ranks := make([]*coroutine, len(p.Ranks))
	for i, body := range p.Ranks {
		ranks[i] = newCoroutine(body)
		defer ranks[i].stop()
	}
	acts, last := 0, 0
	options := make([]int, 0, len(ranks))
	for {
		options = options[:0]
		left := 0
		for i := range ranks {
			k := (last + i) % len(ranks)
			if c := ranks[k]; !c.done {
				left++
				if !c.waiting || c.seen != acts {
					options = append(options, k)
				}
			}
		}
		if left == 0 {
			break
		}
		if len(options) == 0 {
			return fmt.Errorf("%w: %d ranks wait", ErrDeadlock, left)
		}
		taken := min(s.choose(len(s.decisions), len(options)), len(options)-1)
		s.decisions = append(s.decisions, decision{len(options), taken})
		last = options[taken]
		c := ranks[last]
		s.trace = append(s.trace, Step{last, c.at})
		waited := c.waiting
		what, more := c.next()
		c.at, c.done = what, !more
		if c.done && c.err != nil {
			return fmt.Errorf("rank %d: %w", last, c.err)
		}
		if !waited || !c.waiting || c.done {
			acts++
		}
		c.seen = acts
	}
	if p.End != nil {
		return p.End()
	}
	return nil
}
