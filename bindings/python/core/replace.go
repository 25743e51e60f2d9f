package core

import (
	"cmp"
	"context"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
)

// joined is the name under which ranks meet whose groups grow: what a process that joins gives, which does not know the group's own.
const joined = "world"

// meetingAt is how ranks of this Comm's group meet others at an address.
func (c *Comm) meetingAt(addr string, within time.Duration) (comm.Config, error) {
	o := c.options
	o.Env, o.Late, o.Replaces, o.Name = false, false, false, joined
	o.Rank, o.Size, o.LocalRank, o.LocalSize, o.Addr = 0, 0, 0, 0, addr
	conf, err := o.config()
	conf.JoinTimeout = cmp.Or(within, c.timeout())
	return conf, err
}

// Admit submits the making of a Comm of the ranks of this one and n processes, which are opened with Options.Late; see comm.Group.Admit. It
// waits for them as long as within, 0 for as long as operations do. words, put and the ticket's value are as for Split. The Comm stays as
// it is, and is to be closed.
func (c *Comm) Admit(n int, addr string, within time.Duration, words []byte, put func(*Comm) uint64) (Ticket, error) {
	return c.derive(words, put, func(root *comm.Group) (*comm.Group, error) {
		conf, err := c.meetingAt(addr, within)
		if err != nil {
			return nil, err
		}
		return root.Admit(c.ctx, n, conf)
	})
}

// Replace lets a process, which is opened with Options.Replaces, in a lost rank's place; see comm.Group.Replace. It is no operation: those go on
// meanwhile. It waits for the process as long as within, 0 for as long as operations do.
func (c *Comm) Replace(rank int, addr string, within time.Duration) error {
	if _, _, err := c.ready(); err != nil {
		return err
	}
	conf, err := c.meetingAt(addr, within)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	return c.root.Replace(ctx, rank, conf)
}
