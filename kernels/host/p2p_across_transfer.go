package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

func (f *farPair) transfer(x *transferring) error {
	f.a.active.Add(1)
	defer f.a.active.Add(-1)
	x.w.from = time.Now()
	switch x.a.Kind {
	case kernels.PutTransfer:
		return f.write(x)
	case kernels.GetTransfer:
		return f.read(x)
	case kernels.SignalTransfer:
		return f.until(x, func() (bool, error) { return f.signal(x.a.Semaphore) })
	case kernels.WaitTransfer:
		return f.until(x, func() (bool, error) { return f.consume(x.a.Semaphore) })
	}
	return nil
}

// until calls step until it is done, with f locked.
func (f *farPair) until(x *transferring, step func() (bool, error)) error {
	for {
		f.mu.Lock()
		done, err := step()
		f.mu.Unlock()
		switch {
		case err != nil:
			return x.w.fail(f, err)
		case done:
			x.w.busy()
			return nil
		case f.failed.late(&x.a.Turn):
			return f.failed.error()
		}
		x.w.rail = f.alone()
		if err := x.w.idle(f); err != nil {
			err = x.w.fail(f, err)
			f.failed.fail(&x.a.Turn, err)
			return err
		}
	}
}

func (f *farPair) shows(x *transferring) (seen string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch word := signalsWord + x.a.Semaphore; x.a.Kind {
	case kernels.WaitTransfer:
		seen = fmt.Sprintf("it has signalled %d times, and this rank has consumed %d", f.count(word), f.consumed[x.a.Semaphore])
		if have, n := f.count(putsWord), f.before(x.a.Semaphore); f.count(word) > f.consumed[x.a.Semaphore] && have < n {
			seen = fmt.Sprintf("%d of %d parts of its puts have come", have, n)
		}
	case kernels.SignalTransfer:
		seen = fmt.Sprintf("it has not consumed the last %d signals of semaphore %d", signalLog, x.a.Semaphore)
	case kernels.GetTransfer:
		seen = fmt.Sprintf("%d of %d parts that this rank has asked for have come", f.count(repliesWord), f.asked)
	default:
		seen = "it takes no more bytes"
	}
	return seen
}

func (f *farPair) write(x *transferring) error {
	src, place := x.a.Buffer.Mem, x.a.Place
	var leaves uint64
	for len(src) > 0 {
		n := min(len(src), putBytes)
		f.mu.Lock()
		err := f.put(place, src[:n], putsWord)
		f.mu.Unlock()
		if err == nil {
			leaves, _, err = f.a.hosts.Rail.Left()
		}
		if err != nil {
			return x.w.fail(f, err)
		}
		x.w.moved(int64(n))
		src, place = src[n:], place+int64(n)
	}
	if leaves == 0 {
		return nil
	}
	var had uint64
	err := f.until(x, func() (bool, error) {
		_, left, err := f.a.hosts.Rail.Left()
		if left != had {
			had, f.heard = left, time.Now()
		}
		return left >= leaves, err
	})
	if errors.Is(err, comm.ErrTimeout) { // src is the caller's again: nothing may read it any more
		ctx, cancel := context.WithTimeoutCause(context.Background(), restFor, comm.ErrTimeout)
		defer cancel()
		_ = f.a.hosts.Rail.Flush(ctx)
	}
	return err
}

// read asks the other rank for parts, and copies them as they come.
func (f *farPair) read(x *transferring) error {
	dst, place := x.a.Buffer.Mem, x.a.Place
	part := f.a.c.StagingBytes
	var asked, last uint64 // parts of this get, and the number of the last one of any
	f.gets.Lock()
	defer f.gets.Unlock()
	first := f.asked
	return f.until(x, func() (bool, error) {
		came := f.count(repliesWord)
		for len(dst) > 0 && came > first+last {
			n := min(int64(len(dst)), part)
			copy(dst[:n], f.e.space.Range(f.e.space.Rank, f.a.slot(f.a.me.host, f.rank, farSlots+(first+last)%getSlots), n))
			x.w.moved(n)
			dst = dst[n:]
			last++
			f.heard = time.Now()
		}
		for left := int64(len(dst)) - int64(asked-last)*part; left > 0 && f.asked < came+getSlots; left -= part {
			k, n := f.asked%getSlots, min(left, part)
			if err := f.put(f.there+f.a.asksAt()+int64(k)*farRecord, record(f.asks[k], uint64(place), uint64(n)), asksWord); err != nil {
				return false, err
			}
			f.asked++
			asked++
			place += n
		}
		return len(dst) == 0, nil
	})
}

