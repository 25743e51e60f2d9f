package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// again is how long the front waits before it starts another fresh rank where one has failed.
const again = 5 * time.Second

// heal goes on with the ranks that are left. They make a smaller group, and load what experts of lost ranks come to them. A rank that fails
// while none is lost is ended, so each turn has fewer ranks or is the last.
func (f *front) heal() {
	begin := time.Now()
	for {
		var left []*seat
		for _, s := range f.seats {
			if !s.gone() {
				left = append(left, s)
				continue
			}
			f.log.Warn("a rank is lost", "rank", s.rank, "process", s.pid, "why", fmt.Sprint(s.why))
		}
		none := len(left) == len(f.seats)
		f.mu.Lock()
		f.lost += len(f.seats) - len(left)
		f.seats = left
		f.mu.Unlock()
		if len(left) == 0 {
			return
		}
		answers := ask(left, f.PeerTimeout, sameOrder(&order{Do: "heal"}))
		if f.seated(left, answers) {
			f.log.Info("the ranks go on", "ranks", len(left), "after", time.Since(begin).Round(time.Millisecond), "experts", f.experts())
			return
		}
		f.log.Warn("the ranks that are left failed", "error", reason(answers))
		if none && !slices.ContainsFunc(left, (*seat).gone) {
			for i, a := range answers {
				if a.failed() {
					left[i].kill()
					<-left[i].ended
				}
			}
		}
	}
}

// seated notes where ranks are in a new group, in whose order seats then are, and whether all have come to it.
func (f *front) seated(seats []*seat, answers []answered) bool {
	if slices.ContainsFunc(answers, answered.failed) {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, a := range answers {
		seats[i].rank, seats[i].experts, seats[i].waited = a.Rank, a.Experts, nil
	}
	f.seats = slices.SortedFunc(slices.Values(seats), func(a, b *seat) int { return a.rank - b.rank })
	return true
}

// experts says which experts are on which ranks.
func (f *front) experts() string {
	var all []string
	for _, s := range f.seats {
		all = append(all, fmt.Sprintf("%d:%v", s.rank, s.experts))
	}
	return strings.Join(all, " ")
}

// replace starts a fresh rank where one is missing, and lets it in once it has read the model. Steps go on until then.
func (f *front) replace(ctx context.Context) {
	switch {
	case ctx.Err() != nil || len(f.seats) == 0:
		return
	case f.fresh == nil && len(f.seats) < f.Ranks && time.Now().After(f.retry):
		s, err := f.sit()
		if err != nil {
			f.log.Warn("no fresh rank", "error", err)
			f.retry = time.Now().Add(again)
			return
		}
		for slices.ContainsFunc(f.seats, func(other *seat) bool { return other.gpu == s.gpu }) {
			s.gpu++
		}
		s.rank, f.fresh = -1, s
	case f.fresh == nil:
		return
	}
	select {
	case a, runs := <-f.fresh.replies:
		switch {
		case !runs || a.Error != "":
			f.log.Warn("a fresh rank failed", "process", f.fresh.pid, "error", a.Error)
			f.drop()
		case !f.reading:
			f.reading = true
			meet := f.meet
			meet.GPU = f.fresh.gpu
			if err := f.fresh.orders.Encode(&order{Do: "read", Join: meet}); err != nil {
				f.drop()
			}
		default:
			f.admit()
		}
	default:
	}
}

// drop ends the fresh rank. Another one is started after a while.
func (f *front) drop() {
	f.fresh.kill()
	<-f.fresh.ended
	f.fresh, f.reading, f.retry = nil, false, time.Now().Add(again)
}

// admit lets the fresh rank in, between two steps: the others call Admit where it calls Join.
func (f *front) admit() {
	begin, fresh := time.Now(), f.fresh
	here := joining{Addr: fmt.Sprintf("%s-%d", f.meet.Addr, fresh.number), Secret: f.meet.Secret, Patience: admitTimeout}
	late := f.meet
	late.Late, late.Addr, late.Patience = true, here.Addr, admitTimeout
	seats := append(slices.Clone(f.seats), fresh)
	answers := ask(seats, f.PeerTimeout, func(i int) *order {
		if seats[i] == fresh {
			return &order{Do: "join", Join: late}
		}
		return &order{Do: "admit", Join: here}
	})
	if !f.seated(seats, answers) {
		f.log.Warn("the fresh rank did not come in", "process", fresh.pid, "error", reason(answers))
		f.drop()
		f.heal()
		return
	}
	f.fresh, f.reading = nil, false
	f.mu.Lock()
	f.came++
	f.mu.Unlock()
	f.log.Info("a fresh rank is in", "rank", fresh.rank, "process", fresh.pid, "after", time.Since(begin).Round(time.Millisecond),
		"experts", f.experts())
}
