package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"
)

// request is one text that is being continued.
type request struct {
	ctx         context.Context // ends when the client goes
	text        []byte          // the prompt, and what was made of it
	left        int             // bytes that are still to be made
	temperature float32
	seed        uint64

	next chan byte // with room for all, so that no client holds up a step
	err  error     // why it ended early; read once next is closed
}

var (
	errFull     = errors.New("too many requests wait")
	errStarting = errors.New("the server is starting")
	errStopping = errors.New("the server stops")
	errNoRanks  = errors.New("all ranks are lost")
)

// The states of a front.
const (
	starting = "starting"
	ready    = "ready"
	stopping = "stopping"
	failed   = "failed"
)

// front has the queue, and the ranks carry out its orders. It makes the steps: between two of them requests come in and leave, and ranks
// are lost and admitted. A text is on no rank between steps, so a step that fails is made again, by the ranks that are left.
type front struct {
	options
	log    *slog.Logger
	meet   joining
	window int // bytes that the model sees
	wake   chan struct{}
	port   net.Listener // of a server on several hosts, which lenders call

	mu      sync.Mutex
	state   string
	queue   []*request // that wait
	running []*request
	seats   []*seat        // in the order of their ranks
	lost    int            // ranks, so far
	came    int            // fresh ranks, so far
	steps   int            // so far
	bytes   int            // made so far
	rounds  map[int]*round // by host

	// Of the loop alone.
	fresh    []*seat   // ranks that are not in the group yet: one, or those of a host
	retry    time.Time // when another one may be started
	started  int       // ranks that ever were
	failures int       // steps in a row that failed
}

func newFront(o options, meet joining, window int, log *slog.Logger) *front {
	return &front{options: o, log: log, meet: meet, window: window, wake: make(chan struct{}, 1), state: starting, rounds: map[int]*round{}}
}

// stir has the loop look at what there is to do.
func (f *front) stir() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// submit queues a request. It does not wait: a queue that is full is the client's to know.
func (f *front) submit(r *request) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch f.state {
	case ready:
	case failed:
		return errNoRanks
	case starting:
		if f.lost == 0 { // requests that come after a loss wait for the fresh ranks
			return errStarting
		}
	case stopping:
		return errStopping
	}
	if len(f.queue) >= f.Queue {
		f.queue = slices.DeleteFunc(f.queue, (*request).gone)
	}
	if len(f.queue) >= f.Queue {
		return fmt.Errorf("%w: %d run and %d wait", errFull, len(f.running), len(f.queue))
	}
	f.queue = append(f.queue, r)
	f.stir()
	return nil
}

// gone ends a request whose client has gone.
func (r *request) gone() bool {
	if r.ctx.Err() == nil {
		return false
	}
	r.end(context.Cause(r.ctx))
	return true
}

// end is the last that happens to a request.
func (r *request) end(err error) {
	r.err = err
	close(r.next)
}

// openAnew starts as many ranks as there were at the beginning, after all were lost. Requests that are under way go on with them.
func (f *front) openAnew() error {
	_ = f.dismiss(f.fresh)
	f.fresh = nil
	f.become(ready, starting)
	return f.open()
}

// become changes the state if it is what it was.
func (f *front) become(was, now string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.state == was {
		f.state = now
	}
}

// open starts the ranks of this host and has them meet.
func (f *front) open() error {
	where := fmt.Sprintf("%s-from-%d", f.meet.Addr, f.started)
	var seats []*seat
	for local := range f.perHost() {
		s, err := f.sit(local)
		if err != nil {
			return errors.Join(err, f.dismiss(seats))
		}
		seats = append(seats, s)
	}
	for i, s := range seats {
		if _, ok := <-s.replies; !ok {
			return errors.Join(fmt.Errorf("rank %d ended: %w", i, s.why), f.dismiss(seats))
		}
		s.rank, s.gpu = i, i
	}
	for _, do := range []string{"read", "join"} {
		lag := f.PeerTimeout
		if do == "read" { // which each does by itself
			lag = answerTimeout
		}
		answers := ask(seats, lag, func(i int) *order {
			j := f.meet
			j.Rank, j.Size, j.Addr, j.GPU = i, len(seats), where, i
			return &order{Do: do, Join: j}
		})
		for i, a := range answers {
			if a.failed() {
				return errors.Join(fmt.Errorf("rank %d: %s: %s", i, do, a.Error), f.dismiss(seats))
			}
			seats[i].experts, seats[i].waited = a.Experts, nil
		}
	}
	f.mu.Lock()
	f.seats = seats
	f.mu.Unlock()
	f.become(starting, ready)
	f.log.Info("ready", "ranks", len(seats), "experts", f.experts())
	return nil
}

// sit starts one rank on this host.
func (f *front) sit(local int) (*seat, error) {
	f.started++
	s, err := sit(f.started, f.Procs, f.stir)
	if err != nil {
		return nil, err
	}
	s.local = local
	if s.pid > 0 {
		f.log.Info("a rank is started", "process", s.pid)
	}
	return s, nil
}

