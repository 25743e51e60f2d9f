package core

import (
	"context"
	"errors"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
)

// grace is how long an operation may go on after a peer has left: it may have everything from that peer already.
const grace = time.Second

// watchPeers has this rank learn of peers that leave. A process that ends without leaving fails the group, which ends
// waits for it at once; one that leaves in good order does not, and an operation that waits for it would do so until its
// timeout. A call of the control plane does end then, if the rank that left had not made it yet. So the ranks make calls
// that are never complete, in groups of their own: for every bit of a rank's number one that ranks with a 0 there do not
// make, and one that those with a 1 do not. Any two ranks differ in a bit.
func (c *Comm) watchPeers(ctx context.Context, g *comm.Group) error {
	watching, stop := context.WithCancel(c.ctx)
	c.unwatch = stop
	for bit := 0; 1<<bit < g.Size(); bit++ {
		for absent := range 2 {
			w, err := g.Split(ctx, 0, 0)
			if err != nil {
				return err
			}
			w.Mute() // whoever looks on wants to hear of calls that somebody made
			c.mu.Lock()
			c.watched = append(c.watched, w)
			c.mu.Unlock()
			if g.Rank()>>bit&1 != absent {
				go c.watch(watching, w)
			}
		}
	}
	return nil
}

// watch waits for a peer to leave, and then for an operation that waits for it.
func (c *Comm) watch(ctx context.Context, w *comm.Group) {
	err := w.Barrier(ctx)
	var gone *comm.PeerError
	if !errors.As(err, &gone) || !errors.Is(err, comm.ErrPeerLost) {
		return // this rank has left, the group has failed, or a dispatcher has masks
	}
	type state struct {
		running Ticket
		waiting uint64 // the first request that may wait for that peer
	}
	var was state
	since := time.Now()
	for {
		select {
		case <-c.stopped:
			return
		case <-c.group.Done():
			return
		case <-time.After(grace / 10):
		}
		// Whether a GPU waits cannot be asked without disturbing those who capture its work into a graph. Nothing on it
		// that waits for that peer still, a while after, will see it come.
		t, busy := c.current()
		switch now := (state{t, c.requests.oldest(gone.Rank)}); {
		case !busy && now.waiting == 0 && len(c.onGPUs()) == 0 || now != was:
			was, since = now, time.Now()
		case time.Since(since) > grace:
			c.mu.Lock()
			leaving := c.leaving
			c.mu.Unlock()
			if !leaving {
				c.group.ReportLeft(gone.Rank)
			}
			return
		}
	}
}
