package comm

import (
	"sync"
	"time"
)

// stop closes the links and waits for their goroutines.
func (n *node) stop(ls []link, grace time.Duration) {
	var wg sync.WaitGroup
	for _, l := range ls {
		wg.Go(func() { l.close(grace) })
	}
	wg.Wait()
	n.wg.Wait()
	if n.onStop != nil {
		n.onStop()
	}
}

// kill drops this rank the way a crash would: no goodbye to anybody.
func (n *node) kill() {
	n.mu.Lock()
	if !n.move(nodeKilled) {
		n.mu.Unlock()
		return
	}
	dumb := n.dumb
	var gs []*Group
	for _, g := range n.groups {
		if g.active {
			gs = append(gs, g)
		}
	}
	var ls []link
	for _, l := range n.links {
		if l != nil {
			ls = append(ls, l)
		}
	}
	n.mu.Unlock()
	for _, l := range ls {
		l.cut()
	}
	for _, g := range gs {
		g.failed(n.killed(), false)
	}
	n.stop(nil, 0)
	if dumb != nil {
		dumb()
	}
}

func (n *node) killed() *failure {
	return &failure{code: failLost, culprit: n.id, detail: "killed"}
}
