package main

// #include "switchyard.h"
import "C"

import (
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
)

// switchyard_observe tells the state of ranks: 0 asks for those of this process and 1 for those of all processes of this user on this host, as JSON,
// 2 for the latter as a table, 3 for the last calls of all of them as JSON, 4 for why their steps take their time as JSON and 5 as a table,
// which takes a second, 6 for a timeline as a Chrome trace, and 7 and 8 for what 1 and 2 tell with findings of the next second. Where job is not
// empty they are those of the one job whose identity or program begins so. text holds room bytes and gets the answer, 0-terminated, if that has room; needed gets its length with the 0.
//
//export switchyard_observe
func switchyard_observe(what C.int32_t, job, text *C.char, room C.int64_t, needed *C.int64_t) C.int32_t {
	return guard(func() error {
		answer, err := core.Observe(core.Observed(what), C.GoString(job))
		if err == nil {
			give(answer, text, room, needed)
		}
		return err
	})
}

// switchyard_records writes the last calls of each rank of this user's job whose identity or program begins with job, for torch's analyzer of flight records: files
// of a prefix and the rank's number. Their names are a list in JSON, given as by switchyard_observe.
//
//export switchyard_records
func switchyard_records(prefix, job, text *C.char, room C.int64_t, needed *C.int64_t) C.int32_t {
	return guard(func() error {
		answer, err := core.Records(C.GoString(prefix), C.GoString(job))
		if err == nil {
			give(answer, text, room, needed)
		}
		return err
	})
}

// switchyard_doctor looks at this machine, and has two processes of a command exchange bytes. Findings are a list in JSON, given as by
// switchyard_observe.
//
//export switchyard_doctor
func switchyard_doctor(opts, text *C.char, room C.int64_t, needed *C.int64_t) C.int32_t {
	return guard(func() error {
		var o core.DoctorOptions
		if err := options(opts, &o); err != nil {
			return err
		}
		answer, err := core.Doctor(o)
		if err == nil {
			give(answer, text, room, needed)
		}
		return err
	})
}

// give puts an answer and a 0 into text, if that has room.
func give(answer []byte, text *C.char, room C.int64_t, needed *C.int64_t) {
	if *needed = C.int64_t(len(answer) + 1); room >= *needed {
		out := unsafe.Slice((*byte)(unsafe.Pointer(text)), int(room))
		out[copy(out, answer)] = 0
	}
}

// switchyard_unmet is a rank of a process group whose ranks have not met. It counts calls that torch makes, until switchyard_met.
//
//export switchyard_unmet
func switchyard_unmet(opts *C.char, unmet *C.uint64_t) C.int32_t {
	return guard(func() error {
		var o core.UnmetOptions
		if err := options(opts, &o); err != nil {
			return err
		}
		u, err := core.NewUnmet(o)
		if err != nil {
			return err
		}
		*unmet = C.uint64_t(put(u))
		return nil
	})
}

// switchyard_met ends such a rank. The communicator, unless it is 0, takes over its counts.
//
//export switchyard_met
func switchyard_met(unmet, communicator C.uint64_t) C.int32_t {
	return guard(func() error {
		u, err := core.Get[*core.Unmet](handles, uint64(unmet))
		if err != nil {
			return err
		}
		var c *core.Comm
		if communicator != 0 {
			if c, err = core.Get[*core.Comm](handles, uint64(communicator)); err != nil {
				return err
			}
		}
		handles.Drop(uint64(unmet))
		return u.Met(c)
	})
}

// switchyard_fell_back counts a call that one of torch's backends makes: on a communicator, or on a rank of switchyard_unmet.
//
//export switchyard_fell_back
func switchyard_fell_back(counts C.uint64_t, operation, backend, reason *C.char) C.int32_t {
	return guard(func() error {
		c, err := core.Get[core.Counts](handles, uint64(counts))
		if err != nil {
			return err
		}
		return core.FellBack(c, C.GoString(operation), C.GoString(backend), C.GoString(reason))
	})
}
