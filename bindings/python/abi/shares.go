package main

// #include "switchyard.h"
import "C"

import (
	"github.com/switchyard-moe/switchyard/bindings/python/core"
)

// switchyard_lend offers memory of this rank to another. At a communicator, which stands for the host, it lies at offset of the file behind
// fd, which stays the caller's; on a GPU it is at addr. It waits for nobody. lent is what switchyard_take_back wants.
//
//export switchyard_lend
func switchyard_lend(place C.uint64_t, peer C.int64_t, addr C.uint64_t, bytes C.int64_t, fd C.int32_t, offset C.int64_t, lent *C.uint64_t) C.int32_t {
	return guard(func() error {
		p, err := placeOf(place)
		if err != nil {
			return err
		}
		s, err := p.Share(int(peer), core.Buffer{Addr: uintptr(addr), Bytes: int64(bytes)}, int(fd), int64(offset))
		if err == nil {
			*lent = C.uint64_t(put(s))
		}
		return err
	})
}

// switchyard_take_back waits until the other rank has given the memory back, which may then be freed; times are in microseconds, as core.Waits
// has them. The code is Again when the caller is to ask again.
//
//export switchyard_take_back
func switchyard_take_back(lent C.uint64_t, limit, waited, wait C.int64_t) C.int32_t {
	return guarded(func() (core.Code, error) {
		s, err := core.Get[*core.Shared](handles, uint64(lent))
		if err != nil {
			return 0, err
		}
		over, err := s.Close(waits(limit, waited, wait))
		switch {
		case err != nil:
			return 0, err
		case !over:
			return core.Again, nil
		}
		handles.Drop(uint64(lent))
		return core.OK, nil
	})
}

// switchyard_borrow opens memory that another rank has shared, and waits for it as switchyard_take_back does. borrowed is what
// switchyard_give_back wants, addr and bytes where it is.
//
//export switchyard_borrow
func switchyard_borrow(place C.uint64_t, peer, limit, waited, wait C.int64_t, borrowed, addr *C.uint64_t, bytes *C.int64_t) C.int32_t {
	return guarded(func() (core.Code, error) {
		p, err := placeOf(place)
		if err != nil {
			return 0, err
		}
		o, err := p.OpenShared(int(peer), waits(limit, waited, wait))
		switch {
		case err != nil:
			return 0, err
		case o == nil:
			return core.Again, nil
		}
		at := o.Memory()
		*borrowed, *addr, *bytes = C.uint64_t(put(o)), C.uint64_t(at.Addr), C.int64_t(at.Bytes)
		return core.OK, nil
	})
}

// switchyard_give_back closes borrowed memory.
//
//export switchyard_give_back
func switchyard_give_back(borrowed C.uint64_t) C.int32_t {
	return guard(func() error {
		o, err := core.Get[*core.Opened](handles, uint64(borrowed))
		if err != nil {
			return err
		}
		handles.Drop(uint64(borrowed))
		return o.Close()
	})
}

func waits(limit, waited, wait C.int64_t) core.Waits {
	return core.Waits{Limit: core.Microseconds(int64(limit)), Waited: core.Microseconds(int64(waited)), For: core.Microseconds(int64(wait))}
}