// dismiss kills ranks that are of no use.
func (f *front) dismiss(seats []*seat) error {
	for _, s := range seats {
		s.kill()
		<-s.ended
	}
	return nil
}

// loop makes steps until ctx ends, and then until nothing is left to do or f.Grace has passed.
func (f *front) loop(ctx context.Context) error {
	over, told := make(chan struct{}), false
	defer context.AfterFunc(ctx, func() {
		f.become(ready, stopping)
		f.become(starting, stopping)
		f.stir()
		time.AfterFunc(f.Grace, func() { close(over); f.stir() })
	})()
	for {
		if slices.ContainsFunc(f.seats, (*seat).gone) {
			f.heal()
		}
		if ctx.Err() != nil && !told {
			c := f.condition()
			f.log.Info("stopping", "running", c.Running, "waiting", c.Waiting)
			told = true
		}
		f.replace(ctx)
		batch := f.fill()
		select {
		case <-over:
			batch = nil
		default:
		}
		switch {
		case len(f.seats) == 0:
			if err := f.openAnew(); err != nil {
				err = fmt.Errorf("%w, and others do not start: %w", errNoRanks, err)
				f.fail(failed, err)
				return err
			}
		case len(batch) > 0:
			f.step(batch)
		case ctx.Err() != nil:
			f.fail(stopping, errStopping)
			f.leave()
			return nil
		default:
			select {
			case <-f.wake:
			case <-ctx.Done():
			case <-time.After(time.Second): // to try again to start a fresh rank
			}
		}
	}
}

// fill lets requests in, up to what the ranks take in a step, and returns those of the next step.
func (f *front) fill() []*request {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queue, f.running = slices.DeleteFunc(f.queue, (*request).gone), slices.DeleteFunc(f.running, (*request).gone)
	room := f.Batch * len(f.seats)
	n := min(max(0, room-len(f.running)), len(f.queue))
	f.running = append(f.running, f.queue[:n]...)
	f.queue = slices.Delete(f.queue, 0, n)
	return slices.Clone(f.running[:min(room, len(f.running))]) // after a loss fewer may have room
}

// step makes a byte for each request of a batch. The ranks share it; a request is on any rank in any step.
func (f *front) step(batch []*request) {
	seats := f.seats
	orders := make([]*order, len(seats))
	for i := range orders {
		orders[i] = &order{Do: "step"}
	}
	for k, r := range batch {
		o := orders[k%len(seats)]
		o.Contexts = append(o.Contexts, r.text[len(r.text)-f.window:]...)
		o.Temperatures = append(o.Temperatures, r.temperature)
		o.Draws = append(o.Draws, r.draw())
	}
	answers := ask(seats, f.PeerTimeout, func(i int) *order { return orders[i] })
	f.mu.Lock()
	f.steps++
	for i, a := range answers {
		if a.Waited != nil {
			seats[i].waited = a.Waited
		}
		if a.Moved != "" {
			seats[i].experts = a.Experts
		}
	}
	for k, r := range batch {
		a := answers[k%len(seats)]
		if a.failed() {
			continue // as if it had not been asked
		}
		r.give(a.Next[k/len(seats)])
		f.bytes++
	}
	f.running = slices.DeleteFunc(f.running, func(r *request) bool { return r.left == 0 })
	f.mu.Unlock()
	for i, a := range answers {
		if a.ok && a.Error != "" {
			f.log.Warn("a step failed", "rank", seats[i].rank, "error", a.Error)
		}
	}
	if !slices.ContainsFunc(answers, answered.failed) {
		f.failures = 0
		if answers[0].Moved != "" {
			f.log.Info("experts moved", "busiest", answers[0].Moved, "experts", f.experts())
		}
		return
	}
	if f.failures++; f.failures == maxFailures { // which other ranks cannot mend either
		f.fail("", fmt.Errorf("%d steps in a row failed, the last: %s", maxFailures, reason(answers)))
		f.failures = 0
	}
	f.heal()
}

// maxFailures is how many steps in a row fail before their requests do.
const maxFailures = 4

// reason is the first error of the answers.
func reason(answers []answered) string {
	for _, a := range answers {
		if a.ok && a.Error != "" {
			return a.Error
		}
	}
	return "ranks ended"
}

// draw is the random number of the next byte: the same if the step is made again.
func (r *request) draw() float32 { return rand.New(rand.NewPCG(r.seed, uint64(len(r.text)))).Float32() }

// give hands a byte to the client.
func (r *request) give(b byte) {
	r.text = append(r.text, b)
	r.left--
	r.next <- b
	if r.left == 0 {
		r.end(nil)
	}
}

// fail ends all requests, in another state if there is one.
func (f *front) fail(state string, why error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state = cmp.Or(state, f.state)
	for _, r := range slices.Concat(f.running, f.queue) {
		r.end(why)
	}
	f.running, f.queue = nil, nil
}

// leave ends the ranks in good order.
func (f *front) leave() {
	for _, seats := range [][]*seat{f.seats, append(f.fresh, f.waiting()...)} {
		ask(seats, stopTimeout, sameOrder(&order{Do: "leave"}))
		for _, s := range seats {
			<-s.ended
		}
	}
}
