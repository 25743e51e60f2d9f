package main

// #include <stdlib.h>
// #include "switchyard.h"
import "C"

import (
	"fmt"
	"time"
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// switchyard_new_id makes an ID for ranks that meet at host, or on this host if it is empty, and writes it, 0-terminated, to id, which
// holds room bytes.
//
//export switchyard_new_id
func switchyard_new_id(host *C.char, id *C.char, room C.int64_t) C.int32_t {
	return guard(func() error {
		text, err := core.NewID(C.GoString(host))
		if err != nil {
			return err
		}
		return write(id, room, text)
	})
}

// write writes text, 0-terminated, to a caller's room bytes.
func write(to *C.char, room C.int64_t, text string) error {
	if len(text) >= int(room) {
		return fmt.Errorf("switchyard: %w: room for %d bytes, the text has %d", core.ErrInvalid, int64(room), len(text))
	}
	out := unsafe.Slice((*byte)(unsafe.Pointer(to)), int(room))
	out[copy(out, text)] = 0
	return nil
}

// switchyard_check_algorithms says what is wrong with the plans and exchanges of the options of a group to be.
//
//export switchyard_check_algorithms
func switchyard_check_algorithms(opts *C.char) C.int32_t {
	return guard(func() error {
		var o core.Options
		if err := options(opts, &o); err != nil {
			return err
		}
		return o.CheckAlgorithms()
	})
}

// switchyard_listen opens this rank's socket and writes its address, 0-terminated, to addr, which holds room bytes.
//
//export switchyard_listen
func switchyard_listen(opts *C.char, listener *C.uint64_t, addr *C.char, room C.int64_t) C.int32_t {
	return guard(func() error {
		var o core.Options
		if err := options(opts, &o); err != nil {
			return err
		}
		l, err := core.Listen(o)
		if err != nil {
			return err
		}
		if err := write(addr, room, l.Addr()); err != nil {
			_ = l.Close()
			return err
		}
		*listener = C.uint64_t(put(l))
		return nil
	})
}

// switchyard_unlisten gives an address up that was not joined with.
//
//export switchyard_unlisten
func switchyard_unlisten(listener C.uint64_t) C.int32_t {
	return guard(func() error {
		l, err := core.Get[*comm.Listener](handles, uint64(listener))
		if err != nil {
			return err
		}
		handles.Drop(uint64(listener))
		return l.Close()
	})
}

// switchyard_open makes a communicator and begins its join, whose ticket is 1. words is where the number of its
// operations that have run is kept, 64 bits.
//
//export switchyard_open
func switchyard_open(opts *C.char, communicator *C.uint64_t, words *C.uint64_t) C.int32_t {
	return guard(func() error {
		var o core.Options
		if err := options(opts, &o); err != nil {
			return err
		}
		var l *comm.Listener
		if o.Listener != 0 {
			var err error
			if l, err = core.Get[*comm.Listener](handles, o.Listener); err != nil {
				return err
			}
			handles.Drop(o.Listener)
		}
		w := newWords()
		c, err := core.Open(o, l, w)
		if err != nil {
			return err
		}
		*communicator, *words = C.uint64_t(put(c)), C.uint64_t(shm.Addr(w))
		return nil
	})
}

// switchyard_rank is who this rank is, once the join is complete.
//
//export switchyard_rank
func switchyard_rank(communicator C.uint64_t, rank, size *C.int32_t) C.int32_t {
	return guard(func() error {
		c, err := core.Get[*core.Comm](handles, uint64(communicator))
		if err != nil {
			return err
		}
		r, n, err := c.Rank()
		*rank, *size = C.int32_t(r), C.int32_t(n)
		return err
	})
}

// switchyard_split makes a subgroup of the ranks that pass the same color, ordered by key. The ticket's value is its
// communicator, or 0 for a negative color; words is as in switchyard_open.
//
//export switchyard_split
func switchyard_split(communicator C.uint64_t, color, key C.int64_t, words *C.uint64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(c *core.Comm) (core.Ticket, error) {
		w := newWords()
		*words = C.uint64_t(shm.Addr(w))
		return c.Split(int(color), int(key), w, put[*core.Comm])
	})
}