// signal counts a semaphore up, once there is room in its log. The record says how many parts of puts come before it. f is locked.
func (f *farPair) signal(semaphore int) (bool, error) {
	word := signalsWord + semaphore
	k := f.puts[word]
	if k >= f.count(word+f.a.c.Semaphores)*(signalLog/2)+signalLog {
		return false, nil
	}
	at := int64(semaphore*signalLog) + int64(k%signalLog)
	return true, f.put(f.there+f.a.signalsAt()+8*at, record(f.signals[at], f.puts[putsWord]), word)
}

// consume consumes a signal, once the puts before it have landed. f is locked.
func (f *farPair) consume(semaphore int) (bool, error) {
	word, n := signalsWord+semaphore, f.consumed[semaphore]
	if f.count(word) == n {
		return false, nil
	}
	if f.count(putsWord) < f.before(semaphore) {
		return false, nil
	}
	f.e.order(f.e.space.Rank)
	if f.consumed[semaphore]++; f.consumed[semaphore]%(signalLog/2) == 0 {
		return true, f.put(0, nil, word+f.a.c.Semaphores)
	}
	return true, nil
}

// before is how many parts of puts come before the next signal of a semaphore, which is here. f is locked.
func (f *farPair) before(semaphore int) uint64 {
	at := int64(semaphore*signalLog) + int64(f.consumed[semaphore]%signalLog)
	return f.number(f.here+f.a.signalsAt()+8*at, 0)
}

// serve sends the parts that the other rank has asked for. f is locked.
func (f *farPair) serve() error {
	for f.served.Load() < f.count(asksWord) {
		k := f.served.Load() % getSlots
		at := f.here + f.a.asksAt() + int64(k)*farRecord
		place, n := int64(f.number(at, 0)), int64(f.number(at, 1))
		f.served.Add(1)
		if place < 0 || n < 0 || n > f.a.c.StagingBytes || place > f.a.hosts.Limit-n {
			place, n = 0, 0 // not of this library
		}
		if err := f.put(f.a.slot(f.host, f.a.hosts.Rank, farSlots+k), f.e.space.Range(f.e.space.Rank, place, n), repliesWord); err != nil {
			return err
		}
	}
	return nil
}

// landed wakes tend if there is something for it. It comes after bytes have landed.
func (a *pointsAcross) landed() {
	if a.aside.Load() > 0 {
		a.call()
		return
	}
	for _, f := range a.pairs {
		if f.count(asksWord) != f.served.Load() {
			a.call()
			return
		}
	}
}

func (a *pointsAcross) call() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// tend serves gets and moves messages that are copied aside, until stop.
func (a *pointsAcross) tend() {
	defer close(a.over)
	for {
		select {
		case <-a.quit:
			return
		case <-a.wake:
		}
		for _, f := range a.pairs {
			f.mu.Lock()
			moved, err := false, f.serve()
			if err == nil && a.aside.Load() > 0 {
				moved, err = f.progress()
			}
			f.mu.Unlock()
			if err != nil {
				return // the group fails, or the heap closes
			}
			if moved {
				f.e.ring(f.e.space.Rank)
			}
		}
	}
}

// stop ends tend.
func (a *pointsAcross) stop(e *Engine) {
	a.once.Do(func() {
		e.landing(a, nil)
		close(a.quit)
		<-a.over
	})
}
