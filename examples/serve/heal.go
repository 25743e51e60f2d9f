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
	start := time.Now()
	for turn := 0; ; turn++ {
		f.leaveWhole()
		var left []*seat
		o := order{Do: "heal"}
		for _, s := range f.seats {
			if !s.gone() {
				left = append(left, s)
				continue
			}
			if s.host > 0 && turn == 0 { // later a number may be that of the last group or of the next
				o.LeaveOut = append(o.LeaveOut, s.rank)
			}
			f.log.Warn("a rank is lost", "rank", s.rank, "host", s.host, "process", s.pid, "why", fmt.Sprint(s.why))
		}
		none := len(left) == len(f.seats)
		f.mu.Lock()
		f.lost += len(f.seats) - len(left)
		f.seats = left
		f.mu.Unlock()
		if len(left) == 0 {
			return
		}
		answers := ask(left, f.PeerTimeout, sameOrder(&o))
		if f.seated(left, answers) {
			f.log.Info("the ranks go on", "ranks", len(left), "after", time.Since(start).Round(time.Millisecond), "experts", f.experts())
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

// replace gets fresh ranks where some are missing, and lets them in once they have read the model. Steps go on until then.
func (f *front) replace(ctx context.Context) {
	if ctx.Err() != nil || len(f.seats) == 0 {
		return
	}
	if len(f.fresh) == 0 && time.Now().After(f.retry) {
		if err := f.hire(); err != nil {
			f.log.Warn("no fresh rank", "error", err)
			f.drop()
			return
		}
	}
	for _, s := range f.fresh {
		select {
		case a, runs := <-s.replies:
			switch s.heard++; {
			case !runs || a.Error != "":
				f.log.Warn("a fresh rank failed", "host", s.host, "process", s.pid, "error", a.Error)
				f.drop()
				return
			case s.heard == 1:
				s.pid = a.Process
				meet := f.meet
				meet.GPU = s.gpu
				if err := s.orders.Encode(&order{Do: "read", Join: meet}); err != nil {
					s.kill()
				}
			}
		default:
		}
	}
	if len(f.fresh) > 0 && !slices.ContainsFunc(f.fresh, func(s *seat) bool { return s.heard < 2 }) {
		f.admit()
	}
}

// hire gets fresh ranks: one of this host, or of a server on several hosts all of one that is not in the group, once they are there.
func (f *front) hire() error {
	on := make([]int, f.Hosts)
	for _, s := range f.seats {
		on[s.host]++
	}
	n := f.perHost() - on[0]
	if f.Hosts == 1 {
		n = min(n, 1)
	}
	for local := range n {
		s, err := f.sit(local)
		if err != nil {
			return err
		}
		for slices.ContainsFunc(f.seats, func(other *seat) bool { return other.gpu == s.gpu }) {
			s.gpu++
		}
		f.fresh = append(f.fresh, s)
	}
	for host := 1; host < f.Hosts && len(f.fresh) == 0; host++ {
		if on[host] == 0 {
			f.fresh = f.take(host)
		}
	}
	return nil
}

// drop ends the fresh ranks. Others are started after a while.
func (f *front) drop() {
	_ = f.dismiss(f.fresh)
	f.fresh, f.retry = nil, time.Now().Add(again)
}

// admit lets the fresh ranks in, between two steps: the others call Admit where these call Join.
func (f *front) admit() {
	start, fresh, n := time.Now(), f.fresh, len(f.seats)
	failed := func(why string) {
		f.log.Warn("the fresh ranks did not come in", "ranks", len(fresh), "error", why)
		f.drop()
	}
	where, err := f.place(f.seats[0], fresh[0].number)
	if err != nil {
		failed(err.Error())
		return
	}
	here := joining{Addr: where, Secret: f.meet.Secret, Patience: admitTimeout, Fresh: len(fresh)}
	late := f.meet
	late.Late, late.Addr, late.Patience = true, here.Addr, admitTimeout
	if f.Hosts > 1 {
		here.LocalSize, late.LocalSize = f.perHost(), f.perHost()
	}
	seats := slices.Concat(f.seats, fresh)
	answers := ask(seats, f.PeerTimeout, func(i int) *order {
		if i < n {
			return &order{Do: "admit", Join: here}
		}
		j := late
		j.LocalRank = seats[i].local
		return &order{Do: "join", Join: j}
	})
	if !f.seated(seats, answers) {
		failed(reason(answers))
		f.heal()
		return
	}
	f.fresh = nil
	f.mu.Lock()
	f.came += len(fresh)
	f.mu.Unlock()
	for _, s := range fresh {
		f.log.Info("a fresh rank is in", "rank", s.rank, "host", s.host, "process", s.pid, "after", time.Since(start).Round(time.Millisecond),
			"experts", f.experts())
	}
}