// switchyard_shrink makes a communicator of the ranks that are left, without the n ranks of leave_out, and waits for them for within
// microseconds, 0 for as long as operations do. The ticket's value is the communicator; words is as in switchyard_open.
//
//export switchyard_shrink
func switchyard_shrink(communicator C.uint64_t, leaveOut *C.int64_t, n, within C.int64_t, words *C.uint64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(c *core.Comm) (core.Ticket, error) {
		if err := length("ranks to leave out", n); err != nil {
			return 0, err
		}
		var out []int
		for _, r := range numbers(leaveOut, n) {
			out = append(out, int(r))
		}
		w := newWords()
		*words = C.uint64_t(shm.Addr(w))
		return c.Shrink(out, core.Microseconds(int64(within)), w, put[*core.Comm])
	})
}

// switchyard_admit makes a communicator of the ranks and n processes that come to addr, and waits for them for within microseconds, 0 for as
// long as operations do. The ticket's value is the communicator; words is as in switchyard_open.
//
//export switchyard_admit
func switchyard_admit(communicator C.uint64_t, n C.int64_t, addr *C.char, within C.int64_t, words *C.uint64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(c *core.Comm) (core.Ticket, error) {
		w := newWords()
		*words = C.uint64_t(shm.Addr(w))
		return c.Admit(int(n), C.GoString(addr), core.Microseconds(int64(within)), w, put[*core.Comm])
	})
}

// switchyard_replace lets the process that comes to addr in a lost rank's place. It returns when it is in, after within microseconds at most, 0
// for as long as operations wait. Operations go on meanwhile.
//
//export switchyard_replace
func switchyard_replace(communicator C.uint64_t, rank C.int64_t, addr *C.char, within C.int64_t) C.int32_t {
	at := C.GoString(addr)
	return guard(func() error {
		c, err := core.Get[*core.Comm](handles, uint64(communicator))
		if err == nil {
			err = c.Replace(int(rank), at, core.Microseconds(int64(within)))
		}
		return err
	})
}

// switchyard_close ends a communicator, together with all its ranks. keep leaves the symmetric memory mapped. The caller
// drops the handle when the ticket is complete.
//
//export switchyard_close
func switchyard_close(communicator C.uint64_t, keep C.int32_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(c *core.Comm) (core.Ticket, error) { return c.Close(keep != 0) })
}

// switchyard_set_timeout bounds the waits of a rank's operations behind it, in microseconds.
//
//export switchyard_set_timeout
func switchyard_set_timeout(communicator C.uint64_t, timeout C.int64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(c *core.Comm) (core.Ticket, error) {
		return c.SetTimeout(time.Duration(timeout) * time.Microsecond)
	})
}

// switchyard_abort fails a group on all its ranks.
//
//export switchyard_abort
func switchyard_abort(communicator C.uint64_t, reason *C.char) C.int32_t {
	return guard(func() error {
		c, err := core.Get[*core.Comm](handles, uint64(communicator))
		if err == nil {
			c.Abort(C.GoString(reason))
		}
		return err
	})
}

// switchyard_abandon ends a communicator without its peers. Operations under way get drain milliseconds and are aborted
// then; afterwards no memory of the caller is in use. keep leaves the symmetric memory mapped.
//
//export switchyard_abandon
func switchyard_abandon(communicator C.uint64_t, drain C.int64_t, keep C.int32_t) C.int32_t {
	return guard(func() error {
		c, err := core.Get[*core.Comm](handles, uint64(communicator))
		if err == nil {
			c.Abandon(time.Duration(drain)*time.Millisecond, keep != 0)
		}
		return err
	})
}
